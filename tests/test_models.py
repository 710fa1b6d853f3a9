"""The networks: sizes as published, reproducible, and clear about images that do not fit."""

import pytest
import torch

from dpivon import models


@pytest.mark.parametrize(("name", "count"), [("lenet", 62_006), ("tanh_cnn", 550_570), ("mlp", 197_322)])
def test_parameter_counts(name, count):
    model = models.build(name, (3, 32, 32), 10)
    assert sum(p.numel() for p in model.parameters()) == count
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("lenet", (3, 16, 20)), ("tanh_cnn", (1, 8, 9))])
def test_other_image_sizes(name, shape):
    assert models.build(name, shape, 4)(torch.zeros(1, *shape)).shape == (1, 4)


def test_seed_fixes_the_weights_and_leaves_the_global_state():
    state = torch.get_rng_state()
    first, again, other = (models.build("mlp", (1, 8, 8), 10, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    unseeded = [next(models.build("mlp", (1, 8, 8), 10).parameters()) for _ in range(2)]
    assert not torch.equal(*unseeded)


def test_errors_name_value_and_remedy():
    with pytest.raises(ValueError, match=r"unknown model 'resnet'; choose one of mlp, lenet, tanh_cnn"):
        models.build("resnet", (3, 32, 32), 10)
    with pytest.raises(ValueError, match=r"at least 16 x 16, got 8 x 8; use model 'mlp'"):
        models.build("lenet", (1, 8, 8), 10)
    with pytest.raises(ValueError, match=r"at least 8 x 8, got 8 x 7"):
        models.build("tanh_cnn", (1, 8, 7), 10)

"""A place depends on the example alone, in every batch and under vectorization, and all places are used alike."""

import math

import pytest
import torch
from torch.func import vmap

from dpivon import data
from dpivon.assignment import BASE, PRIME, hashed, place


def test_it_is_the_formula():
    x = torch.tensor([[0.25, -1.0, 0.5]])
    total = sum(pow(BASE, j + 1, PRIME) * round(2**16 * v) % PRIME for j, v in enumerate((0.25, -1.0, 0.5)))
    assert place(x, 1000).tolist() == [total % PRIME % 1000]


def test_it_depends_on_the_example_alone():
    x = data.digits().x_train
    whole = place(x, 7)
    assert torch.equal(place(x[100:200], 7), whole[100:200])
    assert torch.equal(torch.stack([place(x[i : i + 1], 7)[0] for i in range(50)]), whole[:50])
    alone = vmap(lambda one: hashed(one.unsqueeze(0), 7), randomness="different")(x[:50]).squeeze(1)
    assert torch.equal(alone, whole[:50])
    assert torch.equal(place(x[:, :, :, :].flip(0), 7).flip(0), whole)


@pytest.mark.parametrize("places", [2, 4, 10])
def test_places_are_evenly_filled_within_each_class_too(places):
    images = data.digits()
    found = place(images.x_train, places)
    counts = torch.bincount(found, minlength=places).double()
    expected = images.n / places
    assert ((counts - expected).square() / expected).sum() < 4 * places + 10  # chi-square
    for k in range(10):
        share = (found[images.y_train == k] == 0).double().mean()
        assert abs(float(share) - 1 / places) < 4 * (1 / places / 140) ** 0.5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_pixels_that_are_no_numbers_are_refused_and_hashed_under_vectorization(bad):
    x = torch.rand(5, 2, 3)
    x[1, 1, 2], x[4, 0, 0], x[4, 0, 1] = bad, bad, bad
    with pytest.raises(
        ValueError, match=r"2 of 5 examples have pixels that are NaN or infinite; repair or remove them"
    ):
        place(x, 4)
    found = vmap(lambda one: hashed(one.unsqueeze(0), 4))(x).squeeze(1)
    assert torch.equal(found[[0, 2, 3]], place(x[[0, 2, 3]], 4))


def test_no_place_is_refused():
    with pytest.raises(ValueError, match="places must be at least 1, got 0"):
        place(torch.zeros(1, 2), 0)

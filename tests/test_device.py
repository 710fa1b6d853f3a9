"""Training on a GPU: refused by name where there is none, and the same mechanism where there is one."""

from dataclasses import replace

import pytest
import torch

from dpivon import data, mechanism, methods, train

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = train.Config(method="dp-sgd", batch_size=100, epochs=1, seed=0)


def test_a_missing_gpu_is_named():
    missing = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ValueError, match=rf"device '{missing}' is not here \({torch.cuda.device_count()} GPUs\)"):
        train.run(SMALL, device=missing)


def test_an_unknown_device_is_named():
    with pytest.raises(ValueError, match="device 'gpu' is unknown; use 'cpu'"):
        data.digits().to("gpu")


def test_images_already_there_are_not_copied():
    digits = data.digits()
    assert digits.to("cpu") is digits


def test_layers_on_the_cpu_draw_from_torch_s_global_generator():
    assert train.layers_source(torch.device("cpu")) is torch.default_generator


@needs_gpu
@pytest.mark.parametrize("name", list(methods.METHODS))
def test_every_method_trains_on_a_gpu(name):
    private = methods.get(name).private
    record = train.run(replace(SMALL, method=name, epsilon=3.0 if private else None), device="cuda", shifted=True)
    assert record["results"]["mean"]["accuracy"] > 0.1
    assert record["hardware"]["gpu"]


@needs_gpu
def test_unseeded_noise_on_a_gpu_never_repeats():
    draws = [torch.randn(8, generator=mechanism.new_generator(device="cuda"), device="cuda") for _ in range(2)]
    assert not torch.equal(*draws)


@needs_gpu
def test_the_noise_on_a_gpu_has_the_stated_size():
    digits = data.digits().to("cuda")
    now = train.Run(train.resolve(replace(SMALL, noise_multiplier=2.0)), digits)
    now.gradient(now.model, now.loss, digits.x_train[:0], digits.y_train[:0])
    noise = torch.cat([p.grad.flatten() for p in now.model.parameters()])
    assert float(noise.std()) == pytest.approx(2.0 / 100, rel=0.05)

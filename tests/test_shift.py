"""Corrupted and strange images: of the stated size and kind, the same at each call; and what is measured on them."""

import math

import pytest
import torch

from dpivon import data, shift

x = 0.5 * torch.tanh(torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(scope="module")
def color():
    y = torch.arange(6) % 2
    return data.Images("color", x, y, x, y, ("a", "b"))


def test_noise_has_the_stated_size():
    added = shift.corrupt(torch.zeros(20, 3, 32, 32), "noise", 1)
    assert added.std() == pytest.approx(0.1, rel=0.02)
    assert added.mean() == pytest.approx(0, abs=0.002)


def test_blur_is_a_normal_kernel_and_keeps_the_channels_apart():
    point = torch.zeros(1, 3, 32, 32)
    point[0, 1, 16, 16] = 1.0
    blurred = shift.corrupt(point, "blur", 3)  # one pixel wide
    assert blurred[0, 1, 16, 16] == pytest.approx(1 / (2 * math.pi), rel=0.01)
    assert blurred[0, 1, 16, 17] / blurred[0, 1, 16, 16] == pytest.approx(math.exp(-1 / 2), rel=0.01)
    assert blurred[0, [0, 2]].abs().max() == 0


def test_contrast_shrinks_around_each_image_s_mean():
    low = shift.corrupt(x, "contrast", 2)
    assert torch.allclose(low.mean((1, 2, 3)), x.mean((1, 2, 3)), atol=1e-6)
    assert torch.allclose(low.std((1, 2, 3)), 0.5 * x.std((1, 2, 3)), atol=1e-6)


@pytest.mark.parametrize("kind", shift.STRENGTHS)
def test_corruption_grows_with_strength_repeats_and_leaves_the_input_alone(kind):
    before = x.clone()
    distances = [float((shift.corrupt(x, kind, k) - x).norm()) for k in range(1, 6)]
    assert distances == sorted(distances)
    assert distances[0] > 0
    assert torch.equal(shift.corrupt(x, kind, 5), shift.corrupt(x, kind, 5))
    assert torch.equal(x, before)
    assert shift.corrupt(x, kind, 5).abs().max() <= 1


@pytest.mark.parametrize("kind", shift.STRANGERS)
def test_strangers_have_the_form_of_test_images(color, kind):
    strange = shift.strangers(color, kind, 5)
    assert strange.shape == (5, 3, 32, 32)
    assert strange.dtype == torch.float32
    assert strange.abs().max() <= 1
    assert strange.std() > 0.1
    assert torch.equal(strange, shift.strangers(color, kind, 5))


def test_shuffled_images_keep_their_pixels(color):
    assert torch.equal(shift.strangers(color, "shuffled", 6).flatten(2).sort().values, x.flatten(2).sort().values)


def test_pieces_of_a_photograph_are_its_pixels_once():
    photograph = torch.arange(3 * 64 * 96).float().view(3, 64, 96)
    pieces = shift.tiles(photograph, 32, 32)
    assert pieces.shape == (6, 3, 32, 32)
    assert torch.equal(pieces.flatten().sort().values, photograph.flatten())
    assert torch.equal(pieces[1], photograph[:, :32, 32:64])


def test_clouds_are_as_rough_as_stated(color):
    """Power falls with the square of the frequency: a factor four when it doubles."""
    power = torch.fft.fft2(shift.strangers(color, "clouds", 400)).abs().square().mean((0, 1))
    assert power[0, 4] / power[0, 8] == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: shift.corrupt(x, "fog", 1), "unknown corruption 'fog'; choose one of noise"),
        (lambda c: shift.corrupt(x, "noise", 6), "strength must be 1, 2, 3, 4 or 5, got 6"),
        (lambda c: shift.strangers(c, "fog", 1), "unknown strangers 'fog'"),
        (lambda c: shift.strangers(c, "clouds", 0), "n must be at least 1, got 0"),
        (lambda c: shift.strangers(data.digits(), "digits", 1), "digits are familiar"),
    ],
)
def test_wrong_arguments_are_named(color, call, words):
    with pytest.raises(ValueError, match=words):
        call(color)


def test_evaluation_reports_what_a_model_does(color):
    """A model that sees only how much an image varies: certain of class 0 where it does, unsure where not."""

    def log_probs(images):
        return torch.stack([20 * images.std((1, 2, 3)), torch.zeros(len(images))], 1).log_softmax(1)

    found = shift.evaluate(log_probs, color, limit=4)
    assert found["examples"] == 4
    assert found["clean"]["accuracy"] == 0.5
    assert [(c["kind"], c["strength"]) for c in found["corrupted"]][:6] == [
        *(("noise", k) for k in range(1, 6)),
        ("blur", 1),
    ]
    contrast = [c["entropy"] for c in found["corrupted"] if c["kind"] == "contrast"]
    assert contrast == sorted(contrast)
    assert contrast[0] > found["clean"]["entropy"]
    assert set(found["strangers"]) == set(shift.STRANGERS)
    assert found["strangers"]["shuffled"]["auroc"] == pytest.approx(0.5, abs=0.25)  # the same variance, to rounding

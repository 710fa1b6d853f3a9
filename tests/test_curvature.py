"""The curvature estimators against theory: expectations, zeros, and what each leaves of the noise."""

import math

import pytest
import torch
from scipy.stats import norm

from dpivon import curvature

D = 400_000


def group(**changes):
    return {"ess": 1000.0, "scale": 1000.0, "weight_decay": 0.01, "beta2": 0.9, "noise_std": 0.3, **changes}


def state(h=0.2):
    return {"step": 1, "sizes": [D], "h": torch.full((D,), h, dtype=torch.float64)}


def noisy(mu, s, seed=0):
    return mu + s * torch.randn(D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("a", [0.0, 0.3, 1.0, 2.5])
def test_noise_corrected_has_the_closed_forms_expectation_and_zeros(a):
    """E max((mu + s z)^2 - s^2, 0), with a = mu / s; at a = 0 it is 2 phi(1) s^2 and not 0."""
    s = 0.3
    h_hat = curvature.noise_corrected(noisy(a * s, s), torch.zeros(D), state(), group())
    expected = 1000 * s**2 * (
        a**2 * (norm.cdf(a - 1) + norm.cdf(-a - 1)) + (1 + a) * norm.pdf(a - 1) + (1 - a) * norm.pdf(a + 1)
    )  # fmt: skip
    assert float(h_hat.mean()) == pytest.approx(expected, abs=4 * float(h_hat.std()) / D**0.5)
    zero = norm.cdf(1 - a) - norm.cdf(-1 - a)
    assert float((h_hat == 0).double().mean()) == pytest.approx(zero, abs=4 * (zero * (1 - zero) / D) ** 0.5)
    if a == 0:
        assert expected == pytest.approx(1000 * s**2 * 2 * norm.pdf(1))
        assert zero == pytest.approx(0.6827, abs=1e-4)


def test_gradsq_contains_the_noise_variance():
    h_hat = curvature.gradsq(noisy(0.1, 0.3), torch.zeros(D), state(), group())
    assert float(h_hat.mean()) == pytest.approx(1000 * (0.1**2 + 0.3**2), rel=0.01)


def test_price_is_unbiased_under_privacy_noise_and_exact_for_a_quadratic():
    """On a quadratic loss of curvature c, g = c (theta - m) + gradient at m + noise: the expectation of h_hat is c."""
    c, sigma = 0.7, 1 / math.sqrt(1000 * 0.21)
    deviation = sigma * noisy(0, 1, seed=1)
    g = 0.5 + c * deviation + noisy(0, 0.3, seed=2)
    h_hat = curvature.price(g, deviation, state(), group())
    assert float(h_hat.mean()) == pytest.approx(c, abs=4 * float(h_hat.std()) / D**0.5)
    assert float((h_hat < 0).double().mean()) > 0.3  # it needs the positivity-preserving update


def test_the_noise_floor_is_what_pure_noise_gives():
    for changes in ({}, {"noise_std": 2.0, "scale": 7.0}):
        g = group(**changes)
        h_hat = curvature.noise_corrected(noisy(0, g["noise_std"]), torch.zeros(D), state(), g)
        assert curvature.noise_floor(g) == pytest.approx(float(h_hat.mean()), abs=4 * float(h_hat.std()) / D**0.5)


def test_averaging_before_projecting_removes_most_of_the_floor():
    torch.manual_seed(0)
    memory, options = state(), group(beta2=0.99)
    for t in range(1, 400):
        memory["step"] = t
        h_hat = curvature.average_then_project(
            0.3 * torch.randn(5000, dtype=torch.float64), torch.zeros(5000), memory, options
        )
        memory = {**memory, "average": memory["average"]}
    floor = 1000 * 0.09 * 2 * norm.pdf(1)
    assert 0 < float(h_hat.mean()) < 0.15 * floor


def test_block_mean_shares_one_value_and_constant_changes_nothing():
    h_hat = curvature.block_mean(noisy(0.2, 0.3), torch.zeros(D), state(), group())
    assert len(h_hat.unique()) == 1
    assert float(h_hat[0]) == pytest.approx(1000 * 0.04, rel=0.05)
    memory = state()
    assert torch.equal(curvature.constant(noisy(5, 5), torch.zeros(D), memory, group()), memory["h"])


@pytest.mark.parametrize("name", ["gradsq", "noise-corrected", "average-then-project", "block-mean"])
def test_scale_b_is_a_factor_of_the_papers(name):
    g = noisy(0.4, 0.3)
    paper, consistent = (
        curvature.ESTIMATORS[name](g, torch.zeros(D), state(), group(scale=scale)) for scale in (1000.0, 64.0)
    )
    torch.testing.assert_close(paper * 64 / 1000, consistent)

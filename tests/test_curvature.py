"""The curvature estimators against theory: expectations, zeros, and what each leaves of the noise."""

import math

import pytest
import torch
from scipy.stats import norm

from dpivon import curvature

D = 400_000


def group(**changes):
    return {"ess": 1000.0, "scale": 1000.0, "weight_decay": 0.01, "beta2": 0.9, "noise_std": 0.3, **changes}


def state(n=D):
    return {"step": 1, "sizes": [n], "h": torch.full((n,), 0.2, dtype=torch.float64)}


def noisy(mu, s, seed=0, n=D):
    return mu + s * torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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


def test_the_average_over_time_has_the_variance_that_it_says():
    for beta2, steps in ((0.9, 3), (0.9, 60), (0.99, 25)):
        memory, options = state(), group(beta2=beta2)
        for t in range(1, steps + 1):
            memory["step"] = t
            average, reduction = curvature.averaged(noisy(2.0, 0.3, seed=t, n=50_000), memory, options)
        assert float(average.mean()) == pytest.approx(2, abs=0.01)
        assert float(average.var()) == pytest.approx(0.09 * reduction, rel=0.04)


def test_shrinkage_keeps_what_the_noise_does_not_explain():
    """With truth N(1, t^2) and noise N(0, v), the best linear estimate keeps t^2 / (t^2 + v) of the deviation."""
    n = 200_000
    truth, source = noisy(1.0, 0.3, seed=1, n=n), noisy(0, 1, seed=2, n=n)
    for v in (0.01, 0.09, 0.9):
        found = curvature.shrunk(truth + v**0.5 * source, torch.full_like(truth, v), [n])
        slope = float(((found - 1) * (truth - 1)).mean() / (truth - 1).square().mean())
        assert slope == pytest.approx(0.09 / (0.09 + v), abs=0.015)
        error, raw = (found - truth).square().mean(), v
        assert float(error) == pytest.approx(0.09 * v / (0.09 + v), rel=0.05)
        assert error < raw
    pure = curvature.shrunk(1 + source, torch.full_like(source, 1.1), [n])  # more noise claimed than there is spread
    torch.testing.assert_close(pure, (1 + source).mean().expand(n))
    torch.testing.assert_close(curvature.shrunk(truth, torch.zeros(n), [n]), truth)


def test_blocks_do_not_mix():
    values = torch.tensor([1.0, 3.0, 10.0, 30.0, 50.0])
    assert curvature.pooled(values, [2, 3]).tolist() == [2, 2, 30, 30, 30]
    noise = torch.tensor([0.0, 0.0, 1e9, 1e9, 1e9])
    assert curvature.shrunk(values, noise, [2, 3]).tolist() == [1, 3, 30, 30, 30]


def repeated(estimator, draw, steps, **options):
    """What an estimator with memory says of 2000 coordinates after some steps of gradients and deviations."""
    memory, settings = state(2000), group(**options)
    for t in range(1, steps + 1):
        memory["step"] = t
        h_hat = estimator(*draw(t), memory, settings)
    return h_hat


def test_shrunk_squares_have_no_floor_where_projected_ones_do():
    s, steps = 0.3, 200
    pure = {
        estimator: repeated(estimator, lambda t: (noisy(0, s, seed=t, n=2000), None), steps, beta2=0.98, noise_std=s)
        for estimator in (curvature.average_then_project, curvature.average_then_shrink)
    }
    projected, shrunken = pure.values()
    left = 1000 * 2**0.5 * s**2 * (0.02 / 1.98) ** 0.5 * norm.pdf(0)  # of a Gaussian, projected
    assert float(projected.mean()) == pytest.approx(left, rel=0.1)
    assert float(shrunken.mean()) < 0.15 * float(projected.mean())


def test_the_block_s_price_has_one_nth_of_the_variance():
    """Its privacy noise is s^2 N_ess (h + delta_v) for one coordinate, which `price_shrink` takes for known."""
    s, n, options = 0.3, 400, group()
    precision = 1000 * 0.21
    deviation, g = noisy(0, precision**-0.5, seed=1), noisy(0, s, seed=2)
    memory = {**state(), "sizes": [n] * (D // n)}
    single = curvature.price(g, deviation, memory, options)
    assert float(single.var()) == pytest.approx(s**2 * precision, rel=0.02)
    block = curvature.price_block(g, deviation, memory, options)
    assert len(block.unique()) == D // n
    assert float(block[::n].var()) == pytest.approx(s**2 * precision / n, rel=0.15)
    assert float(block.mean()) == pytest.approx(float(single.mean()))


def test_price_shrinks_to_the_block_under_noise_and_finds_each_curvature_without():
    n, precision = 2000, 1000 * 0.21
    c = torch.linspace(0.1, 0.9, n, dtype=torch.float64)

    def draw(t, s):
        deviation = precision**-0.5 * noisy(0, 1, seed=t, n=n)
        return c * deviation + noisy(0, s, seed=1000 + t, n=n), deviation

    for s, close in ((0.0, True), (3.0, False)):
        h_hat = repeated(curvature.price_shrink, lambda t, s=s: draw(t, s), 400, beta2=0.99, noise_std=s)
        slope = float(((h_hat - h_hat.mean()) * (c - c.mean())).mean() / c.var())
        assert (slope > 0.9) == close
        assert (float(h_hat.std()) < 0.3 * float(c.std())) == (not close)


@pytest.mark.parametrize(
    "name", ["gradsq", "noise-corrected", "average-then-project", "average-then-shrink", "block-mean"]
)
def test_scale_b_is_a_factor_of_the_papers(name):
    g = noisy(0.4, 0.3)
    paper, consistent = (
        curvature.ESTIMATORS[name](g, torch.zeros(D), state(), group(scale=scale)) for scale in (1000.0, 64.0)
    )
    torch.testing.assert_close(paper * 64 / 1000, consistent)

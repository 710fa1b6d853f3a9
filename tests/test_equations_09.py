"""The equations of the chapter on the noise-corrected curvature, each evaluated a second way in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from scipy.integrate import quad
from scipy.optimize import brentq
from torch import nn

from dpivon import adaptive, curvature, gradients, ivon, mechanism

chapter = definitions("book/09_noise_corrected_curvature.ipynb")

seeds = st.integers(0, 2**32 - 1)
signals = st.floats(0.0, 6.0)
scales = st.floats(0.01, 10.0)
decays = st.floats(0.5, 0.9999)


def density(z):
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def tail(f, c):
    """The integral of f times the normal density from c upward."""
    return quad(lambda z: f(z) * density(z), c, max(c, 0) + 12, epsabs=1e-14, epsrel=1e-12, limit=200)[0]


def expectation(f, kinks):
    """E f(z) for a standard normal z, with the kinks of f as end points."""
    ends = [-14.0, *sorted(kinks), 14.0]
    pieces = (quad(lambda z: f(z) * density(z), a, c, epsabs=1e-14, epsrel=1e-12) for a, c in itertools.pairwise(ends))
    return math.fsum(value for value, _ in pieces)


def projected(g, s):
    """(1) for one number, without torch."""
    return max(g * g - s * s, 0.0)


def examples(seed, n=7, weights=3, centered=False):
    G = np.random.default_rng(seed).normal(size=(n, weights)) + 0.4
    return G - G.mean(0) if centered else G


def exact_square(G, b):
    """E g_B^2, over all 2^N Poisson batches with their probabilities."""
    n, total = len(G), 0.0
    for drawn in itertools.product((0, 1), repeat=n):
        chance = math.prod(b / n if z else 1 - b / n for z in drawn)
        total = total + chance * (np.array(drawn) @ G / b) ** 2
    return total


@pytest.mark.equation("eq-squares-are-curvature")
@pytest.mark.parametrize("seed", range(5))
def test_squares_are_curvature(seed):
    """For a network, all labels and all weights, with second derivatives from autograd."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, generator=generator, dtype=torch.float64)
    theta = torch.randn(2 * 3 + 4 * 2, generator=generator, dtype=torch.float64)

    def loss(theta, label):
        return -torch.log_softmax(theta[6:].view(4, 2) @ torch.tanh(theta[:6].view(2, 3) @ x), 0)[label]

    squares = curvatures = 0
    for label in range(4):
        p = torch.exp(-loss(theta, label))
        squares = squares + p * torch.func.grad(loss)(theta, label) ** 2
        curvatures = curvatures + p * torch.func.hessian(loss)(theta, label).diagonal()
    torch.testing.assert_close(squares, curvatures, rtol=1e-9, atol=1e-12)


@pytest.mark.equation("eq-minibatch-square")
@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.5, 6.5))
def test_minibatch_square(seed, b):
    G = examples(seed)
    formula = G.mean(0) ** 2 + (1 - b / len(G)) / b * (G**2).mean(0)
    np.testing.assert_allclose(exact_square(G, b), formula, rtol=1e-10)


@pytest.mark.equation("eq-minibatch-square")
def test_the_chapter_s_batches_have_this_square():
    G, draws = examples(0, n=40), 40_000
    found = chapter["squared_batches"](G, 8, draws, np.random.default_rng(1))
    np.testing.assert_allclose(found, G.mean(0) ** 2 + (1 - 8 / 40) / 8 * (G**2).mean(0), rtol=0.04)


@pytest.mark.equation("eq-overstatement")
@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.5, 6.5))
def test_overstatement_at_a_stationary_point(seed, b):
    G = examples(seed, centered=True)
    n = len(G)
    np.testing.assert_allclose(n * exact_square(G, b), (1 - b / n) * n / b * (G**2).mean(0), rtol=1e-9)


@pytest.mark.equation("eq-clipped-trace")
@given(seeds, scales)
def test_clipped_trace(seed, C):
    G = 3 * examples(seed, n=20, weights=6)
    clipped = chapter["clip"](G, C)
    trace = (clipped**2).mean(0).sum()
    norms = np.sqrt((G**2).sum(1))
    assert trace == pytest.approx(np.minimum(norms, C).__pow__(2).mean())
    assert trace <= C**2 * (1 + 1e-12)
    module = G * gradients.clip_factors(torch.from_numpy(norms), C).numpy()[:, None]
    np.testing.assert_allclose(clipped, module, rtol=1e-3 if C < 0.1 else 1e-4)


def mechanism_s(sigma, C, b, n):
    """s as the mechanism itself reports it."""
    optimizer = adaptive.sgd(nn.Linear(1, 1).parameters(), lr=1.0)
    dp = mechanism.mechanism(optimizer, noise_multiplier=sigma, max_grad_norm=C, batch_size=b, n=n)
    return mechanism.noise_std(dp)


@pytest.mark.equation("eq-private-square")
@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.1, 5.0), st.integers(1, 6))
def test_private_square(seed, sigma, b):
    """All batches, and the noise by Gauss-Hermite quadrature, against the three-part sum."""
    C = 0.7
    G = chapter["clip"](examples(seed), C)
    n = len(G)
    nodes, weights = np.polynomial.hermite_e.hermegauss(6)
    total = 0.0
    for drawn in itertools.product((0, 1), repeat=n):
        chance = math.prod(b / n if z else 1 - b / n for z in drawn)
        for xi, w in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
            total = total + chance * w * ((np.array(drawn) @ G + sigma * C * xi) / b) ** 2
    formula = G.mean(0) ** 2 + (1 - b / n) / b * (G**2).mean(0) + mechanism_s(sigma, C, b, n) ** 2
    np.testing.assert_allclose(total, formula, rtol=1e-9)


@pytest.mark.equation("eq-signal-bound")
@given(seeds, scales, st.floats(0.1, 5.0), st.integers(1, 19))
def test_signal_bound(seed, C, sigma, b):
    G = chapter["clip"](5 * examples(seed, n=20, weights=6), C)
    n, P = G.shape
    s = mechanism_s(sigma, C, b, n)
    signal, minibatch = (G.mean(0) ** 2).mean(), (1 - b / n) / b * (G**2).mean()
    bounds = b**2 / sigma**2 / P, (1 - b / n) * b / sigma**2 / P
    assert signal / s**2 <= bounds[0] * (1 + 1e-9)
    assert minibatch / s**2 <= bounds[1] * (1 + 1e-9)
    alike = np.full((n, P), C / math.sqrt(P))  # everybody agrees, at full length: both bounds are attained
    assert (alike.mean(0) ** 2).mean() / s**2 == pytest.approx(bounds[0])
    assert (1 - b / n) / b * (alike**2).mean() / s**2 == pytest.approx(bounds[1])


@pytest.mark.equation("eq-noise-corrected")
@given(seeds, scales, st.floats(1.0, 1e5))
def test_noise_corrected(seed, s, ess):
    g = np.random.default_rng(seed).normal(scale=1.3 * s, size=50)
    expected = [ess * projected(value, s) for value in g]
    np.testing.assert_allclose(chapter["noise_corrected"](torch.from_numpy(g), s, ess), expected, rtol=1e-9)
    group = {"scale": ess, "noise_std": s}
    module = curvature.noise_corrected(torch.from_numpy(g), torch.zeros(50), {}, group)
    np.testing.assert_allclose(module, expected, rtol=1e-9)


@pytest.mark.equation("eq-tail-moments")
@given(st.floats(-4.0, 4.0))
def test_tail_moments(c):
    cdf, pdf = chapter["norm"].cdf, chapter["norm"].pdf
    assert tail(lambda z: 1.0, c) == pytest.approx(cdf(-c), abs=1e-11)
    assert tail(lambda z: z, c) == pytest.approx(pdf(c), abs=1e-11)
    assert tail(lambda z: z * z, c) == pytest.approx(c * pdf(c) + cdf(-c), abs=1e-11)


@pytest.mark.equation("eq-projected-mean")
@given(signals)
def test_projected_mean(a):
    found = expectation(lambda z: projected(a + z, 1.0), [-1 - a, 1 - a])
    assert chapter["projected_mean"](a) == pytest.approx(found, rel=1e-9)


@pytest.mark.equation("eq-zero-probability")
@given(signals)
def test_zero_probability(a):
    """The share of zeros among the quantiles of g."""
    n = 100_000
    g = a + chapter["norm"].ppf((np.arange(n) + 0.5) / n)
    share = (chapter["noise_corrected"](torch.from_numpy(g), 1.0, 1.0) == 0).double().mean()
    assert chapter["zero_probability"](a) == pytest.approx(float(share), abs=2e-5)


@pytest.mark.equation("eq-floor")
@given(scales, st.floats(1.0, 1e5))
def test_floor(s, ess):
    found = ess * expectation(lambda z: projected(s * z, s), [-1, 1])
    assert chapter["floor"](s, ess) == pytest.approx(found, rel=1e-9)
    assert chapter["floor"](s, ess) == pytest.approx(2 * density(1) * ess * s**2, rel=1e-12)
    assert chapter["floor"](s, ess) == pytest.approx(0.484 * ess * s**2, rel=2e-4)


@pytest.mark.equation("eq-small-signal")
def test_small_signal():
    """The remainder of the expansion falls with the fourth power of a."""
    slope = 2 * (quad(density, 1, 14)[0] + density(1))
    assert slope == pytest.approx(0.801, abs=5e-4)
    remainders = [chapter["projected_mean"](a) - 2 * density(1) - slope * a**2 for a in (0.2, 0.1)]
    assert remainders[0] / remainders[1] == pytest.approx(16, rel=0.02)


@pytest.mark.equation("eq-floor-budget")
@given(st.floats(0.5, 20.0), scales, st.integers(1, 1000), st.integers(1, 5000), st.integers(1000, 60_000))
def test_floor_at_a_budget(sigma, C, b, T, n):
    r = b / n * math.sqrt(T) / sigma
    assert n * mechanism_s(sigma, C, b, n) ** 2 == pytest.approx(C**2 * T / (n * r**2), rel=1e-9)


@pytest.mark.equation("eq-curvature-average")
@given(seeds, decays, st.floats(1e-6, 1.0))
def test_curvature_average(seed, beta2, damping):
    rng = np.random.default_rng(seed)
    h, h_hat = rng.exponential(size=30), rng.exponential(size=30) * rng.integers(0, 2, size=30) * 5
    u = (1 - beta2) * (h_hat - h) / (h + damping)
    expected = (h + damping) * (1 + u + u**2 / 2) - damping
    np.testing.assert_allclose(chapter["new_curvature"](h, h_hat, beta2, damping), expected, rtol=1e-8)
    group = {"beta2": beta2, "weight_decay": damping}
    module = ivon.new_curvature(torch.from_numpy(h), torch.from_numpy(h_hat), group)
    np.testing.assert_allclose(module, expected, rtol=1e-8)


def stationary(beta2, damping, coordinates=4000, seed=0):
    """E y and E 1/y of the module's update on pure noise, with N_ess s^2 = 1."""
    generator = torch.Generator().manual_seed(seed)
    group = {"beta2": beta2, "weight_decay": damping, "scale": 1.0, "noise_std": 1.0}
    h, steps, sums = torch.full((coordinates,), 0.5, dtype=torch.float64), round(6 / (1 - beta2)) + 200, [0.0, 0.0]
    for t in range(2 * steps):
        g = torch.randn(coordinates, generator=generator, dtype=torch.float64)
        h = ivon.new_curvature(h, curvature.noise_corrected(g, g, {}, group), group)
        if t >= steps:
            y = h + damping
            sums = [sums[0] + float(y.mean()) / steps, sums[1] + float((1 / y).mean()) / steps]
    return sums


def moments(damping):
    """E k and E k^2 for k = max(z^2 - 1, 0) + damping, by quadrature."""
    return [
        expectation(lambda z, j=j: (max(z * z - 1, 0.0) + damping) ** j, [-1, 1])  # type: ignore[misc]
        for j in (1, 2)
    ]


@pytest.mark.equation("eq-exact-balance")
@pytest.mark.parametrize(("beta2", "damping"), [(0.85, 0.0), (0.9, 0.3), (0.97, 0.05)])
def test_exact_balance(beta2, damping):
    r = 1 - beta2
    y, inverse = stationary(beta2, damping)
    mean, square = moments(damping)
    assert (1 - r / 2) * y == pytest.approx((1 - r) * mean + r / 2 * square * inverse, rel=0.015)


@pytest.mark.equation("eq-second-moment")
def test_second_moment():
    assert chapter["SECOND_MOMENT"] == pytest.approx(moments(0.0)[1], rel=1e-10)
    assert chapter["SECOND_MOMENT"] == pytest.approx(1.603, abs=5e-4)


@pytest.mark.equation("eq-settled")
@given(decays, st.floats(0.0, 2.0))
def test_settled(beta2, damping):
    """The root of the balance in which 1 / E y stands for E 1/y."""
    r = 1 - beta2
    mean, square = moments(damping)
    root = brentq(lambda m: (1 - r / 2) * m - (1 - r) * mean - r / 2 * square / m, 1e-3, 20, xtol=1e-13)
    assert chapter["settled"](beta2, damping) == pytest.approx(root - damping, abs=1e-8)


@pytest.mark.equation("eq-settled")
@pytest.mark.parametrize(("beta2", "gap"), [(0.9, 0.12), (0.97, 0.02)])
def test_settled_is_a_lower_bound(beta2, gap):
    y, _ = stationary(beta2, 0.0)
    assert chapter["settled"](beta2) * 0.995 <= y <= chapter["settled"](beta2) * (1 + gap)


@pytest.mark.equation("eq-average-then-project")
@given(seeds, decays, scales)
def test_average_then_project(seed, beta2, s):
    """Against the weighted mean with explicit weights, and the module step by step."""
    squares = s**2 * np.random.default_rng(seed).chisquare(1, size=(12, 20))
    weights = (1 - beta2) * beta2 ** np.arange(12)[::-1]
    expected = 100 * np.maximum((weights[:, None] * (squares - s**2)).sum(0) / weights.sum(), 0)
    found = chapter["average_then_project"](torch.from_numpy(squares), s, 100.0, beta2)
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9 * s**2)
    state, group = {"step": 0}, {"beta2": beta2, "scale": 100.0, "noise_std": s}
    for square in torch.from_numpy(squares):
        state["step"] += 1
        module = curvature.average_then_project(square.sqrt(), square, state, group)
    np.testing.assert_allclose(module, expected, rtol=1e-7, atol=1e-9 * s**2)


@pytest.mark.equation("eq-average-variance")
@pytest.mark.parametrize("beta2", [0.8, 0.9, 0.97])
@pytest.mark.parametrize("s", [0.3, 2.0])
def test_average_variance(beta2, s):
    """The weights of the chapter's average, read off unit impulses, and the variance of one term by quadrature."""
    steps = 1000
    impulses = s**2 + torch.eye(steps, dtype=torch.float64)
    weights = chapter["average_then_project"](impulses, s, 1.0, beta2)
    one = expectation(lambda z: (s**2 * (z * z - 1)) ** 2, [0.0])
    assert one * float((weights**2).sum()) == pytest.approx(2 * s**4 * (1 - beta2) / (1 + beta2), rel=1e-7)


@pytest.mark.equation("eq-floor-drift")
@given(st.floats(0.5, 20.0), scales, st.integers(1, 1000), st.integers(1, 5000), scales)
def test_drift_at_the_floor(sigma, C, b, T, alpha):
    n = 1438
    b = min(b, n)
    r = b / n * math.sqrt(T) / sigma
    drift = alpha / chapter["floor"](mechanism_s(sigma, C, b, n), n) * T * C
    assert drift == pytest.approx(alpha * n * r**2 / (2 * density(1) * C), rel=1e-9)

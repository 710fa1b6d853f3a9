"""The equations of the chapter on attacks and audits, each evaluated a second way in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from scipy import stats
from scipy.integrate import quad

from dpivon import adaptive, audit, mechanism

chapter = definitions("book/12_attack_your_own_model.ipynb")

seeds = st.integers(0, 2**32 - 1)
budgets = st.floats(0.0, 6.0)
deltas = st.sampled_from([0.0, 1e-6, 1e-3, 0.05])


def tail(r, p, v):
    """Pr[Bin(r, p) >= v], as a sum."""
    return math.fsum(math.comb(r, k) * p**k * (1 - p) ** (r - k) for k in range(max(v, 0), r + 1))


def private_pair(epsilon, delta):
    """Output probabilities of the worst (epsilon, delta)-private program on neighbors: it fails openly, or it lies."""
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    q = 1 - delta
    return np.array([delta, 0.0, q * p, q * (1 - p)]), np.array([0.0, delta, q * (1 - p), q * p])


@pytest.mark.equation("eq-rates-bound")
@settings(deadline=None)
@given(budgets, deltas, seeds)
def test_rates_bound(epsilon, delta, seed):
    """Every rejection region of the worst program obeys it, and one attains it."""
    inside, outside = private_pair(epsilon, delta)
    best = 0.0
    for region in itertools.product((False, True), repeat=4):
        alpha, beta = outside[list(region)].sum(), 1 - inside[list(region)].sum()
        for a, b in ((alpha, beta), (beta, alpha)):
            if a > 1e-12 and 1 - delta - b > 0:
                best = max(best, math.log((1 - delta - b) / a))
    assert best == pytest.approx(epsilon, abs=1e-7)
    # The code's bound, from counts, is this formula at the upper limits.
    rng = np.random.default_rng(seed)
    included = torch.from_numpy(rng.random(200) < 0.5)
    scores = torch.from_numpy(rng.normal(size=200)) + 2 * included
    alpha, beta = audit.error_rates(scores, included, 1.0, 0.05)
    logs = [math.log(max((1 - delta - b) / a, 1.0)) for a, b in ((alpha, beta), (beta, alpha))]
    assert chapter["rates_bound"](scores, included, delta, 1.0) == pytest.approx(max(logs), abs=1e-12)


@pytest.mark.equation("eq-clopper-pearson")
@given(st.integers(0, 40), st.integers(1, 40), st.floats(1e-3, 0.5))
def test_clopper_pearson(errors, more, significance):
    trials = errors + more
    u = chapter["upper"](errors, trials, significance)
    assert 1 - tail(trials, u, errors + 1) == pytest.approx(significance, rel=1e-6)
    assert 1 - tail(trials, min(1.0, u * 1.01), errors + 1) < significance  # it falls as the rate grows


@pytest.mark.equation("eq-zero-errors")
@given(st.integers(1, 100_000), st.floats(1e-4, 0.5))
def test_zero_errors(n, significance):
    u = chapter["upper"](0, n, significance)
    assert u == pytest.approx(1 - significance ** (1 / n), rel=1e-7)
    log = math.log(1 / significance) / n
    assert log * (1 - log / 2) - 1e-12 <= u <= log  # the approximation, from above, to first order


@pytest.mark.equation("eq-ceiling")
@given(st.integers(2, 5000), st.floats(1e-3, 0.3))
def test_ceiling(n, significance):
    """What the chapter's code certifies for an attack that never errs, and no more."""
    scores, included = torch.arange(2 * n), torch.arange(2 * n) >= n
    ceiling = math.log(1 / (1 - (significance / 2) ** (1 / n)))
    found = chapter["rates_bound"](scores, included, 0.0, n, significance)
    u = 1 - (significance / 2) ** (1 / n)
    assert found <= ceiling
    assert found == pytest.approx(max(0.0, ceiling + math.log(max(1 - u, 1e-300))), abs=1e-7)
    if n > 200:
        assert ceiling == pytest.approx(math.log(n / math.log(2 / significance)), abs=0.02)


@pytest.mark.equation("eq-canary-score")
@pytest.mark.parametrize("length", [0.3, 1.0, 50.0])
@pytest.mark.parametrize("C", [0.5, 2.0])
def test_canary_score(length, C):
    """The mechanism's own step, seen along the canary's axis, in units of C."""
    m, sigma = 4000, 0.7
    model = chapter["WithCanaries"](torch.nn.Linear(1, 2), m).double()
    coins = audit.coins(m, 0)
    dp = mechanism.mechanism(
        adaptive.sgd(model.parameters(), lr=1.0), noise_multiplier=sigma, max_grad_norm=C, batch_size=m, n=m,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip

    def loss(output, y):
        return chapter["canary_loss"](output, y, steep=length)

    labels = torch.where(coins, torch.arange(m), m) + 2
    mechanism.private_gradient(model, loss, torch.zeros(m, 1, dtype=torch.float64), labels, dp)
    x = model.canary.grad * m / C
    assert float(x[coins].mean()) == pytest.approx(min(length, C) / C, abs=4 * sigma / math.sqrt(m / 2))
    assert float(x[~coins].mean()) == pytest.approx(0, abs=4 * sigma / math.sqrt(m / 2))
    assert float(x[~coins].std()) == pytest.approx(sigma, rel=0.06)
    assert stats.kstest(x[~coins].numpy() / sigma, "norm").pvalue > 1e-4


@pytest.mark.equation("eq-mu-bound")
@given(st.floats(0.05, 6.0), st.floats(-4.0, 4.0), st.floats(0.0, 0.1))
def test_mu_bound(mu, threshold, slack):
    """Equality for the best test of a Gaussian, a smaller value for larger errors."""
    alpha = quad(lambda z: math.exp(-z * z / 2) / math.sqrt(2 * math.pi), threshold, threshold + 12)[0]
    beta = quad(lambda z: math.exp(-z * z / 2) / math.sqrt(2 * math.pi), threshold - mu - 12, threshold - mu)[0]
    found = stats.norm.isf(alpha) - stats.norm.ppf(beta)
    assert found == pytest.approx(mu, abs=1e-5)
    assert stats.norm.isf(min(1.0, alpha + slack)) - stats.norm.ppf(min(1.0, beta + slack)) <= mu + 1e-5


@pytest.mark.equation("eq-mu-bound")
@given(seeds)
def test_the_bound_in_the_code(seed):
    rng = np.random.default_rng(seed)
    included = torch.from_numpy(rng.random(2000) < 0.5)
    scores = torch.from_numpy(rng.normal(size=2000)) + included
    alpha, beta = chapter["error_rates"](scores, included, 0.5, 0.05)
    expected = audit.epsilon_of_mu(stats.norm.isf(alpha) - stats.norm.ppf(beta), 1e-5)
    assert chapter["gaussian_bound"](scores, included, 1e-5, 0.5) == pytest.approx(expected, abs=1e-6)


@pytest.mark.equation("eq-run-score")
def test_run_score():
    """Mean and variance of each step, with the canary and without, against the formula's."""
    included = np.arange(40_000) % 2 == 0
    shown, drawn = chapter["simulated_run"](0.8, 0.3, 5, included, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(0.3, abs=0.005)
    for coin in (True, False):
        part = shown[included == coin]
        np.testing.assert_allclose(part.mean(0), 0.3 * coin, atol=0.03)
        np.testing.assert_allclose(part.var(0), 0.8**2 + 0.3 * 0.7 * coin, rtol=0.05)
    noise = shown - included[:, None] * drawn
    assert stats.kstest(noise[:5000].ravel() / 0.8, "norm").pvalue > 1e-4


@pytest.mark.equation("eq-likelihood-ratio")
@given(seeds, st.floats(0.3, 5.0), st.floats(0.01, 0.99))
def test_likelihood_ratio(seed, sigma, q):
    x = np.random.default_rng(seed).normal(0.5, sigma, size=(6, 4))
    without = stats.norm.pdf(x, 0, sigma)
    with_canary = (1 - q) * without + q * stats.norm.pdf(x, 1, sigma)
    expected = np.log(with_canary / without).sum(1)
    found = chapter["run_scores"](x, np.ones_like(x), sigma, q)["likelihood ratio"]
    np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.equation("eq-sum-signal")
@pytest.mark.parametrize(("sigma", "q", "T"), [(0.8, 0.3, 12), (1.5, 0.05, 60)])
def test_sum_signal(sigma, q, T):
    """From the exact law of the number of batches that a canary is in."""
    times = np.arange(T + 1)
    weight = stats.binom.pmf(times, T, q)
    mean = (weight * times).sum()
    variance = (weight * (times - mean) ** 2).sum() + T * sigma**2
    assert mean / math.sqrt(variance) == pytest.approx(q * math.sqrt(T) / math.sqrt(sigma**2 + q * (1 - q)), rel=1e-9)
    included = np.arange(40_000) % 2 == 0
    shown, drawn = chapter["simulated_run"](sigma, q, T, included, np.random.default_rng(1))
    total = chapter["run_scores"](shown, drawn, sigma, q)["sum of all steps"]
    np.testing.assert_allclose(total, (shown @ np.ones(T)))
    gap = total[included].mean() - total[~included].mean()
    assert gap / total[included].std() == pytest.approx(mean / math.sqrt(variance), rel=0.06)


def random_program(rng, m, outputs, epsilon):
    """Probabilities (2^m, outputs) of a pure epsilon-private program of m coins, whose answers hang together."""
    logits = rng.normal(size=(2,) * m + (outputs,)).cumsum(-1) * 3
    p = np.exp(logits)
    p /= p.sum(-1, keepdims=True)
    while True:  # mix with a constant until every pair of neighbors is within e^epsilon
        worst = max(np.max(np.abs(np.log(np.take(p, 0, k) / np.take(p, 1, k)))) for k in range(m))
        if worst <= epsilon:
            return p
        p = 0.9 * p + 0.1 / outputs


@pytest.mark.equation("eq-guess")
@pytest.mark.equation("eq-one-run-pure")
@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.1, 3.0))
def test_one_run_pure(seed, epsilon):
    """Exactly, over all coins and outputs of small private programs, for an attacker who guesses by the posterior."""
    rng, m, outputs = np.random.default_rng(seed), 4, 5
    program = random_program(rng, m, outputs, epsilon)
    joint = program / 2**m
    p, coins = 1 / (1 + math.exp(-epsilon)), list(itertools.product((0, 1), repeat=m))
    for k in range(m):  # given everything else
        one = np.take(joint, 1, k) / (np.take(joint, 0, k) + np.take(joint, 1, k))
        assert one.max() <= p + 1e-12
        assert one.min() >= 1 - p - 1e-12
    distribution = {}
    for y in range(outputs):
        posterior = [np.take(joint, 1, k)[..., y].sum() / joint[..., y].sum() for k in range(m)]
        guesses = [(k, int(b > 0.5)) for k, b in enumerate(posterior)]
        for c in coins:
            v = sum(c[k] == g for k, g in guesses)
            distribution[v] = distribution.get(v, 0) + joint[(*c, y)]
    for v in range(m + 1):
        exact = sum(weight for right, weight in distribution.items() if right >= v)
        assert exact <= tail(m, p, v) + 1e-12
        assert chapter["one_run_p_value"](epsilon, 0.0, m, m, v) == pytest.approx(tail(m, p, v), abs=1e-12)


@pytest.mark.equation("eq-one-run-pure")
def test_randomized_response_attains_it():
    """Each coin answered by itself, truthfully with probability p: the number of right guesses is the binomial."""
    p, m = 1 / (1 + math.exp(-1.0)), 5
    exact = [0.0] * (m + 1)
    for truths in itertools.product((0, 1), repeat=m):
        exact[sum(truths)] += math.prod(p if t else 1 - p for t in truths)
    for v in range(m + 1):
        assert sum(exact[v:]) == pytest.approx(chapter["one_run_p_value"](1.0, 0.0, m, m, v), abs=1e-12)


@pytest.mark.equation("eq-gifts")
@given(seeds, st.integers(1, 15), st.floats(0.5, 0.95))
def test_gifts(seed, v, p):
    """For random laws of F the bound holds, and the law with all its mass on the best i attains it."""
    rng, r = np.random.default_rng(seed), 20
    f = [tail(r, p, k) for k in range(r + 1)]
    gains = [(f[v - i] - f[v]) / i for i in range(1, v + 1)]
    law = rng.dirichlet(np.full(v + 1, 0.3))
    mean = float(law @ np.arange(v + 1))
    expected = sum(law[i] * f[v - i] for i in range(v + 1))
    assert expected <= f[v] + mean * max(gains) + 1e-12
    best = int(np.argmax(gains)) + 1
    weight = rng.random()
    attained = (1 - weight) * f[v] + weight * f[v - best]
    assert attained == pytest.approx(f[v] + weight * best * max(gains), abs=1e-12)


@pytest.mark.equation("eq-one-run")
@given(st.floats(0.0, 4.0), st.floats(0.0, 1e-2), st.integers(1, 40), st.integers(0, 40), st.integers(0, 60))
def test_one_run(epsilon, delta, r, v, more):
    v, m = min(v, r), r + more
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    f = [tail(r, p, k) for k in range(r + 1)]
    gain = max([(f[v - i] - f[v]) / i for i in range(1, v + 1)], default=0.0)
    expected = min(1.0, f[v] + 2 * m * delta * gain)
    assert chapter["one_run_p_value"](epsilon, delta, m, r, v) == pytest.approx(expected, abs=1e-10)
    assert audit.one_run_p_value(epsilon, delta, m, r, v) == pytest.approx(expected, abs=1e-10)


@pytest.mark.equation("eq-one-run-ceiling")
@settings(max_examples=15, deadline=None)
@given(st.integers(10, 20_000), st.floats(1e-3, 0.3))
def test_one_run_ceiling(m, significance):
    root = significance ** (1 / m)
    ceiling = math.log(root / (1 - root))
    assert chapter["one_run_epsilon"](0.0, m, m, m, significance) == pytest.approx(ceiling, abs=1e-6)
    for r, v in ((m, m - 1), (m // 2, m // 2)):  # a wrong guess, or silence, certifies less
        assert audit.one_run_epsilon(0.0, m, r, v, significance) < ceiling
    if m > 1000:
        assert ceiling == pytest.approx(math.log(m / math.log(1 / significance)), abs=0.02)

"""Chapter 3's equations, each evaluated a second way in float64, against the chapter's own code."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy.integrate import quad
from scipy.optimize import brentq, minimize_scalar

chapter = definitions("book/03_counting_the_cost.ipynb")

seeds = st.integers(0, 2**32 - 1)
orders = st.floats(1.05, 40.0)
whole_orders = st.integers(2, 24)
sigmas = st.floats(0.5, 5.0)
rates = st.floats(1e-3, 0.9)
deltas = st.floats(1e-9, 1e-2)
rhos = st.floats(0.0, 5.0)


def cdf(x):
    return math.erfc(-x / math.sqrt(2)) / 2


def pdf(x, center, sigma):
    return math.exp(-((x - center) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))


def distributions(seed, *shape):
    """Random probability distributions along the last axis, all of them positive."""
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), size=shape[:-1] or None) * 0.99 + 0.01 / shape[-1]


def exact_delta(p, q, epsilon):
    """The largest excess of P(S) over e^epsilon Q(S), set by set."""
    return math.fsum(max(0.0, a - math.exp(epsilon) * b) for a, b in zip(p, q, strict=True))


def divergence_by_quadrature(sigma, rate, order):
    """D_order of the mixture against the noise alone, as the integral of Q (P/Q)^order."""
    log_absent = math.log1p(-rate) if rate < 1 else -math.inf

    def log_integrand(x):
        ratio = np.logaddexp(log_absent, math.log(rate) + (2 * x - 1) / (2 * sigma**2))
        return order * ratio - x**2 / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))

    low, high = -12 * sigma, order + 12 * sigma
    top = max(log_integrand(x) for x in np.linspace(low, high, 4001))
    value, _ = quad(
        lambda x: math.exp(log_integrand(x) - top), low, high, points=[0.0, order], limit=500, epsabs=0, epsrel=1e-11
    )
    return (math.log(value) + top) / (order - 1)


@pytest.mark.equation("eq-renyi-divergence")
@given(seeds, orders)
def test_renyi_divergence_is_a_moment_of_the_loss(seed, order):
    p, q = distributions(seed, 2, 6)
    losses = [math.log(a / b) for a, b in zip(p, q, strict=True)]
    moment = math.fsum(a * math.exp((order - 1) * loss) for a, loss in zip(p, losses, strict=True))
    found = chapter["renyi_divergence"](p, q, order)
    assert found == pytest.approx(math.log(moment) / (order - 1), rel=1e-9, abs=1e-12)
    mean = math.fsum(a * loss for a, loss in zip(p, losses, strict=True))
    assert mean - 1e-9 <= found <= max(losses) + 1e-9  # between the limits at order 1 and at infinity
    assert found <= chapter["renyi_divergence"](p, q, order + 1) + 1e-9


@pytest.mark.equation("eq-gaussian-rdp")
@given(sigmas, st.integers(2, 40))
def test_gaussian_rdp_is_a_line_in_the_order(sigma, order):
    expected = divergence_by_quadrature(sigma, 1.0, order)
    assert expected == pytest.approx(order / (2 * sigma**2), rel=1e-8)
    assert chapter["rdp_sampled_gaussian"](sigma, 1.0, order) == pytest.approx(expected, rel=1e-8)


@pytest.mark.equation("eq-rdp-composition")
@given(seeds, orders)
def test_divergences_of_one_order_add_up(seed, order):
    first = distributions(seed, 2, 3)
    second = distributions(seed + 1, 2, 3, 4)  # one distribution for each outcome of the first
    divergence = chapter["renyi_divergence"]
    joint = [(first[i][:, None] * second[i]).ravel() for i in range(2)]
    bound = divergence(*first, order) + max(divergence(second[0, x], second[1, x], order) for x in range(3))
    assert divergence(*joint, order) <= bound + 1e-9
    independent = [np.outer(first[i], second[i, 0]).ravel() for i in range(2)]
    total = divergence(*first, order) + divergence(second[0, 0], second[1, 0], order)
    assert divergence(*independent, order) == pytest.approx(total, rel=1e-9, abs=1e-12)


@pytest.mark.equation("eq-rdp-composition")
def test_the_accountant_adds_its_steps():
    steps, q, sigma, delta = 37, 0.05, 1.3, 1e-6
    offers = []
    for order in chapter["ORDERS"]:
        rho = math.fsum([chapter["rdp_sampled_gaussian"](sigma, q, order)] * steps)
        offers.append(chapter["epsilon_from_rdp"](rho, order, delta))
    assert chapter["epsilon"](sigma, q, steps, delta) == pytest.approx(min(offers))


@pytest.mark.equation("eq-rdp-simple")
@given(seeds, rhos, orders, deltas)
def test_simple_conversion(seed, rho, order, delta):
    found = chapter["epsilon_simple"](rho, order, delta)
    assert math.exp((order - 1) * (rho - found)) == pytest.approx(delta, rel=1e-6)
    p, q = distributions(seed, 2, 6)
    promised = chapter["epsilon_simple"](chapter["renyi_divergence"](p, q, order), order, delta)
    assert exact_delta(p, q, promised) <= delta * (1 + 1e-9)


@pytest.mark.equation("eq-rdp-conversion")
@given(seeds, rhos, orders, deltas)
def test_careful_conversion_uses_the_true_maximum(seed, rho, order, delta):
    highest = minimize_scalar(
        lambda t: -(1 - t) * t ** (order - 1), bounds=(0, 1), method="bounded", options={"xatol": 1e-12}
    )
    expected = rho + (math.log(-highest.fun) - math.log(delta)) / (order - 1)
    found = chapter["epsilon_from_rdp"](rho, order, delta)
    assert found == pytest.approx(expected, rel=1e-7, abs=1e-7)
    assert found <= chapter["epsilon_simple"](rho, order, delta)
    p, q = distributions(seed, 2, 6)
    promised = chapter["epsilon_from_rdp"](chapter["renyi_divergence"](p, q, order), order, delta)
    assert exact_delta(p, q, promised) <= delta * (1 + 1e-9)


@pytest.mark.equation("eq-rdp-conversion")
@pytest.mark.filterwarnings("ignore:Optimal order")
@given(rhos, orders, deltas)
def test_careful_conversion_is_opacus_conversion(rho, order, delta):
    theirs, _ = opacus_rdp.get_privacy_spent(orders=[order], rdp=[rho], delta=delta)
    assert chapter["epsilon_from_rdp"](rho, order, delta) == pytest.approx(float(theirs), rel=1e-12, abs=1e-12)


@pytest.mark.equation("eq-sampled-gaussian")
@pytest.mark.parametrize("sigma", [0.8, 2.0])
@pytest.mark.parametrize("order", [2, 5])
def test_two_dimensions_reduce_to_one_and_a_shorter_gradient_costs_less(sigma, order):
    """The mechanism itself, in the plane, with a gradient of length r in a slanted direction."""
    q, x = 0.3, np.linspace(-10 * sigma, order + 10 * sigma, 501)
    u, v = np.meshgrid(x, x)
    noise = np.exp(-(u**2 + v**2) / (2 * sigma**2)) * (x[1] - x[0]) ** 2 / (2 * np.pi * sigma**2)

    def plane(r):
        ratio = 1 - q + q * np.exp((2 * (0.6 * u + 0.8 * v) * r - r**2) / (2 * sigma**2))
        return math.log((noise * ratio**order).sum()) / (order - 1)

    found = chapter["rdp_sampled_gaussian"](sigma, q, order)
    assert plane(1.0) == pytest.approx(found, rel=1e-6)
    assert plane(0.5) < plane(0.9) < found


@pytest.mark.equation("eq-sampled-gaussian-rdp")
@settings(max_examples=40)
@given(sigmas, rates, whole_orders)
def test_binomial_sum_is_the_integral(sigma, rate, order):
    expected = divergence_by_quadrature(sigma, rate, order)
    assert chapter["rdp_sampled_gaussian"](sigma, rate, order) == pytest.approx(expected, rel=1e-6, abs=1e-11)


@pytest.mark.equation("eq-sampled-gaussian-rdp")
@given(sigmas, rates, st.integers(2, 1000))
def test_binomial_sum_agrees_with_opacus(sigma, rate, order):
    theirs = opacus_rdp.compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=[order])[0]
    assert chapter["rdp_sampled_gaussian"](sigma, rate, order) == pytest.approx(float(theirs), rel=1e-8, abs=1e-13)


@pytest.mark.equation("eq-small-rate")
@given(st.floats(1.0, 5.0), whole_orders, st.floats(1e-5, 1e-4))
def test_small_rates_cost_their_square(sigma, order, scale):
    rate = scale * math.exp(-(order - 1) / (2 * sigma**2)) / order  # well before the cliff of that order
    law = order * rate**2 * math.expm1(1 / sigma**2) / 2
    # In logarithms the sum is 1 plus something below the rounding of floats: subtract the 1 by hand.
    excess = math.fsum(
        math.comb(order, k) * rate**k * (1 - rate) ** (order - k) * math.expm1(k * (k - 1) / (2 * sigma**2))
        for k in range(2, order + 1)
    )
    assert math.log1p(excess) / (order - 1) == pytest.approx(law, rel=1e-2)


@pytest.mark.equation("eq-small-rate")
@pytest.mark.parametrize(("sigma", "order", "rate"), [(1.0, 3, 1e-3), (2.0, 8, 1e-3), (4.0, 16, 1e-2)])
def test_small_rates_cost_their_square_in_the_chapter_s_code(sigma, order, rate):
    law = order * rate**2 * math.expm1(1 / sigma**2) / 2
    assert chapter["rdp_sampled_gaussian"](sigma, rate, order) == pytest.approx(law, rel=0.05)


@pytest.mark.equation("eq-large-order")
@given(sigmas, rates, st.integers(2, 500))
def test_large_orders_cost_nearly_as_much_as_without_sampling(sigma, rate, order):
    bound = order / (2 * sigma**2) - order / (order - 1) * math.log(1 / rate)
    found = chapter["rdp_sampled_gaussian"](sigma, rate, order)
    assert bound - 1e-9 <= found <= order / (2 * sigma**2) + 1e-9


@pytest.mark.equation("eq-large-order")
@pytest.mark.parametrize("rate", [0.1, 1e-3])
def test_large_orders_reach_the_bound(rate):
    bound = 400 / 2 - 400 / 399 * math.log(1 / rate)
    assert chapter["rdp_sampled_gaussian"](1.0, rate, 400) == pytest.approx(bound, rel=1e-3)


@pytest.mark.equation("eq-rule-of-thumb")
@given(st.floats(0.6, 5.0), st.floats(1e-3, 0.1), st.integers(1, 5000), deltas)
def test_rule_of_thumb_is_the_minimum_over_orders(sigma, rate, steps, delta):
    mu = rate * math.sqrt(steps * math.expm1(1 / sigma**2))
    best = minimize_scalar(
        lambda log_a: math.exp(log_a) * mu**2 / 2 + mu**2 / 2 + math.log(1 / delta) / math.exp(log_a),
        bounds=(-20, 25),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert chapter["rule_of_thumb"](sigma, rate, steps, delta) == pytest.approx(best.fun, rel=1e-6)


@pytest.mark.equation("eq-rule-of-thumb")
@pytest.mark.parametrize(
    ("sigma", "rate", "steps"), [(1, 0.01, 1000), (1, 0.02, 1000), (2, 0.01, 5000), (4, 0.05, 1000)]
)
def test_rule_of_thumb_is_near_the_accountant(sigma, rate, steps):
    found = chapter["rule_of_thumb"](sigma, rate, steps, 1e-5)
    assert found == pytest.approx(chapter["epsilon"](sigma, rate, steps, 1e-5), rel=0.25)


def loss(x, sigma, rate):
    return math.log1p(rate * math.expm1((2 * x - 1) / (2 * sigma**2)))


@pytest.mark.equation("eq-loss-distribution")
@settings(max_examples=30)
@given(st.floats(0.5, 3.0), rates, st.floats(-2.0, 6.0))
def test_loss_distribution(sigma, rate, level):
    losses, probabilities = chapter["loss_distribution"](sigma, rate, 2e-3, 2**14)
    level = losses[round(level / 2e-3)]  # the grid's order is that of the Fourier transform, negative losses last
    below = probabilities[losses <= level].sum()
    expected = 0.0
    if level > math.log1p(-rate):
        top = 0.5 + sigma**2 * (math.log(math.expm1(level) / rate + 1) if level > -30 else -30)
        crossing = brentq(lambda x: loss(x, sigma, rate) - level, top - 5 * sigma, top + 5 * sigma, xtol=1e-13)
        edges = [min(crossing, c) for c in (-12 * sigma, 0.0, 1.0)]
        expected = sum(
            quad(lambda x: (1 - rate) * pdf(x, 0, sigma) + rate * pdf(x, 1, sigma), a, b, epsabs=1e-13)[0]
            for a, b in zip(edges, [*edges[1:], crossing], strict=True)
        )
    assert below == pytest.approx(expected, abs=1e-9)


@pytest.mark.equation("eq-bump")
@given(sigmas, st.integers(1, 200), st.floats(0.0, 2.0), st.floats(-3.0, 12.0))
def test_bump_is_the_probability_that_the_largest_exceeds(sigma, batches, height, threshold):
    heights = [height] + [0.0] * (batches - 1)
    expected = 1 - math.prod(cdf((threshold - h) / sigma) for h in heights)
    assert chapter["bump"](sigma, batches, height, threshold) == pytest.approx(expected, abs=1e-12)


@pytest.mark.equation("eq-bump")
@pytest.mark.parametrize(("alice", "height"), [(1, 2), (0, 1)])
def test_bump_has_the_height_that_a_shuffled_epoch_gives_it(alice, height):
    """Every way to cut six examples into batches of two: one bump, of that height, and nothing else."""
    from itertools import permutations

    sums = {tuple(sorted(sum(order[i : i + 2]) + 2 for i in (0, 2, 4))) for order in permutations([alice] + [-1] * 5)}
    assert sums == {(0, 0, height)}


@pytest.mark.equation("eq-attack-epsilon")
@given(seeds, deltas)
def test_no_attack_proves_more_than_is_true(seed, delta):
    p, q = distributions(seed, 2, 6)
    order = np.argsort(-p / q)
    hit, alarm = np.cumsum(p[order])[:-1], np.cumsum(q[order])[:-1]  # the best tests, by Neyman and Pearson
    proved = chapter["attack_epsilon"](hit, alarm, delta)
    assert proved == pytest.approx(max(math.log((h - delta) / a) for h, a in zip(hit, alarm, strict=True) if h > delta))
    if proved > 0:  # the best of them proves exactly the truth
        assert exact_delta(p, q, proved) == pytest.approx(delta, rel=1e-6, abs=1e-12)


@pytest.mark.equation("eq-noise-of-budget")
@given(st.floats(0.1, 1.0), st.integers(100, 10_000), st.floats(0.1, 1.0), st.floats(0.1, 5.0))
def test_noise_of_a_budget_does_not_know_the_batch_size(mu, steps, rate, max_grad_norm):
    n = 50_000
    sigma = brentq(lambda s: rate * math.sqrt(steps * math.expm1(1 / s**2)) - mu, 0.1, 1e6)
    found = chapter["noise_of_budget"](mu, steps, n, max_grad_norm)
    exact = sigma * max_grad_norm / (rate * n)
    assert exact >= found * (1 - 1e-9)
    assert exact == pytest.approx(found, rel=math.sqrt(sigma**2 * math.expm1(1 / sigma**2)) - 1 + 1e-9)

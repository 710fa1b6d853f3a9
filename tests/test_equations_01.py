"""Chapter 1's equations, each evaluated a second way in float64, against the chapter's own code."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from notebook import definitions
from scipy.integrate import quad

chapter = definitions("book/01_what_privacy_promises.ipynb")

epsilons = st.floats(0.0, 5.0)
mus = st.floats(0.1, 4.0)
rates = st.floats(0.001, 0.999)
seeds = st.integers(0, 2**32 - 1)


def pdf(x: float, center: float = 0.0) -> float:
    return math.exp(-((x - center) ** 2) / 2) / math.sqrt(2 * math.pi)


def cdf(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def hockey_stick(epsilon: float, mu: float) -> float:
    """The integral of max(0, p - e^epsilon q) for N(mu, 1) against N(0, 1), from the point where the two are equal."""
    crossing = epsilon / mu + mu / 2
    excess = quad(
        lambda x: pdf(x, mu) - math.exp(epsilon) * pdf(x), crossing, crossing + 12, epsabs=1e-13, epsrel=1e-12
    )
    return excess[0]


def worst_pair(epsilon: float, delta: float = 0.0) -> tuple[list[float], list[float]]:
    """The two distributions on four outputs that are exactly (epsilon, delta)-close, and no closer."""
    high, low = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    p = [delta, (1 - delta) * high, (1 - delta) * low, 0.0]
    return p, p[::-1]


def exact_delta(pair: tuple[list[float], list[float]], k: int, epsilon: float) -> float:
    """delta(epsilon) of k independent draws from a pair of discrete distributions, by listing all outcomes."""
    total = 0.0
    for outcome in product(range(len(pair[0])), repeat=k):
        p = math.prod(pair[0][i] for i in outcome)
        q = math.prod(pair[1][i] for i in outcome)
        total += max(0.0, p - math.exp(epsilon) * q)
    return total


@pytest.mark.equation("eq-sensitivity")
@given(seeds)
def test_sensitivity_is_the_largest_distance_between_neighbors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    datasets = [data for size in range(4) for data in product((0, 1), repeat=size) if list(data) == sorted(data)]
    table = {data: rng.normal(size=2) for data in datasets}

    def counts(data: tuple[int, ...]) -> tuple[int, int]:
        return data.count(0), data.count(1)

    add, swap = 0.0, 0.0
    for a, b in product(datasets, repeat=2):
        (a0, a1), (b0, b1) = counts(a), counts(b)
        distance = math.hypot(*(table[a] - table[b]))
        if abs(a0 - b0) + abs(a1 - b1) == 1:
            add = max(add, distance)
        if (a0 - b0, a1 - b1) in {(1, -1), (-1, 1)}:
            swap = max(swap, distance)
    assert chapter["brute_force"](table.__getitem__, (0, 1)) == pytest.approx((add, swap))


@pytest.mark.equation("eq-clip-row")
@given(seeds, st.floats(0.01, 10), st.integers(1, 6))
def test_clip_shortens_to_the_norm_and_no_more(seed: int, max_norm: float, d: int) -> None:
    rows = np.random.default_rng(seed).normal(scale=3, size=(5, d))
    rows[0] = 0
    expected = [[x * min(1, max_norm / math.hypot(*row)) if any(row) else 0.0 for x in row] for row in rows]
    np.testing.assert_allclose(chapter["clip"](rows, max_norm), expected, rtol=1e-12)


@given(seeds, st.floats(0.1, 10))
def test_clipped_sums_of_neighbors_are_within_the_norm(seed: int, max_norm: float) -> None:
    rows = np.random.default_rng(seed).normal(scale=20, size=(6, 3))
    sums = chapter["clip"](rows, max_norm).sum(0)
    for i in range(len(rows)):
        neighbor = chapter["clip"](np.delete(rows, i, axis=0), max_norm).sum(0)
        assert math.hypot(*(sums - neighbor)) <= max_norm * (1 + 1e-9)
    opposite = chapter["clip"](np.array([[99.0, 0, 0], [-99.0, 0, 0]]), max_norm)
    assert math.hypot(*(opposite[0] - opposite[1])) == pytest.approx(2 * max_norm)


def test_clip_agrees_with_the_module() -> None:
    torch = pytest.importorskip("torch")
    from dpivon.gradients import clip_factors

    rows = np.random.default_rng(0).normal(scale=2, size=(50, 4))
    factors = clip_factors(torch.from_numpy(np.linalg.norm(rows, axis=1)), 3.0).numpy()
    np.testing.assert_allclose(chapter["clip"](rows, 3.0), factors[:, None] * rows, rtol=1e-6)


@pytest.mark.equation("eq-randomized-response")
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("answer", [True, False])
def test_randomized_response_tells_the_truth_with_probability_p(epsilon: float, answer: bool) -> None:
    n = 400_000
    truth = np.full(n, answer)
    share = np.mean(chapter["randomized_response"](truth, epsilon, np.random.default_rng(1)) == answer)
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / n)


@pytest.mark.equation("eq-debias")
@given(st.floats(0, 1), st.floats(0.1, 8))
def test_debias_inverts_the_expected_share(share: float, epsilon: float) -> None:
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    observed = share * p + (1 - share) * (1 - p)
    assert chapter["debias"](observed, epsilon) == pytest.approx(share, abs=1e-12)


@pytest.mark.equation("eq-dp")
@given(epsilons, mus, st.floats(-8, 8), st.floats(0, 8))
def test_the_profile_keeps_the_promise_on_intervals(epsilon: float, mu: float, low: float, width: float) -> None:
    delta = chapter["delta_gaussian"](epsilon, mu)
    inside = [cdf(low + width - center) - cdf(low - center) for center in (mu, 0.0)]
    assert inside[0] <= math.exp(epsilon) * inside[1] + delta + 1e-12
    assert inside[1] <= math.exp(epsilon) * inside[0] + delta + 1e-12
    crossing = epsilon / mu + mu / 2  # the worst set: here the promise holds with equality
    worst = cdf(mu - crossing) - math.exp(epsilon) * cdf(-crossing)
    assert worst == pytest.approx(delta, rel=1e-6, abs=1e-12)


@pytest.mark.equation("eq-posterior")
@given(rates, epsilons)
def test_posterior_bound_is_bayes_rule_at_the_largest_ratio(prior: float, epsilon: float) -> None:
    p, q = worst_pair(epsilon)
    by_bayes = prior * p[1] / (prior * p[1] + (1 - prior) * q[1])
    assert chapter["posterior_bound"](prior, epsilon) == pytest.approx(by_bayes, rel=1e-12)


@pytest.mark.equation("eq-gaussian-mechanism")
@pytest.mark.parametrize(("sensitivity", "noise_multiplier"), [(1.0, 1.0), (5.0, 0.5), (0.1, 4.0)])
def test_gaussian_mechanism_has_the_stated_mean_and_covariance(sensitivity: float, noise_multiplier: float) -> None:
    value = np.tile([3.0, -7.0], (200_000, 1))
    noise = chapter["gaussian_mechanism"](value, sensitivity, noise_multiplier, np.random.default_rng(2)) - value
    std = noise_multiplier * sensitivity
    assert np.abs(noise.mean(0)).max() < 4 * std / math.sqrt(len(noise))
    np.testing.assert_allclose(np.cov(noise.T), std**2 * np.eye(2), atol=0.02 * std**2)
    kurtosis = np.mean(noise**4) / np.mean(noise**2) ** 2
    assert kurtosis == pytest.approx(3, abs=0.1)


@pytest.mark.equation("eq-privacy-loss")
@pytest.mark.equation("eq-loss-densities")
@given(seeds, st.floats(0.3, 5), st.integers(1, 5))
def test_privacy_loss_is_the_difference_of_log_densities(seed: int, noise_std: float, d: int) -> None:
    output, value, neighbor = np.random.default_rng(seed).normal(scale=2, size=(3, d))
    log_p = sum(math.log(pdf((o - v) / noise_std) / noise_std) for o, v in zip(output, value, strict=True))
    log_q = sum(math.log(pdf((o - v) / noise_std) / noise_std) for o, v in zip(output, neighbor, strict=True))
    loss = chapter["privacy_loss"](output, value, neighbor, noise_std)
    assert loss == pytest.approx(log_p - log_q, rel=1e-9, abs=1e-9)


@pytest.mark.equation("eq-loss-normal")
@given(seeds, st.floats(0.3, 5), st.integers(1, 6))
def test_privacy_loss_is_affine_in_one_standard_normal(seed: int, noise_std: float, d: int) -> None:
    value, neighbor, xi = np.random.default_rng(seed).normal(size=(3, d))
    v = value - neighbor
    mu = math.hypot(*v) / noise_std
    along = sum(a * b for a, b in zip(v, xi, strict=True)) / math.hypot(*v)
    loss = chapter["privacy_loss"](value + noise_std * xi, value, neighbor, noise_std)
    assert loss == pytest.approx(mu**2 / 2 + mu * along, rel=1e-9, abs=1e-9)
    other_world = chapter["privacy_loss"](neighbor + noise_std * xi, value, neighbor, noise_std)
    assert other_world == pytest.approx(-(mu**2) / 2 + mu * along, rel=1e-9, abs=1e-9)


@pytest.mark.equation("eq-delta-losses")
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=6), epsilons)
def test_delta_is_the_largest_excess_over_all_sets(counts: list[tuple[int, int]], epsilon: float) -> None:
    p = [a / sum(a for a, _ in counts) for a, _ in counts]
    q = [b / sum(b for _, b in counts) for _, b in counts]
    # One entry an equally probable draw from p, so that the plain mean is the expectation under p.
    losses = np.concatenate([np.full(a, math.log(x / y)) for (a, _), x, y in zip(counts, p, q, strict=True)])
    excess = max(
        sum((x - math.exp(epsilon) * y) for x, y, chosen in zip(p, q, subset, strict=True) if chosen)
        for subset in product((False, True), repeat=len(p))
    )
    assert chapter["delta_from_losses"](losses, epsilon) == pytest.approx(excess, abs=1e-12)


@pytest.mark.equation("eq-profile")
@given(epsilons, mus)
def test_profile_is_the_integral_of_the_excess(epsilon: float, mu: float) -> None:
    assert chapter["delta_gaussian"](epsilon, mu) == pytest.approx(hockey_stick(epsilon, mu), rel=1e-6, abs=1e-12)


@given(epsilons, st.floats(0.25, 4.0))
def test_profile_agrees_with_dp_accounting(epsilon: float, mu: float) -> None:
    peer = pytest.importorskip("dp_accounting.pld.privacy_loss_mechanism")
    gaussian = peer.GaussianPrivacyLoss(1 / mu)
    expected = gaussian.get_delta_for_epsilon(epsilon)
    assert chapter["delta_gaussian"](epsilon, mu) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_profile_survives_large_epsilon() -> None:
    assert chapter["delta_gaussian"](1000.0, 50.0) == pytest.approx(cdf(5.0), rel=0.1)
    assert chapter["delta_gaussian"](1000.0, 1.0) == 0


@pytest.mark.equation("eq-profile-slope")
@given(epsilons, st.floats(0.3, 3.0))
def test_profile_grows_with_mu_at_the_stated_rate(epsilon: float, mu: float) -> None:
    h = 1e-5
    slope = (chapter["delta_gaussian"](epsilon, mu + h) - chapter["delta_gaussian"](epsilon, mu - h)) / (2 * h)
    assert slope == pytest.approx(pdf(mu / 2 - epsilon / mu), abs=1e-8)


@pytest.mark.equation("eq-epsilon-tail")
@given(st.floats(0.05, 6.0), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_epsilon_inverts_the_profile_below_its_tail_bound(mu: float, delta: float) -> None:
    epsilon = chapter["epsilon_gaussian"](mu, delta)
    assert hockey_stick(epsilon, mu) == pytest.approx(delta, rel=1e-4)
    bound = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    assert 0 < epsilon <= bound
    assert hockey_stick(bound, mu) <= delta


@given(st.floats(0.1, 8.0), st.sampled_from([1e-3, 1e-5, 1e-8]))
def test_noise_for_inverts_the_profile(epsilon: float, delta: float) -> None:
    sigma = chapter["noise_for_gaussian"](epsilon, delta)
    assert hockey_stick(epsilon, 1 / sigma) == pytest.approx(delta, rel=1e-4)


def test_epsilon_is_zero_where_delta_alone_suffices() -> None:
    assert chapter["epsilon_gaussian"](0.01, 0.1) == 0.0


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.parametrize("sigma", [0.8, 1.5, 4.0])
@pytest.mark.parametrize("steps", [1, 9])
def test_epsilon_agrees_with_the_module(sigma: float, steps: int) -> None:
    from dpivon import accounting

    mine = chapter["epsilon_gaussian"](chapter["compose_gaussian"](np.full(steps, 1 / sigma)), 1e-5)
    theirs = accounting.epsilon(sigma, sample_rate=1.0, steps=steps, delta=1e-5, accountant="prv")
    assert mine <= theirs <= mine + 0.02


@pytest.mark.equation("eq-tradeoff-dp")
@given(epsilons, st.floats(0, 0.3), rates)
def test_tradeoff_is_the_best_test_of_the_worst_pair(epsilon: float, delta: float, alpha: float) -> None:
    p, q = worst_pair(epsilon, delta)
    best, budget = 1.0, alpha  # spend the false alarms on the outputs with the largest ratio p / q first
    for x, y in sorted(zip(p, q, strict=True), key=lambda pair: -pair[0] / max(pair[1], 1e-300)):
        share = 1.0 if y == 0 else min(1.0, budget / y)
        best, budget = best - share * x, budget - share * y
    assert chapter["tradeoff_dp"](alpha, epsilon, delta) == pytest.approx(best, abs=1e-9)


@pytest.mark.equation("eq-tradeoff-gaussian")
@given(rates, mus)
def test_tradeoff_of_the_gaussian_by_its_threshold(alpha: float, mu: float) -> None:
    low, high = -10.0, 10.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if cdf(-middle) > alpha else (low, middle)
    assert chapter["tradeoff_gaussian"](alpha, mu) == pytest.approx(cdf(low - mu), rel=1e-6, abs=1e-12)


@pytest.mark.equation("eq-profile-tangent")
@given(st.floats(0, 3), st.floats(0.3, 3))
def test_profile_is_the_largest_gap_below_the_tradeoff(epsilon: float, mu: float) -> None:
    alphas = np.append(np.logspace(-12, -2, 20_000), np.linspace(0.01, 1, 20_000))
    gap = 1 - chapter["tradeoff_gaussian"](alphas, mu) - math.exp(epsilon) * alphas
    assert gap.max() == pytest.approx(chapter["delta_gaussian"](epsilon, mu), abs=1e-6)
    assert np.all(chapter["tradeoff_gaussian"](alphas, mu) >= chapter["tradeoff_dp"](alphas, epsilon, gap.max()) - 1e-6)


@pytest.mark.equation("eq-auc")
@given(mus)
def test_auc_is_the_chance_that_the_participant_scores_higher(mu: float) -> None:
    chance = quad(lambda x: pdf(x, mu) * cdf(x), -10, 14, epsabs=1e-12, epsrel=1e-12)[0]
    assert chapter["auc_gaussian"](mu) == pytest.approx(chance, abs=1e-9)


@pytest.mark.equation("eq-composition-gaussian")
@pytest.mark.parametrize(("first", "second"), [(1.0, 1.0), (0.5, 1.5), (2.0, 0.7)])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_two_gaussian_releases_equal_one(first: float, second: float, epsilon: float) -> None:
    # Release both: given the first output x, the second must bring the loss that is still missing.
    def inner(x: float) -> float:
        missing = epsilon - first * x + first**2 / 2
        crossing = missing / second + second / 2
        p, q = pdf(x, first) * cdf(second - crossing), pdf(x) * cdf(-crossing)
        return p - math.exp(epsilon) * q

    exact = quad(inner, -10, 14, epsabs=1e-12, epsrel=1e-12, limit=200)[0]
    mu = chapter["compose_gaussian"]([first, second])
    assert chapter["delta_gaussian"](epsilon, mu) == pytest.approx(exact, abs=1e-9)


@pytest.mark.equation("eq-composition-basic")
@pytest.mark.parametrize(("epsilon", "delta", "k"), [(0.5, 0.0, 4), (1.0, 0.01, 3), (0.1, 0.1, 5)])
def test_basic_composition_holds_and_is_tight_without_delta(epsilon: float, delta: float, k: int) -> None:
    total_epsilon, total_delta = chapter["compose_basic"](epsilon, delta, k)
    assert (total_epsilon, total_delta) == pytest.approx((sum([epsilon] * k), sum([delta] * k)))
    assert exact_delta(worst_pair(epsilon, delta), k, total_epsilon) <= total_delta + 1e-12
    if delta == 0:
        assert exact_delta(worst_pair(epsilon), k, 0.9 * total_epsilon) > 0


@pytest.mark.equation("eq-mean-loss")
@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)), min_size=2, max_size=6), st.integers(1, 50))
def test_mean_loss_is_of_second_order(weights: list[tuple[float, float]], k: int) -> None:
    p, q = (np.array(column) / sum(column) for column in zip(*weights, strict=True))
    losses = np.log(p / q)
    epsilon = float(np.abs(losses).max())
    assert p @ losses <= p @ losses - q @ losses + 1e-12
    bound = epsilon * (math.exp(epsilon) - 1)
    assert p @ losses - q @ losses <= bound + 1e-12
    # What advanced composition adds for each release when the random walk is left out (no slack needed).
    assert chapter["compose_advanced"](epsilon, 0.0, k, 1.0)[0] == pytest.approx(k * bound)


@pytest.mark.equation("eq-composition-advanced")
@pytest.mark.parametrize(
    ("epsilon", "delta", "k", "slack"), [(0.1, 0.0, 9, 0.01), (0.3, 0.001, 5, 0.1), (1.0, 0.0, 6, 0.2)]
)
def test_advanced_composition_holds(epsilon: float, delta: float, k: int, slack: float) -> None:
    total_epsilon, total_delta = chapter["compose_advanced"](epsilon, delta, k, slack)
    walk = math.sqrt(2 * k * math.log(1 / slack)) * epsilon
    assert total_epsilon == pytest.approx(walk + sum([epsilon * math.expm1(epsilon)] * k))
    assert total_delta == pytest.approx(sum([delta] * k) + slack)
    pair = worst_pair(epsilon, delta)
    if delta == 0:  # two outputs suffice, and nine draws of four would be many
        pair = (pair[0][1:3], pair[1][1:3])
    assert exact_delta(pair, k, total_epsilon) <= total_delta


@pytest.mark.equation("eq-group-gaussian")
@given(epsilons, st.floats(0.1, 1.0), st.integers(1, 4))
def test_group_of_rows_moves_the_mean_that_much_further(epsilon: float, mu: float, g: int) -> None:
    group = chapter["group_gaussian"](mu, g)
    assert chapter["delta_gaussian"](epsilon, group) == pytest.approx(
        hockey_stick(epsilon, sum([mu] * g)), rel=1e-6, abs=1e-12
    )


@pytest.mark.equation("eq-group-dp")
@given(st.floats(0.0, 2.0), st.floats(0.1, 1.5), st.integers(1, 4))
def test_group_budget_is_the_promise_applied_step_by_step(epsilon: float, mu: float, g: int) -> None:
    delta = hockey_stick(epsilon, mu)
    factor, slack = 1.0, 0.0
    for _ in range(g):  # Pr_i <= e^epsilon Pr_(i+1) + delta, put into what is bounded already
        slack, factor = slack + factor * delta, factor * math.exp(epsilon)
    total_epsilon, total_delta = chapter["group_dp"](epsilon, delta, g)
    assert math.exp(total_epsilon) == pytest.approx(factor)
    assert total_delta == pytest.approx(slack)
    assert hockey_stick(g * epsilon, g * mu) <= total_delta + 1e-9


@pytest.mark.parametrize("n", [5, 20])
def test_membership_score_is_symmetric_around_the_midpoint(n: int) -> None:
    rng = np.random.default_rng(3)
    row = rng.normal(size=8)
    noise = rng.normal(size=(400_000, 8)) / math.sqrt(n)
    outside = chapter["membership_score"](row, noise, n)
    inside = chapter["membership_score"](row, noise + row / n, n)
    half = row @ row / (2 * n)
    assert outside.mean() == pytest.approx(-half, abs=0.01)
    assert inside.mean() == pytest.approx(half, abs=0.01)
    assert outside.std() == pytest.approx(math.sqrt(row @ row / n), rel=0.01)

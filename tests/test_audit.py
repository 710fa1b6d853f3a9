"""Audits: bounds that hold, agree with a peer's, find what they should, and refute no true claim."""

import importlib.util
import math
import sys
from importlib.metadata import distribution

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpivon import accounting, audit, data, methods, train

DELTA = 1e-5


@pytest.fixture(scope="module")
def digits():
    return data.digits()


@pytest.fixture(scope="module")
def peer():
    """jax_privacy's auditing module alone: it needs neither jax nor the rest of the package, which is not installed."""
    path = distribution("jax-privacy").locate_file("jax_privacy/auditing.py")
    spec = importlib.util.spec_from_file_location("peer_auditing", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    monkeypatch.undo()


def gaussian_scores(mu, m, seed):
    """What a Gaussian mechanism with parameter mu shows of m canaries, and their coins."""
    source = torch.Generator().manual_seed(seed)
    included = torch.rand(m, generator=source) < 0.5
    return mu * included + torch.randn(m, generator=source), included


# Statistics.


@given(st.integers(0, 50), st.integers(1, 50), st.floats(0.001, 0.5))
def test_the_upper_bound_is_clopper_and_pearsons(errors, more, significance):
    trials = errors + more
    expected = stats.binomtest(errors, trials, alternative="less").proportion_ci(1 - significance, "exact").high
    assert audit.upper(errors, trials, significance) == pytest.approx(expected)
    assert audit.upper(trials, trials, significance) == 1.0


@pytest.mark.parametrize("mu", [0.5, 1.5, 3.0])
def test_the_peer_finds_the_same_bounds_from_the_same_scores(peer, mu):
    scores, included = gaussian_scores(mu, 2000, seed=0)
    theirs = peer.CanaryScoreAuditor(scores[included].double().numpy(), scores[~included].double().numpy())
    for threshold in (0.3, 1.1, 2.0):
        explicit = peer.Explicit(float(threshold))
        got = audit.rates_bound(scores, included, DELTA, threshold=threshold)
        expected = theirs.epsilon_clopper_pearson(0.05, DELTA, one_sided=False, threshold_strategy=explicit)
        assert got == pytest.approx(expected, abs=1e-6)

        above = scores >= threshold
        got = audit.one_run_epsilon(DELTA, len(scores), int(above.sum()), int((above & included).sum()), 0.05)
        expected = theirs.epsilon_one_run(0.05, DELTA, threshold_strategy=explicit)
        assert got == pytest.approx(expected, abs=1e-5)

        guessed = above.double().numpy()  # two values: few thresholds for the peer to correct for
        binary = peer.CanaryScoreAuditor(guessed[included.numpy()], guessed[~included.numpy()])
        corrected = 0.05 * len(binary._fn_counts)
        got = audit.gaussian_bound(scores, included, DELTA, threshold=threshold)
        assert got == pytest.approx(binary.epsilon_from_gdp(corrected, DELTA), abs=1e-5)


def test_the_p_value_is_the_published_formula():
    """Written out as sums over the binomial distribution."""
    m, r, v, epsilon, delta = 60, 30, 27, 1.0, 1e-3
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    mass = [math.comb(r, k) * p**k * (1 - p) ** (r - k) for k in range(r + 1)]
    f = [sum(mass[k:]) for k in range(r + 1)]
    expected = f[v] + 2 * m * delta * max((f[v - i] - f[v]) / i for i in range(1, v + 1))
    assert audit.one_run_p_value(epsilon, delta, m, r, v) == pytest.approx(expected, rel=1e-9)
    assert audit.one_run_p_value(epsilon, 0.0, m, r, v) == pytest.approx(f[v], rel=1e-9)


def test_epsilon_of_mu_inverts_the_gaussian_profile():
    for mu in (0.1, 1.0, 4.0):
        epsilon = audit.epsilon_of_mu(mu, DELTA)
        cdf = stats.norm.cdf
        profile = cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * cdf(-epsilon / mu - mu / 2)
        assert profile == pytest.approx(DELTA, rel=1e-6)
        assert audit.epsilon_of_mu(1 / audit.noise_of(epsilon, DELTA), DELTA) == pytest.approx(epsilon, abs=1e-6)
    assert audit.epsilon_of_mu(1e-6, DELTA) == 0.0
    assert audit.epsilon_of_mu(1e3, DELTA) == 100.0


BOUNDS = {
    "rates": audit.rates_bound,
    "gaussian": audit.gaussian_bound,
    "one run": audit.one_run_bound,
    "rates, fixed threshold": lambda *a: audit.rates_bound(*a, threshold=0.5),
    "gaussian, fixed threshold": lambda *a: audit.gaussian_bound(*a, threshold=0.5),
}


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_bounds_are_wrong_as_rarely_as_they_say(bound):
    """200 audits of a true claim at 95%: at most 10 wrong in expectation, 19 at three standard deviations."""
    mu = 1.0
    true = audit.epsilon_of_mu(mu, DELTA)
    found = [bound(*gaussian_scores(mu, 400, seed), DELTA) for seed in range(200)]
    assert sum(value > true for value in found) <= 19
    assert max(found) > 0


def test_choosing_the_best_of_many_guesses_without_paying_would_be_wrong_too_often():
    """Why each number of guesses pays its share: with nothing to find, the best of all is far too often significant."""
    wrong = 0
    for seed in range(40):
        scores, included = gaussian_scores(0.0, 100, seed)
        ranked = included[scores.argsort(descending=True)].int().cumsum(0).tolist()
        wrong += any(audit.one_run_p_value(0.0, 0.0, 100, r, ranked[r - 1]) < 0.05 for r in range(1, 101))
        assert audit.one_run_bound(scores, included, 0.0, significance=1e-6) == 0
    assert wrong > 6  # two would be right


def test_stronger_leaks_certify_more():
    certified = [audit.one_run_bound(*gaussian_scores(mu, 2000, 0), DELTA) for mu in (0.0, 1.0, 2.0, 4.0, 100.0)]
    assert certified == sorted(certified)
    assert certified[0] == 0
    assert certified[-1] > 4.5


def test_bad_input_is_named():
    for epsilon in (0.0, 150.0, float("inf")):
        with pytest.raises(ValueError, match=rf"epsilon must be in \(0, 100\).*got {epsilon:g}"):
            audit.noise_of(epsilon, DELTA)
    scores, included = gaussian_scores(1.0, 10, 0)
    with pytest.raises(ValueError, match="10 in and 0 out; plant more"):
        audit.rates_bound(scores, torch.ones(10, dtype=torch.bool), DELTA, threshold=0.5)
    with pytest.raises(ValueError, match=r"guesses must be even and between 2 and .* 10, got \[3\]"):
        audit.one_run_bound(scores, included, DELTA, guesses=[3])


# Attacks.


@pytest.mark.parametrize("seed", [0, 1])
def test_the_full_batch_attack_certifies_nine_tenths_of_a_true_claim(seed):
    noise_multiplier = audit.noise_of(4.0, DELTA)
    found = audit.full_batch(noise_multiplier=noise_multiplier, seed=seed)
    claimed = accounting.epsilon(noise_multiplier, 1.0, 1, DELTA, "prv")
    assert found.claimed == pytest.approx(claimed, rel=0.01)
    assert 0.9 * claimed < found.epsilon < found.claimed
    assert not found.rejected


def test_canaries_are_as_loud_as_clipping_allows_and_disturb_nobody(digits):
    """In the private gradient without noise, a canary that is in moves its own weight by C / b, and nothing else."""
    included = audit.coins(50, seed=0)
    images = audit.plant(digits, included)
    now = audit.started(train.resolve(train.Config(method="dp-sgd", noise_multiplier=0.0, seed=0)), digits, 50, images)
    now.dp.noise_multiplier = 0.0
    now.gradient(now.model, now.loss, images.x_train[-50:], images.y_train[-50:])
    expected = included.float() * now.config.max_grad_norm / now.config.batch_size
    torch.testing.assert_close(now.model.canary.grad, expected, rtol=1e-4, atol=1e-9)
    assert all(p.grad.abs().max() == 0 for p in now.model.model.parameters())


PRIVATE = [name for name, method in methods.METHODS.items() if method.private]


@pytest.mark.parametrize("name", PRIVATE)
def test_every_private_method_passes(digits, name):
    config = train.Config(method=name, epsilon=2.0, epochs=6, seed=0)
    white = audit.white_box(config, digits, canaries=1000)
    assert set(white.bounds) == {"gradients", "weights"} | ({"h"} & set(white.scores)) | (
        {"second_moment"} & set(white.scores)
    )
    assert not white.rejected
    assert white.claimed == pytest.approx(2.0, abs=0.1)
    assert white.epsilon > 0.1  # the attack sees something, or passing it would mean nothing


def test_the_attack_on_predictions_sees_a_model_that_is_hardly_private(digits):
    """At a claim of almost nothing it certifies something; a stated epsilon of 2 it does not refute."""
    hardly = train.Config(method="dp-sgd", noise_multiplier=1e-3, epochs=40, seed=0, max_grad_norm=20.0)
    weak = audit.black_box(hardly, digits)
    assert weak.epsilon > 0.5
    assert not audit.black_box(train.Config(method="dp-sgd", epsilon=2.0, epochs=10, seed=0), digits).rejected


def test_the_attack_on_predictions_reads_every_kind_of_network(digits):
    for name in ("dp-bbp-joint", "dp-mc-dropout"):
        found = audit.black_box(train.Config(method=name, epsilon=2.0, epochs=1, seed=0), digits, canaries=50)
        assert len(found.scores["loss"]) == 50
        assert len(found.scores["loss"].unique()) > 40


def test_an_audit_needs_a_seed_and_a_claim(digits):
    with pytest.raises(ValueError, match="noise_multiplier must be > 0 to make a claim, got 0"):
        audit.full_batch(noise_multiplier=0.0)
    with pytest.raises(ValueError, match="canaries must be at least 1, got 0"):
        audit.full_batch(noise_multiplier=1.0, canaries=0)
    with pytest.raises(ValueError, match="give the configuration a seed"):
        audit.white_box(train.Config(method="dp-sgd"), digits)
    with pytest.raises(ValueError, match="an audit trains on all examples, and holdout is 9"):
        audit.white_box(train.Config(method="dp-sgd", seed=0, holdout=9), digits)
    with pytest.raises(ValueError, match="'sgd' makes no claim"):
        audit.white_box(train.Config(method="sgd", seed=0), digits)
    with pytest.raises(ValueError, match=r"canaries must be fewer than the 1438 training images, got 5000"):
        audit.black_box(train.Config(method="dp-sgd", seed=0), digits, canaries=5000)

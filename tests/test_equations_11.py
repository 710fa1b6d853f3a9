"""The equations of the chapter on strong privacy and of the rules, each by simulation or a second way in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from notebook import definitions
from torch import nn

from dpivon import accounting, adaptive, curvature, ivon, metrics, predict, rules, snapshots

chapter = definitions("book/11_when_privacy_is_strong.ipynb")


@pytest.mark.equation("eq-relative-error-squares")
def test_the_error_of_a_group_of_squares():
    random = np.random.default_rng(0)
    s, size, n, steps = 0.5, 0.1, 40, 60
    g = size * random.choice([-1.0, 1.0], (400, n * steps))  # squares of exactly the mean size
    z = random.normal(size=g.shape)
    error = ((g + s * z) ** 2 - s**2).mean(1) / size**2 - 1
    formula = s**2 / size**2 * math.sqrt(2 / (n * steps))
    mixed = 1 + 2 * size**2 / s**2  # the term 2 s z g, which the text drops
    assert math.sqrt(np.mean(error**2)) == pytest.approx(formula * math.sqrt(mixed), rel=0.1)


@pytest.mark.equation("eq-resolved-squares")
@given(
    sigma=st.floats(0.5, 20), b=st.floats(10, 1e4), steps=st.floats(10, 1e4), P=st.floats(10, 1e7),
    C=st.floats(0.1, 10), kappa=st.floats(0.01, 1),
)  # fmt: skip
def test_a_group_at_the_resolution_of_squares_has_an_error_of_one(sigma, b, steps, P, C, kappa):
    s, v = sigma * C / b, kappa * C**2 / (b * P)
    n = 2 * s**4 / (v**2 * steps)
    for found in (
        chapter["resolution_of_squares"](sigma, b, steps, P, kappa),
        rules.resolved_by_squares(sigma, b, steps, P, kappa),
        P * steps * v**2 / (2 * s**4),
    ):
        assert found == pytest.approx(P / n)
    assert s**2 / v * math.sqrt(2 / (n * steps)) == pytest.approx(1)


@pytest.mark.equation("eq-resolved-price")
def test_the_error_of_a_group_of_price_estimates():
    """On a quadratic, whose curvature is known; the gradient's own noise is privacy's alone."""
    random = np.random.default_rng(0)
    s, h, width, n, steps = 0.5, 2.0, 0.05, 30, 80
    xi, z = random.normal(size=(2, 600, n * steps))
    found = ((h * width * xi + s * z) * xi / width).mean(1)
    own = 2 * h**2 / (n * steps)  # of the draws themselves, small beside the noise
    formula = s / (width * h) * math.sqrt(1 / (n * steps))
    assert found.mean() == pytest.approx(h, abs=4 * formula * h / math.sqrt(600))
    assert found.std() / h == pytest.approx(math.sqrt(formula**2 + own / h**2), rel=0.1)
    assert 1e6 * steps * width**2 * h**2 / s**2 == pytest.approx(1e6 / (n * formula**2))  # P / n where the error is 1


@pytest.mark.equation("eq-resolved-price-width")
@given(sigma=st.floats(0.5, 20), b=st.floats(10, 1e4), steps=st.floats(10, 1e4), n=st.floats(100, 1e6))
def test_price_at_the_posterior_s_width(sigma, b, steps, n):
    P, C, kappa = 5000.0, 0.7, 0.3
    h, s = kappa * C**2 / P, sigma * C / b
    general = P * steps * (1 / (n * h)) * h**2 / s**2
    assert chapter["resolution_of_price"](sigma, b, steps, n, kappa) == pytest.approx(general)
    assert rules.resolved_by_price(sigma, b, steps, n, kappa) == pytest.approx(general)


@pytest.mark.equation("eq-walk-width")
@pytest.mark.equation("eq-rule-walk")
@given(lr=st.floats(1e-3, 1), s=st.floats(1e-3, 1), steps=st.integers(1, 2000), x=st.floats(1e-3, 5))
def test_the_walk_of_a_weight_without_a_gradient(lr, s, steps, x):
    decay = x / (lr * steps)
    V = lr * s**2 / (2 * decay) * (1 - math.exp(-2 * lr * decay * steps))
    assert rules.walk_std(lr, s, steps, decay) == pytest.approx(math.sqrt(V))
    if lr * decay < 0.01:  # the recursion itself, of which the formula is the limit
        ratio = (1 - lr * decay) ** 2
        assert pytest.approx(lr**2 * s**2 * (1 - ratio**steps) / (1 - ratio), rel=0.02) == V
    if x < 0.01:
        assert pytest.approx(lr**2 * s**2 * steps, rel=0.02) == V


@pytest.mark.equation("eq-shrinkage")
def test_shrinkage_is_the_best_linear_guess():
    random = torch.Generator().manual_seed(0)
    n, tau, noise = 200_000, 0.6, 0.8
    truth = 3 + tau * torch.randn(n, generator=random, dtype=torch.float64)
    a = truth + noise * torch.randn(n, generator=random, dtype=torch.float64)
    found = curvature.shrunk(a, torch.full_like(a, noise**2), [n])
    k = tau**2 / (tau**2 + noise**2)
    torch.testing.assert_close(found, a.mean() + k * (a - a.mean()), atol=0.04, rtol=0)
    error = {kept: float((a.mean() + kept * (a - a.mean()) - truth).square().mean()) for kept in (k - 0.1, k, k + 0.1)}
    assert min(error, key=lambda kept: error[kept]) == k
    torch.testing.assert_close(curvature.shrunk(a, torch.full_like(a, 9.0), [n]), a.mean().expand(n))


@pytest.mark.equation("eq-averaged-loss")
@pytest.mark.equation("eq-jensen-gap")
def test_the_loss_of_an_average_and_its_gap():
    torch.manual_seed(0)
    logs = torch.randn(7, 50, 4, dtype=torch.float64).mul(2).log_softmax(-1)
    mean = logs.logsumexp(0) - math.log(7)
    gap = -logs.mean(0) + mean
    assert (gap >= -1e-12).all()
    kl = (mean.exp() * (mean - logs)).sum(-1).mean(0)
    torch.testing.assert_close((mean.exp() * gap).sum(-1), kl)
    entropy = -(mean.exp() * mean).sum(-1)
    torch.testing.assert_close(-(mean.exp() * logs.mean(0)).sum(-1) - entropy, kl)


@pytest.mark.equation("eq-averaged-loss")
def test_predicting_by_snapshots_averages_probabilities():
    torch.manual_seed(0)
    net, x, y = nn.Linear(3, 4), torch.randn(40, 3), torch.randint(4, (40,))
    optimizer = snapshots.keep(adaptive.sgd(net.parameters(), 0.5), steps=8, samples=4)
    each = []
    for t in range(8):
        for p in net.parameters():
            p.grad = torch.randn(p.shape)
        optimizer.step()
        if t >= 4:
            each.append(predict.log_probs(net, x))
    found = predict.log_probs(net, x, snapshots.kept(net, optimizer), 4)
    torch.testing.assert_close(found.exp(), torch.stack(each).exp().mean(0))
    losses = [metrics.nll(log_probs, y) for log_probs in each]
    assert metrics.nll(found, y) < np.mean(losses)


@pytest.mark.equation("eq-resolution-at-budget")
@given(mu=st.floats(0.01, 2), b=st.floats(10, 1e4), epochs=st.floats(1, 100), n=st.floats(1e4, 1e6))
def test_resolution_in_terms_of_the_budget(mu, b, epochs, n):
    P, kappa = 6e4, 0.4
    steps = epochs * n / b
    sigma = b * math.sqrt(steps) / (n * mu)
    squares, price = (
        rules.resolved_by_squares(sigma, b, steps, P, kappa),
        rules.resolved_by_price(sigma, b, steps, n, kappa),
    )
    assert squares == pytest.approx(kappa**2 * mu**4 * n**3 / (2 * b * epochs * P))
    assert price == pytest.approx(kappa * mu**2 * n)


@pytest.mark.equation("eq-resolved-release")
def test_a_direct_release_of_squares():
    """Its sensitivity, and the error of its groups, simulated."""
    random = np.random.default_rng(0)
    N, P, C, mu2, kappa = 400, 2000, 1.5, 0.8, 0.6
    g = random.normal(size=(N, P))
    g *= C * np.sqrt(kappa) / np.linalg.norm(g, axis=1, keepdims=True)
    assert np.linalg.norm(g**2, axis=1).max() <= C**2
    one = np.zeros(P)
    one[3] = C  # all in one coordinate: the bound is reached
    assert np.linalg.norm(one**2) == C**2
    R = kappa**2 * mu2**2 * N**2 / P
    n = P / R
    s2 = C**2 / (N * mu2)
    error = s2 * random.normal(size=(4000, round(n))).mean(1) / (g**2).mean()
    assert np.sqrt(np.mean(error**2)) == pytest.approx(1, rel=0.1)


@pytest.mark.equation("eq-rule-prior")
@given(C=st.floats(0.1, 10), P=st.floats(10, 1e7), w=st.floats(0.01, 1), u=st.floats(0.001, 1))
def test_the_prior_of_the_rule(C, P, w, u):
    assert rules.weight_decay(C, P, w, u) * w * math.sqrt(P) == pytest.approx(u * C)


@pytest.mark.equation("eq-rule-distance")
@given(steps=st.integers(1, 10_000), C=st.floats(0.1, 10), D=st.floats(1, 1e3))
def test_the_distance_of_the_rule(steps, C, D):
    assert rules.least_learning_rate(steps, C, D) * C * steps == pytest.approx(D)


def test_the_budget_s_distance_is_that_of_the_accountant_where_noise_is_strong():
    """mu stands for the budget in an exercise: runs of equal mu must cost about the same."""
    N, epochs = 50_000, 10
    spent = []
    for b in (2048, 8192):
        steps = round(epochs * N / b)
        sigma = b / N * math.sqrt(steps) / 0.2
        spent.append(accounting.epsilon(sigma, b / N, steps, 1e-5))
    assert spent[0] == pytest.approx(spent[1], rel=0.05)


@pytest.mark.equation("eq-lasting-error")
@given(beta2=st.floats(0.5, 0.999), A=st.floats(0.02, 10), damping=st.floats(1e-4, 0.01))
def test_an_estimate_that_stays_negative_carries_the_precision_to_a_point_far_below_it(beta2, A, damping):
    k = (1 - beta2) / (1 + beta2) * (A - damping)
    points = torch.tensor([k, k * (1 + 1e-6)], dtype=torch.float64)
    h = points - damping
    after = ivon.new_curvature(h, torch.full_like(h, -A), {"beta2": beta2, "weight_decay": damping}) + damping
    assert after[0].item() == pytest.approx(k, rel=1e-9)
    slope = (after[1] - after[0]) / (points[1] - points[0])
    assert slope.item() == pytest.approx(-beta2, rel=1e-3)

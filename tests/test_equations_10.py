"""The equations of the chapter on DP-IVON-Gradsq, each evaluated a second way in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from scipy import stats
from torch import nn

from dpivon import ivon, mechanism

chapter = definitions("book/10_dp_ivon_gradsq.ipynb")

seeds = st.integers(0, 2**31)
positive = st.floats(0.01, 10.0)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def linear(seed=0, features=3, classes=4):
    net = nn.Linear(features, classes).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=seeded(seed)))
    return net


def data(seed, n=9, features=3, classes=4):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, features)), rng.integers(classes, size=n)
    return torch.from_numpy(x), torch.from_numpy(y)


@pytest.mark.equation("eq-posterior-draw")
@settings(deadline=None)
@given(seeds, positive, st.floats(1.0, 1e4), st.floats(1e-4, 1.0))
def test_posterior_draw(seed, scale, ess, damping):
    """Coordinate by coordinate, and the draw that the module makes from the same generator."""
    m, h = torch.randn(20, generator=seeded(seed)).double(), scale * torch.rand(20, generator=seeded(seed)).double()
    theta = chapter["draw"](m, h, ess, damping, seeded(seed + 1))
    xi = torch.randn(20, generator=seeded(seed + 1), dtype=torch.float64)
    expected = [float(m[j]) + float(xi[j]) / math.sqrt(ess * (float(h[j]) + damping)) for j in range(20)]
    np.testing.assert_allclose(theta, expected, rtol=1e-12)
    p = nn.Parameter(m.clone())
    optimizer = ivon.IVON([p], lr=1.0, ess=ess, hess_init=scale, weight_decay=damping, generator=seeded(seed + 1))
    with optimizer.sampled_params():
        module = p.detach().clone()
    even = chapter["draw"](m, torch.full_like(m, scale), ess, damping, seeded(seed + 1))
    torch.testing.assert_close(module, even, rtol=1e-9, atol=1e-12)


def private_by_hand(net, x, y, C, sigma, b, z):
    """The private gradient of softmax regression, from outer products, one example at a time."""
    W, bias = (p.detach().numpy() for p in net.parameters())
    total = np.zeros(W.size + bias.size)
    for features, label in zip(x.numpy(), y.numpy(), strict=True):
        s = W @ features + bias
        p = np.exp(s - s.max())
        p /= p.sum()
        p[label] -= 1
        g = np.concatenate([np.outer(p, features).ravel(), p])
        total += g * min(1.0, C / (math.sqrt((g**2).sum()) + 1e-6))
    return (total + sigma * C * z) / b


@pytest.mark.equation("eq-private-at-draw")
@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.05, 5.0), st.floats(0.1, 5.0), st.integers(0, 9))
def test_private_at_draw(seed, C, sigma, size):
    net, (x, y), b = linear(seed), data(seed), 5
    x, y = x[:size], y[:size]
    each = chapter["example_gradients"](net, F.cross_entropy, chapter["weights"](net), x, y)
    z = chapter["standard_noise"](net, seeded(seed))
    found = (chapter["clip"](each, C).sum(0) + sigma * C * z) / b
    np.testing.assert_allclose(found, private_by_hand(net, x, y, C, sigma, b, z.numpy()), rtol=1e-8, atol=1e-10)
    optimizer = ivon.IVON(net.parameters(), lr=1.0, ess=9)
    dp = mechanism.mechanism(
        optimizer, noise_multiplier=sigma, max_grad_norm=C, batch_size=b, n=9, generator=seeded(seed)
    )
    mechanism.private_gradient(net, F.cross_entropy, x, y, dp)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in net.parameters()]), found, rtol=1e-8, atol=1e-10)


@pytest.mark.equation("eq-transcript")
@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.0, 0.95), st.floats(0.3, 0.999), st.floats(0.05, 2.0))
def test_transcript(seed, beta1, beta2, noise_std):
    """The replay is U_t of the released gradients: against the algorithm's lines in numpy, which has no data."""
    net, steps, ess, damping, alpha, h0 = linear(seed), 6, 50.0, 0.02, 0.1, 0.7
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(steps, 16))
    m, h, momentum = chapter["weights"](net).numpy().copy(), np.full(16, h0), np.zeros(16)
    for t in range(1, steps + 1):
        g = G[t - 1]
        h_hat = ess * np.maximum(g**2 - noise_std**2, 0)
        u = (1 - beta2) * (h_hat - h) / (h + damping)
        h = (h + damping) * (1 + u + u**2 / 2) - damping
        momentum = beta1 * momentum + (1 - beta1) * g
        m = m - alpha * (momentum / (1 - beta1**t) + damping * m) / (h + damping)
    released = [[torch.from_numpy(g[:12].reshape(4, 3)), torch.from_numpy(g[12:])] for g in G]
    mean, variance = chapter["replay"](
        net, released, seeded(seed), lr=alpha, ess=ess, hess_init=h0, beta1=beta1, beta2=beta2, weight_decay=damping,
        noise_std=noise_std, rescale_lr=False, curvature="noise-corrected",
    )  # fmt: skip
    np.testing.assert_allclose(mean, m, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(variance, 1 / (ess * (h + damping)), rtol=1e-8)


@pytest.mark.equation("eq-joint-privacy")
@settings(max_examples=30, deadline=None)
@given(seeds, st.floats(0.0, 1.5))
def test_joint_privacy(seed, epsilon):
    """Three draws, four outputs, all 4,096 sets of pairs: the slices' worst delta bounds the joint one."""
    rng = np.random.default_rng(seed)
    nu = rng.dirichlet(np.ones(3))
    P, Q = rng.dirichlet(np.ones(4), size=(2, 3))
    deltas = [
        max(
            sum(p[list(s)]) - math.exp(epsilon) * sum(q[list(s)])
            for k in range(5)
            for s in itertools.combinations(range(4), k)
        )
        for p, q in zip(P, Q, strict=True)
    ]
    inside = np.array(list(itertools.product((0, 1), repeat=12))).reshape(-1, 3, 4)
    left = (inside * P).sum(2)  # Pr[G in S_xi | D, xi], a column for each xi
    right = math.exp(epsilon) * (inside * Q).sum(2) + max(deltas)
    joint = (inside * nu[:, None] * P).sum((1, 2))
    np.testing.assert_allclose(joint, left @ nu, rtol=1e-12, atol=1e-15)
    assert (left @ nu <= right @ nu + 1e-12).all()
    final = math.exp(epsilon) * (inside * nu[:, None] * Q).sum((1, 2)) + max(deltas)
    np.testing.assert_allclose(right @ nu, final, rtol=1e-12)


@pytest.mark.equation("eq-share-moved")
@given(seeds, st.floats(0.5, 0.9999), st.integers(1, 60), positive)
def test_share_moved(seed, beta2, T, h0):
    """The average, step by step, against explicit weights that add up to one."""
    h_hat, h = np.random.default_rng(seed).exponential(size=T), h0
    for value in h_hat:
        h = beta2 * h + (1 - beta2) * value
    share = chapter["learned_share"](beta2, T)
    explicit = beta2 ** np.arange(T)[::-1]
    explicit /= explicit.sum()
    assert h == pytest.approx((1 - share) * h0 + share * float(explicit @ h_hat), rel=1e-9)


@pytest.mark.equation("eq-share-moved")
@pytest.mark.parametrize(("beta2", "T"), [(0.999, 500), (0.9999, 500)])
def test_the_module_forgets_its_start_at_that_rate(beta2, T):
    generator, group = seeded(0), {"beta2": beta2, "weight_decay": 0.0}
    low, high = (torch.full((2000,), start, dtype=torch.float64) for start in (1.0, 1.1))
    for _ in range(T):
        h_hat = torch.rand(2000, generator=generator, dtype=torch.float64)
        low, high = (ivon.new_curvature(h, h_hat, group) for h in (low, high))
    assert float((high - low).mean() / 0.1) == pytest.approx(1 - chapter["learned_share"](beta2, T), rel=0.01)


@pytest.mark.equation("eq-memory-rule")
@pytest.mark.parametrize(("c", "share"), [(2, 0.8647), (6, 0.99752), (12, 0.9999939)])
def test_memory_rule(c, share):
    assert chapter["learned_share"](1 - c / 100_000, 100_000) == pytest.approx(share, abs=1e-4)
    assert chapter["learned_share"](1 - c / 100_000, 100_000) == pytest.approx(1 - math.exp(-c), abs=2e-4)
    chosen = chapter["plan"](1000, 100, 10, 1.0, 1e-4, c=c)
    assert chosen["T"] == 100
    assert chosen["beta2"] == pytest.approx(1 - c / 100)


@pytest.mark.equation("eq-curvature-path")
@pytest.mark.parametrize(("h0", "close"), [(0.05, 0.08), (0.2, 0.03), (2.0, 0.03)])
def test_curvature_path(h0, close):
    """The module's own optimizer, fed with noise alone, against the predicted mean; the square lifts a low start."""
    s, ess, beta2, steps = 0.02, 1000.0, 0.995, 200
    p = nn.Parameter(torch.zeros(5000, dtype=torch.float64))
    optimizer = ivon.IVON([p], lr=1e-9, ess=ess, hess_init=h0, beta2=beta2, weight_decay=1e-9, noise_std=s)
    generator = seeded(0)
    for t in range(1, steps + 1):
        with optimizer.sampled_params():
            p.grad = s * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
        if t % 50 == 0:
            found = float(optimizer.state[p]["h"].mean())
            assert found == pytest.approx(chapter["expected_curvature"](t, h0, beta2, s, ess), rel=close)


@pytest.mark.equation("eq-width-at-floor")
@given(st.floats(0.3, 20.0), positive, st.integers(8, 4096), st.floats(100.0, 1e5))
def test_width_at_floor(sigma, C, b, ess):
    s = sigma * C / b
    width = chapter["posterior_sd"](chapter["floor"](s, ess), ess, 0.0)
    assert width == pytest.approx(1 / math.sqrt(2 * stats.norm.pdf(1)) / (ess * s), rel=1e-9)
    assert width == pytest.approx(1.44 * b / (ess * sigma * C), rel=3e-3)


@pytest.mark.equation("eq-width-at-floor")
def test_the_plan_s_width_is_the_module_s():
    chosen = chapter["plan"](1000, 100, 10, 1.0, 1e-4, C=0.5)
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = ivon.IVON([p], lr=1.0, ess=chosen["ess"], hess_init=chosen["h0"], weight_decay=2e-4)
    torch.testing.assert_close(optimizer.variance()[p].sqrt(), torch.full((3,), chosen["sigma_v"]).double())
    s = chosen["sigma"] * 0.5 / 100
    assert chosen["h0"] == pytest.approx(2 * stats.norm.pdf(1) * 1000 * s**2)


@pytest.mark.equation("eq-entropy-split")
@given(seeds, st.integers(1, 8))
def test_entropy_split(seed, K):
    p = np.random.default_rng(seed).uniform(0.01, 0.99, size=(K, 5))
    both = np.stack([p, 1 - p])  # classes first
    total = stats.entropy(both.mean(1))
    within = stats.entropy(both).mean(0)
    between = stats.entropy(both, both.mean(1, keepdims=True).repeat(K, 1)).mean(0)
    np.testing.assert_allclose(total, within + between, rtol=1e-9)
    draws = torch.from_numpy(p)
    np.testing.assert_allclose(chapter["entropy"](draws.mean(0)), total, rtol=1e-9)
    np.testing.assert_allclose(chapter["disagreement"](draws), between, rtol=1e-6, atol=1e-12)

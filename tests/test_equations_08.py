"""The equations of the chapter on two noises, each evaluated a second way in float64; and its trap."""

import itertools
import math

import ivon as peer
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from scipy import stats
from scipy.integrate import quad
from scipy.optimize import brentq
from torch import nn

from dpivon import adaptive, curvature, ivon, mechanism, models

chapter = definitions("book/08_two_noises.ipynb")

seeds = st.integers(0, 2**32 - 1)
scales = st.floats(0.01, 10.0)
decays = st.floats(0.5, 0.9999)
sizes = st.floats(1.0, 1e5)

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(9)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def normals(dimension):
    """Nodes (dimension, n) and weights (n,) that integrate polynomials of independent standard normals exactly."""
    nodes = np.array(list(itertools.product(NODES, repeat=dimension))).T
    weights = np.prod(np.array(list(itertools.product(WEIGHTS, repeat=dimension))), axis=1)
    return nodes, weights


def average(values, weights):
    return float(np.asarray(values) @ weights)


def spread(values, weights):
    return average((np.asarray(values) - average(values, weights)) ** 2, weights)


def mechanism_s(sigma, C, b, n):
    """s as the mechanism itself reports it."""
    optimizer = adaptive.sgd(nn.Linear(1, 1).parameters(), lr=1.0)
    dp = mechanism.mechanism(optimizer, noise_multiplier=sigma, max_grad_norm=C, batch_size=b, n=n)
    return mechanism.noise_std(dp)


def module_price(g, deviation, h, ess, damping):
    group, g = {"ess": ess, "weight_decay": damping}, torch.as_tensor(g)
    return curvature.price(g, torch.as_tensor(deviation), {"h": torch.full_like(g, h)}, group).numpy()


@pytest.mark.equation("eq-two-parts")
@given(seeds, scales, scales, sizes, st.floats(0.0, 1.0))
def test_two_parts(seed, s, h, ess, damping):
    g, xi, z = np.random.default_rng(seed).normal(size=(3, 20))
    sigma_v = 1 / math.sqrt(ess * (h + damping))
    parts = g * xi / sigma_v + s / sigma_v * z * xi
    for price in (chapter["price"], module_price):
        np.testing.assert_allclose(
            price(g + s * z, sigma_v * xi, h, ess, damping), parts, rtol=1e-7, atol=1e-9 * s / sigma_v
        )


@pytest.mark.equation("eq-product-moments")
def test_product_moments():
    (z, xi), weights = normals(2)
    moments = [average((z * xi) ** k, weights) for k in (1, 2, 4)]
    assert moments == pytest.approx([0, 1, 9], abs=1e-12)


@pytest.mark.equation("eq-product-density")
@given(st.floats(0.05, 6.0), st.booleans())
def test_product_density(x, negative):
    """Against the average of normal densities over z, and the moments of the product."""
    found = 2 * quad(lambda z: stats.norm.pdf(z) / z * stats.norm.pdf(x / z), 0, 12, points=[x / 8, x], limit=400)[0]
    assert chapter["product_density"](-x if negative else x) == pytest.approx(found, rel=1e-6)


@pytest.mark.equation("eq-product-density")
def test_product_density_has_the_product_s_moments():
    density = chapter["product_density"]
    moments = [2 * quad(lambda x, k=k: x**k * density(x), 0, 60, points=[1e-3, 1])[0] for k in (0, 2, 4)]
    assert moments == pytest.approx([1, 1, 9], rel=1e-6)


@pytest.mark.equation("eq-noise-curvature")
@settings(deadline=None)
@given(st.floats(0.1, 20.0), scales, st.integers(1, 500), sizes, scales, st.floats(0.0, 1.0))
def test_noise_curvature(sigma, C, b, ess, h, damping):
    (z, xi), weights = normals(2)
    s = mechanism_s(sigma, C, b, 1000)
    sigma_v = 1 / math.sqrt(ess * (h + damping))
    nu = ess * sigma**2 * C**2 / b**2
    for price in (chapter["price"], module_price):
        h_hat = price(s * z, sigma_v * xi, h, ess, damping)
        assert average(h_hat, weights) == pytest.approx(0, abs=1e-9 * s / sigma_v)
        assert spread(h_hat, weights) == pytest.approx(nu * (h + damping), rel=1e-7)


@pytest.mark.equation("eq-private-variance")
@settings(max_examples=10, deadline=None)
@given(seeds, scales, st.floats(0.0, 2.0))
def test_private_variance(seed, s, s_batch):
    """Three weights with a Jacobian that is not symmetric, by exact quadrature over all five normals."""
    rng = np.random.default_rng(seed)
    J, slope, h, ess, damping = rng.normal(size=(3, 3)), rng.normal(size=3), rng.uniform(0.1, 2, 3), 7.0, 0.1
    (*xi, batch, z), weights = normals(5)
    sigma_v = 1 / np.sqrt(ess * (h + damping))
    deviation = sigma_v[:, None] * np.array(xi)
    for j in range(3):
        g = slope[j] + J[j] @ deviation + s_batch * batch + s * z
        h_hat = chapter["price"](g, deviation[j], h[j], ess, damping)
        others = sum(J[j, k] ** 2 * sigma_v[k] ** 2 for k in range(3) if k != j)
        formula = 2 * J[j, j] ** 2 + (slope[j] ** 2 + others + s_batch**2 + s**2) / sigma_v[j] ** 2
        assert average(h_hat, weights) == pytest.approx(J[j, j], abs=1e-8)
        assert spread(h_hat, weights) == pytest.approx(formula, rel=1e-8)


def logistic(seed, n=4):
    rng = np.random.default_rng(seed)
    return 2 * rng.normal(size=(n, 2)), rng.integers(0, 2, n).astype(float)


def field_and_slope(theta, X, labels, C):
    """Each example's clipped gradient, and the diagonal of its Jacobian by the chapter's rule, without torch."""
    p = 1 / (1 + np.exp(-theta @ X.T))
    g = (p - labels)[..., None] * X
    norms = np.linalg.norm(g, axis=-1, keepdims=True)
    diagonal = (p * (1 - p))[..., None] * X**2  # H = p (1 - p) x x^T, of which nothing is left along a clipped x
    return g * np.minimum(1, C / norms), np.where(norms <= C, diagonal, 0.0)


@pytest.mark.equation("eq-clipped-price")
@pytest.mark.parametrize("seed", range(3))
def test_clipped_price(seed):
    """All Poisson batches, and a fine grid of draws, for both weights of a logistic regression."""
    (X, labels), C, b, sigma_v, m = logistic(seed), 0.6, 1.5, 0.7, np.array([0.3, -0.2])
    grid = np.arange(-7, 7, 0.02) + 0.01
    xi = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 2)
    weights = stats.norm.pdf(xi).prod(1) * 0.02**2
    clipped, slopes = field_and_slope(m + sigma_v * xi, X, labels, C)
    theirs = chapter["clip"](
        chapter["logistic_gradients"](torch.tensor(m + sigma_v * xi[:50]), *map(torch.tensor, (X, labels))), C
    )
    np.testing.assert_allclose(theirs, clipped[:50], rtol=1e-9)
    found, n = np.zeros(2), len(X)
    for drawn in itertools.product((0, 1), repeat=n):
        chance = math.prod(b / n if d else 1 - b / n for d in drawn)
        gradient = np.einsum("i,kij->kj", np.array(drawn, dtype=float), clipped) / b
        h_hat = chapter["price"](gradient, sigma_v * xi, 1 / sigma_v**2, 1.0, 0.0)
        found += chance * (weights @ h_hat)
    expected = weights @ slopes.mean(1)
    assert (expected > 0.01).all()
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.equation("eq-clipped-jacobian")
@pytest.mark.parametrize("seed", range(5))
def test_clipped_jacobian(seed):
    """For the loss of a small network, with first and second derivatives from autograd."""
    generator = torch.Generator().manual_seed(seed)
    x, theta = (torch.randn(k, generator=generator, dtype=torch.float64) for k in (3, 14))

    def loss(theta):
        return -torch.log_softmax(theta[6:].view(4, 2) @ torch.tanh(theta[:6].view(2, 3) @ x), 0)[1]

    gradient = torch.func.grad(loss)
    g, H = gradient(theta), torch.func.hessian(loss)(theta)
    C, u = 0.3 * g.norm(), g / g.norm()
    found = torch.func.jacrev(lambda at: chapter["clip"](gradient(at), C))(theta)
    formula = C / g.norm() * (torch.eye(14) - torch.outer(u, u)) @ H
    torch.testing.assert_close(found, formula, rtol=1e-8, atol=1e-10)
    assert (found - found.T).norm() > 1e-3 * found.norm()  # not symmetric, so no gradient


@pytest.mark.equation("eq-curvature-recursion")
@given(seeds, decays, st.floats(1e-6, 1.0))
def test_curvature_recursion(seed, beta2, damping):
    rng = np.random.default_rng(seed)
    h, h_hat = rng.exponential(size=30), 5 * rng.normal(size=30)
    u = (1 - beta2) * (h_hat - h) / (h + damping)
    expected = (h + damping) * (1 + u + u**2 / 2) - damping
    np.testing.assert_allclose(chapter["new_curvature"](h, h_hat, beta2, damping), expected, rtol=1e-6, atol=1e-9)
    group = {"beta2": beta2, "weight_decay": damping}
    module = ivon.new_curvature(torch.from_numpy(h), torch.from_numpy(h_hat), group)
    np.testing.assert_allclose(module, expected, rtol=1e-6, atol=1e-9)


def mean_update(y, a, beta2, nu, damping=0.0):
    """E[y' | y] by quadrature over both noises: a curvature a that is known, plus privacy noise."""
    (z, xi), weights = normals(2)
    ess, h = 100.0, y - damping
    h_hat = a + chapter["price"](math.sqrt(nu / ess) * z, xi / math.sqrt(ess * y), h, ess, damping)
    return average(chapter["new_curvature"](h, h_hat, beta2, damping), weights) + damping


@pytest.mark.equation("eq-mean-increment")
@given(scales, scales, decays, scales, st.floats(0.0, 0.01))
def test_mean_increment(y, a, beta2, nu, damping):
    y, c, r = y + damping, a + damping, 1 - beta2
    formula = r * (c - y) + r**2 / 2 * ((y - c) ** 2 / y + nu)
    assert mean_update(y, a, beta2, nu, damping) - y == pytest.approx(formula, rel=1e-6, abs=1e-9 * (y + nu))


@pytest.mark.equation("eq-first-order-floor")
@pytest.mark.parametrize(("a", "nu", "order"), [(0.2, 0.5, 3), (1.0, 3.0, 3), (0.0, 1.0, 2)])
def test_first_order_floor(a, nu, order):
    """Where a single h would rest; the remainder falls with a higher power of 1 - beta2."""

    def remainder(r):
        rest = brentq(lambda y: mean_update(y, a, 1 - r, nu) - y, 1e-6, a + nu, xtol=1e-15)
        return rest - a - r / 2 * nu

    assert remainder(0.02) / remainder(0.01) == pytest.approx(2**order, rel=0.15)


@pytest.mark.equation("eq-price-floor")
@given(decays, scales, sizes)
def test_price_floor_is_at_rest(beta2, s, ess):
    floor = chapter["price_floor"](s, ess, beta2)
    assert mean_update(floor, 0.0, beta2, ess * s**2) == pytest.approx(floor, rel=1e-9)


@pytest.mark.equation("eq-mean-path")
@given(decays, scales, scales, st.integers(0, 60))
def test_mean_path(beta2, s, start, t):
    """E y' is linear in y when there is no curvature, so the mean can be followed step by step."""
    y = start
    for _ in range(t):
        y = mean_update(y, 0.0, beta2, 100 * s**2)
    assert chapter["mean_path"](t, start, s, 100.0, beta2) == pytest.approx(y, rel=1e-7)


def resting(c, f):
    return stats.gamma(1 + c / f, scale=f)


@pytest.mark.equation("eq-moment-recursion")
@given(st.floats(0.0, 5.0), scales)
def test_moment_recursion_has_the_gamma_s_moments(c, f):
    moments = [1.0]
    for n in range(1, 5):
        moments.append((c + n * f) * moments[-1])
    assert moments[1:] == pytest.approx([resting(c, f).moment(n) for n in range(1, 5)], rel=1e-8)


@pytest.mark.equation("eq-moment-recursion")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_moments_at_rest_are_left_alone_to_leading_order(n):
    """One step of the update, on the gamma distribution and on one that is wider: what changes is of second order."""
    (z, xi), weights = normals(2)
    f, c = 1.0, 8.0

    def change(law, r):
        nu = f * (2 - r) / r
        y = law.ppf((np.arange(2000) + 0.5) / 2000)[:, None]
        h_hat = c + np.sqrt(nu * y) * z * xi
        after = (chapter["new_curvature"](y, h_hat, 1 - r, 0.0) ** n) @ weights
        return abs(after.mean() - (y**n).mean()) / (y**n).mean() / r

    right, wrong = resting(c, f), stats.gamma((1 + c / f) / 2, scale=2 * f)
    assert change(right, 1e-3) < 0.01
    if n > 1:  # the wrong one has the right mean
        assert change(wrong, 1e-3) > 0.1


@pytest.mark.equation("eq-gamma-curvature")
@pytest.mark.parametrize("a", [0.0, 0.02])
def test_simulated_curvature_is_gamma(a):
    """The module's update and estimate, at rest, against the chapter's distribution (Kolmogorov's distance)."""
    beta2, ess, s, damping, n = 0.985, 500.0, 0.05, 5e-3, 20_000
    group, generator = {"beta2": beta2, "ess": ess, "weight_decay": damping}, torch.Generator().manual_seed(0)
    law = chapter["settled"](a + damping, s, ess, beta2)
    h = torch.full((n,), law.mean() - damping, dtype=torch.float64)
    for _ in range(600):
        xi, z = torch.randn(2, n, generator=generator, dtype=torch.float64)
        deviation = xi / (ess * (h + damping)).sqrt()
        h = ivon.new_curvature(h, curvature.price(a * deviation + s * z, deviation, {"h": h}, group), group)
    assert stats.kstest(h.numpy() + damping, law.cdf).statistic < 0.035
    assert stats.kstest(h.numpy() + damping, stats.norm(law.mean(), law.std()).cdf).statistic > 0.05


@pytest.mark.equation("eq-mean-inverse")
@given(st.floats(0.05, 5.0), st.floats(0.01, 0.1), st.floats(0.9, 0.999))
def test_mean_inverse(c, s, beta2):
    law = chapter["settled"](c, s, 1000.0, beta2)
    levels = law.ppf([1e-13, 1e-6, 0.01, 0.5, 0.999])
    inverse = math.fsum(
        quad(lambda y: law.pdf(y) / y, a, b, limit=200)[0] for a, b in itertools.pairwise([0, *levels, levels[-1] * 20])
    )
    assert inverse == pytest.approx(1 / c, rel=1e-3)


@pytest.mark.equation("eq-steps-visible")
@given(scales, scales, scales, sizes, st.floats(0.0, 1.0), st.integers(1, 1000))
def test_steps_until_visible(target, h, s, ess, damping, block):
    (z, xi), weights = normals(2)
    one = spread(module_price(s * z, xi / math.sqrt(ess * (h + damping)), h, ess, damping), weights)
    n = chapter["steps_until_visible"](target, h, s, ess, damping, block)
    assert math.sqrt(one / n / block) == pytest.approx(target, rel=1e-7)


@pytest.mark.equation("eq-visible-curvature")
@given(st.floats(0.1, 20.0), scales, st.integers(1, 900), st.integers(1, 5000), st.integers(900, 60_000))
def test_visible_curvature(sigma, C, b, T, n):
    s, r = mechanism_s(sigma, C, b, n), b / n * math.sqrt(T) / sigma
    assert n * s**2 / T == pytest.approx(C**2 / (n * r**2), rel=1e-9)
    at_h_min = chapter["steps_until_visible"](C**2 / (n * r**2), C**2 / (n * r**2), s, n, 0.0)
    assert at_h_min == pytest.approx(T, rel=1e-9)


def step_of(m, g, *, alpha, h, damping, ess):
    """The mean after one step of the module from m, on the gradient g, with a constant curvature."""
    p = nn.Parameter(torch.tensor([m], dtype=torch.float64))
    optimizer = ivon.IVON(
        [p], lr=alpha, ess=ess, curvature="constant", hess_init=h, beta1=0.0, weight_decay=damping, rescale_lr=False
    )
    with optimizer.sampled_params():
        p.grad = torch.tensor([g], dtype=torch.float64)
    optimizer.step()
    return float(p.detach())


@pytest.mark.equation("eq-mean-noise")
@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 1.0), st.floats(0.1, 2.0), st.floats(0.0, 0.1), scales, st.floats(0.05, 0.9))
def test_mean_noise(a, h, damping, s, alpha):
    """The stationary variance of the module's linear step, whose two coefficients are measured."""
    ess = 50.0
    one = {"alpha": alpha * h, "h": h, "damping": damping, "ess": ess}
    keep, push = step_of(1.0, a, **one), step_of(0.0, s, **one)
    variance = push**2 / (1 - keep**2)
    nu, c, eta = ess * s**2, a + damping, alpha * h / (h + damping)
    found = variance * ess * (h + damping)
    assert found == pytest.approx(alpha * h * nu / (c * (2 - eta * c)), rel=1e-6)


@pytest.mark.equation("eq-random-walk")
@settings(max_examples=30, deadline=None)
@given(st.floats(0.1, 2.0), scales, st.floats(0.01, 1.0), st.integers(1, 1000))
def test_random_walk(h, s, alpha, T):
    ess, damping = 50.0, 1e-3
    push = step_of(0.0, s, alpha=alpha, h=h, damping=damping, ess=ess)
    eta = alpha / (h + damping)
    assert T * push**2 == pytest.approx(T * eta**2 * s**2, rel=1e-9)
    assert T * push**2 * ess * (h + damping) == pytest.approx(T * alpha**2 * ess * s**2 / (h + damping), rel=1e-9)


@pytest.mark.equation("eq-several-draws")
@pytest.mark.parametrize("K", [1, 2, 3])
@pytest.mark.parametrize("s", [0.2, 3.0])
def test_several_draws(K, s):
    (*xi, z), weights = normals(K + 1)
    a, h, ess, damping = 0.7, 0.5, 40.0, 0.1
    xi, sigma_v = torch.tensor(np.array(xi)), 1 / math.sqrt(ess * (h + damping))
    h_hat = chapter["price_of_averages"](a * sigma_v * xi.mean(0) + s * torch.tensor(z), xi, h, ess, damping)
    assert average(h_hat, weights) == pytest.approx(a, rel=1e-9)
    privacy = chapter["price_of_averages"](s * torch.tensor(z), xi, h, ess, damping)
    assert spread(privacy, weights) == pytest.approx(K * ess * s**2 * (h + damping), rel=1e-9)
    formula = K / sigma_v * (s * z) * xi.mean(0).numpy()
    np.testing.assert_allclose(privacy, formula, rtol=1e-9, atol=1e-12)


@pytest.mark.equation("eq-log-balance")
@given(seeds, decays, scales, scales)
def test_log_balance(seed, beta2, a, nu):
    """For any distribution of y: the mean change of ln y under the exponential update."""
    rng = np.random.default_rng(seed)
    y, chances = rng.exponential(size=6) + 0.1, rng.dirichlet(np.ones(6))
    (z, xi), weights = normals(2)
    damping = 0.05
    change = 0.0
    for value, chance in zip(y, chances, strict=True):
        h_hat = a + np.sqrt(nu * value) * z * xi
        after = value * np.exp((1 - beta2) * (h_hat - (value - damping)) / value)
        change += chance * average(np.log(after / value), weights)
    formula = (1 - beta2) * ((a + damping) * chances @ (1 / y) - 1)
    assert change == pytest.approx(formula, rel=1e-8, abs=1e-9)


@pytest.mark.equation("eq-probe-rest")
@pytest.mark.parametrize("s", [0.1, 2.0])
def test_probe_rest(s):
    """Draws of a fixed width: where a single h would rest approaches the formula as 1 - beta2 falls."""
    (z, xi), weights = normals(2)
    sigma_0 = 0.3

    def rest(r):
        def move(y):
            return average(chapter["new_curvature"](y, s * z * xi / sigma_0, 1 - r, 0.0), weights) - y

        return brentq(move, 1e-6, 100.0, xtol=1e-14)

    errors = [rest(r) ** 2 / (r / 2 * s**2 / sigma_0**2) - 1 for r in (0.02, 0.01)]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.05)
    assert abs(errors[1]) < 0.01


# ---- The trap, on the packages themselves


def under_opacus(build, sigma):
    """Mean and curvature after five private steps by the wrapper, from the same start, batches and draws."""
    x = torch.randn(32, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 3, (32,), generator=torch.Generator().manual_seed(1))
    net = GradSampleModule(models.build("mlp", (1, 4, 4), 3, seed=0))
    inner, context = build(list(net.parameters()))
    outer = DPOptimizer(
        inner,
        noise_multiplier=sigma,
        max_grad_norm=1.0,
        expected_batch_size=32,
        generator=torch.Generator().manual_seed(2),
    )
    torch.manual_seed(3)
    for _ in range(5):
        with context():
            outer.zero_grad()
            F.cross_entropy(net(x), y).backward()
        outer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), inner


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_authors_package_under_opacus_never_sees_the_noise():
    def build(parameters):
        optimizer = peer.IVON(parameters, lr=0.1, ess=32)
        return optimizer, lambda: optimizer.sampled_params(train=True)

    assert torch.equal(under_opacus(build, 1e-9)[0], under_opacus(build, 1e5)[0])


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_module_under_opacus_sees_the_noise_in_mean_and_curvature():
    def build(parameters):
        draws = torch.Generator().manual_seed(4)
        optimizer = ivon.IVON(parameters, lr=0.1, ess=32, curvature="price", generator=draws)
        return optimizer, optimizer.sampled_params

    (one, quiet), (two, loud) = under_opacus(build, 1e-9), under_opacus(build, 1.0)
    assert (one - two).norm() > 0.01
    h = [torch.cat([state["h"].flatten() for state in optimizer.state.values()]) for optimizer in (quiet, loud)]
    assert (h[0] - h[1]).norm() > 0.01

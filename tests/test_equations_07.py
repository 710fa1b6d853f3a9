"""The equations of the chapter on IVON, each evaluated a second way in float64, against the chapter's own code."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from scipy.integrate import quad
from scipy.stats import multivariate_normal, norm
from torch import nn

from dpivon import curvature, predict
from dpivon.ivon import IVON, new_curvature

chapter = definitions("book/07_ivon.ipynb")

means = st.floats(-2.0, 2.0)
variances = st.floats(0.05, 1.0)
curvatures = st.floats(1e-3, 50.0)
dampings = st.floats(1e-4, 1.0)
sizes = st.floats(5.0, 1e5)
seeds = st.integers(0, 2**31 - 1)


def integral(f, m, v):
    """The expectation of f under N(m, v), by adaptive quadrature."""
    width = 12 * math.sqrt(v)
    return quad(lambda t: f(t) * norm.pdf(t, m, math.sqrt(v)), m - width, m + width, epsabs=1e-12, limit=200)[0]


def difference(f, x, step=1e-4):
    return (f(x + step) - f(x - step)) / (2 * step)


def second_difference(f, x, step=1e-3):
    return (f(x + step) - 2 * f(x) + f(x - step)) / step**2


def labels_loss(theta):
    """The chapter's loss, written as a mean over its twenty labels."""
    return -sum(math.log(1 / (1 + math.exp(-sign * 2 * theta))) for sign in [1] * 16 + [-1] * 4) / 20


def kl(m, v, prior_v):
    """KL divergence from N(m, v) to N(0, prior_v), from its definition."""
    return integral(lambda t: norm.logpdf(t, m, math.sqrt(v)) - norm.logpdf(t, 0, math.sqrt(prior_v)), m, v)


@pytest.mark.equation("eq-bayes")
@given(st.floats(-2, 2), st.floats(-2, 2), dampings)
def test_the_posterior_is_likelihood_times_prior(one, other, damping):
    N = 20
    likelihood = [math.prod(1 / (1 + math.exp(-s * 2 * t)) for s in [1] * 16 + [-1] * 4) for t in (one, other)]
    prior = [norm.pdf(t, 0, (N * damping) ** -0.5) for t in (one, other)]
    formula = math.exp(-N * (chapter["loss"](one) - chapter["loss"](other))) * prior[0] / prior[1]
    assert formula == pytest.approx(likelihood[0] * prior[0] / (likelihood[1] * prior[1]), rel=1e-9)


@pytest.mark.equation("eq-family")
def test_the_module_draws_from_a_diagonal_gaussian():
    p = nn.Parameter(torch.tensor([0.5, -1.0], dtype=torch.float64))
    optimizer = IVON([p], lr=0.1, ess=50, generator=torch.Generator().manual_seed(0), weight_decay=0.01)
    optimizer.trained(optimizer.param_groups[0])
    optimizer.state[p]["h"] = torch.tensor([0.1, 3.0], dtype=torch.float64)
    draws = []
    for _ in range(8_000):
        with optimizer.sampled_params():
            draws.append(p.detach().clone())
    draws, v = torch.stack(draws), torch.tensor([1 / (50 * 0.11), 1 / (50 * 3.01)], dtype=torch.float64)
    standard_error = (v / len(draws)).sqrt()
    assert ((draws.mean(0) - p.detach()).abs() < 5 * standard_error).all()
    torch.testing.assert_close(draws.var(0) / v, torch.ones(2).double(), atol=5 * (2 / len(draws)) ** 0.5, rtol=0)
    assert abs(float(torch.corrcoef(draws.T)[0, 1])) < 5 / len(draws) ** 0.5


@pytest.mark.equation("eq-objective")
@pytest.mark.equation("eq-gaussian-objective")
@settings(max_examples=15, deadline=None)
@given(means, variances, means, variances, st.floats(5, 100), st.floats(0.01, 1.0))
def test_the_objective_is_loss_plus_divergence_up_to_a_constant(m1, v1, m2, v2, ess, damping):
    def definition(m, v):
        return ess * integral(labels_loss, m, v) + kl(m, v, 1 / (ess * damping))

    code = chapter["objective"](m1, v1, ess, damping) - chapter["objective"](m2, v2, ess, damping)
    assert ess * code == pytest.approx(definition(m1, v1) - definition(m2, v2), rel=1e-6, abs=1e-6)


@pytest.mark.equation("eq-objective")
def test_the_objective_is_the_divergence_from_the_posterior_up_to_a_constant():
    N, damping = 20, 0.05
    grid = np.linspace(-4, 6, 20_001)
    log_posterior = np.array([-N * labels_loss(t) - N * damping * t * t / 2 for t in grid])
    log_posterior -= np.log(np.exp(log_posterior).sum() * (grid[1] - grid[0]))
    found = []
    for m, v in ((0.3, 0.1), (0.8, 0.02), (1.0, 0.3)):
        q = norm.pdf(grid, m, math.sqrt(v))
        divergence = (q * (norm.logpdf(grid, m, math.sqrt(v)) - log_posterior)).sum() * (grid[1] - grid[0])
        found.append(N * chapter["objective"](m, v, N, damping) - divergence)
    assert max(found) - min(found) < 1e-6


@pytest.mark.equation("eq-heat")
@given(means, st.floats(0.1, 2.0), st.floats(-2, 2))
def test_the_gaussian_obeys_the_heat_equation(m, v, z):
    theta = m + z * math.sqrt(v)
    density = lambda theta, m, v: norm.pdf(theta, m, math.sqrt(v))  # noqa: E731
    by_m, by_v = difference(lambda u: density(theta, u, v), m), difference(lambda u: density(theta, m, u), v)
    assert by_m == pytest.approx(-difference(lambda u: density(u, m, v), theta), rel=1e-5, abs=1e-7)
    assert by_v == pytest.approx(second_difference(lambda u: density(u, m, v), theta) / 2, rel=1e-3, abs=1e-4)


@pytest.mark.equation("eq-bonnet-price")
@settings(max_examples=20, deadline=None)
@given(means, variances)
def test_bonnet_and_price(m, v):
    by_m = difference(lambda u: integral(labels_loss, u, v), m)
    by_v = difference(lambda u: integral(labels_loss, m, u), v)
    assert chapter["expectation"](chapter["slope"], m, v) == pytest.approx(by_m, abs=1e-5)
    assert chapter["expectation"](chapter["bend"], m, v) / 2 == pytest.approx(by_v, abs=1e-5)


@pytest.mark.equation("eq-optimal-variance")
@pytest.mark.parametrize(("ess", "damping"), [(20, 0.05), (200, 0.01), (5, 0.3)])
def test_the_learning_rule_ends_at_the_minimum_where_variance_is_inverse_curvature(ess, damping):
    from scipy.optimize import minimize

    m, h = 0.0, 1.0
    for _ in range(300):
        m, h = chapter["learning_rule"](m, h, 0.2, ess, damping)
    v = 1 / (ess * (h + damping))
    assert h == pytest.approx(integral(lambda t: second_difference(labels_loss, t), m, v), abs=1e-5)
    energy = lambda u: (  # noqa: E731
        integral(labels_loss, u[0], math.exp(u[1])) + damping * (u[0] ** 2 + math.exp(u[1])) / 2 - u[1] / (2 * ess)
    )
    best = minimize(energy, [0.3, -2.0], method="Nelder-Mead", options={"xatol": 1e-7, "fatol": 1e-13}).x
    assert (m, math.log(v)) == pytest.approx(tuple(best), abs=1e-4)


@pytest.mark.equation("eq-fisher")
@given(means, st.floats(0.2, 20.0), st.floats(-1, 1), st.floats(-1, 1))
def test_the_fisher_metric_measures_divergence(m, tau, a, b):
    dm, dtau = 1e-3 * a / math.sqrt(tau), 1e-3 * b * tau
    other = tau + dtau
    divergence = (math.log(tau / other) + other / tau + other * dm**2 - 1) / 2  # KL of Gaussians, closed form
    assert 2 * divergence == pytest.approx(tau * dm**2 + dtau**2 / (2 * tau**2), abs=1e-8)


@pytest.mark.equation("eq-natural-gradient")
@pytest.mark.equation("eq-learning-rule")
@settings(max_examples=15, deadline=None)
@given(means, st.floats(0.3, 5.0), st.floats(0.01, 0.5), st.floats(5, 100), st.floats(0.01, 1.0))
def test_the_learning_rule_is_natural_gradient_descent(m, h, rate, ess, damping):
    tau = ess * (h + damping)
    energy = lambda m, tau: (  # noqa: E731
        ess * (integral(labels_loss, m, 1 / tau) + damping * (m**2 + 1 / tau) / 2) + math.log(tau) / 2
    )
    by_m, by_tau = difference(lambda u: energy(u, tau), m), difference(lambda u: energy(m, u), tau, 1e-4 * tau)
    new_tau = tau - rate * 2 * tau**2 * by_tau
    by_v = -(tau**2) * by_tau
    assert new_tau == pytest.approx(tau + 2 * rate * by_v, rel=1e-9)
    new_m, new_h = chapter["learning_rule"](m, h, rate, ess, damping)
    assert ess * (new_h + damping) == pytest.approx(new_tau, rel=1e-5)
    # The chapter's code divides by the new precision, as the exercise on natural parameters derives.
    assert new_m == pytest.approx(m - rate * by_m / new_tau, rel=1e-5, abs=1e-6)


@pytest.mark.equation("eq-expectation-gradient")
@settings(max_examples=15, deadline=None)
@given(means, st.floats(0.1, 2.0), st.floats(0.01, 0.3))
def test_the_rule_in_natural_parameters(m, v, rate):
    ess, damping = 20, 0.05
    energy = lambda m, v: ess * (integral(labels_loss, m, v) + damping * (m**2 + v) / 2) - math.log(v) / 2  # noqa: E731
    of_expectations = lambda m1, m2: energy(m1, m2 - m1**2)  # noqa: E731
    first, second = m, m**2 + v
    by_1 = difference(lambda u: of_expectations(u, second), first)
    by_2 = difference(lambda u: of_expectations(first, u), second)
    by_m, by_v = difference(lambda u: energy(u, v), m), difference(lambda u: energy(m, u), v)
    assert by_2 == pytest.approx(by_v, rel=1e-5, abs=1e-5)
    assert by_1 == pytest.approx(by_m - 2 * m * by_v, rel=1e-4, abs=1e-4)
    natural = m / v - rate * by_1, -1 / (2 * v) - rate * by_2
    new_m, new_h = chapter["learning_rule"](m, 1 / (ess * v) - damping, rate, ess, damping)
    assert ess * (new_h + damping) == pytest.approx(-2 * natural[1], rel=1e-4)
    assert new_m == pytest.approx(natural[0] / (-2 * natural[1]), rel=1e-4, abs=1e-4)


@pytest.mark.equation("eq-stein")
@settings(max_examples=20, deadline=None)
@given(means, variances)
def test_the_mean_curvature_from_slopes(m, v):
    slopes = integral(lambda t: difference(labels_loss, t) * (t - m) / v, m, v)
    assert chapter["expectation"](chapter["bend"], m, v) == pytest.approx(slopes, abs=1e-5)


@pytest.mark.equation("eq-h-hat")
@given(means, means, curvatures, sizes, dampings)
def test_the_reparameterized_estimate(g, xi, h, ess, damping):
    variance = 1 / (ess * (h + damping))
    deviation = math.sqrt(variance) * xi
    formula = g * deviation / variance
    assert chapter["price"](g, deviation, h, ess, damping) == pytest.approx(formula, rel=1e-9, abs=1e-12)
    tensors = [torch.tensor([value], dtype=torch.float64) for value in (g, deviation, h)]
    module = curvature.price(tensors[0], tensors[1], {"h": tensors[2]}, {"ess": ess, "weight_decay": damping})
    assert float(module) == pytest.approx(formula, rel=1e-9, abs=1e-12)


@pytest.mark.equation("eq-h-hat-variance")
@pytest.mark.equation("eq-mirrored")
@pytest.mark.parametrize(("a", "slope", "s"), [(2.0, 0.3, 0.5), (0.5, 0.0, 0.0), (1.0, -0.2, 0.1)])
def test_the_noise_of_the_estimate(a, slope, s):
    ess, damping, h, draws = 50.0, 0.1, 0.9, 400_000
    sigma_v = (ess * (h + damping)) ** -0.5
    rng = np.random.default_rng(0)
    xi, other = rng.normal(size=(2, draws))
    single = chapter["price"](slope + a * sigma_v * xi + s * other, sigma_v * xi, h, ess, damping)
    mirror = chapter["price"](slope - a * sigma_v * xi + s * other, -sigma_v * xi, h, ess, damping)
    variance = 2 * a**2 + (slope**2 + s**2) / sigma_v**2
    assert abs(single.mean() - a) < 5 * math.sqrt(variance / draws)
    assert single.var() == pytest.approx(variance, rel=0.03)
    assert ((single + mirror) / 2).var() == pytest.approx(2 * a**2, rel=0.03)


@pytest.mark.equation("eq-direction")
@pytest.mark.equation("eq-retraction")
@pytest.mark.equation("eq-curvature-update")
@given(st.floats(1e-4, 1e3), st.floats(-1e4, 1e4), st.floats(0.5, 0.9999), dampings, sizes)
def test_the_positive_update(h, h_hat, beta2, damping, ess):
    formula = beta2 * h + (1 - beta2) * h_hat + (1 - beta2) ** 2 * (h_hat - h) ** 2 / (2 * (h + damping))
    tau, target = ess * (h + damping), ess * (h_hat + damping)
    u = (1 - beta2) * (target - tau) / tau
    assert u == pytest.approx((1 - beta2) * (h_hat - h) / (h + damping), rel=1e-9, abs=1e-12)
    factor = 0.5 + 0.5 * (1 + u) ** 2
    assert factor == pytest.approx(1 + u + u * u / 2, rel=1e-9, abs=1e-9)
    if abs(u) < 5:  # Taylor's remainder
        assert abs(factor - math.exp(u)) <= abs(u) ** 3 * max(1, math.exp(u)) / 6 + 1e-12
    code = chapter["new_curvature"](h, h_hat, beta2, damping)
    scale = 1e-9 * (abs(h_hat) + h)
    assert code == pytest.approx(formula, rel=1e-9, abs=scale)
    assert ess * (code + damping) == pytest.approx(tau * factor, rel=1e-6, abs=ess * scale)
    group = {"beta2": beta2, "weight_decay": damping}
    module = new_curvature(*(torch.tensor([value], dtype=torch.float64) for value in (h, h_hat)), group)
    assert float(module) == pytest.approx(formula, rel=1e-9, abs=scale)


@pytest.mark.equation("eq-retraction")
@given(st.floats(0.1, 10.0), st.floats(-2, 2))
def test_the_exponential_is_the_straight_path_of_the_metric(tau, u):
    """Constant speed by the ruler, in a constant direction: |d tau| / (sqrt(2) tau) is the same all along."""
    path = lambda t: tau * math.exp(t * u)  # noqa: E731
    speeds = [difference(path, t) / (math.sqrt(2) * path(t)) for t in (0.0, 0.3, 0.9)]
    assert speeds == pytest.approx([u / math.sqrt(2)] * 3, rel=1e-5, abs=1e-9)


def quadratic(matrix, b):
    return lambda theta: torch.from_numpy(matrix) @ theta - torch.from_numpy(b)


@pytest.mark.equation("eq-mean-update")
@pytest.mark.equation("eq-effective-step")
@settings(max_examples=10, deadline=None)
@given(seeds, st.floats(0.0, 0.95), st.floats(0.9, 0.999), st.floats(0.01, 0.2))
def test_the_whole_algorithm_written_in_numpy(seed, beta1, beta2, lr):
    rng = np.random.default_rng(seed)
    matrix, b, m = np.diag(rng.uniform(0.2, 2, 3)), rng.normal(size=3), rng.normal(size=3)
    ess, h0, damping, steps = 30.0, 0.7, 0.05, 8
    code, h_code = chapter["ivon"](
        quadratic(matrix, b), torch.from_numpy(m.copy()), steps=steps, lr=lr, ess=ess, hess_init=h0, beta1=beta1,
        beta2=beta2, weight_decay=damping, generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    generator, h, past = torch.Generator().manual_seed(seed), np.full(3, h0), []
    for t in range(1, steps + 1):
        xi = torch.randn(3, generator=generator, dtype=torch.float64).numpy()
        theta = m + xi / np.sqrt(ess * (h + damping))
        g = matrix @ theta - b
        u = (1 - beta2) * (g * xi * np.sqrt(ess * (h + damping)) - h) / (h + damping)
        h = (h + damping) * (1 + u + u**2 / 2) - damping
        past.append(g)
        mean_gradient = sum((1 - beta1) * beta1 ** (t - k) * past[k - 1] for k in range(1, t + 1)) / (1 - beta1**t)
        effective = lr * (h0 + damping) / (h + damping)
        m = m - effective * (mean_gradient + damping * m)
    np.testing.assert_allclose(code.numpy(), m, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(h_code.numpy(), h, rtol=1e-8, atol=1e-10)


@pytest.mark.equation("eq-linear-posterior")
@pytest.mark.equation("eq-mean-field")
@settings(max_examples=15)
@given(seeds, st.floats(0.2, 2.0), st.floats(0.001, 0.5))
def test_the_posterior_of_linear_regression(seed, s, damping):
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(12, 2)) @ np.array([[1.0, 0.8], [0.0, 0.6]]), rng.normal(size=12)
    A, mean = chapter["linear_posterior"](torch.from_numpy(X), torch.from_numpy(y), s, damping)
    covariance = np.linalg.inv(A.numpy())
    log_joint = lambda t: norm.logpdf(y, X @ t, s).sum() + norm.logpdf(t, 0, (12 * damping) ** -0.5).sum()  # noqa: E731
    posterior = multivariate_normal(mean.numpy(), covariance)
    points = mean.numpy() + rng.normal(size=(4, 2))
    gaps = [log_joint(t) - posterior.logpdf(t) for t in points]
    assert max(gaps) - min(gaps) < 1e-6 * (1 + abs(max(gaps)))
    r = covariance[0, 1] / math.sqrt(covariance[0, 0] * covariance[1, 1])
    np.testing.assert_allclose(1 / np.diag(A.numpy()), (1 - r**2) * np.diag(covariance), rtol=1e-6)
    # The best diagonal Gaussian: the divergence grows when either variance changes.
    v = 1 / np.diag(A.numpy())
    divergence = lambda v: (np.trace(A.numpy() @ np.diag(v)) - np.log(v).sum()) / 2  # noqa: E731
    for change in ([1.01, 1], [0.99, 1], [1, 1.01], [1, 0.99]):
        assert divergence(v * change) > divergence(v)


@pytest.mark.equation("eq-average")
def test_predictions_are_averages_of_probabilities():
    torch.manual_seed(0)
    model, x = nn.Linear(3, 4).double(), torch.randn(5, 3, dtype=torch.float64)
    options = {"lr": 0.1, "ess": 5.0, "hess_init": 0.5}
    optimizer = IVON(model.parameters(), generator=torch.Generator().manual_seed(1), **options)
    code = predict.log_probs(model, x, optimizer, 7).exp().numpy()
    optimizer.generator = torch.Generator().manual_seed(1)
    total = np.zeros((5, 4))
    for _ in range(7):
        with optimizer.sampled_params():
            logits = x.numpy() @ model.weight.detach().numpy().T + model.bias.detach().numpy()
        total += np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(code, total / 7, rtol=1e-9)


@pytest.mark.equation("eq-memory")
@given(st.floats(0.5, 0.9999), st.integers(1, 300), curvatures)
def test_the_start_is_forgotten_at_the_rate_of_beta2(beta2, steps, start):
    """The derivative of h after `steps` steps with respect to its start, for plain averaging."""
    h = [start, start + 1e-3]
    for t in range(steps):
        target = 1 + math.sin(t)
        h = [beta2 * value + (1 - beta2) * target for value in h]
    assert (h[1] - h[0]) / 1e-3 == pytest.approx(beta2**steps, rel=1e-6, abs=1e-9)


@pytest.mark.equation("eq-memory")
@pytest.mark.parametrize("beta2", [0.99, 0.999])
def test_the_module_forgets_its_start_at_that_rate(beta2):
    h, group = torch.tensor([1.0, 1.001], dtype=torch.float64), {"beta2": beta2, "weight_decay": 1e-3}
    for _ in range(100):
        h = new_curvature(h, torch.full_like(h, 1.0), group)
    assert float(h[1] - h[0]) / 1e-3 == pytest.approx(beta2**100, rel=0.01)


@pytest.mark.equation("eq-curvature-floor")
@pytest.mark.parametrize(("beta2", "a", "s"), [(0.995, 0.0, 0.05), (0.99, 0.02, 0.05)])
def test_the_price_of_positivity(beta2, a, s):
    ess, damping, chains = 500.0, 1e-3, 3000
    rng, h, later = np.random.default_rng(0), np.full(3000, a + 0.01), []
    for t in range(int(14 / (1 - beta2))):
        xi, other = rng.normal(size=(2, chains))
        deviation = xi / np.sqrt(ess * (h + damping))
        h_hat = chapter["price"](a * deviation + s * other, deviation, h, ess, damping)
        h = chapter["new_curvature"](h, h_hat, beta2, damping)
        later += [h.mean()] if t > 7 / (1 - beta2) else []
    floor = (1 - beta2) / 2 * (ess * s**2 + 2 * a**2 / (a + damping))
    assert np.mean(later) - a == pytest.approx(floor, rel=0.08)

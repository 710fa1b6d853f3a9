"""The equations of the chapter on Bayes by gradient, each evaluated a second way in float64."""

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
from scipy.integrate import quad
from torch import nn
from torch.distributions import Normal, kl_divergence

from dpivon import accounting, adaptive, backprop, gradients, mechanism, metrics, predict

chapter = definitions("book/05_bayes_by_gradient.ipynb")

seeds = st.integers(0, 2**32 - 1)
means = st.floats(-3.0, 6.0)
widths = st.floats(0.2, 3.0)
scales = st.floats(0.5, 5.0)

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def rng(seed):
    return np.random.default_rng(seed)


def patients_loss(theta):
    """The mean loss of the six patients, from their outcomes, without torch."""
    doses = [-1.5, -1.0, -0.5, 0.5, 1.0, 1.5]
    return sum(np.logaddexp(0, -theta * x) if x > 0 else np.logaddexp(0, theta * x) for x in doses) / 6


def expectation(f, m, sigma):
    return float(sum(w * f(m + sigma * z) for z, w in zip(NODES, WEIGHTS, strict=True)))


def tensor(value):
    return torch.tensor(value, dtype=torch.float64)


def log_joint(theta, s0):
    return -6 * patients_loss(theta) + stats.norm.logpdf(theta, 0, s0)


def evidence(s0):
    return quad(lambda t: math.exp(log_joint(t, s0)), -12 * s0, 12 * s0, limit=300, epsabs=1e-13)[0]


@pytest.mark.equation("eq-bayes-rule")
@pytest.mark.parametrize("s0", [0.7, 3.0])
def test_bayes_rule(s0):
    """Sequential updates, one patient at a time, give the same posterior, and the evidence as a product."""
    Z = evidence(s0)
    grid = np.linspace(-14 * s0, 14 * s0, 40_001)
    belief, product = stats.norm.pdf(grid, 0, s0), 1.0
    for x in (-1.5, -1.0, -0.5, 0.5, 1.0, 1.5):
        likelihood = 1 / (1 + np.exp(-grid * abs(x)))
        predicted = np.trapezoid(likelihood * belief, grid)
        belief, product = likelihood * belief / predicted, product * predicted
    assert product == pytest.approx(Z, rel=1e-8)
    for theta in (-1.0, 0.5, 2.0, 4.0):
        likelihood = math.exp(-6 * float(chapter["loss"](tensor(theta))))
        found = likelihood * float(chapter["density"](tensor(theta), 0.0, s0)) / Z
        assert found == pytest.approx(np.interp(theta, grid, belief), rel=1e-5)


@pytest.mark.equation("eq-evidence-bound")
@settings(max_examples=15, deadline=None)
@given(means, widths, scales)
def test_evidence_bound(m, sigma, s0):
    Z = evidence(s0)
    left = expectation(lambda t: stats.norm.logpdf(t, m, sigma) - log_joint(t, s0) + math.log(Z), m, sigma)
    J = 6 * expectation(patients_loss, m, sigma) + float(chapter["kl"](tensor(m), tensor(sigma), tensor(s0)))
    assert left == pytest.approx(J + math.log(Z), abs=1e-6)
    assert math.log(Z) + J >= -1e-7


@pytest.mark.equation("eq-mean-objective")
@settings(max_examples=15, deadline=None)
@given(st.floats(-1.0, 5.0), st.floats(0.3, 1.5), scales, st.floats(1.0, 100.0))
def test_mean_objective(m, sigma, s0, ess):
    divergence = float(kl_divergence(Normal(tensor(m), tensor(sigma)), Normal(tensor(0.0), tensor(s0))))
    expected = expectation(patients_loss, m, sigma) + divergence / ess
    found = chapter["objective"](tensor(m), tensor(sigma), ess, tensor(s0))
    assert float(found) == pytest.approx(expected, abs=1e-7)


@pytest.mark.equation("eq-kl-normals")
@given(seeds, scales)
def test_kl_normals(seed, s0):
    m, sigma = torch.from_numpy(rng(seed).normal(size=(2, 5)))
    sigma = sigma.abs() + 0.01
    expected = kl_divergence(Normal(m, sigma), Normal(torch.zeros(5, dtype=torch.float64), s0)).sum()
    torch.testing.assert_close(chapter["kl"](m, sigma, tensor(s0)), expected)


@pytest.mark.equation("eq-reparameterization")
@given(means, widths)
def test_reparameterization(m, sigma):
    """The image of normal quantiles are the quantiles of q; and the module draws this way."""
    levels = np.linspace(0.01, 0.99, 21)
    np.testing.assert_allclose(m + sigma * stats.norm.ppf(levels), stats.norm(m, sigma).ppf(levels))
    p = nn.Parameter(torch.full((40,), m, dtype=torch.float64))
    optimizer = backprop.BayesByBackprop(
        [p], lr=0.1, ess=10, sigma_init=sigma, generator=torch.Generator().manual_seed(3)
    )
    xi = torch.randn(40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with optimizer.sampled_params():
        torch.testing.assert_close(p.detach(), m + sigma * xi)


def numerical(f, x, step=1e-4):
    return (f(x + step) - f(x - step)) / (2 * step)


@pytest.mark.equation("eq-pathwise")
@pytest.mark.equation("eq-score-function")
@settings(max_examples=10, deadline=None)
@given(means, st.floats(0.2, 1.5))
def test_two_gradients_of_an_expectation(m, sigma):
    """Both estimators, averaged by quadrature, are the numerical derivatives of the integral."""
    nodes, weights = torch.from_numpy(NODES), torch.from_numpy(WEIGHTS)
    by_m = numerical(lambda a: expectation(patients_loss, a, sigma), m)
    by_sigma = numerical(lambda a: expectation(patients_loss, m, a), sigma)
    path = chapter["pathwise"](chapter["slope"], m, sigma, nodes)
    score = chapter["score_function"](chapter["loss"], m, sigma, nodes)
    for found in (path, score):
        assert float(weights @ found[0]) == pytest.approx(by_m, abs=1e-6)
        assert float(weights @ found[1]) == pytest.approx(by_sigma, abs=1e-6)


@pytest.mark.equation("eq-two-variances")
@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2), widths)
def test_two_variances(c, g, h, sigma):
    nodes, weights, m = torch.from_numpy(NODES), torch.from_numpy(WEIGHTS), 0.7
    path, _ = chapter["pathwise"](lambda t: g + h * (t - m), m, sigma, nodes)
    score, _ = chapter["score_function"](lambda t: c + g * (t - m) + h * (t - m) ** 2 / 2, m, sigma, nodes)
    found = [float(weights @ e**2 - (weights @ e) ** 2) for e in (path, score)]
    formula = [h**2 * sigma**2, c**2 / sigma**2 + 2 * g**2 + 3 * c * h + 15 / 4 * h**2 * sigma**2]
    np.testing.assert_allclose(found, formula, rtol=1e-7, atol=1e-9)


@pytest.mark.equation("eq-softplus")
@given(st.floats(-12.0, 12.0))
def test_softplus(rho):
    sigma = math.log1p(math.exp(rho))
    derivative = numerical(lambda r: math.log1p(math.exp(r)), rho, 1e-5)
    assert 1 / (1 + math.exp(-rho)) == pytest.approx(derivative, rel=1e-5)
    assert -math.expm1(-sigma) == pytest.approx(derivative, rel=1e-5)
    for inverse in (chapter["inverse_softplus"], backprop.inverse_softplus):
        assert inverse(sigma) == pytest.approx(rho, abs=1e-8)
    assert float(F.softplus(tensor(rho))) == pytest.approx(sigma, abs=1e-7)


def steps_of_both(g, m, sigma, xi, ess, s0, lr):
    """One step without momentum, of the chapter's function and of the module's optimizer: (m, sigma) of each."""
    seed = torch.Generator().manual_seed(xi)
    ours = chapter["bayes_by_backprop"](
        lambda theta: g, m, [lr], ess=ess, sigma_init=sigma, prior_scale=s0, beta1=0.0, generator=seed
    )
    p = nn.Parameter(m.clone())
    optimizer = backprop.BayesByBackprop(
        [p], lr, ess, sigma_init=sigma, prior_scale=s0, beta1=0.0, generator=torch.Generator().manual_seed(xi)
    )
    with optimizer.sampled_params():
        p.grad = g.clone()
    optimizer.step()
    return ours, (p.detach(), optimizer.variance()[p].sqrt())


@pytest.mark.equation("eq-bbp-gradients")
@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.02, 2.0), scales, st.floats(1.0, 1000.0))
def test_bbp_gradients(seed, sigma, s0, ess):
    """One step is the autograd gradient of loss - log p / N + log q / N at the draw, by m and rho."""
    random = rng(seed)
    G, m = torch.from_numpy(random.normal(size=6)), torch.from_numpy(random.normal(size=6))
    xi = torch.randn(6, generator=torch.Generator().manual_seed(seed % 1000), dtype=torch.float64)
    start = math.log(math.expm1(sigma))
    mean, rho = m.clone().requires_grad_(), torch.full((6,), start, dtype=torch.float64, requires_grad=True)
    width = torch.log1p(rho.exp())
    theta = mean + width * xi
    value = (G * theta).sum() - (Normal(0.0, tensor(s0)).log_prob(theta).sum() + width.log().sum()) / ess
    by_m, by_rho = torch.autograd.grad(value, [mean, rho])
    for new_m, new_sigma in steps_of_both(G, m, sigma, seed % 1000, ess, s0, 0.1):
        torch.testing.assert_close(new_m, m - 0.1 * by_m)
        torch.testing.assert_close(new_sigma, torch.log1p((start - 0.1 * by_rho).exp()), rtol=1e-6, atol=1e-9)


def features(seed, n=12, k=3):
    random = rng(seed)
    return torch.from_numpy(random.normal(size=(n, k)) + 1), torch.from_numpy(random.normal(size=n))


@pytest.mark.equation("eq-line-posterior")
@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.2, 2.0), scales)
def test_line_posterior(seed, noise, s0):
    """Against conditioning the joint normal distribution of weights and labels."""
    Phi, y = features(seed)
    A, m = chapter["line_posterior"](Phi, y, noise, s0)
    X, K = Phi.numpy(), np.eye(3) * s0**2
    gain = K @ X.T @ np.linalg.inv(X @ K @ X.T + noise**2 * np.eye(12))
    np.testing.assert_allclose(m, gain @ y.numpy(), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(torch.linalg.inv(A), K - gain @ X @ K, rtol=1e-6, atol=1e-9)


@pytest.mark.equation("eq-best-diagonal")
@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.2, 2.0), scales)
def test_best_diagonal(seed, noise, s0):
    """The divergence from a diagonal normal to the posterior, by torch, is smallest where the chapter says."""
    Phi, y = features(seed)
    A, m = chapter["line_posterior"](Phi, y, noise, s0)
    exact = torch.distributions.MultivariateNormal(m, precision_matrix=A)

    def divergence(mean, log_variance):
        return kl_divergence(torch.distributions.MultivariateNormal(mean, torch.diag(log_variance.exp())), exact)

    mean, log_variance = m.clone().requires_grad_(), (-A.diagonal().log()).requires_grad_()
    for gradient in torch.autograd.grad(divergence(mean, log_variance), [mean, log_variance]):
        assert gradient.abs().max() < 1e-6 * A.abs().max()
    moved = torch.from_numpy(rng(seed).normal(size=3))
    assert divergence(m, -A.diagonal().log() + 0.1 * moved) > divergence(m, -A.diagonal().log())
    assert (1 / A.diagonal() <= torch.linalg.inv(A).diagonal() * (1 + 1e-9)).all()


@pytest.mark.equation("eq-band")
def test_band():
    Phi, y = features(3)
    A, m = chapter["line_posterior"](Phi, y, 0.5, 2.0)
    phi = tensor([1.0, -2.0, 0.5])
    draws = torch.randn(400_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = m + draws @ torch.linalg.cholesky(torch.linalg.inv(A)).T
    field = m + draws * A.diagonal().rsqrt()
    assert float((exact @ phi).var()) == pytest.approx(float(phi @ torch.linalg.inv(A) @ phi), rel=0.01)
    assert float((field @ phi).var()) == pytest.approx(float((phi**2 / A.diagonal()).sum()), rel=0.01)


def predictions(seed, n=400, classes=5, sharpness=2.0):
    random = rng(seed)
    log_probs = torch.from_numpy(sharpness * random.normal(size=(n, classes))).log_softmax(1)
    return log_probs, torch.from_numpy(random.integers(0, classes, size=n))


@pytest.mark.equation("eq-ece")
@settings(max_examples=15, deadline=None)
@given(seeds, st.sampled_from([5, 15, 20, 100]))
def test_ece(seed, bins):
    """Against a loop over bins in numpy, and the module's."""
    log_probs, y = predictions(seed)
    p = log_probs.exp().numpy()
    confidence, right = p.max(1), p.argmax(1) == y.numpy()
    total = 0.0
    for k in range(bins + 1):
        inside = (confidence >= k / bins) & (confidence < (k + 1) / bins)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert chapter["ece"](log_probs, y, bins) == pytest.approx(total, abs=1e-9)
    assert metrics.ece(log_probs, y, bins) == pytest.approx(total, abs=1e-5)


@pytest.mark.equation("eq-ece")
def test_ece_on_the_edges_of_bins():
    """A confidence of one half belongs to the bin above; here and in the module."""
    p = torch.tensor([[0.5, 0.5], [0.49, 0.51], [0.5, 0.5], [0.43, 0.57]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 1])
    expected = (3 * abs(2 / 3 - (0.5 + 0.51 + 0.5) / 3) + abs(1 - 0.57)) / 4  # bins [0.5, 0.55) and [0.55, 0.6)
    assert chapter["ece"](p.log(), y, 20) == pytest.approx(expected, abs=1e-9)
    assert metrics.ece(p.log(), y, 20) == pytest.approx(expected, abs=1e-5)


@pytest.mark.equation("eq-ece-honest")
@pytest.mark.parametrize("bins", [5, 15])
def test_ece_of_an_honest_predictor(bins):
    """The exact mean absolute deviation of binomial hits, where a bin's images share their confidence."""
    total, n, blocks = 0.0, 0, []
    for k in range(bins // 5, bins):
        c, size = (k + 0.5) / bins, 60
        hits = np.arange(size + 1)
        total += float((stats.binom.pmf(hits, size, c) * abs(hits / size - c)).sum()) * size
        n += size
        rest = (1 - c) / 9 if c > 0.1 else None
        assert rest is not None
        blocks.append(torch.tensor([[c, *[rest] * 9]] * size, dtype=torch.float64))
    log_probs = torch.cat(blocks).log()
    assert chapter["honest_ece"](log_probs, bins) == pytest.approx(total / n, rel=0.02)


@pytest.mark.equation("eq-proper-scores")
@given(seeds)
def test_proper_scores(seed):
    """The expectation over labels of the chapter's and the module's scores, class by class."""
    pi, p = torch.from_numpy(rng(seed).dirichlet(np.ones(4), size=2)).clamp(min=1e-4)
    pi, p = pi / pi.sum(), p / p.sum()
    entropy = -(pi * pi.log()).sum()
    divergence = (pi * (pi / p).log()).sum()
    formulas = {"nll": entropy + divergence, "brier": 1 - (pi**2).sum() + ((p - pi) ** 2).sum()}
    for name, formula in formulas.items():
        for score in (chapter[name], getattr(metrics, name)):
            each = [score(p.log()[None], torch.tensor([k])) for k in range(4)]
            honest = [score(pi.log()[None], torch.tensor([k])) for k in range(4)]
            expected = sum(float(w) * v for w, v in zip(pi, each, strict=True))
            assert expected == pytest.approx(float(formula), abs=1e-9)
            assert expected >= sum(float(w) * v for w, v in zip(pi, honest, strict=True)) - 1e-12


@pytest.mark.equation("eq-draws-averaged")
def test_draws_averaged():
    """The module's average is the mean of the probabilities of the same draws, added up in float64 here."""
    model = nn.Linear(3, 4).double()
    x = torch.from_numpy(rng(0).normal(size=(7, 3)))

    def optimizer():
        generator = torch.Generator().manual_seed(1)
        return backprop.BayesByBackprop(model.parameters(), 0.1, 10, sigma_init=0.8, generator=generator)

    draws, total = optimizer(), torch.zeros(7, 4, dtype=torch.float64)
    for _ in range(5):
        with draws.sampled_params(), torch.no_grad():
            total += model(x).softmax(1) / 5
    torch.testing.assert_close(predict.log_probs(model, x, optimizer(), samples=5).exp(), total)


def small():
    """A network, a reparameterized copy, a draw, and a few examples."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    twin = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    twin.load_state_dict(network.state_dict())
    model = backprop.Reparameterized(twin, sigma_init=0.7)
    for epsilon in model.epsilon:
        epsilon.normal_(generator=torch.Generator().manual_seed(int(epsilon.numel())))
    random = rng(1)
    return network, model, torch.from_numpy(random.normal(size=(6, 4))), torch.from_numpy(random.integers(0, 3, 6))


def weight_and_joint_gradients():
    """Per-example gradients at the draw: of the weights, and of (m, rho); and xi sigma', each flat."""
    network, model, x, y = small()
    slope = -math.expm1(-0.7)
    with torch.no_grad():
        for p, epsilon in zip(network.parameters(), model.epsilon, strict=True):
            p.add_(0.7 * epsilon)
    flat = lambda parts: torch.cat([part.flatten(1) for part in parts], 1)  # noqa: E731
    g = flat(gradients.per_example_gradients(network, F.cross_entropy, x, y)[0])
    joint = flat(gradients.per_example_gradients(model, F.cross_entropy, x, y)[0])
    return g, joint, slope * torch.cat([epsilon.flatten() for epsilon in model.epsilon])


@pytest.mark.equation("eq-joint-gradient")
def test_joint_gradient():
    g, joint, factor = weight_and_joint_gradients()
    torch.testing.assert_close(joint, torch.cat([g, g * factor], 1))


@pytest.mark.equation("eq-joint-norm")
def test_joint_norm():
    g, joint, factor = weight_and_joint_gradients()
    torch.testing.assert_close(joint.norm(dim=1) ** 2, (g**2 * (1 + factor**2)).sum(1))


def one_private_step(way, sigma_p, C, seed, b=4, sigma=0.6):
    """The gradients of m and rho after one step of the chapter's functions, with the KL's part taken off: (2, P)."""
    P, n, lr, ess = 30, 10, 1e-3, 1e12
    G = torch.from_numpy(rng(0).normal(size=(n, P)))
    each = lambda theta, x, y: G[x]  # noqa: E731
    index, m = torch.arange(n), torch.zeros(P, dtype=torch.float64)
    coins, noise, draws = (torch.Generator().manual_seed(seed + k) for k in (0, 1000, 2000))
    settings = {"ess": ess, "sigma_init": sigma, "prior_scale": 1.0, "beta1": 0.0}
    if way == "joint":
        found = chapter["joint_bbp"](
            each, index, index, m, [lr], sigma_p=sigma_p, C=C, b=b, draws=draws, coins=coins, noise=noise, **settings
        )
    else:
        gradient = chapter["private_gradients"](each, index, index, sigma_p, C, b, coins, noise)
        found = chapter["bayes_by_backprop"](gradient, m, [lr], generator=draws, **settings)
    rho = torch.log(torch.expm1(found[1]))
    return torch.stack([-found[0] / lr, (math.log(math.expm1(sigma)) - rho) / lr])


@pytest.mark.equation("eq-mapped-gradient")
def test_mapped_gradient():
    """From the same batch, noise and draw, by hand."""
    C, b, sigma_p, seed = 2.0, 4, 1.3, 5
    found = one_private_step("mapped", sigma_p, C, seed)
    G = torch.from_numpy(rng(0).normal(size=(10, 30)))
    (B,) = mechanism.poisson_batches(10, b, 1, torch.Generator().manual_seed(seed))
    clipped = (G * gradients.clip_factors(G.norm(dim=1), C)[:, None])[B].sum(0)
    z = torch.randn(30, generator=torch.Generator().manual_seed(seed + 1000), dtype=torch.float64)
    xi = torch.randn(30, generator=torch.Generator().manual_seed(seed + 2000), dtype=torch.float64)
    g = (clipped + sigma_p * C * z) / b
    torch.testing.assert_close(found, torch.stack([g, g * xi * -math.expm1(-0.6)]), atol=1e-7, rtol=1e-5)


@pytest.mark.equation("eq-width-noise")
@pytest.mark.parametrize(("way", "factor"), [("joint", 1.0), ("mapped", -math.expm1(-0.6))])
def test_width_noise(way, factor):
    """The chapter's own steps with noise, less the same without, have the deviations of the formula."""
    sigma_p, C, b = 1.5, 0.8, 4
    pairs = [one_private_step(way, sigma_p, C, k) - one_private_step(way, 0.0, C, k) for k in range(400)]
    noise = torch.stack(pairs)
    s = sigma_p * C / b
    assert float(noise[:, 0].std()) == pytest.approx(s, rel=0.03)
    assert float(noise[:, 1].std()) == pytest.approx(s * factor, rel=0.03)


@pytest.mark.equation("eq-width-speed")
@pytest.mark.parametrize(
    ("sigma", "h", "ess", "s0"), [(0.05, 2.0, 1438, 1.0), (0.5, 0.3, 50, 2.0), (0.02, 60.0, 200, 0.3)]
)
def test_width_speed(sigma, h, ess, s0):
    """The module's optimizer on a million weights with curvature h: the mean change of log sigma in one step."""
    lr, P = 1e-3, 1_000_000
    p = nn.Parameter(torch.zeros(P, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    optimizer = backprop.BayesByBackprop([p], lr, ess, sigma_init=sigma, prior_scale=s0, beta1=0.0, generator=generator)
    with optimizer.sampled_params():
        p.grad = h * p.detach().clone()
    optimizer.step()
    change = (optimizer.variance()[p].sqrt() / sigma).log().mean()
    slope = -math.expm1(-sigma)
    formula = lr * (slope / sigma) ** 2 * (1 / ess - sigma**2 * (h + 1 / (ess * s0**2)))
    spread = lr * slope**2 / sigma * (h + 1 / (ess * s0**2)) * 2**0.5 * sigma / P**0.5
    assert float(change) == pytest.approx(formula, rel=2e-3, abs=5 * spread)


@pytest.mark.equation("eq-width-snr")
@given(st.floats(0.5, 20.0), scales, st.integers(1, 1438), st.integers(1, 5000), st.floats(0.001, 1.0))
def test_width_snr(sigma_p, C, b, T, sigma):
    """The strongest pull over its noise, with the noise as the mechanism reports it."""
    n = 1438
    optimizer = adaptive.sgd(nn.Linear(1, 1).parameters(), lr=1.0)
    dp = mechanism.mechanism(optimizer, noise_multiplier=sigma_p, max_grad_norm=C, batch_size=b, n=n)
    s, slope, r = mechanism.noise_std(dp), -math.expm1(-sigma), b / n * math.sqrt(T) / sigma_p
    assert T / n / (math.sqrt(T) * s) == pytest.approx(r / C, rel=1e-9)
    assert T / n / (math.sqrt(T) * s * slope) == pytest.approx(r / (C * slope), rel=1e-9)


def test_a_budget_nearly_fixes_r():
    """What the reading of the last equation rests on: r differs little between batch sizes at one epsilon."""
    found = []
    for b, T in itertools.product((64, 256), (168, 500)):
        found.append(b / 1438 * T**0.5 / accounting.noise_for(1.0, b / 1438, T, 1e-5))
    assert max(found) / min(found) < 1.4

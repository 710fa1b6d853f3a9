"""The equations of the chapter on sampling and dropout, each evaluated a second way in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from scipy import linalg, stats
from scipy.integrate import quad
from torch import nn

from dpivon import accounting, adaptive, dropout, gradients, langevin, mechanism

chapter = definitions("book/06_sampling_and_dropout.ipynb")

seeds = st.integers(0, 2**32 - 1)
rates = st.floats(0.01, 0.5)
curvatures = st.floats(0.1, 3.0)
temperatures = st.floats(0.1, 10.0)
counts = st.floats(10.0, 1e5)
norms = st.floats(0.1, 10.0)


def rng(seed):
    return np.random.default_rng(seed)


def tensor(value):
    return torch.tensor(value, dtype=torch.float64)


def step_of_both(theta, g, lr, ess, temperature, decay, noise_std):
    """One step of the chapter's walk and of the module's, with the same draws."""
    settings = {"temperature": temperature, "weight_decay": decay, "noise_std": noise_std}
    ours = chapter["sgld"](lambda _: g, theta, lr, 1, ess=ess, generator=torch.Generator().manual_seed(3), **settings)[
        0
    ]
    p = nn.Parameter(theta.clone())
    optimizer = langevin.SGLD([p], lr, ess, 1, generator=torch.Generator().manual_seed(3), **settings)
    p.grad = g.clone()
    optimizer.step()
    return ours, p.detach()


@pytest.mark.equation("eq-balance")
@settings(max_examples=20, deadline=None)
@given(rates, curvatures, st.floats(0.01, 2.0))
def test_balance(lr, h, fresh):
    """The variance of a long sum of shrunk draws, term by term."""
    shrink = 1 - lr * h
    total = sum(fresh * shrink ** (2 * k) for k in range(20_000))
    assert fresh / (lr * h * (2 - lr * h)) == pytest.approx(total, rel=1e-9)
    assert shrink**2 * total + fresh == pytest.approx(total, rel=1e-9)


@pytest.mark.equation("eq-langevin-step")
@settings(max_examples=10, deadline=None)
@given(seeds, rates, counts, temperatures, st.floats(0.0, 1.0))
def test_langevin_step(seed, lr, ess, temperature, decay):
    """The mean and the variance of the move, over many coordinates; chapter and module alike."""
    P = 200_000
    theta, g = torch.full((P,), 1.5, dtype=torch.float64), torch.full((P,), -0.7, dtype=torch.float64)
    for new in step_of_both(theta, g, lr, ess, temperature, decay, 0.0):
        variance = 2 * lr * temperature / ess
        assert float(new.mean()) == pytest.approx(1.5 - lr * (-0.7 + decay * 1.5), abs=5 * (variance / P) ** 0.5)
        assert float(new.var()) == pytest.approx(variance, rel=0.02)


@pytest.mark.equation("eq-no-flow")
@settings(max_examples=20, deadline=None)
@given(st.floats(-2.0, 6.0), temperatures, st.floats(0.01, 1.0), rates)
def test_no_flow(theta, temperature, decay, lr):
    """Drift and diffusion of the stated density cancel at each point, by numerical derivatives of the six patients."""
    N = 6

    def loss(t):
        return float(chapter["patients_loss"](tensor(t))) + decay / 2 * t * t

    def p(t):
        return math.exp(-N / temperature * (loss(t) - loss(theta)))

    step = 1e-5
    slope = float(chapter["patients_slope"](tensor(theta))) + decay * theta
    assert slope == pytest.approx((loss(theta + step) - loss(theta - step)) / (2 * step), abs=1e-7)
    diffusion = (p(theta + step) - p(theta - step)) / (2 * step) * lr * temperature / N
    assert lr * slope * p(theta) + diffusion == pytest.approx(0, abs=1e-6 * (1 + (N / temperature) ** 2))
    assert abs(diffusion) > 1e-3 * abs(lr * slope) * p(theta)


@pytest.mark.equation("eq-no-flow")
def test_walkers_have_the_density():
    """Four thousand walkers of the chapter against the integral, by a Kolmogorov-Smirnov test."""
    decay, ess = 1 / 54, 6
    walkers = torch.zeros(4000, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    end = chapter["sgld"](
        chapter["patients_slope"], walkers, 0.1, 2500, ess=ess, weight_decay=decay, generator=generator
    )[-1]

    def unnormalized(t):
        return math.exp(-ess * (float(chapter["patients_loss"](tensor(t))) + decay / 2 * t * t))

    total = quad(unnormalized, -15, 30, limit=200)[0]
    grid = np.linspace(-15, 30, 2001)
    density = np.array([unnormalized(t) for t in grid]) / total
    cdf = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * (grid[1] - grid[0]))])
    assert stats.kstest(end.numpy(), lambda t: np.interp(t, grid, cdf)).pvalue > 1e-3


def line(seed, n=60, noise=0.5):
    random = rng(seed)
    Phi = np.stack([np.ones(n), random.uniform(-1, 2, n)], 1)
    return torch.from_numpy(Phi), torch.from_numpy(Phi @ [1.0, -0.5] + noise * random.normal(size=n)), noise


@pytest.mark.equation("eq-at-rest")
@settings(max_examples=10, deadline=None)
@given(seeds, st.floats(0.02, 0.1), temperatures)
def test_at_rest(seed, lr, temperature):
    """Against scipy's solver of the discrete Lyapunov equation."""
    Phi, _, noise = line(seed)
    H = Phi.T @ Phi / (60 * noise**2)
    V = torch.from_numpy(np.cov(rng(seed).normal(size=(2, 9))))
    found = chapter["at_rest"](H, lr, 60, temperature, lambda Sigma: V, rounds=20_000)
    fresh = 2 * lr * temperature / 60 * np.eye(2) + lr**2 * V.numpy()
    np.testing.assert_allclose(
        found, linalg.solve_discrete_lyapunov(np.eye(2) - lr * H.numpy(), fresh), rtol=1e-6, atol=1e-12
    )


@pytest.mark.equation("eq-rest-width")
@given(rates, curvatures, counts, temperatures, st.floats(0.0, 10.0))
def test_heat(lr, h, N, temperature, v):
    """The recursion's solution in one direction, and the posterior's variance as the limit of short steps."""
    formula = (temperature + N * lr * v / 2) / (N * h) / (1 - lr * h / 2)
    fresh = 2 * lr * temperature / N + lr**2 * v
    assert (1 - lr * h) ** 2 * formula + fresh == pytest.approx(formula, rel=1e-9)
    short = 1e-7
    limit = (1 + N * short * v / 2) / (N * h) / (1 - short * h / 2)
    assert limit == pytest.approx(1 / (N * h), rel=1e-6 * (1 + N * v))


@pytest.mark.equation("eq-batch-noise")
@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 8))
def test_batch_noise(seed, b):
    """Against the enumeration of all Poisson batches of eight examples."""
    g, N = rng(seed).normal(size=8) + 1, 8
    q = b / N
    mean = square = 0.0
    for coins in itertools.product((0, 1), repeat=N):
        probability = math.prod(q if c else 1 - q for c in coins)
        value = np.dot(coins, g) / b
        mean, square = mean + probability * value, square + probability * value**2
    assert mean == pytest.approx(g.mean(), abs=1e-12)
    assert (1 - q) / b * np.mean(g**2) == pytest.approx(square - mean**2, abs=1e-12)


@pytest.mark.equation("eq-batch-noise")
def test_the_chapter_s_batch_noise_is_that_of_its_gradients():
    """For a line: the covariance around the mean, when the walk scatters, by simulation of both."""
    Phi, y, noise = line(1)
    m = torch.linalg.lstsq(Phi, y[:, None]).solution[:, 0]
    Sigma = tensor([[0.3, -0.1], [-0.1, 0.2]])
    formula = chapter["batch_noise"](Phi, y, m, noise, 12)(Sigma)
    generator = torch.Generator().manual_seed(0)
    theta = m + torch.randn(100_000, 2, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(Sigma).T
    left = (theta @ Phi.T - y) / noise**2
    coins = torch.rand(left.shape, generator=generator) < 12 / 60
    scatter = (left * coins) @ Phi / 12 - left @ Phi / 60
    torch.testing.assert_close(torch.cov(scatter.T), formula, rtol=0.03, atol=0.03)


@pytest.mark.equation("eq-three-heats")
@settings(max_examples=20, deadline=None)
@given(rates, st.integers(10, 1000), st.floats(1.0, 100.0), norms, st.floats(0.1, 10.0), st.floats(0.0, 2.0))
def test_three_heats(lr, N, b, C, sigma_p, v):
    """Heats add: the variance at rest with both noises is that of one walk at the total temperature."""
    h, tau = 1.0, 0.7
    s = sigma_p * C / b
    total = tau + N * lr * v / 2 + N * lr * s**2 / 2
    noisy = (2 * lr * tau / N + lr**2 * (v + s**2)) / (lr * h * (2 - lr * h))
    assert total / (N * h) / (1 - lr * h / 2) == pytest.approx(noisy, rel=1e-9)
    assert langevin.temperature_of(lr, N, s) == pytest.approx(N * lr * s**2 / 2, rel=1e-9)
    if b <= N:
        optimizer = adaptive.sgd(nn.Linear(1, 1).parameters(), lr=1.0)
        dp = mechanism.mechanism(optimizer, noise_multiplier=sigma_p, max_grad_norm=C, batch_size=b, n=N)
        assert mechanism.noise_std(dp) == pytest.approx(s, rel=1e-9)


@pytest.mark.equation("eq-missing-noise")
@pytest.mark.parametrize("s", [0.0, 0.3, 0.6, 2.0])
def test_missing_noise(s):
    """What the step adds, measured; with the privacy noise it makes the needed variance, or the larger of the two."""
    lr, ess, tau, P = 0.2, 20.0, 0.8, 400_000
    theta, g = torch.zeros(P, dtype=torch.float64), torch.zeros(P, dtype=torch.float64)
    needed = 2 * lr * tau / ess
    for new in step_of_both(theta, g, lr, ess, tau, 0.0, s):
        added = float(new.var())
        assert added == pytest.approx(max(needed - (lr * s) ** 2, 0), rel=0.01, abs=1e-12)
        assert added + (lr * s) ** 2 == pytest.approx(max(needed, (lr * s) ** 2), rel=0.01)


@pytest.mark.equation("eq-one-sample")
@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([0, 1]), temperatures)
def test_one_sample(no, yes, x, temperature):
    """The quotient of two posteriors on the grid, against likelihood over mean likelihood."""
    here = chapter["log_posterior"](no, yes, temperature)
    more = chapter["log_posterior"](no + (x == 0), yes + (x == 1), temperature)
    share = np.linspace(0.1, 0.9, 81)
    likelihood = (share if x else 1 - share) ** (1 / temperature)
    np.testing.assert_allclose(
        (more - here).exp().numpy(), likelihood / np.dot(here.exp().numpy(), likelihood), rtol=1e-9
    )
    assert chapter["ratio"](here, more) <= math.log(9) / temperature * (1 + 1e-9)


@pytest.mark.equation("eq-sample-cost")
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 3), temperatures)
def test_sample_cost(no, yes, k, temperature):
    """The law of k draws, enumerated on a coarse grid of all tuples: its worst ratio is k times that of one."""
    share = np.linspace(0.1, 0.9, 7)
    bound = langevin.one_sample_epsilon(math.log(9), k, temperature)
    assert bound == pytest.approx(k * math.log(9) / temperature)

    def law(no, yes):
        log_p = (no * np.log(1 - share) + yes * np.log(share)) / temperature
        p = np.exp(log_p - log_p.max())
        p /= p.sum()
        joint = p
        for _ in range(k - 1):
            joint = np.multiply.outer(joint, p)
        return joint

    for more in ((no + 1, yes), (no, yes + 1)):
        worst = np.abs(np.log(law(*more) / law(no, yes))).max()
        assert worst <= bound * (1 + 1e-9)
    replaced = np.abs(np.log(law(no + 1, yes) / law(no, yes + 1))).max()
    assert replaced <= 2 * bound * (1 + 1e-9)


@pytest.mark.equation("eq-sample-cost")
@settings(max_examples=25, deadline=None)
@given(seeds)
def test_only_the_range_within_one_example_counts(seed):
    """Examples whose likelihoods differ by large factors from each other, but each by at most e^R over all weights."""
    random = rng(seed)
    log_p = random.normal(size=(4, 9)) + 20 * random.normal(size=(4, 1))
    R = (log_p.max(1) - log_p.min(1)).max()

    def posterior(prior, counts):
        total = prior + counts @ log_p
        return total - np.logaddexp.reduce(total)

    counts = random.integers(0, 6, 4)
    for x in range(4):
        changes = posterior(np.zeros(9), counts + np.eye(4)[x]) - posterior(np.zeros(9), counts)
        assert np.abs(changes).max() <= R * (1 + 1e-9)
    widest = (log_p.max(1) - log_p.min(1)).argmax()
    sure = np.where(np.arange(9) == log_p[widest].argmin(), 0.0, -30.0)  # nearly all mass where it is least likely
    changes = posterior(sure, np.eye(4)[widest]) - posterior(sure, np.zeros(4))
    assert np.abs(changes).max() == pytest.approx(R, rel=1e-6)


@pytest.mark.equation("eq-capped-range")
@given(seeds, st.floats(0.001, 0.9), st.integers(2, 20))
def test_capped_range(seed, gamma, classes):
    """Random and extreme predictions stay within the range; the extreme ones fill it."""
    p = np.concatenate([rng(seed).dirichlet(0.1 * np.ones(classes), 50), np.eye(classes)])
    capped = np.log((1 - gamma) * p + gamma / classes)
    assert chapter["capped_range"](gamma, classes) == pytest.approx(capped.max() - capped.min(), rel=1e-9)


@pytest.mark.equation("eq-free-noise")
@given(rates, counts, st.floats(1.0, 1000.0), norms, temperatures)
def test_free_noise(lr, N, b, C, temperature):
    """The walk's noise, carried back to the sum of gradients; the chapter's and the module's."""
    in_weights = math.sqrt(2 * lr * temperature / N)
    in_sum = in_weights / lr * b
    for found in (chapter["free_noise_multiplier"], langevin.free_noise_multiplier):
        assert found(lr, N, b, C, temperature) == pytest.approx(in_sum / C, rel=1e-9)


@pytest.mark.equation("eq-diffusion-time")
@given(rates, counts, st.floats(0.001, 1.0), norms, temperatures, st.integers(1, 10_000))
def test_diffusion_time(lr, N, q, C, temperature, T):
    sigma = langevin.free_noise_multiplier(lr, N, q * N, C, temperature)
    assert q * math.sqrt(T) / sigma == pytest.approx(C * math.sqrt(lr * T / (2 * temperature * N)), rel=1e-9)


@pytest.mark.equation("eq-diffusion-time")
@pytest.mark.parametrize(("lr", "q", "T"), [(0.5, 0.2, 168), (0.05, 0.2, 1680), (0.5, 0.05, 168)])
def test_a_walk_costs_about_as_much_as_one_release_at_this_distance(lr, q, T):
    """Where the noise is not small: the accountant of the whole path against that of one Gaussian release."""
    N, C = 1438, 1.0
    sigma = langevin.free_noise_multiplier(lr, N, q * N, C)
    mu = C * math.sqrt(lr * T / (2 * N))
    whole = accounting.epsilon(sigma, q, T, 1e-5, accountant="prv")
    assert sigma > 2
    assert whole == pytest.approx(accounting.epsilon(1 / mu, 1.0, 1, 1e-5, accountant="prv"), rel=0.1)


@pytest.mark.equation("eq-free-rate")
@given(counts, st.floats(1.0, 1000.0), norms, temperatures, st.floats(0.1, 20.0))
def test_free_rate(N, b, C, temperature, sigma_p):
    """At the border the walk's own noise is what the budget demands, and the temperature is the wanted one."""
    border = 2 * temperature * b**2 / (N * sigma_p**2 * C**2)
    assert langevin.free_noise_multiplier(border, N, b, C, temperature) == pytest.approx(sigma_p, rel=1e-9)
    assert langevin.temperature_of(border, N, sigma_p * C / b) == pytest.approx(temperature, rel=1e-9)


@pytest.mark.equation("eq-price-of-arriving")
@given(counts, curvatures, norms, temperatures, st.floats(0.001, 0.5))
def test_price_of_arriving(N, h, C, temperature, eta):
    """The time until a share eta of the start is left, with very short steps, put into the price of time."""
    lr = 1e-6
    T = math.log(eta) / math.log1p(-lr * h)
    w = math.sqrt(temperature / (N * h))
    price = C * math.sqrt(lr * T / (2 * temperature * N))
    assert C * w / temperature * math.sqrt(math.log(1 / eta) / 2) == pytest.approx(price, rel=1e-4)


@pytest.mark.equation("eq-mask-variance")
@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.05, 0.8))
def test_mask_variance(seed, p):
    """Against the enumeration of all masks of five inputs."""
    w, phi = rng(seed).normal(size=(2, 5))
    mean = square = 0.0
    for z in itertools.product((0, 1), repeat=5):
        probability = math.prod(1 - p if on else p for on in z)
        f = np.dot(w * phi, z) / (1 - p)
        mean, square = mean + probability * f, square + probability * f**2
    assert mean == pytest.approx(np.dot(w, phi), abs=1e-9)
    formula = p / (1 - p) * np.sum(w**2 * phi**2)
    assert formula == pytest.approx(square - mean**2, abs=1e-9)
    assert float(chapter["mask_spread"](tensor(w), tensor(phi), p)) == pytest.approx(math.sqrt(formula), abs=1e-9)


@pytest.mark.equation("eq-mask-variance")
def test_the_masks_of_chapter_and_module_have_this_variance():
    rate, n = 0.3, 20_000
    ours = chapter["masks"](n, rate, torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    layer = dropout.add(nn.Sequential(nn.Identity(), nn.Linear(64, 1, bias=False), nn.Linear(1, 1)), rate)
    theirs = F.dropout(torch.ones(n, 64), rate)
    for mask in (ours, theirs):
        assert float(mask.mean()) == pytest.approx(1, abs=0.005)
        assert float(mask.var()) == pytest.approx(rate / (1 - rate), rel=0.01)
    outputs = torch.stack([layer.train()[2](torch.ones(n, 1))])
    assert float(outputs.detach().var()) == pytest.approx(
        rate / (1 - rate) * float(layer[2].weight.detach().square()), rel=0.05
    )


@pytest.mark.equation("eq-dropout-fit")
@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.05, 0.8))
def test_dropout_fit(seed, p):
    """The gradient of the squared loss, averaged over all masks, is zero there."""
    random = rng(seed)
    Phi, y = tensor(random.normal(size=(12, 4))), tensor(random.normal(size=12))
    w = chapter["dropout_fit"](Phi, y, p).requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for z in itertools.product((0.0, 1.0), repeat=4):
        probability = math.prod(1 - p if on else p for on in z)
        loss = loss + probability * ((Phi * tensor(z) / (1 - p)) @ w - y).square().sum() / 2
    (gradient,) = torch.autograd.grad(loss, w)
    assert gradient.abs().max() < 1e-9 * (1 + float(loss.detach()))


@pytest.mark.equation("eq-mask-sensitivity")
@settings(max_examples=15, deadline=None)
@given(seeds, st.floats(0.1, 0.8), st.floats(0.05, 2.0))
def test_mask_sensitivity(seed, rate, C):
    """Whatever the masks are: with one example more the clipped sum moves by that example's clipped gradient."""
    random = rng(seed)
    theta = tensor(0.2 * random.normal(size=4810))
    x, y = tensor(random.normal(size=(7, 64))), torch.from_numpy(random.integers(0, 10, 7))
    mask = chapter["masks"](7, rate, torch.Generator().manual_seed(seed % 1000)).double()

    def clipped_sum(k):
        G = chapter["each_gradient"](theta, x[:k], y[:k], mask[:k])
        return gradients.clip_factors(G.norm(dim=1), C) @ G

    assert float((clipped_sum(7) - clipped_sum(6)).norm()) <= C * (1 + 1e-9)
    alone = chapter["each_gradient"](theta, x[6:], y[6:], mask[6:])[0]
    torch.testing.assert_close(
        clipped_sum(7) - clipped_sum(6), alone * min(1, C / (float(alone.norm()) + 1e-6)), rtol=1e-6, atol=1e-9
    )


@pytest.mark.equation("eq-joint-norm-of-members")
def test_joint_norm_of_members():
    """Exact as a sum of squares; and about sqrt(M) for members that differ by their start only."""
    random = rng(0)
    M = 4
    theta = tensor(0.15 * random.normal(size=M * 4810))
    x, y = tensor(random.normal(size=(30, 64))), torch.from_numpy(random.integers(0, 10, 30))
    joint = chapter["each_of_all"](theta, x, y, M).norm(dim=1)
    single = torch.stack([chapter["each_gradient"](t, x, y).norm(dim=1) for t in theta.chunk(M)])
    torch.testing.assert_close(joint, single.square().sum(0).sqrt())
    assert float((joint / single.mean(0)).mean()) == pytest.approx(math.sqrt(M), rel=0.05)


@pytest.mark.equation("eq-average-noise")
@pytest.mark.parametrize(("h", "lr", "length"), [(0.2, 0.5, 4000), (1.0, 0.3, 1000), (0.5, 1.5, 1000)])
def test_average_noise(h, lr, length):
    """Against the exact variances of the recursion at rest, with all covariances added up."""
    s, shrink = 0.3, 1 - lr * h
    single = lr**2 * s**2 / (1 - shrink**2)
    assert lr * s**2 / (2 * h - lr * h**2) == pytest.approx(single, rel=1e-9)
    lags = np.arange(1, length)
    exact = single / length**2 * (length + 2 * np.sum((length - lags) * shrink**lags))
    assert s**2 / (h**2 * length) == pytest.approx(exact, rel=2.5 / (lr * h * length))


@pytest.mark.equation("eq-batch-means")
@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(2, 10))
def test_batch_means(seed, K):
    """The textbook's variance of a mean, of the blocks' means, written out."""
    path = tensor(rng(seed).normal(size=(K * 12, 3)))
    mean, v = chapter["average_and_variance"](path, blocks=K)
    second = path[K * 6 :].numpy().reshape(K, 6, 3).mean(1)
    np.testing.assert_allclose(mean, second.mean(0), atol=1e-12)
    np.testing.assert_allclose(v, ((second - second.mean(0)) ** 2).sum(0) / (K * (K - 1)), atol=1e-12)


@pytest.mark.equation("eq-batch-means")
def test_independent_iterates_have_an_unbiased_estimate():
    path = torch.randn(160, 20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, v = chapter["average_and_variance"](path)
    assert float(v.mean()) == pytest.approx(1 / 80, rel=0.02)
    assert float(mean.var()) == pytest.approx(1 / 80, rel=0.05)


@pytest.mark.equation("eq-choice")
@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(0, 10), st.floats(0.05, 5.0))
def test_choice(seed, n, epsilon):
    """From losses in numpy: the law is the stated one, and one more example changes no probability beyond epsilon."""
    random = rng(seed)
    logits = 4 * random.normal(size=(n + 1, 5))
    y = random.integers(0, 5, n + 1)
    log_probs = tensor(logits).log_softmax(1)

    def law(k):
        total = []
        for t in chapter["CANDIDATES"]:
            z = logits[:k] / t
            log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
            total.append(np.minimum(-log_p[np.arange(k), y[:k]], 5.0).sum())
        weights = np.exp(-epsilon * (np.array(total) - min(total)) / 5.0)
        return weights / weights.sum()

    found = chapter["capped_losses"](log_probs, torch.from_numpy(y))
    np.testing.assert_allclose((-epsilon * found / 5.0).softmax(0), law(n + 1), rtol=1e-6)
    assert np.abs(np.log(law(n + 1) / law(n))).max() <= epsilon * (1 + 1e-9)


@pytest.mark.equation("eq-choice")
def test_choices_follow_the_law():
    log_probs = (2 * torch.randn(20, 4, generator=torch.Generator().manual_seed(1))).log_softmax(1)
    y = torch.arange(20) % 4
    law = (-2.0 * chapter["capped_losses"](log_probs.double(), y) / 5.0).softmax(0)
    source = torch.Generator().manual_seed(0)
    draws = [chapter["choose"](log_probs, y, 2.0, source) for _ in range(3000)]
    for candidate, p in zip(chapter["CANDIDATES"], law.tolist(), strict=True):
        assert draws.count(candidate) / 3000 == pytest.approx(p, abs=4.5 * (p * (1 - p) / 3000) ** 0.5 + 1e-9)


@pytest.mark.equation("eq-last-layer")
def test_last_layer():
    """The second derivatives of the cross-entropy by autograd, for every weight and bias of the last layer."""
    random = rng(0)
    theta = tensor(0.3 * random.normal(size=4810))
    x, y = tensor(random.normal(size=(3, 64))), torch.tensor([1, 4, 9])
    found = chapter["each_curvature"](theta, x).view(3, 10, 65)
    for i in range(3):

        def loss(last, i=i):
            whole = torch.cat([theta[:-650], last])
            return F.cross_entropy(chapter["network"](whole, x[i : i + 1]), y[i : i + 1])

        exact = torch.autograd.functional.hessian(loss, theta[-650:]).diagonal()
        torch.testing.assert_close(found[i][:, :64].flatten(), exact[:640])
        torch.testing.assert_close(found[i][:, 64], exact[640:])
    h = tensor([-0.2, 0.0, 0.5])
    variance = chapter["last_layer_variance"](h, 100.0, 1e-3)
    assert variance.tolist() == pytest.approx([10.0, 10.0, 1 / (100 * 0.501)])


@pytest.mark.equation("eq-tenth")
@pytest.mark.parametrize("epsilon", [0.5, 3.0, 8.0])
def test_tenth(epsilon):
    """The Rényi cost alpha / (2 sigma^2) of a release, integrated numerically at several orders."""
    alone = accounting.noise_for(epsilon, 1.0, 1, 1e-5)

    def rho(order, sigma):
        """From the definition: the divergence of N(1, sigma^2) from N(0, sigma^2)."""
        integral = quad(
            lambda z: math.exp(order * (2 * z - 1) / (2 * sigma**2) - z * z / (2 * sigma**2)) / sigma,
            order - 12 * sigma,
            order + 12 * sigma,
        )[0]
        return math.log(integral / math.sqrt(2 * math.pi)) / (order - 1)

    for order in (1.5, 3.0, 8.0):
        assert rho(order, alone / 0.1**0.5) == pytest.approx(rho(order, alone) / 10, rel=1e-6)
        assert rho(order, alone) == pytest.approx(order / (2 * alone**2), rel=1e-6)

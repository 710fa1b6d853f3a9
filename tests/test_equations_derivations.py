"""The formulas of the derivations appendix, each evaluated a second way in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.integrate import quad
from scipy.special import comb, log_ndtr, ndtr

from dpivon import adaptive, curvature, iterates, ivon, temperature

seeds = st.integers(0, 2**32 - 1)
signals = st.floats(-3.0, 4.0)
decays = st.floats(0.5, 0.999)
orders = st.floats(1.05, 30.0)

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(80)
WEIGHTS = WEIGHTS / WEIGHTS.sum()


def density(z):
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)


def expectation(f, kinks=()):
    """E f(z) for a standard normal z, with the kinks of f as end points."""
    ends = [-14.0, *sorted(kink for kink in kinks if abs(kink) < 14), 14.0]
    pieces = (quad(lambda z: f(z) * density(z), a, c, epsabs=1e-14, epsrel=1e-11) for a, c in itertools.pairwise(ends))
    return math.fsum(value for value, _ in pieces)


def laws(seed, size=6, number=2):
    """Some lists of positive probabilities."""
    return np.random.default_rng(seed).dirichlet(np.full(size, 0.7), size=number) * 0.999 + 0.001 / size


def profile(epsilon, mu):
    """The chapter's formula for one Gaussian release."""
    return ndtr(mu / 2 - epsilon / mu) - math.exp(min(epsilon + log_ndtr(-mu / 2 - epsilon / mu), 700.0))


def excess(p, q, epsilon):
    """The smallest delta for lists of probabilities."""
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


# --- privacy


@pytest.mark.equation("eq-app-chernoff")
@given(st.floats(0.05, 5.0), st.floats(0.05, 6.0))
def test_chernoff(rate, t):
    """Against exact tails of a normal, and at the best rate it is the bound that the chapter uses."""
    moment = expectation(lambda z: math.exp(rate * z))
    assert stats.norm.sf(t) <= math.exp(-rate * t) * moment
    assert math.exp(-t * t) * expectation(lambda z: math.exp(t * z)) == pytest.approx(math.exp(-t * t / 2), rel=1e-9)


def walk(chance, k):
    """The law of a sum of k losses of +1 or -1, and of its compensator, where the chance depends on the sum so far."""
    found = {(0, 0.0): 1.0}
    for _ in range(k):
        after: dict[tuple[int, float], float] = {}
        for (total, means), weight in found.items():
            p = chance(total)
            for step, w in ((1, p), (-1, 1 - p)):
                place = total + step, round(means + 2 * p - 1, 9)
                after[place] = after.get(place, 0.0) + weight * w
        found = after
    return found


@pytest.mark.equation("eq-app-azuma")
@pytest.mark.parametrize("chance", [lambda x: 0.5, lambda x: 0.62, lambda x: 0.5 if x <= 0 else 0.75])
@pytest.mark.parametrize("k", [4, 12, 25])
def test_azuma(chance, k):
    """No exact tail is above the bound; for a fair coin, a bound with half the variance would be crossed."""
    law, epsilon, crossed = walk(chance, k), 0.3, False
    for t in epsilon * np.arange(0.5, k, 0.5):
        tail = math.fsum(w for (total, means), w in law.items() if epsilon * (total - means) >= t - 1e-9)
        assert tail <= math.exp(-(t**2) / (2 * k * epsilon**2)) * (1 + 1e-9)
        crossed = crossed or tail > math.exp(-(t**2) / (k * epsilon**2))
    assert crossed or chance(1) != 0.5


@pytest.mark.equation("eq-app-best-test")
@given(seeds, st.floats(0.0, 5.0))
def test_best_test(seed, c):
    p, q = laws(seed)
    S = np.random.default_rng(seed + 1).random((200, len(p)))
    best = (p > c * q).astype(float)
    bound = np.maximum(p - c * q, 0).sum()
    assert (S @ (p - c * q)).max() <= bound + 1e-12
    assert best @ (p - c * q) == pytest.approx(bound)
    fewer = S[S @ q <= best @ q]  # no test with no more false alarms has more hits
    assert not len(fewer) or (fewer @ p).max() <= best @ p + 1e-12


@pytest.mark.equation("eq-app-adaptive")
@settings(max_examples=8, deadline=None)
@given(st.floats(0.3, 1.5), st.floats(0.2, 1.2), st.floats(-1.0, 2.0), st.floats(-1.0, 1.0))
def test_adaptive_releases(mu1, mu2, epsilon, turn):
    """Over both outputs on a grid, and never above the releases that do not look."""
    x = np.linspace(-9, 9 + mu1, 701)
    z = np.linspace(-9, 9 + mu2, 601)
    looking = mu2 * (0.55 + 0.45 * np.sin(3 * x + turn))  # the second distance, chosen by the first output
    p1, q1 = stats.norm.pdf(x - mu1), stats.norm.pdf(x)
    p2, q2 = stats.norm.pdf(z[None] - looking[:, None]), stats.norm.pdf(z)[None]
    both = np.maximum(p1[:, None] * p2 - math.exp(epsilon) * q1[:, None] * q2, 0)
    exact = both.sum() * (x[1] - x[0]) * (z[1] - z[0])
    loss = mu1 * x - mu1**2 / 2
    profiles = np.array([profile(epsilon - at, mu) for at, mu in zip(loss, looking, strict=True)])
    formula = (p1 * profiles).sum() * (x[1] - x[0])
    assert formula == pytest.approx(exact, abs=2e-5)
    assert exact <= profile(epsilon, math.hypot(mu1, mu2)) + 2e-5


@pytest.mark.equation("eq-app-gaussian-divergence")
@given(orders, st.floats(0.4, 3.0), st.floats(0.0, 1.5), st.floats(0.0, 1.5))
def test_gaussian_divergence(order, s, a, b):
    """In two dimensions, u - v = (a, b): the integral is a product of two."""

    def log_moment(shift):
        d = shift / s
        x = np.linspace(-12, 12 + order * d, 40_001)  # in units of s, from v
        exponents = order * (x * d - d**2 / 2) - x**2 / 2
        top = exponents.max()
        return top + math.log(np.exp(exponents - top).sum() * (x[1] - x[0]) / math.sqrt(2 * math.pi))

    found = (log_moment(a) + log_moment(b)) / (order - 1)
    assert found == pytest.approx(order * (a * a + b * b) / (2 * s * s), rel=1e-6, abs=1e-9)


@pytest.mark.equation("eq-app-order")
@given(seeds, st.floats(0.05, 20.0))
def test_order(seed, t):
    p, q = laws(seed)
    L = np.log(p / q)

    def tilted(r):
        w = p * np.exp(t * r * (L - L.max()))
        return float(w @ L / w.sum())

    divergence = math.log((q * (p / q) ** (1 + t)).sum()) / t
    assert quad(tilted, 0, 1, epsabs=1e-12, limit=200)[0] == pytest.approx(divergence, rel=1e-7, abs=1e-9)
    later = math.log((q * (p / q) ** (1.5 + t)).sum()) / (t + 0.5)
    assert p @ L - 1e-9 <= divergence <= later + 1e-9 <= L.max() + 2e-9


@pytest.mark.equation("eq-app-conversion")
@given(seeds, orders, st.floats(0.0, 3.0))
def test_conversion(seed, order, epsilon):
    p, q = laws(seed)
    rho = math.log((q * (p / q) ** order).sum()) / (order - 1)
    bound = (1 - 1 / order) ** (order - 1) / order * math.exp((order - 1) * (rho - epsilon))
    assert excess(p, q, epsilon) <= bound * (1 + 1e-9)


@pytest.mark.equation("eq-app-conversion")
@pytest.mark.parametrize("order", [1.5, 3.0, 20.0])
def test_conversion_is_attained(order):
    """One rare loss at the place of the maximum; the others are so low that the moment does not see them."""
    epsilon, rare = 0.5, 1e-5
    loss = epsilon + math.log(order / (order - 1))
    p = np.array([rare, 1 - rare])
    q = np.array([rare * math.exp(-loss), 1 - rare * math.exp(-loss)])
    moment = p[0] * math.exp((order - 1) * loss)  # what counts of E_P e^{(order - 1) L}
    bound = (1 - 1 / order) ** (order - 1) / order * moment * math.exp(-(order - 1) * epsilon)
    assert excess(p, q, epsilon) == pytest.approx(bound, rel=1e-6)


def sampled_moment(sigma, q, power):
    """E_Q (P/Q)^power by quadrature."""
    peak = max(0.0, power / sigma)  # where the integrand may have its mass

    def f(z):
        ratio = np.log1p(q * np.expm1((2 * sigma * z - 1) / (2 * sigma**2)))
        return math.exp(power * ratio - z * z / 2) / math.sqrt(2 * math.pi)

    ends = sorted({-14.0, 0.0, peak / 2, peak, peak + 14.0})
    return math.fsum(quad(f, a, b, epsabs=0, epsrel=1e-11, limit=300)[0] for a, b in itertools.pairwise(ends))


@pytest.mark.equation("eq-app-sampled-moment")
@settings(max_examples=30, deadline=None)
@given(st.floats(0.7, 5.0), st.floats(0.001, 0.9), st.integers(2, 12))
def test_sampled_moment(sigma, q, order):
    k = np.arange(order + 1)
    total = (comb(order, k) * (1 - q) ** (order - k) * q**k * np.exp(k * (k - 1) / (2 * sigma**2))).sum()
    assert sampled_moment(sigma, q, order) == pytest.approx(total, rel=1e-7)


def two_faced(x, order):
    """phi(x) of the proof."""
    return (x**order - x ** (1 - order)) / (x - 1) if abs(x - 1) > 1e-9 else 2 * order - 1


@pytest.mark.equation("eq-app-directions")
@settings(max_examples=40, deadline=None)
@given(st.floats(0.8, 5.0), st.floats(0.001, 0.95), st.floats(1.1, 10.0))
def test_both_directions(sigma, q, order):
    """The difference of the two moments, by its two forms, and its sign at every single point."""
    difference = sampled_moment(sigma, q, order) - sampled_moment(sigma, q, 1 - order)

    def integrand(z):
        r = math.exp((2 * sigma * z - 1) / (2 * sigma**2))
        x, y = 1 - q + q * r, 1 - q + q / r
        product = (x - 1) * (two_faced(x, order) - two_faced(y, order))
        assert product >= -1e-7 * abs(x - 1) * two_faced(x, order)
        return product / 2

    peak = order / sigma
    ends = [-13.0, 0.0, peak / 2, peak, peak + 12.0]
    parts = [
        quad(lambda z: integrand(z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi), a, b, epsrel=1e-9, limit=200)[0]
        for a, b in itertools.pairwise(ends)
    ]
    assert difference == pytest.approx(math.fsum(parts), rel=1e-5, abs=1e-9)
    assert difference >= -1e-10


@pytest.mark.equation("eq-app-sinh")
@given(orders, st.floats(0.01, 8.0))
def test_sinh(order, t):
    formula = math.sinh((order - 0.5) * t) / math.sinh(t / 2)
    assert two_faced(math.exp(t), order) == pytest.approx(formula, rel=1e-7)
    assert two_faced(math.exp(-t), order) == pytest.approx(formula, rel=1e-7)
    assert formula <= math.sinh((order - 0.5) * (t + 0.1)) / math.sinh((t + 0.1) / 2) * (1 + 1e-12)


@pytest.mark.equation("eq-app-choice")
@given(seeds, st.floats(0.05, 4.0), st.floats(0.5, 6.0))
def test_choice(seed, epsilon, worst):
    """Losses that one person only raises; and the factor two where the person may also lower them."""
    rng = np.random.default_rng(seed)
    losses = rng.uniform(0, 50, size=9)

    def law(losses):
        w = np.exp(-epsilon * (losses - losses.min()) / worst)
        return w / w.sum()

    def distance(added):
        return np.abs(np.log(law(losses + added) / law(losses))).max()

    for added in (rng.uniform(0, worst, 9), worst * rng.integers(0, 2, 9), worst * (np.arange(9) == losses.argmin())):
        assert distance(added) <= epsilon * (1 + 1e-9)
    assert distance(worst * rng.choice([-1, 1], 9)) <= 2 * epsilon * (1 + 1e-9)


@pytest.mark.equation("eq-app-choice")
def test_the_factors_of_choice_are_attained():
    """In the limit of a candidate that has nearly all of the probability: epsilon, and twice that without the sign."""
    law = torch.softmax(-torch.tensor([0.0, 40.0], dtype=torch.float64), 0)
    raised = torch.softmax(-torch.tensor([1.0, 40.0], dtype=torch.float64), 0)
    both = torch.softmax(-torch.tensor([1.0, 39.0], dtype=torch.float64), 0)
    assert float((raised / law).log().abs().max()) == pytest.approx(1.0, abs=1e-9)
    assert float((both / law).log().abs().max()) == pytest.approx(2.0, abs=1e-9)


@pytest.mark.equation("eq-app-choice-loss")
@given(seeds, st.floats(0.1, 4.0), st.floats(0.0, 60.0))
def test_choice_loss(seed, epsilon, t):
    """With the module's own losses, candidates and cut."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = (3 * torch.randn(30, 4, generator=generator, dtype=torch.float64)).log_softmax(1)
    losses = temperature.losses(log_probs, torch.randint(0, 4, (30,), generator=generator))
    law = (-epsilon * losses / temperature.WORST).softmax(0)
    chance = float(law[losses >= losses.min() + t].sum())
    assert chance <= len(losses) * math.exp(-epsilon * t / temperature.WORST) * (1 + 1e-9)


@pytest.mark.equation("eq-app-nearly-exact")
@given(seeds, st.floats(0.0, 2.0), st.floats(0.001, 0.2))
def test_nearly_exact(seed, epsilon, eta):
    """Exact laws at most e^epsilon apart, and moved by eta each; one pair attains the bound."""
    rng = np.random.default_rng(seed)
    p = laws(seed)[0]
    q = p * np.exp(rng.uniform(-epsilon / 2, epsilon / 2, len(p)))
    q = q / q.sum()
    assert excess(p, q, epsilon) <= 1e-12

    def moved(law, source, target):
        mass = min(eta, law[source])
        return law + mass * (np.eye(len(law))[target] - np.eye(len(law))[source])

    for source, target in itertools.permutations(range(3), 2):
        found = excess(moved(p, source, target), moved(q, target, source), epsilon)
        assert found <= (1 + math.exp(epsilon)) * eta * (1 + 1e-9)


@pytest.mark.equation("eq-app-nearly-exact")
def test_nearly_exact_is_attained():
    epsilon, eta = 0.8, 0.01
    q = np.array([0.2, 0.8])
    p = np.array([0.2 * math.exp(epsilon), 1 - 0.2 * math.exp(epsilon)])
    shift = eta * np.array([1, -1])
    assert excess(p + shift, q - shift, epsilon) == pytest.approx((1 + math.exp(epsilon)) * eta, rel=1e-9)


def gifted(m, epsilon, delta, together):
    """Law of the number of right guesses: coins by randomized response, given away together or one by one."""
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    v = np.arange(m + 1)
    if together:
        return (1 - delta) * stats.binom(m, p).pmf(v) + delta * (v == m)
    return stats.binom(m, delta + (1 - delta) * p).pmf(v)


@pytest.mark.equation("eq-app-one-run")
@given(st.integers(1, 60), st.floats(0.0, 3.0), st.floats(1e-6, 0.01), st.booleans())
def test_one_run(m, epsilon, delta, together):
    tail = gifted(m, epsilon, delta, together)[::-1].cumsum()[::-1]
    f = stats.binom(m, math.exp(epsilon) / (1 + math.exp(epsilon))).sf(np.arange(m + 1) - 1)
    assert (tail <= f + m * delta + 1e-12).all()
    assert (tail > f + 1e-12).any()  # without the gifts the bound would be false


@pytest.mark.equation("eq-app-one-run")
@settings(max_examples=25, deadline=None)
@given(seeds, st.floats(0.0, 1.5))
def test_one_run_for_any_mechanism(seed, epsilon):
    """A random mechanism on three coins, its own delta, every value of the best guesses: all probabilities exact."""
    m, outputs = 3, 8
    rng = np.random.default_rng(seed)
    coins = np.array(list(itertools.product((0, 1), repeat=m)))
    law = dict(zip(map(tuple, coins), rng.dirichlet(np.full(outputs, 0.6), size=2**m), strict=True))
    delta = max(
        excess(law[tuple(c)], law[tuple(np.where(np.arange(m) == k, 1 - c, c))], epsilon)
        for c in coins
        for k in range(m)
    )
    marginal = sum(law[tuple(c)][:, None] * c[None] for c in coins)  # weight of "in" for each output and coin
    guess = marginal > sum(law[tuple(c)] for c in coins)[:, None] / 2
    right = {tuple(c): (guess == c).sum(1) for c in coins}
    f = stats.binom(m, math.exp(epsilon) / (1 + math.exp(epsilon)))
    for v in range(1, m + 1):
        tail = sum(law[tuple(c)][right[tuple(c)] >= v].sum() for c in coins) / 2**m
        assert tail <= f.sf(v - 1) + m * delta + 1e-12


# --- variational learning


def smooth(theta):
    """A function of two weights (..., 2), neither a sum nor a product."""
    x, y = theta.unbind(-1)
    return torch.sin(x + 0.4 * y) + 0.3 * x**2 * torch.cos(y) + torch.exp(0.2 * y)


GRID = torch.cartesian_prod(*2 * [torch.from_numpy(np.polynomial.hermite_e.hermegauss(24)[0])])
ON_GRID = torch.from_numpy(np.polynomial.hermite_e.hermegauss(24)[1] / math.sqrt(2 * math.pi))
ON_GRID = torch.outer(ON_GRID, ON_GRID).flatten()


def blurred(values):
    """E_q of what is given at the nodes (n, ...)."""
    return torch.tensordot(ON_GRID, values, 1)


def slopes(values, theta):
    """Derivatives of numbers (n,) in the weights (n, 2) that each was computed from."""
    return torch.autograd.grad(values.sum(), theta, create_graph=True)[0]


def place(seed):
    generator = torch.Generator().manual_seed(seed)
    m = torch.randn(2, generator=generator, dtype=torch.float64)
    return m, 0.1 + torch.rand(2, generator=generator, dtype=torch.float64)


@pytest.mark.equation("eq-app-stein")
@given(st.floats(-2.0, 2.0), st.floats(-1.5, 1.5))
def test_stein(a, kink):
    """For a smooth function, and for one with a kink."""
    left = (WEIGHTS * NODES * np.sin(a * NODES + kink)).sum()
    assert left == pytest.approx((WEIGHTS * a * np.cos(a * NODES + kink)).sum(), abs=1e-10)
    left = expectation(lambda z: z * max(z - kink, 0.0) * a, [kink])
    assert left == pytest.approx(a * stats.norm.sf(kink), abs=1e-10)


@pytest.mark.equation("eq-app-bonnet-price")
@pytest.mark.parametrize("seed", range(4))
def test_bonnet_price(seed):
    """Derivatives of the blurred function, by autograd through the quadrature, against blurred derivatives."""
    m, v = (x.requires_grad_() for x in place(seed))
    theta = m + v.sqrt() * GRID
    by_m, by_v = torch.autograd.grad(blurred(smooth(theta)), (m, v), retain_graph=True)
    slope = slopes(smooth(theta), theta)
    bend = torch.stack([slopes(slope[:, j], theta)[:, j] for j in range(2)], dim=1)
    torch.testing.assert_close(by_m, blurred(slope), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(by_v, blurred(bend) / 2, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(by_v, blurred(slope * GRID) / (2 * v.sqrt()), rtol=1e-8, atol=1e-10)


@pytest.mark.equation("eq-app-price-field")
@pytest.mark.parametrize("seed", range(4))
def test_price_of_a_field(seed):
    """A field that belongs to no function: its Jacobian is not symmetric."""
    m, v = place(seed)
    theta = (m + v.sqrt() * GRID).requires_grad_()
    field = torch.stack([torch.sin(theta[:, 0] * 0.7 + theta[:, 1]), theta[:, 0] * torch.cos(theta[:, 1])], dim=1)
    jacobian = torch.stack([blurred(slopes(field[:, j], theta)) for j in range(2)])
    assert abs(jacobian[0, 1] - jacobian[1, 0]) > 0.01
    found = blurred(field * (theta - m) / v)
    torch.testing.assert_close(found, jacobian.diagonal(), rtol=1e-8, atol=1e-10)


@pytest.mark.equation("eq-app-price-field")
def test_price_of_a_clipped_gradient():
    """A clipped slope in one dimension has kinks; both sides by quadrature, and neither is that of the loss."""
    m, v, C = 0.4, 0.5, 0.6

    def clipped(theta):
        return max(-C, min(C, theta))

    kinks = [(s * C - m) / math.sqrt(v) for s in (-1, 1)]
    left = expectation(lambda z: clipped(m + math.sqrt(v) * z) * z / math.sqrt(v), kinks)
    assert left == pytest.approx(ndtr(kinks[1]) - ndtr(kinks[0]), abs=1e-10)
    assert left < 0.9


@pytest.mark.equation("eq-app-kl")
@given(st.floats(0.2, 5.0), st.floats(-0.8, 2.0), st.floats(-1.0, 1.0))
def test_kl(tau, u, move):
    q, other = torch.distributions.Normal(0.0, tau**-0.5), torch.distributions.Normal(move, (tau * (1 + u)) ** -0.5)
    found = 2 * float(torch.distributions.kl_divergence(q, other).double())
    assert u - math.log1p(u) + tau * (1 + u) * move**2 == pytest.approx(found, rel=1e-4, abs=1e-5)


@pytest.mark.equation("eq-app-ivon-step")
@pytest.mark.parametrize(("m", "v", "rate"), [(0.3, 0.2, 0.1), (-1.0, 0.05, 0.7)])
def test_ivon_step(m, v, rate):
    """The natural step in tau, with the derivative of the objective by autograd through the quadrature."""
    ess, damping = 40.0, 0.03
    nodes, weights = torch.from_numpy(NODES), torch.from_numpy(WEIGHTS)

    def loss(theta):
        return torch.nn.functional.softplus(-2 * theta) + 0.1 * theta**2

    at = torch.tensor(v, dtype=torch.float64, requires_grad=True)
    J = ess * (weights @ loss(m + at.sqrt() * nodes) + damping / 2 * (m**2 + at)) - at.log() / 2
    tau = 1 / v + 2 * rate * float(torch.autograd.grad(J, at)[0])
    theta = (m + math.sqrt(v) * nodes).requires_grad_()
    bend = slopes(slopes(loss(theta), theta), theta)
    before = 1 / (v * ess)
    after = (1 - rate) * before + rate * (float(weights @ bend.detach()) + damping)
    assert tau / ess == pytest.approx(after, rel=1e-9)


@pytest.mark.equation("eq-app-positive")
@given(st.floats(1e-6, 1e3), st.floats(0.0, 1.0), st.floats(-1e6, 1e6), decays)
def test_precision_stays_positive(y, share, h_hat, beta2):
    """The module's update, in float64, for any estimate."""
    damping = share * y
    h = torch.tensor([y - damping], dtype=torch.float64)
    group = {"beta2": beta2, "weight_decay": damping}
    after = float(ivon.new_curvature(h, torch.tensor([h_hat], dtype=torch.float64), group)) + damping
    u = (1 - beta2) * (h_hat - float(h)) / y
    assert after == pytest.approx(y / 2 * (1 + (1 + u) ** 2), rel=1e-6, abs=1e-7 * y * (1 + u * u))
    assert after >= y / 2 * (1 - 1e-6) - 1e-9 * abs(u * y)


@pytest.mark.equation("eq-app-two-weights")
@given(st.floats(0.2, 9.0), st.floats(0.2, 9.0), st.floats(-0.97, 0.97))
def test_two_weights(a, b, share):
    A = np.array([[a, share * math.sqrt(a * b)], [share * math.sqrt(a * b), b]])
    covariance = np.linalg.inv(A)
    r2 = covariance[0, 1] ** 2 / (covariance[0, 0] * covariance[1, 1])
    assert A[0, 1] ** 2 / (A[0, 0] * A[1, 1]) == pytest.approx(r2, rel=1e-8, abs=1e-12)
    assert covariance[0, 0] == pytest.approx(1 / (A[0, 0] * (1 - r2)), rel=1e-8)
    given_the_other = covariance[0, 0] - covariance[0, 1] ** 2 / covariance[1, 1]
    assert given_the_other == pytest.approx(1 / A[0, 0], rel=1e-8)


# --- noise in the curvature


def tail_moments(a, number=5):
    pdf, moments = density(a - 1), [ndtr(a - 1)]
    moments.append(pdf + a * moments[0])
    for n in range(2, number):
        moments.append(pdf + a * moments[n - 1] + (n - 1) * moments[n - 2])
    return moments


@pytest.mark.equation("eq-app-tail-recursion")
@given(signals)
def test_tail_recursion(a):
    for n, moment in enumerate(tail_moments(a)):
        found = expectation(lambda z, n=n: (a + z) ** n if a + z > 1 else 0.0, [1 - a])
        assert moment == pytest.approx(found, rel=1e-8, abs=1e-10)


def projected_mean(a):
    return sum(m[2] - m[0] for m in (tail_moments(a), tail_moments(-a)))


def projected_square(a):
    kept = ndtr(a - 1) + ndtr(-a - 1)
    right = (2 + 4 * a + a**2 + a**3) * density(a - 1)
    left = (2 - 4 * a + a**2 - a**3) * density(a + 1)
    return (a**4 + 4 * a**2 + 2) * kept + right + left


@pytest.mark.equation("eq-app-projected-square")
@given(signals)
def test_projected_square(a):
    kinks = [-1 - a, 1 - a]
    assert projected_mean(a) == pytest.approx(expectation(lambda z: max((a + z) ** 2 - 1, 0.0), kinks), rel=1e-8)
    found = expectation(lambda z: max((a + z) ** 2 - 1, 0.0) ** 2, kinks)
    assert projected_square(a) == pytest.approx(found, rel=1e-8)


@pytest.mark.equation("eq-app-projected-square")
def test_projected_variance_of_the_module():
    """Quantiles of the noise through the module's estimator; and the two ends that the text names."""
    n, s, a = 200_000, 0.3, 0.8
    g = s * torch.from_numpy(a + stats.norm.ppf((np.arange(n) + 0.5) / n))
    estimate = curvature.noise_corrected(g, g, {}, {"scale": 1.0, "noise_std": s})
    expected = s**4 * (projected_square(a) - projected_mean(a) ** 2)
    assert float(estimate.var()) == pytest.approx(expected, rel=1e-3)
    assert math.sqrt(projected_square(0) - projected_mean(0) ** 2) == pytest.approx(1.17, abs=0.005)
    assert projected_square(9) - projected_mean(9) ** 2 == pytest.approx(4 * 81 + 2, rel=1e-6)


def weights_of(beta, t):
    """Weights of the module's bias-corrected average, read off unit impulses."""
    state, impulses = {}, torch.eye(t, dtype=torch.float64)
    for k in range(t):
        state["step"] = k + 1
        average = adaptive.momentum(state, impulses[k], {"beta1": beta})
    return average.numpy()


@pytest.mark.equation("eq-app-average-variance")
@settings(max_examples=15, deadline=None)
@given(decays, st.integers(1, 80))
def test_average_variance(beta, t):
    w = weights_of(beta, t)
    assert w.sum() == pytest.approx(1)
    formula = (1 - beta) / (1 + beta) * (1 + beta**t) / (1 - beta**t)
    assert (w**2).sum() == pytest.approx(formula, rel=1e-8)


@pytest.mark.equation("eq-app-average-correlated")
@pytest.mark.parametrize("beta", [0.5, 0.9, 0.95])
@pytest.mark.parametrize("rho", [-0.6, 0.0, 0.8])
def test_average_of_correlated_terms(beta, rho):
    t = np.arange(500)
    w = weights_of(beta, 500)
    variance = w @ rho ** np.abs(t[:, None] - t) @ w if rho else (w**2).sum()
    assert variance == pytest.approx((1 - beta) / (1 + beta) * (1 + beta * rho) / (1 - beta * rho), rel=1e-7)


@pytest.mark.equation("eq-app-late-floor")
@pytest.mark.parametrize(("beta2", "tolerance"), [(0.9, 0.05), (0.97, 0.03)])
def test_late_floor(beta2, tolerance):
    """The module's estimator on pure noise, many coordinates side by side, in units of N_ess s^2."""
    generator = torch.Generator().manual_seed(0)
    s, state, group = 0.2, {}, {"beta2": beta2, "scale": 1 / 0.2**2, "noise_std": 0.2}
    for t in range(round(8 / (1 - beta2))):
        state["step"] = t + 1
        g = s * torch.randn(20_000, generator=generator, dtype=torch.float64)
        found = curvature.average_then_project(g, g, state, group)
    assert float(found.mean()) == pytest.approx(math.sqrt((1 - beta2) / (math.pi * (1 + beta2))), rel=tolerance)


@pytest.mark.equation("eq-app-floor-width")
@settings(max_examples=10, deadline=None)
@given(st.floats(0.001, 1.0), st.floats(10.0, 1e5))
def test_floor_width(s, ess):
    """The width that the module's optimizer has at the floor that the module computes."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    floor = curvature.noise_floor({"scale": ess, "noise_std": s})
    damping = 1e-9 * floor
    optimizer = ivon.IVON([p], lr=1.0, ess=ess, hess_init=floor, weight_decay=damping)
    kappa = expectation(lambda z: max(z * z - 1, 0.0), [-1, 1])
    variance = float(optimizer.variance()[p])
    assert variance == pytest.approx(1 / (ess * (kappa * ess * s**2 + damping)), rel=1e-7)
    assert variance == pytest.approx(1 / (kappa * ess**2 * s**2), rel=1e-6)


def schedule(name, T):
    t = torch.arange(T, dtype=torch.float64)
    return torch.ones(T, dtype=torch.float64) if name == "constant" else (1 + torch.cos(math.pi * t / T)) / 2


def walk_factor(name, T):
    return T if name == "constant" else 3 * T / 8 + 1 / 2


def coefficients(name, T, beta1):
    """Of each step's noise in the mean after T steps of length 1, by autograd."""
    noise = torch.zeros(T, dtype=torch.float64, requires_grad=True)
    m, average = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for t, factor in enumerate(schedule(name, T)):
        average = beta1 * average + (1 - beta1) * noise[t]
        m = m - factor * average / (1 - beta1 ** (t + 1))
    return torch.autograd.grad(m, noise)[0]


@pytest.mark.equation("eq-app-walk")
@pytest.mark.parametrize("name", ["constant", "cosine"])
@pytest.mark.parametrize("T", [2, 3, 10, 97])
def test_walk(name, T):
    found = coefficients(name, T, beta1=0.0)
    assert float(found.square().sum()) == pytest.approx(walk_factor(name, T), rel=1e-9)
    assert -float(found.sum()) == pytest.approx(T if name == "constant" else (T + 1) / 2, rel=1e-9)


@pytest.mark.equation("eq-app-walk")
@pytest.mark.parametrize(("name", "more"), [("constant", 12), ("cosine", 17)])
def test_walk_with_momentum(name, more):
    """What a corrected start adds, and that it does not grow with T."""
    for T in (300, 600):
        found = coefficients(name, T, beta1=0.9)
        assert -float(found[0]) == pytest.approx(3.0, abs=0.05)
        assert float(found.square().sum()) - walk_factor(name, T) == pytest.approx(more, abs=0.8)
        assert float(found.sum()) == pytest.approx(-float(schedule(name, T).sum()), rel=1e-9)


def test_the_schedules_are_those_of_training():
    from dpivon.config import Config
    from dpivon.state import Run

    for name in ("cosine", "constant"):
        fake = type("Fake", (), {"config": Config(schedule=name), "steps": 7})()  # type: ignore[arg-type]
        factors = [Run.lr_factor(fake, t) for t in range(7)]  # type: ignore[arg-type]
        np.testing.assert_allclose(factors, schedule(name, 7), atol=1e-12)


@pytest.mark.equation("eq-app-walk-ratio")
@given(st.floats(0.01, 1.0), st.floats(10.0, 1e4), st.floats(0.01, 2.0), st.sampled_from(["constant", "cosine"]))
def test_walk_ratio(s, ess, alpha, name):
    """The quotient of noise and width, from their own formulas, with a damping that is small but there."""
    T, kappa = 60, 2 * density(1)
    floor = kappa * ess * s**2
    eta = alpha / floor
    noise = float((eta * schedule(name, T)).square().sum()) * s**2
    width = 1 / (ess * floor)
    assert noise / width == pytest.approx(kappa * walk_factor(name, T) * eta**2 * ess**2 * s**4, rel=1e-9)
    assert noise / width == pytest.approx(walk_factor(name, T) * alpha**2 / kappa, rel=1e-9)


def resting_covariance(alpha, h, s, n):
    """Of n iterates at rest, by the recursion for one long path that starts at zero."""
    rho = 1 - alpha * h
    start = round(40 / (alpha * h))
    response = -alpha * s * rho ** np.arange(start + n)  # of an iterate to the noises before it
    rows = np.array([np.concatenate([response[: start + k + 1][::-1], np.zeros(n - k - 1)]) for k in range(n)])
    return rows @ rows.T


def mean_variance(alpha, h, s, n):
    rho = 1 - alpha * h
    return s**2 / (h**2 * n) * (1 - 2 * rho * (1 - rho**n) / (n * (1 - rho**2)))


@pytest.mark.equation("eq-app-iterate-average")
@pytest.mark.parametrize(("alpha", "h", "s"), [(0.1, 0.5, 2.0), (0.3, 2.0, 0.7), (0.5, 3.0, 1.0)])
def test_iterate_average(alpha, h, s):
    covariance = resting_covariance(alpha, h, s, 48)
    for n in (1, 2, 7, 48):
        assert mean_variance(alpha, h, s, n) == pytest.approx(covariance[:n, :n].mean(), rel=1e-8)
    assert mean_variance(alpha, h, s, 1) == pytest.approx(alpha * s**2 / (2 * h - alpha * h**2), rel=1e-12)


@pytest.mark.equation("eq-app-batch-means")
@pytest.mark.parametrize(("alpha", "h", "B", "length"), [(0.1, 0.5, 8, 6), (0.3, 2.0, 4, 12), (0.02, 1.0, 3, 16)])
def test_batch_means(alpha, h, B, length):
    """The estimate is a quadratic form in the iterates: its exact mean is a trace."""
    covariance = resting_covariance(alpha, h, 1.3, B * length)
    means = np.kron(np.eye(B), np.full((1, length), 1 / length))
    deviations = (np.eye(B) - 1 / B) @ means
    exact = np.trace(deviations @ covariance @ deviations.T) / (B * (B - 1))
    block, whole = (mean_variance(alpha, h, 1.3, n) for n in (length, B * length))
    assert exact == pytest.approx((block - whole) / (B - 1), rel=1e-7)


@pytest.mark.equation("eq-app-batch-means")
def test_how_much_too_small_batch_means_are():
    alpha, h, B, length = 0.01, 1.0, 8, 4000
    block, whole = (mean_variance(alpha, h, 1.0, n) for n in (length, B * length))
    missing = 1 - (block - whole) / (B - 1) / whole
    assert missing == pytest.approx(1 / (alpha * h * length), rel=0.02)


@pytest.mark.equation("eq-app-batch-means")
def test_the_module_estimates_by_batch_means():
    """Many walks on a parabola side by side: the module's variance has the mean of the formula."""
    alpha, h, steps, walks = 0.2, 1.0, 512, 4000
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(walks, dtype=torch.float64))
    optimizer = iterates.average(adaptive.sgd([p], lr=alpha, beta1=0.0), steps)
    for _ in range(steps):
        p.grad = h * p.detach() + torch.randn(walks, generator=generator, dtype=torch.float64)
        optimizer.step()
    B, length = iterates.BLOCKS, steps // 2 // iterates.BLOCKS
    block, whole = (mean_variance(alpha, h, 1.0, n) for n in (length, B * length))
    found = float(optimizer.state[p]["average_variance"].mean())
    assert found == pytest.approx((block - whole) / (B - 1), rel=0.04)
    assert float(p.detach().var()) == pytest.approx(whole, rel=0.08)

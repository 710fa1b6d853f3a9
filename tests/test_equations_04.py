"""The equations of the chapter on adaptive private optimizers, each evaluated a second way in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from dpivon import adaptive, mechanism

chapter = definitions("book/04_adaptive_and_private.ipynb")

seeds = st.integers(0, 2**32 - 1)
decays = st.floats(0.0, 0.9999)
lengths = st.integers(1, 40)
scales = st.floats(0.01, 10.0)

NODES, HERMITE = np.polynomial.hermite_e.hermegauss(8)  # exact for polynomials up to degree 15
CHANCES = HERMITE / math.sqrt(2 * math.pi)


def history(seed: int, t: int, n: int = 5, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(t, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exponential(numbers: list[float], beta: float) -> float:
    """The bias-corrected exponential average by its recursion, without torch."""
    m = 0.0
    for number in numbers:
        m = beta * m + (1 - beta) * number
    return m / (1 - beta ** len(numbers))


def replayed(past: Tensor, start: Tensor, optimizer_of) -> Tensor:
    """The weights after the gradients in `past`, under a torch optimizer."""
    p = nn.Parameter(start.clone())
    optimizer = optimizer_of([p])
    for g in past:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


def mechanism_s(sigma: float, C: float, b: float, n: int) -> float:
    """s as the mechanism itself reports it."""
    optimizer = adaptive.sgd(nn.Linear(1, 1).parameters(), lr=1.0)
    dp = mechanism.mechanism(optimizer, noise_multiplier=sigma, max_grad_norm=C, batch_size=b, n=n)
    return mechanism.noise_std(dp)


def number_steps(past: list[float], theta: float, lr: float, kind: str, s: float, damping: float) -> float:
    """The DPAGD recursion for one weight, with each member's phi and psi written out."""
    for t in range(1, len(past) + 1):
        seen = past[:t]
        squares = [g * g for g in seen]
        phi = seen[-1] if kind == "rmsprop" else exponential(seen, 0.9)
        if kind == "sgd":
            psi = 1.0
        elif kind in ("adam", "rmsprop"):
            psi = math.sqrt(exponential(squares, 0.999)) + damping
        else:
            psi = math.sqrt(max(exponential(squares, 0.999) - s**2, damping**2))
        theta -= lr * phi / psi
    return theta


def members(s: float, damping: float):
    """Each member as the chapter's phi and psi, and as the module's optimizer."""
    return {
        "sgd": ("momentum", chapter["one"], lambda p: adaptive.sgd(p, lr=0.1)),
        "rmsprop": (
            "latest",
            lambda past: chapter["root"](past, damping=damping),
            lambda p: adaptive.rmsprop(p, lr=0.1, damping=damping),
        ),
        "adam": (
            "momentum",
            lambda past: chapter["root"](past, damping=damping),
            lambda p: adaptive.adam(p, lr=0.1, damping=damping),
        ),
        "adambc": (
            "momentum",
            lambda past: chapter["corrected_root"](past, noise_std=s, damping=damping),
            lambda p: adaptive.adambc(p, lr=0.1, damping=damping, noise_std=s),
        ),
    }


@pytest.mark.equation("eq-dpagd")
@pytest.mark.parametrize("kind", ["sgd", "rmsprop", "adam", "adambc"])
@settings(max_examples=15, deadline=None)
@given(seeds, st.integers(1, 15), st.floats(0.1, 2.0), st.floats(0.05, 1.0))
def test_dpagd(kind, seed, t, s, damping):
    past, start = history(seed, t), torch.ones(5, dtype=torch.float64)
    phi, psi, optimizer_of = members(s, damping)[kind]
    gradients = iter(past)
    ours = chapter["descend"](lambda theta: next(gradients), start, chapter[phi], psi, 0.1, t)
    expected = [number_steps(past[:, j].tolist(), 1.0, 0.1, kind, s, damping) for j in range(5)]
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(replayed(past, start, optimizer_of), ours)


@pytest.mark.equation("eq-dpagd")
def test_descend_takes_each_gradient_at_the_current_weights():
    seen = []

    def gradient(theta):
        seen.append(float(theta))
        return theta.clone()

    end = chapter["descend"](gradient, torch.ones((), dtype=torch.float64), lambda p: p[-1], chapter["one"], 0.5, 3)
    assert seen == [1.0, 0.5, 0.25]
    assert float(end) == 0.125


@pytest.mark.equation("eq-average-weights")
@given(seeds, lengths, decays)
def test_average_weights(seed, t, beta):
    weights = chapter["weights"](t, beta)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-9)
    past = history(seed, t)
    expected = [exponential(past[:, j].tolist(), beta) for j in range(5)]
    torch.testing.assert_close(
        chapter["average"](past, beta), torch.tensor(expected, dtype=torch.float64), rtol=1e-7, atol=1e-9
    )


@pytest.mark.equation("eq-torch-momentum")
@given(seeds, lengths, st.floats(0.0, 0.99), scales)
def test_torch_momentum(seed, t, beta1, alpha):
    """Each single step of torch's SGD at the translated rate is alpha times the average of the gradients so far."""
    past = history(seed, t)
    p = nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=beta1)
    for k, g in enumerate(past, start=1):
        before = p.detach().clone()
        optimizer.param_groups[0]["lr"] = alpha * (1 - beta1) / (1 - beta1**k)
        p.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(before - p.detach(), alpha * chapter["average"](past[:k], beta1))
    ours = replayed(past, torch.zeros(5, dtype=torch.float64), lambda q: adaptive.sgd(q, lr=alpha, beta1=beta1))
    torch.testing.assert_close(ours, p.detach())


@pytest.mark.equation("eq-noisy-second-moment")
@pytest.mark.parametrize(("sigma", "b", "beta2"), [(0.7, 1.5, 0.9), (2.0, 2.0, 0.5), (4.0, 0.5, 0.999)])
def test_noisy_second_moment(sigma, b, beta2):
    """Two steps, the second at weights that the first one moved: all batches, and the noise by quadrature."""
    x, C = np.array([0.3, -1.2, 2.0]), 0.8
    n, s = len(x), mechanism_s(sigma, C, b, 3)
    batches = [
        (np.array(drawn), math.prod(b / n if z else 1 - b / n for z in drawn))
        for drawn in itertools.product((0, 1), repeat=n)
    ]

    def clipped(theta):
        g = theta - x
        return g * np.minimum(1, C / np.abs(g))

    left = right = 0.0
    for first, chance_1 in batches:
        for z_1, w_1 in zip(NODES, CHANCES, strict=True):
            g_1 = first @ clipped(0.0) / b
            theta = -0.3 * (g_1 + s * z_1)
            for second, chance_2 in batches:
                g_2 = second @ clipped(theta) / b
                chance = chance_1 * w_1 * chance_2
                right += chance * exponential([g_1**2, g_2**2], beta2)
                for z_2, w_2 in zip(NODES, CHANCES, strict=True):
                    squares = torch.tensor([(g_1 + s * z_1) ** 2, (g_2 + s * z_2) ** 2], dtype=torch.float64)
                    left += chance * w_2 * float(chapter["average"](squares, beta2))
    assert left == pytest.approx(right + s**2, rel=1e-9)
    assert s == pytest.approx(sigma * C / b)


@pytest.mark.equation("eq-adam-is-sgd")
@settings(deadline=None)
@given(seeds, st.integers(2, 30), scales, st.floats(1e-8, 1.0))
def test_adam_is_sgd_where_all_squares_are_the_noise_s(seed, t, s, damping):
    """Gradients of size s and random sign: the second moment is exactly s^2, and the two methods are one."""
    past, start = s * history(seed, t).sign(), torch.zeros(5, dtype=torch.float64)
    adam = replayed(past, start, lambda p: adaptive.adam(p, lr=0.3, damping=damping))
    sgd = replayed(past, start, lambda p: adaptive.sgd(p, lr=0.3 / (s + damping)))
    torch.testing.assert_close(adam, sgd)
    psi = chapter["root"](past, damping=damping)
    torch.testing.assert_close(0.3 / psi, torch.full_like(psi, 0.3 / (s + damping)))


@pytest.mark.equation("eq-effective-terms")
@given(st.integers(1, 3000), st.floats(0.0, 0.9999))
def test_effective_terms(t, beta):
    raw = [(1 - beta) * beta ** (t - k) for k in range(1, t + 1)]
    total = math.fsum(raw)
    direct = math.fsum((w / total) ** 2 for w in raw)
    assert 1 / chapter["effective_terms"](t, beta) == pytest.approx(direct, rel=1e-6)
    assert 1 / chapter["effective_terms"](t, beta) == pytest.approx(
        (1 - beta) ** 2 / (1 - beta**t) ** 2 * (1 - beta ** (2 * t)) / (1 - beta**2), rel=1e-6
    )


@pytest.mark.equation("eq-adambc")
@given(seeds, lengths, scales, st.floats(0.001, 2.0), st.floats(0.5, 0.9999))
def test_adambc(seed, t, s, ratio, beta2):
    past, damping = history(seed, t, scale=1.2 * s), ratio * s
    expected = [
        math.sqrt(max(exponential([g * g for g in past[:, j].tolist()], beta2) - s * s, damping * damping))
        for j in range(5)
    ]
    found = chapter["corrected_root"](past, noise_std=s, damping=damping, beta2=beta2)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-9)
    state, group = {"step": 0}, {"beta2": beta2, "damping": damping, "noise_std": s}
    for g in past:
        state["step"] += 1
        theirs = adaptive.corrected_root(state, g, group)
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-9)


@pytest.mark.equation("eq-corrected-variance")
@given(st.floats(-3.0, 3.0), scales, st.integers(1, 200), st.floats(0.0, 0.999))
def test_corrected_variance(mu, s, t, beta2):
    squares = (mu + s * NODES) ** 2
    mean = CHANCES @ squares
    variance = CHANCES @ (squares - mean) ** 2
    assert mean - s**2 == pytest.approx(mu**2, abs=1e-9 * s**2)
    of_average = variance * float((chapter["weights"](t, beta2) ** 2).sum())
    formula = (4 * mu**2 * s**2 + 2 * s**4) / chapter["effective_terms"](t, beta2)
    assert of_average == pytest.approx(formula, rel=1e-6)


@pytest.mark.equation("eq-corrected-variance")
def test_the_module_s_second_moment_has_this_scatter():
    past = 0.3 + 0.7 * history(0, 60, n=40_000)
    state, group = {"step": 0}, {"beta2": 0.95}
    for g in past:
        state["step"] += 1
        v = adaptive.second_moment(state, g, group)
    corrected = v - 0.7**2
    assert float(corrected.mean()) == pytest.approx(0.3**2, abs=0.005)
    formula = (4 * 0.3**2 * 0.7**2 + 2 * 0.7**4) / chapter["effective_terms"](60, 0.95)
    assert float(corrected.var()) == pytest.approx(formula, rel=0.05)


@pytest.mark.equation("eq-noise-floor")
@given(scales, st.integers(1, 500), st.floats(0.0, 0.999))
def test_noise_floor(s, t, beta2):
    """Its square is the standard deviation of the corrected second moment on pure noise, by quadrature."""
    variance = CHANCES @ ((s * NODES) ** 2 - s**2) ** 2 * float((chapter["weights"](t, beta2) ** 2).sum())
    assert chapter["noise_floor"](s, t, beta2) ** 2 == pytest.approx(math.sqrt(variance), rel=1e-6)


@pytest.mark.equation("eq-quadratic-run")
@given(st.floats(0.01, 1.9), st.floats(0.01, 5.0), scales, st.floats(0.0, 5.0), st.integers(1, 60))
def test_quadratic_run(u, h, d, s, steps):
    """The last error written out as a sum over all noises, against the chapter's closed form."""
    p = u / h
    mean = (1 - u) ** steps * d
    variance = math.fsum((p * s * (1 - u) ** (steps - k)) ** 2 for k in range(1, steps + 1))
    assert chapter["quadratic_loss"](p, h, d, s, steps) == pytest.approx(h / 2 * (mean**2 + variance), rel=1e-6)


@pytest.mark.equation("eq-quadratic-run")
def test_the_module_s_steps_leave_this_loss():
    """SGD without momentum on 40,000 copies of one weight, with a denominator of 2."""
    h, d, s, steps = 0.5, 3.0, 0.8, 12
    p = nn.Parameter(torch.full((40_000,), d, dtype=torch.float64))
    optimizer = adaptive.Adaptive([p], 0.6, adaptive.gradient, lambda state, g, group: torch.full_like(g, 2.0))
    for noise in history(1, steps, n=40_000):
        p.grad = h * p.detach() + s * noise
        optimizer.step()
    left = float((h / 2 * p.detach() ** 2).mean())
    assert left == pytest.approx(chapter["quadratic_loss"](0.3, h, d, s, steps), rel=0.02)


@pytest.mark.equation("eq-noisy-step")
@pytest.mark.parametrize(("h", "d", "T"), [(1.0, 1.0, 100), (0.04, 5.0, 30), (2.0, 0.3, 400)])
@pytest.mark.parametrize("A", [0.01, 0.05])
def test_noisy_step(h, d, T, A):
    """The best step found by search, at a small total signal-to-noise ratio, and what it gains."""
    mu = h * d
    s = math.sqrt(T) * mu / A
    start, step = h / 2 * d**2, mu**2 / (h * s**2)
    assert step == pytest.approx(h * d**2 / s**2)
    found = minimize_scalar(
        lambda factor: chapter["quadratic_loss"](factor * step, h, d, s, T) / start,
        bounds=(0.2, 5.0),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert found.x == pytest.approx(1, abs=3 * A**2 + 1e-3)
    assert (1 - found.fun) / A**2 == pytest.approx(1, abs=3 * A**2 + 1e-3)

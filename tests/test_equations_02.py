"""Chapter 2's equations, each evaluated a second way in float64, against the chapter's own code."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from scipy.optimize import brentq
from torch import nn

from dpivon import adaptive, gradients

chapter = definitions("book/02_dp_sgd.ipynb")

seeds = st.integers(0, 2**32 - 1)
norms_of_clipping = st.floats(0.01, 10.0)
shares = st.floats(0.01, 0.49)


class Problem:
    """A two-layer network in float64 and its loss, both in torch and, independently, in NumPy."""

    def __init__(self, seed, n=5, inputs=4, hidden=3, classes=3):
        self.rng = np.random.default_rng(seed)
        self.layers = [(inputs, hidden), (hidden, classes)]
        self.theta = [a for i, o in self.layers for a in (self.rng.normal(size=(o, i)), self.rng.normal(size=o))]
        self.x, self.y = self.rng.normal(size=(n, inputs)), self.rng.integers(classes, size=n)
        self.model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes)).double()
        with torch.no_grad():
            for p, a in zip(self.model.parameters(), self.theta, strict=True):
                p.copy_(torch.from_numpy(a))
        self.loss = nn.functional.cross_entropy
        self.batch = torch.from_numpy(self.x), torch.from_numpy(self.y)

    def value(self, theta, i):
        """The loss of example i."""
        w1, b1, w2, b2 = theta
        logits = w2 @ np.tanh(w1 @ self.x[i] + b1) + b2
        return math.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[self.y[i]]

    def gradient(self, i, h=1e-6):
        """The gradient of example i in all parameters, one long vector, by central differences."""
        flat = np.concatenate([a.ravel() for a in self.theta])
        shapes, found = [a.shape for a in self.theta], np.empty_like(flat)
        for k in range(len(flat)):
            moved = []
            for sign in (1, -1):
                point = flat.copy()
                point[k] += sign * h
                parts = np.split(point, np.cumsum([math.prod(s) for s in shapes])[:-1])
                moved.append(self.value([a.reshape(s) for a, s in zip(parts, shapes, strict=True)], i))
            found[k] = (moved[0] - moved[1]) / (2 * h)
        return found


def flat(tensors):
    """Tensors of the shape of the parameters, as one long NumPy vector."""
    return np.concatenate([t.detach().numpy().ravel() for t in tensors])


@pytest.mark.equation("eq-outer-product")
@settings(max_examples=10)
@given(seeds)
def test_the_gradient_of_a_linear_layer_is_an_outer_product(seed):
    problem = Problem(seed)
    found = chapter["hook_gradients"](problem.model, problem.loss, *problem.batch)
    w1, b1, _, b2 = problem.theta
    for i, image in enumerate(problem.x):
        # A bias adds to its layer's output, so its derivative is delta.
        delta = problem.gradient(i)[w1.size : w1.size + b1.size]
        np.testing.assert_allclose(found[0][i], [[d * a for a in image] for d in delta], atol=1e-7)
        np.testing.assert_allclose(found[1][i], delta, atol=1e-7)
        hidden, last = np.tanh(w1 @ image + b1), problem.gradient(i)[-b2.size :]
        np.testing.assert_allclose(found[2][i], [[d * a for a in hidden] for d in last], atol=1e-7)


@pytest.mark.equation("eq-reconstruction")
@given(seeds)
def test_the_input_is_recovered_from_an_outer_product(seed):
    rng = np.random.default_rng(seed)
    delta, image = rng.normal(size=6), rng.normal(size=9)
    weights = np.outer(delta, image) + 0.1 * rng.normal(size=(6, 9))
    formula = sum(delta[j] * weights[j] for j in range(6)) / sum(d**2 for d in delta)
    code = chapter["reconstruct"](torch.from_numpy(weights), torch.from_numpy(delta))
    np.testing.assert_allclose(code, formula, rtol=1e-12)
    exact = chapter["reconstruct"](torch.from_numpy(np.outer(delta, image)), torch.from_numpy(delta))
    np.testing.assert_allclose(exact, image, rtol=1e-9, atol=1e-12)


@pytest.mark.equation("eq-clip")
@given(seeds, norms_of_clipping)
def test_clip_factors_are_the_formula_and_bound_the_norm(seed, C):
    rng = np.random.default_rng(seed)
    norms = [0.0, C, *(C * 10 ** rng.uniform(-3, 3, size=20))]
    formula = [min(1.0, C / (norm + 1e-6)) for norm in norms]
    for factors in (chapter["clip_factors"], gradients.clip_factors):
        np.testing.assert_allclose(factors(torch.tensor(norms, dtype=torch.float64), C), formula, rtol=1e-12)
    g = rng.normal(size=(20, 7)) * 10 ** rng.uniform(-3, 3, size=(20, 1))
    clipped = chapter["shorten"](torch.from_numpy(g), C).numpy()
    for before, after in zip(g, clipped, strict=True):
        assert np.linalg.norm(after) <= C
        if np.linalg.norm(before) < 0.99 * C - 1e-6:
            np.testing.assert_array_equal(after, before)
        np.testing.assert_allclose(after * np.linalg.norm(before), before * np.linalg.norm(after), rtol=1e-9)


@pytest.mark.equation("eq-sum-sensitivity")
@settings(max_examples=15)
@given(seeds, norms_of_clipping, st.floats(-3, 4))
def test_one_example_moves_the_clipped_sum_by_its_clipped_gradient(seed, C, power):
    problem = Problem(seed)
    problem.x[-1] *= 10**power
    x, y = problem.batch
    more = chapter["clipped_sum"](problem.model, problem.loss, x, y, C)
    less = chapter["clipped_sum"](problem.model, problem.loss, x[:-1], y[:-1], C)
    distance = np.linalg.norm(flat(more) - flat(less))
    alone = torch.autograd.grad(problem.loss(problem.model(x[-1:]), y[-1:]), list(problem.model.parameters()))
    norm = np.linalg.norm(flat(alone))
    assert distance == pytest.approx(norm * min(1, C / (norm + 1e-6)), rel=1e-7, abs=1e-12)
    assert distance <= C * (1 + 1e-12)


@pytest.mark.equation("eq-clipped-balance")
@settings(max_examples=25)
@given(shares, st.floats(0.5, 10.0), norms_of_clipping)
def test_clipped_gradients_of_two_groups_balance_where_the_formula_says(p, d, C):
    balance = chapter["clipped_balance"](p, d, C)
    force = lambda theta: (1 - p) * min(theta, C) - p * min(d - theta, C)  # noqa: E731
    assert balance == pytest.approx(brentq(force, 0, d, xtol=1e-13), abs=1e-9)


@pytest.mark.equation("eq-clipped-balance")
@pytest.mark.parametrize("C", [0.5, 3.0, 20.0])
def test_descent_stops_where_the_formula_says(C):
    people = torch.tensor([0.0] * 7 + [5.0] * 3, dtype=torch.float64)
    assert chapter["clipped_descent"](people, C) == pytest.approx(chapter["clipped_balance"](0.3, 5, C), abs=1e-4)


@pytest.mark.equation("eq-private-gradient")
@settings(max_examples=10)
@given(seeds, norms_of_clipping, st.floats(0.1, 5.0), st.floats(1.0, 100.0))
def test_the_private_gradient_is_clipped_summed_noised_and_divided_in_this_order(seed, C, sigma, b):
    problem = Problem(seed)
    settings = {"noise_multiplier": sigma, "max_grad_norm": C, "batch_size": b}
    code = chapter["private_gradient"](
        problem.model, problem.loss, *problem.batch, generator=torch.Generator().manual_seed(seed % 2**31), **settings
    )
    total = np.zeros(sum(a.size for a in problem.theta))
    for i in range(len(problem.y)):
        g = problem.gradient(i)
        total += g * min(1, C / (np.linalg.norm(g) + 1e-6))
    generator = torch.Generator().manual_seed(seed % 2**31)
    noise = flat([torch.normal(0.0, 1.0, a.shape, generator=generator) for a in problem.theta])
    np.testing.assert_allclose(flat(code), (total + sigma * C * noise) / b, atol=1e-5 * C * (1 + sigma) / b + 1e-6)


@pytest.mark.equation("eq-private-gradient")
@pytest.mark.parametrize(("sigma", "C", "b"), [(0.5, 4.0, 16.0), (8.0, 0.1, 512.0)])
def test_the_noise_of_an_empty_batch_has_the_stated_deviation(sigma, C, b):
    model = nn.Linear(400, 100)
    x, y = torch.zeros(0, 400), torch.zeros(0, dtype=torch.long)
    found = chapter["private_gradient"](
        model, nn.functional.cross_entropy, x, y, noise_multiplier=sigma, max_grad_norm=C, batch_size=b,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    noise = flat(found).astype(np.float64)
    assert noise.std() == pytest.approx(sigma * C / b, rel=5 / math.sqrt(2 * noise.size))
    assert abs(noise.mean()) < 5 * sigma * C / b / math.sqrt(noise.size)


@pytest.mark.equation("eq-poisson-size")
@settings(max_examples=5)
@given(st.integers(3, 40), st.floats(0.05, 0.95), st.integers(0, 1000))
def test_the_size_of_a_poisson_batch(n, q, seed):
    # The distribution of a sum of coins, coin by coin.
    p = np.array([1.0])
    for _ in range(n):
        p = np.convolve(p, [1 - q, q])
    k, b = np.arange(n + 1), q * n
    assert (p * k).sum() == pytest.approx(b)
    assert (p * (k - b) ** 2).sum() == pytest.approx(b * (1 - q))
    assert p[0] == pytest.approx((1 - q) ** n)
    assert p[0] <= math.exp(-b)

    draws = 3000
    batches = list(chapter["poisson_batches"](n, b, draws, torch.Generator().manual_seed(seed)))
    seen = np.bincount([len(batch) for batch in batches], minlength=n + 1) / draws
    assert (np.abs(seen - p) < 6 * np.sqrt(p * (1 - p) / draws) + 1 / draws).all()
    uses = np.bincount(torch.cat(batches), minlength=n) / draws
    assert (np.abs(uses - q) < 6 * math.sqrt(q * (1 - q) / draws)).all()


@pytest.mark.equation("eq-momentum")
@settings(max_examples=15)
@given(seeds, st.floats(0.0, 0.95), st.floats(0.01, 0.5))
def test_momentum_is_a_corrected_exponential_average(seed, beta1, lr):
    # A quadratic loss and every example in every batch: the gradient is theta - mean(x), known without autograd.
    rng = np.random.default_rng(seed)
    x, theta = rng.normal(size=(6, 1)), rng.normal(size=1)
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(theta[None]))
    ones, targets = torch.ones(6, 1, dtype=torch.float64), torch.from_numpy(x)
    loss = lambda output, target: ((output - target) ** 2 / 2).mean()  # noqa: E731
    chapter["sgd"](
        model,
        loss,
        ones,
        targets,
        batch_size=6,
        steps=7,
        lr=lr,
        beta1=beta1,
        generator=torch.Generator().manual_seed(0),
    )
    past = []
    for t in range(1, 8):
        past.append(theta - x.mean(0))
        weights = [(1 - beta1) * beta1 ** (t - k) for k in range(1, t + 1)]
        assert sum(weights) == pytest.approx(1 - beta1**t)
        theta = theta - lr * sum(w * g for w, g in zip(weights, past, strict=True)) / (1 - beta1**t)
    assert model.weight.item() == pytest.approx(theta.item(), rel=1e-9, abs=1e-12)


@pytest.mark.equation("eq-signal-to-noise")
@given(seeds, st.floats(0.1, 30.0), norms_of_clipping, st.floats(1.0, 5000.0))
def test_signal_to_noise_compares_typical_coordinates(seed, sigma, C, b):
    rng = np.random.default_rng(seed)
    parts = [rng.normal(size=(3, 4)), rng.normal(size=5)]
    typical = math.sqrt(np.mean(np.concatenate([a.ravel() for a in parts]) ** 2))
    code = chapter["signal_to_noise"]([torch.from_numpy(a) for a in parts], sigma, C, b)
    assert code == pytest.approx(typical / (sigma * C / b), rel=1e-9)


@pytest.mark.equation("eq-total-noise")
@pytest.mark.parametrize(
    ("n", "b", "steps", "sigma", "C", "lr"), [(50, 5, 16, 3.0, 0.5, 0.2), (20, 20, 9, 0.7, 2.0, 1.0)]
)
def test_the_noise_of_a_whole_run(n, b, steps, sigma, C, lr):
    # A loss without a gradient: the weights move by noise alone.
    model = nn.Linear(300, 100)
    before = flat(model.parameters())
    flatland = lambda output, target: 0.0 * output.sum()  # noqa: E731
    chapter["dp_sgd"](
        model, flatland, torch.ones(n, 300), torch.zeros(n), noise_multiplier=sigma, max_grad_norm=C, batch_size=b,
        steps=steps, lr=lr, beta1=0.0, generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    moved = flat(model.parameters()).astype(np.float64) - before
    formula = lr * math.sqrt(steps) * sigma * C / b
    assert moved.std() == pytest.approx(formula, rel=5 / math.sqrt(2 * moved.size))
    ratio = b / n * math.sqrt(steps) / sigma
    assert lr * steps / n * C / ratio == pytest.approx(formula)


@pytest.mark.equation("eq-momentum-noise")
@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
def test_momentum_averages_noise(beta1):
    # The weights of 400 past gradients, read off by sending unit gradients through the module's momentum.
    state = {}
    for t in range(1, 401):
        unit = torch.zeros(400, dtype=torch.float64)
        unit[t - 1] = 1
        state["step"] = t
        weights = adaptive.momentum(state, unit, {"beta1": beta1})
    assert float((weights**2).sum()) == pytest.approx((1 - beta1) / (1 + beta1), rel=1e-9)


@pytest.mark.equation("eq-ghost-norm")
@settings(max_examples=10)
@given(seeds)
def test_norms_without_gradients(seed):
    problem = Problem(seed)
    found = chapter["ghost_norms"](problem.model, problem.loss, *problem.batch)
    exact = [np.linalg.norm(problem.gradient(i)) for i in range(len(problem.y))]
    np.testing.assert_allclose(found.detach().numpy(), exact, rtol=1e-5, atol=1e-8)

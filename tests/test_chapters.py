"""What a chapter defines and what dpivon keeps are the same functions: same numbers from the same inputs and seeds."""

import ast
import difflib
import re
from typing import Any

import nbformat
import pytest
import torch
import torch.nn.functional as F
from notebook import ROOT, definitions
from torch import Tensor

from dpivon import (
    accounting,
    adaptive,
    assignment,
    audit,
    backprop,
    curvature,
    data,
    ensemble,
    gradients,
    iterates,
    ivon,
    langevin,
    laplace,
    mechanism,
    metrics,
    models,
    temperature,
)

# ---- Chapter 2: DP-SGD from scratch

SETTINGS = {"noise_multiplier": 0.8, "max_grad_norm": 0.5, "batch_size": 24}


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    return definitions("book/02_dp_sgd.ipynb")


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    images = data.digits()
    return images.x_train[:100], images.y_train[:100]


def mlp(seed: int = 3) -> torch.nn.Module:
    return models.build("mlp", (1, 8, 8), 10, seed=seed)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_equal(found: list[Tensor], expected: list[Tensor], atol: float = 1e-6) -> None:
    assert len(found) == len(expected)
    for a, c in zip(found, expected, strict=True):
        torch.testing.assert_close(a, c, atol=atol, rtol=1e-4)


@pytest.mark.parametrize("way", ["loop_gradients", "per_example_gradients", "hook_gradients"])
def test_chapter_2_per_example_gradients(two, digits, way):
    model, (x, y) = mlp(), digits
    expected, _ = gradients.per_example_gradients(model, F.cross_entropy, x[:20], y[:20])
    assert_equal(two[way](model, F.cross_entropy, x[:20], y[:20]), expected)


@pytest.mark.parametrize("way", ["loop_gradients", "per_example_gradients"])
def test_chapter_2_per_example_gradients_of_a_convolutional_network(two, way):
    model, x, y = models.build("lenet", (3, 32, 32), 10, seed=0), torch.rand(4, 3, 32, 32), torch.tensor([1, 0, 9, 9])
    expected, _ = gradients.per_example_gradients(model, F.cross_entropy, x, y)
    assert_equal(two[way](model, F.cross_entropy, x, y), expected)


def test_chapter_2_clip_factors(two):
    norms = torch.tensor([0.0, 1e-9, 0.49, 0.5, 0.51, 7.0, 1e9])
    torch.testing.assert_close(two["clip_factors"](norms, 0.5), gradients.clip_factors(norms, 0.5), rtol=0, atol=0)


@pytest.mark.parametrize("size", [0, 1, 37])
def test_chapter_2_clipped_sum(two, digits, size):
    model, (x, y) = mlp(), digits
    found = two["clipped_sum"](model, F.cross_entropy, x[:size], y[:size], 0.5)
    assert_equal(found, gradients.clipped_sum(model, F.cross_entropy, x[:size], y[:size], 0.5, chunk_size=8).sums)


def test_chapter_2_poisson_batches(two):
    ours = list(two["poisson_batches"](100, 7, 20, seeded()))
    theirs = list(mechanism.poisson_batches(100, 7, 20, seeded()))
    assert len(ours) == len(theirs) == 20
    assert all(torch.equal(a, c) for a, c in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("size", [0, 30])
def test_chapter_2_private_gradient(two, digits, size):
    model, (x, y) = mlp(), digits
    found = two["private_gradient"](model, F.cross_entropy, x[:size], y[:size], generator=seeded(), **SETTINGS)
    dp = mechanism.mechanism(adaptive.sgd(model.parameters(), lr=1.0), n=len(y), generator=seeded(), **SETTINGS)
    mechanism.private_gradient(model, F.cross_entropy, x[:size], y[:size], dp)
    assert_equal(found, [p.grad for p in model.parameters()])


def test_chapter_2_signal_to_noise_uses_the_module_s_noise(two, digits):
    model = mlp()
    dp = mechanism.mechanism(adaptive.sgd(model.parameters(), lr=1.0), n=100, **SETTINGS)
    g = [torch.ones_like(p) for p in model.parameters()]
    found = two["signal_to_noise"](g, SETTINGS["noise_multiplier"], SETTINGS["max_grad_norm"], SETTINGS["batch_size"])
    assert found == pytest.approx(1 / mechanism.noise_std(dp))


def test_chapter_2_sgd(two, digits):
    (x, y), ours, theirs = digits, mlp(), mlp()
    two["sgd"](ours, F.cross_entropy, x, y, batch_size=24, steps=6, lr=0.5, beta1=0.8, generator=seeded())
    optimizer = adaptive.sgd(theirs.parameters(), lr=0.5, beta1=0.8)
    for batch in mechanism.poisson_batches(len(y), 24, 6, seeded()):
        mechanism.plain_gradient(theirs, F.cross_entropy, x[batch], y[batch])
        optimizer.step()
    assert_equal(list(ours.parameters()), list(theirs.parameters()), atol=1e-5)


def test_chapter_2_dp_sgd(two, digits):
    (x, y), ours, theirs = digits, mlp(), mlp()
    two["dp_sgd"](ours, F.cross_entropy, x, y, steps=6, lr=0.5, beta1=0.8, generator=seeded(), **SETTINGS)
    optimizer, generator = adaptive.sgd(theirs.parameters(), lr=0.5, beta1=0.8), seeded()
    dp = mechanism.mechanism(optimizer, n=len(y), generator=generator, **SETTINGS)
    for batch in mechanism.poisson_batches(len(y), SETTINGS["batch_size"], 6, generator):
        mechanism.private_gradient(theirs, F.cross_entropy, x[batch], y[batch], dp)
        optimizer.step()
    assert_equal(list(ours.parameters()), list(theirs.parameters()), atol=1e-5)


@pytest.mark.parametrize("defaults", [{"beta1": 0.9}, {}])
def test_chapter_2_default_momentum_is_the_module_s(two, digits, defaults):
    (x, y), ours, theirs = digits, mlp(), mlp()
    two["dp_sgd"](ours, F.cross_entropy, x, y, steps=3, lr=0.5, generator=seeded(), **SETTINGS)
    two["dp_sgd"](theirs, F.cross_entropy, x, y, steps=3, lr=0.5, generator=seeded(), **SETTINGS, **defaults)
    assert_equal(list(ours.parameters()), list(theirs.parameters()), atol=0)
    assert adaptive.sgd(mlp().parameters(), lr=1.0).param_groups[0]["beta1"] == 0.9


def test_chapter_2_only_the_correct_step_has_the_sensitivity_it_claims(two):
    g = torch.randn(16, 650, generator=seeded()) + 0.3  # a shared direction, as real gradients have
    loud = 1e4 * torch.randn(20, 650, generator=seeded(6))
    C, b = 1.0, 16

    def ratio(name: str) -> float:
        return two["measured_sensitivity"](two[name], g, loud, C, b) * b / C

    assert ratio("correct") == pytest.approx(1, abs=1e-4)
    assert ratio("clip_after_averaging") > b
    assert ratio("clip_each_tensor") == pytest.approx(2**0.5, abs=1e-3)
    assert ratio("divide_by_drawn_size") > 1.02


# ---- Chapter 3: Counting the cost


@pytest.fixture(scope="module")
def three() -> dict[str, Any]:
    return definitions("book/03_counting_the_cost.ipynb")


@pytest.mark.parametrize(
    ("noise_multiplier", "sample_rate", "steps"), [(1.0, 0.01, 1000), (0.7, 0.05, 20), (3.0, 0.2, 500), (2.0, 1.0, 10)]
)
def test_chapter_3_epsilon(three, noise_multiplier, sample_rate, steps):
    ours = three["epsilon"](noise_multiplier, sample_rate, steps, 1e-5)
    module = accounting.epsilon(noise_multiplier, sample_rate, steps, 1e-5, accountant="rdp")
    assert module - 1e-9 <= ours <= 1.03 * module  # the module also tries orders between the whole numbers
    peer = accounting.new_accountant("rdp")
    peer.history = [(noise_multiplier, sample_rate, steps)]
    assert ours == pytest.approx(peer.get_epsilon(1e-5, alphas=three["ORDERS"].tolist()), rel=1e-9)


@pytest.mark.parametrize(("target", "sample_rate", "steps"), [(0.5, 0.02, 500), (3.0, 0.01, 1000), (8.0, 0.1, 100)])
def test_chapter_3_noise_for(three, target, sample_rate, steps):
    ours = three["noise_for"](target, sample_rate, steps, 1e-5)
    assert three["epsilon"](ours, sample_rate, steps, 1e-5) == pytest.approx(target, rel=1e-6)
    assert accounting.epsilon(ours, sample_rate, steps, 1e-5) <= target + 1e-9
    assert ours == pytest.approx(accounting.noise_for(target, sample_rate, steps, 1e-5), rel=0.02)


@pytest.mark.parametrize(("noise_multiplier", "sample_rate", "steps"), [(1.0, 0.01, 1000), (2.0, 0.1, 100)])
def test_chapter_3_numerical_composition(three, noise_multiplier, sample_rate, steps):
    """The chapter's bracket holds the truth as dp-accounting finds it, in both directions, and the module's PRV."""
    from dp_accounting.pld import privacy_loss_distribution

    run, grid = (noise_multiplier, sample_rate, steps, 1e-5), {"step": 2e-5, "size": 2**20}
    peers = [
        privacy_loss_distribution.from_gaussian_mechanism(
            noise_multiplier,
            sampling_prob=sample_rate,
            value_discretization_interval=2e-4,
            pessimistic_estimate=pessimistic,
        ).self_compose(steps)
        for pessimistic in (False, True)
    ]
    for name, part in (("epsilon_pld", "_pmf_remove"), ("epsilon_pld_add", "_pmf_add")):
        low, high = (getattr(peer, part).get_epsilon_for_delta(1e-5) for peer in peers)
        upper = three[name](*run, **grid)
        assert upper >= low - 1e-6, name
        assert upper - steps * grid["step"] <= high + 1e-6, name
    module = accounting.epsilon(*run, accountant="prv")
    upper = three["epsilon_pld"](*run, **grid)
    assert upper - steps * grid["step"] <= module <= upper + 0.02


@pytest.mark.parametrize("noise_multiplier", [0.8, 4.0])
def test_chapter_3_gaussian_epsilon(three, noise_multiplier):
    exact = three["gaussian_epsilon"](1 / noise_multiplier, 1e-5)
    one = definitions("book/01_what_privacy_promises.ipynb")
    assert exact == pytest.approx(one["epsilon_gaussian"](1 / noise_multiplier, 1e-5))
    assert exact <= three["epsilon_pld"](noise_multiplier, 1.0, 1, 1e-5, step=1e-5, size=2**21) <= exact + 1e-5


def test_chapter_3_attack_breaks_shuffling_and_not_poisson(three):
    """The bound that the largest sum proves, from simulated runs: above the Poisson price for shuffled batches only."""
    import numpy as np

    rng, runs, sigma, delta = np.random.default_rng(0), 100_000, 1.0, 1e-3
    hits, alarms = {}, {}
    for found, alice in ((hits, 1.0), (alarms, 0.0)):
        place, noise = rng.integers(100, size=runs), sigma * rng.normal(size=(runs, 100))
        drawn = rng.random((runs, 100)) < 0.01
        found["poisson"] = (noise + alice * drawn).max(1)
        noise[np.arange(runs), place] += 1 + alice
        found["shuffled"] = noise.max(1)
    price = three["epsilon_pld"](sigma, 0.01, 100, delta, step=1e-4, size=2**18)
    for sampler, threshold in (("poisson", 3.5), ("shuffled", 4.5)):
        hit, alarm = (np.array([np.mean(found[sampler] > threshold)]) for found in (hits, alarms))
        proved = three["attack_epsilon"](hit, alarm, delta)
        assert (proved > price + 0.5) == (sampler == "shuffled"), (sampler, proved, price)
    assert three["shuffled_epsilon"](sigma, 100, delta) > price


# ---- The noise-corrected curvature


@pytest.fixture(scope="module")
def nine() -> dict[str, Any]:
    return definitions("book/09_noise_corrected_curvature.ipynb")


def test_chapter_9_noise_corrected(nine):
    g = 0.3 * torch.randn(500, generator=seeded())
    group = {"scale": 1438.0, "noise_std": 0.3}
    assert_equal([nine["noise_corrected"](g, 0.3, 1438.0)], [curvature.noise_corrected(g, g, {}, group)])


def test_chapter_9_new_curvature(nine):
    h, h_hat = (torch.randn(500, generator=seeded(seed)).square() for seed in (1, 2))
    found = nine["new_curvature"](h, h_hat, 0.9, 0.01)
    assert_equal([found], [ivon.new_curvature(h, h_hat, {"beta2": 0.9, "weight_decay": 0.01})])


def test_chapter_9_average_then_project(nine):
    squares, state = 0.09 * torch.randn(30, 200, generator=seeded()).square(), {"step": 0}
    for square in squares:
        state["step"] += 1
        group = {"scale": 1438.0, "noise_std": 0.3, "beta2": 0.95}
        theirs = curvature.average_then_project(square.sqrt(), square, state, group)
    assert_equal([nine["average_then_project"](squares, 0.3, 1438.0, 0.95)], [theirs], atol=1e-4)


def test_chapter_9_the_estimator_settles_where_the_chapter_says(nine):
    """The module's own optimizer, fed with noise alone, against the chapter's floor and its lower bound."""
    p = torch.nn.Parameter(torch.zeros(20_000))
    optimizer = ivon.IVON([p], lr=1e-6, ess=1000, hess_init=1.0, beta2=0.97, weight_decay=0.0, noise_std=0.05)
    generator, means = seeded(), []
    for _ in range(400):
        with optimizer.sampled_params():
            p.grad = 0.05 * torch.randn(p.shape, generator=generator)
        optimizer.step()
        means.append(float(optimizer.state[p]["h"].mean()))
    at_least = 1000 * 0.05**2 * nine["settled"](0.97)
    assert nine["floor"](0.05, 1000) < at_least * 0.95
    assert at_least * 0.99 < sum(means[-200:]) / 200 < at_least * 1.03


# ---- IVON


@pytest.fixture(scope="module")
def seven() -> dict[str, Any]:
    return definitions("book/07_ivon.ipynb")


def test_chapter_7_estimate_and_curvature(seven):
    g, deviation, h = torch.randn(3, 50, generator=seeded(), dtype=torch.float64)
    h = h.abs()
    group = {"ess": 300.0, "weight_decay": 1e-2, "beta2": 0.9}
    h_hat = curvature.price(g, deviation, {"h": h}, group)
    torch.testing.assert_close(seven["price"](g, deviation, h, 300.0, 1e-2), h_hat)
    torch.testing.assert_close(seven["new_curvature"](h, h_hat, 0.9, 1e-2), ivon.new_curvature(h, h_hat, group))


@pytest.mark.parametrize("changed", [{}, {"beta1": 0.5, "beta2": 0.9}, {"hess_init": 2.0, "weight_decay": 0.1}])
def test_chapter_7_ivon_takes_the_module_s_steps(seven, digits, changed):
    x, y = digits[0].double(), digits[1]
    model, settings = mlp().double(), {"lr": 0.3, "ess": 100, "hess_init": 0.5, "weight_decay": 1e-3, **changed}
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    shapes = [(name, p.shape, p.numel()) for name, p in model.named_parameters()]

    def gradient(theta: Tensor) -> Tensor:
        theta = theta.detach().requires_grad_()
        parts = theta.split([size for *_, size in shapes])
        parameters = {name: part.view(shape) for (name, shape, _), part in zip(shapes, parts, strict=True)}
        loss = F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)
        return torch.autograd.grad(loss, theta)[0]

    mean, h = seven["ivon"](gradient, start, steps=30, generator=seeded(), **settings)
    optimizer = ivon.IVON(model.parameters(), curvature="price", generator=seeded(), **settings)
    for _ in range(30):
        with optimizer.sampled_params():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(mean, torch.cat([p.detach().flatten() for p in model.parameters()]), atol=1e-10, rtol=0)
    torch.testing.assert_close(h, torch.cat([optimizer.state[p]["h"].flatten() for p in model.parameters()]))
    assert (mean - start).abs().max() > 0.1


# ---- Adaptive and private


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    return definitions("book/04_adaptive_and_private.ipynb")


@pytest.fixture(scope="module")
def past() -> Tensor:
    return 0.4 * torch.randn(25, 300, generator=seeded())


def streamed(function: Any, past: Tensor, **group: float) -> Tensor:
    """The module's function, which keeps a state, after all gradients in `past`."""
    state: dict[str, Any] = {"step": 0}
    for g in past:
        state["step"] += 1
        found = function(state, g, group)
    return found


def test_chapter_4_phi_and_psi_are_the_module_s(four, past):
    pairs = [
        (four["latest"](past), streamed(adaptive.gradient, past)),
        (four["momentum"](past, 0.8), streamed(adaptive.momentum, past, beta1=0.8)),
        (four["one"](past), streamed(adaptive.one, past)),
        (four["root"](past, 0.95, 0.1), streamed(adaptive.root, past, beta2=0.95, damping=0.1)),
        (
            four["corrected_root"](past, noise_std=0.3, damping=0.1, beta2=0.95),
            streamed(adaptive.corrected_root, past, beta2=0.95, damping=0.1, noise_std=0.3),
        ),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_chapter_4_curvature(four, past):
    ours = four["curvature"](past, noise_std=0.3, ess=100.0, hess_init=0.5, beta2=0.9, damping=0.01)
    group = {"beta2": 0.9, "noise_std": 0.3, "ess": 100.0, "scale": 100.0, "hess_init": 0.5, "weight_decay": 0.01}
    torch.testing.assert_close(ours, streamed(adaptive.ivon_curvature, past, **group), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("psi", "optimizer"),
    [("one", adaptive.sgd), ("root", adaptive.adam)],
)
def test_chapter_4_defaults_are_the_module_s(four, past, psi, optimizer):
    p, gradients_left = torch.nn.Parameter(torch.ones(300)), iter(past)
    stepper = optimizer([p], lr=0.02)
    for g in past:
        p.grad = g.clone()
        stepper.step()
    ours = four["descend"](lambda _: next(gradients_left), torch.ones(300), four["momentum"], four[psi], 0.02, 25)
    assert_equal([ours], [p.detach()], atol=1e-5)


@pytest.mark.parametrize("size", [0, 40])
def test_chapter_4_clipped_sum(four, digits, size):
    x, y = digits
    X = torch.cat([x.flatten(1), torch.ones(len(x), 1)], dim=1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    W = torch.cat([model[1].weight, model[1].bias[:, None]], dim=1).detach()
    sums = gradients.clipped_sum(model, F.cross_entropy, x[:size], y[:size], 0.7).sums
    expected = torch.cat([sums[0], sums[1][:, None]], dim=1)
    assert_equal([four["clipped_sum"](W, X[:size], y[:size], 0.7)], [expected], atol=1e-5)
    two_runs = four["clipped_sum"](torch.stack([W, 0 * W]), X[:size], y[:size], 0.7)
    assert_equal([two_runs[0]], [expected], atol=1e-5)


def test_chapter_4_private_gradients(four, digits):
    """The same batches as the module draws, and noise of the size that the mechanism reports."""
    x, y = digits
    X = torch.cat([x.flatten(1), torch.ones(len(x), 1)], dim=1)
    W = torch.zeros(10, 65)
    dp = mechanism.mechanism(adaptive.sgd(mlp().parameters(), lr=1.0), n=len(y), **SETTINGS)
    gradient = four["private_gradients"](X, y, generator=seeded(), **SETTINGS)
    (B,) = mechanism.poisson_batches(len(y), SETTINGS["batch_size"], 1, seeded())
    noise = gradient(W) - four["clipped_sum"](W, X[B], y[B], SETTINGS["max_grad_norm"]) / SETTINGS["batch_size"]
    assert float(noise.std()) == pytest.approx(mechanism.noise_std(dp), rel=0.1)
    silent = four["private_gradients"](X, y, generator=seeded(), **{**SETTINGS, "noise_multiplier": 0.0})
    expected = gradients.clipped_sum(
        torch.nn.Sequential(torch.nn.Flatten(), zero_linear()), F.cross_entropy, x[B], y[B], SETTINGS["max_grad_norm"]
    ).sums
    expected = torch.cat([expected[0], expected[1][:, None]], dim=1) / SETTINGS["batch_size"]
    assert_equal([silent(W)], [expected], atol=1e-6)


def zero_linear() -> torch.nn.Linear:
    layer = torch.nn.Linear(64, 10)
    torch.nn.init.zeros_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return layer


# ---- Two noises


@pytest.fixture(scope="module")
def eight() -> dict[str, Any]:
    return definitions("book/08_two_noises.ipynb")


def test_chapter_8_estimate_and_curvature(eight):
    g, deviation, h = torch.randn(3, 50, generator=seeded(), dtype=torch.float64)
    h = h.abs()
    group = {"ess": 300.0, "weight_decay": 1e-2, "beta2": 0.9}
    h_hat = curvature.price(g, deviation, {"h": h}, group)
    torch.testing.assert_close(eight["price"](g, deviation, h, 300.0, 1e-2), h_hat)
    torch.testing.assert_close(eight["new_curvature"](h, h_hat, 0.9, 1e-2), ivon.new_curvature(h, h_hat, group))


@pytest.mark.parametrize("changed", [{}, {"beta1": 0.5, "beta2": 0.9}, {"hess_init": 2.0, "weight_decay": 0.1}])
def test_chapter_8_dp_ivon_price_takes_the_module_s_steps(eight, digits, changed):
    """One weight matrix, so that both draw their noise in one piece; the batch is everybody."""
    x, y = digits[0].double(), digits[1]
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10, bias=False)).double()
    torch.nn.init.normal_(model[1].weight, std=0.1, generator=seeded(1))
    start, sigma, C, b = model[1].weight.detach().clone(), 1.5, 0.5, 100
    settings = {"lr": 0.3, "ess": 100, "hess_init": 0.5, "weight_decay": 1e-3, **changed}

    def clipped_sum(weights: Tensor) -> Tensor:
        with torch.no_grad():
            at, model[1].weight.data = model[1].weight.data, weights
        sums = gradients.clipped_sum(model, F.cross_entropy, x, y, C).sums
        model[1].weight.data = at
        return sums[0]

    privacy = {"sigma": sigma, "C": C, "b": b, "draws": seeded(2), "noise": seeded(3)}
    mean, h = eight["dp_ivon_price"](clipped_sum, start, steps=20, **settings, **privacy)
    optimizer = ivon.IVON(model.parameters(), curvature="price", generator=seeded(2), **settings)
    dp = mechanism.mechanism(optimizer, noise_multiplier=sigma, max_grad_norm=C, batch_size=b, n=b, generator=seeded(3))
    for _ in range(20):
        with optimizer.sampled_params():
            mechanism.private_gradient(model, F.cross_entropy, x, y, dp)
        optimizer.step()
    torch.testing.assert_close(mean, model[1].weight.detach(), atol=1e-9, rtol=0)
    torch.testing.assert_close(h, optimizer.state[model[1].weight]["h"])
    assert (mean - start).abs().max() > 0.05


@pytest.mark.parametrize(("kind", "reacts"), [("Reads", True), ("Keeps", False)])
def test_chapter_8_only_the_mutant_ignores_the_noise(eight, digits, kind, reacts):
    """A wrapper in Opacus' order: the raw gradient in the context, the private one before the step."""

    def trained(noise: float) -> Tensor:
        model = mlp()
        optimizer = eight[kind](model.parameters(), lr=0.5)
        generator = seeded()
        for _ in range(3):
            with optimizer.sampled_params():
                optimizer.zero_grad()
                F.cross_entropy(model(digits[0]), digits[1]).backward()
            for p in model.parameters():
                p.grad = p.grad + noise * torch.randn(p.shape, generator=generator)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert (not torch.equal(trained(0.0), trained(1.0))) == reacts


def test_chapter_8_the_estimator_settles_where_the_chapter_says(eight):
    """The module's own optimizer, fed with noise alone: the mean path from its start, and the spread at rest."""
    p = torch.nn.Parameter(torch.zeros(20_000))
    settings = {"ess": 1000, "hess_init": 0.5, "beta2": 0.97, "weight_decay": 1e-6}
    optimizer = ivon.IVON([p], lr=1e-6, curvature="price", generator=seeded(1), **settings)
    generator, means = seeded(), []
    for _ in range(300):
        with optimizer.sampled_params():
            p.grad = 0.05 * torch.randn(p.shape, generator=generator)
        optimizer.step()
        means.append(float(optimizer.state[p]["h"].mean()))
    for t in (10, 50, 100, 300):
        assert means[t - 1] == pytest.approx(eight["mean_path"](t, 0.5, 0.05, 1000, 0.97), rel=0.06)
    law = eight["settled"](1e-6, 0.05, 1000, 0.97)
    for level in (0.25, 0.5, 0.75, 0.9):
        assert float(optimizer.state[p]["h"].quantile(level)) == pytest.approx(law.ppf(level), rel=0.08)


# ---- DP-IVON-Gradsq

TEN = "book/10_dp_ivon_gradsq.ipynb"
PRIVATE = {"sigma": 0.8, "C": 0.5}
BAYES = {"ess": 100.0, "h0": 0.5, "beta2": 0.9, "damping": 1e-3}
RUNGS: dict[str, dict[str, float]] = {
    "sgd": {}, "dp_sgd": PRIVATE, "ivon": BAYES, "dp_ivon_gradsq": PRIVATE | BAYES, "dp_ivon_price": PRIVATE | BAYES,
    "dp_adam": PRIVATE | {"beta2": 0.95, "damping": 1e-6},
}  # fmt: skip


@pytest.fixture(scope="module")
def ten() -> dict[str, Any]:
    return definitions(TEN)


def module_optimizer(rung: str, model: torch.nn.Module, draws: torch.Generator) -> Any:
    """The optimizer that dpivon keeps for this rung of the ladder."""
    if rung in ("sgd", "dp_sgd"):
        return adaptive.sgd(model.parameters(), lr=0.1, beta1=0.8)
    if rung == "dp_adam":
        return adaptive.adam(model.parameters(), lr=0.1, beta1=0.8, beta2=0.95, damping=1e-6)
    settings = {"ess": 100.0, "hess_init": 0.5, "beta2": 0.9, "weight_decay": 1e-3}
    curve = "noise-corrected" if rung == "dp_ivon_gradsq" else "price"
    parameters = model.parameters()
    return ivon.IVON(parameters, 0.1, curvature=curve, beta1=0.8, rescale_lr=False, generator=draws, **settings)


@pytest.mark.parametrize("rung", RUNGS)
def test_chapter_10_a_rung_takes_the_module_s_steps(ten, digits, rung):
    x, y = digits[0].double(), digits[1]
    ours, theirs, T, b = mlp().double(), mlp().double(), 25, 24
    found = ten[rung](ours, F.cross_entropy, x, y, b=b, T=T, alpha=0.1, beta1=0.8, seed=4, **RUNGS[rung])
    batches, draws, noise = ten["streams"](4)
    optimizer = module_optimizer(rung, theirs, draws)
    private = "sigma" in RUNGS[rung]
    settings = {"noise_multiplier": 0.8, "max_grad_norm": 0.5, "batch_size": b, "n": len(y)}
    dp = mechanism.mechanism(optimizer, generator=noise, **settings)
    for B in mechanism.poisson_batches(len(y), b, T, batches):
        with optimizer.sampled_params():
            if private:
                mechanism.private_gradient(theirs, F.cross_entropy, x[B], y[B], dp)
            else:
                mechanism.plain_gradient(theirs, F.cross_entropy, x[B], y[B])
        optimizer.step()
    mean = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    if "h0" in RUNGS[rung]:
        found, h = found
        torch.testing.assert_close(h, torch.cat([optimizer.state[p]["h"].flatten() for p in theirs.parameters()]))
    torch.testing.assert_close(found, mean, atol=1e-8, rtol=0)
    assert (mean - ten["weights"](ours)).abs().max() > 0.02  # the chapter's functions leave the network as it was


def test_chapter_10_the_diffs_are_those_of_the_code():
    """Each stored diff, computed again from the stored cells; and the three steps are as few as the text says."""
    cells = [cell for cell in nbformat.read(ROOT / TEN, as_version=4).cells if cell.cell_type == "code"]
    sources: dict[str, list[str]] = {}
    for cell in cells:
        if "definition" in cell.metadata.get("tags", []):
            for node in ast.parse(cell.source).body:
                if isinstance(node, ast.FunctionDef):
                    lines = cell.source.splitlines()[node.lineno - 1 : node.end_lineno]
                    assert node.name not in sources, f"{node.name} is defined twice"
                    sources[node.name] = lines
    shown = {}
    for cell in cells:
        pairs = re.findall(r"^show\((\w+), (\w+)\)$", cell.source, re.MULTILINE)
        assert bool(pairs) == ("ladder" in cell.metadata.get("tags", []))
        texts = [output.data["text/markdown"] for output in cell.outputs if pairs]
        shown.update(zip(pairs, texts, strict=True))
    ladder = {("sgd", "dp_sgd"), ("sgd", "ivon"), ("ivon", "dp_ivon_gradsq"), ("dp_sgd", "dp_ivon_gradsq")}
    assert ladder < shown.keys()
    for (old, new), text in shown.items():
        diff = "\n".join(difflib.unified_diff(sources[old], sources[new], old, new, n=0, lineterm=""))
        assert text == f"```diff\n{diff}\n```", (old, new)
        if (old, new) in ladder:
            assert len([line for line in diff.split("\n")[2:] if line[0] == "+"]) <= 9
    for rung in ("sgd", "dp_sgd", "ivon", "dp_ivon_gradsq"):
        assert len(sources[rung]) <= 18


def test_chapter_10_replay_needs_no_data_and_finds_a_leak(ten, digits):
    """The module's own run is a function of its private gradients; one with a setting from the batch is not."""
    x, y = digits[0].double(), digits[1]
    settings = {"lr": 0.5, "ess": 100.0, "hess_init": 0.4, "beta2": 0.9, "curvature": "noise-corrected"}

    def run(leaks: bool) -> tuple[bool, bool]:
        model, released = mlp().double(), []
        batches, draws, noise = ten["streams"](2)
        optimizer = ivon.IVON(model.parameters(), generator=draws, **settings)
        dp = mechanism.mechanism(
            optimizer, noise_multiplier=2.0, max_grad_norm=1.0, batch_size=24, n=100, generator=noise
        )
        for B in mechanism.poisson_batches(100, 24, 6, batches):
            if leaks:
                optimizer.param_groups[0]["ess"] = float(len(B))
            with optimizer.sampled_params():
                mechanism.private_gradient(model, F.cross_entropy, x[B], y[B], dp)
            released.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()
        std = mechanism.noise_std(dp)
        mean, variance = ten["replay"](mlp().double(), released, ten["streams"](2)[1], noise_std=std, **settings)
        return torch.equal(mean, ten["weights"](model)), torch.equal(variance, ten["variance_of"](optimizer))

    assert run(leaks=False) == (True, True)
    assert run(leaks=True) == (True, False)


def test_chapter_10_curvature(ten):
    g, h = 0.3 * torch.randn(300, generator=seeded()), torch.rand(300, generator=seeded())
    group = {"scale": 1438.0, "noise_std": 0.3, "beta2": 0.9, "weight_decay": 0.01}
    h_hat = ten["noise_corrected"](g, 0.3, 1438.0)
    assert_equal([h_hat], [curvature.noise_corrected(g, g, {}, group)])
    assert_equal([ten["new_curvature"](h, h_hat, 0.9, 0.01)], [ivon.new_curvature(h, h_hat, group)], atol=1e-3)


def test_chapter_10_clipping_is_the_module_s(ten):
    each = 3 * torch.randn(40, 60, generator=seeded(), dtype=torch.float64)
    expected = each * gradients.clip_factors(each.norm(dim=1), 20.0)[:, None]
    torch.testing.assert_close(ten["clip"](each, 20.0), expected)
    assert (ten["clip"](each, 20.0).norm(dim=1) <= 20.0).all()


def test_chapter_10_floor_is_chapter_9_s(ten, nine):
    assert ten["floor"](0.03, 1438.0) == pytest.approx(nine["floor"](0.03, 1438.0))


def test_chapter_10_referral(ten):
    """Ten patients, three errors, two of them the most doubtful."""
    p = torch.tensor([0.51, 0.49, 0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.98])
    y = torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 0, 0])
    found = ten["referral_curve"](p, y, ten["entropy"](p), (0.0, 0.1, 0.2, 0.5))
    assert found == pytest.approx([3 / 10, 2 / 9, 1 / 8, 1 / 5])
    assert ten["standard_error"](0.2, 100) == pytest.approx(0.04)


# ---- Attack your own model


@pytest.fixture(scope="module")
def twelve() -> dict[str, Any]:
    return definitions("book/12_attack_your_own_model.ipynb")


@pytest.fixture(scope="module")
def attacked() -> tuple[Tensor, Tensor]:
    coins = audit.coins(1000, 0)
    return torch.randn(1000, generator=seeded()) + 1.3 * coins, coins


def test_chapter_12_bounds_from_rates(twelve, attacked):
    scores, coins = attacked
    for errors, trials in ((0, 7), (3, 90), (90, 90)):
        assert twelve["upper"](errors, trials, 0.03) == pytest.approx(audit.upper(errors, trials, 0.03))
    for threshold in (-1.0, 0.65, 2.5):
        found = twelve["error_rates"](scores, coins, threshold, 0.05)
        assert found == pytest.approx(audit.error_rates(scores, coins, threshold, 0.05))
        for name in ("rates_bound", "gaussian_bound"):
            found = twelve[name](scores, coins, 1e-5, threshold)
            expected = getattr(audit, name)(scores, coins, 1e-5, threshold=threshold)
            assert found == pytest.approx(expected, abs=1e-6), (name, threshold)
    assert twelve["gaussian_bound"](scores, coins, 1e-5, 0.65) > 1


@pytest.mark.parametrize("mu", [0.0, 0.01, 0.5, 2.0, 6.0])
def test_chapter_12_epsilon_of_mu(twelve, mu):
    assert twelve["epsilon_of_mu"](mu, 1e-5) == pytest.approx(audit.epsilon_of_mu(mu, 1e-5), abs=1e-6)


def test_chapter_12_one_run(twelve, attacked):
    scores, coins = attacked
    for delta in (0.0, 1e-5, 1e-2):
        arguments = (delta, 1000, 200, 190, 0.05)
        assert twelve["one_run_epsilon"](*arguments) == pytest.approx(audit.one_run_epsilon(*arguments), abs=1e-8)
        found = twelve["one_run_bound"](scores, coins, delta, [20, 100, 332, 1000])
        assert found == pytest.approx(audit.one_run_bound(scores, coins, delta), abs=1e-8)


def test_chapter_12_canaries(twelve, digits):
    """Same network, same loss, same gradients of the canaries' weights, planted as the module plants them."""
    coins = audit.coins(6, 1)
    images = audit.plant(data.digits(), coins)
    x, y = images.x_train[-12:], images.y_train[-12:]
    ours, theirs = twelve["WithCanaries"](mlp(), 6), audit.WithCanaries(mlp(), 6)
    with torch.no_grad():
        ours.canary += 0.1
        theirs.canary += 0.1
    found, expected = twelve["canary_loss"](ours(x), y), audit.canary_loss(theirs(x), y)
    torch.testing.assert_close(found, expected)
    parts = [torch.autograd.grad(loss, list(model.parameters())) for loss, model in ((found, ours), (expected, theirs))]
    assert_equal(list(parts[0]), list(parts[1]))
    assert int((parts[0][0] != 0).sum()) == int(coins.sum())


def test_chapter_12_roc(twelve, attacked):
    from sklearn.metrics import roc_auc_score, roc_curve

    scores, coins = attacked
    assert twelve["auc"](scores, coins) == pytest.approx(roc_auc_score(coins, scores))
    alarms, hits, _ = roc_curve(coins, scores, drop_intermediate=False)
    for rate in (0.0, 0.01, 0.3, 1.0):
        assert twelve["hits_at"](rate, scores, coins) == pytest.approx(hits[alarms <= rate].max())


def test_chapter_12_floats_betray_their_sum(twelve):
    """The search near the inverse misses no way to an output: against all 2^24 uniform numbers."""
    import numpy as np

    rng, k = np.random.default_rng(0), np.arange(1, 2**24 + 1)
    noise = twelve["laplace_noise"](k)
    picks = rng.integers(1, 2**24 + 1, 2000)
    y = np.float32(1) + np.where(rng.random(2000) < 0.5, 1, -1).astype(np.float32) * noise[picks - 1]
    for secret in (0, 1):
        reachable = np.concatenate([np.float32(secret) + noise, np.float32(secret) - noise])
        np.testing.assert_array_equal(twelve["could_be"](y, secret), np.isin(y, reachable))


# ---- Bayes by gradient


@pytest.fixture(scope="module")
def five() -> dict[str, Any]:
    return definitions("book/05_bayes_by_gradient.ipynb")


class FlatNetwork(torch.nn.Module):
    """The chapter's network, with all its weights in one parameter."""

    def __init__(self, network: Any, theta: Tensor) -> None:
        super().__init__()
        self.network, self.theta = network, torch.nn.Parameter(theta.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.network(self.theta, x.flatten(1))


def flat_start() -> Tensor:
    return torch.cat([p.detach().flatten() for p in mlp().parameters()]).double()


def test_chapter_5_each_gradient(five, digits):
    x, y = digits
    each, _ = gradients.per_example_gradients(mlp(), F.cross_entropy, x[:20], y[:20])
    expected = torch.cat([g.flatten(1) for g in each], dim=1)
    found = five["each_gradient"](flat_start().float(), x[:20].flatten(1), y[:20])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("way", ["mapped", "joint"])
def test_chapter_5_takes_the_module_s_steps(five, digits, way):
    """The same batches, noise and draws: the same means and widths after twenty private steps."""
    (x, y), steps, C, b, sigma_p = (digits[0].double(), digits[1]), 20, 0.7, 24, 0.8
    settings = {"ess": 90.0, "prior_scale": 0.5, "beta1": 0.8}
    inputs, draws, batches = (x.flatten(1), y), seeded(1), seeded(2)
    if way == "mapped":
        gradient = five["private_gradients"](five["each_gradient"], *inputs, sigma_p, C, b, batches, seeded(3))
        ours = five["bayes_by_backprop"](
            gradient, flat_start(), [0.5] * steps, sigma_init=0.1, generator=draws, **settings
        )
        model: torch.nn.Module = FlatNetwork(five["network"], flat_start())
        optimizer: Any = backprop.BayesByBackprop(
            model.parameters(), lr=0.5, sigma_init=0.1, generator=seeded(1), **settings
        )
    else:
        noises = {"coins": batches, "noise": seeded(3), "draws": draws}
        ours = five["joint_bbp"](
            five["each_gradient"], *inputs, flat_start(), [0.5] * steps, sigma_init=0.1, sigma_p=sigma_p, C=C, b=b,
            **noises, **settings,
        )  # fmt: skip
        model = backprop.Reparameterized(FlatNetwork(five["network"], flat_start()), sigma_init=0.1)
        optimizer = backprop.JointBackprop(model.parameters(), lr=0.5, generator=seeded(1), **settings)
    dp = mechanism.mechanism(
        optimizer, noise_multiplier=sigma_p, max_grad_norm=C, batch_size=b, n=len(y), generator=seeded(3)
    )
    for B in mechanism.poisson_batches(len(y), b, steps, seeded(2)):
        with optimizer.sampled_params():
            mechanism.private_gradient(model, F.cross_entropy, x[B], y[B], dp)
        optimizer.step()
    m, rest = list(model.parameters())[-2:] if way == "joint" else (model.theta, None)
    sigma = F.softplus(rest) if rest is not None else optimizer.variance()[m].sqrt()
    torch.testing.assert_close(ours[0], m.detach(), atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(ours[1], sigma.detach(), atol=1e-7, rtol=1e-6)
    assert (ours[0] - flat_start()).abs().max() > 0.1
    assert (ours[1] - 0.1).abs().max() > 1e-3


def test_chapter_5_clip_factors_and_batches(five):
    norms = torch.tensor([0.0, 1e-9, 0.49, 0.5, 0.51, 7.0])
    torch.testing.assert_close(five["clip_factors"](norms, 0.5), gradients.clip_factors(norms, 0.5), rtol=0, atol=0)
    (expected,) = mechanism.poisson_batches(100, 7, 1, seeded())
    assert torch.equal(five["poisson_batch"](100, 7, seeded()), expected)


def test_chapter_5_scores_are_the_module_s(five):
    log_probs = (3 * torch.randn(500, 10, generator=seeded())).log_softmax(1)
    y = torch.randint(10, (500,), generator=seeded(6))
    expected = metrics.evaluate(log_probs, y)
    for bins in (15, 20, 100):
        assert five["ece"](log_probs, y, bins) == pytest.approx(metrics.ece(log_probs, y, bins), abs=1e-5)
    assert five["ece"](log_probs, y) == pytest.approx(expected["ece"], abs=1e-5)
    assert five["nll"](log_probs, y) == pytest.approx(expected["nll"])
    assert five["brier"](log_probs, y) == pytest.approx(expected["brier"])


# ---- Sampling and dropout


@pytest.fixture(scope="module")
def six() -> dict[str, Any]:
    return definitions("book/06_sampling_and_dropout.ipynb")


@pytest.mark.parametrize(("temperature", "sigma_p"), [(1.0, 3.0), (0.01, 3.0), (0.0, 0.7)])
def test_chapter_6_takes_the_module_s_steps_and_keeps_its_iterates(six, digits, temperature, sigma_p):
    """The same batches, noises and start: the same walk, and the same kept iterates of it."""
    (x, y), steps, C, b, lr = (digits[0].double(), digits[1]), 23, 0.7, 24, 0.5
    gradient = six["private_gradients"](
        six["each_gradient"], x.flatten(1), y, sigma_p, C, b, coins=seeded(2), noise=seeded(3)
    )
    settings = {"temperature": temperature, "weight_decay": 0.01, "noise_std": sigma_p * C / b}
    path = six["sgld"](gradient, flat_start(), lr, steps, ess=100, generator=seeded(1), **settings)
    model = FlatNetwork(six["network"], flat_start())
    optimizer = langevin.SGLD(model.parameters(), lr, 100, steps, samples=4, generator=seeded(1), **settings)
    dp = mechanism.mechanism(
        optimizer, noise_multiplier=sigma_p, max_grad_norm=C, batch_size=b, n=len(y), generator=seeded(3)
    )
    for B in mechanism.poisson_batches(len(y), b, steps, seeded(2)):
        with optimizer.sampled_params():
            mechanism.private_gradient(model, F.cross_entropy, x[B], y[B], dp)
        optimizer.step()
    torch.testing.assert_close(path[-1], model.theta.detach(), atol=1e-9, rtol=1e-9)
    kept = torch.stack(optimizer.state[model.theta]["snapshots"])
    assert len(kept) == 4
    torch.testing.assert_close(six["thinned"](path, 4).flip(0), kept, atol=1e-9, rtol=1e-9)
    assert (path[-1] - flat_start()).abs().max() > 0.05


@pytest.mark.parametrize(("steps", "samples"), [(168, 32), (23, 4), (10, 32), (7, 1), (64, 32)])
def test_chapter_6_thins_as_the_module(six, steps, samples):
    p = torch.nn.Parameter(torch.zeros(1))
    expected = list(langevin.SGLD([p], 0.1, 10.0, steps, samples).kept_at)
    assert six["thinned"](torch.arange(1, steps + 1), samples).tolist() == expected


def test_chapter_6_masked_gradients(six, digits):
    """With masks given, the chapter's gradient is autograd's of a network whose dropout drew these masks."""
    x, y = digits[0][:9].flatten(1).double(), digits[1][:9]
    theta, mask = flat_start(), six["masks"](9, 0.4, seeded()).double()
    found = six["each_gradient"](theta, x, y, mask)
    for i in range(9):
        free = theta.clone().requires_grad_()
        W, b, V, c = free.split(six["SIZES"])
        hidden = F.linear(x[i], W.view(64, 64), b).tanh() * mask[i]
        loss = F.cross_entropy(F.linear(hidden, V.view(10, 64), c), y[i])
        torch.testing.assert_close(found[i], torch.autograd.grad(loss, free)[0])
    again = six["with_masks"](six["each_gradient"], 0.4, seeded())(theta, x, y)
    torch.testing.assert_close(again, found, atol=1e-6, rtol=1e-5)


def flat(parts: Any) -> Tensor:
    return torch.cat([part.detach().flatten() for part in parts])


@pytest.mark.parametrize("shards", [False, True])
def test_chapter_6_ensembles(six, digits, shards):
    """One joint gradient an example, of all members or of the one in its place."""
    x, y = digits[0][:30], digits[1][:30]
    model = ensemble.Ensemble(mlp(), members=3, shards=shards).train()
    parts, _ = gradients.per_example_gradients(model, ensemble.summed(F.cross_entropy), x, y)
    expected = torch.cat([part.flatten(1) for part in parts], 1)
    theta = flat(model.parameters())
    if shards:
        found = six["each_of_one"](theta, x.flatten(1), y, assignment.place, 3)
    else:
        found = six["each_of_all"](theta, x.flatten(1), y, 3)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert int((expected == 0).all(1).sum()) == 0


def test_chapter_6_averages(six):
    """The module's average and its variance are the chapter's, of the optimizer's own iterates."""
    p = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = iterates.sgd([p], lr=0.3, steps=50)
    path, source = [], seeded()
    for step in range(50):
        p.grad = 0.5 * p.detach() + torch.randn(5, generator=source, dtype=torch.float64)
        before = p.detach().clone()
        optimizer.step()
        if step < 49:
            path.append(p.detach().clone())
    path.append(before - 0.3 * optimizer.state[p]["momentum"] / (1 - 0.9**50))
    mean, v = six["average_and_variance"](torch.stack(path))
    torch.testing.assert_close(p.detach(), mean)
    torch.testing.assert_close(optimizer.state[p]["average_variance"], v)


def test_chapter_6_chooses_the_module_s_temperature(six):
    log_probs = (3 * torch.randn(60, 10, generator=seeded())).log_softmax(1)
    y = torch.randint(10, (60,), generator=seeded(6))
    assert tuple(six["CANDIDATES"]) == temperature.CANDIDATES
    assert six["WORST"] == temperature.WORST
    torch.testing.assert_close(six["capped_losses"](log_probs.double(), y), temperature.losses(log_probs, y))
    ours, theirs = seeded(1), seeded(1)
    choices = [
        (six["choose"](log_probs, y, 0.3, ours), temperature.private(log_probs, y, 0.3, theirs)) for _ in range(40)
    ]
    assert all(a == b for a, b in choices)
    assert len(set(choices)) > 2


def test_chapter_6_curvature_of_the_last_layer(six, digits):
    x, y = digits[0][:12], digits[1][:12]
    model = mlp()
    probe = laplace.Probe(model)
    (parts,), _ = gradients.per_example_gradients(probe, laplace.mean_product, x, y)
    found = six["each_curvature"](flat(model.parameters()), x.flatten(1)).view(12, 10, 65)
    torch.testing.assert_close(found, parts, atol=1e-6, rtol=1e-4)
    optimizer = laplace.sgd(model.parameters(), lr=0.1, ess=12.0)
    posterior = laplace.Laplace(model, optimizer)
    probe.v.grad = found.mean(0) - 0.005
    posterior.learn(probe)
    weight, bias = posterior.variance().values()
    expected = six["last_layer_variance"](found.mean(0) - 0.005, 12.0)
    torch.testing.assert_close(torch.cat([weight, bias[:, None]], 1), expected)
    assert int((found.mean(0) < 0.005).sum()) > 0


def test_chapter_6_free_noise(six):
    assert six["free_noise_multiplier"](0.3, 1438, 256, 2.0, 0.5) == langevin.free_noise_multiplier(
        0.3, 1438, 256, 2.0, 0.5
    )


# ---- CIFAR-10 on a laptop


def test_chapter_13_floor_is_the_module_s_for_a_record():
    chapter = definitions("book/13_cifar_on_a_laptop.ipynb")
    record = {"config": {"noise_multiplier": 4.0, "max_grad_norm": 0.3, "batch_size": 700, "ess": None}}
    group = {"scale": 50_000, "noise_std": 4 * 0.3 / 700}
    assert chapter["floor"](record) == pytest.approx(curvature.noise_floor(group), rel=1e-4)
    record["config"]["ess"] = 2e4
    assert chapter["floor"](record) == pytest.approx(curvature.noise_floor(group | {"scale": 2e4}), rel=1e-4)


def test_chapter_13_takes_its_runs_from_the_grids():
    chapter = definitions("book/13_cifar_on_a_laptop.ipynb")
    found, missing = chapter["experiment"]("lenet_center", "lenet")
    assert len(found) == 24
    assert missing == []
    assert {r["config"]["epsilon"] for r in found} == {None}  # and not the older runs at a given budget


# ---- Fast and large


@pytest.fixture(scope="module")
def fifteen() -> dict[str, Any]:
    return definitions("book/15_fast_and_large.ipynb")


@pytest.fixture(scope="module")
def photos() -> tuple[Tensor, Tensor]:
    return torch.rand(9, 3, 32, 32, generator=seeded()), torch.randint(10, (9,), generator=seeded(6))


@pytest.mark.parametrize("name", ["lenet", "tanh_cnn"])
@pytest.mark.parametrize("way", ["by_vmap", "by_keeping", "by_ghost", "by_one_backward"])
def test_chapter_15_engines_give_the_module_s_sum(fifteen, photos, name, way):
    model = models.build(name, (3, 32, 32), 10, seed=3)
    found = fifteen[way](model, F.cross_entropy, *photos, 0.3)
    assert_equal(list(found), gradients.clipped_sum(model, F.cross_entropy, *photos, 0.3).sums)


def test_chapter_15_norms_are_the_module_s(fifteen, digits):
    x, y = digits
    model = mlp()
    outer = gradients.linear_weights(model)
    kept, _, _ = gradients.chunk_gradients(model, F.cross_entropy, x, y, outer)
    parts, _ = fifteen["factors"](model, F.cross_entropy, x, y)
    for layer, (a, d) in zip((1, 3), parts, strict=True):
        bias = kept[f"{layer}.bias"].square().sum(1)
        expected = gradients.norms_of(kept[f"{layer}.weight"]).square() + bias
        torch.testing.assert_close(fifteen["gram_squares"](a, d), expected, atol=1e-7, rtol=1e-4)
    norms = torch.tensor([0.0, 0.2, 3.0])
    torch.testing.assert_close(fifteen["clip_factors"](norms, 0.5), gradients.clip_factors(norms, 0.5))


@pytest.mark.parametrize("name", ["mlp", "lenet", "tanh_cnn"])
def test_chapter_15_chunk_is_the_module_s(fifteen, name):
    model = models.build(name, (3, 32, 32), 10)
    assert fifteen["default_chunk"](model) == gradients.default_chunk(model, gradients.linear_weights(model))


def test_chapter_15_padding_leaves_the_sum(fifteen, photos):
    model = models.build("lenet", (3, 32, 32), 10, seed=3)

    def each(x, y, C):
        found, _ = gradients.per_example_gradients(model, F.cross_entropy, x, y)
        norms = torch.stack([gradients.norms_of(g) for g in found]).norm(dim=0)
        return [torch.einsum("i,i...->i...", gradients.clip_factors(norms, C), g) for g in found]

    found = fifteen["padded"](each, *photos, 14, 0.3)
    assert_equal(found, gradients.clipped_sum(model, F.cross_entropy, *photos, 0.3).sums)

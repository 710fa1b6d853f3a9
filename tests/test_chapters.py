"""What a chapter defines and what dpivon keeps are the same functions: same numbers from the same inputs and seeds."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from notebook import definitions
from torch import Tensor

from dpivon import accounting, adaptive, curvature, data, gradients, ivon, mechanism, models

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

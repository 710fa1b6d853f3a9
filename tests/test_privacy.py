"""The privacy wall, and mutants: mechanisms with one classic mistake each, which the checks must reject.

A check takes a mechanism and raises AssertionError when it is not private. The real mechanism passes all of them; each
mutant fails the one that is named beside it. A check that no mutant fails would be no check.
"""

import ast
import math
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from optimizers import build

import dpivon
from dpivon import adaptive, gradients, mechanism, methods, models
from dpivon.ivon import IVON

N, B, C, SIGMA = 64, 16, 0.5, 1.2
SOURCE = torch.Generator().manual_seed(0)
X, Y = 4 * torch.randn(N, 1, 4, 4, generator=SOURCE), torch.randint(0, 3, (N,), generator=SOURCE)


def network():
    return models.build("mlp", (1, 4, 4), 3, seed=0)


def noise(total, std, source):
    return [t + std * torch.randn(t.shape, generator=source) for t in total]


class Mechanism:
    """The real one, in the form that the checks use: a batch in, the flat private gradient out; and its batches."""

    def gradient(self, x, y, sigma, seed=0):
        model = network()
        dp = mechanism.mechanism(
            adaptive.sgd(model.parameters(), lr=1.0), noise_multiplier=sigma, max_grad_norm=C, batch_size=B, n=N,
            generator=mechanism.new_generator(seed),
        )  # fmt: skip
        mechanism.private_gradient(model, F.cross_entropy, x, y, dp)
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    def batches(self, steps):
        return mechanism.poisson_batches(N, B, steps, mechanism.new_generator(0))


def posterior(model):
    """The same wide posterior each time: its draws clip differently."""
    return IVON(model.parameters(), lr=1.0, ess=10.0, hess_init=1.0, generator=mechanism.new_generator(1))


class SeveralDraws(Mechanism):
    """The real one, with the gradient averaged over three draws of the weights."""

    def gradient(self, x, y, sigma, seed=0):
        model = network()
        dp = mechanism.mechanism(
            posterior(model), noise_multiplier=sigma, max_grad_norm=C, batch_size=B, n=N,
            generator=mechanism.new_generator(seed),
        )  # fmt: skip
        mechanism.private_gradient(model, F.cross_entropy, x, y, dp, samples=3)
        return torch.cat([p.grad.flatten() for p in model.parameters()])


class Mutant(Mechanism):
    """The skeleton of the mutants: sum, noise, scale, each of which one of them gets wrong."""

    def gradient(self, x, y, sigma, seed=0):
        model = network()
        total = self.sum(model, x, y)
        noised = noise(total, self.std(sigma), mechanism.new_generator(seed))
        return torch.cat([t.flatten() for t in noised]) / self.divisor(len(y))

    def sum(self, model, x, y):
        return gradients.clipped_sum(model, F.cross_entropy, x, y, C).sums

    def std(self, sigma):
        return sigma * C

    def divisor(self, size):
        return B


class NoClipping(Mutant):
    def sum(self, model, x, y):
        return [g * len(y) for g in gradients.mean_gradient(model, F.cross_entropy, x, y)[0]]


class ClippingTheSum(Mutant):
    """Clips after averaging: the mean has norm at most C, and one example may still turn it round."""

    def sum(self, model, x, y):
        mean, _ = gradients.mean_gradient(model, F.cross_entropy, x, y)
        norm = torch.cat([g.flatten() for g in mean]).norm()
        return [g * len(y) * gradients.clip_factors(norm[None], C)[0] for g in mean]


class ClippingEachTensor(Mutant):
    """Clips each parameter's gradient to C by itself: four tensors make sensitivity up to 2 C."""

    def sum(self, model, x, y):
        if len(y) == 0:
            return super().sum(model, x, y)
        per_example, _ = gradients.per_example_gradients(model, F.cross_entropy, x, y)
        factors = [gradients.clip_factors(g.flatten(1).norm(dim=1), C) for g in per_example]
        return [torch.tensordot(f, g, dims=1) for f, g in zip(factors, per_example, strict=True)]


class AccumulatedDraws(Mutant):
    """One backward pass for each of three draws, added up as accumulated gradients are: an example counts three times.

    What a loop does that enters `sampled_params()` three times before one step.
    """

    def sum(self, model, x, y):
        thetas = mechanism.draws(posterior(model), list(model.parameters()), 3)
        each = [gradients.clipped_sum(model, F.cross_entropy, x, y, C, thetas=[theta]).sums for theta in thetas]
        return [sum(parts) for parts in zip(*each, strict=True)]


class NoNoise(Mutant):
    def std(self, sigma):
        return 0.0


class NoiseWithoutC(Mutant):
    def std(self, sigma):
        return sigma


class HalfTheNoise(Mutant):
    def std(self, sigma):
        return sigma * C / 2


class NoiseDividedTwice(Mutant):
    def std(self, sigma):
        return sigma * C / B


class RealisedBatchSize(Mutant):
    """Divides by the number of examples that happened to be drawn: the size itself is private."""

    def divisor(self, size):
        return max(size, 1)


class Shuffled(Mechanism):
    """Batches of exactly b from a permutation: not what the accountant assumes."""

    def batches(self, steps):
        source = torch.Generator().manual_seed(0)
        for step in range(steps):
            if step % (N // B) == 0:
                order = torch.randperm(N, generator=source)
            yield order[B * (step % (N // B)) :][:B]


def check_sensitivity(tested):
    """Without noise, removing one example moves the sum by at most C, in a large batch and in one of two examples."""
    for size in (2, N):
        x, y = X[:size], Y[:size]
        whole = tested.gradient(x, y, 0.0)
        for i in range(size):
            keep = torch.arange(size) != i
            moved = B * (whole - tested.gradient(x[keep], y[keep], 0.0)).norm()
            assert moved <= C * (1 + 1e-4), f"example {i} of {size} moves the sum by {moved:.3f} > {C}"


def check_noise(tested):
    """On an empty batch the gradient is noise of standard deviation sigma C / b: a chi-square test, four sigma wide."""
    draws = torch.cat([tested.gradient(X[:0], Y[:0], SIGMA, seed).double() for seed in range(20)])
    z = draws / (SIGMA * C / B)
    assert abs(float(z.square().mean()) - 1) < 4 * math.sqrt(2 / len(z)), f"mean square {z.square().mean():.3f}, not 1"
    assert abs(float(z.mean())) < 4 / math.sqrt(len(z))
    assert not torch.equal(*(tested.gradient(X[:0], Y[:0], SIGMA, seed) for seed in (0, 1)))


def check_poisson(tested):
    """Batch sizes have the binomial variance N q (1 - q), and two examples are drawn together with probability q^2."""
    q, steps = B / N, 3000
    batches = list(tested.batches(steps))
    sizes = torch.tensor([float(len(index)) for index in batches])
    assert abs(float(sizes.mean()) - B) < 4 * math.sqrt(N * q * (1 - q) / steps)
    assert abs(float(sizes.var()) / (N * q * (1 - q)) - 1) < 0.15, f"variance of the batch size is {sizes.var():.2f}"
    both = sum(1 for index in batches if {0, 1} <= set(index.tolist())) / steps
    assert abs(both - q * q) < 4 * math.sqrt(q * q * (1 - q * q) / steps)


CHECKS = [check_sensitivity, check_noise, check_poisson]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("tested", [Mechanism, SeveralDraws])
def test_the_mechanism_passes(tested, check):
    check(tested())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_mutants_skeleton_without_a_mistake_passes(check):
    check(Mutant())


@pytest.mark.parametrize(
    ("mutant", "check"),
    [
        (NoClipping, check_sensitivity),
        (ClippingTheSum, check_sensitivity),
        (ClippingEachTensor, check_sensitivity),
        (AccumulatedDraws, check_sensitivity),
        (RealisedBatchSize, check_sensitivity),
        (NoNoise, check_noise),
        (NoiseWithoutC, check_noise),
        (HalfTheNoise, check_noise),
        (NoiseDividedTwice, check_noise),
        (Shuffled, check_poisson),
    ],
)
def test_every_mutant_is_caught(mutant, check):
    with pytest.raises(AssertionError):
        check(mutant())


class RawGradients(adaptive.Adaptive):
    """The mistake of an optimizer that keeps what it saw before the noise and steps by that."""

    def __init__(self, params, lr):
        super().__init__(params, lr, adaptive.gradient, adaptive.one)
        self.raw = {}

    @contextmanager
    def sampled_params(self):
        yield
        self.raw = {p: p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None}

    @torch.no_grad()
    def step(self, closure=None):
        for p, g in self.raw.items():
            p.sub_(self.param_groups[0]["lr"] * g)


def check_steps_by_private_gradient(optimizer_of):
    """The update is a function of the final `p.grad`: what stood there inside the context leaves no trace."""
    updates = []
    for inside in (1.0, -5.0):
        p = torch.nn.Parameter(torch.zeros(3))
        optimizer = optimizer_of([p], lr=0.1)
        optimizer.generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            with optimizer.sampled_params():
                p.grad = torch.full_like(p, inside)  # the raw gradient, different each time
            p.grad = torch.tensor([1.0, 2.0, -3.0])  # the private one, the same
            optimizer.step()
        updates.append(p.detach().clone())
    assert torch.equal(*updates)
    assert updates[0].abs().min() > 0


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_every_method_steps_by_the_private_gradient_alone(name):
    check_steps_by_private_gradient(lambda p, lr: build(name, p, lr))


def test_an_optimizer_that_reads_raw_gradients_is_caught():
    with pytest.raises(AssertionError):
        check_steps_by_private_gradient(RawGradients)


def imports():
    """The import graph of dpivon, from its source."""
    graph = {}
    for path in Path(dpivon.__file__).parent.glob("*.py"):
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[path.stem] = {name.split(".")[1] for name in found if name.startswith("dpivon.")}
    return {module: found & graph.keys() for module, found in graph.items()}


def reachable(graph, module):
    """All modules that `module` imports, directly or not."""
    seen, todo = set(), [module]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def test_no_module_needs_itself():
    graph = imports()
    assert "methods" in reachable(graph, "train")
    assert [module for module in graph if module in reachable(graph, module)] == []


def test_the_wall_only_the_mechanism_sees_per_example_gradients():
    graph = imports()
    assert "gradients" in graph["mechanism"]  # the graph is read rightly
    assert [module for module, found in graph.items() if "gradients" in found] == ["door", "mechanism"]


@pytest.mark.parametrize(
    "module",
    [
        "adaptive",
        "assignment",
        "backprop",
        "checks",
        "curvature",
        "dropout",
        "ensemble",
        "iterates",
        "ivon",
        "langevin",
        "laplace",
        "methods",
        "rules",
        "snapshots",
        "weights",
    ],
)
def test_the_wall_optimizers_cannot_see_data(module):
    assert not reachable(imports(), module) & {"gradients", "mechanism", "door", "data", "state", "loop", "train"}

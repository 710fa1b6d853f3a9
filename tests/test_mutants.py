"""Each published mistake is caught: by its audit's statistic alone, or by the exact test that it names."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from dpivon import adaptive, audit, gradients, mechanism, mutants

FILES = Path(mutants.__file__).parent
BY_AUDIT = [name for name in mutants.NAMES if not hasattr(mutants.load(name), "EXACT")]
BY_TEST = [name for name in mutants.NAMES if hasattr(mutants.load(name), "EXACT")]


@pytest.mark.parametrize("name", BY_AUDIT)
def test_the_audit_alone_rejects_it(name):
    assert mutants.load(name).attack(seed=0).rejected


def test_most_are_rejected_by_an_audit_alone():
    assert len(BY_AUDIT) >= 6


def test_the_same_audits_pass_the_real_mechanism():
    """So that a rejection is the mistake's doing."""
    for changes in ({}, {"max_grad_norm": 4.0}):
        assert not audit.full_batch(noise_multiplier=1.1, **changes).rejected


@pytest.mark.parametrize("name", BY_TEST)
def test_where_an_audit_is_too_weak_a_test_is_named_and_exists(name):
    path, test = mutants.load(name).EXACT.split("::")
    tree = ast.parse((Path(__file__).parents[1] / path).read_text())
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def law_is_poisson(batches, n, q):
    """Whether batch sizes vary as sums of n coins do: a chi-square test of their dispersion, at one in a million."""
    sizes = [len(index) for index in batches]
    dispersion = sum((size - n * q) ** 2 for size in sizes) / (n * q * (1 - q))
    return min(stats.chi2.cdf(dispersion, len(sizes)), stats.chi2.sf(dispersion, len(sizes))) > 1e-6


def test_the_law_of_the_batches():
    shuffled, n, b, steps = mutants.load("shuffled_batches"), 600, 60, 400
    source = torch.Generator().manual_seed(0)
    assert law_is_poisson(mechanism.poisson_batches(n, b, steps, source), n, b / n)
    assert not law_is_poisson(shuffled.batches(n, b, steps, source), n, b / n)
    assert not shuffled.attack().rejected  # as its docstring says


def test_batch_statistics_are_refused_and_would_break_the_sensitivity(monkeypatch):
    mutant = mutants.load("batch_statistics")
    with pytest.raises(ValueError, match="BatchNorm1d at '2' uses statistics of the batch"):
        mutant.attack()
    torch.manual_seed(0)
    model, x, y = mutant.network(), torch.randn(8, 64), torch.randint(0, 10, (8,))
    x[0] *= 1000
    # One example's loss under two batches, with and without example 0: it must not depend on the others.
    losses = [F.cross_entropy(model(part)[-1:], y[-1:]) for part in (x, x[1:])]
    assert abs(losses[0] - losses[1]) > 0.1
    first, second = (torch.autograd.grad(loss, next(model.parameters()), retain_graph=True)[0] for loss in losses)
    assert (first - second).norm() > 0.1


@pytest.mark.parametrize("name", mutants.NAMES)
def test_it_warns_its_reader_and_fits_on_a_page(name):
    text = (FILES / f"{name}.py").read_text()
    assert text.startswith('"""NOT PRIVATE')
    assert "In review:" in text
    assert len(text.splitlines()) <= 75


def test_every_file_is_listed():
    assert sorted(mutants.NAMES) == sorted(path.stem for path in FILES.glob("[a-z]*.py"))


def test_nothing_that_is_private_uses_them():
    for path in FILES.parent.glob("*.py"):
        assert "mutants" not in path.read_text(), path


def test_the_mutants_gradients_differ_from_the_real_one_by_the_mistake_alone():
    """With a mechanism's noise switched off, the ones that err in the noise give the real clipped mean."""
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
    for name in ("noise_without_clipping_norm", "half_the_noise", "noise_divided_twice", "noise_of_one_micro_batch"):
        got = []
        for gradient in (mechanism.private_gradient, mutants.load(name).gradient):
            model = torch.nn.Linear(4, 3)
            torch.nn.init.constant_(model.weight, 0.1)
            torch.nn.init.zeros_(model.bias)
            dp = mechanism.mechanism(
                adaptive.sgd(model.parameters(), lr=1.0), noise_multiplier=0.0, max_grad_norm=0.3, batch_size=6, n=6
            )
            gradient(model, F.cross_entropy, x, y, dp)
            got.append(torch.cat([p.grad.flatten() for p in gradients.trainable(model).values()]))
        torch.testing.assert_close(*got, atol=1e-6, rtol=1e-4)

"""The equations of the chapter on speed and size, each evaluated a second way in float64, or counted."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from notebook import definitions
from torch import nn

from dpivon import accounting, gradients, mechanism, models
from dpivon.ivon import IVON

chapter = definitions("book/15_fast_and_large.ipynb")

seeds = st.integers(0, 2**31)
sizes = st.integers(1, 9)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def network(seed, channels=3, side=9):
    """A small network with both kinds of layers, stride and padding."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(channels, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 3, stride=2), nn.Tanh(), nn.Flatten(),
            nn.Linear(5 * ((side - 3) // 2 + 1) ** 2, 6), nn.Tanh(), nn.Linear(6, 3),
        ).double()  # fmt: skip


def data(seed, n=5):
    x = torch.randn(n, 3, 9, 9, generator=seeded(seed), dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=seeded(seed))


def one_by_one(model, x, y):
    """The gradients of the examples, by an ordinary backward pass for each: lists of arrays."""
    each = []
    for i in range(len(y)):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        each.append([p.grad.numpy().copy() for p in model.parameters()])
    return each


@pytest.mark.equation("eq-layer-work")
@settings(max_examples=20, deadline=None)
@given(seeds, sizes, sizes, sizes, st.integers(1, 3))
def test_layer_work(seed, n, inside, outside, side):
    """Forward W, and twice that backward, for a linear layer and for a convolution; counted by torch."""
    cases = [(nn.Linear(inside, outside), torch.randn(n, inside), 1, inside)]
    cases += [(nn.Conv2d(inside, outside, 2), torch.randn(n, inside, side + 1, side + 1), side**2, 4 * inside)]
    for layer, x, positions, numbers in cases:
        W = n * positions * numbers * outside
        with torch.no_grad():
            assert chapter["operations"](lambda layer=layer, x=x: layer(x)) == 2 * W
        x.requires_grad_()
        both = chapter["operations"](lambda layer=layer, x=x: layer(x).sum().backward())
        assert both == 3 * 2 * W


@pytest.mark.equation("eq-sum-of-outer-products")
@settings(max_examples=20, deadline=None)
@given(seeds)
def test_sum_of_outer_products(seed):
    model, (x, y) = network(seed), data(seed)
    parts, losses = chapter["factors"](model, F.cross_entropy, x, y)
    truth = one_by_one(model, x, y)
    for i in range(len(y)):
        for layer, (a, d) in enumerate(parts):
            total = sum(np.outer(d[i, j], a[i, j].detach()) for j in range(a.shape[1]))
            weight, bias = truth[i][2 * layer], truth[i][2 * layer + 1]
            np.testing.assert_allclose(total.reshape(weight.shape), weight, atol=1e-12)
            np.testing.assert_allclose(d[i].sum(0), bias, atol=1e-12)
    assert losses.shape == (len(y),)


@pytest.mark.equation("eq-gram-norm")
@settings(max_examples=30, deadline=None)
@given(seeds, sizes, sizes, sizes, st.integers(1, 4))
def test_gram_norm(seed, L, K, wide, n):
    a = torch.randn(n, L, K, generator=seeded(seed), dtype=torch.float64)
    d = torch.randn(n, L, wide, generator=seeded(seed + 1), dtype=torch.float64)
    for i in range(n):
        g = sum(np.outer(d[i, j], a[i, j]) for j in range(L))
        tables = sum(
            float(d[i, j] @ d[i, k]) * float(a[i, j] @ a[i, k]) for j in range(L) for k in range(L)
        )  # fmt: skip
        bias = float((d[i].sum(0) ** 2).sum())
        assert tables == pytest.approx((g**2).sum(), rel=1e-9, abs=1e-9)
        assert float(chapter["gram_squares"](a, d)[i]) == pytest.approx(tables + bias, rel=1e-9, abs=1e-9)
        assert float(chapter["kept_squares"](a, d)[i]) == pytest.approx(tables + bias, rel=1e-9, abs=1e-9)


@pytest.mark.equation("eq-gram-crossover")
@example(1, 2, 2)  # as many operations, and as many numbers, on both sides
@example(2, 4, 4)
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))
def test_gram_crossover(L, K, wide):
    """Which is cheaper, by torch's count of the operations and by the sizes of what is stored."""
    a, d = torch.ones(2, L, K), torch.ones(2, L, wide)
    tables, kept = (chapter["operations"](lambda f=f: chapter[f](a, d)) for f in ("gram_squares", "kept_squares"))
    assert chapter["gram_is_faster"](L, K, wide) == (tables < kept) == (L * (1 / K + 1 / wide) < 1 - 1e-12)
    held = torch.bmm(d, d.transpose(1, 2))[0].numel() + torch.bmm(a, a.transpose(1, 2))[0].numel()
    assert chapter["gram_is_smaller"](L, K, wide) == (held < torch.bmm(d.transpose(1, 2), a)[0].numel())


@pytest.mark.equation("eq-scaled-deltas")
@settings(max_examples=20, deadline=None)
@given(seeds, st.floats(0.01, 10.0))
def test_scaled_deltas(seed, C):
    model, (x, y) = network(seed), data(seed)
    truth = one_by_one(model, x, y)
    norms = [math.sqrt(sum((g**2).sum() for g in each)) for each in truth]
    scale = [min(1.0, C / (norm + 1e-6)) for norm in norms]
    expected = [sum(s * each[j] for s, each in zip(scale, truth, strict=True)) for j in range(len(truth[0]))]
    for way in ("by_vmap", "by_keeping", "by_ghost", "by_one_backward"):
        found = chapter[way](model, F.cross_entropy, x, y, C)
        for s, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(s.detach(), e, rtol=1e-8, atol=1e-11)
    module = gradients.clipped_sum(model, F.cross_entropy, x, y, C).sums
    for s, e in zip(module, expected, strict=True):
        np.testing.assert_allclose(s, e, rtol=1e-8, atol=1e-11)


@pytest.mark.equation("eq-gradient-memory")
@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_gradient_memory(name):
    """The bytes of what the module holds: of all gradients, and of a chunk's that are no outer products."""
    model = models.build(name, (3, 32, 32), 10, seed=0)
    x, y = torch.randn(6, 3, 32, 32), torch.randint(0, 10, (6,))
    P = sum(p.numel() for p in model.parameters())
    whole, _ = gradients.per_example_gradients(model, F.cross_entropy, x, y)
    assert sum(g.numel() * g.element_size() for g in whole) == 4 * 6 * P
    outer = gradients.linear_weights(model)
    outside = P - sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    chunk, _, _ = gradients.chunk_gradients(model, F.cross_entropy, x[:4], y[:4], outer)
    kept = [g for g in chunk.values() if isinstance(g, torch.Tensor)]
    assert sum(g.numel() * g.element_size() for g in kept) == 4 * 4 * outside


@pytest.mark.equation("eq-chunk")
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3), st.integers(1, 900))
def test_chunk(channels, wide):
    model = nn.Sequential(nn.Conv2d(channels, wide, 5), nn.Conv2d(wide, 40, 5), nn.Flatten(), nn.Linear(40, 30))
    outside = wide * 25 * channels + wide + 40 * wide * 25 + 40 + 30
    c = min(128, max(8, math.floor(2**23 / outside)))
    assert chapter["default_chunk"](model) == c
    assert gradients.default_chunk(model, gradients.linear_weights(model)) == c


@pytest.mark.equation("eq-ivon-share")
@given(st.floats(1e-6, 1.0), st.integers(1, 10_000), st.floats(1e-6, 1.0))
def test_ivon_share(ivon, b, image):
    """The time of a thousand steps of each, added up."""
    without = sum(b * image for _ in range(1000))
    with_ivon = without + 1000 * ivon
    assert chapter["ivon_share"](ivon, b, image) == pytest.approx(with_ivon / without)


@pytest.mark.equation("eq-intensity")
@settings(max_examples=30, deadline=None)
@given(sizes, sizes, sizes)
def test_intensity(m, k, n):
    """Operations as torch counts them, and the bytes of the three tensors."""
    a, b = torch.ones(m, k), torch.ones(k, n)
    count = chapter["operations"](lambda: a @ b)
    moved = sum(t.numel() * t.element_size() for t in (a, b, a @ b))
    assert chapter["product_intensity"](m, k, n) == pytest.approx(count / moved)
    vectors = [torch.ones(m * k) for _ in range(2)]
    added = [*vectors, vectors[0] + vectors[1]]
    assert m * k / sum(t.numel() * t.element_size() for t in added) == pytest.approx(1 / 12)


@pytest.mark.equation("eq-run-noise")
@pytest.mark.parametrize("b", [256, 1024, 4096])
def test_run_noise(b):
    """The standard deviation that the mechanism tells, averaged over T steps; and its limit for large noise."""
    p = nn.Parameter(torch.zeros(3))
    dp = mechanism.mechanism(
        IVON([p], lr=1.0, ess=1.0), noise_multiplier=1.7, max_grad_norm=0.4, batch_size=b, n=50_000
    )
    found = chapter["run_noise"](1.7, 0.4, b, 90)
    assert found == pytest.approx(mechanism.noise_std(dp) * math.sqrt(90) / 90)
    # The limit: mu of the rule of thumb, q sqrt(T (exp(1/sigma^2) - 1)), is above q sqrt(T) / sigma.
    for epsilon in (0.5, 3.0):
        T = round(10 * 50_000 / b)
        sigma = accounting.noise_for(epsilon, b / 50_000, T, 1e-5)
        mu = b / 50_000 * math.sqrt(T * math.expm1(sigma**-2))
        ratio = chapter["run_noise"](sigma, 1.0, b, T) * 50_000 * mu
        assert ratio >= 1
        if sigma > 4:
            assert ratio == pytest.approx(1, abs=0.02)


@pytest.mark.equation("eq-several-processes")
@settings(max_examples=10, deadline=None)
@given(seeds, st.integers(1, 5))
def test_several_processes(seed, processes):
    """The parts of the module's own batches, and one process that has them all."""
    model, (x, y) = network(seed), data(seed, n=23)
    batches = []
    for rank in range(processes):
        with (
            patch.object(mechanism, "ranks", lambda rank=rank: (rank, processes)),
            patch.object(mechanism, "check_own_masks"),
        ):
            (batch,) = mechanism.poisson_batches(23, 9, 1, seeded(seed + rank))
        share = chapter["shares"](23, processes)[rank]
        assert torch.equal(batch, chapter["local_batch"](share, 9 / 23, seeded(seed + rank)))
        batches.append(batch)
    union = torch.cat(batches)
    assert len(union) == len(union.unique())
    noise = [torch.randn(p.shape, generator=seeded(seed), dtype=torch.float64) for p in model.parameters()]
    found = chapter["several_processes"](
        lambda B: gradients.clipped_sum(model, F.cross_entropy, x[B], y[B], 0.5).sums, batches, noise, 9
    )
    truth = one_by_one(model, x[union], y[union])
    for j, (g, z) in enumerate(zip(found, noise, strict=True)):
        total = z.numpy().copy()
        for each in truth:
            total += each[j] * min(1.0, 0.5 / (math.sqrt(sum((t**2).sum() for t in each)) + 1e-6))
        np.testing.assert_allclose(g.detach(), total / 9, rtol=1e-8, atol=1e-11)

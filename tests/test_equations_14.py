"""The equation of the chapter on the full experiments, evaluated a second way in float64; and its list of grids."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from notebook import definitions
from torch import nn

from dpivon import ledger

chapter = definitions("book/14_the_full_experiments.ipynb")


@pytest.mark.equation("eq-sign")
@given(seed=st.integers(0, 2**31), beta1=st.floats(0, 0.99), lr=st.floats(1e-4, 1), steps=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_every_weight_moves_by_the_learning_rate_along_the_sign_of_the_momentum(seed, beta1, lr, steps):
    random = np.random.default_rng(seed)
    gradients, weights = random.normal(size=(steps, 5)), random.normal(size=5)
    p = nn.Parameter(torch.tensor(weights))
    optimizer = chapter["sign_descent"]([p], lr, beta1)
    average = np.zeros(5)
    for g in gradients:
        with optimizer.sampled_params():
            p.grad = torch.tensor(g)
        optimizer.step()
        average = beta1 * average + (1 - beta1) * g
        weights = weights - lr * np.sign(average)  # the bias correction is positive: it changes no sign
    np.testing.assert_allclose(p.detach().numpy(), weights, atol=1e-12)


def test_a_gradient_of_zero_moves_nothing_and_its_length_does_not_matter():
    moved = {}
    for length in (1.0, 1e6):
        p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        optimizer = chapter["sign_descent"]([p], 0.5)
        p.grad = torch.tensor([0.0, -length, 2e-9 * length], dtype=torch.float64)
        optimizer.step()
        moved[length] = p.detach().tolist()
    assert moved[1.0] == moved[1e6] == [0.0, 0.5, -0.5]


def test_the_list_of_grids_has_every_grid_with_the_ledger_that_it_names():
    grids = sorted(ledger.published("grids/tanh_cnn.toml").parent.glob("*.toml"))
    named = {path.stem: re.search(r"--ledger book/results/(\w+)\.jsonl", path.read_text())[1] for path in grids}
    assert {name: kept for name, (kept, _) in chapter["GRIDS"].items()} == named

"""Rules of thumb: each does what its formula says, against simulation and against the code that it sets up."""

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpivon import accounting, adaptive, curvature, ledger, rules, seeds

S, T = 0.03, 200
sizes = st.floats(1e-4, 1.0)


@pytest.mark.parametrize("decay", [0.0, 0.003, 0.05])
def test_a_weight_without_a_gradient_walks_as_far_as_it_says(decay):
    lr, d = 0.5, 20_000
    source = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(d))
    optimizer = adaptive.sgd([p], lr, beta1=0.0, weight_decay=decay)
    for _ in range(T):
        p.grad = S * torch.randn(d, generator=source)
        optimizer.step()
    assert float(p.detach().std()) == pytest.approx(rules.walk_std(lr, S, T, decay), rel=0.025)


@given(s=sizes, steps=st.integers(1, 10_000), decay=st.floats(0, 1), walk=sizes)
def test_the_learning_rate_walks_that_far(s, steps, decay, walk):
    lr = rules.learning_rate(s, steps, decay, walk)
    assert rules.walk_std(lr, s, steps, decay) == pytest.approx(walk, rel=1e-6)
    assert rules.walk_std(lr, s, steps) >= walk * (1 - 1e-6)  # without the decay it goes further


def test_gradients_that_agree_go_the_distance_and_no_further():
    p = nn.Parameter(torch.zeros(50))
    lr = rules.least_learning_rate(T, 3.0, distance=7.0)
    optimizer = adaptive.sgd([p], lr)
    for _ in range(T):
        p.grad = torch.full((50,), 3.0 / 50**0.5)  # of length C
        optimizer.step()
    assert float(p.detach().norm()) == pytest.approx(7.0, rel=1e-4)


def test_the_prior_pulls_a_network_of_noise_as_hard_as_its_share():
    d, C = 100_000, 5.0
    network = 0.1 * torch.randn(d, generator=torch.Generator().manual_seed(0))
    assert float(rules.weight_decay(C, d, share=0.2) * network.norm()) == pytest.approx(0.2 * C, rel=0.01)


def test_the_curvature_starts_where_the_noise_alone_keeps_it():
    source = torch.Generator().manual_seed(0)
    g = S * torch.randn(200_000, generator=source)
    group = {"scale": 1000.0, "noise_std": S}
    found = curvature.noise_corrected(g, torch.zeros(()), {}, group)
    assert float(found.mean()) == pytest.approx(rules.hess_init(S, 1000.0), rel=0.02)


def test_beta2_forgets_the_start_so_many_times():
    assert rules.beta2(1000) ** 1000 == pytest.approx(math.exp(-5), rel=0.02)
    with pytest.raises(ValueError, match="times must be below the 5 steps, got 5"):
        rules.beta2(5)


def test_a_resolution_is_the_number_of_groups_whose_error_is_their_value():
    """Simulated: private gradients of known size, whose squares are averaged over time and over groups of weights."""
    sigma, b, steps, P, kappa = 2.0, 64, 100, 40_000, 0.8
    s, size = sigma / b, math.sqrt(kappa / (b * P))  # C = 1
    n = P / rules.resolved_by_squares(sigma, b, steps, P, kappa)
    source = torch.Generator().manual_seed(0)
    error = []
    for _ in range(20):
        g = size * torch.randn(round(n) * steps, generator=source)
        z = torch.randn(round(n) * steps, generator=source)
        error.append(float(((g + s * z).square() - s**2 - g.square()).mean()) / size**2)
    assert torch.tensor(error).square().mean().sqrt() == pytest.approx(1, abs=0.4)


def test_resolution_at_a_budget_falls_as_the_book_says():
    N, P, epochs = 50_000, 62_006, 10
    found = {}
    for b in (2048, 4096):
        q, steps = b / N, round(epochs * N / b)
        sigma = accounting.noise_for(0.5, q, steps, 1e-5)
        found[b] = rules.resolved_by_squares(sigma, b, steps, P), rules.resolved_by_price(sigma, b, steps, N)
    assert found[2048][0] / found[4096][0] == pytest.approx(2, rel=0.15)  # 1 / b
    assert found[2048][1] / found[4096][1] == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rules.walk_std(0.0, 1.0, 10), "lr must be finite and > 0, got 0.0"),
        (lambda: rules.walk_std(1.0, 1.0, 10, -1.0), "weight_decay must be finite and >= 0, got -1.0"),
        (lambda: rules.learning_rate(math.inf, 10), "noise_std must be finite and > 0, got inf"),
        (lambda: rules.resolved_by_price(1.0, 1, 1, 0), "n must be finite and > 0, got 0"),
        (lambda: rules.resolved_by_squares(1.0, 1, 1, -2), "parameters must be finite and > 0, got -2"),
    ],
)
def test_what_is_out_of_range_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("sigma", [1.0, 4.0])
def test_the_rule_meets_trials_that_it_was_not_read_from(sigma):
    """DP-SGD on LeNet with C = 1, a cosine schedule and no prior, as the page on hyperparameters says."""
    trials = [
        r
        for r in ledger.read(ledger.published("lenet_tuning.jsonl"))
        if (r["config"]["method"], r["config"]["noise_multiplier"]) == ("dp-sgd", sigma)
    ]
    steps = trials[0]["results"]["steps"]
    assert {(r["config"]["max_grad_norm"], r["config"]["weight_decay"]) for r in trials} == {(1.0, 0.0)}
    lr = rules.learning_rate(sigma / trials[0]["config"]["batch_size"], steps) * math.sqrt(8 / 3)
    assert lr > rules.least_learning_rate(steps, 1.0)
    near = min(trials, key=lambda r: abs(math.log(r["config"]["lr"] / lr)))
    assert near["config"]["lr"] == pytest.approx(lr, rel=0.05)
    nll = {r["config"]["lr"]: seeds.values([r], "nll")[0] for r in trials}
    accuracy = {r["config"]["lr"]: seeds.values([r], "accuracy")[0] for r in trials}
    assert nll[near["config"]["lr"]] < min(nll.values()) + 0.03
    assert max(accuracy, key=lambda lr: accuracy[lr]) == near["config"]["lr"]
    assert max(nll.values()) > min(nll.values()) + 0.3  # the trials could have told a bad rule


def test_the_rates_of_the_page_at_other_budgets_are_those_of_the_rule():
    """LeNet with C = 5 on 45,000 images, as the trials were made; the best of them is read from the ledger."""
    page = (Path(__file__).parents[1] / "book" / "hyperparameters.md").read_text(encoding="utf-8")
    row = r"^\| \$\\varepsilon = (\S+)\$ \| (\S+) \| (\S+) to (\S+) \|.*?strong_tuning (\w+)"
    rows = re.findall(row, page, re.MULTILINE)
    assert [row[0] for row in rows] == ["1/2", "3", "8"]
    trials = [
        r for r in ledger.read(ledger.published("strong_tuning.jsonl"))
        if r["config"]["method"] == "dp-sgd-snapshots" and r["config"]["weight_decay"] == 0.005
    ]  # fmt: skip
    for epsilon, written, shortest, longest, key in rows:
        budget, steps = float(Fraction(epsilon)), round(10 * 45_000 / 1024)
        s = accounting.noise_for(budget, 1024 / 45_000, steps, 1e-5) * 5 / 1024
        proposed = rules.learning_rate(s, steps, 0.005)
        assert float(f"{proposed:.2g}") == float(written)
        tried = [r for r in trials if r["config"]["epsilon"] == budget]
        lrs = [r["config"]["lr"] for r in tried]
        assert (min(lrs), max(lrs)) == (float(shortest), float(longest))
        best = min(tried, key=lambda r: r["results"]["samples"]["nll"])
        assert best["key"] == key
        assert 0.4 < best["config"]["lr"] / proposed < 1.3

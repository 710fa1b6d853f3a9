"""Metrics against hand-worked cases and a second implementation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss

from dpivon import metrics, models, predict

# Four predictions over three classes; the third is wrong.
P = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.0, 0.1, 0.9]], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 1, 2])


def test_hand_worked_case():
    got = metrics.evaluate(P.log(), LABELS)
    assert got["accuracy"] == 0.75
    assert got["nll"] == pytest.approx(-(math.log(0.8) + math.log(0.7) + math.log(0.3) + math.log(0.9)) / 4)
    # four bins of one example each: |1 - .8|, |1 - .7|, |0 - .5|, |1 - .9|
    assert got["ece"] == pytest.approx((0.2 + 0.3 + 0.5 + 0.1) / 4)
    squares = (0.04 + 0.01 + 0.01) + (0.01 + 0.09 + 0.04) + (0.25 + 0.49 + 0.04) + (0.01 + 0.01)
    assert got["brier"] == pytest.approx(squares / 4)
    assert got["overconfidence"] == pytest.approx((0.8 + 0.7 + 0.5 + 0.9) / 4 - 0.75)


def ece_by_hand(p, y, bins):
    confidence, predicted = p.max(1)
    total = 0.0
    for k in range(bins):
        inside = (confidence > k / bins) & (confidence <= (k + 1) / bins)
        if inside.any():
            gap = (predicted[inside] == y[inside]).double().mean() - confidence[inside].mean()
            total += float(inside.double().mean() * gap.abs())
    return total


@given(st.integers(0, 2**31), st.integers(1, 200), st.integers(2, 12))
def test_against_second_implementations(seed, n, classes):
    source = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(n, classes, generator=source, dtype=torch.float64)).softmax(1)
    y = torch.randint(0, classes, (n,), generator=source)
    assert metrics.ece(p.log(), y) == pytest.approx(ece_by_hand(p, y, 15), abs=1e-6)
    assert metrics.nll(p.log(), y) == pytest.approx(log_loss(y, p, labels=range(classes)), abs=1e-9)


def test_a_calibrated_forecast_has_little_error_and_bins_are_the_documented_15():
    p = torch.full((1000, 2), 0.5, dtype=torch.float64)
    p[:, 0], p[:, 1] = 0.7, 0.3
    y = (torch.arange(1000) >= 700).long()
    assert metrics.ece(p.log(), y) == pytest.approx(0, abs=1e-4)
    assert metrics.ECE_BINS == 15


def test_impossible_certainty_costs_infinity():
    assert metrics.nll(torch.tensor([[0.0, -math.inf]]), torch.tensor([1])) == math.inf


@pytest.mark.parametrize(
    ("log_probs", "y", "message"),
    [
        (P.log(), LABELS[:3], "need log_probs"),
        (P.log()[:0], LABELS[:0], "n >= 1"),
        (P.log(), torch.tensor([0, 1, 3, 2]), r"labels must be in 0..2, got 0..3"),
        (P, LABELS, "normalized; apply log_softmax"),
        (torch.full((4, 3), float("nan")), LABELS, "normalized"),
    ],
)
def test_errors_name_value_and_remedy(log_probs, y, message):
    with pytest.raises(ValueError, match=message):
        metrics.evaluate(log_probs, y)


class Jittered:
    """An optimizer whose posterior adds 0 or 1 to the last bias, in turn."""

    def __init__(self, model):
        self.bias, self.calls = list(model.parameters())[-1], 0

    def sampled_params(self):
        return self

    def __enter__(self):
        with torch.no_grad():
            self.bias[0] += self.calls % 2
        self.calls += 1

    def __exit__(self, *error):
        with torch.no_grad():
            self.bias[0] -= (self.calls - 1) % 2


def test_prediction_averages_probabilities_over_draws_and_restores_the_mean():
    model = models.build("mlp", (1, 4, 4), 3, seed=0)
    x = torch.randn(25, 1, 4, 4)
    at_mean = predict.log_probs(model, x, chunk=7)
    assert torch.allclose(at_mean, model(x).log_softmax(1))
    shifted = (model(x) + torch.tensor([1.0, 0.0, 0.0])).log_softmax(1)
    averaged = predict.log_probs(model, x, Jittered(model), samples=4, chunk=10)
    torch.testing.assert_close(averaged.exp(), ((at_mean.exp() + shifted.exp()) / 2).detach(), atol=1e-6, rtol=1e-5)
    assert torch.allclose(predict.log_probs(model, x), at_mean)


def test_prediction_restores_the_training_flag_and_checks_samples():
    model = models.build("mlp", (1, 4, 4), 3, seed=0).train()
    predict.log_probs(model, torch.zeros(1, 1, 4, 4))
    assert model.training
    with pytest.raises(ValueError, match="samples must be >= 0"):
        predict.log_probs(model, torch.zeros(1, 1, 4, 4), samples=2)


def test_entropy_of_known_distributions():
    log_probs = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3]], dtype=torch.float64).log()
    expected = torch.tensor([0.0, math.log(2), math.log(3)], dtype=torch.float64)
    torch.testing.assert_close(metrics.entropy(log_probs), expected)


def test_reliability_by_hand_with_ties_and_empty_bins():
    """Four examples at .6 (two right), one at .95 (wrong): two of ten bins are filled, and an edge belongs below."""
    confidence = torch.tensor([0.6, 0.6, 0.6, 0.6, 0.95], dtype=torch.float64)
    log_probs = torch.stack([confidence, 1 - confidence], 1).log()
    y = torch.tensor([0, 0, 1, 1, 1])
    table = metrics.reliability(log_probs, y, bins=10)
    torch.testing.assert_close(table, torch.tensor([[0.6, 0.5, 0.8], [0.95, 0.0, 0.2]], dtype=torch.float64))
    weighted = float((table[:, 2] * (table[:, 0] - table[:, 1]).abs()).sum())
    assert weighted == pytest.approx(metrics.ece(log_probs, y, bins=10), abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_reliability_agrees_with_the_librarys_calibration_error(seed):
    source = torch.Generator().manual_seed(seed)
    log_probs = (3 * torch.randn(500, 7, generator=source)).log_softmax(1)
    y = torch.randint(0, 7, (500,), generator=source)
    for bins in (15, 20, 100):
        table = metrics.reliability(log_probs, y, bins)
        error = float((table[:, 2] * (table[:, 0] - table[:, 1]).abs()).sum())
        assert error == pytest.approx(metrics.ece(log_probs, y, bins), abs=1e-5)


def test_auroc_counts_pairs_and_ties_half():
    source = torch.Generator().manual_seed(0)
    inside = torch.randint(0, 6, (40,), generator=source).double()
    outside = torch.randint(2, 9, (30,), generator=source).double()
    pairs = outside[:, None] - inside[None]
    expected = float(((pairs > 0).double() + 0.5 * (pairs == 0).double()).mean())
    assert metrics.auroc(inside, outside) == pytest.approx(expected, abs=1e-6)
    assert metrics.auroc(1e6 + inside, 1e6 + outside) == pytest.approx(expected, abs=1e-6)
    assert metrics.auroc(torch.zeros(3), torch.zeros(4)) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="got 0 and 4"):
        metrics.auroc(torch.zeros(0), torch.zeros(4))


def test_closer_looks_name_what_is_wrong():
    y = torch.tensor([0, 1])
    log_probs = torch.zeros(2, 2).log_softmax(1)
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        metrics.reliability(log_probs, y, 0)


class Two(torch.nn.Module):
    """A network with two inputs by name."""

    def __init__(self):
        super().__init__()
        self.numbers, self.wards = torch.nn.Linear(3, 4), torch.nn.Embedding(5, 4)

    def forward(self, x):
        return self.numbers(x["numbers"]) + self.wards(x["wards"])


def test_predictions_for_several_inputs_are_cut_into_chunks_too():
    net, x = Two(), {"numbers": torch.randn(11, 3), "wards": torch.arange(11) % 5}
    whole = predict.log_probs(net, x)
    assert whole.shape == (11, 4)
    torch.testing.assert_close(predict.log_probs(net, x, chunk=4), whole)
    torch.testing.assert_close(whole, net(x).log_softmax(1).detach())

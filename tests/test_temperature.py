"""Private temperature scaling: it finds the temperature, and its choice obeys the promised ratio exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpivon import mechanism, metrics, temperature


def overconfident(n, factor, seed=0):
    """Labels drawn from known probabilities, and log probabilities that are too sure by `factor`."""
    source = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, 5, generator=source, dtype=torch.float64)
    y = torch.multinomial(logits.softmax(1), 1, generator=source).squeeze(1)
    return (factor * logits).log_softmax(1), y


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_it_finds_the_temperature_and_heals_the_calibration(factor):
    log_probs, y = overconfident(4000, factor)
    found = temperature.private(log_probs, y, 1.0, torch.Generator().manual_seed(0))
    assert found == pytest.approx(factor, rel=0.3)
    assert temperature.best(log_probs, y) == pytest.approx(factor, rel=0.3)
    healed = metrics.ece(temperature.scaled(log_probs, found), y)
    assert healed < 0.05
    if factor > 1:
        assert healed < metrics.ece(log_probs, y) / 2
    assert torch.equal(temperature.scaled(log_probs, found).argmax(1), log_probs.argmax(1))


@given(st.integers(0, 1000), st.integers(0, 12), st.floats(0.05, 5), st.floats(0.1, 30))
@settings(max_examples=60, deadline=None)
def test_one_example_changes_no_choice_by_more_than_the_budget(seed, n, epsilon, factor):
    """The exact ratio of probabilities for neighbors, over all candidates."""
    log_probs, y = overconfident(n + 1, factor, seed)

    def log_law(k):
        return (-epsilon * temperature.losses(log_probs[:k], y[:k]) / temperature.WORST).log_softmax(0)

    assert (log_law(n) - log_law(n + 1)).abs().max() <= epsilon * (1 + 1e-9)


def test_choices_follow_the_stated_law():
    log_probs, y = overconfident(30, 2.0)
    law = (-0.5 * temperature.losses(log_probs, y) / temperature.WORST).softmax(0)
    source = mechanism.new_generator(0)
    draws = [temperature.private(log_probs, y, 0.5, source) for _ in range(4000)]
    for candidate, p in zip(temperature.CANDIDATES, law.tolist(), strict=True):
        share = draws.count(candidate) / len(draws)
        assert abs(share - p) < 4.5 * (p * (1 - p) / len(draws)) ** 0.5 + 1e-9


def test_an_example_without_a_loss_counts_as_the_worst_and_prevents_nothing():
    log_probs, y = overconfident(50, 2.0)
    expected = temperature.losses(log_probs, y) + temperature.WORST
    log_probs, y = torch.cat([log_probs, torch.full((1, 5), float("nan"))]), torch.cat([y, y[:1]])
    torch.testing.assert_close(temperature.losses(log_probs, y), expected)
    assert temperature.private(log_probs, y, 1.0, torch.Generator().manual_seed(0)) in temperature.CANDIDATES


def test_a_budget_must_be_positive():
    log_probs, y = overconfident(3, 1.0)
    with pytest.raises(ValueError, match="epsilon must be finite and > 0, got 0"):
        temperature.private(log_probs, y, 0.0, torch.Generator())
    with pytest.raises(ValueError, match="temperature must be finite and > 0, got 0"):
        temperature.scaled(log_probs, 0.0)

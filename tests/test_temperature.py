"""Private temperature scaling: it finds the temperature, and its choice obeys the promised ratio exactly."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpivon import accounting, checkpoint, data, mechanism, metrics, posterior, predict, temperature, train


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


# ---- In a run


@pytest.fixture(scope="module")
def digits():
    return data.digits()


def test_a_label_that_is_no_class_is_named():
    log_probs, y = overconfident(5, 1.0)
    for wrong in (-1, 5):
        with pytest.raises(ValueError, match=r"labels must be from 0 to 4, one for each column, got"):
            temperature.private(log_probs, torch.cat([y[:4], torch.tensor([wrong])]), 1.0, torch.Generator())


def test_the_examples_set_aside_are_a_share_and_the_others_stay_where_they_are(digits):
    kept, (x, y) = train.set_aside(digits, 0.2)
    assert kept.n + len(y) == digits.n
    assert abs(len(y) / digits.n - 0.2) < 0.04
    together = torch.cat([kept.x_train.flatten(1), x.flatten(1)])
    assert torch.equal(together.sort(0)[0], digits.x_train.flatten(1).sort(0)[0])
    less = replace(digits, x_train=digits.x_train[1:], y_train=digits.y_train[1:])
    fewer, (x_less, _) = train.set_aside(less, 0.2)
    assert kept.n + len(y) - fewer.n - len(x_less) == 1
    assert torch.equal(kept.x_train[-fewer.n :], fewer.x_train)
    assert torch.equal(x[-len(x_less) :], x_less)
    with pytest.raises(ValueError, match="leaves 0 of 1438 examples aside"):
        train.set_aside(digits, 1e-9)


def test_a_tempered_run_predicts_at_the_temperature_and_states_its_cost(digits, tmp_path):
    record = train.run(
        train.Config(method="dp-sgd-tempered", noise_multiplier=3.0, epochs=4, seed=0), images=digits,
        export_path=tmp_path / "p",
    )  # fmt: skip
    results, privacy = record["results"], record["privacy"]
    kept, aside = train.set_aside(digits, 0.1)
    assert record["config"]["calibration"] == 0.1
    assert results["temperature"] in temperature.CANDIDATES
    assert results["mean"]["accuracy"] == results["untempered"]["accuracy"]
    assert (privacy["n"], privacy["set_aside"]) == (kept.n, len(aside[1]))
    assert (
        privacy["epsilon"]
        == privacy["temperature_epsilon"]
        == accounting.epsilon(3.0, 256 / kept.n, privacy["steps"], privacy["delta"])
    )
    text = str(accounting.PrivacyStatement(**{k: v for k, v in privacy.items() if k in FIELDS}))
    assert f"on {len(aside[1])} examples" in text
    assert "both parts are taken as public" in text
    got = posterior.load(tmp_path / "p")
    assert got.temperature == results["temperature"]
    assert metrics.evaluate(got.log_probs(digits.x_test), digits.y_test) == pytest.approx(results["mean"])


FIELDS = accounting.PrivacyStatement.__dataclass_fields__


def test_the_choice_is_the_exponential_mechanisms_on_the_examples_set_aside(digits):
    config = train.resolve(train.Config(method="dp-sgd-tempered", noise_multiplier=3.0, epochs=4, seed=0))
    kept, aside = train.set_aside(digits, 0.1)
    now = train.Run(config, kept, calibration=aside)
    train.train(now, None, lambda line: None)
    log_probs = predict.log_probs(now.model, aside[0])
    expected = temperature.private(log_probs, aside[1], now.statement().epsilon, train.source(0, "temperature"))
    assert now.temperature == expected
    once = now.sources["temperature"].get_state()
    train.train(now, None, lambda line: None)  # it is chosen once
    train.evaluate(now)
    assert torch.equal(now.sources["temperature"].get_state(), once)


def test_training_never_sees_the_examples_set_aside(digits):
    """Other labels of theirs change the temperature's law, and not one weight."""
    config = train.resolve(train.Config(method="dp-sgd-tempered", noise_multiplier=3.0, epochs=2, seed=0))
    kept, (x, y) = train.set_aside(digits, 0.1)
    runs = [train.Run(config, kept, calibration=(x, labels)) for labels in (y, (y + 1) % 10)]
    for now in runs:
        train.train(now, None, lambda line: None)
    for p, q in zip(*(now.model.parameters() for now in runs), strict=True):
        assert torch.equal(p, q)
    assert runs[0].temperature < runs[1].temperature


def test_before_the_last_step_no_temperature_is_chosen_and_a_resumed_run_chooses_the_same(digits, tmp_path):
    config = train.resolve(train.Config(method="dp-sgd-tempered", noise_multiplier=3.0, epochs=4, seed=0))
    kept, aside = train.set_aside(digits, 0.1)
    whole = train.Run(config, kept, calibration=aside)
    assert whole.statement().set_aside == 0
    assert set(train.evaluate(whole)) == {"mean"}
    train.train(whole, tmp_path / "c", lambda line: None)
    resumed = train.Run(config, kept, calibration=aside)
    resumed.load_state_dict(checkpoint.load(tmp_path / "c"))
    train.train(resumed, None, lambda line: None)
    assert resumed.temperature == whole.temperature
    assert train.evaluate(resumed) == train.evaluate(whole)
    other = train.Run(config, kept, calibration=(aside[0], aside[1].flip(0)))
    with pytest.raises(ValueError, match="set aside differ"):
        other.load_state_dict(checkpoint.load(tmp_path / "c"))


def test_any_method_takes_a_share_and_a_wrong_one_is_named(digits):
    record = train.run(train.Config(method="ivon", epochs=2, seed=0, calibration=0.2), images=digits)
    assert {"mean", "samples", "untempered", "temperature"} <= record["results"].keys()
    assert record["privacy"] is None
    for share in (0.0, 1.0, 150.0):
        with pytest.raises(ValueError, match="calibration must be between 0 and 1"):
            train.resolve(train.Config(method="dp-sgd", calibration=share))


def test_so_much_noise_that_epsilon_rounds_to_zero_ends_well(digits):
    config = train.Config(method="dp-sgd-tempered", noise_multiplier=1e6, epochs=0.5, delta=6e-4, seed=0)
    record = train.run(config, images=digits)
    p = record["privacy"]
    assert accounting.epsilon(1e6, p["sample_rate"], p["steps"], 6e-4) == 0
    assert p["epsilon"] == p["temperature_epsilon"] == 1e-6

"""Means, intervals and paired differences over seeds, against SciPy and against simulation."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpivon import seeds


def record(method: str, seed: int, nll: float, drawn: float | None = None) -> dict[str, Any]:
    results = {"mean": {"nll": nll}} | ({} if drawn is None else {"samples": {"nll": drawn}})
    return {"config": {"method": method, "seed": seed}, "results": results}


def test_values_are_of_the_draws_where_there_are_any() -> None:
    assert seeds.values([record("a", 0, 1.5), record("b", 0, 1.5, 1.25)], "nll") == [1.5, 1.25]


def test_one_number_has_no_error() -> None:
    assert seeds.mean_and_error([0.5])[0] == 0.5
    assert math.isnan(seeds.mean_and_error([0.5])[1])
    assert math.isnan(seeds.half_width([0.5]))


def test_interval_is_scipys() -> None:
    numbers = [1.0, 2.0, 4.0, 4.5]
    low, high = stats.t.interval(0.9, 3, np.mean(numbers), stats.sem(numbers))
    assert seeds.half_width(numbers, 0.9) == pytest.approx((high - low) / 2)


def test_interval_covers_as_often_as_it_says() -> None:
    x = np.random.default_rng(0).normal(2.0, 3.0, (2000, 3))
    covered = [abs(row.mean() - 2.0) < seeds.half_width(row.tolist()) for row in x]
    assert abs(np.mean(covered) - 0.95) < 0.02  # four standard errors


def test_difference_is_scipys_paired_test() -> None:
    a, b = [1.0, 2.0, 3.5], [0.5, 2.5, 2.0]
    first = [record("a", seed, value) for seed, value in enumerate(a)]
    second = [record("b", seed, value) for seed, value in reversed(list(enumerate(b)))]
    found = seeds.paired(first, second, "nll")
    known = stats.ttest_rel(a, b)
    assert found.mean == pytest.approx(0.5)
    assert found.p == pytest.approx(known.pvalue)
    interval = known.confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.seeds == 3


def test_equal_runs_do_not_differ() -> None:
    first, second = ([record(name, seed, 1.0 + seed) for seed in (0, 1)] for name in "ab")
    assert seeds.paired(first, second, "nll") == (0, 0, 0, 1, 2)


def test_a_seed_cannot_drop_out_unseen() -> None:
    first = [record("a", seed, 1.0) for seed in (0, 1, 2)]
    with pytest.raises(ValueError, match="seeds \\[2\\] are in one of the two only"):
        seeds.paired(first, first[:2], "nll")


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(ValueError, match="each seed must occur once, got \\[0, 0\\]"):
        seeds.paired([record("a", 0, 1.0), record("a", 0, 2.0)], [record("b", 0, 1.0)], "nll")
    with pytest.raises(ValueError, match="need two seeds, got \\[0\\]"):
        seeds.paired([record("a", 0, 1.0)], [record("b", 0, 1.0)], "nll")
    with pytest.raises(ValueError, match="there is no metric 'nl'; choose one of nll"):
        seeds.values([record("a", 0, 1.0)], "nl")
    with pytest.raises(ValueError, match="level must be between 0 and 1, got 95"):
        seeds.half_width([1.0, 2.0], 95)


def test_methods_are_grouped_in_their_order() -> None:
    records = [record("b", 0, 1.0), record("a", 0, 1.0), record("b", 1, 1.0)]
    assert {name: len(group) for name, group in seeds.by_method(records).items()} == {"b": 2, "a": 1}
    assert next(iter(seeds.by_method(records))) == "b"


def test_holm_holds_the_level_for_all_tests_together() -> None:
    assert seeds.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # by hand
    assert seeds.holm([0.9, 0.8]) == [1.0, 1.0]
    assert seeds.holm([]) == []
    source = np.random.default_rng(0)
    p = source.uniform(size=(4000, 5))  # nothing is true, so every count is a false alarm
    alarms = np.mean([min(seeds.holm(row)) <= 0.05 for row in p])
    assert alarms == pytest.approx(1 - 0.99**5, abs=0.012)
    with pytest.raises(ValueError, match=r"between 0 and 1, got \[1.5\]"):
        seeds.holm([1.5])

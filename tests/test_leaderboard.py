"""The leaderboard ranks by mean NLL at a budget that it computes again, and says why a record does not count."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpivon import ledger
from tools import leaderboard


def record(nll: float, seed: int | None = 0, sigma: float = 2.0, **more: Any) -> dict[str, Any]:
    """A sound record of a run on CIFAR-10 at epsilon below one, from one of the book's."""
    runs = ledger.read(ledger.published("lenet.jsonl"))
    run = next(r for r in runs if r["config"]["method"] == "dp-sgd" and r["privacy"]["epsilon"] < 1)
    run["config"].update(seed=seed, **more)
    run["results"]["mean"]["nll"] = nll
    run["key"] = ledger.key(run["config"], run["recipe"])
    return run


def test_the_leaderboard_ranks_by_the_mean_over_seeds() -> None:
    teams = [("a", [record(1.9, 0), record(1.5, 1)]), ("b", [record(1.6, 0), record(1.7, 1)])]
    entries, refused = leaderboard.rank(teams)
    assert [(entry.team, round(entry.mean, 6), len(entry.nll)) for entry in entries] == [("b", 1.65, 2), ("a", 1.7, 2)]
    assert refused == []


def test_the_leaderboard_counts_samples_before_the_mean() -> None:
    run = record(1.9)
    run["results"]["samples"] = {"nll": 2.0}
    assert leaderboard.score(run) == 2.0


def privacy(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda run: run["privacy"].update(values)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (privacy(epsilon=0.3), "epsilon is recorded as 0.3"),
        (privacy(noise_multiplier=0.5), "noise_multiplier"),
        (privacy(sampler="shuffled"), "epsilon holds for Poisson"),
        (lambda run: run["results"]["mean"].update(nll=float("nan")), "not finite"),
        (lambda run: run.update(status="interrupted"), "interrupted, not finished"),
        (lambda run: run.pop("privacy"), "lacks privacy"),
    ],
)
def test_the_leaderboard_says_why_a_record_does_not_count(change: Callable[[Any], Any], why: str) -> None:
    run = record(1.5)
    assert leaderboard.reason(run) is None
    change(run)
    assert why in str(leaderboard.reason(run))


@pytest.mark.parametrize(
    ("file", "found", "why"),
    [
        ("digits.jsonl", lambda run: run["privacy"], "the data are digits"),
        ("lenet.jsonl", lambda run: run["privacy"]["epsilon"] > 1, "above 1"),
        ("lenet_tuning.jsonl", lambda run: run["privacy"]["epsilon"] < 1, "trained on a part"),
    ],
)
def test_the_leaderboard_refuses_the_book_s_other_runs(file: str, found: Callable[[Any], Any], why: str) -> None:
    run = next(run for run in ledger.read(ledger.published(file)) if run["privacy"] and found(run))
    assert why in str(leaderboard.reason(run))


def test_the_board_names_teams_by_their_files(tmp_path: Path) -> None:
    ledger.append(tmp_path / "blue.jsonl", record(1.5))
    shown = leaderboard.show([tmp_path / "blue.jsonl"])
    assert shown[1].startswith("  1  1.5000 +- nan  1 seeds")
    assert shown[1].endswith("blue")
    assert len(shown) == 2


def test_a_missing_file_is_no_team_without_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file .*nobody\.jsonl; give each team's ledger"):
        leaderboard.show([tmp_path / "nobody.jsonl"])

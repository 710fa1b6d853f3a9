"""Comparisons: every run once, resumable, with the right means and errors."""

import math
import statistics
from dataclasses import asdict, replace

import pytest
import tyro

from dpivon import compare, ledger, records, train
from dpivon.__main__ import spread


@pytest.fixture
def small(tmp_path):
    return compare.Compare(
        epsilon=(1.0, 8.0), methods=("dp-sgd", "dp-ivon-gradsq"), seeds=2, epochs=1.0, ledger=tmp_path / "runs.jsonl",
        figure=tmp_path / "figure.png",
    )  # fmt: skip


def test_it_runs_everything_once_and_goes_on_where_it_was_stopped(small, monkeypatch, capsys):
    real, calls = train.run, []

    def run(config, **options):
        calls.append((config.method, config.epsilon, config.seed))
        if len(calls) == 4:
            raise OSError("No space left on device")
        return real(config, **options)

    monkeypatch.setattr(train, "run", run)
    with pytest.raises(OSError, match="No space"):
        small()
    assert len(ledger.read(small.ledger)) == 3
    small()
    assert len(calls) == 4 + 5
    assert len(set(calls)) == 8
    small()
    assert len(calls) == 9
    assert len({r["key"] for r in ledger.read(small.ledger)}) == 8
    out = capsys.readouterr().out
    assert out.count("dp-ivon-gradsq ") >= 4
    assert "epsilon 8, 2 seeds" in out
    assert small.figure.stat().st_size > 10_000


def test_the_table_shows_mean_and_standard_error_of_the_averaged_prediction(small):
    records = [r for r in small.run(lambda line: None) if r["config"]["epsilon"] == 8.0]
    line = next(line for line in compare.table(records) if line.startswith("dp-ivon-gradsq"))
    numbers = [r["results"]["samples"]["nll"] for r in records if r["config"]["method"] == "dp-ivon-gradsq"]
    shown = line.split()
    assert float(shown[4]) == pytest.approx(statistics.fmean(numbers), abs=5e-4)
    assert float(shown[6]) == pytest.approx(statistics.stdev(numbers) / math.sqrt(2), abs=5e-4)
    assert "9,620" in shown  # mean and variance of 4,810 weights
    sgd = next(line for line in compare.table(records) if line.startswith("dp-sgd"))
    assert "4,810" in sgd.split()


def test_what_cannot_be_compared_is_named(small, tmp_path):
    with pytest.raises(ValueError, match="need at least one seed"):
        compare.Compare(seeds=0).configs()
    with pytest.raises(ValueError, match="'sgd' is not private"):
        compare.Compare(methods=("sgd",)).configs()
    assert len(compare.Compare(seeds=1, epsilon=(1.0,)).configs()) > 10


def test_a_budget_that_is_none_is_refused_at_once():
    for epsilon in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="epsilon must be finite and > 0"):
            compare.Compare(epsilon=(1.0, epsilon)).configs()


def test_the_peak_of_memory_is_a_column_and_a_dash_where_it_is_not_known():
    records = [train.run(train.Config(method="sgd", epochs=0.5, seed=seed)) for seed in (0, 1)]
    records[0]["cost"]["memory_mib"], records[1]["cost"]["memory_mib"] = 17.4, 12.0
    head, line = compare.table(records)
    assert head.endswith("memory MiB")
    assert line.endswith(" 15")  # the median
    records[0]["cost"]["memory_mib"] = None
    del records[1]["cost"]["memory_mib"]
    assert compare.table(records)[1].endswith(" -")


def test_time_that_is_not_recorded_is_a_dash():
    record = train.run(train.Config(method="dp-sgd", epochs=0.5))  # private, and without a seed
    (_, line) = compare.table([record])
    assert [line.split()[i] for i in (-3, -1)] == ["-", "-"]


def test_the_peak_of_memory_is_what_was_allocated_meanwhile():
    with train.peak_memory() as memory:
        block = bytearray(64 * 2**20)
        block[:: 2**12] = b"x" * len(block[:: 2**12])
        del block
    assert memory() == pytest.approx(64, abs=16)


def test_budgets_are_read_with_commas_or_spaces():
    for words in (["--epsilon", "1,3,8e-1"], ["--epsilon", "1", "3", "8e-1"], ["--epsilon", "1,3", "8e-1"]):
        assert tyro.cli(compare.Compare, args=spread(words)).epsilon == (1.0, 3.0, 0.8)
    assert spread(["GPU=1,A=2", "a,b", "file,1.json", "1,"]) == ["GPU=1,A=2", "a,b", "file,1.json", "1,"]


def test_the_memory_of_a_run_is_that_of_its_training(monkeypatch):
    def greedy(now, evaluate=train.evaluate):
        block = bytearray(200 * 2**20)
        block[:: 2**12] = b"x" * len(block[:: 2**12])
        return evaluate(now)

    monkeypatch.setattr(train, "evaluate", greedy)
    assert train.run(train.Config(epochs=0.5, seed=0))["cost"]["memory_mib"] < 150


def test_a_record_without_costs_shows_a_dash():
    assert compare.cost([{"config": {}}], "stored", ",.0f") == "-"


def test_a_run_that_was_made_with_the_default_written_out_is_not_made_again(tmp_path, monkeypatch):
    one = compare.Compare(methods=("dp-sgd",), epsilon=(3.0,), seeds=1, ledger=tmp_path / "runs.jsonl")
    made = []
    monkeypatch.setattr(train, "run", lambda config, **_: made.append(config) or {"status": "finished"})
    (config,) = one.configs()
    assert type(config.epochs) is int
    line = {"config": asdict(replace(config, epochs=float(config.epochs))), "recipe": 2, "status": "finished"}
    monkeypatch.setattr(ledger, "read", lambda *_, **__: [line])
    assert one.run(print) == [line]
    assert not made


def test_thirty_epochs_are_one_configuration_however_they_are_written():
    config = asdict(train.resolve(train.Config(seed=0)))
    lines = [
        {"key": str(k), "status": "finished", "recipe": 2, "config": {**config, "seed": k, "epochs": epochs}}
        for k, epochs in enumerate((30, 30.0))
    ]
    assert [len(group) for group in records.groups(lines).values()] == [2]
    assert records.differing(lines) == []

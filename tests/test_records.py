"""The ledger's tool: it finds what was asked for, counts a run once, notices a wrong epsilon, runs a line again."""

import json
import math
import statistics
from pathlib import Path

import pytest

from dpivon import ledger, records, sweep, train

RESULTS = Path(__file__).parents[1] / "book" / "results"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A ledger of two methods, two noise multipliers, two seeds; of a failed run and of an interrupted one."""
    from dpivon import sweep

    path = tmp_path_factory.mktemp("ledger") / "runs.jsonl"
    for method in ("dp-sgd", "dp-ivon-gradsq"):
        for sigma in (4.0, 1.0):
            for seed in (0, 1):
                config = train.Config(method=method, noise_multiplier=sigma, seed=seed, epochs=1.0)
                record = train.run(config, ledger_path=path)
    ledger.append(path, {**record, "status": "interrupted"})
    ledger.append(path, sweep.failure(train.resolve(train.Config(method="sgd", seed=0)), "OSError: the disk", 1.0))
    return path


def show(capsys, file, *where, status=0, **options):
    """What `ledger` prints, line by line."""
    try:
        records.Ledger(file, where=where, **options)()
        code = 0
    except SystemExit as end:
        code = end.code
    assert code == status
    return capsys.readouterr().out.splitlines()


def changed(record, **places):
    """A copy of a record with other values at paths such as results__mean__nll; its key follows."""
    copy = json.loads(json.dumps(record))
    for path, new in places.items():
        *parts, last = path.split("__")
        branch = copy
        for part in parts:
            branch = branch[part]
        branch[last] = new
    copy["key"] = ledger.key(copy["config"], copy["recipe"])
    return copy


def test_lines_are_listed_and_filtered(file, capsys):
    lines = show(capsys, file)
    assert lines[0].split()[:5] == ["key", "status", "method", "noise_multiplier", "lr"]
    assert lines[-1] == "10 lines"
    assert "failed" in lines[-2]
    found = ledger.read(file)
    lines = show(capsys, file, "method=dp-sgd", "noise_multiplier=4", columns=("key", "seed", "results.mean.nll"))
    assert [line.split() for line in lines[1:-1]] == [
        [r["key"], str(r["config"]["seed"]), f"{r['results']['mean']['nll']:.4g}"] for r in found[:2]
    ]
    assert show(capsys, file, "status=failed", columns=("error",))[1] == "OSError: the disk"
    assert show(capsys, file, "seed=7")[-1] == "0 lines"
    assert show(capsys, file, "config.schedule=cosine", "simulation=true")[-1] == "9 lines"


def test_time_that_is_not_recorded_is_a_dash(tmp_path, capsys):
    train.run(
        train.Config(method="dp-sgd", epochs=0.5), ledger_path=tmp_path / "runs.jsonl"
    )  # private, and without a seed
    lines = show(capsys, tmp_path / "runs.jsonl", columns=("method", "seconds", "cpu_seconds"))
    assert lines[1].split() == ["dp-sgd", "-", "-"]


def test_a_short_name_is_the_setting_and_else_what_followed_from_it(file):
    record = ledger.read(file)[-3]
    assert records.value(record, "noise_multiplier") == 1.0
    assert records.value(record, "epsilon") == record["privacy"]["epsilon"]  # there was no budget
    assert records.value(record, "accuracy") == record["results"]["samples"]["accuracy"]
    assert records.value(record, "results.mean.accuracy") == record["results"]["mean"]["accuracy"]
    assert records.value(record, "threads") == record["hardware"]["threads"]
    assert records.value(record, "results.mean.acuracy") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": ("lrr=3",)}, "no record has 'lrr'; did you mean lr?"),
        ({"where": ("lr",)}, "a condition is NAME=VALUE, such as method=dp-sgd, got 'lr'"),
        ({"columns": ("acuracy",)}, "no record has 'acuracy'; did you mean accuracy"),
        ({"summarize": True, "columns": ("xyz",)}, "no record has 'xyz'; there are"),
        ({"rerun": "zz"}, "'zz' must be the beginning of one finished run's key, and it is of: none"),
        ({"rerun": ""}, "it is of: [0-9a-f]{16}, "),
    ],
)
def test_what_is_not_there_is_named(file, options, message):
    with pytest.raises(ValueError, match=message):
        records.Ledger(file, **options)()


def test_a_ledger_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no ledger"):
        records.Ledger(tmp_path / "none.jsonl")()


def test_a_summary_is_over_seeds_and_counts_each_run_once(file, tmp_path, capsys):
    found = ledger.read(file)
    doubled = tmp_path / "doubled.jsonl"
    for r in [changed(found[0], results__mean__nll=100.0), *found]:  # an earlier line of the same run
        ledger.append(doubled, r)
    lines = show(capsys, doubled, summarize=True)
    assert lines[0].split() == ["method", "noise_multiplier", "seeds", *records.METRICS]
    rows = [line.split() for line in lines[1:]]
    assert [row[:3] for row in rows] == [
        ["dp-ivon-gradsq", "1", "2"], ["dp-ivon-gradsq", "4", "2"], ["dp-sgd", "1", "2"], ["dp-sgd", "4", "2"],
    ]  # fmt: skip
    nll = [r["results"]["mean"]["nll"] for r in found[:2]]
    error = statistics.stdev(nll) / math.sqrt(2)
    assert rows[3][6:9] == [f"{statistics.fmean(nll):.4f}", "±", f"{error:.4f}"]
    # Other recipes are other configurations, and one seed has no error.
    ledger.append(doubled, changed(found[0], recipe=1))
    (old,) = [line for line in show(capsys, doubled, "recipe=1", summarize=True) if line.startswith("dp-sgd")]
    assert "±" not in old
    assert len(show(capsys, doubled, summarize=True)) == 6
    assert show(capsys, doubled, "status=failed", summarize=True) == ["no finished runs"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"privacy__epsilon": 1.0}, r"epsilon is recorded as 1.0, and computed again it is \d"),
        ({"privacy__noise_multiplier": 8.0}, "noise_multiplier is 4.0 in config, 8.0 in privacy"),
        ({"privacy__holdout": 5}, "holdout is 0 in config, 5 in privacy"),
        ({"privacy__simulation": False}, "simulation is False, and the seed 0"),
        ({"results__temperature": 1.0}, "a temperature was chosen, and privacy has no set_aside"),
        ({"privacy__sample_rate": 0.1}, "sample_rate is 0.1, not 256 / 1438"),
        ({"privacy__steps": 3}, "6 steps were done, 3 accounted for"),
        ({"privacy__delta": 1e-9}, "delta is 1e-05 in config, 1e-09 in privacy"),
        ({"privacy__besides": [[1.0, 0.2, 1]]}, "epsilon is recorded as"),
        ({"privacy__temperature_epsilon": 50.0}, "computed again it is 50"),
    ],
)
def test_an_epsilon_that_does_not_follow_from_its_noise_is_noticed(file, tmp_path, capsys, changes, message):
    good = ledger.read(file)[0]
    ledger.check(good)
    with pytest.raises(ledger.LedgerError, match=message):
        ledger.check(changed(good, **changes))
    wrong = tmp_path / "wrong.jsonl"
    for r in (good, changed(good, **changes)):
        ledger.append(wrong, r)
    assert show(capsys, wrong, check=True, status=1)[-1] == "2 epsilons computed again, 1 wrong"
    assert show(capsys, file, check=True)[-1] == "9 epsilons computed again, 0 wrong"


def test_a_private_method_must_state_its_privacy_unless_it_failed(file):
    good = ledger.read(file)[0]
    with pytest.raises(ledger.LedgerError, match="'dp-sgd' is private, and the record states no privacy"):
        ledger.check(changed(good, privacy=None))
    ledger.check(changed(good, privacy=None, config__method="sgd"))
    ledger.check(sweep.failure(train.resolve(train.Config(method="dp-sgd")), "OSError: the disk", 1.0))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.name)
def test_every_line_of_the_book_is_valid_and_its_epsilon_recomputes(path):
    found = ledger.read(path)
    assert found
    for record in found:
        ledger.check(record)


def test_a_line_runs_again_bit_for_bit(file, capsys):
    old = ledger.read(file)[-3]
    lines = show(capsys, file, rerun=old["key"][:10])
    assert lines[-1].startswith(f"{old['key']}: bit-equal of ")
    assert int(lines[-1].split()[3]) == 2 * 5 + 1 + 5  # metrics at the mean and over draws, steps, and the trace


def test_a_line_that_does_not_come_out_the_same_is_told_with_what_may_be_the_reason(file, tmp_path, capsys):
    old = ledger.read(file)[-3]
    nll = math.nextafter(old["results"]["samples"]["nll"], 9)
    other = changed(old, results__samples__nll=nll, versions__torch="1.8.0", hardware__cpu="abacus")
    ledger.append(tmp_path / "runs.jsonl", other)
    lines = show(capsys, tmp_path / "runs.jsonl", rerun=old["key"], status=1)
    assert f"results.samples.nll: was {nll}, is {old['results']['samples']['nll']}".removeprefix("results.") in lines
    assert f"versions.torch was 1.8.0, is {old['versions']['torch']}" in lines
    assert f"hardware.cpu was abacus, is {old['hardware']['cpu']}" in lines
    assert f"{old['key']}: NOT EQUAL in 1 of 16" in lines[-1]


def test_a_line_runs_again_on_its_number_of_threads(file, monkeypatch):
    import torch

    seen = []
    monkeypatch.setattr(train, "run", lambda config, **options: seen.append(torch.get_num_threads()) or old)
    old = changed(ledger.read(file)[0], hardware__threads=2)
    assert records.again(old)[1]
    assert seen == [2]
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config__seed": None}, "had no seed: its noise came from the operating system"),
        ({"recipe": 1}, "is of recipe 1, this dpivon runs recipe"),
        ({"config__momentum": 0.5}, "has settings this dpivon does not know: momentum"),
    ],
)
def test_what_cannot_be_run_again_is_refused(file, changes, message):
    with pytest.raises(ValueError, match=message):
        records.again(changed(ledger.read(file)[0], **changes))


@pytest.mark.parametrize(
    ("found", "typed"), [(True, "True"), (True, "true"), (None, "None"), (None, "null"), (3, "3.0"), ("a", "a")]
)
def test_what_is_typed_as_python_or_as_json_is_found(found, typed):
    assert records.same(found, typed)
    assert not records.same(found, "other")

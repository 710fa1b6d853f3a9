"""The command line, as its user types it."""

import json
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from dpivon import __main__ as command_line
from dpivon import bench, gradients, ledger, models


@pytest.fixture
def dpivon(tmp_path, monkeypatch, capsys):
    """Run the command line inside this process; (exit status, standard output or error)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["dpivon", *arguments])
        try:
            command_line.main()
            status = 0
        except SystemExit as end:
            status = end.code
        printed = capsys.readouterr()
        return status, printed.out if status == 0 else printed.err

    return call


def test_train_without_any_argument_trains_privately_and_states_it(tmp_path):
    command = [sys.executable, "-m", "dpivon", "train", "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for part in (
        "images/s", "epsilon", "[diagnostic, not covered by epsilon: training loss", "accuracy", "NLL", "ECE",
        "differential privacy", "one training example", "add or remove one example", "Poisson, q = 256 / 1438", "RDP",
        "released", "operating system's entropy",
    ):  # fmt: skip
        assert part in done.stdout, part
    assert "finished after 11 steps\n" in done.stdout  # in how many seconds is a diagnostic, where there is no seed
    (record,) = ledger.read(tmp_path / "runs.jsonl")
    assert record["key"] in done.stdout
    assert record["config"]["data"] == "digits"


def test_epsilon_converts_both_ways_with_both_accountants(dpivon):
    out = dpivon("epsilon", "--epsilon", "3")[1].splitlines()
    sigma = {line.split()[0]: float(line.split()[3]) for line in out[1:]}
    assert set(sigma) == {"RDP", "PRV"}
    assert sigma["PRV"] < sigma["RDP"]
    back = dpivon("epsilon", "--noise-multiplier", str(sigma["RDP"]))[1].splitlines()
    assert float(back[1].split()[-1]) == pytest.approx(3, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--method", "sgdd"], "dpivon: unknown method 'sgdd'; choose one of sgd, adam, ivon, sgld"),
        (["train", "--max-grad-norm", "0"], "dpivon: max_grad_norm must be finite and > 0, got 0.0"),
        (["epsilon"], "dpivon: give either --noise-multiplier"),
        (["epsilon", "--epsilon", "1", "--batch-size", "0"], "dpivon: need 0 < batch-size <= n"),
        (["train", "--ledger", "none/runs.jsonl"], "dpivon: the folder "),
        (["sweep", "none.toml"], "dpivon: there is no grid file none.toml; write one"),
        (["ledger", "none.jsonl"], "dpivon: there is no ledger none.jsonl; `train`, `compare` and `sweep` write one"),
        (["train", "--checkpoint", "none/run.ckpt"], "dpivon: the folder "),
        (["train", "--epsilon", "1e-7"], "dpivon: epsilon 1e-07 is out of reach in 169 steps"),
    ],
)
def test_errors_are_one_line(arguments, message, dpivon):
    status, err = dpivon(*arguments)
    assert status == 2
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_bench_prints_ratios_for_every_engine(dpivon, tmp_path):
    status, out = dpivon("bench", "--models", "lenet", "--batch-sizes", "16", "--repeats", "1", "--out", "bench.json")
    assert status == 0
    for part in (
        "ours", "vmap of the whole model", "Opacus hooks", "Opacus ghost", "not private, channels last", "MiB",
        "times as fast as", "times a DP-SGD step", "times those of ivon-opt",
    ):  # fmt: skip
        assert part in out
    found = json.loads((tmp_path / "bench.json").read_text())
    assert {row["engine"] for row in found["rows"]} == {
        name
        for name in bench.CONTENDERS
        if not name.split()[-1].isdigit()  # no chunk is smaller than the batch
    }
    for row in found["rows"]:
        assert row["images_per_second"] == pytest.approx(16 / row["seconds"])
        assert row["mib"] >= 0
        assert f"{row['images_per_second']:,.0f} images/s" in out
    assert (found["ivon"][0]["batch_size"], found["hardware"]["threads"]) == (16, 1)
    assert found["peer"][0]["seconds"] > 0
    assert {"commit", "dirty"} == found["code"].keys()


def test_the_bench_s_vmap_takes_the_engine_s_step():
    x, y = torch.randn(20, 3, 32, 32), torch.randint(0, 10, (20,))
    weights, factored = [], []
    for contender in (bench.ours, bench.whole_vmap):
        model = models.build("lenet", (3, 32, 32), 10, seed=0)
        with patch.object(bench.mechanism, "new_generator", lambda device: torch.Generator().manual_seed(0)):
            contender(model, x, y)()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        factored.append(len(gradients.linear_weights(model)))
    assert factored == [3, 0]
    torch.testing.assert_close(*weights, atol=1e-6, rtol=1e-4)


def test_bench_times_in_turns_and_stops_at_the_limit():
    calls = []

    def contender(name, seconds):
        return lambda: calls.append(name) or seconds.pop(0)

    times = [9.0, 1.0, 3.0, 2.0], [9.0, 5.0, 4.0, 6.0]
    assert bench.medians([contender(n, list(t)) for n, t in zip("ab", times, strict=True)], 3, 100.0) == [2.0, 5.0]
    assert calls == list("abababab")
    assert bench.medians([contender("a", [9.0, 1.0, 2.0, 4.0])], 3, 10.5) == [1.5]
    assert bench.medians([contender("a", [9.0, 1.0])], 3, 8.0) == [9.0]


def test_audit_prints_claims_beside_what_it_certifies(dpivon, tmp_path):
    arguments = ("audit", "--method", "dp-ivon-gradsq", "--epsilon", "4", "--epochs", "5", "--canaries", "1000")
    status, out = dpivon(*arguments, "--figure", "scores.png")
    assert status == 0
    rows = {
        line[:34].strip(): [float(v) for v in line[34:].split()]
        for line in out.splitlines() if line.startswith(("one full", "whole", "final"))
    }  # fmt: skip
    assert set(rows) == {
        "one full-batch step, gradient", "whole run, gradients", "whole run, weights", "whole run, h",
        "final model, loss",
    }  # fmt: skip
    assert all(claimed == pytest.approx(4.0, abs=0.05) and bound < claimed for claimed, bound in rows.values())
    assert rows["one full-batch step, gradient"][1] > 0.9 * 4
    assert "no claim is refuted (which does not prove them)" in out
    assert (tmp_path / "scores.png").stat().st_size > 10_000
    assert dpivon("audit", "--confidence", "0.3")[1].startswith("dpivon: confidence must be between 0.5 and 1")
    assert "no claim to attack" in dpivon("audit", "--noise-multiplier", "0")[1]


def test_audit_ends_with_status_1_where_a_claim_is_refuted(dpivon, monkeypatch):
    from dpivon import audit, mutants

    real = audit.full_batch
    monkeypatch.setattr(audit, "full_batch", lambda **o: real(mutants.load("half_the_noise").gradient, **o))
    status, _ = dpivon("audit", "--epsilon", "4", "--epochs", "1", "--canaries", "200")
    assert status == 1


def test_suggest_prints_settings_that_train_takes_and_names_what_is_wrong(dpivon):
    import shlex

    import tyro

    from dpivon import accounting, rules, train

    status, text = dpivon("suggest", "--epsilon", "1", "--max-grad-norm", "5", "--parameters", "62006")
    assert status == 0
    sigma = accounting.noise_for(1.0, 1024 / 50_000, 488, 1e-5)
    options = shlex.split(next(line for line in text.splitlines() if "--lr" in line))
    parsed = tyro.extras.subcommand_cli_from_dict(
        command_line.COMMANDS, args=["train", "--method", "dp-sgd-snapshots", *options]
    )
    config = train.resolve(parsed.config)
    decay = rules.weight_decay(5, 62_006)
    assert config.weight_decay == pytest.approx(decay, rel=0.05)
    assert config.lr == pytest.approx(rules.learning_rate(sigma * 5 / 1024, 488, decay), rel=0.05)
    assert "so strong that" not in text
    _, text = dpivon("suggest", "--n", "1438", "--batch-size", "256", "--epochs", "30", "--parameters", "4810")
    assert "a budget so strong that steps which arrive carry more noise than they should" in text
    for wrong, named in (
        (("--max-grad-norm", "0"), "max-grad-norm must be finite and > 0, got 0.0"),
        (("--epochs", "0"), "epochs must be finite and > 0, got 0.0"),
        (("--batch-size", "0"), "need 0 < batch-size <= n, got 0 and 50000"),
        (("--parameters", "0"), "parameters must be finite and > 0, got 0"),
        (("--epsilon", "0"), "epsilon must be finite and > 0"),
    ):
        status, error = dpivon("suggest", *wrong)
        assert status == 2
        assert named in error
        assert "noise multiplier" not in error


def test_a_folder_in_the_place_of_a_file_is_told_before_training(tmp_path):
    with pytest.raises(OSError, match="is a folder; choose a file in it"):
        command_line.train.check_writable(tmp_path)


def test_a_temperature_is_told_of_a_method_without_privacy_too():
    metrics = dict.fromkeys(("accuracy", "nll", "ece", "brier", "overconfidence"), 0.5)
    record = {"status": "finished", "seconds": 1.0, "config": {"holdout": 0, "samples": 0}, "privacy": None}
    text = command_line.summary({**record, "results": {"steps": 3, "mean": metrics, "temperature": 1.3}})
    assert "at temperature 1.3" in text
    assert text.endswith("not private")

"""The command line, as its user types it."""

import subprocess
import sys

import pytest

from dpivon import __main__ as command_line
from dpivon import ledger


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


def test_bench_prints_ratios_for_every_engine(dpivon):
    status, out = dpivon("bench", "--models", "lenet", "--batch-sizes", "16", "--repeats", "1")
    assert status == 0
    for part in (
        "ours", "Opacus hooks", "Opacus ghost", "not private, channels last", "MiB", "times as fast as",
        "times a DP-SGD step", "times those of ivon-opt",
    ):  # fmt: skip
        assert part in out


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

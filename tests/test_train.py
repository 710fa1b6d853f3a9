"""Runs: reproducible, resumable bit for bit, interruptible, recorded, and clear about what cannot run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from dpivon import accounting, checkpoint, data, ledger, mechanism, methods, processes, train

SMALL = train.Config(method="dp-sgd", data="digits", epsilon=3.0, epochs=3, seed=7)


@pytest.fixture(scope="module")
def digits():
    return data.digits()


def weights(now):
    return torch.cat([p.detach().flatten() for p in now.model.parameters()])


def test_digits_are_learned_privately_within_the_budget(digits):
    record = train.run(train.Config(method="dp-sgd", epsilon=3.0, seed=0), images=digits)
    assert record["results"]["mean"]["accuracy"] > 0.9
    privacy = record["privacy"]
    assert 2.9 < privacy["epsilon"] <= 3.0
    recomputed = accounting.epsilon(
        privacy["noise_multiplier"], privacy["batch_size"] / privacy["n"], privacy["steps"], privacy["delta"], "rdp"
    )
    assert recomputed == privacy["epsilon"]
    assert privacy["simulation"]
    ledger.validate(record)


def test_more_privacy_costs_accuracy(digits):
    accuracies = [
        train.run(replace(SMALL, epsilon=epsilon, epochs=10), images=digits)["results"]["mean"]["accuracy"]
        for epsilon in (0.05, 8.0)
    ]
    assert accuracies[0] + 0.2 < accuracies[1]


def test_the_non_private_twin_learns_and_promises_nothing(digits):
    record = train.run(train.Config(method="sgd", seed=0, epochs=10), images=digits)
    assert record["results"]["mean"]["accuracy"] > 0.9
    assert record["privacy"] is None


def test_nothing_computed_from_single_examples_is_recorded(digits):
    record = train.run(SMALL, images=digits)
    assert set(record["results"]) == {"mean", "trace", "steps", "resumed_at"}
    assert set(record["results"]["mean"]) == {"accuracy", "nll", "ece", "brier", "overconfidence"}
    text = json.dumps(record)
    for word in ("loss", "clipped", "fingerprint", digits.fingerprint):
        assert word not in text.replace("not the training loss", "")


def test_a_seed_fixes_every_number_and_no_seed_fixes_none(digits):
    first, again = (train.run(SMALL, images=digits)["results"] for _ in range(2))
    assert first == again
    other = train.run(replace(SMALL, seed=8), images=digits)["results"]
    assert other != first
    free = [train.run(replace(SMALL, seed=None), images=digits) for _ in range(2)]
    assert free[0]["results"] != free[1]["results"]
    assert not free[0]["privacy"]["simulation"]


def test_time_and_memory_of_a_private_run_without_a_seed_are_not_recorded(digits):
    """They follow the sizes of the batches, which epsilon does not cover; they are shown as a diagnostic."""
    said = []
    record = train.run(replace(SMALL, seed=None), images=digits, report=said.append)
    found = record["seconds"], record["cost"]["cpu_seconds"], record["cost"]["memory_mib"]
    assert found == (None, None, None)
    assert record["cost"]["stored"] == 4810
    assert re.fullmatch(r"\[diagnostic, not covered by epsilon: \d+ s of training\]", said[-1])
    ledger.validate(json.loads(json.dumps(record)))
    for config in (SMALL, replace(SMALL, method="sgd", epsilon=None, seed=None)):
        record = train.run(config, images=digits)
        assert min(record["seconds"], record["cost"]["cpu_seconds"]) > 0


def test_the_parts_of_a_run_have_their_names_in_train():
    from dpivon import config, loop, state

    homes = {"Config": config, "resolve": config, "RECIPE": config, "Run": state, "source": state, "train": loop}
    for name, home in homes.items():
        assert getattr(train, name) is getattr(home, name)


def test_methods_that_share_a_seed_share_weights_and_batches(digits):
    runs = [
        train.Run(train.resolve(replace(SMALL, method=m, epsilon=e)), digits)
        for m, e in (("sgd", None), ("dp-sgd", 1.0))
    ]
    assert torch.equal(*(weights(now) for now in runs))
    assert torch.equal(*(now.sources["batches"].get_state() for now in runs))


def test_the_generators_of_a_run_are_different_streams(digits):
    for seed in (7, None):
        sources = train.Run(train.resolve(replace(SMALL, seed=seed)), digits).sources
        draws = [torch.rand((), generator=source, dtype=torch.float64).item() for source in sources.values()]
        assert len(set(draws)) == len(draws) == 5


def test_the_loop_draws_batches_of_the_accounted_size(digits, monkeypatch):
    sizes = []
    gradient = mechanism.private_gradient

    def counting(model, loss, x, y, dp):
        sizes.append(len(y))
        return gradient(model, loss, x, y, dp)

    monkeypatch.setattr(mechanism, "private_gradient", counting)
    record = train.run(replace(SMALL, epochs=30), images=digits)
    b, n, q = record["privacy"]["batch_size"], digits.n, record["privacy"]["sample_rate"]
    assert len(sizes) == record["privacy"]["steps"]
    assert sum(sizes) / len(sizes) == pytest.approx(b, abs=4 * (n * q * (1 - q) / len(sizes)) ** 0.5)


def test_resuming_with_another_noise_multiplier_is_refused(digits, tmp_path, monkeypatch):
    file = tmp_path / "run.ckpt"
    train.run(replace(SMALL, epochs=0.5), images=digits, checkpoint_path=file)
    monkeypatch.setattr(accounting, "noise_for", lambda *arguments: 0.5)
    with pytest.raises(ValueError, match="noise_multiplier differ"):
        train.run(replace(SMALL, epochs=0.5), images=digits, checkpoint_path=file)


def test_the_global_random_state_is_left_alone(digits):
    state = torch.get_rng_state()
    train.run(replace(SMALL, epochs=0.5), images=digits)
    assert torch.equal(torch.get_rng_state(), state)


class StopError(Exception):
    pass


@pytest.mark.parametrize("seed", [7, None])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(digits, tmp_path, monkeypatch, seed):
    """Stopped at three places, once before the first checkpoint, then run to its end."""
    file = tmp_path / "run.ckpt"
    config = train.resolve(replace(SMALL, seed=seed))
    whole = train.Run(config, digits)
    start = {**whole.state_dict(), "model": {k: v.clone() for k, v in whole.model.state_dict().items()}}
    checkpoint.save(file, start)  # for the unseeded run, too, both start from the same state
    train.train(whole, None, lambda line: None)

    step = torch.optim.lr_scheduler.LambdaLR.step
    for stop_at in (3, 8, 13):
        now = train.Run(config, digits)
        now.load_state_dict(checkpoint.load(file))

        def crash(self, *args, now=now, stop_at=stop_at, **kwargs):
            if now.step == stop_at:
                raise StopError
            return step(self, *args, **kwargs)

        monkeypatch.setattr(torch.optim.lr_scheduler.LambdaLR, "step", crash)
        with pytest.raises(StopError):
            train.train(now, file, lambda line: None)
        monkeypatch.setattr(torch.optim.lr_scheduler.LambdaLR, "step", step)
    last = train.Run(config, digits)
    last.load_state_dict(checkpoint.load(file))
    assert last.step > 0
    train.train(last, file, lambda line: None)
    assert torch.equal(weights(last), weights(whole))
    assert last.accountant.history == whole.accountant.history
    assert last.accountant.history[0][2] == last.steps == last.step
    assert train.evaluate(last) == train.evaluate(whole)


def test_resuming_on_other_settings_or_data_is_refused(digits, tmp_path):
    file = tmp_path / "run.ckpt"
    train.run(replace(SMALL, epochs=0.5), images=digits, checkpoint_path=file)
    with pytest.raises(ValueError, match=r"config.lr differ.*replay its noise"):
        train.run(replace(SMALL, epochs=0.5, lr=0.5), images=digits, checkpoint_path=file)
    other = replace(digits, x_train=digits.x_train.flip(0))
    with pytest.raises(ValueError, match=r"another run \(data differ\)"):
        train.run(replace(SMALL, epochs=0.5), images=other, checkpoint_path=file)
    same = train.run(replace(SMALL, epochs=0.5), images=digits, checkpoint_path=file)
    assert same["results"]["resumed_at"] == same["results"]["steps"]


def test_the_checkpoint_is_secret_whole_and_not_code(digits, tmp_path):
    file = tmp_path / "Prüf.ckpt"
    train.run(replace(SMALL, epochs=0.5), images=digits, checkpoint_path=file)
    left = tmp_path / "Prüf.ckpt.part"
    left.touch(0o666)
    train.run(replace(SMALL, epochs=0.5, seed=9), images=digits, checkpoint_path=tmp_path / "other.ckpt")
    checkpoint.save(file, checkpoint.load(file))
    assert file.stat().st_mode & 0o077 == 0
    content = file.read_bytes()
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    for damaged in (content[:-1], content[:40], b"", bytes(changed)):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is not a whole checkpoint; delete it"):
            checkpoint.load(file)
    checkpoint.save(file, {"code": os.system})
    with pytest.raises(Exception, match="Weights only load failed"):
        checkpoint.load(file)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    file = tmp_path / "run.ckpt"
    checkpoint.save(file, {"step": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(file, {"step": 2})
    monkeypatch.undo()
    assert checkpoint.load(file) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["run.ckpt"]


def test_ctrl_c_ends_cleanly_with_what_there_is_and_the_run_goes_on_later(tmp_path):
    command = [
        sys.executable, "-m", "dpivon", "train", "--epochs", "2000", "--seed", "1", "--checkpoint", "c.ckpt",
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first.startswith("epoch")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    record = ledger.read(tmp_path / "runs.jsonl")[0]
    steps = record["results"]["steps"]
    assert record["status"] == "interrupted"
    assert 0 < steps < round(2000 * 1438 / 256)
    assert f"interrupted after {steps} steps" in out
    assert record["privacy"]["steps"] == steps
    state = checkpoint.load(tmp_path / "c.ckpt")
    assert state["step"] == steps
    assert state["history"][0][2] == steps


def test_holding_out_never_touches_the_test_set(digits):
    kept = data.hold_out(digits, 200, seed=0)
    assert kept.n == digits.n - 200
    record = train.run(replace(SMALL, holdout=200), images=digits)
    assert record["privacy"]["n"] == digits.n - 200
    assert record["results"] != train.run(SMALL, images=digits)["results"]
    released = record["privacy"]["released"]
    assert "for a split that is taken as fixed; not the metrics, which are of 200 held-out private examples" in released


@pytest.mark.parametrize("name", list(methods.METHODS))
def test_every_method_runs_by_name_and_records_what_it_promises(digits, name):
    private = methods.get(name).private
    record = train.run(replace(SMALL, method=name, epsilon=3.0 if private else None), images=digits)
    ledger.validate(record)
    assert record["results"]["mean"]["accuracy"] > 0.1
    assert (record["privacy"] is not None) == private
    assert ("samples" in record["results"]) == ("samples" in methods.get(name).defaults)
    assert record["cost"]["stored"] >= 4810
    assert 0 < record["cost"]["cpu_seconds"] < 100 * record["seconds"] + 1
    for entry in record["results"]["trace"]:
        assert set(entry) == {"step", "zero_fraction", "h_mean", "h_median", "effective_step"}
        assert entry["h_mean"] > 0
    assert bool(record["results"]["trace"]) == ("ivon" in name)


def test_at_strong_privacy_two_thirds_of_the_coordinates_are_below_the_noise(digits):
    """Pure noise gives P(z^2 < 1) = 0.6827; the estimate's floor is 2 phi(1) N sigma^2 C^2 / b^2 and not zero."""
    config = train.Config(method="dp-ivon-gradsq", epsilon=0.2, beta2=0.97, seed=0)
    record = train.run(config, images=digits)
    last, p = record["results"]["trace"][-1], record["privacy"]
    assert last["zero_fraction"] == pytest.approx(0.6827, abs=0.03)
    floor = 0.4839 * p["n"] * (p["noise_multiplier"] * p["max_grad_norm"] / p["batch_size"]) ** 2
    assert last["h_mean"] == pytest.approx(floor, rel=0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta2": 0.9}, "'dp-sgd' does not read beta2; it reads beta1, weight_decay"),
        ({"method": "dp-ivon-gradsq", "damping": 1e-3}, "'dp-ivon-gradsq' does not read damping"),
        ({"method": "sgd"}, r"'sgd' is not private, so it takes no epsilon"),
        ({"noise_multiplier": 1.0}, "epsilon or noise_multiplier, not both"),
        ({"epsilon": -1.0}, "epsilon must be finite and > 0, got -1.0"),
        ({"epsilon": None, "noise_multiplier": -1.0}, "noise_multiplier must be finite and >= 0, got -1.0"),
        ({"delta": 1.5}, r"delta must be in \(0, 1\), got 1.5"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be finite and > 0, got 0.0"),
        ({"batch_size": 10_000}, "got 10000 for 1438 examples"),
        ({"epochs": 0.0}, "epochs must be finite and > 0, got 0.0"),
        ({"lr": -1.0}, "lr must be finite and > 0, got -1.0"),
        ({"model": "lenet"}, "lenet needs images of at least 16 x 16, got 8 x 8"),
        ({"method": "nonsense"}, "unknown method 'nonsense'"),
        ({"data": "mnist"}, "unknown data 'mnist'"),
        ({"schedule": "linear"}, "schedule must be 'cosine' or 'constant', got 'linear'"),
        ({"accountant": "gdp"}, "accountant must be one of rdp, prv, got 'gdp'"),
        ({"holdout": -1}, "samples and holdout must be >= 0, got 0 and -1"),
        ({"method": "dp-ivon-gradsq", "samples": -1}, "samples and holdout must be >= 0, got -1"),
        ({"holdout": 5000}, "holdout must be below the 1438 training examples, got 5000"),
        ({"delta": 1e-3}, r"delta must be below 1 / n = 0.0007, got 0.001"),
        ({"seed": -1}, "seed must be >= 0, got -1"),
        ({"lr": 1e38}, r"lr must be 0, or between 1e-9 and 1e\+12 in size, got 1e\+38"),
        ({"weight_decay": 1e-30}, "weight_decay must be 0, or between 1e-9 and"),
    ],
)
def test_errors_name_value_and_remedy(digits, changes, message):
    with pytest.raises(ValueError, match=message):
        train.run(replace(SMALL, **changes), images=digits)


@pytest.mark.parametrize("method", ["sgd", "dp-sgd"])
def test_divergence_is_one_clear_error(digits, method):
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        train.run(train.Config(method=method, lr=1e12, weight_decay=1e9, epochs=5, seed=0), images=digits)


def test_the_documented_defaults_are_the_real_ones():
    text = " ".join(train.Config.__doc__.split())
    digits, tumors, cifar10 = (train.DEFAULTS[name] for name in ("digits", "tumors", "cifar10"))
    for part in (
        f"digits and tumors: {digits['model']}, cifar10: {cifar10['model']}.",
        f"example's gradient; {cifar10['max_grad_norm']:g}.",
        *(
            f"digits: {digits[name]}, tumors: {tumors[name]}, cifar10: {cifar10[name]}."
            for name in ("batch_size", "epochs")
        ),
    ):
        assert part in text
    assert digits["model"] == tumors["model"]
    assert {defaults["max_grad_norm"] for defaults in (digits, tumors, cifar10)} == {1.0}
    lr = methods.get("dp-sgd").lr
    assert f"dp-sgd on digits and tumors: {lr['digits']:g}, on cifar10: {lr['cifar10']:g}" in text
    assert train.resolve(train.Config(method="dp-sgd", data="tumors")).lr == lr["digits"]
    default = train.resolve(train.Config())
    assert (default.method, default.epsilon, default.samples) == ("dp-sgd-snapshots", 3, 16)


def test_a_statement_rounds_epsilon_up_and_says_when_there_is_none():
    arguments = {"max_grad_norm": 1.0, "batch_size": 100, "n": 10_000, "simulation": True}
    said = accounting.statement(1.1, 400, 1e-5, **arguments)
    assert float(str(said).split(",")[0][1:]) >= said.epsilon
    assert str(accounting.statement(0.0, 400, 1e-5, **arguments)).startswith("no differential privacy")
    large = accounting.statement(0.04, 100, 1e-5, **arguments)  # in the thousands
    assert large.epsilon > 1000
    assert large.epsilon <= float(str(large).split(",")[0][1:]) < large.epsilon + 0.0011


@pytest.mark.cifar10
def test_cifar10_learns_something_in_a_fraction_of_an_epoch(cifar10_root):
    config = train.Config(method="dp-sgd", data="cifar10", epsilon=3.0, epochs=0.5, batch_size=512, seed=0)
    record = train.run(config, root=cifar10_root)
    assert record["config"]["model"] == "lenet"
    assert record["privacy"]["sample_rate"] == 512 / 50_000
    assert record["results"]["mean"]["accuracy"] > 0.15


def test_a_start_far_below_the_noise_floor_is_pointed_out(digits):
    said = []
    loud = train.Config(method="dp-ivon-gradsq", epsilon=0.3, epochs=1, seed=0, hess_init=1e-3)
    record = train.run(loud, images=digits, report=said.append)
    (line,) = [line for line in said if "far below" in line]
    p = record["privacy"]
    floor = 0.4839 * p["n"] * (p["noise_multiplier"] * p["max_grad_norm"] / p["batch_size"]) ** 2
    assert float(line.split()[-1]) == pytest.approx(floor, rel=0.05)
    said.clear()
    train.run(replace(loud, hess_init=floor), images=digits, report=said.append)
    assert not [line for line in said if "far below" in line]


def test_the_scale_of_squared_gradients_is_a_setting(digits):
    small = train.Config(method="dp-ivon-gradsq", epochs=2, seed=0)
    trace = [
        train.run(replace(small, scale=scale), images=digits)["results"]["trace"][-1]["h_mean"]
        for scale in (None, float(digits.n), 256.0)
    ]
    assert trace[0] == trace[1] > trace[2]
    with pytest.raises(ValueError, match=r"'dp-ivon-price' does not read scale"):
        train.run(replace(small, method="dp-ivon-price", scale=2.0), images=digits)


def test_a_row_of_numbers_has_no_blur() -> None:
    with pytest.raises(ValueError, match=r"'tumors' has shape \(1, 1, 30\)"):
        train.run(train.Config(method="dp-sgd", data="tumors", epochs=1, seed=0), shifted=True)


def test_a_run_is_evaluated_under_shift_when_asked(digits):
    record = train.run(replace(SMALL, method="dp-ivon-gradsq", epsilon=3.0), images=digits, shifted=True)
    found = record["results"]["shift"]
    assert found["examples"] == len(digits.x_test)
    assert found["clean"]["accuracy"] > 0.1
    assert "digits" not in found["strangers"]
    ledger.validate(json.loads(json.dumps(record)))


def test_checkpoints_of_two_runs_are_told_apart_by_processes_that_resume(tmp_path, monkeypatch):
    """From the last steps of two runs, they would release another sum under the same noise."""
    states = []
    monkeypatch.setattr(processes, "same", lambda state: not states.append(state))
    config = train.Config(method="dp-laplace", noise_multiplier=3.0, epochs=0.5)
    for name in ("one", "one", "other", "other"):
        train.run(config, checkpoint_path=tmp_path / name)
    (fresh, one), (_, other) = states[:2], states[2:]
    assert fresh[0] == 0
    assert one[0] == other[0] > 0
    assert one != other
    train.run(config, checkpoint_path=tmp_path / "one")
    assert states[-1] == one
    monkeypatch.setattr(processes, "same", lambda state: False)
    with pytest.raises(ValueError, match="of different steps or runs"):
        train.run(config, checkpoint_path=tmp_path / "one")


def test_a_method_without_draws_takes_no_samples():
    with pytest.raises(ValueError, match="'dp-sgd' predicts by one network, so it takes no samples"):
        train.resolve(train.Config(method="dp-sgd", samples=4))
    assert train.resolve(train.Config(method="dp-sgd", samples=0)).samples == 0

"""What a private run releases is a function of its private gradients and of public numbers, for every method.

The gradients of one run are replayed into another, on other people, in other batches: weights, everything that the
optimizer keeps, files, the privacy statement and the predictions must come out equal.
"""

from dataclasses import replace

import pytest
import torch

from dpivon import data, mechanism, methods, predict, temperature, train
from dpivon.gradients import trainable

# What these release besides the gradients is computed from people, and accounted for; tests of their own replay it.
BESIDES = {"dp-laplace", "dp-sgd-tempered"}
NAMES = [name for name, method in methods.METHODS.items() if method.private and name not in BESIDES]


def released(now):
    """All tensors that a run leaves behind, the digests of its files, and its test predictions."""
    found = [p.detach().clone() for p in now.model.parameters()]
    for state in now.optimizer.state.values():
        found += tensors(state)
    torch.manual_seed(0)  # dropout's masks
    log_probs = predict.log_probs(now.model, DIGITS.x_test[:100], now.posterior(), 4)
    return found, dict(getattr(now.optimizer, "written", {})), now.statement(), log_probs


def tensors(value):
    """The tensors in nested containers, in the order of their names."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        return [t for name in sorted(value) for t in tensors(value[name])]
    return [t for part in value for t in tensors(part)] if isinstance(value, list | tuple) else []


DIGITS = data.digits()
OTHERS = replace(DIGITS, x_train=DIGITS.x_train.flip(0) * 0.5, y_train=(DIGITS.y_train + 3) % 10)


def check_replay(name, folders=None, leak=lambda now: None):
    """Train, and replay the private gradients into a run that sees other people; `leak` puts a mistake into both."""
    config = train.resolve(train.Config(method=name, epsilon=1.0, epochs=2, seed=0))
    first, second = train.Run(config, DIGITS), train.Run(config, OTHERS)
    second.sources["batches"].manual_seed(99)  # other batches, of other sizes
    for now, folder in zip((first, second), folders or (), strict=bool(folders)):
        now.optimizer.folder = str(folder)
    taken = []
    private = first.gradient

    def recorded(model, loss, x, y):
        diagnostics = private(model, loss, x, y)
        taken.append([p.grad.clone() for p in trainable(model).values()])
        return diagnostics

    def replayed(model, loss, x, y):
        for p, g in zip(trainable(model).values(), taken[second.step], strict=True):
            p.grad = g.clone()
        return mechanism.Diagnostics(7.0, 0.5, 1)

    first.gradient, second.gradient = recorded, replayed
    found = []
    for now in (first, second):
        leak(now)
        torch.manual_seed(0)
        train.train(now, None, lambda line: None)
        found.append(released(now))
    (some, files, statement, predictions), (others, other_files, other_statement, other_predictions) = found
    assert len(some) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
    assert files == other_files
    assert statement == other_statement
    assert statement.steps == len(taken) == first.steps
    assert torch.equal(predictions, other_predictions)
    return first


@pytest.mark.parametrize("name", NAMES)
def test_everything_released_follows_from_the_private_gradients(name):
    check_replay(name)


@pytest.mark.parametrize("name", ["dp-sgd-snapshots", "dp-ivon-snapshots", "dp-sgld"])
def test_so_do_the_iterates_in_files(name, tmp_path):
    folders = [tmp_path / "one", tmp_path / "another"]
    for folder in folders:
        folder.mkdir()
    assert check_replay(name, folders).optimizer.written
    # When each was written would tell how large the batches between them were.
    assert {file.stat().st_mtime for folder in folders for file in folder.iterdir()} == {0.0}


# ---- mistakes in what happens between and after the steps, each of which must be found


def with_diagnostics(now, act):
    """Hand each step's diagnostics, which no statement covers, and its batch's size, to `act` behind the step."""
    gradient, seen = now.gradient, []

    def spied(model, loss, x, y):
        diagnostics = gradient(model, loss, x, y)
        seen[:] = [diagnostics.loss, float(len(x))]
        return diagnostics

    now.gradient = spied
    now.optimizer.register_step_post_hook(lambda optimizer, *_: act(optimizer, *seen))


@torch.no_grad()
def iterates_weighted_by_the_loss(optimizer, loss, size):
    for state in optimizer.state.values():
        for memory in state.get("iterates", {}).values():
            memory["average"] *= 1 + 1e-3 * loss


@torch.no_grad()
def steps_scaled_by_the_batch(optimizer, loss, size):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p *= 1 + 1e-4 * size


@torch.no_grad()
def loss_added_to_a_kept_bias(optimizer, loss, size):
    for state in list(optimizer.state.values())[-1:]:
        for kept in state.get("snapshots", [])[-1:]:
            kept += 1e-3 * loss


def fewer_iterates_where_the_loss_is_high(optimizer, loss, size):
    for state in optimizer.state.values():
        if len(state.get("snapshots", [])) > 1 and loss > 5:
            state["snapshots"].pop()


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("dp-sgd-average", iterates_weighted_by_the_loss),
        ("dp-sgd-average", steps_scaled_by_the_batch),
        ("dp-sgd-snapshots", loss_added_to_a_kept_bias),
        ("dp-sgd-snapshots", fewer_iterates_where_the_loss_is_high),
        ("dp-adam-snapshots", loss_added_to_a_kept_bias),
        ("dp-ivon-snapshots", loss_added_to_a_kept_bias),
    ],
)
def test_what_looks_behind_the_mechanism_is_caught(name, mistake):
    with pytest.raises(AssertionError):
        check_replay(name, leak=lambda now: with_diagnostics(now, mistake))


def test_a_harmless_look_is_not_caught():
    """So that it is the mistake that the tests above find, and not the spying."""
    check_replay("dp-sgd-snapshots", leak=lambda now: with_diagnostics(now, lambda *_: None))


def test_a_temperature_of_averaged_weights_is_the_mechanisms():
    """Chosen once, on the people set aside, by the randomized choice, and not by its non-private best."""
    config = train.Config(method="dp-sgd-average", calibration=0.1, noise_multiplier=30.0, epochs=1, seed=0)
    kept, aside = train.set_aside(DIGITS, 0.1)
    now = train.Run(train.resolve(config), kept, calibration=aside)
    train.train(now, None, lambda line: None)
    log_probs = predict.log_probs(now.model, aside[0])
    chosen = temperature.private(log_probs, aside[1], now.statement().epsilon, train.source(0, "temperature"))
    assert now.temperature == chosen

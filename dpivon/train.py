"""One run: a configuration in, a recorded result out. One loop serves every method."""

import ctypes
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpivon import checkpoint, curvature, data, ledger, metrics, posterior, predict, processes, shift, snapshots
from dpivon.assignment import place

# So that all that makes a run has its name here too: train.Config, train.resolve, train.Run, train.train, ...
from dpivon.config import DEFAULTS as DEFAULTS
from dpivon.config import RECIPE as RECIPE
from dpivon.config import SETTINGS as SETTINGS
from dpivon.config import Config as Config
from dpivon.config import resolve as resolve
from dpivon.loop import train as train
from dpivon.methods import get, unchanged
from dpivon.state import Run as Run
from dpivon.state import layers_source as layers_source
from dpivon.state import source as source

# Of `assignment.place`, by which examples are set aside: a share is met to a thousandth.
PLACES = 1000


def run(
    config: Config,
    *,
    root: str | Path | None = None,
    ledger_path: str | Path | None = None,
    checkpoint_path: str | Path | None = None,
    export_path: str | Path | None = None,
    samples_path: str | Path | None = None,
    shifted: bool = False,
    device: str = "cpu",
    report: Callable[[str], None] | None = None,
    images: data.Images | None = None,
) -> dict[str, Any]:
    """Train, evaluate on the public test set, and return the ledger's record.

    For a private run without a seed the record has no `seconds`, `cpu_seconds` and `memory_mib` of the training, since
    they follow the sizes of the batches, which epsilon does not cover; see `ledger.tells_effort`.

    Parameters
    ----------
    config
        what to run.
    root
        where the data lies; see `data.load`.
    ledger_path
        append the record to this file.
    checkpoint_path
        resume from this file if it exists; save to it after each epoch. It is secret: it holds the
        generators' state.
    export_path
        write the posterior, with the privacy statement, to this file; see `posterior.load`.
    samples_path
        an empty folder, or that of the run that is resumed: a method that keeps iterates writes each into a file there,
        instead of holding all in memory; `snapshots.Stored` reads them.
    shifted
        evaluate on corrupted and on strange images too, by `shift.evaluate`; takes longer than training on the digits.
    device
        where to train: 'cpu', 'cuda', 'cuda:1', ...; all of the data is copied there.
    report
        called with lines for a person, some of them diagnostics that epsilon does not cover.
    images
        the data itself, instead of loading `config.data`.

    Raises
    ------
    ValueError
        a setting is out of range, the data cannot be read, or the checkpoint belongs to another run.
    FloatingPointError
        the weights diverged.

    Examples
    --------
    >>> from dpivon.train import Config, run
    >>> record = run(Config(epsilon=3, epochs=10, seed=0))
    >>> record["results"]["mean"]["accuracy"] > 0.6
    True
    >>> 2.98 < record["privacy"]["epsilon"] <= 3
    True
    >>> record["privacy"]["simulation"]  # since it has a seed
    True
    """
    config = resolve(config)
    say = report or (lambda line: None)
    gc.collect()  # an earlier run refers to itself through its schedule, and would keep its data until Python looks
    if images is not None and images.name != config.data:
        raise ValueError(
            f"the images are called {images.name!r} and config.data {config.data!r}, so the record would name other "
            "data; give both one name, with an entry in config.DEFAULTS"
        )
    images, aside = prepared(config, images if images is not None else load(config.data, root), device)
    if shifted and min(images.shape[1:]) < 8:  # a row of numbers has no blur
        raise ValueError(f"shifted needs images, {images.name!r} has shape {images.shape}; use 'digits' or 'cifar10'")
    for path in (ledger_path, checkpoint_path, export_path):
        check_writable(path)
    gpus = [images.x_train.device] if images.x_train.is_cuda else []
    with torch.random.fork_rng(devices=gpus):  # dropout draws from the global state; leave the caller's as it was
        now = Run(config, images, calibration=aside)
        now.statement()  # raises, before any training, where delta promises nothing
        if export_path is not None and get(config.method).network is not unchanged:
            raise ValueError(
                f"a posterior of {config.method!r} cannot be exported, since its network is another than "
                f"{config.model!r}; one of 'dp-bbp' can"
            )
        if samples_path is not None:
            keep_in(now, samples_path)
        warn_of_low_start(now, say)
        torch.manual_seed(now.sources["layers"].initial_seed())
        if checkpoint_path is not None:
            checkpoint_path = processes.own(str(checkpoint_path))
        resume(now, checkpoint_path, say)
        if samples_path is not None and now.step == 0 and any(Path(samples_path).glob("*.safetensors")):
            raise ValueError(f"{samples_path} holds iterates of another run; choose an empty folder, or remove them")
        begin, begin_cpu = time.perf_counter(), time.process_time()
        steps_before = now.step
        with peak_memory() as memory:
            finished = train(now, checkpoint_path, say)
            grown = memory()  # here, since evaluation takes memory too
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        told = ledger.tells_effort(asdict(config))
        if not told:
            say(f"[diagnostic, not covered by epsilon: {seconds:.0f} s of training]")
        begin = time.perf_counter()
        results = evaluate(now)
        cost = {
            "stored": stored(now),
            "memory_mib": grown if told else None,
            "cpu_seconds": round(cpu_seconds, 2) if told else None,  # of training: on a shared machine, the fairer one
            "predict_seconds": round(time.perf_counter() - begin, 3),
        }
        if shifted:
            results["shift"] = evaluate_shifted(now)
    statement = now.statement()
    privacy = None if statement is None else statement.record()
    if export_path is not None and processes.first():
        assert config.model is not None
        posterior.save(
            export_path, now.model, now.posterior(), architecture=config.model, shape=images.shape,
            classes=images.classes, privacy=privacy, temperature=now.temperature,
        )  # fmt: skip
    results |= {"trace": now.trace, "steps": now.step, "resumed_at": steps_before}
    record = entry(config, "finished" if finished else "interrupted", seconds, images.x_train.device)
    record |= {"privacy": privacy, "results": results, "cost": cost}
    if ledger_path is not None and processes.first():
        ledger.append(ledger_path, record)
    return record


def entry(config: Config, status: str, seconds: float, device: str | torch.device = "cpu") -> dict[str, Any]:
    """The ledger's record of a run, still without privacy and results."""
    surroundings = ledger.environment(device)
    surroundings["hardware"]["processes"] = processes.ranks()[1]
    return {
        "schema": ledger.SCHEMA,
        "recipe": RECIPE,
        "key": ledger.key(asdict(config), RECIPE),
        "status": status,
        "config": asdict(config),
        "privacy": None,
        "results": {},
        "code": ledger.code_state(),
        "seconds": round(seconds, 2) if ledger.tells_effort(asdict(config)) else None,
        **surroundings,
    }


def load(name: str, root: str | Path | None) -> data.Images:
    """As `data.load`, from a place that must exist: a mistake in typing would begin a download.

    Raises
    ------
    data.DataError
        it does not exist, or the data cannot be read.
    """
    if root is not None and not Path(root).exists():
        raise data.DataError(
            f"root {root} does not exist; create it to download into it, or give the place of the data"
        )
    return data.load(name, root)


def prepared(config: Config, images: data.Images, device: str) -> tuple[data.Images, tuple[Tensor, Tensor] | None]:
    """The data as the run sees them, on the device; and what is set aside to choose a temperature, or None."""
    images = images.to(device)
    if config.holdout >= images.n:
        raise ValueError(f"holdout must be below the {images.n} training examples, got {config.holdout}")
    if config.holdout:
        images = data.hold_out(images, config.holdout, seed=0)
    return (images, None) if config.calibration is None else set_aside(images, config.calibration)


def keep_in(now: Run, folder: str | Path) -> None:
    """Let the run keep its iterates in files of `folder`; all processes hold the same ones, and the first writes."""
    check_folder(folder)
    if not hasattr(now.optimizer, "folder") or now.config.samples == 0:
        raise ValueError(
            f"{now.config.method!r} keeps no iterates, so it takes no folder for them; 'dp-sgld' and "
            "'dp-sgd-snapshots' do"
        )
    if processes.first():
        now.optimizer.folder = str(folder)


def resume(now: Run, path: str | Path | None, say: Callable[[str], None]) -> None:
    """Go on from the checkpoint at `path`, if there is one; ValueError where that of another process is another."""
    if path is not None and Path(path).exists():
        now.load_state_dict(checkpoint.load(path))
    if not processes.same((now.step, now.sources["posterior"].get_state().numpy().tobytes())):  # one run's alone
        raise ValueError("the processes' checkpoints are of different steps or runs; delete them all, or restore a set")
    if now.step:
        say(f"resumed at step {now.step} of {now.steps}")


def set_aside(images: data.Images, share: float) -> tuple[data.Images, tuple[Tensor, Tensor]]:
    """The data without about `share` of the training examples, and these.

    An example's own pixels decide, by `assignment.place`, so adding one leaves all others where they are. Everybody is
    in one part only: what is learned from the two costs the larger of their epsilons (parallel composition). The sizes
    of both parts are taken as public, as N is. With N they tell in which part the last example is to who knows all
    others, and so a little of its pixels: more than N alone does.

    Raises
    ------
    ValueError
        one of the parts is empty.
    """
    aside = place(images.x_train, PLACES) >= (1 - share) * PLACES
    x, y = images.x_train, images.y_train
    if aside.all() or not aside.any():
        raise ValueError(f"calibration {share:g} leaves {int(aside.sum())} of {images.n} examples aside; change it")
    return replace(images, x_train=x[~aside], y_train=y[~aside]), (x[aside], y[aside])


def evaluate(now: Run) -> dict[str, Any]:
    """Metrics on the public test set: at the mean, and averaged over posterior draws when the run asks for them.

    Where a temperature was chosen they are those of the scaled predictions, and `untempered` has the ones before.
    """
    images, samples = now.images, now.config.samples
    if not all(p.isfinite().all() for p in now.model.parameters()):
        raise FloatingPointError("the weights are not finite: training diverged; lower the learning rate")
    assert samples is not None
    y = images.y_test.cpu()
    found = {"mean": predict.log_probs(now.model, images.x_test).cpu()}
    if samples:
        found["samples"] = predict.log_probs(now.model, images.x_test, now.posterior(), samples).cpu()
    results: dict[str, Any] = {name: metrics.evaluate(now.scaled(value), y) for name, value in found.items()}
    if now.temperature is not None:
        before = found["samples" if samples else "mean"]
        results |= {"temperature": now.temperature, "untempered": metrics.evaluate(before, y)}
    return results


def evaluate_shifted(now: Run) -> dict[str, Any]:
    """What `shift.evaluate` finds for the predictions that the run stands by."""
    device, samples = now.device, now.config.samples or 0
    return shift.evaluate(
        lambda x: now.scaled(predict.log_probs(now.model, x.to(device), now.posterior(), samples)).cpu(),
        now.images.to("cpu"),
    )


def stored(now: Run) -> int:
    """How many numbers prediction needs: the weights, with their variances or once for each kept iterate."""
    size = sum(p.numel() for p in now.model.parameters() if p.requires_grad)
    kept = [
        sum(t.numel() for t in state["snapshots"]) for state in now.optimizer.state.values() if "snapshots" in state
    ]
    known = now.posterior()
    if isinstance(known, snapshots.Stored):
        return size * len(known.files)
    variances = known.variance().values() if hasattr(known, "variance") else ()
    return sum(kept) or size + sum(v.numel() for v in variances)


@contextmanager
def peak_memory() -> Iterator[Callable[[], float | None]]:
    """By how many MiB the process has grown at most since the start of the context; None where Linux does not tell."""

    def status(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) / 1024 for line in lines if line.startswith(name))

    with suppress(OSError, AttributeError):  # hand freed memory back, or a process that once was large need not grow
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = status("VmRSS:")
    except (OSError, StopIteration):
        yield lambda: None
        return
    yield lambda: round(max(0.0, status("VmHWM:") - before), 1)


def warn_of_low_start(now: Run, say: Callable[[str], None]) -> None:
    """Say so when h starts far below where the noise alone carries it: steps and posterior will shrink on the way."""
    if getattr(now.optimizer, "curvature", None) != "noise-corrected":
        return
    floor = curvature.noise_floor(now.optimizer.param_groups[0])
    hess_init = now.config.hess_init
    assert hess_init is not None
    if hess_init < floor / 10:
        say(
            f"hess_init {hess_init:g} is far below {floor:.3g}, where privacy noise alone carries the curvature, and "
            f"steps and posterior will shrink on the way; try --hess-init {floor:.2g}"
        )


def check_writable(path: str | Path | None) -> None:
    """Raise OSError, before hours are spent, when `path` cannot be written."""
    if path is None:
        return
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise OSError(f"the folder {folder} does not exist; create it, or choose another place for {Path(path).name}")
    if Path(path).is_dir():
        raise OSError(f"{path} is a folder; choose a file in it")
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise OSError(f"{path} cannot be written; choose another place")


def check_folder(path: str | Path) -> None:
    """Raise OSError, before hours are spent, when no file can be written into the folder `path`."""
    if not Path(path).is_dir():
        what = "is no folder" if Path(path).exists() else "does not exist"
        raise OSError(f"the folder {path} for the iterates {what}; create it, or choose another one")
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(f"the folder {path} for the iterates cannot be written into; choose another one")

"""One run: a configuration in, a recorded result out. One loop serves every method."""

import hashlib
import inspect
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from dpivon import (
    accounting,
    adaptive,
    backprop,
    checkpoint,
    curvature,
    data,
    ledger,
    mechanism,
    metrics,
    models,
    posterior,
    predict,
    shift,
)
from dpivon.mechanism import Loss
from dpivon.methods import get

# Raise it when a change alters the numbers of a run: what was recorded under the old number is then stale.
RECIPE = 2

# What some methods read and others do not.
SETTINGS = (
    "beta1", "beta2", "weight_decay", "damping", "hess_init", "ess", "scale", "temperature", "prior_scale",
    "sigma_init", "dropout",
)  # fmt: skip

# What each data set uses where the configuration is silent. Chosen on public data; see chapter 2.
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "batch_size": 256, "epochs": 30, "max_grad_norm": 1.0},
    "cifar10": {"model": "lenet", "batch_size": 512, "epochs": 10, "max_grad_norm": 1.0},
}


@dataclass(frozen=True)
class Config:
    """Everything that determines the numbers of a run. A field left at None takes its data set's or method's default.

    Parameters
    ----------
    data
        'digits' (embedded in scikit-learn) or 'cifar10'.
    model
        'mlp', 'lenet' or 'tanh_cnn'; digits: mlp, cifar10: lenet.
    method
        a name in `methods.METHODS`; those that begin with 'dp-' are private.
    epsilon
        the budget, from which the noise multiplier follows; 3 where neither is given.
    noise_multiplier
        sigma_p itself, instead of a budget.
    delta
        delta_p, below one over the number of examples.
    accountant
        'rdp' or 'prv' (tighter).
    max_grad_norm
        C, the clipping norm of one example's gradient; digits and cifar10: 1.
    batch_size
        b, the expected batch size; each example joins a batch with probability q = b / N. digits: 256, cifar10: 512.
    epochs
        passes over the data, in expectation; T = round(epochs / q) steps. digits: 30, cifar10: 10.
    lr
        alpha, the learning rate at the first step; dp-sgd on digits: 2, on cifar10: 4 (see `methods` for the others).
    beta1
        decay of the normalized momentum.
    beta2
        decay of the second moment or of the curvature.
    schedule
        'cosine' to zero, or 'constant'.
    weight_decay
        strength of the Gaussian prior's term, added after the noise; delta_v of IVON.
    damping
        lambda, which keeps the preconditioner of Adam's relatives away from zero; where it is not given for dp-adambc,
        `adaptive.noise_floor` of the whole run.
    hess_init
        IVON's curvature h at the start.
    ess
        N_ess, IVON's effective sample size; N where it is not given.
    temperature
        tau of Langevin dynamics; 1 samples the posterior.
    prior_scale
        standard deviation of the Gaussian prior of Bayes by Backprop.
    sigma_init
        standard deviation of its weights at the start.
    dropout
        rate of dropout.
    samples
        posterior draws to average in prediction, besides the prediction at the mean; 0 for none.
    holdout
        evaluate on this many training examples, left out of training, instead of the test set (for tuning).
    seed
        makes the run a reproducible simulation; without one, noise and batches come from the system's entropy.
    """

    data: Literal["digits", "cifar10"] = "digits"
    model: Literal["mlp", "lenet", "tanh_cnn"] | None = None
    method: str = "dp-sgd"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    accountant: Literal["rdp", "prv"] = "rdp"
    max_grad_norm: float | None = None
    batch_size: int | None = None
    epochs: float | None = None
    lr: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: float | None = None
    damping: float | None = None
    hess_init: float | None = None
    ess: float | None = None
    scale: float | None = None
    temperature: float | None = None
    prior_scale: float | None = None
    sigma_init: float | None = None
    dropout: float | None = None
    samples: int | None = None
    holdout: int = 0
    seed: int | None = None


def resolve(config: Config) -> Config:
    """The same configuration with every default filled in, as it is recorded.

    Raises
    ------
    ValueError
        unknown names, or settings that exclude each other.
    """
    method = get(config.method)
    private = method.private
    if config.data not in DEFAULTS:
        raise ValueError(f"unknown data {config.data!r}; choose one of {', '.join(DEFAULTS)}")
    if not private and (config.epsilon is not None or config.noise_multiplier is not None):
        raise ValueError(f"{config.method!r} is not private, so it takes no epsilon or noise_multiplier; try 'dp-sgd'")
    if config.epsilon is not None and config.noise_multiplier is not None:
        raise ValueError("give epsilon or noise_multiplier, not both: one follows from the other")
    read = [name for name in (*method.settings, *method.network_settings) if name != "samples"]
    unread = [name for name in SETTINGS if name not in read and getattr(config, name) is not None]
    if unread:
        raise ValueError(f"{config.method!r} does not read {', '.join(unread)}; it reads {', '.join(read)}")
    defaults = {"samples": 0, **DEFAULTS[config.data], "lr": method.lr[config.data], **method.defaults}
    filled = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    if private and config.epsilon is None and config.noise_multiplier is None:
        filled["epsilon"] = 3.0
    config = replace(config, **filled)
    assert config.epochs is not None
    assert config.samples is not None
    if config.samples < 0 or config.holdout < 0:
        raise ValueError(f"samples and holdout must be >= 0, got {config.samples} and {config.holdout}")
    for name, largest in {"lr": 1e12, **dict.fromkeys(SETTINGS, 1e9)}.items():
        value = getattr(config, name)
        if value is not None and value != 0 and not 1e-9 <= abs(value) <= largest:  # products must fit into a float32
            raise ValueError(f"{name} must be 0, or between 1e-9 and {largest:g} in size, got {value}")
    if not 0 < config.epochs < math.inf:
        raise ValueError(f"epochs must be finite and > 0, got {config.epochs}")
    if config.seed is not None and config.seed < 0:
        raise ValueError(f"seed must be >= 0, got {config.seed}")
    return config


def source(seed: int | None, purpose: str) -> torch.Generator:
    """A random generator for one purpose, so that methods which share a seed share noise, batches and weights."""
    if seed is None:
        return mechanism.new_generator()
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return mechanism.new_generator(int.from_bytes(digest[:8], "big") >> 1)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, read between steps; a second one interrupts as usual."""
    pressed = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, previous)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield pressed.is_set
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


class Run:
    """The state of one run between two steps: all that a checkpoint must hold, and nothing else.

    Parameters
    ----------
    config
        resolved.
    images
        the data.
    model
        another network than the configuration names.
    loss
        another loss than the cross-entropy.

    Attributes
    ----------
    model, loss, optimizer, schedule, accountant, dp
        as the loop uses them; `dp` is None for a method that is not private.
    gradient
        ``gradient(model, loss, x, y)`` writes `p.grad`: the mechanism's, or the plain one.
    steps
        T.
    step
        how many are done.
    """

    def __init__(
        self, config: Config, images: data.Images, model: nn.Module | None = None, loss: Loss = F.cross_entropy
    ) -> None:
        assert config.model is not None
        assert config.batch_size is not None
        assert config.epochs is not None
        assert config.lr is not None
        assert config.max_grad_norm is not None
        method = get(config.method)
        self.config, self.images, self.step = config, images, 0
        mechanism.check_batch_size(config.batch_size, images.n)
        self.steps = max(1, round(config.epochs * images.n / config.batch_size))
        purposes = ("weights", "batches", "noise", "layers", "posterior")
        self.sources = {name: source(config.seed, name) for name in purposes}
        weights = self.sources["weights"].initial_seed()
        self.model = model or models.build(config.model, images.shape, images.classes, weights)
        self.model = method.network(self.model, **{name: getattr(config, name) for name in method.network_settings})
        self.loss = loss
        settings = {name: getattr(config, name) for name in method.settings}
        if "ess" in settings and config.ess is None:
            settings["ess"] = float(images.n)
        given = {name: value for name, value in settings.items() if value is not None}
        if "steps" in inspect.signature(method.optimizer).parameters:
            given["steps"] = self.steps
        self.optimizer = method.optimizer(self.model.parameters(), lr=config.lr, **given)
        self.optimizer.generator = self.sources["posterior"]  # where a method draws, it draws from here
        self.trace: list[dict[str, float]] = []
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.lr_factor)
        self.accountant = accounting.new_accountant(config.accountant)
        self.dp = None
        self.gradient: Callable[..., mechanism.Diagnostics] = mechanism.plain_gradient
        self.noise_multiplier = config.noise_multiplier
        if method.private:
            if config.epsilon is not None:
                q = config.batch_size / images.n
                self.noise_multiplier = accounting.noise_for(
                    config.epsilon, q, self.steps, config.delta, config.accountant
                )
            assert self.noise_multiplier is not None
            self.dp = mechanism.mechanism(
                self.optimizer,
                noise_multiplier=self.noise_multiplier,
                max_grad_norm=config.max_grad_norm,
                batch_size=config.batch_size,
                n=images.n,
                accountant=self.accountant,
                generator=self.sources["noise"],
            )
            self.gradient = partial(mechanism.private_gradient, dp=self.dp)
        for group in self.optimizer.param_groups:
            if self.dp is None:
                group["noise_std"] = 0.0
            if settings.get("damping", 0) is None:
                group["damping"] = max(adaptive.noise_floor(group["noise_std"], self.steps, group["beta2"]), 1e-8)

    def posterior(self) -> Any:
        """What prediction draws the weights from, by its `sampled_params()`."""
        return get(self.config.method).posterior(self.model, self.optimizer)

    def batches(self) -> Iterator[Tensor]:
        """Poisson batches for the steps that are left."""
        assert self.config.batch_size is not None
        left = self.steps - self.step
        return mechanism.poisson_batches(self.images.n, self.config.batch_size, left, self.sources["batches"])

    def lr_factor(self, step: int) -> float:
        """The learning rate's factor at a step: a half cosine from 1 to 0, or 1."""
        return 1.0 if self.config.schedule == "constant" else 0.5 * (1 + math.cos(math.pi * step / self.steps))

    def epoch(self, step: int) -> float:
        """How many passes over the data, in expectation, `step` steps make."""
        assert self.config.batch_size is not None
        return step * self.config.batch_size / self.images.n

    def statement(self) -> accounting.PrivacyStatement | None:
        """The privacy statement of the steps done so far; None for a method that is not private."""
        config = self.config
        if self.dp is None:
            return None
        assert self.noise_multiplier is not None
        assert config.max_grad_norm is not None
        assert config.batch_size is not None
        return accounting.statement(
            self.noise_multiplier,
            self.step,
            config.delta,
            max_grad_norm=config.max_grad_norm,
            batch_size=config.batch_size,
            n=self.images.n,
            accountant=config.accountant,
            simulation=config.seed is not None,
            holdout=config.holdout,
        )

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values only, so that loading executes no code."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "history": [list(entry) for entry in self.accountant.history],
            "sources": {name: generator.get_state() for name, generator in self.sources.items()},
            "layers": torch.get_rng_state(),
            "trace": self.trace,
            "identity": self.identity(),
        }

    def identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run; so must the hardware, to the last bit."""
        return {
            "config": asdict(self.config),
            "recipe": RECIPE,
            "data": self.images.fingerprint,
            "noise_multiplier": self.noise_multiplier,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A different configuration or data set would be a new release with replayed noise.

        Raises
        ------
        ValueError
            the state belongs to another run.
        """
        here, there = self.identity(), state["identity"]
        differing = [name for name in here if here[name] != there.get(name)]
        if "config" in differing:
            differing += [f"config.{k}" for k, v in here["config"].items() if v != there["config"].get(k, v)]
        if differing:
            raise ValueError(
                f"the checkpoint belongs to another run ({', '.join(differing)} differ); resuming would replay its "
                "noise on something else and break the guarantee: use another file, or the run's own settings"
            )
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.accountant.history = [tuple(entry) for entry in state["history"]]
        for name, saved in state["sources"].items():
            self.sources[name].set_state(saved)
        torch.set_rng_state(state["layers"])
        self.trace = state["trace"]


def run(
    config: Config,
    *,
    root: str | Path | None = None,
    ledger_path: str | Path | None = None,
    checkpoint_path: str | Path | None = None,
    export_path: str | Path | None = None,
    shifted: bool = False,
    report: Callable[[str], None] | None = None,
    images: data.Images | None = None,
) -> dict[str, Any]:
    """Train, evaluate on the public test set, and return the ledger's record.

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
    shifted
        evaluate on corrupted and on strange images too, by `shift.evaluate`; takes longer than training on the digits.
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
    """
    config = resolve(config)
    say = report or (lambda line: None)
    if root is not None and not Path(root).exists():
        raise ValueError(f"root {root} does not exist; create it to download into it, or give the place of the data")
    images = images if images is not None else data.load(config.data, root)
    if config.holdout >= images.n:
        raise ValueError(f"holdout must be below the {images.n} training examples, got {config.holdout}")
    if config.holdout:
        images = data.hold_out(images, config.holdout, seed=0)
    for path in (ledger_path, checkpoint_path, export_path):
        check_writable(path)
    with torch.random.fork_rng(devices=[]):  # dropout draws from the global state; leave the caller's as it was
        now = Run(config, images)
        now.statement()  # raises, before any training, where delta promises nothing
        if export_path is not None and isinstance(now.model, backprop.Reparameterized):
            raise ValueError(f"a posterior of {config.method!r} cannot be exported; one of 'dp-bbp' can")
        if config.method == "dp-ivon-gradsq":
            warn_of_low_start(now, say)
        torch.manual_seed(now.sources["layers"].initial_seed())
        if checkpoint_path is not None and Path(checkpoint_path).exists():
            now.load_state_dict(checkpoint.load(checkpoint_path))
            say(f"resumed at step {now.step} of {now.steps}")
        begin, begin_cpu = time.perf_counter(), time.process_time()
        steps_before = now.step
        finished = train(now, checkpoint_path, say)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        begin = time.perf_counter()
        results = evaluate(now)
        cost = {
            "stored": stored(now),
            "cpu_seconds": round(cpu_seconds, 2),  # of training: on a shared machine, the fairer number
            "predict_seconds": round(time.perf_counter() - begin, 3),
        }
        if shifted:
            results["shift"] = shift.evaluate(
                lambda x: predict.log_probs(now.model, x, now.posterior(), config.samples or 0), images
            )
    privacy = now.statement()
    if export_path is not None:
        assert config.model is not None
        posterior.save(
            export_path, now.model, now.optimizer, architecture=config.model, shape=images.shape,
            classes=images.classes, privacy=None if privacy is None else privacy.record(),
        )  # fmt: skip
    record = {
        "schema": ledger.SCHEMA,
        "recipe": RECIPE,
        "key": ledger.key(asdict(config), RECIPE),
        "status": "finished" if finished else "interrupted",
        "config": asdict(config),
        "privacy": None if privacy is None else privacy.record(),
        "results": {**results, "trace": now.trace, "steps": now.step, "resumed_at": steps_before},
        "code": ledger.code_state(),
        "seconds": round(seconds, 2),
        "cost": cost,
        **ledger.environment(),
    }
    if ledger_path is not None:
        ledger.append(ledger_path, record)
    return record


def warn_of_low_start(now: Run, say: Callable[[str], None]) -> None:
    """Say so when h starts far below where the noise alone carries it: steps and posterior will shrink on the way."""
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
    if not os.access(path if Path(path).exists() else folder, os.W_OK):
        raise OSError(f"{path} cannot be written; choose another place")


def train(now: Run, checkpoint_path: str | Path | None, say: Callable[[str], None]) -> bool:
    """The loop: from `now.step` to `now.steps`, or to Ctrl-C. True when it reached the end."""
    config, images = now.config, now.images
    assert config.batch_size
    now.model.train()
    seen, losses, begin = 0, 0.0, time.perf_counter()
    with interruptible() as interrupted, tqdm(total=now.steps, initial=now.step, disable=None, leave=False) as bar:
        for index in now.batches():
            with now.optimizer.sampled_params():
                diagnostics = now.gradient(now.model, now.loss, images.x_train[index], images.y_train[index])
            now.optimizer.step()
            now.schedule.step()
            now.step += 1
            bar.update()
            seen, losses = seen + 1, losses + diagnostics.loss
            stop = interrupted()  # read once: what ends the run must also save it
            last = now.step == now.steps or stop
            if int(now.epoch(now.step)) > int(now.epoch(now.step - 1)) or last:
                now.trace += curvature_trace(now)
                if checkpoint_path is not None:
                    checkpoint.save(checkpoint_path, now.state_dict())
                speed = seen * config.batch_size / (time.perf_counter() - begin)
                spent = "" if now.dp is None else f"  epsilon {accounting.spent(now.accountant, config.delta):.3f}"
                with tqdm.external_write_mode():
                    say(
                        f"epoch {now.epoch(now.step):5.1f}  {speed:,.0f} images/s{spent}"
                        f"  [diagnostic, not covered by epsilon: training loss {losses / seen:.3f}]"
                    )
                seen, losses, begin = 0, 0.0, time.perf_counter()
            if stop:
                break
    return now.step == now.steps


def stored(now: Run) -> int:
    """How many numbers prediction needs: the weights, with their variances or once for each kept iterate."""
    size = sum(p.numel() for p in now.model.parameters() if p.requires_grad)
    kept = [state["samples"].numel() for state in now.optimizer.state.values() if "samples" in state]
    return sum(kept) or size * (2 if hasattr(now.optimizer, "variance") else 1)


def curvature_trace(now: Run) -> list[dict[str, float]]:
    """What the curvature and the last private gradient say at this step; empty for a method without curvature.

    `zero_fraction` is the share of coordinates whose square is below the noise's variance, so that the paper's estimate
    is zero; `effective_step` is the gradient's median factor in a step, before the schedule. All post-processing.
    """
    pairs = [(p, state["h"]) for p, state in now.optimizer.state.items() if "h" in state]
    if not pairs:
        return []
    group = now.optimizer.param_groups[0]
    h = torch.cat([h.flatten() for _, h in pairs])
    g = torch.cat([p.grad.flatten() for p, _ in pairs])
    assert now.config.lr is not None
    return [
        {
            "step": now.step,
            "zero_fraction": float((g.square() <= group["noise_std"] ** 2).double().mean()),
            "h_mean": float(h.mean()),
            "h_median": float(h.median()),
            "effective_step": now.config.lr
            * (group["hess_init"] + group["weight_decay"])
            / (float(h.median()) + group["weight_decay"]),
        }
    ]


def evaluate(now: Run) -> dict[str, Any]:
    """Metrics on the public test set: at the mean, and averaged over posterior draws when the run asks for them."""
    images, samples = now.images, now.config.samples
    if not all(p.isfinite().all() for p in now.model.parameters()):
        raise FloatingPointError("the weights are not finite: training diverged; lower the learning rate")
    assert samples is not None
    results = {"mean": metrics.evaluate(predict.log_probs(now.model, images.x_test), images.y_test)}
    if samples:
        averaged = predict.log_probs(now.model, images.x_test, now.posterior(), samples)
        results["samples"] = metrics.evaluate(averaged, images.y_test)
    return results

"""One run: a configuration in, a recorded result out. One loop serves every method."""

import ctypes
import gc
import hashlib
import inspect
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
    checkpoint,
    curvature,
    data,
    langevin,
    laplace,
    ledger,
    mechanism,
    metrics,
    models,
    posterior,
    predict,
    processes,
    shift,
    temperature,
)
from dpivon.assignment import place
from dpivon.mechanism import Loss
from dpivon.methods import get, unchanged

# Raise it when a change alters the numbers of a run: what was recorded under the old number is then stale.
RECIPE = 2

# What some methods read and others do not.
SETTINGS = (
    "beta1", "beta2", "weight_decay", "damping", "hess_init", "ess", "scale", "temperature", "prior_scale",
    "sigma_init", "dropout", "members",
)  # fmt: skip

# Of `assignment.place`, by which examples are set aside: a share is met to a thousandth.
PLACES = 1000

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
        'cosine' to zero, or 'constant'; cosine, but constant for averages of iterates.
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
    members
        M, the networks of an ensemble.
    samples
        posterior draws to average in prediction, besides the prediction at the mean; 0 for none.
    calibration
        share of the training examples that training leaves out, to choose a temperature for the predictions after it,
        in (0, 1); an example's pixels decide (see `assignment.place`). None leaves the predictions as they are.
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
    schedule: Literal["cosine", "constant"] | None = None
    weight_decay: float | None = None
    damping: float | None = None
    hess_init: float | None = None
    ess: float | None = None
    scale: float | None = None
    temperature: float | None = None
    prior_scale: float | None = None
    sigma_init: float | None = None
    dropout: float | None = None
    members: int | None = None
    samples: int | None = None
    calibration: float | None = None
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
    defaults = {
        "samples": 0,
        "schedule": "cosine",
        **DEFAULTS[config.data],
        "lr": method.lr[config.data],
        **method.defaults,
    }
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
    if config.calibration is not None and not 0 < config.calibration < 1:
        raise ValueError(f"calibration must be between 0 and 1, a share of the examples, got {config.calibration}")
    if config.seed is not None and config.seed < 0:
        raise ValueError(f"seed must be >= 0, got {config.seed}")
    return config


def source(seed: int | None, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator for one purpose, so that methods which share a seed share noise, batches and weights."""
    if seed is None:
        return mechanism.new_generator(device=device)
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return mechanism.new_generator(int.from_bytes(digest[:8], "big") >> 1, device)


def layers_source(device: torch.device) -> torch.Generator:
    """The global generator that layers on the device draw from, such as dropout."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]


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
        another loss of the network than the cross-entropy.
    calibration
        examples that are not in `images`, to choose a temperature on after the last step.

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
    besides
        what else the accountant has counted, each (sigma_p, q, T).
    temperature
        of the predictions; None before it is chosen.
    """

    def __init__(
        self,
        config: Config,
        images: data.Images,
        model: nn.Module | None = None,
        loss: Loss = F.cross_entropy,
        calibration: tuple[Tensor, Tensor] | None = None,
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
        self.device = device = images.x_train.device  # training happens where the data lies
        if processes.ranks()[1] > 1 and not method.private:
            raise ValueError(
                f"only the mechanism adds up the gradients of several processes; {config.method!r} has none"
            )
        self.sources = {name: source(config.seed, processes.own(name)) for name in ("batches", "layers")}
        self.sources |= {"weights": processes.share(source(config.seed, "weights"))}
        self.sources |= {name: processes.share(source(config.seed, name, device)) for name in ("noise", "posterior")}
        self.calibration, self.concluded = calibration, False
        self.temperature: float | None = None
        self.temperature_epsilon = 0.0
        if calibration is not None:
            self.sources["temperature"] = processes.share(source(config.seed, "temperature", device))
        weights = self.sources["weights"].initial_seed()
        self.model = model or models.build(config.model, images.shape, images.classes, weights)
        self.model = method.network(self.model, **{name: getattr(config, name) for name in method.network_settings})
        self.model.to(device)
        self.loss = method.loss(loss)
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
        self.besides: list[accounting.Event] = []
        self.planned: list[accounting.Event] = []
        if method.private:
            q, promise = config.batch_size / images.n, (config.delta, config.accountant)
            if method.probe is not None:
                self.planned = [(self.probe_noise(q), 1.0, 1)]
            if config.epsilon is not None:
                self.noise_multiplier = accounting.noise_for(config.epsilon, q, self.steps, *promise, self.planned)
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

    def probe_noise(self, sample_rate: float) -> float:
        """The noise multiplier of the release after training, for a tenth of the budget, see `laplace.sigma`."""
        config, budget = self.config, self.config.epsilon
        promise = (config.delta, config.accountant)
        if budget is None:
            assert config.noise_multiplier is not None
            budget = accounting.epsilon(config.noise_multiplier, sample_rate, self.steps, *promise)
        return 0.0 if budget == math.inf else laplace.sigma(accounting.noise_for(budget, 1.0, 1, *promise))

    def conclude(self) -> None:
        """Release, once, what a method needs besides the weights: the gradient of its probe, and a temperature.

        Only after the last step, since a second release would not be counted; a resumed run repeats the same one.
        """
        if self.concluded:
            return
        self.concluded = True
        method, n, clip = get(self.config.method), self.images.n, self.config.max_grad_norm
        assert clip is not None
        if method.probe is not None:
            probe = method.probe(self.model)
            private = self.dp is not None
            dp = mechanism.mechanism(
                torch.optim.SGD([probe.v], lr=1.0),
                noise_multiplier=self.planned[0][0] if private else 0.0,
                max_grad_norm=clip if private else 1e9,  # which clips nothing
                batch_size=n,
                n=n,
                accountant=self.accountant if private else None,
                generator=self.sources["noise"],
            )
            (everyone,) = mechanism.poisson_batches(n, n, 1, self.sources["batches"])  # this process's part, q = 1
            part = everyone if len(everyone) < n else slice(None)  # a slice copies nothing
            x, y = self.images.x_train[part], self.images.y_train[part]
            mechanism.private_gradient(probe, laplace.mean_product, x, y, dp)
            self.posterior().learn(probe)
            self.besides = self.planned
        if self.calibration is not None:
            inputs, y = self.calibration
            log_probs = predict.log_probs(self.model, inputs, self.posterior(), self.config.samples or 0)
            privacy = self.statement()
            if privacy is None:
                self.temperature = temperature.best(log_probs, y)
            else:
                self.temperature_epsilon = min(max(privacy.epsilon, 1e-6), 1e6)  # so much noise may round it to 0
                self.temperature = temperature.private(
                    log_probs, y, self.temperature_epsilon, self.sources["temperature"]
                )

    def scaled(self, log_probs: Tensor) -> Tensor:
        """The predictions at the run's temperature, if it has one."""
        return log_probs if self.temperature is None else temperature.scaled(log_probs, self.temperature)

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
            besides=self.besides,
            set_aside=0 if self.calibration is None or self.temperature is None else len(self.calibration[1]),
            temperature_epsilon=self.temperature_epsilon,
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
            "layers": layers_source(self.device).get_state(),
            "trace": self.trace,
            "concluded": self.concluded,
            "temperature": self.temperature,
            "temperature_epsilon": self.temperature_epsilon,
            **({"iterates": self.optimizer.written} if getattr(self.optimizer, "folder", None) else {}),
            "identity": self.identity(),
        }

    def identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run; so must the hardware, to the last bit."""
        aside = [hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest() for t in self.calibration or ()]
        return {
            **({"set aside": aside} if aside else {}),
            **({"iterates": "in a folder"} if getattr(self.optimizer, "folder", None) else {}),
            "config": asdict(self.config),
            "recipe": RECIPE,
            "data": self.images.fingerprint,
            "noise_multiplier": self.noise_multiplier,
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "device": self.device.type,
            "processes": mechanism.ranks()[1],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`. A different configuration or data set would be a new release with replayed noise.

        Raises
        ------
        ValueError
            the state belongs to another run.
        """
        here, there = self.identity(), state["identity"]
        differing = [name for name in {**here, **there} if here.get(name) != there.get(name)]
        if "config" in differing:
            differing += [f"config.{k}" for k, v in here["config"].items() if v != there["config"].get(k, v)]
        if differing:
            raise ValueError(
                f"the checkpoint belongs to another run ({', '.join(differing)} differ); resuming would replay its "
                "noise on something else and break the guarantee: use another file, or the run's own settings"
            )
        if "iterates" in state:
            langevin.take_up(self.optimizer, state["iterates"])
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.accountant.history = [tuple(entry) for entry in state["history"]]
        for name, saved in state["sources"].items():
            self.sources[name].set_state(saved)
        layers_source(self.device).set_state(state["layers"])
        self.trace = state["trace"]
        self.concluded = state.get("concluded", False)  # then what it releases is in the state already
        self.besides = self.planned if self.concluded else []
        self.temperature = state.get("temperature")
        self.temperature_epsilon = state.get("temperature_epsilon", 0.0)


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
        an empty folder, or that of the run that is resumed: Langevin dynamics writes each iterate that it keeps into a
        file there, instead of holding all in memory; `langevin.Stored` reads them.
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
    """
    config = resolve(config)
    say = report or (lambda line: None)
    gc.collect()  # an earlier run refers to itself through its schedule, and would keep its data until Python looks
    if root is not None and not Path(root).exists():
        raise ValueError(f"root {root} does not exist; create it to download into it, or give the place of the data")
    images = (images if images is not None else data.load(config.data, root)).to(device)
    if config.holdout >= images.n:
        raise ValueError(f"holdout must be below the {images.n} training examples, got {config.holdout}")
    if config.holdout:
        images = data.hold_out(images, config.holdout, seed=0)
    for path in (ledger_path, checkpoint_path, export_path):
        check_writable(path)
    if samples_path is not None:
        check_writable(Path(samples_path) / "iterate.safetensors")
    aside = None
    if config.calibration is not None:
        images, aside = set_aside(images, config.calibration)
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
            if not isinstance(now.optimizer, langevin.SGLD):
                raise ValueError(f"{config.method!r} keeps no iterates, so it takes no folder for them; 'dp-sgld' does")
            if mechanism.ranks()[0] == 0:  # all processes hold the same iterates
                now.optimizer.folder = str(samples_path)
        if config.method == "dp-ivon-gradsq":
            warn_of_low_start(now, say)
        torch.manual_seed(now.sources["layers"].initial_seed())
        if checkpoint_path is not None and not processes.first():
            checkpoint_path = processes.own(str(checkpoint_path))
        if checkpoint_path is not None and Path(checkpoint_path).exists():
            now.load_state_dict(checkpoint.load(checkpoint_path))
        if not processes.same((now.step, now.sources["posterior"].get_state().numpy().tobytes())):  # one run's alone
            raise ValueError(
                "the processes' checkpoints are of different steps or runs; delete them all, or restore a set"
            )
        if now.step:
            say(f"resumed at step {now.step} of {now.steps}")
        if samples_path is not None and now.step == 0 and any(Path(samples_path).glob("*.safetensors")):
            raise ValueError(f"{samples_path} holds iterates of another run; choose an empty folder, or remove them")
        begin, begin_cpu = time.perf_counter(), time.process_time()
        steps_before = now.step
        with peak_memory() as memory:
            finished = train(now, checkpoint_path, say)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        begin = time.perf_counter()
        results = evaluate(now)
        cost = {
            "stored": stored(now),
            "memory_mib": memory(),
            "cpu_seconds": round(cpu_seconds, 2),  # of training: on a shared machine, the fairer number
            "predict_seconds": round(time.perf_counter() - begin, 3),
        }
        if shifted:
            samples = config.samples or 0
            results["shift"] = shift.evaluate(
                lambda x: now.scaled(predict.log_probs(now.model, x.to(device), now.posterior(), samples)).cpu(),
                images.to("cpu"),
            )
    privacy = now.statement()
    if export_path is not None and processes.first():
        assert config.model is not None
        posterior.save(
            export_path, now.model, now.posterior(), architecture=config.model, shape=images.shape,
            classes=images.classes, privacy=None if privacy is None else privacy.record(),
            temperature=now.temperature or 1.0,
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
    record["hardware"]["processes"] = mechanism.ranks()[1]
    if ledger_path is not None and processes.first():
        ledger.append(ledger_path, record)
    return record


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
    hidden = None if processes.first() else True  # None: where there is no terminal
    with interruptible() as interrupted, tqdm(total=now.steps, initial=now.step, disable=hidden, leave=False) as bar:
        for index in now.batches():
            with now.optimizer.sampled_params():
                diagnostics = now.gradient(now.model, now.loss, images.x_train[index], images.y_train[index])
            now.optimizer.step()
            now.schedule.step()
            now.step += 1
            bar.update()
            seen, losses = seen + 1, losses + diagnostics.loss
            stop = processes.any_of(interrupted())  # read once: what ends the run must also save it
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
    if now.step < now.steps:
        return False
    now.conclude()
    return True


def stored(now: Run) -> int:
    """How many numbers prediction needs: the weights, with their variances or once for each kept iterate."""
    size = sum(p.numel() for p in now.model.parameters() if p.requires_grad)
    kept = [state["samples"].numel() for state in now.optimizer.state.values() if "samples" in state]
    known = now.posterior()
    if isinstance(known, langevin.Stored):
        return size * len(known.files)
    variances = known.variance().values() if hasattr(known, "variance") else ()
    return sum(kept) or size + sum(v.numel() for v in variances)


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

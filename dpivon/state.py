"""The state of a run between two steps: what its loop goes on from, what a checkpoint holds, and what it promises."""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpivon import accounting, adaptive, data, laplace, mechanism, models, predict, processes, snapshots, temperature
from dpivon.config import RECIPE, Config
from dpivon.mechanism import Loss
from dpivon.methods import get


def source(seed: int | None, purpose: str, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator for one purpose, so that methods which share a seed share noise, batches and weights."""
    if seed is None:
        return mechanism.new_generator(device=device)
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return mechanism.new_generator(int.from_bytes(digest[:8], "big") >> 1, device)


def layers_source(device: torch.device) -> torch.Generator:
    """The global generator that layers on the device draw from, such as dropout."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]


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
        self.noise_multiplier = config.noise_multiplier
        self.besides: list[accounting.Event] = []
        self.planned: list[accounting.Event] = []
        self.dp = self.training_mechanism() if method.private else None
        self.gradient: Callable[..., mechanism.Diagnostics] = (
            mechanism.plain_gradient if self.dp is None else partial(mechanism.private_gradient, dp=self.dp)
        )
        for group in self.optimizer.param_groups:
            if self.dp is None:
                group["noise_std"] = 0.0
            if settings.get("damping", 0) is None:
                group["damping"] = max(adaptive.noise_floor(group["noise_std"], self.steps, group["beta2"]), 1e-8)

    def training_mechanism(self) -> mechanism.DPOptimizerFastGradientClipping:
        """The mechanism of the training steps, with the noise that the budget leaves for them."""
        config, n = self.config, self.images.n
        assert config.batch_size is not None
        assert config.max_grad_norm is not None
        q = config.batch_size / n
        if get(config.method).probe is not None:
            self.planned = [(self.probe_noise(q), 1.0, 1)]
        if config.epsilon is not None:
            promise = (config.delta, config.accountant)
            self.noise_multiplier = accounting.noise_for(config.epsilon, q, self.steps, *promise, self.planned)
        assert self.noise_multiplier is not None
        return mechanism.mechanism(
            self.optimizer, noise_multiplier=self.noise_multiplier, max_grad_norm=config.max_grad_norm,
            batch_size=config.batch_size, n=n, accountant=self.accountant, generator=self.sources["noise"],
        )  # fmt: skip

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
        method = get(self.config.method)
        if method.probe is not None:
            self.learn(method.probe(self.model))
        if self.calibration is not None:
            self.choose_temperature(*self.calibration)

    def learn(self, probe: Any) -> None:
        """Release the gradient of the probe over all examples, and let the posterior learn from it."""
        n, clip, private = self.images.n, self.config.max_grad_norm, self.dp is not None
        assert clip is not None
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

    def choose_temperature(self, x: Tensor, y: Tensor) -> None:
        """Choose it on examples that were set aside, for as much epsilon as training has cost the others."""
        log_probs = predict.log_probs(self.model, x, self.posterior(), self.config.samples or 0)
        privacy = self.statement()
        if privacy is None:
            self.temperature = temperature.best(log_probs, y)
            return
        self.temperature_epsilon = min(max(privacy.epsilon, 1e-6), 1e6)  # so much noise may round it to 0
        self.temperature = temperature.private(log_probs, y, self.temperature_epsilon, self.sources["temperature"])

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
            "processes": processes.ranks()[1],
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
            snapshots.take_up(self.optimizer, state["iterates"])
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

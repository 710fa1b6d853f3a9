"""A posterior as one file that may be published: what predicts, the architecture and the privacy statement, no more.

No generator's state, momentum or curvature goes in, and reading it executes no code and needs no training data. The
network's buffers do go in, as they are: a mean of the training data that somebody put there would be published.
"""

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dpivon import checkpoint, models, predict, snapshots
from dpivon.temperature import scaled
from dpivon.weights import held, normal_like

# The one key of the metadata: with two, their order would be by chance. Who knows the first form alone would take
# the mean of a file with iterates for all of it.
GAUSSIAN, ITERATES = "dpivon-posterior-1", "dpivon-posterior-2"


@dataclass
class Posterior:
    """A distribution over the weights of a network, to predict with: a Gaussian, or the iterates of one run.

    .. math:: q(\\theta) = \\mathcal N(m, \\operatorname{diag}(\\sigma_v^2)) \\quad \\text{or} \\quad
        q(\\theta) = \\frac1K \\sum_{k=1}^K \\delta(\\theta - \\theta_k)

    Parameters
    ----------
    model
        holds the mean m, in evaluation mode.
    variance
        sigma_v^2 by parameter name; empty for a method that learns the mean alone, or keeps iterates.
    architecture, shape, classes
        what `models.build` makes of them is `model`, unless the architecture is one of the user's own.
    privacy
        the privacy statement of the training run, as it is recorded; None where there is none.
    generator
        source of the draws; None is torch's global one.
    temperature
        by which predictions are scaled, see `temperature.scaled`.
    iterates
        theta_1 to theta_K, each by parameter name; empty for a Gaussian.
    """

    model: nn.Module
    variance: dict[str, Tensor]
    architecture: str
    shape: tuple[int, ...]
    classes: int
    privacy: dict[str, Any] | None = None
    generator: torch.Generator | None = None
    temperature: float = 1.0
    iterates: list[dict[str, Tensor]] = field(default_factory=list)
    next: int = field(default=0, init=False)

    def draw(self) -> dict[str, Tensor]:
        """Weights by name: the next of the iterates, round and round, or a draw from the Gaussian."""
        if self.iterates:
            self.next += 1
            return self.iterates[(self.next - 1) % len(self.iterates)]
        means, drawn = dict(self.model.named_parameters()), {}
        for name, v in self.variance.items():
            drawn[name] = torch.addcmul(means[name].detach(), v.sqrt(), normal_like(v, self.generator))
        return drawn

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the weights are a draw from the posterior; after, the mean again."""
        parameters, drawn = dict(self.model.named_parameters()), self.draw()
        with held([parameters[name] for name in drawn], list(drawn.values())):
            yield

    def log_probs(self, x: Tensor, samples: int | None = None) -> Tensor:
        """Log probabilities (n, classes) for inputs (n, ...), averaged over `samples` draws; 0 is at the mean.

        None is every iterate once, or 32 draws from a Gaussian.
        """
        samples = (len(self.iterates) or 32) if samples is None else samples
        return scaled(predict.log_probs(self.model, x, self, samples), self.temperature)


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    *,
    architecture: str,
    shape: tuple[int, ...],
    classes: int,
    privacy: Any = None,
    temperature: float | None = None,
) -> None:
    """Write the posterior of `optimizer` around the mean in `model` to `path`, whole or not at all.

    Parameters
    ----------
    path
        the file, in the safetensors format.
    model
        whose parameters hold the mean. Save outside of `sampled_params()`, or a draw is saved as the mean.
    optimizer
        an `ivon.IVON`, or what `mechanism` made of it, whose variances are saved; an optimizer that kept iterates
        (see `snapshots`), or these, which are saved; of any other only the mean is.
    architecture
        a name in `models.MODELS`, or a name for a network of one's own.
    shape, classes
        as for `models.build`.
    privacy
        a privacy statement or its record, to travel with the weights.
    temperature
        by which predictions are to be scaled; None where none was chosen.

    Raises
    ------
    ValueError
        a value is not finite, the optimizer's weights are not the model's, or the statement tells of a temperature and
        none is given.
    RuntimeError
        the parameters are a draw.
    OSError
        the file cannot be written.
    """
    drawing = getattr(optimizer, "drawing", False)
    optimizer = getattr(optimizer, "original_optimizer", optimizer)  # what Opacus wraps knows the variance
    if drawing or any(getattr(o, "drawing", False) for o in (optimizer, getattr(optimizer, "optimizer", None))):
        raise RuntimeError("the parameters are a draw, not the mean; save after `sampled_params()`")
    privacy = privacy.record() if hasattr(privacy, "record") else privacy
    if temperature is None and privacy is not None and privacy.get("set_aside"):
        raise ValueError("the privacy statement tells of a temperature; give it too, or the predictions are others")
    if hasattr(optimizer, "kept_at"):
        optimizer = snapshots.kept(model, optimizer)
    names = {id(p): name for name, p in model.named_parameters()}
    kept = isinstance(optimizer, (snapshots.Kept, snapshots.Stored))
    variances = optimizer.variance() if hasattr(optimizer, "variance") else {}
    moved = list(optimizer.parameters if kept else variances)
    if any(id(p) not in names for p in moved) or (not moved and (kept or hasattr(optimizer, "variance"))):
        raise ValueError("the optimizer's weights are not this model's, or are frozen; save the model that was trained")
    tensors = {f"mean.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"variance.{names[id(p)]}": value for p, value in variances.items()}
    for k in range(len(optimizer) if kept else 0):
        with optimizer.sampled_params():
            tensors |= {f"iterate.{k:06}.{names[id(p)]}": p.detach().clone() for p in moved}
    bad = [name for name, value in tensors.items() if not value.isfinite().all()]
    if bad:
        raise ValueError(f"{bad[0]!r} is not finite: training diverged; lower the learning rate")
    about = {"architecture": architecture, "shape": list(shape), "classes": classes, "privacy": privacy}
    if temperature is not None and temperature != 1:
        about["temperature"] = temperature
    metadata = {ITERATES if kept else GAUSSIAN: json.dumps(about)}
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    checkpoint.write(path, safetensors.torch.save(copies, metadata), secret=False)


def load(path: str | Path, model: nn.Module | None = None) -> Posterior:
    """The posterior saved at `path`.

    Parameters
    ----------
    path
        a file written by `save`.
    model
        a network of the saved architecture, where that is not one of `models.MODELS`; its weights are overwritten.

    Raises
    ------
    ValueError
        the file is not a posterior, is cut off, or does not fit the network.

    Examples
    --------
    >>> from dpivon import data, models, posterior
    >>> net = models.build("mlp", (1, 8, 8), 10, seed=0)
    >>> posterior.save(
    ...     "net.safetensors", net,
    ...     architecture="mlp", shape=(1, 8, 8), classes=10)
    >>> again = posterior.load("net.safetensors")
    >>> x = data.digits().x_test
    >>> tuple(again.log_probs(x, samples=0).shape)
    (359, 10)
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is not a dict
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is not a whole posterior file ({error}); export it anew") from error
    form = next((form for form in (GAUSSIAN, ITERATES) if form in metadata), None)
    if form is None:
        raise ValueError(f"{path} is a safetensors file, but not a posterior of dpivon; posterior.save writes one")
    try:
        about = json.loads(metadata[form])
        architecture, shape, classes, privacy = (about[k] for k in ("architecture", "shape", "classes", "privacy"))
        temperature = float(about.get("temperature", 1.0))
        whole = isinstance(architecture, str) and all(type(size) is int for size in (*shape, classes))
        whole = whole and 0 < temperature < math.inf
    except (ValueError, TypeError, KeyError):
        whole = False
    if not whole:
        raise ValueError(f"{path} does not say what network it holds; export it anew")
    if model is None:
        if architecture not in models.MODELS:
            raise ValueError(
                f"{architecture!r} is not one of {', '.join(models.MODELS)}; pass the network: "
                "posterior.load(path, model)"
            )
        model = models.build(architecture, shape, classes)
    parts: dict[str, dict[str, Tensor]] = {"mean": {}, "variance": {}}
    for name, value in sorted(tensors.items()):
        kind, rest = re.fullmatch(r"(mean|variance|iterate\.\d{6})\.(.*)|.*", name).groups()  # type: ignore[union-attr]
        parts.setdefault(kind or "", {})[rest or name] = value
    mean, variance = parts.pop("mean"), parts.pop("variance")
    whole = "" not in parts and len({frozenset(iterate) for iterate in parts.values()}) <= 1
    if not whole or bool(parts) != (form == ITERATES) or (parts and variance):
        raise ValueError(f"{path} lacks a part, or holds one that is no posterior's; export it anew")
    bad = [name for name, value in tensors.items() if not value.isfinite().all()]
    if bad:
        raise ValueError(f"{path} holds values of {bad[0]!r} that are not finite; export it anew")
    try:
        model.load_state_dict(mean)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit this {architecture}: {error}") from error
    weights = {name: p.shape for name, p in model.named_parameters()}
    of_none = [name for part in (variance, *parts.values()) for name in part if part[name].shape != weights.get(name)]
    if of_none or any(not (value >= 0).all() for value in variance.values()):
        raise ValueError(f"{path} holds variances that are negative or values of no weight; export it anew")
    return Posterior(
        model.eval(), variance, architecture, tuple(shape), classes, privacy, temperature=temperature,
        iterates=list(parts.values()),
    )  # fmt: skip

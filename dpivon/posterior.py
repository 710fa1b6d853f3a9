"""A posterior as one file that may be published: mean, variance, architecture, privacy statement, and nothing else.

No generator's state, momentum or curvature goes in, and reading it executes no code and needs no training data.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dpivon import checkpoint, models, predict
from dpivon.temperature import scaled

FORMAT = "dpivon-posterior-1"  # the one key of the file's metadata: with two, their order would be by chance


@dataclass
class Posterior:
    """A Gaussian over the weights of a network, q(theta) = N(m, diag(sigma_v^2)), to predict with.

    Parameters
    ----------
    model
        holds the mean m, in evaluation mode.
    variance
        sigma_v^2 by parameter name; empty for a method that learns the mean alone.
    architecture, shape, classes
        what `models.build` makes of them is `model`, unless the architecture is one of the user's own.
    privacy
        the privacy statement of the training run, as it is recorded; None where there is none.
    generator
        source of the draws; None is torch's global one.
    temperature
        by which predictions are scaled, see `temperature.scaled`.
    """

    model: nn.Module
    variance: dict[str, Tensor]
    architecture: str
    shape: tuple[int, ...]
    classes: int
    privacy: dict[str, Any] | None = None
    generator: torch.Generator | None = None
    temperature: float = 1.0

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the weights are a draw from the posterior; after, the mean again."""
        parameters = dict(self.model.named_parameters())
        means = {name: parameters[name].detach().clone() for name in self.variance}
        try:
            with torch.no_grad():
                for name, variance in self.variance.items():
                    z = torch.randn(
                        variance.shape, generator=self.generator, dtype=variance.dtype, device=variance.device
                    )
                    parameters[name].addcmul_(variance.sqrt(), z)
            yield
        finally:
            with torch.no_grad():
                for name, mean in means.items():
                    parameters[name].copy_(mean)

    def log_probs(self, x: Tensor, samples: int = 32) -> Tensor:
        """Log probabilities (n, classes) for inputs (n, ...), averaged over draws; at the mean where `samples` is 0."""
        return scaled(predict.log_probs(self.model, x, self, samples), self.temperature)


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    *,
    architecture: str,
    shape: tuple[int, ...],
    classes: int,
    privacy: dict[str, Any] | None = None,
    temperature: float = 1.0,
) -> None:
    """Write the posterior of `optimizer` around the mean in `model` to `path`, whole or not at all.

    Parameters
    ----------
    path
        the file, in the safetensors format.
    model
        whose parameters hold the mean. Save outside of `sampled_params()`, or a draw is saved as the mean.
    optimizer
        an `ivon.IVON`, or what `mechanism` made of it, whose variances are saved; of any other only the mean is.
    architecture
        a name in `models.MODELS`, or a name for a network of one's own.
    shape, classes
        as for `models.build`.
    privacy
        the record of a privacy statement, to travel with the weights.
    temperature
        by which predictions are to be scaled.

    Raises
    ------
    ValueError
        a value is not finite.
    RuntimeError
        the parameters are a draw.
    OSError
        the file cannot be written.
    """
    drawing = getattr(optimizer, "drawing", False)
    optimizer = getattr(optimizer, "original_optimizer", optimizer)  # what Opacus wraps knows the variance
    if drawing or getattr(optimizer, "drawing", False):
        raise RuntimeError("the parameters are a draw, not the mean; save after `sampled_params()`")
    names = {id(p): name for name, p in model.named_parameters()}
    variances = optimizer.variance() if hasattr(optimizer, "variance") else {}
    tensors = {f"mean.{name}": value for name, value in model.state_dict().items()}
    tensors |= {f"variance.{names[id(p)]}": value for p, value in variances.items()}
    bad = [name for name, value in tensors.items() if not value.isfinite().all()]
    if bad:
        raise ValueError(f"{bad[0]!r} is not finite: training diverged; lower the learning rate")
    about = {"architecture": architecture, "shape": list(shape), "classes": classes, "privacy": privacy}
    if temperature != 1:
        about["temperature"] = temperature
    metadata = {FORMAT: json.dumps(about)}
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
    if FORMAT not in metadata:
        raise ValueError(f"{path} is a safetensors file, but not a posterior of dpivon; posterior.save writes one")
    try:
        about = json.loads(metadata[FORMAT])
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
    mean = {name.removeprefix("mean."): value for name, value in tensors.items() if name.startswith("mean.")}
    variance = {name.removeprefix("variance."): v for name, v in tensors.items() if name.startswith("variance.")}
    bad = [name for name, value in tensors.items() if not value.isfinite().all()]
    if bad:
        raise ValueError(f"{path} holds values of {bad[0]!r} that are not finite; export it anew")
    try:
        model.load_state_dict(mean)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit this {architecture}: {error}") from error
    wrong = [name for name, value in variance.items() if name not in mean or value.shape != mean[name].shape]
    if wrong or any(not (value >= 0).all() for value in variance.values()):
        raise ValueError(f"{path} holds variances that are negative or belong to no weight; export it anew")
    return Posterior(model.eval(), variance, architecture, tuple(shape), classes, privacy, temperature=temperature)

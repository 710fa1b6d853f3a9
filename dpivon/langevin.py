"""Stochastic gradient Langevin dynamics: an optimizer whose iterates, with the right noise, are posterior samples.

The noise may do two jobs. What the mechanism has put into `p.grad` for privacy counts towards what the dynamics needs.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dpivon import checkpoint


class SGLD(torch.optim.Optimizer):
    """SGLD (Welling and Teh, 2011); on private gradients, DP-SGLD.

    .. math:: \\theta \\leftarrow \\theta - \\alpha (g + \\delta_v \\theta) + \\xi, \\qquad
        \\operatorname{Var} \\xi = \\max\\left(\\frac{2 \\alpha \\tau}{N_{\\rm ess}} - \\alpha^2 s^2,\\, 0\\right)

    With g the gradient of a mean loss, the iterates sample the density below as the learning rate becomes small, if the
    privacy noise s is no more than the dynamics needs. From the second half of the run, `samples` iterates are kept, in
    memory, or, where the attribute `folder` is set, in a file each, so that memory does not grow with their number.

    .. math:: p(\\theta) \\propto \\exp\\left(-\\frac{N_{\\rm ess}}{\\tau}
        \\left(\\bar\\ell(\\theta) + \\tfrac12 \\delta_v \\|\\theta\\|^2\\right)\\right)

    Parameters
    ----------
    params
        parameters or groups, as for any torch optimizer.
    lr
        alpha > 0, for the mean loss.
    ess
        N_ess > 0, usually the number of training examples.
    steps
        T, the length of the run.
    samples
        how many iterates to keep, for prediction.
    temperature
        tau >= 0; 1 samples the posterior, 0 is stochastic gradient descent.
    weight_decay
        delta_v >= 0, the prior's precision divided by N_ess. It touches no data, so it comes after the privacy noise.
    noise_std
        s, the standard deviation of the privacy noise in `p.grad`, from `mechanism.noise_std`; 0 without privacy.
    generator
        source of the added noise; None is torch's global one.

    Raises
    ------
    ValueError
        a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        ess: float,
        steps: int,
        samples: int = 32,
        temperature: float = 1.0,
        weight_decay: float = 2e-4,
        noise_std: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        for name, value in {"lr": lr, "ess": ess, "steps": steps}.items():
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and > 0, got {value}")
        settings = {"temperature": temperature, "weight_decay": weight_decay, "noise_std": noise_std}
        for name, value in {**settings, "samples": samples}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and >= 0, got {value}")
        super().__init__(params, {"lr": lr, "ess": ess, **settings})
        self.generator = generator
        self.folder: str | None = None
        self.written: dict[str, str] = {}  # the digest of each file there that is ours
        first, apart = steps // 2, max(1, (steps - steps // 2) // max(samples, 1))
        self.keep = range(steps, first, -apart)[:samples]

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """The parameters at which to take the gradient: the latest iterate."""
        yield

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient, and keep the iterate if its time has come."""
        for group in self.param_groups:
            lr = group["lr"]
            needed = 2 * lr * group["temperature"] / group["ess"]
            std = math.sqrt(max(needed - (lr * group["noise_std"]) ** 2, 0.0))
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                noise = torch.randn(p.shape, generator=self.generator, dtype=p.dtype, device=p.device)
                p.sub_(lr * (p.grad + group["weight_decay"] * p)).add_(noise, alpha=std)
                if state["step"] in self.keep and self.folder is None:
                    kept = state.get("samples", p.new_empty(0, *p.shape))
                    state["samples"] = torch.cat([kept, p.detach().unsqueeze(0)])
        parameters = [p for group in self.param_groups for p in group["params"] if self.state[p]]
        if self.folder is not None and parameters and (now := self.state[parameters[0]]["step"]) in self.keep:
            self.written |= write(self.folder, now, parameters)


def write(folder: str | Path, step: int, parameters: list[Any]) -> dict[str, str]:
    """Write an iterate into a file of its own, whole or not at all; what was released may be published.

    Returns the file's name and its digest, by which the run knows it again.
    """
    tensors = {f"{i:04}": p.detach().cpu().contiguous() for i, p in enumerate(parameters)}
    name, content = f"{step:08}.safetensors", safetensors.torch.save(tensors)
    checkpoint.write(Path(folder) / name, content, secret=False)
    return {name: digest(content)}


def digest(content: bytes) -> str:
    """SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def take_up(optimizer: SGLD, written: dict[str, str]) -> None:
    """Go on in the optimizer's folder, from a checkpoint that knows of the iterates `written`.

    Another run's iterates would enter the predictions, and no statement would count them. Those of steps after the
    checkpoint are removed: the run writes them again, or, if it is stopped before, has not released them.

    Raises
    ------
    ValueError
        the folder is another run's, or lacks an iterate.
    """
    assert optimizer.folder is not None
    found = {file.name: file for file in Path(optimizer.folder).glob("*.safetensors")}
    others = found.keys() - written.keys()
    whole = all(name in found and digest(found[name].read_bytes()) == known for name, known in written.items())
    if not whole or any(name < max(written, default="~") for name in others):
        raise ValueError(
            f"{optimizer.folder} does not hold the iterates that the checkpoint knows of, or other ones; give the "
            "folder of the run that is resumed, and remove from it what is not of that run"
        )
    for name in others:
        found[name].unlink()
    optimizer.written = dict(written)


class Stored:
    """Iterates in a folder as a posterior to predict with, of which one is in memory at a time: as `Kept`.

    Parameters
    ----------
    parameters
        which the iterates are put into, in the order in which they were written: the trainable ones of the model.
    folder
        that an `SGLD` with this `folder` has written.
    written
        the digests of the files to use, by name; None uses all.

    Raises
    ------
    ValueError
        the folder holds no iterate.
    """

    def __init__(self, parameters: Iterable[Tensor], folder: str | Path, written: dict[str, str] | None = None) -> None:
        self.parameters, self.next, self.written = list(parameters), 0, written
        names = [file.name for file in Path(folder).glob("*.safetensors")] if written is None else written
        self.files = [Path(folder) / name for name in sorted(names)]
        if not self.files:
            raise ValueError(f"{folder} holds no iterate: SGLD writes them in the second half of its `steps`")

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the parameters are a stored iterate, the next with each use; after, what they were.

        Raises
        ------
        ValueError
            a file is damaged, of another network or of another run.
        """
        file = self.files[self.next % len(self.files)]
        self.next += 1
        content = file.read_bytes()
        if self.written is not None and digest(content) != self.written[file.name]:
            raise ValueError(f"{file} was changed since this run wrote it; two runs cannot share a folder")
        try:
            values = list(dict(sorted(safetensors.torch.load(content).items())).values())
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{file} is not a whole iterate ({error}); resume the run, which writes it anew"
            ) from error
        if [v.shape for v in values] != [p.shape for p in self.parameters]:
            raise ValueError(f"{file} does not fit this network; take the one that the run trained")
        now = [p.detach().clone() for p in self.parameters]
        try:
            with torch.no_grad():
                for p, value in zip(self.parameters, values, strict=True):
                    p.copy_(value)
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, now)


def kept(model: nn.Module, optimizer: SGLD) -> Any:
    """The iterates that the optimizer has kept, wherever it keeps them; before the first of them, the latest one."""
    if optimizer.written and optimizer.folder is not None:
        return Stored([p for p in model.parameters() if p.requires_grad], optimizer.folder, optimizer.written)
    return Kept(optimizer) if any("samples" in state for state in optimizer.state.values()) else optimizer


class Kept:
    """The kept iterates of `SGLD` as a posterior to predict with: each draw is the next of them, round and round."""

    def __init__(self, optimizer: SGLD) -> None:
        self.optimizer, self.next = optimizer, 0

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the parameters are a kept iterate; after, the latest one again.

        Raises
        ------
        RuntimeError
            none was kept: the run is not half done.
        """
        parameters = [
            p for group in self.optimizer.param_groups for p in group["params"] if "samples" in self.optimizer.state[p]
        ]
        if not parameters:
            raise RuntimeError("no iterate was kept: SGLD keeps them in the second half of its `steps`")
        now = [p.detach().clone() for p in parameters]
        which, self.next = self.next, self.next + 1
        try:
            with torch.no_grad():
                for p in parameters:
                    samples = self.optimizer.state[p]["samples"]
                    p.copy_(samples[which % len(samples)])
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(parameters, now)


def free_noise_multiplier(
    lr: float, ess: float, batch_size: float, max_grad_norm: float, temperature: float = 1.0
) -> float:
    """The noise multiplier that the dynamics' own noise amounts to: at or above a budget's, privacy costs nothing more.

    .. math:: \\sigma = \\frac{b}{C} \\sqrt{\\frac{2 \\tau}{N_{\\rm ess}\\, \\alpha}}
    """
    if not min(lr, ess, batch_size, max_grad_norm, temperature) > 0:
        raise ValueError(
            f"lr, ess, batch_size, max_grad_norm and temperature must be > 0, got {lr}, {ess}, {batch_size}, "
            f"{max_grad_norm}, {temperature}"
        )
    return batch_size * math.sqrt(2 * temperature / (ess * lr)) / max_grad_norm


def temperature_of(lr: float, ess: float, noise_std: float) -> float:
    """The temperature that the privacy noise alone amounts to; above the one wanted, the samples are too wide.

    .. math:: \\tau = \\frac{N_{\\rm ess}\\, \\alpha\\, s^2}{2}
    """
    return ess * lr * noise_std**2 / 2


def one_sample_epsilon(log_likelihood_range: float, samples: int = 1, temperature: float = 1.0) -> float:
    """What exact posterior samples cost under add/remove, without any noise (after Wang et al., 2015).

    .. math:: \\varepsilon = \\frac{k R}{\\tau}, \\qquad
        R = \\sup_x \\left( \\sup_\\theta \\log p(x \\mid \\theta) - \\inf_\\theta \\log p(x \\mid \\theta) \\right)

    One example multiplies the unnormalized posterior by a factor within e^R of any other, and the normalizer takes
    back at most as much. The samples must be exact: those of a chain that has not converged promise nothing of this.

    Raises
    ------
    ValueError
        an argument is not positive.
    """
    if not (log_likelihood_range > 0 and samples > 0 and temperature > 0):
        raise ValueError(
            f"range, samples and temperature must be > 0, got {log_likelihood_range}, {samples}, {temperature}"
        )
    return samples * log_likelihood_range / temperature

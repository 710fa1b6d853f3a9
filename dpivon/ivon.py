"""IVON (Improved Variational Online Newton): a Gaussian posterior over the weights, learned at the price of Adam."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpivon import checks
from dpivon.curvature import ESTIMATORS


class IVON(torch.optim.Optimizer):
    """Algorithm 2 of the paper: curvature (2), momentum (3), natural-gradient step (4). Reads `p.grad` alone.

    .. math::
        h &\\leftarrow \\beta_2 h + (1 - \\beta_2) \\hat h
            + \\tfrac12 (1 - \\beta_2)^2 \\frac{(h - \\hat h)^2}{h + \\delta_v} \\\\
        \\bar g &\\leftarrow \\beta_1 \\bar g + (1 - \\beta_1) g \\\\
        m &\\leftarrow m - \\alpha \\frac{\\bar g / (1 - \\beta_1^t) + \\delta_v m}{h + \\delta_v}

    The parameters hold the mean m; `sampled_params()` is where gradients are taken.

    Parameters
    ----------
    params
        parameters or groups, as for any torch optimizer.
    lr
        alpha > 0; with `rescale_lr` times (hess_init + weight_decay), so that it is the first step's length.
    ess
        N_ess > 0, the effective sample size: the number of training examples, for a Bayesian posterior.
    curvature
        a name in `curvature.ESTIMATORS`.
    hess_init
        h at the start, > 0.
    beta1, beta2
        decay of momentum and curvature, in [0, 1).
    weight_decay
        delta_v >= 0, the damping, which is also the prior's precision divided by N_ess.
    scale
        factor of squared-gradient estimators; None is the paper's N_ess, b is consistent without clipping.
    noise_std
        standard deviation of the privacy noise in `p.grad`. `mechanism` writes it; set it to 0 without privacy.
        Estimates that subtract the noise refuse to guess.
    rescale_lr
        see `lr`.
    precondition
        divide the step by h + delta_v, as in (4). Otherwise it is that of momentum descent, and h sets nothing but the
        width of the posterior:

        .. math:: m \\leftarrow m - \\alpha \\left(\\frac{\\bar g}{1 - \\beta_1^t} + \\delta_v m\\right)
    generator
        source of the posterior draws; None is torch's global one.

    Raises
    ------
    ValueError
        a hyperparameter is out of range.

    Examples
    --------
    A loss with its minimum at 1 and curvature 1, on 100 examples: the posterior has mean 1 and width 0.1.

    >>> import torch
    >>> from dpivon.ivon import IVON
    >>> w = torch.nn.Parameter(torch.zeros(1000))
    >>> ivon = IVON([w], lr=0.1, ess=100, curvature="price")
    >>> for _ in range(500):
    ...     with ivon.sampled_params():
    ...         w.grad = w.detach() - 1
    ...     ivon.step()
    >>> sigma = ivon.variance()[w].sqrt()
    >>> round(w.mean().item(), 1), round(sigma.mean().item(), 1)
    (1.0, 0.1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        ess: float,
        curvature: str = "noise-corrected",
        hess_init: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.995,
        weight_decay: float = 2e-4,
        scale: float | None = None,
        noise_std: float | None = None,
        rescale_lr: bool = True,
        precondition: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        scale = ess if scale is None else scale
        checks.positive(lr=lr, ess=ess, hess_init=hess_init, scale=scale)
        checks.decay(beta1=beta1, beta2=beta2)
        checks.not_negative(weight_decay=weight_decay, noise_std=noise_std or 0.0)
        if curvature not in ESTIMATORS:
            raise ValueError(f"unknown curvature {curvature!r}; choose one of {', '.join(ESTIMATORS)}")
        defaults = {
            "lr": lr, "ess": ess, "hess_init": hess_init, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay,
            "scale": scale, "noise_std": noise_std, "rescale_lr": rescale_lr, "precondition": precondition,
        }  # fmt: skip
        super().__init__(params, defaults)
        self.curvature, self.generator = curvature, generator
        self.deviations: dict[Tensor, Tensor] = {}  # theta - m of the draw that the next step belongs to
        self.drawing = False
        self.vectors: dict[tuple[Any, ...], tuple[Tensor, list[Tensor]]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take up a state, also one that was saved before `precondition` existed."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("precondition", True)

    def trained(self, group: dict[str, Any]) -> list[Tensor]:
        """The group's parameters that learn; the state of a new one begins at hess_init."""
        parameters = [p for p in group["params"] if p.requires_grad]
        for p in parameters:
            if not self.state[p]:
                h = torch.full_like(p, group["hess_init"])
                self.state[p].update(step=0, h=h, momentum=torch.zeros_like(p))
        return parameters

    def vector(self, parameters: list[Tensor], name: str) -> Tensor:
        """The state `name` of all parameters as one vector, of which each parameter's own entry is a view.

        A vector is built when it is first asked for, and again after `load_state_dict` or a change of the parameters.
        """
        entries = [self.state[p].get(name) for p in parameters]
        key = (name, *map(id, parameters))
        vector, views = self.vectors.get(key, (None, []))
        if vector is None or any(entry is not view for entry, view in zip(entries, views, strict=True)):
            pairs = zip(parameters, entries, strict=True)
            vector = flat(torch.zeros_like(p) if entry is None else entry for p, entry in pairs)
            views = unflat(vector, parameters)
            self.vectors[key] = vector, views
            for p, view in zip(parameters, views, strict=True):
                self.state[p][name] = view
        return vector

    def scratch(self, parameters: list[Tensor], name: str) -> tuple[Tensor, list[Tensor]]:
        """A vector for all parameters and its views, whose content nobody keeps: allocated once."""
        key = ("scratch", name, *map(id, parameters))
        if key not in self.vectors:
            vector = flat(parameters)
            self.vectors[key] = vector, unflat(vector, parameters)
        return self.vectors[key]

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the parameters are a draw theta ~ N(m, 1 / (N_ess (h + delta_v))); after, the mean m again.

        Forward and backward belong inside. A backward after it raises, since the parameters were changed in place.

        Raises
        ------
        RuntimeError
            a draw is already in place: the mean would be lost.
        """
        if self.drawing:
            raise RuntimeError("the parameters are a draw already; leave `sampled_params()` before entering it again")
        drawn = []
        with torch.no_grad():
            for group in self.param_groups:
                if not (parameters := self.trained(group)):
                    continue
                deviation, deviations = self.scratch(parameters, "deviation")
                _, means = self.scratch(parameters, "mean")
                torch.randn(deviation.shape, generator=self.generator, out=deviation)
                precision = (self.vector(parameters, "h") + group["weight_decay"]).mul_(group["ess"])
                deviation.mul_(precision.rsqrt_())
                torch._foreach_copy_(means, parameters)
                torch._foreach_add_(parameters, deviations)
                drawn.append((parameters, means))
                self.deviations.update(zip(parameters, deviations, strict=True))
        self.drawing = True
        try:
            yield
        finally:
            self.drawing = False
            with torch.no_grad():
                for parameters, means in drawn:
                    torch._foreach_copy_(parameters, means)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update curvature, momentum and mean of every parameter that has a gradient.

        Raises
        ------
        FloatingPointError
            a gradient or the new curvature is not finite; nothing has changed.
        RuntimeError
            no draw was made since the last step, so `p.grad` was not taken inside `sampled_params()`; or that has not
            been left, and would put the old mean back.
        """
        if self.drawing:
            raise RuntimeError("leave `sampled_params()` before step(): it would put the old mean back")
        updates = [(group, ps, *self.estimate(group, ps)) for group, ps in self.cohorts()]  # all, before any is applied
        for group, parameters, g, new in updates:
            beta1, damping = group["beta1"], group["weight_decay"]
            for name, value in new.items():
                self.vector(parameters, name).copy_(value)
            step = self.state[parameters[0]]["step"] + 1
            for p in parameters:
                self.state[p]["step"] = step
            momentum = self.vector(parameters, "momentum").lerp_(g, 1 - beta1)
            direction, directions = self.scratch(parameters, "mean")
            torch._foreach_copy_(directions, parameters)
            correction = 1 - beta1**step  # of the momentum, moved out: (a / c + d m) / k = (a + c d m) / (c k)
            direction.mul_(correction * damping).add_(momentum)
            lr = group["lr"]
            if group["precondition"]:
                direction.div_(new["h"].add_(damping))
                lr *= group["hess_init"] + damping if group["rescale_lr"] else 1
            torch._foreach_sub_(parameters, directions, alpha=lr / correction)
        self.deviations.clear()

    def variance(self) -> dict[Tensor, Tensor]:
        """The posterior's variance of every parameter that learns.

        .. math:: \\sigma_v^2 = \\frac{1}{N_{\\rm ess} (h + \\delta_v)}
        """
        return {
            p: 1 / (group["ess"] * (self.state[p]["h"] + group["weight_decay"]))
            for group in self.param_groups
            for p in self.trained(group)
        }

    def cohorts(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """(group, parameters) with a gradient and the same age: what is updated as one vector, which is fast."""
        cohorts: dict[tuple[int, int], list[Tensor]] = {}
        for i, group in enumerate(self.param_groups):
            for p in self.trained(group):
                if p.grad is not None:
                    cohorts.setdefault((i, self.state[p]["step"]), []).append(p)
        return [(self.param_groups[i], parameters) for (i, _), parameters in cohorts.items()]

    def estimate(self, group: dict[str, Any], parameters: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The cohort's gradient as one vector, and the new value of h and of what the estimator remembers."""
        if any(p not in self.deviations for p in parameters):
            raise RuntimeError("take the gradient inside `with optimizer.sampled_params():` before step()")
        g, gradients = self.scratch(parameters, "gradient")
        torch._foreach_copy_(gradients, [p.grad for p in parameters if p.grad is not None])
        if not finite(g):
            raise FloatingPointError("a gradient is not finite; nothing was changed: lower the learning rate")
        old = self.state[parameters[0]]
        tensors = [name for name, value in old.items() if isinstance(value, Tensor) and name != "momentum"]
        remembered = {name: self.vector(parameters, name) for name in tensors}
        state = {"step": old["step"] + 1, "sizes": [p.numel() for p in parameters], **remembered}
        deviation, deviations = self.scratch(parameters, "deviation")
        if any(self.deviations[p] is not view for p, view in zip(parameters, deviations, strict=True)):
            torch._foreach_copy_(deviations, [self.deviations[p] for p in parameters])
        h_hat = ESTIMATORS[self.curvature](g, deviation, state, group)
        state["h"] = new_curvature(state["h"], h_hat, group)
        if not finite(state["h"]):
            raise FloatingPointError("the curvature overflows; lower ess or scale, or clip to a smaller norm")
        return g, {name: value for name, value in state.items() if isinstance(value, Tensor)}


def flat(tensors: Iterable[Any]) -> Tensor:
    """All entries of the tensors, as one new vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflat(vector: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """The vector cut into views of the parameters' shapes."""
    parts = vector.split([p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


def finite(vector: Tensor) -> bool:
    """Whether all entries are finite: NaN and infinity survive a sum, ten times as fast as `isfinite().all()`."""
    return math.isfinite(float(vector.sum()))


def new_curvature(h: Tensor, h_hat: Tensor, group: dict[str, Any]) -> Tensor:
    """Equation (2), which keeps h + delta_v > 0 for any h_hat (Lin et al., 2020).

    .. math:: h + \\delta_v \\leftarrow (h + \\delta_v) \\left(1 + u + \\tfrac12 u^2\\right), \\qquad
        u = (1 - \\beta_2) \\frac{\\hat h - h}{h + \\delta_v}

    This is the paper's form rearranged; the factor is at least one half. The last line guards against rounding alone.
    """
    beta2, damping = group["beta2"], group["weight_decay"]
    new = torch.lerp(h, h_hat, 1 - beta2)
    new.addcdiv_((h - h_hat).square_(), h + damping, value=0.5 * (1 - beta2) ** 2)
    return new.clamp_(min=torch.finfo(h.dtype).tiny - damping * (1 - 1e-6))

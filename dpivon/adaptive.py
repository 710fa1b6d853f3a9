"""DP adaptive gradient descent: an optimizer as two functions of the past private gradients.

.. math::
    \\theta \\leftarrow \\theta - \\alpha \\,
    \\frac{\\phi(\\tilde g_1 \\dots \\tilde g_t)}{\\psi(\\tilde g_1 \\dots \\tilde g_t)}

Whether the gradients were privatized is not this file's business: it reads `p.grad`, and what it makes of private
gradients is post-processing.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
Function = Callable[[State, Tensor, dict[str, Any]], Tensor]


def gradient(state: State, g: Tensor, group: dict[str, Any]) -> Tensor:
    """phi = g: the latest gradient."""
    return g


def momentum(state: State, g: Tensor, group: dict[str, Any]) -> Tensor:
    """phi = bias-corrected exponential average, so that the effective step is the learning rate from the first step on.

    .. math:: m_t = \\beta_1 m_{t-1} + (1 - \\beta_1) g_t, \\qquad \\phi_t = \\frac{m_t}{1 - \\beta_1^t}
    """
    beta1 = group["beta1"]
    m = state.setdefault("momentum", torch.zeros_like(g))
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    return m / (1 - beta1 ** state["step"])


def one(state: State, g: Tensor, group: dict[str, Any]) -> Tensor:
    """psi = 1: the same step in every coordinate."""
    return torch.ones((), dtype=g.dtype, device=g.device)


class Adaptive(torch.optim.Optimizer):
    """theta <- theta - lr * (phi + weight_decay * theta) / psi, with phi and psi of past gradients.

    Weight decay is a prior's gradient: it touches no data, so it is added here, after the privacy noise.

    Parameters
    ----------
    params
        parameters or groups, as for any torch optimizer.
    lr
        alpha > 0.
    phi, psi
        ``f(state, g, group) -> Tensor``; `state` is a dict kept for each parameter, with its step count.
    beta1
        decay of the momentum, in [0, 1).
    weight_decay
        at least 0.

    Raises
    ------
    ValueError
        a hyperparameter is out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        phi: Function,
        psi: Function,
        beta1: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr must be > 0, got {lr}")
        if not 0 <= beta1 < 1:
            raise ValueError(f"beta1 must be in [0, 1), got {beta1}; 0 turns momentum off")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay must be >= 0, got {weight_decay}")
        super().__init__(params, {"lr": lr, "beta1": beta1, "weight_decay": weight_decay})
        self.phi, self.psi = phi, psi

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """The parameters at which to take the gradient: a deterministic method has only its current ones."""
        yield

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. Reads `p.grad` and nothing else of the data."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                phi = self.phi(state, p.grad, group)
                p.sub_(group["lr"] * (phi + group["weight_decay"] * p) / self.psi(state, p.grad, group))


def sgd(params: Iterable[Any], lr: float, beta1: float = 0.9, weight_decay: float = 0.0) -> Adaptive:
    """Stochastic gradient descent with normalised momentum; on private gradients, DP-SGD (Abadi et al., 2016).

    torch's SGD does not normalise: its effective step is lr / (1 - momentum), ours is lr.
    """
    return Adaptive(params, lr, momentum, one, beta1, weight_decay)

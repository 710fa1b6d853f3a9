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

from dpivon import checks
from dpivon.curvature import noise_corrected, noise_variance
from dpivon.ivon import new_curvature

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


def second_moment(state: State, g: Tensor, group: dict[str, Any]) -> Tensor:
    """Bias-corrected exponential average of the squared gradients. Under privacy it contains the noise's variance.

    .. math:: v_t = \\beta_2 v_{t-1} + (1 - \\beta_2) g_t^2, \\qquad \\hat v_t = \\frac{v_t}{1 - \\beta_2^t}
    """
    beta2 = group["beta2"]
    v = state.setdefault("second_moment", torch.zeros_like(g))
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    return v / (1 - beta2 ** state["step"])


def root(state: State, g: Tensor, group: dict[str, Any]) -> Tensor:
    """psi of Adam and RMSProp: the root of the second moment, plus lambda."""
    return second_moment(state, g, group).sqrt_().add_(group["damping"])


def corrected_root(state: State, g: Tensor, group: dict[str, Any]) -> Tensor:
    """psi of DP-AdamBC (Tang et al., 2024): the noise's variance is subtracted before the root.

    .. math:: \\psi_t = \\sqrt{\\max(\\hat v_t - s^2, \\lambda^2)}, \\qquad s = \\sigma_p C / b
    """
    v = second_moment(state, g, group)
    return v.sub_(noise_variance(group)).clamp_(min=group["damping"] ** 2).sqrt_()


def effective_terms(steps: int, beta2: float = 0.999) -> float:
    """How many gradients make an equally good plain mean as the exponential average of t = `steps` of them.

    .. math:: \\frac{1}{n_t} = \\frac{1 - \\beta_2}{1 + \\beta_2} \\cdot \\frac{1 + \\beta_2^t}{1 - \\beta_2^t}
    """
    return (1 + beta2) / (1 - beta2) * (1 - beta2**steps) / (1 + beta2**steps)


def noise_floor(noise_std: float, steps: int, beta2: float = 0.999) -> float:
    """The lambda of `corrected_root` at the size of the scatter that t steps leave in the corrected second moment.

    .. math:: \\lambda_t = s \\left( \\frac{2}{n_t} \\right)^{1/4}
    """
    return noise_std * (2 / effective_terms(steps, beta2)) ** 0.25


def ivon_curvature(state: State, g: Tensor, group: dict[str, Any]) -> Tensor:
    """psi of DP-IVON-Gradsq: the curvature h + delta_v itself, not its root; lambda is delta_v."""
    h = state.setdefault("h", torch.full_like(g, group["hess_init"]))
    state["h"] = h = new_curvature(h, noise_corrected(g, g, state, group), group)
    return h + group["weight_decay"]


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
    beta1, beta2
        decay of the momentum and of the second moment, in [0, 1).
    weight_decay
        at least 0.
    damping
        lambda > 0, which keeps psi away from zero.
    noise_std
        standard deviation of the privacy noise in `p.grad`. `mechanism` writes it; set it to 0 without privacy.
    more
        what else phi and psi read from the group.

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
        beta2: float = 0.999,
        weight_decay: float = 0.0,
        damping: float = 1e-8,
        noise_std: float | None = None,
        **more: float,
    ) -> None:
        checks.positive(lr=lr, damping=damping)
        checks.decay(beta1=beta1, beta2=beta2)
        checks.not_negative(weight_decay=weight_decay, noise_std=noise_std or 0.0)
        defaults = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "damping": damping}
        super().__init__(params, {**defaults, "noise_std": noise_std, **more})
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
    """Stochastic gradient descent with normalized momentum; on private gradients, DP-SGD (Abadi et al., 2016).

    torch's SGD does not normalize: its effective step is lr / (1 - momentum), ours is lr.

    Examples
    --------
    With a steady gradient of 1, each step has the length lr, from the first one on:

    >>> import torch
    >>> from dpivon import adaptive
    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> optimizer = adaptive.sgd([w], lr=0.5)
    >>> for _ in range(3):
    ...     w.grad = torch.ones(1)
    ...     optimizer.step()
    ...     print(round(w.item(), 3))
    -0.5
    -1.0
    -1.5
    """
    return Adaptive(params, lr, momentum, one, beta1, weight_decay=weight_decay)


def adam(params: Iterable[Any], lr: float, **options: float) -> Adaptive:
    """Adam (Kingma and Ba, 2015); on private gradients, DP-Adam."""
    return Adaptive(params, lr, momentum, root, **options)


def rmsprop(params: Iterable[Any], lr: float, **options: float) -> Adaptive:
    """RMSProp with bias correction, no momentum; on private gradients, DP-RMSProp."""
    return Adaptive(params, lr, gradient, root, **options)


def adambc(params: Iterable[Any], lr: float, **options: float) -> Adaptive:
    """DP-AdamBC: Adam whose second moment is corrected for the privacy noise (Tang et al., 2024)."""
    return Adaptive(params, lr, momentum, corrected_root, **options)


def ivon_gradsq(params: Iterable[Any], lr: float, ess: float, hess_init: float = 0.1, **options: float) -> Adaptive:
    """DP-IVON-Gradsq as a member of the family: `ivon.IVON` takes the same steps, and has the posterior besides.

    Here lr is alpha itself: `ivon.IVON` multiplies it by (hess_init + weight_decay).
    """
    return Adaptive(params, lr, momentum, ivon_curvature, ess=ess, scale=ess, hess_init=hess_init, **options)

"""Curvature estimators: what one (private) gradient says about the Hessian's diagonal, each a few lines.

An estimator is ``f(g, deviation, state, group) -> h_hat``, on all parameters of a group as one vector:

g
    the gradient in `p.grad`, taken at theta = m + deviation.
deviation
    theta - m, the draw of the posterior at which the gradient was taken.
state
    a dict: the curvature ``h``, the ``step`` (already counted), the ``sizes`` of the parameter tensors in the
    vector, and what an estimator remembers.
group
    the parameter group: ``ess`` (N_ess), ``weight_decay`` (delta_v), ``beta2``, ``scale`` (see `scaled`) and
    ``noise_std``, the standard deviation of the privacy noise in g, as `mechanism.noise_std` gives it.

An estimator may put a new vector into `state`, and never changes one in place: a failed step then changes nothing.
All of them see private gradients and numbers that do not depend on data, so they are post-processing.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]
Group = dict[str, Any]
Estimator = Callable[[Tensor, Tensor, State, Group], Tensor]


def scaled(square: Tensor, group: Group) -> Tensor:
    """From a squared minibatch gradient to the curvature of the mean loss, times the group's ``scale``.

    The paper's scale is N_ess. At a stationary point and without clipping the consistent scale is b: the variance of a
    minibatch gradient is F / b for the mean-loss Fisher F.
    """
    return group["scale"] * square


def noise_variance(group: Group) -> float:
    """s^2, the variance of the privacy noise in the gradient.

    Raises
    ------
    ValueError
        nobody has said what it is. Taking it for 0 would silently switch the correction off.
    """
    if group["noise_std"] is None:
        raise ValueError(
            "noise_std is not known, so it cannot be subtracted; mechanism.mechanism, make_private and sampled_params "
            "write it; set it to 0 where the gradients are not private"
        )
    return group["noise_std"] ** 2


def price(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """The reparameterized estimator of IVON (Shen et al., 2024), by Price's theorem; it may be negative.

    .. math:: \\hat h = g \\, \\frac{\\theta - m}{\\sigma_v^2}, \\qquad
        \\sigma_v^2 = \\frac{1}{N_{\\rm ess} (h + \\delta_v)}
    """
    precision = (state["h"] + group["weight_decay"]).mul_(group["ess"])
    return precision.mul_(deviation).mul_(g)


def gradsq(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """The squared gradient. Under privacy its expectation contains the variance of the noise.

    .. math:: \\hat h = N_{\\rm ess} \\, g^2
    """
    return scaled(g.square(), group)


def noise_corrected(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """The paper's equation (1): subtract the known variance of the privacy noise, then project to zero or more.

    .. math:: \\hat h = N_{\\rm ess} \\max\\left(g_{\\rm dp}^2 - \\frac{\\sigma_p^2 C^2}{b^2},\\, 0\\right)
    """
    return scaled(g.square().sub_(noise_variance(group)).clamp_(min=0), group)


def noise_floor(group: Group) -> float:
    """What `noise_corrected` gives on average where the gradient is nothing but noise.

    .. math:: \\mathbb E\\,\\hat h = 2 \\varphi(1) N_{\\rm ess} s^2 \\approx 0.484 \\, N_{\\rm ess} s^2, \\qquad
        s = \\sigma_p C / b
    """
    return 2 * math.exp(-0.5) / math.sqrt(2 * math.pi) * group["scale"] * noise_variance(group)


def average_then_project(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """The same correction in the other order: average over time first, project last, as DP-AdamBC does.

    .. math:: a_t = \\beta_2 a_{t-1} + (1 - \\beta_2) (g_t^2 - s^2), \\qquad
        \\hat h = N_{\\rm ess} \\max\\left(\\frac{a_t}{1 - \\beta_2^t},\\, 0\\right)
    """
    beta2 = group["beta2"]
    average = state.get("average", torch.zeros_like(g))
    state["average"] = average = beta2 * average + (1 - beta2) * (g.square() - noise_variance(group))
    return scaled((average / (1 - beta2 ** state["step"])).clamp(min=0), group)


def block_mean(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """A control: one corrected value for each parameter tensor, so all coordinates of a layer share their step.

    .. math:: \\hat h = N_{\\rm ess} \\max\\left(\\mathrm{mean}(g^2) - s^2,\\, 0\\right)
    """
    means = [part.mean().expand_as(part) for part in g.square().split(state["sizes"])]
    return scaled((torch.cat(means) - noise_variance(group)).clamp(min=0), group)


def constant(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """A control: the curvature stays at hess_init, whatever the gradients say."""
    return state["h"]


ESTIMATORS: dict[str, Estimator] = {
    "price": price,
    "gradsq": gradsq,
    "noise-corrected": noise_corrected,
    "average-then-project": average_then_project,
    "block-mean": block_mean,
    "constant": constant,
}

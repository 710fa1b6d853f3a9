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


def pooled(values: Tensor, sizes: list[int]) -> Tensor:
    """Every value replaced by the mean of its block, a parameter tensor."""
    return torch.cat([part.mean().expand_as(part) for part in values.split(sizes)])


def averaged(values: Tensor, state: State, group: Group) -> tuple[Tensor, float]:
    """The average of values over time, and the factor by which it reduces the variance of independent noise.

    .. math:: \\bar a_t = \\frac{(1 - \\beta_2) \\sum_{k<t} \\beta_2^k a_{t-k}}{1 - \\beta_2^t}, \\qquad
        \\frac{\\operatorname{Var} \\bar a_t}{\\operatorname{Var} a} =
        \\frac{1 - \\beta_2}{1 + \\beta_2} \\cdot \\frac{1 + \\beta_2^t}{1 - \\beta_2^t}
    """
    beta2, left = group["beta2"], group["beta2"] ** state["step"]
    average = state.get("average", torch.zeros_like(values))
    state["average"] = average = beta2 * average + (1 - beta2) * values
    return average / (1 - left), (1 - beta2) / (1 + beta2) * (1 + left) / (1 - left)


def shrunk(average: Tensor, noise: Tensor, sizes: list[int]) -> Tensor:
    """Every value moved toward the mean of its block, as far as the known noise explains the block's spread.

    .. math:: \\mu + \\max\\left(1 - \\frac{V_{\\rm noise}}{V},\\, 0\\right) (a - \\mu)

    with mu and V the mean and variance of a in the block (empirical Bayes; James and Stein, 1961, positive part).

    Parameters
    ----------
    average
        a.
    noise
        V_noise for each coordinate, of which a block takes the mean.
    sizes
        the lengths of the blocks.
    """
    mean = pooled(average, sizes)
    spread = pooled((average - mean).square(), sizes)
    kept = 1 - pooled(noise, sizes) / spread.clamp(min=torch.finfo(spread.dtype).tiny)
    return torch.lerp(mean, average, kept.clamp(min=0))


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

    Examples
    --------
    Squares below the noise's variance count as zero; pure noise still leaves a floor:

    >>> import torch
    >>> from dpivon import curvature
    >>> g = torch.tensor([0.0, 1.0, 2.0, 3.0])
    >>> group = {"noise_std": 1.0, "scale": 10.0}
    >>> curvature.noise_corrected(g, g, {}, group).tolist()
    [0.0, 0.0, 30.0, 80.0]
    >>> round(curvature.noise_floor(group), 2)
    4.84
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
    average, _ = averaged(g.square() - noise_variance(group), state, group)
    return scaled(average.clamp(min=0), group)


def block_mean(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """A control: one corrected value for each parameter tensor, so all coordinates of a layer share their step.

    .. math:: \\hat h = N_{\\rm ess} \\max\\left(\\mathrm{mean}(g^2) - s^2,\\, 0\\right)
    """
    return scaled((pooled(g.square(), state["sizes"]) - noise_variance(group)).clamp(min=0), group)


def average_then_shrink(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """The corrected squares, averaged over time, shrunk toward the mean of their tensor, and projected last.

    The square of Gaussian noise has the variance 2 s^4, which is known: see `shrunk`.
    """
    s2 = noise_variance(group)
    average, reduction = averaged(g.square() - s2, state, group)
    noise = torch.full_like(g, 2 * s2**2 * reduction)
    return scaled(shrunk(average, noise, state["sizes"]).clamp(min=0), group)


def price_block(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """`price`, one value for each parameter tensor: the noise of its n coordinates averages out, nothing is projected.

    .. math:: \\hat h = \\frac1n \\sum_j g_j \\frac{\\theta_j - m_j}{\\sigma_{v,j}^2}
    """
    return pooled(price(g, deviation, state, group), state["sizes"])


def price_shrink(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """`price`, averaged over time and shrunk toward the mean of its tensor.

    The privacy noise in one estimate has the variance s^2 / sigma_v^2 = s^2 N_ess (h + delta_v): see `shrunk`.
    """
    average, reduction = averaged(price(g, deviation, state, group), state, group)
    precision = (state["h"] + group["weight_decay"]) * group["ess"]
    return shrunk(average, noise_variance(group) * reduction * precision, state["sizes"])


def constant(g: Tensor, deviation: Tensor, state: State, group: Group) -> Tensor:
    """A control: the curvature stays at hess_init, whatever the gradients say."""
    return state["h"]


ESTIMATORS: dict[str, Estimator] = {
    "price": price,
    "gradsq": gradsq,
    "noise-corrected": noise_corrected,
    "average-then-project": average_then_project,
    "block-mean": block_mean,
    "average-then-shrink": average_then_shrink,
    "price-block": price_block,
    "price-shrink": price_shrink,
    "constant": constant,
}

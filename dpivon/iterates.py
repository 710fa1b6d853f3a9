"""Averages of private iterates: the noise of many steps cancels, and their scatter tells how much of it is left.

All of it is computed from what was released anyway, so it costs no privacy.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpivon import adaptive, snapshots
from dpivon.backprop import BayesByBackprop
from dpivon.ivon import IVON

BLOCKS = 8


def average(optimizer: Any, steps: int, share: float = 0.5) -> Any:
    """Let the last step put the mean of the iterates of the run's last part into the parameters.

    .. math::
        \\bar\\theta = \\frac{1}{K} \\sum_{k=1}^{K} \\bar\\theta_k \\\\
        v = \\frac{1}{K (K - 1)} \\sum_{k=1}^{K} (\\bar\\theta_k - \\bar\\theta)^2

    with the means of K = 8 blocks of equal length. v, in ``state[p]["average_variance"]``, estimates the variance of
    the *average*: not of one iterate, which is far larger, nor of that divided by the number of iterates, which
    ignores that neighbors are alike. It is unbiased where blocks are much longer than the iterates' memory; with
    shorter ones, or iterates that still drift, it is too small, or takes the drift for noise (batch means; Chen et
    al., 2020, for stochastic gradient descent).

    The last step widens a posterior by v, where the optimizer has one. Of `backprop.BayesByBackprop`, rho is averaged
    as well; of `ivon.IVON`, the curvature is the last:

    .. math:: \\sigma_v^2 = \\left(\\log(1 + e^{\\bar\\rho})\\right)^2 + v, \\qquad
        \\sigma_v^2 = \\frac{1}{N_{\\rm ess} (h + \\delta_v)} + v

    Before the last step the parameters are the plain iterates. All is kept in the optimizer's state, so a checkpoint
    holds it.

    Parameters
    ----------
    optimizer
        counts its steps in ``state[p]["step"]``. It is changed in place, and returned.
    steps
        T, the length of the run.
    share
        of the steps, the last ones, that are averaged, in (0, 1].

    Raises
    ------
    ValueError
        there is no step to average.

    Examples
    --------
    Gradients with noise 1 move the iterates for ever; their average comes to rest, and knows how nearly:

    >>> import torch
    >>> from dpivon import adaptive, iterates
    >>> w = torch.nn.Parameter(torch.zeros(1000))
    >>> sgd = adaptive.sgd([w], lr=0.5)
    >>> sgd = iterates.average(sgd, steps=400)
    >>> def go(steps):
    ...     for _ in range(steps):
    ...         w.grad = w.detach() - 1 + torch.randn(1000)
    ...         sgd.step()
    ...     return round((w - 1).std().item(), 1)
    >>> go(399)
    0.5
    >>> go(1)  # the last step puts the average in place
    0.1
    >>> v = sgd.state[w]["average_variance"].mean()
    >>> round(v.sqrt().item(), 1)
    0.1
    """
    if not (steps >= 1 and 0 < share <= 1):
        raise ValueError(f"steps must be at least 1 and share in (0, 1], got {steps} and {share}")
    blocks = min(BLOCKS, steps)
    length = max(1, int(share * steps) // blocks)
    first = steps - blocks * length

    @torch.no_grad()
    def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                done, count = divmod(state.get("step", 0) - first - 1, length)  # blocks; iterates in this one
                if p.grad is None or not 0 <= done < blocks:
                    continue
                if done == count == 0:
                    state["iterates"] = {}
                for name, value in {"weight": p, "rho": state.get("rho")}.items():
                    if value is not None:
                        accumulate(state["iterates"], name, value, done, count, last=count + 1 == length)
                if state["step"] == steps:
                    finish(p, state, group, blocks)

    optimizer.register_step_post_hook(after_step)
    return optimizer


def accumulate(memory: dict[str, Any], name: str, value: Tensor, done: int, count: int, last: bool) -> None:
    """Add an iterate to the mean of its block, and a block's mean to the average and to the squared deviations."""
    if done == count == 0:
        memory[name] = {kind: torch.zeros_like(value) for kind in ("block", "average", "scatter")}
    block, mean, scatter = memory[name].values()
    block.add_((value - block) / (count + 1))
    if last:
        before = block - mean
        mean.add_(before / (done + 1))
        scatter.addcmul_(before, block - mean)  # Welford's sum of squares
        block.zero_()


def finish(p: Tensor, state: dict[str, Any], group: dict[str, Any], blocks: int) -> None:
    """Put the average in the place of the last iterate, and its variance into the posterior's, if there is one."""
    memory = state["iterates"]
    p.copy_(memory["weight"]["average"])
    state["average_variance"] = v = memory["weight"]["scatter"] / (blocks * max(blocks - 1, 1))
    if "rho" in state:
        sigma = (F.softplus(memory["rho"]["average"]).square() + v).sqrt()
        state["rho"].copy_(sigma + torch.log(-torch.expm1(-sigma)))  # whose softplus is sigma
    if "h" in state:
        ess, damping = group["ess"], group["weight_decay"]
        precision = ess * (state["h"] + damping)
        state["h"].copy_(precision / (1 + v * precision) / ess - damping)  # whose 1 / (N_ess (h + delta_v)) is the sum


def sgd(
    params: Iterable[Any], lr: float, steps: int, samples: int = 0, beta1: float = 0.9, weight_decay: float = 0.0
) -> Any:
    """`adaptive.sgd` that ends at the average (Polyak and Juditsky, 1992), and keeps `samples` iterates.

    The average is a point: v is the training noise that is left in it, and says nothing of how well the data determine
    the weights, so it would be no posterior. The iterates themselves scatter more widely; `snapshots` says of what use
    that is.
    """
    return average(snapshots.keep(adaptive.sgd(params, lr, beta1, weight_decay), steps, samples), steps)


def bayes_by_backprop(
    params: Iterable[Any],
    lr: float,
    ess: float,
    steps: int,
    sigma_init: float = 0.05,
    prior_scale: float = 1.0,
    beta1: float = 0.9,
) -> BayesByBackprop:
    """Bayes by Backprop with the three parts of DPVIm (Jälkö et al., 2022), on the weight's private gradient.

    The gradient of rho is mapped from that of the weight ("aligned"), the iterates are averaged, and the posterior
    knows of the noise that is left in its mean. How large that is, is inferred from the iterates there as well; the
    estimator by batch means is ours.
    """
    optimizer = BayesByBackprop(params, lr, ess, sigma_init=sigma_init, prior_scale=prior_scale, beta1=beta1)
    return average(optimizer, steps)


def adam(params: Iterable[Any], lr: float, steps: int, samples: int = 0, **options: float) -> Any:
    """`adaptive.adam` that ends at the average; a point, as `sgd` is, with the same iterates besides."""
    return average(snapshots.keep(adaptive.adam(params, lr, **options), steps, samples), steps)


def ivon(params: Iterable[Any], lr: float, ess: float, steps: int, samples: int = 0, **settings: Any) -> IVON:
    """`ivon.IVON` whose mean is the average of iterates, and whose posterior knows of the noise that is left in it.

    The iterates that are kept are those of the mean.
    """
    return average(snapshots.keep(IVON(params, lr, ess, **settings), steps, samples), steps)

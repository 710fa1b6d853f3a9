"""Stochastic gradient Langevin dynamics: an optimizer whose iterates, with the right noise, are posterior samples.

The noise may do two jobs. What the mechanism has put into `p.grad` for privacy counts towards what the dynamics needs.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dpivon import checks, snapshots
from dpivon.weights import normal_like


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

    Examples
    --------
    A loss with its minimum at 1 and curvature 1, on 100 examples: the iterates scatter as the posterior does.

    >>> import torch
    >>> from dpivon.langevin import SGLD
    >>> w = torch.nn.Parameter(torch.zeros(1000))
    >>> optimizer = SGLD([w], lr=0.1, ess=100, steps=200)
    >>> for _ in range(200):
    ...     w.grad = w.detach() - 1
    ...     optimizer.step()
    >>> round(w.mean().item(), 1), round(w.std().item(), 1)
    (1.0, 0.1)
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
        checks.positive(lr=lr, ess=ess, steps=steps)
        settings = {"temperature": temperature, "weight_decay": weight_decay, "noise_std": noise_std}
        checks.not_negative(**settings, samples=samples)
        super().__init__(params, {"lr": lr, "ess": ess, **settings})
        self.generator = generator
        snapshots.keep(self, steps, samples)

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """The parameters at which to take the gradient: the latest iterate."""
        yield

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            lr = group["lr"]
            needed = 2 * lr * group["temperature"] / group["ess"]
            std = math.sqrt(max(needed - (lr * group["noise_std"]) ** 2, 0.0))
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                noise = normal_like(p, self.generator)
                p.sub_(lr * (p.grad + group["weight_decay"] * p)).add_(noise, alpha=std)


def free_noise_multiplier(
    lr: float, ess: float, batch_size: float, max_grad_norm: float, temperature: float = 1.0
) -> float:
    """The noise multiplier that the dynamics' own noise amounts to: at or above a budget's, privacy costs nothing more.

    .. math:: \\sigma = \\frac{b}{C} \\sqrt{\\frac{2 \\tau}{N_{\\rm ess}\\, \\alpha}}
    """
    checks.positive(lr=lr, ess=ess, batch_size=batch_size, max_grad_norm=max_grad_norm, temperature=temperature)
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
    checks.positive(log_likelihood_range=log_likelihood_range, samples=samples, temperature=temperature)
    return samples * log_likelihood_range / temperature

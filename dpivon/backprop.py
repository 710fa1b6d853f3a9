"""Bayes by Backprop: a mean-field Gaussian over the weights, learned by the reparameterization trick.

The draw is held in weight space, theta = m + sigma epsilon with one epsilon for the whole batch. So the gradient of an
example with respect to (m, rho) is a public map of its gradient with respect to theta, and there are two ways to make
the method private: clip and noise the weight's gradient, and map afterwards (`BayesByBackprop`; the "aligned" gradients
of Jälkö et al., 2022); or clip and noise the gradient of (m, rho) together, with twice the dimension, as in the
literature (`Reparameterized`, `JointBackprop`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dpivon import checks
from dpivon.weights import held, normal_like

Prior = Callable[[Tensor], Tensor]


def gaussian_prior(scale: float) -> Prior:
    """The gradient of -log p at theta for independent normal weights with standard deviation `scale`."""
    return lambda theta: theta / scale**2


def mixture_prior(wide: float, narrow: float, share: float = 0.5) -> Prior:
    """The same for a mixture of two normals, of which `share` is wide (Blundell et al., 2015).

    .. math::
        -\\frac{d}{d\\theta} \\log p(\\theta) = \\theta \\left( \\frac{r_1}{s_1^2} + \\frac{r_2}{s_2^2} \\right)

    where r are the shares of the two parts in the density at theta.

    Raises
    ------
    ValueError
        a scale is not positive, or `share` not between 0 and 1.
    """
    checks.positive(wide=wide, narrow=narrow)
    if not 0 < share < 1:
        raise ValueError(f"share must be in (0, 1), got {share}; for one part take gaussian_prior(scale)")

    def score(theta: Tensor) -> Tensor:
        logits = torch.stack(
            [math.log(p / s) - theta.square() / (2 * s**2) for p, s in ((share, wide), (1 - share, narrow))]
        )
        wide_part, narrow_part = logits.softmax(0)
        return theta * (wide_part / wide**2 + narrow_part / narrow**2)

    return score


def inverse_softplus(sigma: float) -> float:
    """The rho with log(1 + exp(rho)) = sigma."""
    return sigma + math.log(-math.expm1(-sigma))


class BayesByBackprop(torch.optim.Optimizer):
    """Bayes by Backprop (Blundell et al., 2015) from the gradient at a draw of the weights.

    .. math::
        \\theta = m + \\sigma \\epsilon, \\qquad \\sigma = \\log(1 + e^\\rho), \\qquad
        \\tilde g = g - \\tfrac{1}{N_{\\rm ess}} \\nabla \\log p(\\theta) \\\\
        m \\leftarrow m - \\alpha \\tilde g, \\qquad
        \\rho \\leftarrow \\rho - \\alpha \\left(\\tilde g\\, \\epsilon - \\tfrac{1}{N_{\\rm ess}\\, \\sigma}\\right)
            \\frac{d\\sigma}{d\\rho}

    with normalized momentum on both. Prior and entropy touch no data, so they come after the privacy noise.

    Parameters
    ----------
    params
        parameters or groups, as for any torch optimizer; they hold m.
    lr
        alpha > 0, for the mean loss.
    ess
        N_ess > 0, usually the number of training examples.
    sigma_init
        sigma at the start, > 0.
    prior_scale
        standard deviation of a Gaussian prior, > 0.
    prior
        another prior, as `mixture_prior` makes them.
    beta1
        decay of the momentum, in [0, 1).
    generator
        source of the draws; None is torch's global one.

    Raises
    ------
    ValueError
        a hyperparameter is out of range.

    Examples
    --------
    A loss with its minimum at 1 and curvature 1, on 100 examples: the posterior has mean 1 and width 0.1.

    >>> import torch
    >>> from dpivon.backprop import BayesByBackprop
    >>> w = torch.nn.Parameter(torch.zeros(1000))
    >>> optimizer = BayesByBackprop([w], lr=0.5, ess=100)
    >>> for _ in range(500):
    ...     with optimizer.sampled_params():
    ...         w.grad = w.detach() - 1
    ...     optimizer.step()
    >>> sigma = optimizer.variance()[w].sqrt()
    >>> round(w.mean().item(), 1), round(sigma.mean().item(), 1)
    (1.0, 0.1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        ess: float,
        sigma_init: float = 0.05,
        prior_scale: float = 1.0,
        prior: Prior | None = None,
        beta1: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> None:
        checks.positive(lr=lr, ess=ess, sigma_init=sigma_init, prior_scale=prior_scale)
        checks.decay(beta1=beta1)
        super().__init__(params, {"lr": lr, "ess": ess, "beta1": beta1, "sigma_init": sigma_init})
        self.prior, self.generator = prior or gaussian_prior(prior_scale), generator
        self.epsilon: dict[Tensor, Tensor] = {}
        self.drawing = False

    def trained(self) -> list[tuple[dict[str, Any], Tensor, dict[str, Any]]]:
        """(group, parameter, state) of all that learn; the state of a new one begins at sigma_init."""
        found = [(group, p, self.state[p]) for group in self.param_groups for p in group["params"] if p.requires_grad]
        for group, p, state in found:
            if not state:
                state["step"] = 0
                state["rho"] = torch.full_like(p, inverse_softplus(group["sigma_init"]))
                state["momentum"], state["momentum_rho"] = torch.zeros_like(p), torch.zeros_like(p)
        return found

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the parameters are a draw; after, the mean again.

        Raises
        ------
        RuntimeError
            a draw is already in place: the mean would be lost.
        """
        if self.drawing:
            raise RuntimeError("the parameters are a draw already; leave `sampled_params()` before entering it again")
        draw = {}
        for _, p, state in self.trained():
            self.epsilon[p] = normal_like(p, self.generator)
            draw[p] = p.detach().addcmul(F.softplus(state["rho"]), self.epsilon[p])
        self.drawing = True
        try:
            with held(list(draw), list(draw.values())):
                yield
        finally:
            self.drawing = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Map the gradient at the draw to those of m and rho, and move both. Reads `p.grad` alone.

        Raises
        ------
        RuntimeError
            no draw was made since the last step, or it has not been left and would put the old mean back.
        """
        if self.drawing:
            raise RuntimeError("leave `sampled_params()` before step(): it would put the old mean back")
        moved = [entry for entry in self.trained() if entry[1].grad is not None]
        if any(p not in self.epsilon for _, p, _ in moved):
            raise RuntimeError("take the gradient inside `with optimizer.sampled_params():` before step()")
        for group, p, state in moved:
            sigma, epsilon = F.softplus(state["rho"]), self.epsilon[p]
            assert p.grad is not None
            g = p.grad + self.prior(p + sigma * epsilon) / group["ess"]
            g_rho = (g * epsilon - 1 / (group["ess"] * sigma)) * state["rho"].sigmoid()
            state["step"] += 1
            beta1, lr = group["beta1"], group["lr"]
            p.sub_(lr * state["momentum"].lerp_(g, 1 - beta1) / (1 - beta1 ** state["step"]))
            state["rho"].sub_(lr * state["momentum_rho"].lerp_(g_rho, 1 - beta1) / (1 - beta1 ** state["step"]))
        self.epsilon.clear()

    def variance(self) -> dict[Tensor, Tensor]:
        """sigma^2 of every parameter that learns."""
        return {p: F.softplus(state["rho"]).square() for _, p, state in self.trained()}


class Reparameterized(nn.Module):
    """A network whose parameters are m and rho, at a draw that `JointBackprop` holds fixed for the batch.

    Parameters
    ----------
    network
        any module; its parameters become the start of m, and are frozen.
    sigma_init
        sigma at the start, > 0.

    Raises
    ------
    ValueError
        sigma_init is out of range.
    """

    def __init__(self, network: nn.Module, sigma_init: float = 0.05) -> None:
        super().__init__()
        checks.positive(sigma_init=sigma_init)
        self.network = network.requires_grad_(False)
        named = list(network.named_parameters())
        self.names = [name for name, _ in named]
        self.m = nn.ParameterList([p.detach().clone() for _, p in named])
        self.rho = nn.ParameterList([torch.full_like(p, inverse_softplus(sigma_init)) for _, p in named])
        self.epsilon = [torch.zeros_like(p) for _, p in named]
        self.link()

    def link(self) -> None:
        """Tie each draw to its rho, where the optimizer finds it."""
        for rho, epsilon in zip(self.rho, self.epsilon, strict=True):
            rho.epsilon = epsilon

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Reparameterized":
        """What `.to()` and its kin call: the draws move with the parameters."""
        super()._apply(fn, recurse)
        self.epsilon = [fn(epsilon) for epsilon in self.epsilon]
        self.link()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What a copy calls: a copied parameter has lost the tie."""
        super().__setstate__(state)
        self.link()

    def forward(self, x: Any) -> Any:
        """The network's output at theta = m + sigma epsilon; at the mean outside of a draw."""
        parts = zip(self.names, self.m, self.rho, self.epsilon, strict=True)
        theta = {name: m + F.softplus(rho) * epsilon for name, m, rho, epsilon in parts}
        return functional_call(self.network, theta, (x,))


class JointBackprop(torch.optim.Optimizer):
    """Bayes by Backprop on the gradients of (m, rho) themselves, which were clipped and noised together.

    Parameters
    ----------
    params
        of a `Reparameterized` network.
    lr, ess, prior_scale, beta1, generator
        as in `BayesByBackprop`.

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
        prior_scale: float = 1.0,
        beta1: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> None:
        checks.positive(lr=lr, ess=ess, prior_scale=prior_scale)
        checks.decay(beta1=beta1)
        super().__init__(params, {"lr": lr, "ess": ess, "prior_scale": prior_scale, "beta1": beta1})
        self.generator, self.drawn, self.drawing = generator, False, False

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the network computes at a draw; after, at the mean.

        Raises
        ------
        RuntimeError
            a draw is already in place, and would be lost.
        """
        if self.drawing:
            raise RuntimeError("the network is at a draw already; leave `sampled_params()` before entering it again")
        self.drawn = self.drawing = True
        draws = [p.epsilon for group in self.param_groups for p in group["params"] if hasattr(p, "epsilon")]
        for epsilon in draws:
            epsilon.normal_(generator=self.generator)
        try:
            yield
        finally:
            self.drawing = False
            for epsilon in draws:
                epsilon.zero_()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Add the gradient of the KL divergence to the prior, which touches no data, and move m and rho.

        Raises
        ------
        RuntimeError
            no draw was made since the last step.
        """
        if not self.drawn:
            raise RuntimeError("take the gradient inside `with optimizer.sampled_params():` before step()")
        self.drawn = False
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if hasattr(p, "epsilon"):
                    sigma = F.softplus(p)
                    kl = (sigma / group["prior_scale"] ** 2 - 1 / sigma) * p.sigmoid()
                else:
                    kl = p / group["prior_scale"] ** 2
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad + kl / group["ess"], 1 - group["beta1"])
                p.sub_(group["lr"] * momentum / (1 - group["beta1"] ** state["step"]))

"""A Laplace approximation of the last layer, from one private release of its curvature after training.

The curvature is a sum over training examples, so it is data like a gradient is, and passes the same mechanism. To get
there it is dressed as a gradient: a `Probe` has a weight for each entry of the curvature, and the "loss" of an example
is the inner product of these with the example's own curvature.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dpivon import adaptive, checks
from dpivon.weights import held, normal_like

SHARE = 0.1  # of the budget, in the sense of `sigma`


def last_layer(model: nn.Module) -> nn.Linear:
    """The model's last linear layer, whose output are the logits.

    Raises
    ------
    ValueError
        there is none, or one without a bias.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not layers or layers[-1].bias is None:
        raise ValueError(f"{type(model).__name__} must end in a linear layer with a bias, whose output are the logits")
    return layers[-1]


class Probe(nn.Module):
    """A network with a parameter whose gradient is the curvature of the last layer's weights and biases.

    .. math::
        \\ell(v; x) = \\sum_{kj} v_{kj} H_{kj}(x), \\qquad \\nabla_v \\ell = H(x) \\\\
        H_{kj}(x) = p_k (1 - p_k) a_j^2

    H is the diagonal of the generalized Gauss-Newton matrix of the cross-entropy, exact for the last layer; p are the
    predicted probabilities, and a the layer's inputs, with a 1 for the bias at their end. Labels do not enter.

    Parameters
    ----------
    network
        trained; a frozen copy is kept.

    Raises
    ------
    ValueError
        see `last_layer`.

    Examples
    --------
    Two classes, of which the network knows nothing, so p (1 - p) = 1/4; inputs 3 and 1, and the bias' 1:

    >>> import torch
    >>> from dpivon.laplace import Probe
    >>> net = torch.nn.Linear(2, 2)
    >>> for p in net.parameters():
    ...     _ = torch.nn.init.zeros_(p)
    >>> probe = Probe(net)
    >>> probe(torch.tensor([[3.0, 1.0]])).sum().backward()
    >>> probe.v.grad.tolist()
    [[2.25, 0.25, 0.25], [2.25, 0.25, 0.25]]
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).eval().requires_grad_(False)
        layer = last_layer(self.network)
        layer.register_forward_hook(self.see)
        self.v = nn.Parameter(layer.weight.new_zeros(layer.out_features, layer.in_features + 1))
        self.seen: list[Tensor] = []

    def see(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Note what goes into the last layer and what comes out."""
        self.seen[:] = inputs[0], output

    def forward(self, x: Any) -> Tensor:
        """(n,) inner products of v with each example's curvature."""
        self.network(x)
        inputs, logits = self.seen
        self.seen.clear()
        p = logits.softmax(1)
        a = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        return torch.einsum("nk,nj,kj->n", p * (1 - p), a.square(), self.v)


def sgd(params: Iterable[Any], lr: float, ess: float, beta1: float = 0.9, weight_decay: float = 1e-3) -> Any:
    """`adaptive.sgd`, for weights with a prior: its precision is N_ess delta_v.

    Raises
    ------
    ValueError
        there is no prior, so that a weight without curvature would have an infinite variance; or N_ess <= 0.
    """
    if not weight_decay > 0:
        raise ValueError(f"weight_decay must be > 0, got {weight_decay}; times N it is the precision of the prior")
    checks.positive(ess=ess)
    return adaptive.Adaptive(params, lr, adaptive.momentum, adaptive.one, beta1, weight_decay=weight_decay, ess=ess)


def mean_product(output: Tensor, y: Tensor) -> Tensor:
    """The probe's loss: its output, averaged over the batch."""
    return output.mean()


def sigma(alone: float) -> float:
    """The noise multiplier of the one release of the curvature, which takes part in every example.

    .. math:: \\sigma_L = \\frac{\\sigma_{\\rm alone}}{\\sqrt{0.1}}

    At every order, the Rényi divergence of a Gaussian release is proportional to 1 / sigma^2: so it costs a tenth of
    one that spends the whole budget, for which the noise multiplier is `alone`.
    """
    return alone / SHARE**0.5


class Laplace:
    """The Gaussian posterior of the last layer, around the trained weights; to predict with.

    .. math:: \\sigma_v^2 = \\frac{1}{N_{\\rm ess} (\\max(h, 0) + \\delta_v)}

    h is the private mean curvature over the examples. Noise makes some of it negative, which no curvature is. Cutting
    it off at zero has a bias: where there is nothing but noise of standard deviation s, it leaves 0.40 s on average, a
    floor as that of `curvature.noise_floor`, and the posterior of these weights is too narrow. Before the release, the
    posterior is a point.

    Parameters
    ----------
    model
        holds the mean.
    optimizer
        from `sgd`; its state holds ``curvature`` after `learn`.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def learn(self, probe: Probe) -> None:
        """Take over the curvature h from the probe's private gradient."""
        layer, h = last_layer(self.model), probe.v.grad
        assert h is not None
        for p, part in ((layer.weight, h[:, :-1]), (layer.bias, h[:, -1])):
            self.optimizer.state[p]["curvature"] = part.clone()

    def variance(self) -> dict[Tensor, Tensor]:
        """sigma_v^2 of the last layer's weight and bias; empty before the release."""
        group = self.optimizer.param_groups[0]
        layer = last_layer(self.model)
        states = {p: self.optimizer.state[p] for p in (layer.weight, layer.bias)}
        return {
            p: 1 / (group["ess"] * (state["curvature"].clamp(min=0) + group["weight_decay"]))
            for p, state in states.items()
            if "curvature" in state
        }

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the last layer is a draw; after, the mean again."""
        variance = self.variance()
        generator = getattr(self.optimizer, "generator", None)
        draw = [p.detach().addcmul(v.sqrt(), normal_like(p, generator)) for p, v in variance.items()]
        with held(list(variance), draw):
            yield

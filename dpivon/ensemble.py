"""Deep ensembles inside one private mechanism: the members share every batch, its clipping and its noise."""

import copy
import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpivon import adaptive
from dpivon.assignment import hashed

Loss = Callable[[Any, Tensor], Tensor]


class Ensemble(nn.Module):
    """M copies of a network with starts of their own, which predict by the mean of their probabilities.

    .. math:: p(y \\mid x) = \\frac{1}{M} \\sum_{m=1}^{M} p(y \\mid x, \\theta_m)

    An example's gradient is that of all members together, one vector that is clipped to C, and every coordinate gets
    noise sigma_p C. So the ensemble is one Gaussian mechanism, and costs what one network costs. Read the other way
    round, it is the composition of M mechanisms on the same Poisson batches, in which a member's share of the norm is
    about C / sqrt(M): M networks trained apart at this budget would each have needed about sqrt(M) times the noise.

    With `shards`, an example trains one member only, chosen by `assignment.place`, and that member's gradient has all
    of C. The joint clipping is the same, and the choice depends on the example alone, so the guarantee is the same.

    Parameters
    ----------
    network
        the first member; the others are copies whose layers draw new weights. These follow from the first one's, so a
        run's seed fixes them all. What has no `reset_parameters()` starts alike.
    members
        M, at least 1.
    shards
        each example trains one member.

    Raises
    ------
    ValueError
        there is no member.

    Examples
    --------
    >>> import torch
    >>> from dpivon import models
    >>> from dpivon.ensemble import Ensemble
    >>> net = models.build("mlp", (1, 8, 8), 10, seed=0)
    >>> four = Ensemble(net, members=4)
    >>> x = torch.zeros(5, 1, 8, 8)
    >>> [tuple(logits.shape) for logits in four.train()(x)]
    [(5, 10), (5, 10), (5, 10), (5, 10)]
    >>> tuple(four.eval()(x).shape)
    (5, 10)
    """

    def __init__(self, network: nn.Module, members: int = 4, shards: bool = False) -> None:
        super().__init__()
        if not (members >= 1 and members == int(members)):
            raise ValueError(f"members must be a whole number >= 1, got {members}")
        weights = b"".join(p.detach().cpu().numpy().tobytes() for p in network.parameters())
        seed = int.from_bytes(hashlib.sha256(weights).digest()[:8], "big") >> 1
        self.members = nn.ModuleList([network, *(restarted(network, seed + m) for m in range(1, int(members)))])
        self.shards = shards

    def forward(self, x: Tensor) -> Any:
        """In training a list of the members' outputs, for `summed`; in evaluation the log of the mean probabilities.

        An output may be a tuple of tensors; all are treated alike.
        """
        outputs = [member(x) for member in self.members]
        if not self.training:
            return tree_map(mixed, *outputs)
        if self.shards:
            own = hashed(x, len(outputs))
            outputs = [tree_map(lambda t, m=m: only(t, own == m), output) for m, output in enumerate(outputs)]
        return outputs


def mixed(*logits: Tensor) -> Tensor:
    """The log of the members' mean probabilities."""
    return torch.stack(logits).log_softmax(-1).logsumexp(0) - math.log(len(logits))


def restarted(network: nn.Module, seed: int) -> nn.Module:
    """A copy of the network whose layers have drawn new weights; torch's global generator is left as it was."""
    new = copy.deepcopy(network)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in new.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
    return new


def only(t: Tensor, mask: Tensor) -> Tensor:
    """The same values, whose gradient is zero for the examples that the (n,) mask leaves out."""
    return torch.where(mask.view(-1, *[1] * (t.dim() - 1)), t, t.detach())


def summed(loss: Loss) -> Loss:
    """The sum of the members' losses. Each depends on its own member, so its gradient is that of M separate losses."""
    return lambda outputs, y: torch.stack([loss(output, y) for output in outputs]).sum()


def sgd(params: Iterable[Any], lr: float, members: int, beta1: float = 0.9, weight_decay: float = 0.0) -> Any:
    """`adaptive.sgd` for members that see b / M examples of a batch each, whose sum the mechanism divides by b.

    .. math:: \\theta_m \\leftarrow \\theta_m - \\alpha (M g + \\delta_v \\theta_m)

    The factor M comes after the noise and multiplies that too: in the loss, clipping would take it away again.
    """
    return adaptive.sgd(params, lr * members, beta1, weight_decay / members)

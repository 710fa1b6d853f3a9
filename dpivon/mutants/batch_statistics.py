"""NOT PRIVATE. A network with batch normalization: one example changes the gradients of all others.

In review: a `BatchNorm` layer, perhaps deep in a network from a library. Clipping bounds each gradient, but all of them
depend on every example, and the running statistics enter the model without noise.

An audit has little power here: an ordinary example moves the statistics of a batch of hundreds by little, and canaries
would have to be built for the network. So the mechanism refuses such layers, and this is tested exactly.
"""

import torch
import torch.nn.functional as F
from torch import nn

from dpivon import adaptive, mechanism

EXACT = "tests/test_mutants.py::test_batch_statistics_are_refused_and_would_break_the_sensitivity"


def network() -> nn.Module:
    """A small network whose examples mix."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 10))


def attack(seed: int = 0) -> None:
    """There is nothing to attack: `mechanism.private_gradient` raises ValueError."""
    model = network()
    dp = mechanism.mechanism(
        adaptive.sgd(model.parameters(), lr=1.0), noise_multiplier=1.0, max_grad_norm=1.0, batch_size=8, n=8
    )
    x, y = torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64)
    mechanism.private_gradient(model, F.cross_entropy, x, y, dp)

"""NOT PRIVATE. The noise has standard deviation sigma, and C is forgotten.

In review: `noise_multiplier` is used as if it were a standard deviation. With C = 1 it is right by chance, with C < 1
only wasteful; with C = 4 the noise is a quarter of what it must be.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dpivon import audit
from dpivon.gradients import Loss, clipped_sum, trainable

SIGMA = 1.1


def gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor, dp: Any) -> None:
    """What stands in the place of `mechanism.private_gradient`."""
    sums = clipped_sum(model, loss, x, y, dp.max_grad_norm).sums
    for p, total in zip(trainable(model).values(), sums, strict=True):
        std = dp.noise_multiplier
        p.grad = (total + std * torch.randn(p.shape, generator=dp.generator)) / dp.expected_batch_size


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it."""
    return audit.full_batch(gradient, noise_multiplier=SIGMA, max_grad_norm=4.0, seed=seed)

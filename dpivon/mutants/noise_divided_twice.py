"""NOT PRIVATE. The noise is scaled for the mean, and then divided by b together with the sum.

In review: a standard deviation of sigma C / b is added *before* the division by b. The accountant's epsilon does not
change, and the model trains suspiciously well.
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
        std = dp.noise_multiplier * dp.max_grad_norm / dp.expected_batch_size
        p.grad = (total + std * torch.randn(p.shape, generator=dp.generator)) / dp.expected_batch_size


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it."""
    return audit.full_batch(gradient, noise_multiplier=SIGMA, seed=seed)

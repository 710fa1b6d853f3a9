"""NOT PRIVATE. The noise is half of what the accountant was told.

In review: two places hold a noise multiplier, one for the accountant and one for the noise; or a factor 2 of somebody
else's definition of neighbors was left in. The losses, and the printed epsilon, look as they should.
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
        std = dp.noise_multiplier * dp.max_grad_norm / 2
        p.grad = (total + std * torch.randn(p.shape, generator=dp.generator)) / dp.expected_batch_size


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it."""
    return audit.full_batch(gradient, noise_multiplier=SIGMA, seed=seed)

"""NOT PRIVATE. The batch's mean gradient is clipped, not each example's.

In review: one norm is computed, by `clip_grad_norm_` or by hand, and nothing runs over examples. The mean is then
short, but one example may still turn it round: the sensitivity is 2 C, not C / b.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dpivon import audit
from dpivon.gradients import Loss, mean_gradient, trainable

SIGMA = 1.1


def gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor, dp: Any) -> None:
    """What stands in the place of `mechanism.private_gradient`."""
    gradients, _ = mean_gradient(model, loss, x, y)
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    factor = (dp.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
    for p, g in zip(trainable(model).values(), gradients, strict=True):
        noise = dp.noise_multiplier * dp.max_grad_norm * torch.randn(p.shape, generator=dp.generator)
        p.grad = g * factor + noise / dp.expected_batch_size


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it."""
    return audit.full_batch(gradient, noise_multiplier=SIGMA, seed=seed)

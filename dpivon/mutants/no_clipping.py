"""NOT PRIVATE. Noise is added, and no gradient is clipped.

In review: the mean loss is differentiated once, by an ordinary backward pass. Without a bound on one example's
gradient there is no sensitivity, and the noise multiplier multiplies nothing.
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
    for p, g in zip(trainable(model).values(), gradients, strict=True):
        noise = dp.noise_multiplier * dp.max_grad_norm * torch.randn(p.shape, generator=dp.generator)
        p.grad = (g * len(y) + noise) / dp.expected_batch_size


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it."""
    return audit.full_batch(gradient, noise_multiplier=SIGMA, seed=seed)

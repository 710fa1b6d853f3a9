"""NOT PRIVATE. The batch comes in micro-batches, and only the last one's mean gets noise.

In review: noise of standard deviation sigma C / b is added to the gradient of the last micro-batch, and then the means
of all K are averaged, which divides the noise by K once more.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dpivon import audit
from dpivon.gradients import Loss, clipped_sum, trainable

SIGMA = 1.1
MICRO_BATCHES = 4


def gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor, dp: Any) -> None:
    """What stands in the place of `mechanism.private_gradient`."""
    parts = torch.arange(len(y)).tensor_split(MICRO_BATCHES)
    means = [
        [
            total * MICRO_BATCHES / dp.expected_batch_size
            for total in clipped_sum(model, loss, x[i], y[i], dp.max_grad_norm).sums
        ]
        for i in parts
    ]
    std = dp.noise_multiplier * dp.max_grad_norm / dp.expected_batch_size
    for k, p in enumerate(trainable(model).values()):
        means[-1][k] += std * torch.randn(p.shape, generator=dp.generator)
        p.grad = torch.stack([mean[k] for mean in means]).mean(0)


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it."""
    return audit.full_batch(gradient, noise_multiplier=SIGMA, seed=seed)

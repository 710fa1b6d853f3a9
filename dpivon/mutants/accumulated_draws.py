"""NOT PRIVATE. Four draws of the weights, and their clipped gradients are added up instead of averaged.

In review: the backward pass stands in a loop over posterior samples, each with its own clipping, before one noise. Each
example then counts four times: the sensitivity is 4 C under noise for C.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dpivon import audit
from dpivon.gradients import Loss, clipped_sum, trainable

SIGMA = 1.1
DRAWS = 4


def gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor, dp: Any) -> None:
    """What stands in the place of `mechanism.private_gradient`."""
    parameters = list(trainable(model).values())
    totals = [torch.zeros_like(p) for p in parameters]
    for _ in range(DRAWS):  # for Dirac canaries the gradient is the same at every draw, so none is made here
        for total, part in zip(totals, clipped_sum(model, loss, x, y, dp.max_grad_norm).sums, strict=True):
            total += part
    for p, total in zip(parameters, totals, strict=True):
        noise = dp.noise_multiplier * dp.max_grad_norm * torch.randn(p.shape, generator=dp.generator)
        p.grad = (total + noise) / dp.expected_batch_size


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it."""
    return audit.full_batch(gradient, noise_multiplier=SIGMA, seed=seed)

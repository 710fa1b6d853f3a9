"""NOT PRIVATE. A run is resumed with the old generator's state on data that changed in between.

In review: a checkpoint restores the noise generator, and nothing checks that data and settings are the same. The two
releases carry the same noise, so their difference carries none: whoever has both reads the change exactly.
"""

from typing import Any

import torch
from torch import Tensor, nn

from dpivon import audit, mechanism
from dpivon.gradients import Loss, trainable

SIGMA = 1.1


def gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor, dp: Any) -> None:
    """The attacker's view: the release with the canaries, less the replayed release without them."""
    start = dp.generator.get_state()
    mechanism.private_gradient(model, loss, x, torch.full_like(y, int(y.max())), dp)  # every canary is out
    before = [p.grad for p in trainable(model).values()]
    dp.generator.set_state(start)
    mechanism.private_gradient(model, loss, x, y, dp)
    for p, g in zip(trainable(model).values(), before, strict=True):
        assert p.grad is not None
        assert g is not None
        p.grad = p.grad - g


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it."""
    return audit.full_batch(gradient, noise_multiplier=SIGMA, seed=seed)

"""NOT PRIVATE. The optimizer keeps the gradient that it saw before the noise, and steps by that.

In review: the context that samples the weights stores `p.grad` when it is left, and under hooks that is before clipping
and noise. `step()` reads the stored one. The accountant counts, the noise is drawn, and none of it reaches the weights.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpivon import audit, data, mechanism, train
from dpivon.gradients import Loss, mean_gradient, trainable
from dpivon.ivon import IVON

CONFIG = train.Config(method="dp-ivon-uncorrected", epsilon=2.0, epochs=3)


class RawStep(IVON):
    """IVON, fed behind the mechanism's back."""

    def __init__(self, raw: dict[Tensor, Tensor], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.raw = raw

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step by the raw gradients."""
        for p, g in self.raw.items():
            p.grad = g
        super().step()


def change(now: train.Run) -> None:
    """Put the mistake into a run."""
    config, private = now.config, now.gradient
    raw: dict[Tensor, Tensor] = {}

    def gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor) -> mechanism.Diagnostics:
        gradients, _ = mean_gradient(model, loss, x, y)
        raw.update(zip(trainable(model).values(), gradients, strict=True))
        return private(model, loss, x, y)  # clipped, noised and accounted for, and then not what is used

    assert config.lr is not None
    now.gradient = gradient
    settings = {"lr": config.lr, "ess": now.images.n, "noise_std": mechanism.noise_std(now.dp)}
    now.optimizer = RawStep(raw, now.model.parameters(), curvature="gradsq", **settings)
    now.schedule = torch.optim.lr_scheduler.LambdaLR(now.optimizer, now.lr_factor)


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it: the weights give it away."""
    return audit.white_box(replace(CONFIG, seed=seed), data.digits(), canaries=500, change=change)

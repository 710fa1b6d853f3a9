"""NOT PRIVATE. The step is by the private gradient, but the curvature comes from the raw one.

In review: h is estimated where the per-example gradients are at hand, "only for the preconditioner". The curvature sets
the step and the published variance, and neither of them has any noise.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpivon import audit, data, mechanism, train
from dpivon.gradients import Loss, mean_gradient, trainable
from dpivon.ivon import IVON

CONFIG = train.Config(method="dp-ivon-uncorrected", epsilon=2.0, epochs=3)


class RawCurvature(IVON):
    """IVON whose estimate of h sees raw gradients."""

    def __init__(self, raw: dict[Tensor, Tensor], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.raw = raw

    def estimate(self, group: dict[str, Any], parameters: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The private gradient, and the new h of the raw one."""
        private = [p.grad for p in parameters]
        for p in parameters:
            p.grad = self.raw[p]
        _, new = super().estimate(group, parameters)
        for p, g in zip(parameters, private, strict=True):
            p.grad = g
        g, _ = super().estimate(group, parameters)
        return g, new


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
    now.optimizer = RawCurvature(raw, now.model.parameters(), curvature="gradsq", **settings)
    now.schedule = torch.optim.lr_scheduler.LambdaLR(now.optimizer, now.lr_factor)


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it: h gives it away."""
    return audit.white_box(replace(CONFIG, seed=seed), data.digits(), canaries=500, change=change)

"""NOT PRIVATE. After private training a Laplace approximation is fitted to the training data, as "post-processing".

In review: a function that is called post-processing takes the training set as an argument. The precision of each weight
is a sum of squared gradients over private examples: a new release, with no noise at all.
"""

from dataclasses import replace

import torch

from dpivon import audit, data, train
from dpivon.gradients import per_example_gradients, trainable

CONFIG = train.Config(method="dp-sgd", epsilon=2.0, epochs=3)


def precision(now: train.Run) -> dict[str, torch.Tensor]:
    """The diagonal Laplace approximation: the sum of squared gradients over the training data, for each weight."""
    images = now.images
    total = {name: torch.zeros_like(p) for name, p in trainable(now.model).items()}
    for x, y in zip(images.x_train.split(256), images.y_train.split(256), strict=True):
        gradients, _ = per_example_gradients(now.model, now.loss, x, y)
        for name, g in zip(total, gradients, strict=True):
            total[name] += g.square().sum(0)
    return total


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it: the released precision is the score."""
    config, images, canaries = train.resolve(replace(CONFIG, seed=seed)), data.digits(), 500
    included = audit.coins(canaries, seed)
    now = audit.started(config, images, canaries, audit.plant(images, included))
    train.train(now, None, lambda line: None)
    return audit.concluded(now, {"precision": precision(now)["canary"]}, included, 0.05)

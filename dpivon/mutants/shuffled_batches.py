"""NOT PRIVATE AS CLAIMED. The data are shuffled once an epoch, and accounted for as Poisson batches.

In review: a `DataLoader(shuffle=True)` beside an accountant that is given `sample_rate`. Every example is in exactly
one batch of each epoch, which Poisson's law does not promise.

An audit has little power here: a canary's score is a sum over all batches, and the law of that sum is nearly the same.
What tells the two apart is the law of the batches itself, and that can be tested exactly.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dpivon import audit, data, train

EXACT = "tests/test_mutants.py::test_the_law_of_the_batches"
CONFIG = train.Config(method="dp-sgd", epsilon=2.0, epochs=6)


def batches(n: int, batch_size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """What stands in the place of `mechanism.poisson_batches`."""
    done = 0
    while done < steps:
        for index in torch.randperm(n, generator=generator).split(batch_size):
            if done < steps:
                yield index
            done += 1


def change(now: train.Run) -> None:
    """Put the mistake into a run."""
    assert now.config.batch_size is not None
    source = now.sources["batches"]
    now.batches = lambda: batches(now.images.n, now.config.batch_size, now.steps, source)  # type: ignore


def attack(seed: int = 0) -> audit.Audit:
    """The audit that faces it, and does not find it."""
    return audit.white_box(replace(CONFIG, seed=seed), data.digits(), canaries=1000, change=change)

"""NOT PRIVATE AS ACCOUNTED, every one of them: classic mistakes, each in its own file, to be read and attacked.

Each module has a docstring that says how the mistake looks in a review, and ``attack(seed)``, the audit that faces it.
Where an audit has too little power, `EXACT` names the test that catches the mistake, and the docstring says why.
"""

from importlib import import_module
from types import ModuleType

NAMES = (
    "no_clipping",
    "clip_after_averaging",
    "noise_without_clipping_norm",
    "half_the_noise",
    "noise_divided_twice",
    "noise_of_one_micro_batch",
    "accumulated_draws",
    "replayed_noise",
    "raw_step",
    "raw_curvature",
    "laplace_on_training_data",
    "shuffled_batches",
    "batch_statistics",
)


def load(name: str) -> ModuleType:
    """The module of the mistake `name`, one of `NAMES`."""
    return import_module(f"dpivon.mutants.{name}")

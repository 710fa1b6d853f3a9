"""Optimizers of the table of methods, outside of a run."""

import inspect

from dpivon import methods

NEEDED = {"ess": 10.0, "noise_std": 0.1, "steps": 10, "members": 2}


def build(name, params, lr=0.1):
    """The optimizer of the method `name`, with what a run would tell it."""
    optimizer = methods.get(name).optimizer
    known = inspect.signature(optimizer).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in known.values())
    options = {k: v for k, v in NEEDED.items() if k in known or (takes_more and k == "noise_std")}
    return optimizer(params, lr=lr, **options)

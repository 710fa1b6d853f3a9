"""The table of methods: a name, whether its gradients are private, and its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpivon import adaptive


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Parameters
    ----------
    private
        the gradients pass through the Gaussian mechanism.
    optimizer
        ``optimizer(params, lr=..., ...)``, a torch optimizer with `sampled_params()`.
    """

    private: bool
    optimizer: Callable[..., Any]


METHODS = {
    "sgd": Method(private=False, optimizer=adaptive.sgd),
    "dp-sgd": Method(private=True, optimizer=adaptive.sgd),
}


def get(name: str) -> Method:
    """The row `name` of `METHODS`.

    Raises
    ------
    ValueError
        the name is unknown.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]

"""The table of methods: a name, whether its gradients are private, its optimizer, and the settings it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dpivon import adaptive
from dpivon.ivon import IVON


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Parameters
    ----------
    private
        the gradients pass through the Gaussian mechanism.
    optimizer
        ``optimizer(params, lr=..., ...)``, a torch optimizer with `sampled_params()`.
    settings
        the fields of a run's configuration that the optimizer takes, besides lr.
    defaults
        their values where the configuration is silent.
    lr
        the learning rate for each data set where the configuration is silent.
    """

    private: bool
    optimizer: Callable[..., Any]
    settings: tuple[str, ...]
    defaults: dict[str, Any]
    lr: dict[str, float]


def sgd(private: bool) -> Method:
    """A row for stochastic gradient descent."""
    defaults = {"beta1": 0.9, "weight_decay": 0.0}
    return Method(private, adaptive.sgd, tuple(defaults), defaults, {"digits": 2.0, "cifar10": 4.0})


def moments(optimizer: Callable[..., Any], private: bool = True, damping: float | None = 1e-8) -> Method:
    """A row for a relative of Adam; where damping is None, the run sets it by `adaptive.noise_floor`."""
    defaults = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "damping": damping}
    return Method(private, optimizer, tuple(defaults), defaults, {"digits": 0.01, "cifar10": 0.002})


def ivon(curvature: str, private: bool = True) -> Method:
    """A row for IVON with one of the curvature estimators; ess is N where the configuration is silent."""
    defaults = {"beta1": 0.9, "beta2": 0.995, "weight_decay": 2e-4, "hess_init": 0.1, "samples": 32}
    squares = () if curvature in ("price", "constant") else ("scale",)
    settings = ("beta1", "beta2", "weight_decay", "hess_init", "ess", *squares)
    return Method(private, partial(IVON, curvature=curvature), settings, defaults, {"digits": 2.0, "cifar10": 4.0})


METHODS = {
    "sgd": sgd(private=False),
    "adam": moments(adaptive.adam, private=False),
    "ivon": ivon("price", private=False),
    "dp-sgd": sgd(private=True),
    "dp-adam": moments(adaptive.adam),
    "dp-rmsprop": moments(adaptive.rmsprop),
    "dp-adambc": moments(adaptive.adambc, damping=None),  # a root of a difference: lambda must be of the noise's size
    "dp-ivon-price": ivon("price"),
    "dp-ivon-gradsq": ivon("noise-corrected"),
    "dp-ivon-uncorrected": ivon("gradsq"),
    "dp-ivon-average": ivon("average-then-project"),
    "dp-ivon-block": ivon("block-mean"),
    "dp-ivon-constant": ivon("constant"),
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

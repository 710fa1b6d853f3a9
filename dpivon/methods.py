"""The table of methods: a name, whether its gradients are private, its optimizer, and the settings it reads."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from dpivon import adaptive, ensemble, iterates, langevin, laplace, snapshots
from dpivon import backprop as bayes
from dpivon.dropout import Masks, add
from dpivon.ivon import IVON


def unchanged(model: nn.Module) -> nn.Module:
    """The network as it is."""
    return model


def same(loss: Any) -> Any:
    """The loss as it is."""
    return loss


def optimizer_itself(model: nn.Module, optimizer: Any) -> Any:
    """The optimizer, which draws the weights by its own `sampled_params()`."""
    return optimizer


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
    network
        ``network(model, **settings)`` changes the network for the method.
    network_settings
        the fields of the configuration that it takes.
    posterior
        ``posterior(model, optimizer)`` has the `sampled_params()` that prediction draws from.
    loss
        ``loss(f)`` is the loss of the method's network, where f is that of the network it was made of.
    probe
        ``probe(model)`` has the gradient that is released once more after training; the posterior learns from it.
    """

    private: bool
    optimizer: Callable[..., Any]
    settings: tuple[str, ...]
    defaults: dict[str, Any]
    lr: dict[str, float]
    network: Callable[..., Any] = unchanged
    network_settings: tuple[str, ...] = ()
    posterior: Callable[..., Any] = optimizer_itself
    loss: Callable[..., Any] = same
    probe: Callable[..., Any] | None = None


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
    squares = () if curvature.startswith("price") or curvature == "constant" else ("scale",)
    settings = ("beta1", "beta2", "weight_decay", "hess_init", "ess", *squares)
    return Method(private, partial(IVON, curvature=curvature), settings, defaults, {"digits": 2.0, "cifar10": 4.0})


def sgld(private: bool) -> Method:
    """A row for Langevin dynamics, which predicts by the iterates that it kept."""
    defaults = {"temperature": 1.0, "weight_decay": 2e-4, "samples": 32}
    return Method(
        private, langevin.SGLD, (*defaults, "ess"), defaults, {"digits": 0.5, "cifar10": 1.0},
        posterior=snapshots.kept,
    )  # fmt: skip


def backprop(private: bool, joint: bool = False) -> Method:
    """A row for Bayes by Backprop, by the weight's gradient or by that of mean and rho together."""
    defaults = {"beta1": 0.9, "prior_scale": 1.0, "sigma_init": 0.05, "samples": 32}
    settings, lr = ("beta1", "prior_scale", "ess"), {"digits": 2.0, "cifar10": 4.0}
    if joint:
        return Method(
            private, bayes.JointBackprop, settings, defaults, lr,
            network=bayes.Reparameterized, network_settings=("sigma_init",),
        )  # fmt: skip
    return Method(private, bayes.BayesByBackprop, (*settings, "sigma_init"), defaults, lr)


def mc_dropout(private: bool) -> Method:
    """A row for gradient descent with dropout that stays on in prediction."""
    plain = sgd(private)
    return replace(
        plain, defaults={**plain.defaults, "dropout": 0.1, "samples": 32},
        network=lambda model, dropout: add(model, dropout),
        network_settings=("dropout",), posterior=lambda model, optimizer: Masks(model),
    )  # fmt: skip


def last_layer_laplace(private: bool) -> Method:
    """A row for gradient descent with a Laplace approximation of the last layer after it."""
    plain = sgd(private)
    return replace(
        plain, defaults={**plain.defaults, "weight_decay": 1e-3, "samples": 32},
        settings=(*plain.settings, "ess"), optimizer=laplace.sgd, probe=laplace.Probe, posterior=laplace.Laplace,
    )  # fmt: skip


def averaged(row: Method, optimizer: Callable[..., Any], slower: float = 1.0) -> Method:
    """The row with a mean of iterates at its end, for which the learning rate stays constant."""
    lr = {name: value / slower for name, value in row.lr.items()}
    return replace(row, optimizer=optimizer, lr=lr, defaults={**row.defaults, "schedule": "constant"})


def kept(row: Method, optimizer: Callable[..., Any], slower: float = 1.0) -> Method:
    """The `averaged` row that predicts by iterates of the run's second half, one after the other."""
    row = averaged(row, optimizer, slower)
    return replace(
        row, settings=(*row.settings, "samples"), defaults={**row.defaults, "samples": 16}, posterior=snapshots.kept
    )


def tempered(row: Method) -> Method:
    """The row with a temperature that is chosen after training, on a tenth of the examples."""
    return replace(row, defaults={**row.defaults, "calibration": 0.1})


def deep_ensemble(private: bool, shards: bool = False) -> Method:
    """A row for an ensemble in one mechanism, whose members see all examples, or each its own share of them."""
    plain = sgd(private)
    return replace(
        plain, defaults={**plain.defaults, "members": 4},
        optimizer=ensemble.sgd if shards else adaptive.sgd,
        settings=(*plain.settings, "members") if shards else plain.settings,
        network=partial(ensemble.Ensemble, shards=shards), network_settings=("members",), loss=ensemble.summed,
        lr={"digits": 1.0, "cifar10": 2.0} if shards else plain.lr,
    )  # fmt: skip


METHODS = {
    "sgd": sgd(private=False),
    "adam": moments(adaptive.adam, private=False),
    "ivon": ivon("price", private=False),
    "sgld": sgld(private=False),
    "bbp": backprop(private=False),
    "mc-dropout": mc_dropout(private=False),
    "sgd-average": averaged(sgd(private=False), iterates.sgd, slower=2),
    "sgd-tempered": tempered(sgd(private=False)),
    "laplace": last_layer_laplace(private=False),
    "ensemble": deep_ensemble(private=False),
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
    "dp-sgld": sgld(private=True),
    "dp-bbp": backprop(private=True),
    "dp-bbp-joint": backprop(private=True, joint=True),
    "dp-mc-dropout": mc_dropout(private=True),
    "dp-sgd-tempered": tempered(sgd(private=True)),
    "dp-laplace": last_layer_laplace(private=True),
    "dp-sgd-average": averaged(sgd(private=True), iterates.sgd, slower=2),
    "dp-sgd-snapshots": kept(sgd(private=True), iterates.sgd, slower=2),
    "dp-adam-average": averaged(moments(adaptive.adam), iterates.adam),
    "dp-adam-snapshots": kept(moments(adaptive.adam), iterates.adam),
    "dp-ivon-snapshots": kept(ivon("constant"), partial(iterates.ivon, curvature="constant"), slower=2),
    "dp-ivon-shrunk": ivon("average-then-shrink"),
    "dp-ivon-price-shrunk": ivon("price-shrink"),
    "dp-ivon-price-snapshots": kept(ivon("price-shrink"), partial(iterates.ivon, curvature="price-shrink"), slower=2),
    "dp-bbp-average": averaged(backprop(private=True), iterates.bayes_by_backprop),
    "dp-ensemble": deep_ensemble(private=True),
    "dp-ensemble-shards": deep_ensemble(private=True, shards=True),
}


def get(name: str) -> Method:
    """The row `name` of `METHODS`.

    Raises
    ------
    ValueError
        the name is unknown.

    Examples
    --------
    >>> from dpivon.methods import get
    >>> row = get("dp-adam")
    >>> row.private, row.lr["cifar10"]
    (True, 0.002)
    >>> row.settings
    ('beta1', 'beta2', 'weight_decay', 'damping')
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}")
    return METHODS[name]

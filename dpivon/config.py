"""What determines the numbers of a run: its settings, their defaults, and the version of the recipe."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

from dpivon.methods import get

# Raise it when a change alters the numbers of a run: what was recorded under the old number is then stale.
RECIPE = 2

# What the book recommends where no other choice is made: chapter *When privacy is strong*.
RECOMMENDED = "dp-sgd-snapshots"

# What some methods read and others do not.
SETTINGS = (
    "beta1", "beta2", "weight_decay", "damping", "hess_init", "ess", "scale", "temperature", "prior_scale",
    "sigma_init", "dropout", "members",
)  # fmt: skip

# What each data set uses where the configuration is silent. Chosen on public data; see chapter 2.
DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"model": "mlp", "batch_size": 256, "epochs": 30, "max_grad_norm": 1.0},
    "tumors": {"model": "mlp", "batch_size": 64, "epochs": 20, "max_grad_norm": 1.0},
    "cifar10": {"model": "lenet", "batch_size": 512, "epochs": 10, "max_grad_norm": 1.0},
}


@dataclass(frozen=True)
class Config:
    """Everything that determines the numbers of a run. A field left at None takes its data set's or method's default.

    Parameters
    ----------
    data
        'digits' or 'tumors' (embedded in scikit-learn), or 'cifar10'.
    model
        'mlp', 'lenet' or 'tanh_cnn'; digits and tumors: mlp, cifar10: lenet.
    method
        a name in `methods.METHODS`; those that begin with 'dp-' are private. The default, dp-sgd-snapshots, averages
        the predictions of a run's iterates, and is what the book recommends.
    epsilon
        the budget, from which the noise multiplier follows; 3 where neither is given.
    noise_multiplier
        sigma_p itself, instead of a budget.
    delta
        delta_p, below one over the number of examples.
    accountant
        'rdp' or 'prv' (tighter).
    max_grad_norm
        C, the clipping norm of one example's gradient; 1.
    batch_size
        b, the expected batch size; each example joins a batch with probability q = b / N.
        digits: 256, tumors: 64, cifar10: 512.
    epochs
        passes over the data, in expectation; T = round(epochs / q) steps. digits: 30, tumors: 20,
        cifar10: 10.
    lr
        alpha, the learning rate at the first step; dp-sgd on digits and tumors: 2, on cifar10: 4 (see `methods` for the
        others).
    beta1
        decay of the normalized momentum.
    beta2
        decay of the second moment or of the curvature.
    schedule
        'cosine' to zero, or 'constant'; cosine, but constant for averages of iterates.
    weight_decay
        strength of the Gaussian prior's term, added after the noise; delta_v of IVON.
    damping
        lambda, which keeps the preconditioner of Adam's relatives away from zero; where it is not given for dp-adambc,
        `adaptive.noise_floor` of the whole run.
    hess_init
        IVON's curvature h at the start.
    ess
        N_ess, IVON's effective sample size; N where it is not given.
    temperature
        tau of Langevin dynamics; 1 samples the posterior.
    prior_scale
        standard deviation of the Gaussian prior of Bayes by Backprop.
    sigma_init
        standard deviation of its weights at the start.
    dropout
        rate of dropout.
    members
        M, the networks of an ensemble.
    samples
        posterior draws to average in prediction, besides the prediction at the mean; 0 for none.
    calibration
        share of the training examples that training leaves out, to choose a temperature for the predictions after it,
        in (0, 1); an example's pixels decide (see `assignment.place`). None leaves the predictions as they are.
    holdout
        evaluate on this many training examples, left out of training, instead of the test set (for tuning).
    seed
        makes the run a reproducible simulation; without one, noise and batches come from the system's entropy.
    """

    data: Literal["digits", "tumors", "cifar10"] = "digits"
    model: Literal["mlp", "lenet", "tanh_cnn"] | None = None
    method: str = RECOMMENDED
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    accountant: Literal["rdp", "prv"] = "rdp"
    max_grad_norm: float | None = None
    batch_size: int | None = None
    epochs: float | None = None
    lr: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    schedule: Literal["cosine", "constant"] | None = None
    weight_decay: float | None = None
    damping: float | None = None
    hess_init: float | None = None
    ess: float | None = None
    scale: float | None = None
    temperature: float | None = None
    prior_scale: float | None = None
    sigma_init: float | None = None
    dropout: float | None = None
    members: int | None = None
    samples: int | None = None
    calibration: float | None = None
    holdout: int = 0
    seed: int | None = None


def resolve(config: Config) -> Config:
    """The same configuration with every default filled in, as it is recorded.

    Raises
    ------
    ValueError
        unknown names, or settings that exclude each other.

    Examples
    --------
    >>> from dpivon.config import Config, resolve
    >>> run = resolve(Config(method="dp-ivon-gradsq", seed=0))
    >>> run.model, run.epsilon, run.batch_size, run.hess_init
    ('mlp', 3.0, 256, 0.1)
    """
    method = get(config.method)
    private = method.private
    if config.data not in DEFAULTS:
        raise ValueError(
            f"unknown data {config.data!r}; choose one of {', '.join(DEFAULTS)}, or name your own in config.DEFAULTS"
        )
    if not private and (config.epsilon is not None or config.noise_multiplier is not None):
        raise ValueError(f"{config.method!r} is not private, so it takes no epsilon or noise_multiplier; try 'dp-sgd'")
    if config.epsilon is not None and config.noise_multiplier is not None:
        raise ValueError("give epsilon or noise_multiplier, not both: one follows from the other")
    read = [name for name in (*method.settings, *method.network_settings) if name != "samples"]
    unread = [name for name in SETTINGS if name not in read and getattr(config, name) is not None]
    if config.samples and "samples" not in {*method.settings, *method.defaults}:
        raise ValueError(f"{config.method!r} predicts by one network, so it takes no samples; 'dp-sgd-snapshots' does")
    if unread:
        raise ValueError(f"{config.method!r} does not read {', '.join(unread)}; it reads {', '.join(read)}")
    defaults = {
        "samples": 0,
        "schedule": "cosine",
        **DEFAULTS[config.data],
        "lr": method.lr.get(config.data, method.lr["digits"]),  # the networks of digits and tumors are alike
        **method.defaults,
    }
    lacking = [name for name in ("model", "batch_size", "epochs", "max_grad_norm") if defaults.get(name) is None]
    if any(getattr(config, name) is None for name in lacking):
        raise ValueError(f"config.DEFAULTS[{config.data!r}] lacks {', '.join(lacking)}; add what your data need")
    filled = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    if private and config.epsilon is None and config.noise_multiplier is None:
        filled["epsilon"] = 3.0
    config = replace(config, **filled)
    assert config.epochs is not None
    assert config.samples is not None
    if config.samples < 0 or config.holdout < 0:
        raise ValueError(f"samples and holdout must be >= 0, got {config.samples} and {config.holdout}")
    for name, largest in {"lr": 1e12, **dict.fromkeys(SETTINGS, 1e9)}.items():
        value = getattr(config, name)
        if value is not None and value != 0 and not 1e-9 <= abs(value) <= largest:  # products must fit into a float32
            raise ValueError(f"{name} must be 0, or between 1e-9 and {largest:g} in size, got {value}")
    if not 0 < config.epochs < math.inf:
        raise ValueError(f"epochs must be finite and > 0, got {config.epochs}")
    if config.schedule not in ("cosine", "constant"):
        raise ValueError(f"schedule must be 'cosine' or 'constant', got {config.schedule!r}")
    if config.calibration is not None and not 0 < config.calibration < 1:
        raise ValueError(f"calibration must be between 0 and 1, a share of the examples, got {config.calibration}")
    if config.seed is not None and config.seed < 0:
        raise ValueError(f"seed must be >= 0, got {config.seed}")
    return config

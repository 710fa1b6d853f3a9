"""Between noise and epsilon, by Opacus' accountants; and the sentence that states what a run's epsilon means."""

import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.accountant import IAccountant
from opacus.accountants.utils import get_noise_multiplier

# Opacus stops at order 63, where no epsilon below about 0.1 can be reported at delta = 1e-5.
RDP_ORDERS = [
    1.01, 1.02, 1.05, *RDPAccountant.DEFAULT_ALPHAS, 72, 80, 96, 112, 128, 160, 192, 256, 384, 512, 768, 1024, 2048,
]  # fmt: skip

# Below it an epsilon would be in the thousands and the accountants fail or do not end: it is reported as infinite.
LEAST_NOISE = 0.01

Event = tuple[float, float, int]  # sigma_p, q, T of the subsampled Gaussian mechanism

ACCOUNTANTS: dict[str, type[IAccountant]] = {"rdp": RDPAccountant, "prv": PRVAccountant}


def new_accountant(name: str) -> IAccountant:
    """An empty Opacus accountant, 'rdp' or 'prv'.

    The Gaussian-DP accountant is left out: its central-limit approximation reports too small an epsilon.

    Raises
    ------
    ValueError
        any other name.
    """
    if name not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, got {name!r}")
    return ACCOUNTANTS[name]()


def check(sample_rate: float, steps: int, delta: float) -> None:
    """Raise ValueError unless 0 < q <= 1, T >= 0 and 0 < delta < 1."""
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must be in (0, 1], got {sample_rate}; it is batch_size / n")
    if not (0 <= steps < float("inf") and steps == int(steps)):
        raise ValueError(f"steps must be a whole number >= 0, got {steps}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be in (0, 1), got {delta}; a value well below 1 / n is usual")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence two warnings of Opacus that change nothing: at its last order RDP's bound is loose, and still a bound;
    at q = 1 PRV computes log(1 - q), and does not use it."""
    with warnings.catch_warnings(), np.errstate(divide="ignore"):
        warnings.filterwarnings("ignore", message="Optimal order", category=UserWarning)
        yield


def spent(accountant: IAccountant, delta: float) -> float:
    """The epsilon of an accountant's history so far; infinite where a step had (almost) no noise.

    Parameters
    ----------
    accountant
        an Opacus accountant with its history of (sigma_p, q, T).
    delta
        delta_p.
    """
    if not accountant.history:
        return 0.0
    if any(sigma < LEAST_NOISE for sigma, _, _ in accountant.history):
        return float("inf")
    orders = {"alphas": RDP_ORDERS} if isinstance(accountant, RDPAccountant) else {}
    try:
        with quiet():
            return max(0.0, float(accountant.get_epsilon(delta=delta, **orders)))
    except (RuntimeError, ValueError) as error:  # PRV cannot resolve a very small delta
        raise ValueError(
            f"the {accountant.mechanism()!r} accountant cannot compute epsilon at delta {delta:g} ({error}); use 'rdp'"
        ) from error


def epsilon(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    besides: Sequence[Event] = (),
) -> float:
    """Epsilon of T steps of the Poisson-subsampled Gaussian mechanism, for neighbors that differ in one added example.

    Parameters
    ----------
    noise_multiplier
        sigma_p >= 0; zero gives infinity.
    sample_rate
        q = b / N.
    steps
        T.
    delta
        delta_p.
    accountant
        'rdp' (Mironov et al., 2019), the paper's, or 'prv' (Gopi et al., 2021), tighter.
    besides
        further releases from the same data, each (sigma_p, q, T).

    Raises
    ------
    ValueError
        a value is out of range.

    Examples
    --------
    Thirty epochs on 50,000 images, by both accountants:

    >>> from dpivon.accounting import epsilon
    >>> q = 512 / 50_000
    >>> steps = round(30 / q)
    >>> round(epsilon(1.1, q, steps, delta=1e-5), 1)
    3.0
    >>> round(epsilon(1.1, q, steps, 1e-5, "prv"), 1)
    2.7
    """
    events = [(noise_multiplier, sample_rate, steps), *besides]
    for sigma, q, t in events:
        check(q, t, delta)
        if not 0 <= sigma < float("inf"):
            raise ValueError(f"noise_multiplier must be finite and >= 0, got {sigma}")
    history = new_accountant(accountant)
    history.history = [(sigma, q, int(t)) for sigma, q, t in events if t > 0]
    return spent(history, delta)


def noise_for(
    epsilon: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    besides: Sequence[Event] = (),
) -> float:
    """The noise multiplier whose T steps cost at most epsilon, and at least epsilon - 0.01 (or 1% of it, if smaller).

    Parameters
    ----------
    epsilon
        the budget, > 0.
    sample_rate, steps, delta, accountant
        as in `epsilon`; T >= 1.
    besides
        further releases from the same data, each (sigma_p, q, T), that the budget must pay for as well.

    Raises
    ------
    ValueError
        a value is out of range, or no noise below 10^6 reaches the budget.
    """
    check(sample_rate, steps, delta)
    if not 0 < epsilon < float("inf"):
        raise ValueError(f"epsilon must be finite and > 0, got {epsilon}; for no privacy choose a method without 'dp-'")
    if steps < 1:
        raise ValueError(f"steps must be at least 1 to spend a budget, got {steps}")
    new_accountant(accountant)
    if besides:
        return noise_left(epsilon, sample_rate, steps, delta, accountant, besides)
    orders = {"alphas": RDP_ORDERS} if accountant == "rdp" else {}
    try:
        with quiet():
            sigma = get_noise_multiplier(  # by steps: with `epochs` Opacus would round their number down
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=sample_rate,
                steps=int(steps),
                accountant=accountant,
                epsilon_tolerance=min(0.01, 0.01 * epsilon),
                **orders,
            )
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"epsilon {epsilon:g} is out of reach in {steps} steps at delta {delta:g}: the {accountant!r} accountant "
            f"finds no noise for it ({error}); take fewer steps, a larger epsilon or delta, or the other accountant"
        ) from error
    if sigma < LEAST_NOISE:
        raise ValueError(
            f"epsilon {epsilon:g} allows a noise multiplier below {LEAST_NOISE:g}, which is as good as none; take a "
            "smaller epsilon, or a method without 'dp-'"
        )
    return float(sigma)


def noise_left(
    budget: float, sample_rate: float, steps: int, delta: float, accountant: str, besides: Sequence[Event]
) -> float:
    """As `noise_for`, for what other releases leave of the budget: by bisection, from the side that keeps it."""

    def costs(sigma: float) -> float:
        return epsilon(sigma, sample_rate, steps, delta, accountant, besides)

    low, high, most = LEAST_NOISE, 1.0, 1e6
    while costs(high) > budget:
        low, high = high, 2 * high
        if high > most:
            raise ValueError(
                f"epsilon {budget:g} is out of reach in {steps} steps at delta {delta:g} besides {list(besides)}; take "
                "fewer steps, a larger epsilon or delta, or more noise for the others"
            )
    while budget - costs(high) > min(0.01, 0.01 * budget) and high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if costs(middle) > budget else (low, middle)
    return high


@dataclass(frozen=True)
class PrivacyStatement:
    """What a reviewer needs to judge an epsilon (Ponomareva et al., 2023); `str()` prints it.

    Parameters
    ----------
    epsilon, delta
        the guarantee.
    noise_multiplier, sample_rate, steps
        sigma_p, q and T, from which anyone can recompute epsilon.
    max_grad_norm, batch_size, n
        C, b and N.
    accountant
        'rdp' or 'prv'.
    simulation
        True when a seed was given.
    holdout
        how many private examples the metrics were computed on, instead of a public test set.
    besides
        further releases from the same examples, each (sigma_p, q, T), which epsilon includes.
    set_aside
        how many other examples chose a temperature, which training did not see.
    temperature_epsilon
        what that choice cost them; by parallel composition, epsilon is the larger of the two.
    """

    epsilon: float
    delta: float
    noise_multiplier: float
    sample_rate: float
    steps: int
    max_grad_norm: float
    batch_size: float
    n: int
    accountant: str
    simulation: bool
    holdout: int = 0
    besides: tuple[Event, ...] = ()
    set_aside: int = 0
    temperature_epsilon: float = 0.0

    unit = "one training example"
    neighbors = "add or remove one example"
    sampler = "Poisson"

    @property
    def released(self) -> str:
        """What epsilon covers."""
        temperature = ", the temperature" if self.set_aside else ""
        covered = f"every private gradient{temperature}, and so the weights and the predictions"
        if self.holdout:
            return (
                f"{covered}, for a split that is taken as fixed; not the metrics, which are of {self.holdout} held-out "
                "private examples"
            )
        return f"{covered}, and metrics on a public test set; not the training loss"

    def record(self) -> dict[str, Any]:
        """All of it as plain values, for the ledger; what only some runs have is left out where it is not."""
        fixed = {"unit": self.unit, "neighbors": self.neighbors, "sampler": self.sampler, "released": self.released}
        rare: dict[str, Any] = {"besides": [list(event) for event in self.besides]} if self.besides else {}
        if self.set_aside:
            rare |= {"set_aside": self.set_aside, "temperature_epsilon": self.temperature_epsilon}
        values = {k: v for k, v in asdict(self).items() if k not in ("besides", "set_aside", "temperature_epsilon")}
        return {**values, **rare, **fixed}

    def __str__(self) -> str:
        entropy = (
            "seeded: a simulation, reproducible and not private"
            if self.simulation
            else "from the operating system's entropy,\nby torch's generator, which is not cryptographic"
        )
        if self.epsilon == math.inf:
            return "no differential privacy: the noise multiplier is 0, or almost"
        rows = {
            "unit": f"{self.unit}; neighbors: {self.neighbors}",
            "mechanism": f"Gaussian, sigma {self.noise_multiplier:.4g}, clipping norm {self.max_grad_norm:g}, "
            f"{self.steps} steps",
            "besides": "\n".join(f"Gaussian, sigma {sigma:.4g}, q = {q:g}, steps: {t}" for sigma, q, t in self.besides),
            "temperature": f"exponential mechanism, epsilon {up(self.temperature_epsilon):.15g}, on {self.set_aside} "
            "examples\nthat training has not seen: the larger epsilon counts; the sizes of\n"
            "both parts are taken as public",
            "sampler": f"{self.sampler}, q = {self.batch_size:g} / {self.n}",
            "accountant": self.accountant.upper(),
            "released": "\n".join(textwrap.wrap(self.released, 66)),
            "randomness": entropy,
            "not counted": "other runs on these data: each tried setting costs its own;\n"
            "what was computed from them before, a scaling or class weights;\n"
            "a stop that was chosen by looking at diagnostics",
        }
        lines = [f"({up(self.epsilon):.15g}, {self.delta:g})-differential privacy"]
        for name, text in rows.items():
            if not text or (name == "temperature" and not self.set_aside):
                continue
            first, *rest = text.split("\n")
            lines += [f"  {name:12s} {first}", *(" " * 15 + line for line in rest)]
        return "\n".join(lines)


def up(epsilon: float) -> float:
    """Three decimals, rounded up: a smaller number would promise more than was kept."""
    return math.ceil(epsilon * 1000) / 1000


def statement(
    noise_multiplier: float,
    steps: int,
    delta: float,
    *,
    max_grad_norm: float,
    batch_size: float,
    n: int,
    accountant: str = "rdp",
    simulation: bool,
    holdout: int = 0,
    besides: Sequence[Event] = (),
    set_aside: int = 0,
    temperature_epsilon: float = 0.0,
) -> PrivacyStatement:
    """The privacy statement of T steps; epsilon is computed here, from the same numbers that are stated.

    It is that of the steps and of `besides` together, or `temperature_epsilon`, if that is larger.

    Raises
    ------
    ValueError
        a value is out of range.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}; it is the number of training examples")
    if delta * n >= 1:
        raise ValueError(
            f"delta must be below 1 / n = {1 / n:.2g}, got {delta:g}: a larger one would allow "
            "publishing somebody's example"
        )
    q = batch_size / n
    spent_epsilon = max(epsilon(noise_multiplier, q, steps, delta, accountant, besides), temperature_epsilon)
    return PrivacyStatement(
        spent_epsilon, delta, noise_multiplier, q, steps, max_grad_norm, batch_size, n, accountant, simulation, holdout,
        tuple(besides), set_aside, temperature_epsilon,
    )  # fmt: skip

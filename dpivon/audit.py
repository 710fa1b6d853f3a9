"""Audits: attack a training algorithm, and turn the attack's success into a lower bound on its epsilon.

A *canary* is an example that is made to be noticed. Each is put into the data by a fair coin; the attacker sees what
the algorithm releases and scores each canary, high where it seems to have been in. An (epsilon, delta)-private
algorithm limits how well any scores can tell the two apart, so scores that do better refute the claim.

A bound that is below the claim proves nothing: another attack may do better. A bound above it is a bug, but for the
chance that was set beforehand, the `significance`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from opacus.accountants.analysis import gdp
from scipy import optimize, stats
from torch import Tensor, nn

from dpivon import adaptive, backprop, data, ensemble, mechanism, models, predict, train

STEEP = 1e3  # the norm of a canary's gradient before clipping: far above any clipping norm in use


# What scores prove.


def upper(errors: int, trials: int, significance: float) -> float:
    """Clopper and Pearson's bound: the true rate of errors is larger with probability `significance` at most."""
    return 1.0 if errors >= trials else float(stats.beta.ppf(1 - significance, errors + 1, trials - errors))


def error_rates(scores: Tensor, included: Tensor, threshold: float | None, significance: float) -> tuple[float, float]:
    """Upper bounds on the false positive and false negative rates of guessing "in" at `threshold` or above.

    Parameters
    ----------
    scores
        (m,) of the canaries.
    included
        (m,) booleans: the coins.
    threshold
        chosen before the scores were seen; None takes the best one on every second canary, and counts on the others.
    significance
        the chance that one of the two bounds is wrong, at most.

    Raises
    ------
    ValueError
        no canary is in, or none is out.
    """
    if threshold is None:
        first = slice(0, None, 2)
        threshold = best_threshold(scores[first], included[first])
        scores, included = scores[1::2], included[1::2]
    inside, outside = scores[included], scores[~included]
    if not (len(inside) and len(outside)):
        raise ValueError(f"need canaries in and out, got {len(inside)} in and {len(outside)} out; plant more")
    false_positives, false_negatives = int((outside >= threshold).sum()), int((inside < threshold).sum())
    half = significance / 2
    return upper(false_positives, len(outside), half), upper(false_negatives, len(inside), half)


def best_threshold(scores: Tensor, included: Tensor) -> float:
    """The score at or above which to guess "in" so that most guesses are right."""
    order = scores.argsort(descending=True)
    sign = torch.where(included[order], 1, -1)
    return float(scores[order[int(sign.cumsum(0).argmax())]])


def rates_bound(
    scores: Tensor, included: Tensor, delta: float, *, significance: float = 0.05, threshold: float | None = None
) -> float:
    """A lower bound on epsilon from error rates alone, whatever the mechanism (Jagielski et al., 2020).

    .. math:: \\varepsilon \\ge \\log\\frac{1 - \\delta - \\beta}{\\alpha}

    with the error rates alpha and beta, and with the two exchanged.

    Parameters
    ----------
    scores, included, threshold
        as in `error_rates`; scores of different canaries must be independent, as in independent runs.
    delta
        delta_p of the claim.
    significance
        the chance that the bound is above the true epsilon, at most.
    """
    alpha, beta = error_rates(scores, included, threshold, significance)
    ratios = [(1 - delta - b) / a for a, b in ((alpha, beta), (beta, alpha)) if a > 0]
    return max(0.0, *(math.log(ratio) if ratio > 0 else 0.0 for ratio in ratios))


def gaussian_bound(
    scores: Tensor, included: Tensor, delta: float, *, significance: float = 0.05, threshold: float | None = None
) -> float:
    """A lower bound on epsilon for a Gaussian mechanism without subsampling (Nasr et al., 2023).

    Its errors lie on a known curve with one parameter, so two error rates give mu, and mu gives epsilon at any delta:

    .. math:: \\mu \\ge \\Phi^{-1}(1 - \\alpha) - \\Phi^{-1}(\\beta)

    Parameters
    ----------
    scores, included, threshold
        as in `error_rates`; scores of different canaries must be independent.
    delta, significance
        as in `rates_bound`.
    """
    alpha, beta = error_rates(scores, included, threshold, significance)
    mu = stats.norm.isf(alpha) - stats.norm.ppf(beta)
    return epsilon_of_mu(mu, delta)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Epsilon at delta of a mu-Gaussian-private mechanism (Dong et al., 2022), up to 100; 0 where delta covers it."""
    if mu <= 0 or gdp.delta_eps_mu(eps=0.0, mu=mu) <= delta:
        return 0.0
    if gdp.delta_eps_mu(eps=100.0, mu=mu) >= delta:
        return 100.0
    return float(gdp.eps_from_mu(mu=mu, delta=delta))


def noise_of(epsilon: float, delta: float) -> float:
    """The noise multiplier with which one Gaussian step is exactly (epsilon, delta)-private.

    Raises
    ------
    ValueError
        epsilon is not between 0 and 100.
    """
    if not 0 < epsilon < 100:
        raise ValueError(f"epsilon must be in (0, 100) to attack one step of it, got {epsilon:g}")
    return float(optimize.brentq(lambda sigma: epsilon_of_mu(1 / sigma, delta) - epsilon, 0.02, 1e4))


def one_run_p_value(epsilon: float, delta: float, canaries: int, guesses: int, correct: int) -> float:
    """The largest chance of `correct` right guesses or more under (epsilon, delta), in one run (Steinke et al., 2023).

    .. math:: \\Pr[V \\ge v] \\le f(v) + 2 m \\delta \\max_{1 \\le i \\le v} \\frac{f(v - i) - f(v)}{i}, \\qquad
        f(v) = \\Pr\\left[{\\rm Bin}\\left(r, \\tfrac{e^\\varepsilon}{1 + e^\\varepsilon}\\right) \\ge v\\right]

    with m canaries, r guesses, v of them right. The canaries' coins are independent; their scores need not be.
    """
    right = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    tail = float(right.sf(correct - 1))
    i = np.arange(1, correct + 1)
    slack = np.max((right.sf(correct - i - 1) - tail) / i, initial=0.0)
    return min(1.0, tail + 2 * canaries * delta * float(slack))


def one_run_epsilon(delta: float, canaries: int, guesses: int, correct: int, significance: float) -> float:
    """The largest epsilon, up to 100, that `one_run_p_value` rejects at `significance`; 0 where it rejects none."""

    def excess(epsilon: float) -> float:
        return one_run_p_value(epsilon, delta, canaries, guesses, correct) - significance

    if excess(0.0) >= 0:
        return 0.0
    return float(optimize.brentq(excess, 0.0, 100.0)) if excess(100.0) > 0 else 100.0


def one_run_bound(
    scores: Tensor,
    included: Tensor,
    delta: float,
    *,
    significance: float = 0.05,
    guesses: Sequence[int] | None = None,
) -> float:
    """A lower bound on epsilon from one run with many canaries, whatever the mechanism (Steinke et al., 2023).

    The attacker guesses "in" for the highest scores and "out" for the lowest, as many of each, and stays silent on the
    rest. Which number of guesses is best is not known before; each one tried pays its share of the significance.

    Parameters
    ----------
    scores
        (m,) of the canaries; larger means "in".
    included
        (m,) independent fair coins.
    delta, significance
        as in `rates_bound`.
    guesses
        numbers r of guesses to try, even; None tries four, from m / 50 to all.

    Raises
    ------
    ValueError
        r is odd, or not between 2 and m.

    Examples
    --------
    Scores that know nothing of the coins prove nothing; scores that know all prove much, and never an infinite epsilon:

    >>> import torch
    >>> from dpivon.audit import one_run_bound
    >>> coins = torch.arange(1000) % 2 == 0
    >>> one_run_bound(torch.arange(1000.0), coins, delta=1e-5)
    0.0
    >>> best = one_run_bound(coins.float(), coins, delta=1e-5)
    >>> round(best, 1)
    5.4
    """
    m = len(scores)
    guesses = sorted({max(2, 2 * (m // k)) for k in (100, 20, 6, 2)}) if guesses is None else guesses
    if not all(2 <= r <= m and r % 2 == 0 for r in guesses):
        raise ValueError(f"guesses must be even and between 2 and the number of canaries {m}, got {list(guesses)}")
    ranked = included[scores.argsort()].int()
    correct = [int((1 - ranked[: r // 2]).sum() + ranked[m - r // 2 :].sum()) for r in guesses]
    share = significance / len(guesses)
    return max(one_run_epsilon(delta, m, r, v, share) for r, v in zip(guesses, correct, strict=True))


# Canaries.


class WithCanaries(nn.Module):
    """A network, and one more weight for each canary, which no other example touches.

    A canary's gradient is along its own weight alone. It is the loudest that an example can be (a *Dirac* canary), the
    canaries do not disturb each other, and whatever an algorithm releases about that weight tells of the coin.
    """

    def __init__(self, model: nn.Module, canaries: int) -> None:
        super().__init__()
        self.model = model
        self.canary = nn.Parameter(torch.zeros(canaries))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the canaries' weights."""
        return self.model(x), self.canary


class Logits(nn.Module):
    """What `model` predicts, without the canaries' weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.model(x)[0]


def canary_weights(model: nn.Module) -> list[nn.Parameter]:
    """The canaries' weights in a run's network; their means, where the method put a distribution in their place.

    An ensemble has them once for each member that the canaries train.
    """
    if isinstance(model, ensemble.Ensemble):
        trained = model.members[:1] if model.shards else model.members  # the place of a blank image is 0
        return [canary for member in trained for canary in canary_weights(member)]
    if isinstance(model, backprop.Reparameterized):
        return [model.m[model.names.index("canary")]]
    assert isinstance(model.canary, nn.Parameter)
    return [model.canary]


def canary_loss(output: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    """Cross-entropy for labels below the number of classes; beyond, canary k's loss is a steep plane over its weight.

    Labels of classes + m and more stand for a canary that is out: its loss is zero, so that N does not tell the coins.
    """
    logits, canary = output
    classes, m = logits.shape[1], len(canary)
    planes = torch.cat([STEEP * canary, canary.new_zeros(1)])
    own = F.cross_entropy(logits, y.clamp(max=classes - 1), reduction="none")
    return torch.where(y < classes, own, planes[(y - classes).clamp(0, m)]).mean()


def plant(images: data.Images, included: Tensor) -> data.Images:
    """The data with a blank image for each canary, whose label says which one it is and whether it is in."""
    m, classes = len(included), images.classes
    labels = torch.where(included, torch.arange(m), m) + classes
    names = (*images.class_names, *(f"canary {k}" for k in range(m)), "canary that is out")
    return replace(
        images,
        x_train=torch.cat([images.x_train, torch.zeros(m, *images.shape)]),
        y_train=torch.cat([images.y_train, labels]),
        class_names=names,
    )


def mislabel(images: data.Images, included: Tensor, seed: int) -> tuple[data.Images, Tensor]:
    """The data with wrong labels on its last m images, and those labels: canaries for an attacker who sees predictions.

    One that is out gets a label that no class has, and a loss of zero from `canary_loss`.
    """
    m, classes = len(included), images.classes
    if m >= images.n:
        raise ValueError(f"canaries must be fewer than the {images.n} training images, got {m}")
    shift = torch.randint(1, classes, (m,), generator=train.source(seed, "wrong labels"))
    wrong = (images.y_train[-m:] + shift) % classes
    labels = torch.cat([images.y_train[:-m], torch.where(included, wrong, classes)])
    return replace(images, y_train=labels, class_names=(*images.class_names, "canary that is out")), wrong


def coins(canaries: int, seed: int) -> Tensor:
    """(m,) fair coins: which canaries are in."""
    if canaries < 1:
        raise ValueError(f"canaries must be at least 1, got {canaries}; some thousands make an attack sharp")
    return torch.rand(canaries, generator=train.source(seed, "coins")) < 0.5  # not the stream of the first weights


# Whole algorithms under attack.


@dataclass(frozen=True)
class Audit:
    """What an attack found.

    Parameters
    ----------
    claimed
        epsilon of the claim.
    bounds
        for each thing that the attacker looked at, a lower bound on epsilon; together they are wrong with probability
        `significance` at most.
    delta, significance
        of the claim, and of the bounds.
    scores
        for each thing, the (m,) scores.
    included
        (m,) the coins.
    """

    claimed: float
    bounds: Mapping[str, float]
    delta: float
    significance: float
    scores: Mapping[str, Tensor]
    included: Tensor

    @property
    def epsilon(self) -> float:
        """The largest of the lower bounds."""
        return max(self.bounds.values())

    @property
    def rejected(self) -> bool:
        """Whether the claim is refuted."""
        return self.epsilon > self.claimed


def full_batch(
    gradient: Callable[..., Any] = mechanism.private_gradient,
    *,
    noise_multiplier: float,
    canaries: int = 20_000,
    max_grad_norm: float = 1.0,
    delta: float = 1e-5,
    significance: float = 0.05,
    seed: int = 0,
) -> Audit:
    """Attack one step of the mechanism in which every example takes part, where the attack is as strong as the theory.

    Parameters
    ----------
    gradient
        ``gradient(model, loss, x, y, dp)`` writes `p.grad`, as `mechanism.private_gradient` does.
    noise_multiplier, max_grad_norm, delta
        sigma_p, C and delta_p of the claim.
    canaries
        m.
    significance
        the chance of refuting a true claim, at most.
    seed
        of coins and noise: an audit is a simulation.
    """
    if not noise_multiplier > 0:
        raise ValueError(f"noise_multiplier must be > 0 to make a claim, got {noise_multiplier}")
    included = coins(canaries, seed)
    model = WithCanaries(nn.Linear(1, 2), canaries)
    dp = mechanism.mechanism(
        adaptive.sgd(model.parameters(), lr=1.0),
        noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, batch_size=canaries, n=canaries,
        generator=torch.Generator().manual_seed(seed + 1),
    )  # fmt: skip
    labels = torch.where(included, torch.arange(canaries), canaries) + 2
    gradient(model, canary_loss, torch.zeros(canaries, 1), labels, dp)
    assert model.canary.grad is not None
    scores = model.canary.grad.clone() * canaries / max_grad_norm  # 1 where the canary is in, 0 where not, plus noise
    bound = gaussian_bound(scores, included, delta, significance=significance, threshold=0.5)
    claimed = epsilon_of_mu(1 / noise_multiplier, delta)
    return Audit(claimed, {"gradient": bound}, delta, significance, {"gradient": scores}, included)


def started(config: train.Config, images: data.Images, canaries: int, planted: data.Images) -> train.Run:
    """The run of `config` on the planted data, ready to be trained by `train.train`. No example is set aside.

    Raises
    ------
    ValueError
        the method is not private, or examples are held out, which might be canaries.
    """
    assert config.model is not None
    assert config.seed is not None
    if config.holdout:
        raise ValueError(f"an audit trains on all examples, and holdout is {config.holdout}; leave it out")
    network = WithCanaries(models.build(config.model, images.shape, images.classes, config.seed), canaries)
    now = train.Run(config, planted, network, canary_loss)
    if now.dp is None:
        raise ValueError(f"{config.method!r} makes no claim; audit a method whose name begins with dp-")
    return now


def concluded(now: train.Run, scores: Mapping[str, Tensor], included: Tensor, significance: float) -> Audit:
    """The bounds from the scores of one run; each of several things looked at pays its share of the significance."""
    share, delta = significance / len(scores), now.config.delta
    bounds = {name: one_run_bound(value, included, delta, significance=share) for name, value in scores.items()}
    privacy = now.statement()
    assert privacy is not None
    return Audit(privacy.epsilon, bounds, delta, significance, scores, included)


def seeded(config: train.Config) -> int:
    """The configuration's seed; ValueError where it has none."""
    if config.seed is None:
        raise ValueError("an audit is a simulation that can be repeated; give the configuration a seed")
    return config.seed


def white_box(
    config: train.Config,
    images: data.Images,
    *,
    canaries: int = 4000,
    significance: float = 0.05,
    change: Callable[[train.Run], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> Audit:
    """Attack a training run of any method in the table by all that it may release.

    That is every gradient that the optimizer was given, the final weights, and the curvature or second moment where
    there is one. The canaries are Dirac's, in one run. Only the curvature that dp-laplace releases once more after
    training is not scored.

    Parameters
    ----------
    config
        of the run; needs a seed, from which the coins come too. Its epsilon is the claim.
    images
        the data into which the canaries are planted.
    canaries
        m.
    significance
        the chance of refuting a true claim, at most; shared by all that is looked at.
    change
        called with the `train.Run` before it starts: a place to put a mistake in.
    report
        called with the run's lines of progress.

    Raises
    ------
    ValueError
        the configuration has no seed, or is not private.
    """
    included = coins(canaries, seeded(config))
    now = started(train.resolve(config), images, canaries, plant(images, included))
    if change is not None:
        change(now)
    weights = canary_weights(now.model)
    total = torch.zeros(canaries)

    def look(*_: Any) -> None:
        for p in weights:
            assert p.grad is not None
            total.add_(p.grad)

    now.optimizer.register_step_pre_hook(look)
    train.train(now, None, report or (lambda line: None))
    state = now.optimizer.state[weights[0]]
    scores = {"gradients": total, "weights": -torch.stack([p.detach() for p in weights]).sum(0)}
    scores |= {name: state[name].detach().clone() for name in ("h", "second_moment") if name in state}
    return concluded(now, scores, included, significance)


def black_box(
    config: train.Config,
    images: data.Images,
    *,
    canaries: int = 500,
    significance: float = 0.05,
    change: Callable[[train.Run], None] | None = None,
    report: Callable[[str], None] | None = None,
) -> Audit:
    """Attack a training run by the predictions of the final model alone: is its loss low on wrong labels it has seen?

    Parameters
    ----------
    config, images, significance, change, report
        as in `white_box`.
    canaries
        m, how many training images get a wrong label; half of them, by coins, are left out.

    Raises
    ------
    ValueError
        the configuration has no seed, or is not private, or m is too large.
    """
    seed = seeded(config)
    included = coins(canaries, seed)
    planted, wrong = mislabel(images, included, seed)
    now = started(train.resolve(config), images, 0, planted)
    if change is not None:
        change(now)
    train.train(now, None, report or (lambda line: None))
    log_probs = predict.log_probs(Logits(now.model), images.x_train[-canaries:])
    scores = {"loss": log_probs.gather(1, wrong.unsqueeze(1)).squeeze(1)}
    return concluded(now, scores, included, significance)


def draw(audits: Mapping[str, Audit], path: Any) -> None:
    """Draw the scores of canaries that were in and out, a panel for each thing looked at, into the file `path`."""
    import matplotlib.pyplot as plt

    from dpivon import plots

    plots.use_style()
    panels = [(f"{name}: {what}", audit, what) for name, audit in audits.items() for what in audit.scores]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.6 * rows), squeeze=False)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for ax, (title, audit, what) in zip(axes.flat, panels, strict=False):
        scores = audit.scores[what]
        bins = np.linspace(float(scores.quantile(0.001)), float(scores.quantile(0.999)), 40)
        for inside, color, style in ((True, "orange", "-"), (False, "blue", "--")):
            part = scores[audit.included == inside].numpy()
            ax.hist(
                part, bins, histtype="step", lw=2, color=plots.COLORS[color], ls=style, label="in" if inside else "out"
            )
        ax.set(title=title, xlabel=f"score (certified {audit.bounds[what]:.2f} of {audit.claimed:.2f})", yticks=[])
    axes.flat[0].legend()
    figure.savefig(path)
    plt.close(figure)

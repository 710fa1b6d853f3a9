"""Temperature scaling: one number that makes a trained model's probabilities more honest, chosen privately.

The number is fitted to private examples, so it is a release of its own. Held-out examples that no training step has
seen are used, so nobody is in both: by parallel composition the whole costs the larger of the two budgets.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Public candidates: factors on the logits' scale, evenly apart in the logarithm.
CANDIDATES = tuple(2 ** (k / 4) for k in range(-8, 17))
WORST = 5.0  # nats: where an example's loss is cut off, so that one example counts for no more


def scaled(log_probs: Tensor, temperature: float) -> Tensor:
    """The log probabilities at a temperature: above 1 they are less sure of themselves, and rank as before.

    .. math:: \\log p_T(y \\mid x) = \\frac{\\log p(y \\mid x)}{T} - \\log \\sum_k p(k \\mid x)^{1/T}
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be finite and > 0, got {temperature}; 1 changes nothing")
    return (log_probs / temperature).log_softmax(1)


def losses(log_probs: Tensor, y: Tensor) -> Tensor:
    """For each candidate, the sum over examples of the loss, cut off at `WORST`: sensitivity `WORST`, add or remove.

    A loss that is not a number counts as the worst, or one example would prevent any choice.

    Raises
    ------
    ValueError
        a label is no class.
    """
    classes = log_probs.shape[1]
    if len(y) and not (y.min() >= 0 and y.max() < classes):
        raise ValueError(
            f"labels must be from 0 to {classes - 1}, one for each column, got {int(y.min())} to {int(y.max())}"
        )
    each = [F.nll_loss(scaled(log_probs.double(), t), y, reduction="none") for t in CANDIDATES]
    return torch.stack(each).nan_to_num(WORST).clamp(0, WORST).sum(1)


def best(log_probs: Tensor, y: Tensor) -> float:
    """The candidate with the least loss. Not private: for public examples, and for comparison."""
    return CANDIDATES[int(losses(log_probs, y).argmin())]


def private(log_probs: Tensor, y: Tensor, epsilon: float, generator: torch.Generator) -> float:
    """A good candidate by the exponential mechanism, (epsilon, 0)-private in the examples (McSherry and Talwar, 2007).

    .. math:: \\Pr[T] \\propto \\exp\\left(-\\frac{\\varepsilon\\, L(T)}{\\Delta}\\right)

    with the sensitivity Delta = `WORST`. An added example only adds loss, to each candidate between 0 and Delta. So the
    usual factor 2 in the denominator is not needed.

    Parameters
    ----------
    log_probs, y
        (n, classes) and (n,) of private examples that the model was not trained on.
    epsilon
        the budget of this choice.
    generator
        from `mechanism.new_generator()`; seeded in simulations.

    Raises
    ------
    ValueError
        epsilon is not positive.

    Examples
    --------
    The model says 98%, and is right three times in four:

    >>> import torch
    >>> from dpivon import mechanism, temperature
    >>> log_probs = torch.tensor([[0.98, 0.02]] * 100_000).log()
    >>> y = torch.tensor([0, 0, 0, 1] * 25_000)
    >>> source = mechanism.new_generator()
    >>> T = temperature.private(log_probs, y, 1.0, source)
    >>> p = temperature.scaled(log_probs, T).exp()
    >>> round(T, 2), round(p[0, 0].item(), 2)
    (3.36, 0.76)
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon must be finite and > 0, got {epsilon}")
    weights = (-epsilon * losses(log_probs, y) / WORST).softmax(0)
    return CANDIDATES[int(torch.multinomial(weights, 1, generator=generator))]

"""How good, and how honest, are the predicted probabilities: accuracy, NLL, calibration error, Brier score."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

ECE_BINS = 15


def check_log_probs(log_probs: Tensor, y: Tensor) -> None:
    """Raise ValueError unless log_probs is (n, classes), n >= 1, normalized, and y holds n labels of these classes."""
    if log_probs.dim() != 2 or len(log_probs) != len(y) or len(y) == 0:
        raise ValueError(
            f"need log_probs (n, classes) and y (n,), n >= 1; got {tuple(log_probs.shape)}, {tuple(y.shape)}"
        )
    if int(y.min()) < 0 or int(y.max()) >= log_probs.shape[1]:
        raise ValueError(f"labels must be in 0..{log_probs.shape[1] - 1}, got {int(y.min())}..{int(y.max())}")
    if not torch.allclose(log_probs.exp().sum(1), torch.ones((), dtype=log_probs.dtype), atol=1e-3):
        raise ValueError("log_probs must be normalized; apply log_softmax to logits first")


def accuracy(log_probs: Tensor, y: Tensor) -> float:
    """Share of examples whose most probable class is the true one."""
    return float((log_probs.argmax(1) == y).double().mean())


def nll(log_probs: Tensor, y: Tensor) -> float:
    """Negative log-likelihood, in nats per example.

    .. math:: -\\frac{1}{n} \\sum_i \\log p(y_i \\mid x_i)
    """
    return float(F.nll_loss(log_probs.double(), y))


def ece(log_probs: Tensor, y: Tensor, bins: int = ECE_BINS) -> float:
    """Expected calibration error of the top label: mean \\|accuracy - confidence\\| over equal-width bins (l1)."""
    value = multiclass_calibration_error(log_probs.exp(), y, num_classes=log_probs.shape[1], n_bins=bins, norm="l1")
    return float(value)


def brier(log_probs: Tensor, y: Tensor) -> float:
    """Brier score over all classes, in [0, 2].

    .. math:: \\frac{1}{n} \\sum_i \\sum_k (p_{ik} - [y_i = k])^2
    """
    return float((log_probs.double().exp() - F.one_hot(y, log_probs.shape[1])).square().sum(1).mean())


def confidence_minus_accuracy(log_probs: Tensor, y: Tensor) -> float:
    """Mean top probability minus accuracy: positive is over-confident, negative under-confident."""
    return float(log_probs.double().exp().amax(1).mean()) - accuracy(log_probs, y)


def evaluate(log_probs: Tensor, y: Tensor) -> dict[str, float]:
    """All of the above, by name.

    Parameters
    ----------
    log_probs
        (n, classes), log probabilities.
    y
        (n,), integer labels.

    Raises
    ------
    ValueError
        shapes disagree, labels are out of range, or rows are not normalized.

    Examples
    --------
    The model says 90% each time, and is right in eight cases of ten:

    >>> import torch
    >>> from dpivon import metrics
    >>> log_probs = torch.tensor([[0.9, 0.1]] * 10).log()
    >>> y = torch.tensor([0] * 8 + [1] * 2)
    >>> found = metrics.evaluate(log_probs, y)
    >>> for name, value in found.items():
    ...     print(f"{name:15} {value:.2f}")
    accuracy        0.80
    nll             0.54
    ece             0.10
    brier           0.34
    overconfidence  0.10
    """
    check_log_probs(log_probs, y)
    return {
        "accuracy": accuracy(log_probs, y),
        "nll": nll(log_probs, y),
        "ece": ece(log_probs, y),
        "brier": brier(log_probs, y),
        "overconfidence": confidence_minus_accuracy(log_probs, y),
    }


# What follows is for looking closer, and is not recorded with each run.


def entropy(log_probs: Tensor) -> Tensor:
    """Predictive entropy of each example, in nats: 0 is certain, log(classes) knows nothing.

    .. math:: H_i = -\\sum_k p_{ik} \\log p_{ik}
    """
    p = log_probs.double().exp()
    return -torch.special.xlogy(p, p).sum(1)


def reliability(log_probs: Tensor, y: Tensor, bins: int = ECE_BINS) -> Tensor:
    """What a reliability diagram draws: for each bin that holds examples, (confidence, accuracy, share of examples).

    Parameters
    ----------
    log_probs, y
        as in `evaluate`.
    bins
        number of bins of the top probability.

    Returns
    -------
    (filled bins, 3)
    """
    check_log_probs(log_probs, y)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}; {ECE_BINS} are usual")
    confidence, label = log_probs.double().exp().max(1)
    right = (label == y).double()
    which = (confidence * bins).ceil().clamp(1, bins).long() - 1  # (0, 1/bins], (1/bins, 2/bins], ...
    counts = torch.bincount(which, minlength=bins).double()
    sums = torch.stack([torch.zeros(bins).double().index_add_(0, which, value) for value in (confidence, right)])
    filled = counts > 0
    return torch.stack([*(sums[:, filled] / counts[filled]), counts[filled] / len(y)], dim=1)


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The chance that a strange example has a larger doubt than a familiar one; 1/2 is guessing, ties count half.

    Parameters
    ----------
    inside, outside
        doubts, such as `entropy`, of familiar and of strange examples.
    """
    if not (len(inside) and len(outside)):
        raise ValueError(f"need doubts of both kinds, got {len(inside)} and {len(outside)}")
    _, order = torch.cat([inside, outside]).double().unique(return_inverse=True)
    scores = order.double() / max(int(order.max()), 1)  # torchmetrics squashes what is outside [0, 1]
    strange = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).long()
    return float(binary_auroc(scores, strange))

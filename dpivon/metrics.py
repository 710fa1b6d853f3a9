"""How good, and how honest, are the predicted probabilities: accuracy, NLL, calibration error, Brier score."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

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
    """
    check_log_probs(log_probs, y)
    return {
        "accuracy": accuracy(log_probs, y),
        "nll": nll(log_probs, y),
        "ece": ece(log_probs, y),
        "brier": brier(log_probs, y),
        "overconfidence": confidence_minus_accuracy(log_probs, y),
    }

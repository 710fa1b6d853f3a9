"""Prediction: log probabilities, averaged over draws of the weights."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@torch.no_grad()
def log_probs(model: nn.Module, x: Any, optimizer: Any = None, samples: int = 0, chunk: int = 1000) -> Tensor:
    """Log of the predicted probabilities, averaged over `samples` draws of the weights, or at the mean.

    .. math:: p(y \\mid x) = \\frac{1}{K} \\sum_k p(y \\mid x, \\theta_k), \\qquad \\theta_k \\sim q(\\theta)

    Parameters
    ----------
    model
        gives logits (n, classes).
    x
        (n, ...), or a dict, list or tuple of such tensors; cut into chunks to save memory.
    optimizer
        whose `sampled_params()` draws the weights; needed when samples > 0.
    samples
        K; 0 predicts at the current weights, the posterior mean.
    chunk
        examples a forward pass.

    Returns
    -------
    (n, classes) log probabilities.

    Raises
    ------
    ValueError
        samples < 0, or samples > 0 without an optimizer that can draw.

    Examples
    --------
    The mean is sure of the first class. Over draws from a wide posterior, the same network is not:

    >>> import torch
    >>> from dpivon import predict
    >>> from dpivon.ivon import IVON
    >>> net = torch.nn.Linear(1, 2, bias=False)
    >>> x = torch.ones(1, 1)
    >>> _ = net.weight.data.copy_(torch.tensor([[3.0], [-3.0]]))
    >>> wide = IVON(net.parameters(), 0.1, ess=1, hess_init=0.1)
    >>> round(predict.log_probs(net, x).exp()[0, 0].item(), 1)
    1.0
    >>> p = predict.log_probs(net, x, wide, samples=2000).exp()
    >>> round(p[0, 0].item(), 1)
    0.9
    """
    if samples < 0 or (samples > 0 and not hasattr(optimizer, "sampled_params")):
        raise ValueError(f"samples must be >= 0, and needs an optimizer with sampled_params(); got {samples}")

    def part(start: int) -> Any:
        return tree_map(lambda t: t[start : start + chunk], x)

    def once() -> Tensor:
        starts = range(0, max(len(tree_leaves(x)[0]), 1), chunk)
        return torch.cat([model(part(start)).log_softmax(1) for start in starts])

    training = model.training
    model.eval()
    try:
        if samples == 0:
            return once()
        total: Tensor | None = None
        for _ in range(samples):  # a running logsumexp: memory does not grow with K
            with optimizer.sampled_params():
                draw = once()
            total = draw if total is None else torch.logaddexp(total, draw)
        assert total is not None
        return total - math.log(samples)
    finally:
        model.train(training)

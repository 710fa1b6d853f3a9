"""Monte Carlo dropout: masks that stay on in prediction, whose spread is read as doubt (Gal and Ghahramani, 2016)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def add(model: nn.Module, rate: float) -> nn.Module:
    """Put dropout before every linear layer but those that see the raw input; names and weights stay as they are.

    In training and in prediction each example gets a mask of its own, so examples stay independent and clipping works.

    Parameters
    ----------
    model
        changed in place, and returned. A linear layer stays without if no layer with weights comes before it.
    rate
        the share of inputs that is set to zero, in [0, 1).

    Raises
    ------
    ValueError
        the rate is out of range.

    Examples
    --------
    >>> import torch
    >>> from dpivon import dropout, models
    >>> net = models.build("mlp", (1, 8, 8), 10, seed=0).eval()
    >>> net = dropout.add(net, rate=0.5)
    >>> x = torch.ones(1, 1, 8, 8)
    >>> torch.equal(net(x), net(x))
    True
    >>> with dropout.Masks(net).sampled_params():
    ...     torch.equal(net(x), net(x))
    False
    """
    if not 0 <= rate < 1:
        raise ValueError(f"dropout must be in [0, 1), got {rate}")

    def drop(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (F.dropout(inputs[0], rate, layer.training), *inputs[1:])

    weighted = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]
    for layer in weighted[1:]:
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(drop)
    return model


class Masks:
    """A network's dropout as a posterior to predict with: each draw is a set of masks, one for each example.

    Works for `add` and for any module with dropout layers of torch.nn.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = (nn.Linear, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
        self.layers = [layer for layer in model.modules() if isinstance(layer, kinds)]

    @contextmanager
    def sampled_params(self) -> Iterator[Any]:
        """Within, dropout acts; after, as before."""
        before = [layer.training for layer in self.layers]
        for layer in self.layers:
            layer.train()
        try:
            yield
        finally:
            for layer, training in zip(self.layers, before, strict=True):
                layer.train(training)

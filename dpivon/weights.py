"""Other weights for a while: what every draw from a posterior does to a network."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def held(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Within, the parameters have these values; after, what they had before, whatever happens.

    The changes are in place, so that a backward pass on the wrong side of the context raises.
    """
    before = [p.detach().clone() for p in parameters]
    try:
        copy(values, parameters)
        yield
    finally:
        copy(before, parameters)


@torch.no_grad()
def copy(values: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Put the values into the parameters."""
    for p, value in zip(parameters, values, strict=True):
        p.copy_(value)


def normal_like(t: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers in the tensor's form; torch's `randn_like` takes no generator."""
    return torch.randn(t.shape, generator=generator, dtype=t.dtype, device=t.device)

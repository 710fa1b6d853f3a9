"""A public rule that gives each example a place by its own pixels, whoever else is in the data.

An assignment by a permutation, or by position, may move when one example is added. This one cannot: adding or removing
an example leaves the place of every other one as it was, so what is promised for each place holds for all together.
"""

from functools import cache

import torch
from torch import Tensor

PRIME = 2**31 - 1
BASE = 48271  # of Park and Miller's generator, whose powers are the coefficients


@cache
def coefficients(size: int) -> list[int]:
    """The first powers of `BASE` modulo `PRIME`."""
    return [pow(BASE, j, PRIME) for j in range(1, size + 1)]


def place(x: Tensor, places: int) -> Tensor:
    """The place of each example, a public pseudo-random function of its pixels, evenly spread.

    .. math:: k(x) = \\Big(\\sum_j r^j \\operatorname{round}(2^{16} x_j) \\bmod P\\Big) \\bmod M

    with the prime P = 2^31 - 1 and r = 48271. All in whole numbers, so it is the same in every batch, chunk and
    vectorization. Equal images get the same place.

    Parameters
    ----------
    x
        (n, ...) examples.
    places
        M >= 1.

    Returns
    -------
    (n,) whole numbers from 0 to M - 1.

    Raises
    ------
    ValueError
        there is no place, or a pixel is NaN or infinite, which the formula does not cover.

    Examples
    --------
    Who leaves moves nobody else:

    >>> import torch
    >>> from dpivon.assignment import place
    >>> x = torch.rand(1000, 1, 8, 8)
    >>> torch.equal(place(x, 4)[1:], place(x[1:], 4))
    True
    """
    if places < 1:
        raise ValueError(f"places must be at least 1, got {places}")
    wrong = int((~x.isfinite()).flatten(1).any(1).sum())
    if wrong:
        raise ValueError(f"{wrong} of {len(x)} examples have pixels that are NaN or infinite; repair or remove them")
    return hashed(x, places)


def hashed(x: Tensor, places: int) -> Tensor:
    """The formula of `place` alone, for use under vectorization, which cannot look whether all pixels are finite.

    An example with others goes to some place; in training its gradient is not finite either, and counts as zero.
    """
    pixels = (x.detach().flatten(1) * 2**16).round().to(torch.int64) % PRIME
    factors = torch.tensor(coefficients(pixels.shape[1]), device=x.device)
    return (pixels * factors % PRIME).sum(1) % PRIME % places

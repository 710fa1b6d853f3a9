"""What a model meets that it was not trained on: corrupted test images, and images of nothing that it knows.

All of it is computed from the public test set, from libraries' sample images, or from random numbers: no download.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor

from dpivon import metrics
from dpivon.data import Images

# What each kind does at strengths 1 to 5, on pixels in [-1, 1]: in the manner of Hendrycks and Dietterich (2019).
STRENGTHS: dict[str, tuple[float, ...]] = {
    "noise": (0.1, 0.2, 0.3, 0.4, 0.6),  # standard deviation of the normal noise
    "blur": (0.5, 0.75, 1.0, 1.5, 2.0),  # of the Gaussian blur, in pixels
    "contrast": (0.75, 0.5, 0.35, 0.2, 0.1),  # factor on the distance from the image's mean
}
STRANGERS = ("photographs", "digits", "shuffled", "clouds")


def corrupt(x: Tensor, kind: str, strength: int, seed: int = 0) -> Tensor:
    """Images (n, C, H, W) in [-1, 1], corrupted.

    Parameters
    ----------
    x
        images, unchanged.
    kind
        a key of `STRENGTHS`.
    strength
        1 to 5.
    seed
        of the noise: the same for every model, so that differences are the models'.

    Raises
    ------
    ValueError
        the kind or the strength is unknown.

    Examples
    --------
    >>> import torch
    >>> from dpivon.shift import corrupt
    >>> x = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)
    >>> for strength in (1, 3, 5):
    ...     pale = corrupt(x, "contrast", strength)
    ...     print(round(pale.max().item(), 2))
    0.75
    0.35
    0.1
    """
    if kind not in STRENGTHS:
        raise ValueError(f"unknown corruption {kind!r}; choose one of {', '.join(STRENGTHS)}")
    if strength not in range(1, 6):
        raise ValueError(f"strength must be 1, 2, 3, 4 or 5, got {strength}")
    amount = STRENGTHS[kind][strength - 1]
    if kind == "noise":
        return (x + amount * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))).clamp(-1, 1)
    if kind == "blur":
        return torch.from_numpy(gaussian_filter(x.numpy(), sigma=(0, 0, amount, amount)))
    center = x.mean((1, 2, 3), keepdim=True)
    return center + amount * (x - center)


def strangers(images: Images, kind: str, n: int, seed: int = 0) -> Tensor:
    """At most n images of none of the classes, in the test images' form.

    Parameters
    ----------
    images
        the data set whose test images are familiar.
    kind
        'photographs', pieces of two photographs; 'digits', the handwritten digits, enlarged; 'shuffled', test images
        with their pixels in another order, the same for all; 'clouds', random fields as rough as photographs are.
    n
        how many, >= 1; fewer come back where the source has no more.
    seed
        of the choice.

    Raises
    ------
    ValueError
        the kind is unknown, n is not positive, or the images are digits themselves.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = images.shape
    if kind == "photographs":
        photographs = [torch.tensor(load_sample_image(name)).movedim(2, 0) for name in ("china.jpg", "flower.jpg")]
        pieces = torch.cat([tiles(p / 127.5 - 1, height, width) for p in photographs])
        pieces = pieces if channels == 3 else pieces.mean(1, keepdim=True).expand(-1, channels, -1, -1)
        return pieces[torch.randperm(len(pieces), generator=generator)[:n]]
    if kind == "digits":
        if images.name.startswith("digits"):
            raise ValueError("digits are familiar to a model of digits; choose another kind")
        x = torch.from_numpy(load_digits().images).float()[:n, None] / 8 - 1
        return F.interpolate(x, (height, width), mode="bilinear").expand(-1, channels, -1, -1)
    if kind == "shuffled":
        order = torch.randperm(height * width, generator=generator)
        return images.x_test[:n].flatten(2)[:, :, order].unflatten(2, (height, width))
    if kind == "clouds":
        frequency = torch.fft.fftfreq(height)[:, None].square() + torch.fft.rfftfreq(width).square()
        frequency[0, 0] = torch.inf  # no constant part
        white = torch.fft.rfft2(torch.randn(n, channels, height, width, generator=generator))
        field = torch.fft.irfft2(white / frequency.sqrt(), s=(height, width))
        return (0.5 * field / field.std()).clamp(-1, 1)
    raise ValueError(f"unknown strangers {kind!r}; choose one of {', '.join(STRANGERS)}")


def tiles(photograph: Tensor, height: int, width: int) -> Tensor:
    """A photograph (C, H, W) cut into (n, C, height, width), without overlap."""
    pieces = photograph.unfold(1, height, height).unfold(2, width, width)  # (C, rows, columns, height, width)
    return pieces.flatten(1, 2).movedim(1, 0)


def evaluate(log_probs: Callable[[Tensor], Tensor], images: Images, limit: int = 2000) -> dict[str, Any]:
    """Metrics and mean entropy under each corruption and strength, and how well entropy tells strangers.

    Parameters
    ----------
    log_probs
        the model: (n, C, H, W) to (n, classes).
    images
        whose first `limit` test images are used.
    limit
        fewer are quicker, and less exact.
    """
    x, y = images.x_test[:limit], images.y_test[:limit]

    def measured(found: Tensor) -> dict[str, float]:
        return {**metrics.evaluate(found, y), "entropy": float(metrics.entropy(found).mean())}

    clean = log_probs(x)
    corrupted = [
        {"kind": kind, "strength": strength, **measured(log_probs(corrupt(x, kind, strength)))}
        for kind, amounts in STRENGTHS.items()
        for strength in range(1, len(amounts) + 1)
    ]
    strange = {}
    for kind in STRANGERS:
        if not (kind == "digits" and images.name.startswith("digits")):
            doubt = metrics.entropy(log_probs(strangers(images, kind, limit)))
            strange[kind] = {"auroc": metrics.auroc(metrics.entropy(clean), doubt), "entropy": float(doubt.mean())}
    return {"examples": len(x), "clean": measured(clean), "corrupted": corrupted, "strangers": strange}

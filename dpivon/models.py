"""The networks of the book: small, with no batch statistics, so that an example's gradient is its own."""

from collections.abc import Callable

import torch
from torch import nn

Shape = tuple[int, int, int]


def mlp(shape: Shape, classes: int, hidden: int = 64) -> nn.Module:
    """A multilayer perceptron with one hidden layer and tanh.

    Parameters
    ----------
    shape
        (C, H, W) of one image.
    classes
        number of classes.
    hidden
        width of the hidden layer.
    """
    channels, height, width = shape
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels * height * width, hidden), nn.Tanh(), nn.Linear(hidden, classes)
    )


def lenet(shape: Shape, classes: int) -> nn.Module:
    """LeNet-5 with tanh and max pooling: 62,006 parameters for 3 x 32 x 32 images and 10 classes.

    Bounded activations keep per-example gradients short, which suits clipping (Papernot et al., 2021).

    Parameters
    ----------
    shape
        (C, H, W) of one image; H and W must be at least 16.
    classes
        number of classes.

    Raises
    ------
    ValueError
        the image is too small for two 5 x 5 convolutions and two poolings.
    """
    channels, height, width = shape
    rows, columns = ((side - 4) // 2 for side in (height, width))
    rows, columns = ((side - 4) // 2 for side in (rows, columns))
    if min(rows, columns) < 1:
        raise ValueError(f"lenet needs images of at least 16 x 16, got {height} x {width}; use model 'mlp'")
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * rows * columns, 120), nn.Tanh(),
        nn.Linear(120, 84), nn.Tanh(),
        nn.Linear(84, classes),
    )  # fmt: skip


def tanh_cnn(shape: Shape, classes: int) -> nn.Module:
    """The convolutional network of Papernot et al. (2021): three pairs of 3 x 3 convolutions, 32-64-128 channels, tanh.

    550,570 parameters for 3 x 32 x 32 images and 10 classes.

    Parameters
    ----------
    shape
        (C, H, W) of one image; H and W must be at least 8.
    classes
        number of classes.

    Raises
    ------
    ValueError
        the image is too small for three poolings.
    """
    channels, height, width = shape
    if min(height, width) < 8:
        raise ValueError(f"tanh_cnn needs images of at least 8 x 8, got {height} x {width}; use model 'mlp'")
    layers: list[nn.Module] = []
    for wide in (32, 64, 128):
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(wide, wide, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        channels = wide
    features = 128 * (height // 8) * (width // 8)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, 128), nn.Tanh(), nn.Linear(128, classes))


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {"mlp": mlp, "lenet": lenet, "tanh_cnn": tanh_cnn}


def build(name: str, shape: Shape, classes: int, seed: int | None = None) -> nn.Module:
    """The network `name`, initialized as torch does, from `seed` when one is given.

    The initial weights do not depend on data, so they cost no privacy. The global random state is left as it was.

    Parameters
    ----------
    name
        one of `MODELS`.
    shape
        (C, H, W) of one image.
    classes
        number of classes.
    seed
        for the initial weights; None draws fresh ones.

    Raises
    ------
    ValueError
        the name is unknown, a size is not positive, or the images do not fit the network.

    Examples
    --------
    >>> from dpivon import models
    >>> net = models.build("lenet", (3, 32, 32), 10, seed=0)
    >>> sum(p.numel() for p in net.parameters())
    62006
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(MODELS)}")
    if min(*shape, classes) < 1:
        raise ValueError(f"shape and classes must be positive, got {shape} and {classes}")
    with torch.random.fork_rng(devices=[]):
        torch.seed() if seed is None else torch.manual_seed(seed)
        return MODELS[name](shape, classes)

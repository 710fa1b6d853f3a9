"""Settings from public numbers alone: what to try first, before any run has touched the data, and what it can learn.

Of the data they use nothing but N. They are rules of thumb, found where they were measured and tested elsewhere; the
page *How to choose hyperparameters* of the book has both.
"""

import math

from dpivon import checks, curvature

WALK = 0.1  # how far noise may carry a weight: as far as an initial weight is from zero
DISTANCE = 100.0  # how far agreeing gradients must be able to carry the network
SHARE = 0.025  # the prior's pull on a network of noise, of the longest gradient


def walk_std(lr: float, noise_std: float, steps: float, weight_decay: float = 0.0) -> float:
    """How far the privacy noise alone carries a weight whose gradient is zero, at a constant learning rate.

    .. math:: \\sqrt{V_T}, \\qquad V_T = \\frac{\\alpha s^2}{2 \\delta_v} \\left(1 - e^{-2 \\alpha \\delta_v T}\\right)

    Raises
    ------
    ValueError
        an argument is out of range.
    """
    checks.positive(lr=lr, noise_std=noise_std, steps=steps)
    checks.not_negative(weight_decay=weight_decay)
    forgotten = 2 * lr * weight_decay * steps
    return lr * noise_std * math.sqrt(steps * (-math.expm1(-forgotten) / forgotten if forgotten else 1.0))


def learning_rate(noise_std: float, steps: float, weight_decay: float = 0.0, walk: float = WALK) -> float:
    """The constant learning rate at which the privacy noise carries a weight as far as `walk`: `walk_std` solved.

    Where privacy is weak it is longer than the loss allows: take the lesser of it and what works without noise.

    Raises
    ------
    ValueError
        an argument is out of range.

    Examples
    --------
    Ten epochs of CIFAR-10 in batches of 512, with noise multiplier 1 and clipping norm 1:

    >>> from dpivon import rules
    >>> s, steps = 1.0 * 1.0 / 512, round(10 * 50_000 / 512)
    >>> lr = rules.learning_rate(s, steps)
    >>> round(lr, 2)
    1.64
    >>> round(rules.walk_std(lr, s, steps), 2)
    0.1
    >>> round(rules.hess_init(s, scale=50_000), 2)
    0.09
    """
    from scipy.optimize import brentq

    checks.positive(noise_std=noise_std, steps=steps, walk=walk)
    shortest = walk / (noise_std * math.sqrt(steps))  # without decay
    longest = shortest + 2 * weight_decay * walk**2 / noise_std**2  # more than where it has come to rest
    return float(brentq(lambda lr: walk_std(lr, noise_std, steps, weight_decay) - walk, shortest / 2, 2 * longest))


def least_learning_rate(steps: float, max_grad_norm: float, distance: float = DISTANCE) -> float:
    """The constant learning rate at which clipped gradients that all agree would carry the network so far.

    .. math:: \\alpha = \\frac{D}{C T}

    Shorter steps do not arrive, however little noise they gather.
    """
    checks.positive(steps=steps, max_grad_norm=max_grad_norm, distance=distance)
    return distance / (max_grad_norm * steps)


def weight_decay(max_grad_norm: float, parameters: float, walk: float = WALK, share: float = SHARE) -> float:
    """A prior that pulls a network of noise alone as hard as a share of the longest gradient.

    .. math:: \\delta_v = \\frac{u\\, C}{w \\sqrt P}
    """
    checks.positive(max_grad_norm=max_grad_norm, parameters=parameters, walk=walk, share=share)
    return share * max_grad_norm / (walk * math.sqrt(parameters))


def beta2(steps: float, times: float = 5.0) -> float:
    """A decay of the curvature that forgets its start `times` times in a run: 1 - beta2 = c / T."""
    checks.positive(steps=steps, times=times)
    if times >= steps:
        raise ValueError(f"times must be below the {steps:g} steps, got {times:g}")
    return 1 - times / steps


def hess_init(noise_std: float, scale: float) -> float:
    """Where the paper's curvature stays, on average, if it sees noise alone: `curvature.noise_floor`."""
    checks.positive(noise_std=noise_std, scale=scale)
    return curvature.noise_floor({"noise_std": noise_std, "scale": scale})


def resolved_by_squares(
    noise_multiplier: float, batch_size: float, steps: float, parameters: float, kappa: float = 1.0
) -> float:
    """How many curvatures the squared private gradients of a run can tell from zero, at best.

    .. math:: R = \\frac{\\kappa^2\\, T\\, b^2}{2\\, \\sigma_p^4\\, P}

    with kappa the mean squared length of a clipped gradient in units of C^2, at most 1. It may exceed P: then all can.
    """
    checks.positive(
        noise_multiplier=noise_multiplier, batch_size=batch_size, steps=steps, parameters=parameters, kappa=kappa
    )
    return kappa**2 * steps * batch_size**2 / (2 * noise_multiplier**4 * parameters)


def resolved_by_price(noise_multiplier: float, batch_size: float, steps: float, n: float, kappa: float = 1.0) -> float:
    """How many curvatures Price's estimate can tell from zero in a run, for a posterior of the right width.

    .. math:: R = \\frac{\\kappa\\, T\\, b^2}{\\sigma_p^2\\, N}

    with kappa the trace of the mean loss's Hessian in units of C^2.
    """
    checks.positive(noise_multiplier=noise_multiplier, batch_size=batch_size, steps=steps, n=n, kappa=kappa)
    return kappa * steps * batch_size**2 / (noise_multiplier**2 * n)

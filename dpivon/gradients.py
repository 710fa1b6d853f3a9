"""Per-example gradients, clipped and summed. The only file that sees the gradient of one example."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

Loss = Callable[[Any, Tensor], Tensor]

# Opacus divides by (norm + 1e-6) as well: it keeps the scale finite for a zero gradient and the clipped norm below C.
EPS_NUM = 1e-6


class ClippedSum(NamedTuple):
    """What one batch leaves behind: `sums` has sensitivity `max_grad_norm`; the rest is diagnostics outside epsilon."""

    sums: list[Tensor]
    loss: float
    clipped: float
    size: int


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name, in the model's order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_examples_independent(model: nn.Module) -> None:
    """Refuse layers that mix the examples of a batch or store statistics of the data.

    With batch normalization one example changes every other example's gradient, so no clipping bounds its influence;
    running statistics would leave the model without any noise.

    Raises
    ------
    ValueError
        the model holds such a layer.
    """
    for name, layer in model.named_modules():
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        running = isinstance(layer, nn.modules.instancenorm._InstanceNorm) and layer.track_running_stats
        if batch_norm or running:
            raise ValueError(
                f"{type(layer).__name__} at {name!r} uses statistics of the batch, so one example changes the others' "
                "gradients and clipping bounds nothing; use GroupNorm or LayerNorm (ModuleValidator.fix does it)"
            )


def take(x: Any, index: Any) -> Any:
    """The examples `index` of a batch that is a tensor, or a dict, list or tuple of tensors."""
    return tree_map(lambda t: t[index], x)


def per_example_gradients(model: nn.Module, loss: Loss, x: Any, y: Tensor) -> tuple[list[Tensor], Tensor]:
    """The gradient of each example's loss, by one vectorized pass.

    .. math:: g_i = \\nabla_\\theta \\ell(\\theta; x_i, y_i)

    Works for any module whose examples are independent: in-place activations, shared or unused parameters (their
    gradient is zero), recurrent layers, dropout (a mask per example).

    Parameters
    ----------
    model
        any module; its trainable parameters are differentiated, nothing of it is changed.
    loss
        ``loss(model(x), y)``, a scalar for a batch of one.
    x
        a tensor, or a dict, list or tuple of tensors, each with n examples in its first dimension.
    y
        tensor with n targets.

    Returns
    -------
    gradients, losses
        One tensor of shape (n, \\*p.shape) for each trainable parameter p, and the (n,) losses.
    """
    parameters = {name: p.detach() for name, p in trainable(model).items()}
    rest = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    rest |= {name: buffer.detach() for name, buffer in model.named_buffers()}

    def one(parameters: dict[str, Tensor], x: Any, y: Tensor) -> Tensor:
        output = functional_call(model, {**parameters, **rest}, (tree_map(lambda t: t.unsqueeze(0), x),))
        return loss(output, y.unsqueeze(0))

    gradients, losses = vmap(grad_and_value(one), in_dims=(None, 0, 0), randomness="different")(parameters, x, y)
    return list(gradients.values()), losses.detach()


def clip_factors(norms: Tensor, max_grad_norm: float) -> Tensor:
    """The factor that brings each gradient to norm C or less; zero where the norm is not finite.

    .. math:: \\min\\left(1, \\frac{C}{\\|g_i\\| + \\varepsilon_{\\rm num}}\\right)

    Parameters
    ----------
    norms
        (n,) Euclidean norms over all parameters.
    max_grad_norm
        C > 0.
    """
    factors = (max_grad_norm / (norms + EPS_NUM)).clamp(max=1.0)
    return torch.where(norms.isfinite(), factors, 0.0)


def default_chunk(model: nn.Module) -> int:
    """How many examples to differentiate at once: about 32 MiB of per-example gradients, between 8 and 64.

    Larger chunks fall out of the processor's cache, smaller ones pay Python more often.
    """
    size = sum(p.numel() for p in trainable(model).values())
    return int(min(64, max(8, 2**23 // max(size, 1))))


def clipped_sum(
    model: nn.Module, loss: Loss, x: Any, y: Tensor, max_grad_norm: float, chunk_size: int | None = None
) -> ClippedSum:
    """The sum of clipped per-example gradients, in chunks, so that memory does not grow with the batch.

    .. math::
        \\sum_i \\bar g_i, \\qquad
        \\bar g_i = g_i \\min\\left(1, \\frac{C}{\\|g_i\\| + \\varepsilon_{\\rm num}}\\right)

    Adding or removing one example moves the result by at most C. An example whose gradient is not finite counts as
    zero. An empty batch gives zeros.

    Parameters
    ----------
    model, loss, x, y
        as in `per_example_gradients`.
    max_grad_norm
        the clipping norm C, over all parameters together.
    chunk_size
        examples differentiated at once; None chooses by the model's size. It does not change the result
        beyond rounding.

    Raises
    ------
    ValueError
        C is not positive, the model has no trainable parameter, or x and y disagree in length.
    """
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, got {max_grad_norm}; 1.0 is a common start")
    parameters = list(trainable(model).values())
    if not parameters:
        raise ValueError("the model has no trainable parameter; set requires_grad on those that should learn")
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters):
        raise ValueError(
            "parameters in half precision round the sum of many gradients by more than one example's share, so its "
            "sensitivity exceeds max_grad_norm; keep the parameters in float32"
        )
    lengths = {len(leaf) for leaf in tree_leaves(x)} | {len(y)}
    if len(lengths) != 1:
        raise ValueError(f"x and y must hold the same number of examples, got {sorted(lengths)}")

    sums = [torch.zeros_like(p) for p in parameters]
    chunk_size = chunk_size or default_chunk(model)
    total_loss = clipped = 0.0
    for start in range(0, len(y), chunk_size):  # an empty batch never enters: vmap cannot map over nothing
        part = slice(start, start + chunk_size)
        gradients, losses = per_example_gradients(model, loss, take(x, part), y[part])
        norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients]).norm(dim=0)
        factors = clip_factors(norms, max_grad_norm)
        finite = norms.isfinite()
        if not finite.all():  # 0 * inf is not 0
            gradients = [torch.where(finite.view(-1, *[1] * (g.dim() - 1)), g, 0.0) for g in gradients]
        for total, g in zip(sums, gradients, strict=True):
            total += torch.tensordot(factors, g, dims=1)
        total_loss += float(losses.sum())
        clipped += float((factors < 1).sum())
    size = len(y)
    return ClippedSum(sums, total_loss / max(size, 1), clipped / max(size, 1), size)


def mean_gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor) -> tuple[list[Tensor], float]:
    """The plain gradient of the mean loss, for methods that are not private.

    Parameters
    ----------
    model, loss, x, y
        as in `per_example_gradients`; `loss` averages over the batch. An empty batch gives zeros.
    """
    parameters = list(trainable(model).values())
    if len(y) == 0:
        return [torch.zeros_like(p) for p in parameters], 0.0
    value = loss(model(x), y)
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)], float(
        value.detach()
    )

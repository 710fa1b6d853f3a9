"""Per-example gradients, clipped and summed. The only file that sees the gradient of one example."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode
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


def check_loss(loss: Loss, y: Tensor) -> None:
    """Refuse class weights that would cancel: torch divides the mean loss by the weights of its labels, here just one.

    Raises
    ------
    ValueError
        the loss is torch's cross-entropy with weights, and each example has one label.
    """
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        settings = {"weight": loss.weight, "reduction": loss.reduction}
    elif isinstance(loss, partial) and loss.func in (F.cross_entropy, F.nll_loss):
        settings = loss.keywords
    else:
        return
    mean = settings.get("reduction", "mean") == "mean"
    if mean and settings.get("weight") is not None and y.dim() == 1 and not y.is_floating_point():
        raise ValueError(
            "class weights have no effect on the mean loss of one example, which torch divides by them; use lambda "
            "output, y: (F.cross_entropy(output, y, reduction='none') * weight[y]).mean(), with a weight that is public"
        )


def check_precision(parameters: dict[str, nn.Parameter]) -> None:
    """Raise ValueError, naming the parameter, unless all are float32 or float64."""
    for name, p in parameters.items():
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name!r} is {p.dtype}. Parameters in half precision round the sum of many gradients by more than "
                "one example's share, so its sensitivity exceeds max_grad_norm; noise on complex ones is smaller in "
                "each part than what is accounted; keep the parameters in float32"
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
    gradients, losses, _ = chunk_gradients(model, loss, x, y)
    return [g for g in gradients.values() if isinstance(g, Tensor)], losses


class Outer(NamedTuple):
    """Per-example gradients of a linear layer's weight, g_i = delta_i a_i^T, without the product (Goodfellow, 2015).

    Parameters
    ----------
    delta
        (n, out), gradients with respect to the layer's output.
    a
        (n, in), the layer's inputs.
    """

    delta: Tensor
    a: Tensor

    def norms(self) -> Tensor:
        """The (n,) Euclidean norms: that of an outer product is the product of the norms."""
        return lengths(self.delta) * lengths(self.a)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        """The sum of factor_i g_i, in one matrix product."""
        return (factors.unsqueeze(1) * self.delta).T @ self.a


def lengths(v: Tensor) -> Tensor:
    """The (n,) Euclidean norms of n vectors, tiny ones too, whose squares float32 loses: they may meet huge ones."""
    norms = torch.linalg.vector_norm(v, dim=1)
    tiny = torch.linalg.vector_norm(v, dim=1, dtype=torch.float64).to(v.dtype)
    return torch.where(norms > 1e-15, norms, tiny)


class LinearCalls(TorchFunctionMode):
    """Sees every use of some weights. One that only ever multiplies one vector of an example has an `Outer` gradient.

    Such a layer's input is kept in `inputs`, and a zero is added to its output, whose gradient is delta; the weight
    itself is detached there. The names of weights that are used in any other way, or twice, go to `others`: for them
    the shortcut would be wrong. A use that torch does not show here leaves a gradient of the weight itself.

    `originals` are the model's own parameters, in whose place others stand here: who reached one past its module, as a
    penalty in the loss does, would get no gradient.
    """

    def __init__(
        self, weights: dict[str, Tensor], zeros: dict[str, Tensor], originals: dict[str, nn.Parameter]
    ) -> None:
        super().__init__()
        self.names = {id(weight): name for name, weight in weights.items()}
        self.originals = {id(p): name for name, p in originals.items()}
        self.zeros = zeros
        self.inputs: dict[str, Tensor] = {}
        self.others: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`; note what it does with the weights. ValueError where it computes with an original."""
        kwargs = kwargs or {}
        ids = [id(leaf) for leaf in tree_leaves((args, kwargs))]
        used = [self.names[i] for i in ids if i in self.names]
        if func is F.linear and len(args) > 1 and used == [self.names.get(id(args[1]))]:
            x, weight, *bias = args
            if x.dim() == 2 and len(x) == 1 and used[0] not in self.inputs:
                zero = self.zeros[used[0]]
                self.inputs[used[0]] = x[0].to(zero.dtype, copy=True)  # the model may go on to change it in place
                return func(x, weight.detach(), *bias, **kwargs) + zero
        self.others.update(used)
        output = func(*args, **kwargs)
        past = [self.originals[i] for i in ids if i in self.originals]
        if past and func not in CONSTANT and any(isinstance(leaf, Tensor) for leaf in tree_leaves(output)):
            raise ValueError(
                f"{past[0]!r} is reached past its module, from a list or from the loss, so part of its gradient would "
                "be missing; let forward() use or return it; weight decay belongs to the optimizer, after the noise"
            )
        return output


# What takes a parameter's value without its gradient.
CONSTANT: set[Any] = {Tensor.detach, vars(torch._C.TensorBase)["data"].__get__}


def chunk_gradients(
    model: nn.Module, loss: Loss, x: Any, y: Tensor, outer: Collection[str] = (), theta: Sequence[Tensor] | None = None
) -> tuple[dict[str, Tensor | Outer], Tensor, set[str]]:
    """As `per_example_gradients`, by name; those of the weights named in `outer` come as `Outer` products.

    Taken at `theta`, values for the trainable parameters in the model's order; None for their own.

    Returns
    -------
    gradients, losses, others
        `others` names the weights of `outer` that do not fit it, see `LinearCalls`; if there is one, ask again without.
    """
    originals = trainable(model)
    parameters = {name: p.detach() for name, p in originals.items()}
    if theta is not None:
        parameters = dict(zip(parameters, theta, strict=True))
    constants = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    constants |= {name: buffer.detach() for name, buffer in model.named_buffers()}
    weights = {name: parameters.pop(name) for name in outer}
    zeros = {name: weight.new_zeros(len(weight)) for name, weight in weights.items()}
    others: set[str] = set()

    def one(wanted: tuple[dict[str, Tensor], ...], x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        parameters, weights, zeros = wanted
        with LinearCalls(weights, zeros, originals) as calls:
            everything = {**parameters, **weights, **constants}
            output = functional_call(model, everything, (tree_map(lambda t: t.unsqueeze(0), x),))
            value = loss(output, y.unsqueeze(0))
        others.update(calls.others)
        return value, calls.inputs

    each = vmap(grad_and_value(one, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    (full, rest, deltas), (losses, inputs) = each((parameters, weights, zeros), x, y)
    # What does not depend on the example is one tensor seen n times, and mostly zero: look at it once.
    others |= {name for name, g in rest.items() if (g if g.stride(0) else g[:1]).any()}
    gradients = {**full, **{name: Outer(deltas[name], a) for name, a in inputs.items()}}
    return gradients, losses.detach(), others


def averaged_gradients(
    model: nn.Module, loss: Loss, x: Any, y: Tensor, thetas: Sequence[Sequence[Tensor]]
) -> tuple[dict[str, Tensor | Outer], Tensor]:
    """Each example's gradients and losses, averaged over several weights; as the first two of `chunk_gradients`.

    .. math:: g_i = \\frac{1}{K} \\sum_{k=1}^{K} \\nabla \\ell(\\theta_k; x_i, y_i)
    """
    total: dict[str, Tensor] = {}
    losses = torch.zeros(())
    for theta in thetas:
        gradients, at_theta, _ = chunk_gradients(model, loss, x, y, theta=theta)
        total = {name: g / len(thetas) + total.get(name, 0) for name, g in gradients.items() if isinstance(g, Tensor)}
        losses = losses.to(at_theta) + at_theta / len(thetas)
    return {**total}, losses


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


def linear_weights(model: nn.Module) -> set[str]:
    """The names of the trainable weights of linear layers, whose gradients may be `Outer` products."""
    names = {f"{name}.weight".lstrip(".") for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return names & trainable(model).keys()


def default_chunk(model: nn.Module, outer: Collection[str]) -> int:
    """How many examples to differentiate at once: about 32 MiB of per-example gradients, between 8 and 128.

    Larger chunks fall out of the processor's cache, smaller ones pay Python more often.
    """
    size = sum(p.numel() for name, p in trainable(model).items() if name not in outer)
    return int(min(128, max(8, 2**23 // max(size, 1))))


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Tensor,
    max_grad_norm: float,
    chunk_size: int | None = None,
    thetas: Sequence[Sequence[Tensor]] | None = None,
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
    thetas
        several values for the trainable parameters, each a list in the model's order, instead of their own: an
        example's gradient g_i is then its average over them, *before* it is clipped. Clipping each and adding them up
        would let one example move the result by C times their number.

    Raises
    ------
    ValueError
        C or `chunk_size` is not positive, the model has no trainable parameter or one that is not real, x and y are no
        tensors or disagree in length, or the loss weights classes in a way that cancels.

    Examples
    --------
    Three examples pull with forces of about 20, 200 and 2,000. Clipped to 1, they have the same say:

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> from dpivon.gradients import clipped_sum
    >>> net = torch.nn.Linear(1, 1, bias=False)
    >>> x = torch.ones(3, 1)
    >>> y = torch.tensor([[10.0], [100.0], [1000.0]])
    >>> found = clipped_sum(net, mse_loss, x, y, 1.0)
    >>> round(found.sums[0].item(), 3), found.clipped
    (-3.0, 1.0)
    """
    if not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be > 0, got {max_grad_norm}; 1.0 is a common start")
    strange = [type(leaf).__name__ for leaf in (*tree_leaves(x), y) if not isinstance(leaf, Tensor)]
    if strange:
        raise ValueError(f"x and y must be tensors, got {strange[0]}; torch.as_tensor makes one of an array")
    check_loss(loss, y)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; None chooses by the model's size")
    parameters = trainable(model)
    if not parameters:
        raise ValueError("the model has no trainable parameter; set requires_grad on those that should learn")
    check_precision(parameters)
    sizes = {len(leaf) for leaf in tree_leaves(x)} | {len(y)}
    if len(sizes) != 1:
        raise ValueError(f"x and y must hold the same number of examples, got {sorted(sizes)}")

    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    outer = linear_weights(model) if thetas is None else set()  # an average of outer products is none
    total_loss, clipped, start, size = 0.0, 0.0, 0, len(y)
    while start < size:  # an empty batch never enters: vmap cannot map over nothing
        part = slice(start, start + (chunk_size or default_chunk(model, outer)))
        if thetas is not None:
            gradients, losses = averaged_gradients(model, loss, take(x, part), y[part], thetas)
        else:
            try:
                gradients, losses, others = chunk_gradients(model, loss, take(x, part), y[part], outer)
            except RuntimeError:  # a model that differentiates or maps itself keeps the shortcut's inputs from leaving
                if not outer:
                    raise
                others = outer
            if others:
                outer = outer - others
                continue
        with torch.autocast(y.device.type, enabled=False):  # which would multiply, and so add up, in half precision
            norms = torch.stack([norms_of(g) for g in gradients.values()]).norm(dim=0)
            factors = clip_factors(norms, max_grad_norm)
            if not norms.isfinite().all():  # 0 * inf is not 0
                gradients = {name: tree_map(partial(zero_where, ~norms.isfinite()), g) for name, g in gradients.items()}
            for name, g in gradients.items():
                sums[name] += g.weighted_sum(factors) if isinstance(g, Outer) else torch.tensordot(factors, g, dims=1)
        total_loss += float(losses.sum())
        clipped += float((factors < 1).sum())
        start = part.stop
    return ClippedSum(list(sums.values()), total_loss / max(size, 1), clipped / max(size, 1), size)


def norms_of(g: Tensor | Outer) -> Tensor:
    """The (n,) Euclidean norms of n gradients of one parameter."""
    return g.norms() if isinstance(g, Outer) else torch.linalg.vector_norm(g.flatten(1), dim=1)


def zero_where(mask: Tensor, t: Tensor) -> Tensor:
    """The tensor with zeros for the examples that `mask` marks."""
    return torch.where(mask.view(-1, *[1] * (t.dim() - 1)), 0.0, t)


def mean_gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor) -> tuple[list[Tensor], float]:
    """The plain gradient of the mean loss, for methods that are not private.

    Parameters
    ----------
    model, loss, x, y
        as in `per_example_gradients`; `loss` averages over the batch. An empty batch gives zeros.
    """
    check_loss(loss, y)  # so that the twin trains the same loss
    parameters = list(trainable(model).values())
    if len(y) == 0:
        return [torch.zeros_like(p) for p in parameters], 0.0
    value = loss(model(x), y)
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(found, parameters, strict=True)]
    return gradients, float(value.detach())

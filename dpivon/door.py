"""The Opacus door: a training loop that you already have, made private with the exact q and b.

The gradients of each example are here Opacus' own, by hooks on the model; clipping, noise and accounting are those of
`mechanism`.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from opacus.accountants.accountant import IAccountant
from opacus.data_loader import dtype_safe, shape_safe, wrap_collate_with_empty
from opacus.grad_sample import AbstractGradSampleHooks, prepare_module
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from dpivon.gradients import check_examples_independent, check_precision, trainable
from dpivon.mechanism import MIXED_DRAWS, check_batch_size, check_finite, check_noise, new_generator, set_noise_std
from dpivon.processes import ranks
from dpivon.weights import held


class PrivateParts(NamedTuple):
    """What `make_private` returns: drop-in replacements for model, optimizer, data loader and loss.

    `hooks` is what sits on the model; ``hooks.cleanup()`` takes it off again.
    """

    model: nn.Module
    optimizer: DPOptimizer
    loader: DataLoader
    loss: Callable[..., Any]
    hooks: AbstractGradSampleHooks


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset,
    *,
    loss: nn.Module,
    noise_multiplier: float,
    max_grad_norm: float,
    batch_size: int,
    mode: str = "hooks",
    wrap: bool = True,
    accountant: IAccountant | None = None,
    generator: torch.Generator | None = None,
) -> PrivateParts:
    """The Opacus door: a user's own training loop, made private with the exact q = b / N and b.

    `opacus.PrivacyEngine.make_private` derives q and b from the loader's length, which rounds: 50,000 examples in
    batches of 4,096 are accounted and scaled as 3,846. Here both are what was asked for.

    The loop stays the usual one: for each (x, y) of the loader: zero_grad, ``loss(model(x), y).backward()`` once, step;
    for a variational method, see `sampled_params`. The loader may go through Opacus' `BatchMemoryManager`, which bounds
    memory and changes nothing else. What a loop that was left early has accumulated is thrown away, see
    `LogicalBatches`. Schedules of the learning rate, sigma_p and (with hooks) C take the private optimizer.

    Two things our own loop does are not done here: an example whose gradient is not finite is not dropped (the step
    raises instead, which says that there was one), and a module that mixes the examples of a batch in its own code is
    noticed only where three examples show it. Publish `state_dict()`, never the pickled module.

    Parameters
    ----------
    model
        without batch statistics, in-place activations, unused parameters or recurrent layers of torch.nn.
    optimizer
        any torch optimizer over the model's trainable parameters that steps by `p.grad`. Where its groups have an entry
        `noise_std`, each step writes it.
    dataset
        map-style, with tuples of tensors as examples. Not a loader: the sampler must be Poisson's.
    loss
        a torch loss module with reduction "mean", such as ``nn.CrossEntropyLoss()``.
    noise_multiplier, max_grad_norm, batch_size
        sigma_p, C and b.
    mode
        "hooks" (per-example gradients stored) or "ghost" (norms first, then a second backward pass).
    wrap
        whether the model is wrapped in a module that holds the hooks. Without, they sit on the model itself until
        ``hooks.cleanup()``: for models that other code must recognize.
    accountant
        an Opacus accountant that counts each step.
    generator
        source of the noise and of the masks; None draws one from the operating system's entropy.

    Raises
    ------
    ValueError
        a setting is out of range, or the model, data or optimizer do not fit; the message names the remedy.

    Examples
    --------
    >>> import torch
    >>> from torch import nn, optim, utils
    >>> from dpivon.door import make_private
    >>> x, y = torch.rand(50_000, 4), torch.arange(50_000) % 2
    >>> data = utils.data.TensorDataset(x, y)
    >>> net = nn.Linear(4, 2)
    >>> parts = make_private(
    ...     net, optim.SGD(net.parameters(), lr=0.5), data,
    ...     loss=nn.CrossEntropyLoss(), noise_multiplier=1.0,
    ...     max_grad_norm=1.0, batch_size=4096)
    >>> parts.optimizer.expected_batch_size
    4096
    >>> for x, y in parts.loader:
    ...     parts.optimizer.zero_grad()
    ...     parts.loss(parts.model(x), y).backward()
    ...     parts.optimizer.step()
    """
    if mode not in ("hooks", "ghost"):
        raise ValueError(f"mode must be 'hooks' or 'ghost', got {mode!r}; the book's own loop is private_gradient")
    check_door(model, optimizer, dataset, loss)
    n = len(dataset)  # type: ignore[arg-type]
    check_noise(noise_multiplier, max_grad_norm)
    check_batch_size(batch_size, n)
    # Images need no gradient of their own; torch remarks on that at the first backward, and nothing follows from it.
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    ghost = mode == "ghost"
    generator = generator or new_generator()
    hooks = prepare_module(model, mode, wrap_model=wrap, **({"max_grad_norm": max_grad_norm} if ghost else {}))
    kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    dp = kind(
        optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=batch_size,
        generator=generator,
    )
    if accountant is not None:
        dp.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=batch_size / n))
    set_noise_std(dp)
    example = dataset[0]
    try:
        check_hooks_see_all(dp, hooks, torch.as_tensor(example[0]))
    except BaseException:
        hooks.cleanup()
        raise
    guard(dp, hooks)
    loader: DataLoader = DataLoader(
        dataset,
        batch_sampler=LogicalBatches(n, batch_size / n, generator, dp, hooks),
        collate_fn=wrap_collate_with_empty(
            collate_fn=default_collate,
            sample_empty_shapes=[(0, *shape_safe(part)) for part in example],
            dtypes=[dtype_safe(part) for part in example],
        ),
        generator=generator,
    )
    private_loss = DPLossFastGradientClipping(hooks, dp, loss) if ghost else mean_over_all(loss)
    return PrivateParts(hooks if wrap else model, dp, loader, private_loss, hooks)


def mean_over_all(loss: nn.Module) -> Callable[..., Any]:
    """The loss, averaged over all labels: torch leaves out the ignored ones, so one of them rescales the others."""
    if not hasattr(loss, "ignore_index"):
        return loss
    each: Any = copy.copy(loss)
    each.reduction = "none"
    return lambda output, y: each(output, y).mean()


def guard(dp: DPOptimizer, hooks: AbstractGradSampleHooks) -> None:
    """Look at every forward pass and every step of a user's loop, and raise where its guarantee or meaning would end.

    Raises
    ------
    RuntimeError
        from ``model(x)``: the parts of a logical batch see different weights, or a backward pass failed before;
        from ``step()``: it is inside `sampled_params`.
    ValueError
        from ``backward()``: it ran twice; from ``step()``: other parameters are trained or clipped to another norm.
    """
    trained = {id(p) for p in dp.params}
    count = dp.step_hook
    dp.theta, dp.drawing = None, False

    def before_forward(model: nn.Module, inputs: Any) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        if not hooks.hooks_enabled:  # ghost clipping turns them off for its second pass, which then failed
            raise RuntimeError("a backward pass failed midway; call door.discard(optimizer, hooks) first")
        if dp._is_last_step_skipped:
            if dp.theta is None or any(not torch.equal(p, t) for p, t in zip(dp.params, dp.theta, strict=True)):
                raise RuntimeError(MIXED_DRAWS)
        elif dp._step_skip_queue[:1] == [True]:  # the first of several parts
            dp.theta = [p.detach().clone() for p in dp.params]

    def before_step(dp: DPOptimizer) -> None:
        if {id(p) for p in trainable(hooks._module).values()} != trained:
            raise ValueError("parameters were frozen or unfrozen after make_private; call it again, on a new optimizer")
        if getattr(hooks, "max_grad_norm", dp.max_grad_norm) != dp.max_grad_norm:
            raise ValueError("ghost clipping cannot follow a change of max_grad_norm; use mode='hooks'")
        if dp.drawing:
            raise RuntimeError("step() belongs after sampled_params, which would put the old mean back")
        if count is not None:
            count(dp)
        set_noise_std(dp)
        for p in dp.params:  # what is not yet private must not outlive the step
            for name in WAITING:
                if getattr(p, name, None) is not None:
                    setattr(p, name, None)
        check_finite(trainable(hooks._module))

    hooks.forbid_grad_accumulation()  # a second backward would count an example twice
    hooks.autograd_grad_sample_hooks.append(hooks._module.register_forward_pre_hook(before_forward))  # for cleanup()
    dp.attach_step_hook(before_step)


# What Opacus hangs on a parameter between backward and step, none of it noised.
WAITING = ("grad_sample", "summed_grad", "_norm_sample")


def discard(dp: DPOptimizer, hooks: AbstractGradSampleHooks) -> None:
    """Throw away what an unfinished batch has left: nothing of it was released, and none of it may enter the next step.

    An exception leaves activations that the next batch would be multiplied with, and a logical batch that was left
    early its sum and flags, so that its examples would count in the next one as well.

    Parameters
    ----------
    dp, hooks
        `optimizer` and `hooks` of `PrivateParts`. The loader calls this between logical batches.
    """
    unfinished = dp._is_last_step_skipped
    dp._step_skip_queue.clear()
    dp._is_last_step_skipped, dp.theta = False, None
    hooks.enable_hooks()
    for layer in hooks._module.modules():
        for name in ("activations", "max_batch_len"):
            vars(layer).pop(name, None)
    for p in dp.params:
        unfinished |= any(vars(p).get(name) is not None for name in (*WAITING, "_current_grad_sample"))
        vars(p).pop("_current_grad_sample", None)
        p.grad_sample = p.summed_grad = p._norm_sample = None
        p._forward_counter = 0
    if unfinished:
        for p in dp.params:
            p.grad = None


class LogicalBatches(UniformWithReplacementSampler):
    """Opacus' Poisson batches, with a look between two of them: the first must have ended in a step, or left nothing.

    `BatchMemoryManager` cuts these batches into parts and keeps the sum of the parts on the parameters. It does not
    notice when a loop is left between two parts; the iterator's end, by whatever way, does.
    """

    def __init__(
        self, n: int, sample_rate: float, generator: torch.Generator, dp: DPOptimizer, hooks: AbstractGradSampleHooks
    ) -> None:
        super().__init__(num_samples=n, sample_rate=sample_rate, generator=generator)
        self.dp, self.hooks, self.latest = dp, hooks, object()

    def __iter__(self) -> Iterator[list[int]]:
        """Index lists, int(1 / q) of them.

        Raises
        ------
        RuntimeError
            a part was not followed by `optimizer.step()`: the flags that say which part is the last are out of step.
        """
        discard(self.dp, self.hooks)
        mine = self.latest = object()
        try:
            for batch in super().__iter__():
                yield batch
                if self.dp._step_skip_queue or self.dp._is_last_step_skipped:
                    raise RuntimeError(
                        "a part of the last logical batch was not followed by optimizer.step(); call step() once for "
                        "each batch of the loader, and leave the loop on an exception"
                    )
                discard(self.dp, self.hooks)
        finally:
            if self.latest is mine:  # else a newer loop is under way
                discard(self.dp, self.hooks)


def check_door(model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Dataset, loss: nn.Module) -> None:
    """Refuse parts of a user's loop with which it would not be private. The rest of the check is `check_hooks_fit`.

    Raises
    ------
    ValueError
        naming the part and the remedy.
    """
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "make_private takes the dataset, not a DataLoader: a sampler of one's own is not Poisson's, and the "
            "accountant's q would be wrong; pass loader.dataset"
        )
    if ranks()[1] > 1:
        raise ValueError("make_private is for one process; private_gradient trains in several")
    if type(optimizer).__module__.split(".")[0] == "ivon":
        raise ValueError(
            "ivon-opt keeps the gradient it saw before the noise and steps by that, so nothing would be private; use "
            "dpivon.ivon.IVON"
        )
    if getattr(loss, "reduction", None) != "mean":
        raise ValueError(f"loss must be a module with reduction='mean', got {loss!r}; e.g. nn.CrossEntropyLoss()")
    if getattr(loss, "weight", None) is not None or getattr(loss, "ignore_index", -100) != -100:
        raise ValueError(
            "a loss with class weights or ignore_index divides by what the batch holds, so one example rescales all "
            "others before clipping; weight the classes in private_gradient's loss, by lambda output, y: "
            "(F.cross_entropy(output, y, reduction='none') * weight[y]).mean() and a public weight, or not at all"
        )
    if {id(p) for p in trainable(model).values()} != {id(p) for g in optimizer.param_groups for p in g["params"]}:
        raise ValueError(
            "the optimizer must hold exactly the model's trainable parameters; the others would keep raw gradients: "
            "freeze them with requires_grad_(False) before building the optimizer"
        )
    check_precision(trainable(model))
    check_hooks_fit(model, dataset)


def nearby(parameters: list[Tensor]) -> list[Tensor]:
    """Values near the parameters', none of them zero. Seeds torch's global generator: the same values each time."""
    torch.manual_seed(0)
    return [p + 0.1 * torch.randn_like(p) for p in parameters]


def check_hooks_see_all(dp: DPOptimizer, hooks: AbstractGradSampleHooks, x: Tensor) -> None:
    """Refuse a model of whose gradient the hooks miss a part: ghost clipping would release it without a bound.

    Tries random examples like x, of which it sees the shape alone, at weights none of which is zero.

    Raises
    ------
    ValueError
        an example's output depends on the others, a parameter is used outside of its layer, positions are folded into
        the batch, Opacus is wrong about a layer (it takes every padding for one with zeros), or ghost clipping meets
        one parameter twice.
    """
    modes = {layer: layer.training for layer in hooks._module.modules()}
    kind = "_norm_sample" if isinstance(dp, DPOptimizerFastGradientClipping) else "grad_sample"
    try:
        with torch.random.fork_rng(devices=[]), held(dp.params, nearby(dp.params)):  # the same random numbers each time
            hooks._module.train()
            x = torch.rand(1, *x.shape, dtype=x.dtype) if x.is_floating_point() else torch.zeros_like(x).unsqueeze(0)
            if mixes(hooks._module, x):
                raise ValueError(
                    "what the model says of one example depends on the others in its batch (a mean over them?), so "
                    "clipping one example's gradient bounds nothing; let forward() treat each example by itself"
                )
            output = hooks._module(x)
            gradients = torch.autograd.grad((output * torch.randn_like(output)).sum(), dp.params)
        norms = [float(g.norm()) for g in gradients]
        samples = [getattr(p, kind, None) for p in dp.params]
        seen = [0.0 if sample is None else float(sample.norm()) for sample in samples]
    except NotImplementedError as error:  # Opacus' own words
        raise ValueError(f"{error}; use mode='hooks', or dpivon's private_gradient, which has no hooks") from error
    finally:
        discard(dp, hooks)
        for layer, training in modes.items():
            layer.training = training
    for name, found, norm in zip(trainable(hooks._module), seen, norms, strict=True):
        if not abs(found - norm) <= 1e-3 * norm + 1e-5 * max(norms):
            raise ValueError(
                f"hooks see {found:.3g} of the gradient of {name!r}, whose norm is {norm:.3g} on a random example, so "
                "clipping would go by a wrong norm: the parameter is used outside of its own layer, positions are "
                "folded into the batch, or Opacus does not heed the layer's padding; use dpivon's private_gradient, "
                "which has no hooks"
            )


@torch.no_grad()
def mixes(model: nn.Module, x: Tensor) -> bool:
    """Whether the output for the first of three examples changes with the other two, for the same random numbers."""
    try:
        torch.manual_seed(0)
        with_zeros = model(torch.cat([x, torch.zeros_like(x), torch.zeros_like(x)]))[:1]
        torch.manual_seed(0)
        with_ones = model(torch.cat([x, torch.ones_like(x), torch.ones_like(x)]))[:1]
    except IndexError:  # of two tokens the model may know only one
        return False
    return not torch.allclose(with_zeros, with_ones, rtol=1e-6, atol=1e-7, equal_nan=True)


def check_hooks_fit(model: nn.Module, dataset: Dataset) -> None:
    """Refuse what Opacus' hooks would get wrong or report obscurely. Our own loop takes all but batch statistics.

    Raises
    ------
    ValueError
        naming the layer, parameter or batch and the remedy.
    """
    check_examples_independent(model)
    own_loop = "or use dpivon's private_gradient, which has no hooks"
    for name, layer in model.named_modules():
        if getattr(layer, "inplace", False):
            raise ValueError(f"in-place layer {name!r} overwrites what hooks need; set inplace=False, {own_loop}")
        if isinstance(layer, nn.RNNBase):
            kind = type(layer).__name__
            raise ValueError(f"{kind} at {name!r} has no per-example hooks; use opacus.layers.DP{kind}, {own_loop}")
    problems = ModuleValidator.validate(model, strict=False)
    if problems:
        raise ValueError(f"Opacus does not support this model: {problems[0]}; ModuleValidator.fix may help, {own_loop}")
    example = dataset[0]
    if not isinstance(example, (tuple, list)):
        raise ValueError(f"examples must be tuples (x, y), got {type(example).__name__}; return a tuple, {own_loop}")

    # A probe on zeros: it sees the shapes of the data and none of its values.
    x, _ = default_collate([tuple(torch.zeros_like(torch.as_tensor(part)) for part in example)])
    output = model(x)
    used = torch.autograd.grad(output.sum(), list(trainable(model).values()), allow_unused=True)
    unused = [name for name, g in zip(trainable(model), used, strict=True) if g is None]
    if unused:
        raise ValueError(
            f"unused parameters get no per-example gradient: {', '.join(unused)}; "
            f"freeze them with requires_grad_(False), {own_loop}"
        )

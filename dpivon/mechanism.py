"""The Gaussian mechanism on gradients: Poisson batches in, a clipped and noised mean out, as `p.grad`.

Only what this file writes to `p.grad` is accounted for. Everything an optimizer computes from it is post-processing.
"""

import copy
import hashlib
import secrets
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from opacus.accountants.accountant import IAccountant
from opacus.data_loader import dtype_safe, shape_safe, wrap_collate_with_empty
from opacus.grad_sample import AbstractGradSampleHooks, prepare_module
from opacus.optimizers import (
    DistributedDPOptimizerFastGradientClipping,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
)
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from dpivon.gradients import (
    Loss,
    check_examples_independent,
    check_precision,
    clipped_sum,
    mean_gradient,
    trainable,
)


class Diagnostics(NamedTuple):
    """What one step saw of its batch. **Not covered by epsilon**: look at it, never publish or record it."""

    loss: float
    clipped: float
    size: int


def new_generator(seed: int | None = None, device: torch.device | str = "cpu") -> torch.Generator:
    """A random generator, filled with the operating system's entropy unless a seed is given.

    torch's generator is a Mersenne Twister of 624 words, and its `manual_seed` keeps 32 bits of a seed: few enough to
    try all of them and subtract the noise. So all words come from the system. Its output is still not cryptographic.
    On a GPU it is a counter under a key of 64 bits, all of which come from the system. A seeded generator is for
    simulations; the same seed gives other numbers on another kind of device.
    """
    generator = torch.Generator(device)
    if seed is not None:
        return generator.manual_seed(seed)
    if generator.device.type != "cpu":
        return generator.manual_seed(secrets.randbits(64) - 2**63)  # torch takes a signed number
    state = generator.manual_seed(secrets.randbits(32)).get_state()
    words = np.frombuffer(secrets.token_bytes(4 * 624), dtype=np.uint32).astype(np.int64)
    state.view(torch.int64)[3:627] = torch.from_numpy(words)  # after the seed and two counters
    generator.set_state(state)
    return generator


def check_batch_size(batch_size: float, n: int) -> None:
    """Raise ValueError unless 0 < b <= N, so that q = b / N is a probability."""
    if not 0 < batch_size <= n:
        raise ValueError(
            f"batch_size must be > 0 and at most the number of examples, got {batch_size} for {n} examples"
        )


def check_noise(noise_multiplier: float, max_grad_norm: float) -> None:
    """Raise ValueError unless sigma_p >= 0 and C > 0, both finite."""
    if not 0 <= noise_multiplier < float("inf"):
        raise ValueError(
            f"noise_multiplier must be finite and >= 0, got {noise_multiplier}; "
            "accounting.noise_for(epsilon, ...) finds the one for a budget"
        )
    if not 0 < max_grad_norm < float("inf"):
        raise ValueError(f"max_grad_norm must be finite and > 0, got {max_grad_norm}; 1.0 is a common start")


def ranks() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) where `torch.distributed` is not initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def poisson_batches(
    n: int, batch_size: float, steps: int, generator: torch.Generator | None = None
) -> Iterator[Tensor]:
    """Index sets in which each example appears with probability q = b / N, independently of all others.

    The accountants assume exactly this. A batch's size is random, with mean b, and an empty batch is a batch.

    In distributed training each process draws from its own share of the examples, those with index = rank modulo the
    number of processes. The union over the processes is a Poisson batch with the same q, and each yields T sets, some
    of them empty, so that all stay in step.

    Parameters
    ----------
    n
        N, the number of examples, of all processes together.
    batch_size
        b, the expected batch size, of all processes together.
    steps
        T, how many batches to draw.
    generator
        source of the masks; None draws one from the operating system's entropy. Each process needs its own.

    Raises
    ------
    ValueError
        b is not in (0, N], T is negative, or two processes draw from the same seed.
    """
    check_batch_size(batch_size, n)
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps}")
    generator = generator or new_generator()
    rank, world = ranks()
    if world > 1:
        check_own_masks(generator)
    share = torch.arange(rank, n, world)
    for _ in range(steps):
        yield share[torch.rand(len(share), generator=generator, dtype=torch.float64) < batch_size / n]


def check_own_masks(generator: torch.Generator) -> None:
    """Raise ValueError when two processes draw the same masks: then one example's presence tells of another's."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, hashlib.sha256(generator.get_state().numpy().tobytes()).hexdigest())
    if len(set(states)) < len(states):
        raise ValueError(
            "two processes draw their masks from the same seed, so examples are not drawn independently; give each "
            "its own, new_generator(seed + rank), or none"
        )


def mechanism(
    optimizer: torch.optim.Optimizer,
    *,
    noise_multiplier: float,
    max_grad_norm: float,
    batch_size: float,
    n: int,
    accountant: IAccountant | None = None,
    generator: torch.Generator | None = None,
) -> DPOptimizerFastGradientClipping:
    """The Gaussian mechanism for the parameters of `optimizer`, by Opacus: it adds noise, divides by b and accounts.

    .. math:: g_{\\rm dp} = \\frac{1}{b}\\left(\\sum_i \\bar g_i + \\mathcal N(0, \\sigma_p^2 C^2 I)\\right)

    Where `torch.distributed` is initialized, the sum runs over the examples of all processes: each clips and sums its
    own, the first adds the noise to its sum, and the total goes to all. One example lies with one process, so it moves
    the total by at most C, and the total leaves the reduction with noise sigma_p C in it, once. Before that, the
    processes send sums without noise: they and their network must trust each other as one computer does.

    Parameters
    ----------
    optimizer
        whose parameters receive the private gradient. It is not stepped here.
    noise_multiplier
        sigma_p >= 0.
    max_grad_norm
        C > 0.
    batch_size
        b, the public expected batch size (never the realized one, which is private), of all processes together.
    n
        N, the number of examples, of all processes together; the accountant uses q = b / N exactly.
    accountant
        an Opacus accountant that counts each step.
    generator
        source of the noise, on the parameters' device; None draws one from the operating system's entropy. Only the
        first process's is used.

    Raises
    ------
    ValueError
        sigma_p < 0, C <= 0, or b not in (0, N].
    """
    check_noise(noise_multiplier, max_grad_norm)
    check_batch_size(batch_size, n)
    _, world = ranks()
    kind = DPOptimizerFastGradientClipping if world == 1 else DistributedDPOptimizerFastGradientClipping
    dp = kind(
        optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=batch_size / world,  # Opacus means each process's own
        generator=generator or new_generator(device=optimizer.param_groups[0]["params"][0].device),
    )
    if accountant is not None:
        dp.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=batch_size / n))
    set_noise_std(dp)
    return dp


def noise_std(dp: DPOptimizer) -> float:
    """The standard deviation of the privacy noise in each coordinate of `p.grad`.

    .. math:: \\frac{\\sigma_p C}{b}

    with b times the accumulated iterations and the processes.

    Everything that needs the noise scale asks here, so that accumulation, sum reduction and distributed training are
    right once. Opacus' `expected_batch_size` is that of one process.

    Raises
    ------
    ValueError
        the clipping norm adapts to the data: then neither the noise nor C is what the attributes say.
    """
    if hasattr(dp, "unclipped_num_std") or hasattr(dp, "_adjusted_noise_multiplier"):
        raise ValueError("adaptive clipping changes C and the noise from step to step; use a fixed max_grad_norm")
    std = float(dp.noise_multiplier * dp.max_grad_norm)
    if dp.loss_reduction == "sum":
        return std
    waiting = any(isinstance(getattr(p, "grad_sample", None), (Tensor, list)) for p in dp.params)
    accumulated = dp.accumulated_iterations if waiting else 1  # Opacus cannot count before the first backward
    return std / (dp.expected_batch_size * accumulated * getattr(dp, "world_size", 1))


def set_noise_std(dp: DPOptimizer) -> None:
    """Tell the optimizer how noisy its gradients are: write `noise_std` into the groups that have such an entry.

    `private_gradient` and `make_private` do so at every step, since schedules may change sigma_p or C. After Opacus'
    own `PrivacyEngine.make_private`, `sampled_params` does.
    """
    for group in dp.param_groups:
        if "noise_std" in group:
            group["noise_std"] = noise_std(dp)


def private_gradient(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Tensor,
    dp: DPOptimizerFastGradientClipping,
    chunk_size: int | None = None,
    samples: int | None = None,
) -> Diagnostics:
    """Write the private gradient of a Poisson batch into `p.grad`, and count the step.

    .. math:: g_{\\rm dp} = \\frac{1}{b}\\left(\\sum_i \\bar g_i + \\mathcal N(0, \\sigma_p^2 C^2 I)\\right)

    Parameters
    ----------
    model, loss, x, y
        as in `gradients.per_example_gradients`; one batch of `poisson_batches`, maybe empty. In distributed
        training, this process's part of it.
    dp
        from `mechanism`, over exactly the model's trainable parameters.
    chunk_size
        examples differentiated at once; None chooses.
    samples
        None takes the gradient at the weights as they are, inside the optimizer's `sampled_params()`. A number K draws
        K times itself, outside of it, and averages each example's K gradients before clipping, so that the sensitivity
        stays C. For one step: K times the work, K copies of the weights.

    Returns
    -------
    Diagnostics of this process's examples, which epsilon does not cover.

    Raises
    ------
    ValueError
        a layer mixes examples (BatchNorm), `dp` holds other parameters than the model's trainable ones, the
        processes hold different weights, or the optimizer cannot use an average over draws.
    FloatingPointError
        the private gradient is not finite. No optimizer has stepped; the step is accounted.
    """
    check_examples_independent(model)
    parameters = trainable(model)
    if {id(p) for p in parameters.values()} != {id(p) for p in dp.params}:
        raise ValueError(
            "the optimizer must hold exactly the model's trainable parameters, so that clipping sees all of a "
            "gradient; freeze the others with requires_grad_(False) before building the optimizer"
        )
    thetas = None if samples is None else draws(dp.original_optimizer, list(parameters.values()), samples)
    check_same_weights(dp, parameters.values() if thetas is None else [p for theta in thetas for p in theta])
    clipped = clipped_sum(model, loss, x, y, dp.max_grad_norm, chunk_size, thetas)
    try:
        for p, total in zip(parameters.values(), clipped.sums, strict=True):
            p.grad = total
        dp.pre_step()
        if ranks()[1] > 1:
            dp.reduce_gradients()
    except BaseException:
        for p in parameters.values():
            p.grad = None  # not noised yet, or not on every process
        raise
    finally:
        for p in parameters.values():
            p.summed_grad = None  # type: ignore[attr-defined]  # the un-noised sum must not outlive the mechanism
    check_finite(parameters)
    set_noise_std(dp)
    return Diagnostics(clipped.loss, clipped.clipped, clipped.size)


def draws(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], samples: int) -> list[list[Tensor]]:
    """The parameters' values in several draws of `optimizer.sampled_params()`.

    Raises
    ------
    ValueError
        samples < 1, or the curvature or the method needs each gradient paired with its own draw.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if samples > 1 and getattr(optimizer, "curvature", None) == "price":
        raise ValueError(
            "curvature 'price' multiplies each gradient by its own theta - m, but clipping sees only the average over "
            f"the {samples} draws, and the pairs are lost; take samples=1, or a curvature of squared gradients"
        )
    within = any(hasattr(p, "epsilon") for p in parameters)  # the network draws, and its parameters stay as they are
    if within or (samples > 1 and hasattr(optimizer, "epsilon")):
        raise ValueError(
            f"{type(optimizer).__name__} maps each gradient by its own draw epsilon, and only one is kept; call "
            "private_gradient without samples, inside of the optimizer's sampled_params()"
        )
    thetas = []
    for _ in range(samples):
        with getattr(optimizer, "sampled_params", nullcontext)():
            thetas.append([p.detach().clone() for p in parameters])
    return thetas


def check_same_weights(dp: DPOptimizer, weights: Iterable[Tensor]) -> None:
    """Raise ValueError on every process unless all of them take the gradient at the same weights.

    Compares sums, to one part in a million, since processors may round the last bit differently.
    """
    _, world = ranks()
    if getattr(dp, "world_size", 1) != world:
        raise ValueError(f"mechanism() was called before the {world} processes were joined; call it afterwards")
    if world == 1:
        return
    weights = [p.detach().double() for p in weights]
    sums = torch.stack([torch.stack([p.sum(), p.abs().sum()]) for p in weights]).sum(0)
    everyone = [torch.empty_like(sums) for _ in range(world)]
    dist.all_gather(everyone, sums)
    totals, sizes = torch.stack(everyone).unbind(1)
    if not totals.max() - totals.min() <= 1e-6 * sizes.max():
        raise ValueError(
            "the processes hold different weights; start from the same model on each, and draw the posterior from "
            "generators of the same seed"
        )


def plain_gradient(model: nn.Module, loss: Loss, x: Any, y: Tensor) -> Diagnostics:
    """Write the ordinary gradient of the batch's mean loss into `p.grad`. Not private: a twin for comparison."""
    parameters = trainable(model)
    gradients, value = mean_gradient(model, loss, x, y)
    for p, g in zip(parameters.values(), gradients, strict=True):
        p.grad = g
    check_finite(parameters)
    return Diagnostics(value, 0.0, len(y))


def check_finite(parameters: dict[str, nn.Parameter]) -> None:
    """Raise FloatingPointError, naming the parameter, when a gradient holds NaN or infinity."""
    for name, p in parameters.items():
        if p.grad is not None and not p.grad.isfinite().all():
            raise FloatingPointError(
                f"the gradient of {name!r} is not finite: the weights have diverged; lower the learning rate"
            )


@contextmanager
def sampled_params(dp: DPOptimizer) -> Iterator[None]:
    """`sampled_params()` of the optimizer that `dp` wraps, with one draw theta for each *logical* batch.

    Opacus' `BatchMemoryManager` cuts a large batch into parts, and its loop enters the context for each part. All parts
    must see the same theta, or the gradient would be a mixture that no estimator of the curvature is made for. So the
    first part draws, and the others get that draw again. Also tells the optimizer its noise, see `set_noise_std`.

    .. code-block:: python

        for x, y in loader:  # Opacus' own, or a BatchMemoryManager's
            with sampled_params(optimizer):
                optimizer.zero_grad()
                loss(model(x), y).backward()
            optimizer.step()

    Parameters
    ----------
    dp
        any of Opacus' optimizers, from `make_private` or from `PrivacyEngine.make_private`.

    Raises
    ------
    RuntimeError
        an earlier part of this batch saw another draw, or the context is entered twice.
    """
    if vars(dp).get("drawing"):
        raise RuntimeError("the parameters are a draw already; leave sampled_params before entering it again")
    set_noise_std(dp)
    theta = vars(dp).get("theta")
    if dp._is_last_step_skipped and theta is None:
        raise RuntimeError(MIXED_DRAWS)
    later = dp._is_last_step_skipped
    draw = held(dp.params, theta) if later else getattr(dp.original_optimizer, "sampled_params", nullcontext)()
    with draw:
        if not later:
            dp.theta = [p.detach().clone() for p in dp.params]
        dp.drawing = dp.original_optimizer.drawing = True
        try:
            yield
        finally:
            dp.drawing = dp.original_optimizer.drawing = False


@contextmanager
def held(parameters: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Within, the parameters have these values. The changes are in place, so that a misplaced backward raises."""
    with torch.no_grad():
        before = [p.clone() for p in parameters]
        torch._foreach_copy_(parameters, values)
    try:
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, before)


MIXED_DRAWS = (
    "the parts of one logical batch see different weights; use `with mechanism.sampled_params(optimizer):` around the "
    "forward and backward pass of every part: it draws once for all of them"
)


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
    not noticed. Publish `state_dict()`, never the pickled module.

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
            raise RuntimeError("a backward pass failed midway; call mechanism.discard(optimizer, hooks) first")
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
            "others before clipping; weight the classes in private_gradient's loss, or not at all"
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

    Tries one random example like x, of which it sees the shape alone, at weights none of which is zero.

    Raises
    ------
    ValueError
        a parameter is used outside of its layer, positions are folded into the batch, Opacus is wrong about a layer (it
        takes every padding for one with zeros), or ghost clipping meets one parameter twice.
    """
    modes = {layer: layer.training for layer in hooks._module.modules()}
    try:
        with torch.random.fork_rng(devices=[]), held(dp.params, nearby(dp.params)):  # the same random numbers each time
            hooks._module.train()
            x = torch.rand(1, *x.shape, dtype=x.dtype) if x.is_floating_point() else torch.zeros_like(x).unsqueeze(0)
            output = hooks._module(x)
            gradients = torch.autograd.grad((output * torch.randn_like(output)).sum(), dp.params)
        norms = [float(g.norm()) for g in gradients]
        kind = "_norm_sample" if isinstance(dp, DPOptimizerFastGradientClipping) else "grad_sample"
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

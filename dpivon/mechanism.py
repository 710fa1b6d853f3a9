"""The Gaussian mechanism on gradients: Poisson batches in, a clipped and noised mean out, as `p.grad`.

Only what this file writes to `p.grad` is accounted for. Everything an optimizer computes from it is post-processing.
"""

import hashlib
import secrets
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from opacus.accountants.accountant import IAccountant
from opacus.optimizers import DistributedDPOptimizerFastGradientClipping, DPOptimizer, DPOptimizerFastGradientClipping
from torch import Tensor, nn

from dpivon import accounting
from dpivon.gradients import Loss, check_examples_independent, clipped_sum, mean_gradient, trainable
from dpivon.processes import ranks
from dpivon.weights import held


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
        an Opacus accountant that counts each step; None makes one, by Rényi differential privacy. See `statement`.
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
    dp.accountant = accounting.new_accountant("rdp") if accountant is None else accountant  # an empty one is false
    dp.n, dp.batch_size, dp.seeded = n, batch_size, generator is not None
    dp.taken, dp.norms = 0, set()
    refuse_raw_gradients(dp)
    dp.attach_step_hook(dp.accountant.get_optimizer_hook_fn(sample_rate=batch_size / n))
    set_noise_std(dp)
    return dp


def refuse_raw_gradients(dp: DPOptimizerFastGradientClipping) -> None:
    """Let the optimizer's `step()` raise where a backward pass came after a private gradient, or in its place.

    It cannot see a gradient that somebody assigns to `p.grad`, nor another optimizer of the same parameters.
    """
    known, optimizer = weakref.ref(dp), dp.original_optimizer  # with the mechanism its watch ends
    watched = {id(p) for p in dp.params}

    def after_backward(p: Tensor) -> None:
        if known() is not None:
            optimizer.raw = True

    def check() -> None:
        if known() is None:
            return
        given = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(id(p) not in watched for p in given):
            raise RuntimeError("parameters were unfrozen after mechanism(); call it again, on a new optimizer")
        if given and optimizer.raw:
            raise RuntimeError(
                "backward() has put a gradient into p.grad that is neither clipped nor noised; call private_gradient "
                "in its place, and nothing between it and step(). To go on with public data, take a new optimizer"
            )

    def before_step(_: Any, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # torch's args begin with the optimizer
        if closure is None:
            return check()

        def checked() -> Any:
            value = closure()
            check()
            return value

        return (args[0], checked), {}

    optimizer.raw = False
    for p in dp.params:
        p.register_post_accumulate_grad_hook(after_backward)
    optimizer.register_step_pre_hook(before_step)


def statement(
    dp: DPOptimizerFastGradientClipping, delta: float, simulation: bool | None = None
) -> accounting.PrivacyStatement:
    """The privacy statement of the steps that `dp` has taken so far, as its accountant has counted them.

    A noise multiplier that has changed is stated with its steps, as a release besides.

    Parameters
    ----------
    dp
        from `mechanism`.
    delta
        delta_p, below 1 / N.
    simulation
        whether someone may know the seed of the noise or of the batches; None says so wherever `mechanism` was given
        a generator. It cannot see that of `poisson_batches`.

    Raises
    ------
    ValueError
        `dp` is of another make, delta is out of range, nothing was released yet, the accountant counts other steps than
        this mechanism's, or the clipping norm has changed.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> from dpivon import mechanism
    >>> net = torch.nn.Linear(3, 1)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> dp = mechanism.mechanism(
    ...     sgd, noise_multiplier=2.0, max_grad_norm=0.5,
    ...     batch_size=10, n=1000)
    >>> x, y = torch.zeros(1000, 3), torch.zeros(1000, 1)
    >>> from dpivon.mechanism import private_gradient
    >>> for i in mechanism.poisson_batches(1000, 10, steps=50):
    ...     _ = private_gradient(net, mse_loss, x[i], y[i], dp)
    ...     sgd.step()
    >>> said = mechanism.statement(dp, delta=1e-5)
    >>> said.steps, round(said.epsilon, 1)
    (50, 0.2)
    """
    if not hasattr(dp, "taken"):
        raise ValueError("dp must come from mechanism(); after make_private use accounting.statement")
    if dp.taken == 0:
        raise ValueError("nothing was released yet; call private_gradient first")
    steps: dict[tuple[float, float], int] = {}
    for sigma, q, t in dp.accountant.history:
        steps[sigma, q] = steps.get((sigma, q), 0) + int(t)
    if sum(steps.values()) != dp.taken or len(dp.norms) > 1:
        raise ValueError(
            f"the accountant counts {sum(steps.values())} steps and this mechanism {dp.taken}, with the clipping norms "
            f"{sorted(dp.norms)}: give it an accountant of its own and one norm, or use accounting.statement"
        )
    first, *others = [(sigma, q, t) for (sigma, q), t in steps.items()]
    return accounting.statement(
        first[0], first[2], delta, max_grad_norm=dp.norms.copy().pop(), batch_size=dp.batch_size, n=dp.n,
        accountant=dp.accountant.mechanism(), simulation=dp.seeded if simulation is None else simulation,
        besides=others,
    )  # fmt: skip


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

    Examples
    --------
    An empty batch gives no signal, and all of the noise:

    >>> import torch
    >>> from torch.nn.functional import mse_loss
    >>> from dpivon import mechanism
    >>> net = torch.nn.Linear(1000, 1)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> dp = mechanism.mechanism(
    ...     sgd, noise_multiplier=2.0, max_grad_norm=0.5,
    ...     batch_size=10, n=1000)
    >>> x, y = torch.zeros(0, 1000), torch.zeros(0, 1)
    >>> _ = mechanism.private_gradient(net, mse_loss, x, y, dp)
    >>> round(net.weight.grad.std().item(), 1)
    0.1
    >>> mechanism.noise_std(dp)
    0.1
    """
    check_examples_independent(model)
    parameters = trainable(model)
    if {id(p) for p in parameters.values()} != {id(p) for p in dp.params}:
        raise ValueError(
            "the optimizer must hold exactly the model's trainable parameters, so that clipping sees all of a "
            "gradient; freeze the others with requires_grad_(False) before building the optimizer"
        )
    if any(not hasattr(p, "summed_grad") for p in dp.params):
        raise ValueError("parameters were unfrozen after mechanism(); call it again, on a new optimizer")
    thetas = None if samples is None else draws(dp.original_optimizer, list(parameters.values()), samples)
    check_same_weights(dp, parameters.values() if thetas is None else [p for theta in thetas for p in theta])
    clipped = clipped_sum(model, loss, x, y, dp.max_grad_norm, chunk_size, thetas)
    try:
        for p, total in zip(parameters.values(), clipped.sums, strict=True):
            p.grad = total
        dp.pre_step()
        dp.taken += 1
        dp.norms.add(float(dp.max_grad_norm))
        if ranks()[1] > 1:
            dp.reduce_gradients()
    except BaseException:
        for p in parameters.values():
            p.grad = None  # not noised yet, or not on every process
        raise
    finally:
        for p in parameters.values():
            p.summed_grad = None  # type: ignore[attr-defined]  # the un-noised sum must not outlive the mechanism
    dp.original_optimizer.raw = False
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
    curvature = getattr(optimizer, "curvature", "")
    if samples > 1 and curvature.startswith("price"):
        raise ValueError(
            f"curvature {curvature!r} multiplies each gradient by its own theta - m, but clipping sees only the "
            f"average over the {samples} draws, and the pairs are lost; take samples=1, or squared gradients"
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


MIXED_DRAWS = (
    "the parts of one logical batch see different weights; use `with mechanism.sampled_params(optimizer):` around the "
    "forward and backward pass of every part: it draws once for all of them"
)

"""The Gaussian mechanism on gradients: Poisson batches in, a clipped and noised mean out, as `p.grad`.

Only what this file writes to `p.grad` is accounted for. Everything an optimizer computes from it is post-processing.
"""

import secrets
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from opacus.accountants.accountant import IAccountant
from opacus.data_loader import DPDataLoader
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from dpivon.gradients import Loss, check_examples_independent, clipped_sum, mean_gradient, trainable


class Diagnostics(NamedTuple):
    """What one step saw of its batch. **Not covered by epsilon**: look at it, never publish or record it."""

    loss: float
    clipped: float
    size: int


def new_generator(seed: int | None = None) -> torch.Generator:
    """A random generator, filled with the operating system's entropy unless a seed is given.

    torch's generator is a Mersenne Twister of 624 words, and its `manual_seed` keeps 32 bits of a seed: few enough to
    try all of them and subtract the noise. So all words come from the system. Its output is still not cryptographic.
    A seeded generator is for simulations.
    """
    generator = torch.Generator()
    if seed is not None:
        return generator.manual_seed(seed)
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

    Parameters
    ----------
    n
        N, the number of examples.
    batch_size
        b, the expected batch size.
    steps
        T, how many batches to draw.
    generator
        source of the masks; None draws one from the operating system's entropy.

    Raises
    ------
    ValueError
        b is not in (0, N], or T is negative.
    """
    check_batch_size(batch_size, n)
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps}")
    generator = generator or new_generator()
    for _ in range(steps):
        yield (torch.rand(n, generator=generator, dtype=torch.float64) < batch_size / n).nonzero().squeeze(1)


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

    Parameters
    ----------
    optimizer
        whose parameters receive the private gradient. It is not stepped here.
    noise_multiplier
        sigma_p >= 0.
    max_grad_norm
        C > 0.
    batch_size
        b, the public expected batch size (never the realized one, which is private).
    n
        N, the number of examples; the accountant uses q = b / N exactly.
    accountant
        an Opacus accountant that counts each step.
    generator
        source of the noise; None draws one from the operating system's entropy.

    Raises
    ------
    ValueError
        sigma_p < 0, C <= 0, or b not in (0, N].
    """
    check_noise(noise_multiplier, max_grad_norm)
    check_batch_size(batch_size, n)
    dp = DPOptimizerFastGradientClipping(
        optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=batch_size,
        generator=generator or new_generator(),
    )
    if accountant is not None:
        dp.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=batch_size / n))
    return dp


def noise_std(dp: DPOptimizer) -> float:
    """The standard deviation of the privacy noise in each coordinate of `p.grad`.

    .. math:: \\frac{\\sigma_p C}{b}, \\text{ with } b \\text{ times the accumulated iterations}

    Everything that needs the noise scale asks here, so that accumulation and sum reduction are right once.
    """
    std = dp.noise_multiplier * dp.max_grad_norm
    return std if dp.loss_reduction == "sum" else std / (dp.expected_batch_size * dp.accumulated_iterations)


def private_gradient(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Tensor,
    dp: DPOptimizerFastGradientClipping,
    chunk_size: int | None = None,
) -> Diagnostics:
    """Write the private gradient of a Poisson batch into `p.grad`, and count the step.

    .. math:: g_{\\rm dp} = \\frac{1}{b}\\left(\\sum_i \\bar g_i + \\mathcal N(0, \\sigma_p^2 C^2 I)\\right)

    Parameters
    ----------
    model, loss, x, y
        as in `gradients.per_example_gradients`; one batch of `poisson_batches`, maybe empty.
    dp
        from `mechanism`, over exactly the model's trainable parameters.
    chunk_size
        examples differentiated at once; None chooses.

    Returns
    -------
    Diagnostics, which epsilon does not cover.

    Raises
    ------
    ValueError
        a layer mixes examples (BatchNorm), or `dp` holds other parameters than the model's trainable ones.
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
    clipped = clipped_sum(model, loss, x, y, dp.max_grad_norm, chunk_size)
    for p, total in zip(parameters.values(), clipped.sums, strict=True):
        p.grad = total
    dp.pre_step()
    for p in parameters.values():
        p.summed_grad = None  # type: ignore[attr-defined]  # the un-noised sum must not outlive the mechanism
    check_finite(parameters)
    return Diagnostics(clipped.loss, clipped.clipped, clipped.size)


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


class PrivateParts(NamedTuple):
    """What `make_private` returns: drop-in replacements for model, optimizer, data loader and loss."""

    model: nn.Module
    optimizer: DPOptimizer
    loader: DataLoader
    loss: Callable[..., Any]


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
    accountant: IAccountant | None = None,
    generator: torch.Generator | None = None,
) -> PrivateParts:
    """The Opacus door: a user's own training loop, made private with the exact q = b / N and b.

    `opacus.PrivacyEngine.make_private` derives q and b from the loader's length, which rounds: 50,000 examples in
    batches of 4,096 are accounted and scaled as 3,846. Here both are what was asked for.

    The loop stays the usual one: for each (x, y) of the loader: zero_grad, ``loss(model(x), y).backward()`` once, step.
    Two things our own loop does are not done here: an example whose gradient is not finite is not dropped (the step
    raises instead, which says that there was one), and a module that mixes the examples of a batch in its own code is
    not noticed. Publish `state_dict()`, never the pickled module.

    Parameters
    ----------
    model
        without batch statistics, in-place activations, unused parameters or recurrent layers of torch.nn.
    optimizer
        any torch optimizer over the model's trainable parameters.
    dataset
        map-style, with tuples of tensors as examples. Not a loader: the sampler must be Poisson's.
    loss
        a torch loss module with reduction "mean", such as ``nn.CrossEntropyLoss()``.
    noise_multiplier, max_grad_norm, batch_size
        sigma_p, C and b.
    mode
        "hooks" (per-example gradients stored) or "ghost" (norms first, then a second backward pass).
    accountant
        an Opacus accountant that counts each step.
    generator
        source of the noise and of the masks; None draws one from the operating system's entropy.

    Raises
    ------
    ValueError
        a setting is out of range, or the model or data do not fit; the message names the remedy.
    """
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "make_private takes the dataset, not a DataLoader: a sampler of one's own is not Poisson's, and the "
            "accountant's q would be wrong; pass loader.dataset"
        )
    if mode not in ("hooks", "ghost"):
        raise ValueError(f"mode must be 'hooks' or 'ghost', got {mode!r}; the book's own loop is private_gradient")
    n = len(dataset)  # type: ignore[arg-type]
    check_noise(noise_multiplier, max_grad_norm)
    check_batch_size(batch_size, n)
    if getattr(loss, "reduction", None) != "mean":
        raise ValueError(f"loss must be a module with reduction='mean', got {loss!r}; e.g. nn.CrossEntropyLoss()")
    if getattr(loss, "weight", None) is not None or getattr(loss, "ignore_index", -100) != -100:
        raise ValueError(
            "a loss with class weights or ignore_index divides by what the batch holds, so one example rescales all "
            "others before clipping; weight the classes in private_gradient's loss, or not at all"
        )
    parameters = trainable(model)
    if {id(p) for p in parameters.values()} != {id(p) for g in optimizer.param_groups for p in g["params"]}:
        raise ValueError(
            "the optimizer must hold exactly the model's trainable parameters; the others would keep raw gradients: "
            "freeze them with requires_grad_(False) before building the optimizer"
        )
    check_hooks_fit(model, dataset)
    # Images need no gradient of their own; torch remarks on that at the first backward, and nothing follows from it.
    warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
    ghost = mode == "ghost"
    generator = generator or new_generator()
    module = (
        GradSampleModuleFastGradientClipping(model, max_grad_norm=max_grad_norm) if ghost else GradSampleModule(model)
    )
    kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    dp = kind(
        optimizer,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=batch_size,
        generator=generator,
    )
    count = accountant.get_optimizer_hook_fn(sample_rate=batch_size / n) if accountant is not None else None

    def before_step(dp: DPOptimizer) -> None:
        if dp.accumulated_iterations != 1:
            raise ValueError(
                "backward ran more than once since zero_grad, so one example counts several times over; average the "
                "losses and call backward once"
            )
        if {id(p) for p in trainable(model).values()} != {id(p) for p in parameters.values()}:
            raise ValueError("parameters were frozen or unfrozen after make_private; call it again, on a new optimizer")
        if count is not None:
            count(dp)
        for p in parameters.values():  # what is not yet private must not outlive the step
            for name in ("grad_sample", "summed_grad", "_norm_sample"):
                if getattr(p, name, None) is not None:
                    setattr(p, name, None)
        check_finite(parameters)

    dp.attach_step_hook(before_step)
    loader = DPDataLoader(dataset, sample_rate=batch_size / n, generator=generator)
    return PrivateParts(module, dp, loader, DPLossFastGradientClipping(module, dp, loss) if ghost else loss)


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

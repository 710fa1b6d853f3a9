"""How fast, and in how much memory: ratios within one run, never absolute promises.

Each measurement runs in its own process, so that peak memory is its own; timings take turns and report medians.
"""

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpivon import adaptive, mechanism, models
from dpivon.ivon import IVON

CHUNKS = (16, 32, 64, 128, 256)
N = 50_000


def plain(model: nn.Module, x: Tensor, y: Tensor, chunk: int, channels_last: bool) -> Callable[[], None]:
    """The non-private step, whole batch or in chunks, in either memory format."""
    optimizer = adaptive.sgd(model.parameters(), lr=0.1)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        x = x.to(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad()
        for part, labels in zip(x.split(chunk), y.split(chunk), strict=True):
            (F.cross_entropy(model(part), labels, reduction="sum") / len(y)).backward()
        optimizer.step()

    return step


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The book's private step."""
    optimizer = adaptive.sgd(model.parameters(), lr=0.1)
    dp = mechanism.mechanism(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=len(y), n=N)

    def step() -> None:
        mechanism.private_gradient(model, F.cross_entropy, x, y, dp)
        optimizer.step()

    return step


def dp_ivon(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The same step with DP-IVON-Gradsq behind it."""
    optimizer = IVON(model.parameters(), lr=0.1, ess=N)
    dp = mechanism.mechanism(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=len(y), n=N)
    for group in optimizer.param_groups:
        group["noise_std"] = mechanism.noise_std(dp)

    def step() -> None:
        with optimizer.sampled_params():
            mechanism.private_gradient(model, F.cross_entropy, x, y, dp)
        optimizer.step()

    return step


def opacus(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Callable[[], None]:
    """Opacus' private step, by hooks or by ghost clipping, on the same batch."""
    optimizer = adaptive.sgd(model.parameters(), lr=0.1)
    data = TensorDataset(x[:1].expand(N, *x.shape[1:]), y[:1].expand(N))
    private = mechanism.make_private(
        model, optimizer, data, loss=nn.CrossEntropyLoss(), noise_multiplier=1.0, max_grad_norm=1.0,
        batch_size=len(y), mode=mode,
    )  # fmt: skip

    def step() -> None:
        private.optimizer.zero_grad()
        private.loss(private.model(x), y).backward()
        private.optimizer.step()

    return step


def peak_mib() -> float:
    """The process's peak resident memory so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, model: str, batch_size: int, repeats: int) -> tuple[float, float]:
    """Seconds a step (median) and MiB above the memory held before the first step, of one contender."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = models.build(model, (3, 32, 32), 10, seed=0)
    x, y = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    step = CONTENDERS[name](network, x, y)
    before = peak_mib()
    step()  # warm up; the peak is reached here
    memory = peak_mib() - before
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), memory


def take_turns(first: Callable[[], float], second: Callable[[], float], repeats: int) -> tuple[float, float]:
    """The median seconds of two things, timed in turns so that both see the same machine."""
    first(), second()
    seconds = [(first(), second()) for _ in range(repeats)]
    return statistics.median(a for a, _ in seconds), statistics.median(b for _, b in seconds)


def timed(step: Callable[[], None]) -> Callable[[], float]:
    """The same function, returning the seconds that it takes."""

    def measured() -> float:
        begin = time.perf_counter()
        step()
        return time.perf_counter() - begin

    return measured


def price_of_ivon(model: str, batch_size: int, repeats: int) -> tuple[float, float]:
    """Seconds of one training step by DP-SGD and by DP-IVON-Gradsq, in the same loop."""
    torch.set_num_threads(1)
    x, y = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    networks = [models.build(model, (3, 32, 32), 10, seed=0) for _ in range(2)]
    return take_turns(timed(ours(networks[0], x, y)), timed(dp_ivon(networks[1], x, y)), repeats)


def against_peer(model: str, repeats: int) -> tuple[float, float]:
    """Seconds of the draw and the step, in our IVON and in its authors', both with Price's estimate.

    The gradients are given; they are copied between the timed parts, so that neither finds them in the cache.
    """
    import ivon as peer

    torch.set_num_threads(1)
    settings = {"lr": 0.1, "ess": float(N), "hess_init": 0.1, "weight_decay": 2e-4}

    def contender(build: Callable[..., Any], **options: bool) -> Callable[[], float]:
        parameters = list(models.build(model, (3, 32, 32), 10, seed=0).parameters())
        gradients = [1e-3 * torch.randn_like(p) for p in parameters]
        optimizer = build(parameters, **settings)

        def measured() -> float:
            begin = time.perf_counter()
            context = optimizer.sampled_params(**options)
            context.__enter__()
            seconds = time.perf_counter() - begin
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone()
            begin = time.perf_counter()
            context.__exit__(None, None, None)
            optimizer.step()
            return seconds + time.perf_counter() - begin

        return measured

    return take_turns(contender(partial(IVON, curvature="price")), contender(peer.IVON, train=True), repeats)


CONTENDERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Callable[[], None]]] = {
    "ours": ours,
    "Opacus hooks": partial(opacus, mode="hooks"),
    "Opacus ghost": partial(opacus, mode="ghost"),
    "not private": partial(plain, chunk=10**9, channels_last=False),
    "not private, channels last": partial(plain, chunk=10**9, channels_last=True),
    **{f"not private, chunks of {c}": partial(plain, chunk=c, channels_last=False) for c in CHUNKS},
    **{f"not private, channels last, {c}": partial(plain, chunk=c, channels_last=True) for c in CHUNKS},
}


@dataclass(frozen=True)
class Bench:
    """Time the training step of each engine, one thread, as ratios within one run.

    Parameters
    ----------
    models
        networks to measure.
    batch_sizes
        batch sizes to measure.
    repeats
        timed steps of each engine, after one that warms up.
    """

    models: tuple[str, ...] = ("lenet", "tanh_cnn")
    batch_sizes: tuple[int, ...] = (128, 2048)
    repeats: int = 3

    def __call__(self) -> None:
        for model in self.models:
            for batch_size in self.batch_sizes:
                self.table(model, batch_size)
            self.ivon(model)

    def ivon(self, model: str) -> None:
        """Print what IVON costs beside DP-SGD, and beside its authors' implementation where that is installed."""
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(f"\n{model}, IVON, one thread")
            for batch_size in self.batch_sizes:
                plain, bayes = pool.apply(price_of_ivon, (model, batch_size, self.repeats))
                print(f"  batch of {batch_size}: a DP-IVON-Gradsq step takes {bayes / plain:.3f} times a DP-SGD step")
            if find_spec("ivon") is None:
                print("  ivon-opt is not installed, so there is no comparison with it: pip install ivon-opt")
                return
            own, theirs = pool.apply(against_peer, (model, 30 * self.repeats))
            print(f"  draw and step take {own / theirs:.3f} times those of ivon-opt ({own * 1e3:.2f} ms)", flush=True)

    def table(self, model: str, batch_size: int) -> None:
        """Measure all contenders and print one table; only the best chunk size of each format is listed."""
        rows: dict[str, tuple[float, float]] = {}
        context = multiprocessing.get_context("spawn")
        for name in CONTENDERS:
            if name.split()[-1].isdigit() and int(name.split()[-1]) >= batch_size:
                continue
            with context.Pool(1) as pool:
                rows[name] = pool.apply(measure, (name, model, batch_size, self.repeats))
        for kind in ("not private, chunks of ", "not private, channels last, "):
            chunked = sorted((row, name) for name, row in rows.items() if name.startswith(kind))
            for _, name in chunked[1:]:
                del rows[name]
        base = rows["not private"][0]
        fastest = min(row[0] for name, row in rows.items() if name.startswith("not private"))
        print(f"\n{model}, batch of {batch_size}, one thread; time as a ratio to the plain step and to the fastest one")
        for name, (seconds, memory) in rows.items():
            print(
                f"  {name:32s} {batch_size / seconds:8,.0f} images/s {seconds / base:6.2f} {seconds / fastest:6.2f}"
                f" {memory:9,.0f} MiB",
                flush=True,
            )
        hooks, own = rows["Opacus hooks"], rows["ours"]
        faster, smaller = hooks[0] / own[0], own[1] / max(hooks[1], 1)
        print(f"  ours is {faster:.2f} times as fast as Opacus hooks, in {smaller:.3f} of its memory")

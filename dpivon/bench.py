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

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpivon import adaptive, mechanism, models

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

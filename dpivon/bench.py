"""How fast, and in how much memory: ratios within one run, never absolute promises.

Each measurement runs in its own process, so that peak memory is its own, on one thread; times are medians of processor
time, which other programs stretch less than the clock's; measure on a quiet machine all the same.
"""

import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpivon import adaptive, door, ledger, mechanism, models, train
from dpivon.ivon import IVON

CHUNKS = (32, 128)
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


class Hidden(nn.Module):
    """A linear layer that the engine does not recognize as one, so that its gradients are not kept as factors."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output."""
        return F.linear(x, self.weight, self.bias)


def whole_vmap(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The book's private step with `vmap(grad)` for all parameters, those of linear layers too."""
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            setattr(model, name, Hidden(layer))
    return ours(model, x, y)


def dp_ivon(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The same step with DP-IVON-Gradsq behind it."""
    optimizer = IVON(model.parameters(), lr=0.1, ess=N)
    dp = mechanism.mechanism(optimizer, noise_multiplier=1.0, max_grad_norm=1.0, batch_size=len(y), n=N)

    def step() -> None:
        with optimizer.sampled_params():
            mechanism.private_gradient(model, F.cross_entropy, x, y, dp)
        optimizer.step()

    return step


def opacus(model: nn.Module, x: Tensor, y: Tensor, mode: str) -> Callable[[], None]:
    """Opacus' private step, by hooks or by ghost clipping, on the same batch."""
    optimizer = adaptive.sgd(model.parameters(), lr=0.1)
    data = TensorDataset(x[:1].expand(N, *x.shape[1:]), y[:1].expand(N))
    private = door.make_private(
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


def timed(step: Callable[[], None]) -> Callable[[], float]:
    """The same function, returning the seconds of processor time that it takes."""

    def measured() -> float:
        begin = time.process_time()
        step()
        return time.process_time() - begin

    return measured


def medians(contenders: list[Callable[[], float]], repeats: int, limit: float) -> list[float]:
    """The median seconds of each, timed in turns so that all see the same machine, after one round that warms up.

    No round begins after `limit` seconds; where the first takes as long, it is the one that counts.
    """
    rounds, spent = [[measured() for measured in contenders]], 0.0
    while len(rounds) <= repeats and (spent := spent + sum(rounds[-1])) < limit:
        rounds.append([measured() for measured in contenders])
    return [statistics.median(seconds) for seconds in zip(*(rounds[1:] or rounds), strict=True)]


def measure(name: str, model: str, batch_size: int, repeats: int, limit: float) -> tuple[float, float]:
    """Seconds a step, and MiB above the memory held before the first step, of one contender."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = models.build(model, (3, 32, 32), 10, seed=0)
    x, y = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    step = CONTENDERS[name](network, x, y)
    before = peak_mib()
    (seconds,) = medians([timed(step)], repeats, limit)
    return seconds, peak_mib() - before


def price_of_ivon(model: str, batch_size: int, repeats: int, limit: float) -> list[float]:
    """Seconds of one training step by DP-SGD and by DP-IVON-Gradsq, in the same loop."""
    torch.set_num_threads(1)
    x, y = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    networks = [models.build(model, (3, 32, 32), 10, seed=0) for _ in range(2)]
    return medians([timed(ours(networks[0], x, y)), timed(dp_ivon(networks[1], x, y))], repeats, limit)


def against_peer(model: str, repeats: int, limit: float) -> list[float]:
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
            begin = time.process_time()
            context = optimizer.sampled_params(**options)
            context.__enter__()
            seconds = time.process_time() - begin
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g.clone()
            begin = time.process_time()
            context.__exit__(None, None, None)
            optimizer.step()
            return seconds + time.process_time() - begin

        return measured

    return medians([contender(partial(IVON, curvature="price")), contender(peer.IVON, train=True)], repeats, limit)


CONTENDERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Callable[[], None]]] = {
    "ours": ours,
    "vmap of the whole model": whole_vmap,
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
    limit
        seconds after which no further step of an engine is timed.
    out
        a file for all that was measured, as JSON, with versions, hardware and the code's commit.
    """

    models: tuple[str, ...] = ("lenet", "tanh_cnn")
    batch_sizes: tuple[int, ...] = (128, 2048)
    repeats: int = 3
    limit: float = 30.0
    out: Path | None = None

    def __call__(self) -> None:
        if self.out is not None:
            train.check_writable(self.out)
        environment = ledger.environment()
        environment["hardware"]["threads"] = 1
        found: dict[str, Any] = {"rows": [], "ivon": [], "peer": [], "code": ledger.code_state(), **environment}
        for model in self.models:
            for batch_size in self.batch_sizes:
                found["rows"] += self.table(model, batch_size)
                self.write(found)
            self.ivon(model, found)
            self.write(found)

    def write(self, found: dict[str, Any]) -> None:
        """Write what was found so far: a long measurement may be stopped."""
        if self.out is not None:
            self.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    def ivon(self, model: str, found: dict[str, Any]) -> None:
        """Print what IVON costs beside DP-SGD, and beside its authors' implementation where that is installed."""
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(f"\n{model}, IVON, one thread")
            for batch_size in self.batch_sizes:
                plain, bayes = pool.apply(price_of_ivon, (model, batch_size, self.repeats, self.limit))
                row = {"model": model, "batch_size": batch_size, "dp_sgd_seconds": plain, "dp_ivon_seconds": bayes}
                found["ivon"].append(row)
                print(f"  batch of {batch_size}: a DP-IVON-Gradsq step takes {bayes / plain:.3f} times a DP-SGD step")
            if find_spec("ivon") is None:
                print("  ivon-opt is not installed, so there is no comparison with it: pip install ivon-opt")
                return
            own, theirs = pool.apply(against_peer, (model, 30 * self.repeats, self.limit))
            found["peer"].append({"model": model, "seconds": own, "ivon_opt_seconds": theirs})
            print(f"  draw and step take {own / theirs:.3f} times those of ivon-opt ({own * 1e3:.2f} ms)", flush=True)

    def table(self, model: str, batch_size: int) -> list[dict[str, Any]]:
        """Measure all contenders, print one table with only the best chunk size of each format, and return them all."""
        rows: dict[str, tuple[float, float]] = {}
        context = multiprocessing.get_context("spawn")
        for name in CONTENDERS:
            if name.split()[-1].isdigit() and int(name.split()[-1]) >= batch_size:
                continue
            with context.Pool(1) as pool:
                rows[name] = pool.apply(measure, (name, model, batch_size, self.repeats, self.limit))
        written = [
            {"model": model, "batch_size": batch_size, "engine": name, "seconds": seconds,
             "images_per_second": batch_size / seconds, "mib": memory}
            for name, (seconds, memory) in rows.items()
        ]  # fmt: skip
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
        return written

"""Measure the private step on a GPU, plain and with what may help, then run a grid there: results as lines of a ledger.

    python tools/gpu.py --device cuda --out DIR            # meant to take less than eight minutes on one GPU
    python tools/gpu.py --device cpu --tiny --out DIR      # the same code on small sizes, in seconds

The variants live here and not in `dpivon`: only what a GPU was seen to gain from moves there. Each is compared with the
book's engine, and its largest relative error stands beside its speed. What was measured is written after each variant;
one that fails, in a compiler for instance, is a line with its failure, and the others go on.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from dpivon import gradients, grid, ledger, models, sweep

C = 1.0
SHAPE, CLASSES = (3, 32, 32), 10


def fixed_shape(model: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> list[Tensor]:
    """The clipped sum over the examples whose mask is 1, as one function of tensors whose shapes never change.

    A Poisson batch has another size at each step. Padded to a size that it never exceeds in practice (a step with more
    is cut into two calls), it can be compiled once, or captured as a graph.
    """

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)).float(), y[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    norms = torch.stack([torch.linalg.vector_norm(g.flatten(1).float(), dim=1) for g in each.values()]).norm(dim=0)
    factors = gradients.clip_factors(norms, C) * mask
    return [torch.tensordot(factors, g.float(), dims=1) for g in each.values()]


def stacked(model: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> list[Tensor]:
    """The same for K models at once, each with its own batch: parameters, x, y and mask have a first axis of K."""
    return vmap(partial(fixed_shape, model))(parameters, x, y, mask)


def seconds_of(step: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of `step`, the device's queue included."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):  # compilation and capture happen here
        step()
    wait()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def error(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest error of a sum, relative to the largest entry."""
    return max(float((f - w).abs().max() / w.abs().max()) for f, w in zip(found, wanted, strict=True))


def measured(
    line: dict[str, Any], step: Callable[[], list[Tensor]], images: int, wanted: list[Tensor],
    device: torch.device, repeats: int,
) -> dict[str, Any]:  # fmt: skip
    """The line with images a second and the error of `step`; or, where it fails, with how it failed."""
    try:
        seconds = seconds_of(step, device, repeats)
        return {**line, "images_per_second": images / seconds, "error": error(step(), wanted)}
    except Exception as problem:
        return {**line, "failed": f"{type(problem).__name__}: {problem}".splitlines()[0]}


def measure(
    name: str, device: torch.device, batch_size: int, chunk: int, many: int, compiled: bool, repeats: int
) -> Iterator[dict[str, Any]]:
    """One line for each variant: images a second, and the error against the book's engine."""
    torch.manual_seed(0)
    model = models.build(name, SHAPE, CLASSES, seed=0).to(device)
    x = torch.randn(batch_size, *SHAPE, device=device)
    y = torch.randint(0, CLASSES, (batch_size,), device=device)
    ones = torch.ones(batch_size, device=device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    wanted = gradients.clipped_sum(model, F.cross_entropy, x, y, C).sums

    def in_chunks(function: Callable[..., list[Tensor]], half: bool = False) -> list[Tensor]:
        context = torch.autocast(device.type, torch.bfloat16) if half else nullcontext()
        sums: list[Tensor] = []
        with context:
            for part in zip(x.split(chunk), y.split(chunk), ones.split(chunk), strict=True):
                found = [t.clone() for t in function(parameters, *part)]  # a captured graph reuses its output
                sums = found if not sums else [a + b for a, b in zip(sums, found, strict=True)]
        return sums

    eager = partial(fixed_shape, model)
    variants: dict[str, Callable[[], list[Tensor]]] = {
        "plain": lambda: gradients.clipped_sum(model, F.cross_entropy, x, y, C).sums,
        f"plain, chunks of {chunk}": lambda: gradients.clipped_sum(model, F.cross_entropy, x, y, C, chunk).sums,
        "fixed shape": lambda: in_chunks(eager),
        "fixed shape, bf16": lambda: in_chunks(eager, half=True),
    }
    if compiled:
        fast = torch.compile(eager, mode="reduce-overhead", fullgraph=True)
        variants["fixed shape, compiled"] = lambda: in_chunks(fast)
        variants["fixed shape, compiled, bf16"] = lambda: in_chunks(fast, half=True)
    line = {"model": name, "batch_size": batch_size, "chunk": chunk}
    for variant, step in variants.items():
        yield measured({**line, "variant": variant}, step, batch_size, wanted, device, repeats)

    copies = [models.build(name, SHAPE, CLASSES, seed=0).to(device) for _ in range(many)]
    states = {name: p.detach() for name, p in stack_module_state(copies)[0].items()}  # type: ignore[arg-type]
    part = [t[:chunk].expand(many, *t[:chunk].shape) for t in (x, y, ones)]
    wanted = gradients.clipped_sum(model, F.cross_entropy, x[:chunk], y[:chunk], C).sums
    line = {**line, "variant": f"{many} models stacked, {chunk} images each"}
    yield measured(
        line, lambda: [t[-1] for t in stacked(model, states, *part)], many * len(part[0][0]), wanted, device, repeats
    )


def shown(row: dict[str, Any]) -> str:
    """A row, for a person."""
    if "failed" in row:
        found = f"FAILED, {row['failed']}"
    else:
        found = f"{row['images_per_second']:12,.0f} images/s  error {row['error']:.1e}"
    return f"{row['model']:9s} {row['variant']:30s} {found}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="folder for speed.json and the grid's ledger")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, one network, no compilation: to check the script itself"
    )
    parser.add_argument("--grid", type=Path, help="a grid, as for `dpivon sweep`, to run afterwards on the device")
    parser.add_argument("--root", type=Path, help="where CIFAR-10 lies")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --tiny checks the script itself")
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = [("lenet", 16, 8)] if options.tiny else [("lenet", 1024, 256), ("tanh_cnn", 1024, 128)]
    written = {"rows": [], "code": ledger.code_state(), **ledger.environment(device)}
    for name, batch_size, chunk in sizes:
        many, repeats = (2, 1) if options.tiny else (8, 20)
        for row in measure(name, device, batch_size, chunk, many, not options.tiny, repeats):
            written["rows"].append(row)
            (options.out / "speed.json").write_text(json.dumps(written, indent=1) + "\n")
            print(shown(row), flush=True)
    failed = any("failed" in row for row in written["rows"])
    path = options.out / "runs.jsonl"
    for config in grid.read(options.grid) if options.grid else ():
        if not sweep.is_done(path, sweep.key(config), retry_failed=True):
            record = sweep.job(config, options.root, options.device)
            ledger.append(path, record)
            failed |= record["status"] == "failed"
            print(f"{config.method}: {sweep.outcome(record)}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Several processes that train one model, as `torchrun` starts them: each with its own share of the examples.

The mechanism adds up their clipped sums and adds the noise once. What is here keeps the rest of a run the same on all.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def ranks() -> tuple[int, int]:
    """This process's rank and the number of processes; (0, 1) where `torch.distributed` is not initialized."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Within, the processes that `torchrun` has started are joined; yields this one's device.

    Without `torchrun`, nothing happens. With "cuda", each process takes the GPU of its local rank.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or dist.is_initialized():
        yield device
        return
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def first() -> bool:
    """Whether this process is the one that speaks and writes for all."""
    return ranks()[0] == 0


def own(name: str) -> str:
    """A name of which each process has its own; the first one's is what a single process would have."""
    return name if first() else f"{name} of process {ranks()[0]}"


def share(generator: torch.Generator) -> torch.Generator:
    """Put the first process's generator in the place of each other's, and return it."""
    if ranks()[1] > 1:
        state = [generator.get_state()]
        dist.broadcast_object_list(state)
        generator.set_state(state[0])
    return generator


def any_of(flag: bool) -> bool:
    """Whether the flag is up on any process: what one does at a step all must do, or the others wait for ever."""
    if ranks()[1] == 1:
        return flag
    flags: list[bool] = [False] * ranks()[1]
    dist.all_gather_object(flags, flag)
    return any(flags)


def same(state: Any) -> bool:
    """Whether all processes are in the same state."""
    states = [state] * ranks()[1]
    if len(states) > 1:
        dist.all_gather_object(states, state)
    return all(other == state for other in states)

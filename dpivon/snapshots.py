"""Iterates kept on the way, in memory or in a file each: draws of the weights to predict with.

They are computed from what was released anyway, so they cost no privacy.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from dpivon import checkpoint
from dpivon.weights import held


def keep(optimizer: Any, steps: int, samples: int) -> Any:
    """Let the optimizer keep `samples` iterates, evenly apart over the second half of `steps`, the last one included.

    They are held in memory, in ``state[p]["snapshots"]``, or, where the attribute `folder` is set, in a file each, so
    that memory does not grow with their number.

    Parameters
    ----------
    optimizer
        counts its steps in ``state[p]["step"]``. It is changed in place, and returned.
    steps
        T, the length of the run.
    samples
        how many; a short run has fewer, 0 keeps none.

    Examples
    --------
    >>> import torch
    >>> from dpivon import adaptive, snapshots
    >>> w = torch.nn.Parameter(torch.zeros(1))
    >>> sgd = adaptive.sgd([w], lr=1.0, beta1=0.0)
    >>> sgd = snapshots.keep(sgd, steps=8, samples=2)
    >>> for _ in range(8):
    ...     w.grad = -torch.ones(1)
    ...     sgd.step()
    >>> [kept.item() for kept in sgd.state[w]["snapshots"]]
    [6.0, 8.0]
    """
    first, apart = steps // 2, max(1, (steps - steps // 2) // max(samples, 1))
    optimizer.kept_at = times = range(steps, first, -apart)[:samples]
    optimizer.folder = None
    optimizer.written = {}  # the digest of each file there that is ours

    @torch.no_grad()
    def after_step(optimizer: Any, *_: Any) -> None:
        moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        moved = [p for p in moved if optimizer.state[p]["step"] in times]
        if moved and optimizer.folder is not None:
            optimizer.written |= write(optimizer.folder, optimizer.state[moved[0]]["step"], moved)
            return
        for p in moved:
            optimizer.state[p].setdefault("snapshots", []).append(p.detach().clone())

    optimizer.register_step_post_hook(after_step)
    return optimizer


def write(folder: str | Path, step: int, parameters: list[Any]) -> dict[str, str]:
    """Write an iterate into a file of its own, whole or not at all; what was released may be published.

    Returns the file's name and its digest, by which the run knows it again.
    """
    tensors = {f"{i:04}": p.detach().cpu().contiguous() for i, p in enumerate(parameters)}
    name, content = f"{step:08}.safetensors", safetensors.torch.save(tensors)
    checkpoint.write(Path(folder) / name, content, secret=False)
    os.utime(Path(folder) / name, (0, 0))  # the time between two iterates would tell how large the batches were
    return {name: digest(content)}


def digest(content: bytes) -> str:
    """SHA-256, 64 hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def take_up(optimizer: Any, written: dict[str, str]) -> None:
    """Go on in the optimizer's folder, from a checkpoint that knows of the iterates `written`.

    Another run's iterates would enter the predictions, and no statement would count them. Those of steps after the
    checkpoint are removed: the run writes them again, or, if it is stopped before, has not released them.

    Raises
    ------
    ValueError
        the folder is another run's, or lacks an iterate.
    """
    assert optimizer.folder is not None
    found = {file.name: file for file in Path(optimizer.folder).glob("*.safetensors")}
    others = found.keys() - written.keys()
    whole = all(name in found and digest(found[name].read_bytes()) == known for name, known in written.items())
    if not whole or any(name < max(written, default="~") for name in others):
        raise ValueError(
            f"{optimizer.folder} does not hold the iterates that the checkpoint knows of, or other ones; give the "
            "folder of the run that is resumed, and remove from it what is not of that run"
        )
    for name in others:
        found[name].unlink()
    optimizer.written = dict(written)


class Stored:
    """Iterates in a folder as a posterior to predict with, of which one is in memory at a time: as `Kept`.

    Parameters
    ----------
    parameters
        which the iterates are put into, in the order in which they were written: the trainable ones of the model.
    folder
        that an optimizer with this `folder` has written, see `keep`.
    written
        the digests of the files to use, by name; None uses all.

    Raises
    ------
    ValueError
        the folder holds no iterate.
    """

    def __init__(self, parameters: Iterable[Tensor], folder: str | Path, written: dict[str, str] | None = None) -> None:
        self.parameters, self.next, self.written = list(parameters), 0, written
        names = [file.name for file in Path(folder).glob("*.safetensors")] if written is None else written
        self.files = [Path(folder) / name for name in sorted(names)]
        if not self.files:
            raise ValueError(f"{folder} holds no iterate: they are written in the second half of its `steps`")

    def __len__(self) -> int:
        """K."""
        return len(self.files)

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the parameters are a stored iterate, the next with each use; after, what they were.

        Raises
        ------
        ValueError
            a file is damaged, of another network or of another run.
        """
        file = self.files[self.next % len(self.files)]
        self.next += 1
        content = file.read_bytes()
        if self.written is not None and digest(content) != self.written[file.name]:
            raise ValueError(f"{file} was changed since this run wrote it; two runs cannot share a folder")
        try:
            values = list(dict(sorted(safetensors.torch.load(content).items())).values())
        except safetensors.SafetensorError as error:
            raise ValueError(
                f"{file} is not a whole iterate ({error}); resume the run, which writes it anew"
            ) from error
        if [v.shape for v in values] != [p.shape for p in self.parameters]:
            raise ValueError(f"{file} does not fit this network; take the one that the run trained")
        with held(self.parameters, values):
            yield


def kept(model: nn.Module, optimizer: Any) -> Any:
    """The iterates that the optimizer has kept, wherever it keeps them; before the first of them, the latest one."""
    if optimizer.written and optimizer.folder is not None:
        return Stored([p for p in model.parameters() if p.requires_grad], optimizer.folder, optimizer.written)
    return Kept(optimizer) if any("snapshots" in state for state in optimizer.state.values()) else optimizer


class Kept:
    """Kept iterates as a posterior to predict with: each draw is the next of them, round and round."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.next = optimizer, 0

    @property
    def parameters(self) -> list[Any]:
        """Which the iterates are put into."""
        return [p for p, state in self.optimizer.state.items() if "snapshots" in state]

    def __len__(self) -> int:
        """K."""
        return max((len(state.get("snapshots", ())) for state in self.optimizer.state.values()), default=0)

    @contextmanager
    def sampled_params(self) -> Iterator[None]:
        """Within, the parameters are a kept iterate; after, the latest one again.

        Raises
        ------
        RuntimeError
            none was kept: the run is not half done.
        """
        parameters = self.parameters
        if not parameters:
            raise RuntimeError("no iterate was kept: they are kept in the second half of its `steps`")
        kept = [self.optimizer.state[p]["snapshots"] for p in parameters]
        which, self.next = self.next, self.next + 1
        with held(parameters, [samples[which % len(samples)] for samples in kept]):
            yield

"""Checkpoints: written whole or not at all, checked when read, and never executed."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import torch

MAGIC = b"dpivon-checkpoint-1\n"


def save(path: str | Path, state: dict[str, Any]) -> None:
    """Replace `path` by `state`, readable by its owner only; on any failure the old file stays.

    Parameters
    ----------
    path
        where to save; its folder must exist.
    state
        tensors and plain values.

    Raises
    ------
    OSError
        the file cannot be written.
    """
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getvalue()
    write(path, MAGIC + hashlib.sha256(payload).digest() + payload, secret=True)


def write(path: str | Path, content: bytes, secret: bool) -> None:
    """Replace `path` by `content`; on any failure the old file stays, and no part of the new one is left.

    Parameters
    ----------
    path
        where to write; its folder must exist.
    content
        all of it.
    secret
        only the owner may read it.

    Raises
    ------
    OSError
        the file cannot be written.
    """
    part = Path(f"{path}.part")
    try:
        part.unlink(missing_ok=True)  # left by a crash, perhaps with other permissions
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def load(path: str | Path) -> dict[str, Any]:
    """The state saved at `path`. Its digest is checked first, and torch loads tensors and plain values only.

    Raises
    ------
    ValueError
        the file is not a checkpoint, or was cut off or changed.

    Examples
    --------
    A file that was cut off is refused:

    >>> from pathlib import Path
    >>> from dpivon import checkpoint
    >>> checkpoint.save("run.checkpoint", {"step": 12})
    >>> checkpoint.load("run.checkpoint")
    {'step': 12}
    >>> whole = Path("run.checkpoint").read_bytes()
    >>> _ = Path("run.checkpoint").write_bytes(whole[:-1])
    >>> checkpoint.load("run.checkpoint")
    Traceback (most recent call last):
    ValueError: run.checkpoint is not a whole checkpoint; ...
    """
    content = Path(path).read_bytes()
    digest, payload = content[len(MAGIC) : len(MAGIC) + 32], content[len(MAGIC) + 32 :]
    if not content.startswith(MAGIC) or hashlib.sha256(payload).digest() != digest:
        raise ValueError(f"{path} is not a whole checkpoint; delete it to start anew, or restore a copy")
    return torch.load(io.BytesIO(payload), weights_only=True)

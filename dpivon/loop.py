"""The training loop, one for every method: from a run's step to its last one, or to Ctrl-C."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from tqdm import tqdm

from dpivon import accounting, checkpoint, processes
from dpivon.state import Run


def train(now: Run, checkpoint_path: str | Path | None, say: Callable[[str], None]) -> bool:
    """The loop: from `now.step` to `now.steps`, or to Ctrl-C. True when it reached the end."""
    config, images = now.config, now.images
    assert config.batch_size
    now.model.train()
    seen, losses, begin = 0, 0.0, time.perf_counter()
    hidden = None if processes.first() else True  # None: where there is no terminal
    with interruptible() as interrupted, tqdm(total=now.steps, initial=now.step, disable=hidden, leave=False) as bar:
        for index in now.batches():
            with now.optimizer.sampled_params():
                diagnostics = now.gradient(now.model, now.loss, images.x_train[index], images.y_train[index])
            now.optimizer.step()
            now.schedule.step()
            now.step += 1
            bar.update()
            seen, losses = seen + 1, losses + diagnostics.loss
            stop = processes.any_of(interrupted())  # read once: what ends the run must also save it
            last = now.step == now.steps or stop
            if int(now.epoch(now.step)) > int(now.epoch(now.step - 1)) or last:
                now.trace += curvature_trace(now)
                if checkpoint_path is not None:
                    checkpoint.save(checkpoint_path, now.state_dict())
                speed = seen * config.batch_size / (time.perf_counter() - begin)
                spent = "" if now.dp is None else f"  epsilon {accounting.spent(now.accountant, config.delta):.3f}"
                with tqdm.external_write_mode():
                    say(
                        f"epoch {now.epoch(now.step):5.1f}{spent}  [diagnostic, not covered by epsilon:"
                        f" training loss {losses / seen:.3f}, {speed:,.0f} images/s]"
                    )
                seen, losses, begin = 0, 0.0, time.perf_counter()
            if stop:
                break
    if now.step < now.steps:
        return False
    now.conclude()
    return True


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, read between steps; a second one interrupts as usual."""
    pressed = threading.Event()

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, previous)

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield pressed.is_set
        return
    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


def curvature_trace(now: Run) -> list[dict[str, float]]:
    """What the curvature and the last private gradient say at this step; empty for a method without curvature.

    `zero_fraction` is the share of coordinates whose square is below the noise's variance, so that the paper's estimate
    is zero; `effective_step` is the gradient's median factor in a step, before the schedule. All post-processing.
    """
    pairs = [(p, state["h"]) for p, state in now.optimizer.state.items() if "h" in state]
    if not pairs:
        return []
    group = now.optimizer.param_groups[0]
    h = torch.cat([h.flatten() for _, h in pairs])
    g = torch.cat([p.grad.flatten() for p, _ in pairs])
    assert now.config.lr is not None
    return [
        {
            "step": now.step,
            "zero_fraction": float((g.square() <= group["noise_std"] ** 2).double().mean()),
            "h_mean": float(h.mean()),
            "h_median": float(h.median()),
            "effective_step": now.config.lr
            * (group["hess_init"] + group["weight_decay"])
            / (float(h.median()) + group["weight_decay"]),
        }
    ]

"""One run: a configuration in, a recorded result out. One loop serves every method."""

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm import tqdm

from dpivon import accounting, data, ledger, mechanism, metrics, models, predict
from dpivon.methods import METHODS, get

# Raise it when a change alters the numbers of a run: recorded keys then no longer match.
RECIPE = 1


@dataclass(frozen=True)
class Config:
    """Everything that determines a run's numbers.

    Parameters
    ----------
    data : 'digits' (embedded in scikit-learn) or 'cifar10'.
    model : 'mlp', 'lenet' or 'tanh_cnn'.
    method : a name in `methods.METHODS`; those that begin with 'dp-' are private.
    epsilon : the budget, from which the noise multiplier follows.
    noise_multiplier : sigma_p itself, instead of a budget.
    delta : delta_p, well below one over the number of examples.
    accountant : 'rdp' (the paper's) or 'prv' (tighter).
    max_grad_norm : C, the clipping norm of one example's gradient.
    batch_size : b, the expected batch size; each example joins a batch with probability b / N.
    epochs : passes over the data, in expectation; T = round(epochs N / b) steps.
    lr : alpha, the peak learning rate.
    beta1 : decay of the normalised momentum.
    schedule : 'cosine' to zero, or 'constant'.
    weight_decay : strength of the Gaussian prior's term, added after the noise.
    samples : posterior draws averaged in prediction; 0 predicts at the mean.
    seed : makes the run a reproducible simulation; without it noise and batches come from the system's entropy.
    """

    data: Literal["digits", "cifar10"] = "digits"
    model: Literal["mlp", "lenet", "tanh_cnn"] | None = None
    method: str = "dp-sgd"
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    accountant: Literal["rdp", "prv"] = "rdp"
    max_grad_norm: float | None = None
    batch_size: int | None = None
    epochs: float | None = None
    lr: float | None = None
    beta1: float = 0.9
    schedule: Literal["cosine", "constant"] = "cosine"
    weight_decay: float = 0.0
    samples: int = 0
    seed: int | None = None

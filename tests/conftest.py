"""What all tests share: one thread, hypothesis without deadlines, and the place of CIFAR-10."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from dpivon import data

# One thread: sums come out in the same order everywhere, and parallel test workers do not fight over the cores.
torch.set_num_threads(1)

# No deadline: a slow machine is no defect.
settings.register_profile("dpivon", deadline=None)
settings.load_profile("dpivon")


@pytest.fixture(scope="session")
def cifar10_root() -> Path:
    """The folder (or archive) that ``$DPIVON_DATA`` names; without CIFAR-10 the test is skipped, on CI it fails."""
    root = os.environ.get("DPIVON_DATA")
    if root and data._find(Path(root).expanduser()):
        return Path(root).expanduser()
    reason = (
        f"no CIFAR-10 in $DPIVON_DATA ({root or 'not set'}): run `python -c 'from dpivon import data; data.cifar10()'` "
        "to download it, and set DPIVON_DATA=~/.cache/dpivon, or wherever you keep it"
    )
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)

"""The ledger: one JSON line for each recorded run, appended whole or not at all."""

import fcntl
import hashlib
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import torch

from dpivon import accounting
from dpivon.methods import METHODS

SCHEMA = 1
FIELDS: dict[str, Any] = {
    "schema": int,
    "recipe": int,
    "key": str,
    "status": str,
    "config": dict,
    "privacy": (dict, type(None)),
    "results": dict,
    "code": dict,
    "versions": dict,
    "hardware": dict,
    "seconds": (int, float, type(None)),
    "time": str,
}
# What a line may also have; nothing that is there without it, so the schema is the same.
OPTIONAL: dict[str, Any] = {"cost": dict, "error": str}
STATUSES = ("finished", "interrupted", "failed")


class LedgerError(ValueError):
    """A record that is not of the schema, or a line that cannot be read; the message names the file and the line."""


def key(config: Mapping[str, Any], recipe: int) -> str:
    """The name of a run: a hash of its configuration and of the recipe version, 16 hexadecimal digits.

    A setting of None does not count, so that a run keeps its name when a later release adds an optional setting.

    Examples
    --------
    >>> from dpivon import ledger
    >>> old = ledger.key({"method": "sgd", "seed": 0}, recipe=2)
    >>> new = {"method": "sgd", "seed": 0, "members": None}
    >>> ledger.key(new, recipe=2) == old
    True
    >>> ledger.key(new, recipe=3) == old
    False
    """
    given = {name: value for name, value in config.items() if value is not None}
    text = json.dumps({"config": given, "recipe": recipe}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tells_effort(config: Mapping[str, Any]) -> bool:
    """May a record tell how long its training took, and how much memory? Both follow the sizes of its batches.

    Which examples were in a batch is secret, so the sizes are diagnostics, which epsilon does not cover: a record of a
    private run without a seed has null there. A seeded run is a simulation, and promises nothing that this could break.
    """
    method = METHODS.get(config["method"])
    return config["seed"] is not None or (method is not None and not method.private)


def validate(record: Any) -> None:
    """Raise LedgerError unless `record` has every field of the schema, of its type, and its own key.

    A record whose status is 'failed' has no results, and its error instead.
    """
    if not isinstance(record, dict):
        raise LedgerError(f"a record must be an object, got {type(record).__name__}")
    missing = FIELDS.keys() - record.keys()
    if missing:
        raise LedgerError(f"the record lacks {', '.join(sorted(missing))}")
    for field, kind in {**FIELDS, **OPTIONAL}.items():
        if field in record and not isinstance(record[field], kind):
            raise LedgerError(f"field {field!r} has the wrong type: {record[field]!r}")
    if record["schema"] != SCHEMA:
        raise LedgerError(f"schema {record['schema']} is not {SCHEMA}; a newer dpivon may read it")
    if record["key"] != key(record["config"], record["recipe"]):
        raise LedgerError(f"key {record['key']} does not belong to the record's configuration and recipe")
    if record["status"] not in STATUSES:
        raise LedgerError(f"status {record['status']!r} is none of {', '.join(STATUSES)}")
    if (record["status"] == "failed") != ("error" in record):
        raise LedgerError(f"a record has an error if and only if it failed, and this one is {record['status']}")


def check(record: Mapping[str, Any]) -> None:
    """Raise LedgerError unless a record's epsilon follows from its own sigma_p, q = b / N and T.

    Further releases from the same examples, and the choice of a temperature on others, are counted as the record says,
    and a record of a run that makes them must say so. A method that is not private has no epsilon, and nothing to
    check.
    """
    p, config = record["privacy"], record["config"]
    method = METHODS.get(config["method"])
    if p is None:
        if method is not None and method.private and record["status"] != "failed":
            raise LedgerError(f"{record['key']}: {config['method']!r} is private, and the record states no privacy")
        return
    if p["sample_rate"] != p["batch_size"] / p["n"]:
        raise LedgerError(f"{record['key']}: sample_rate is {p['sample_rate']}, not {p['batch_size']} / {p['n']}")
    if p["steps"] != record["results"]["steps"]:
        raise LedgerError(f"{record['key']}: {record['results']['steps']} steps were done, {p['steps']} accounted for")
    noise = () if config["noise_multiplier"] is None else ("noise_multiplier",)
    for name in ("batch_size", "delta", "accountant", "max_grad_norm", "holdout", *noise):
        if p[name] != config[name]:
            raise LedgerError(f"{record['key']}: {name} is {config[name]} in config, {p[name]} in privacy")
    if p["simulation"] != (config["seed"] is not None):
        raise LedgerError(f"{record['key']}: simulation is {p['simulation']}, and the seed {config['seed']}")
    if "temperature" in record["results"] and not p.get("set_aside"):
        raise LedgerError(f"{record['key']}: a temperature was chosen, and privacy has no set_aside examples for it")
    if record["status"] == "finished" and method is not None and method.probe is not None and not p.get("besides"):
        raise LedgerError(f"{record['key']}: {config['method']!r} releases a curvature, and privacy has no besides")
    besides = [tuple(event) for event in p.get("besides", ())]
    steps = accounting.epsilon(
        p["noise_multiplier"], p["sample_rate"], p["steps"], p["delta"], p["accountant"], besides
    )
    again = max(steps, p.get("temperature_epsilon", 0.0))
    if not math.isclose(again, p["epsilon"], rel_tol=1e-6):
        raise LedgerError(f"{record['key']}: epsilon is recorded as {p['epsilon']}, and computed again it is {again}")


def append(path: str | Path, record: Mapping[str, Any]) -> None:
    """Append one record as one line, under a lock, flushed to disk; on any failure the file is as it was.

    If an earlier writer was cut off in mid-line, its fragment is closed first, so that it cannot swallow this record.

    Raises
    ------
    LedgerError
        the record does not fit the schema.
    OSError
        the file cannot be written (no space, no permission).
    """
    validate(record)
    line = (json.dumps(dict(record), sort_keys=True, allow_nan=True) + "\n").encode()
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        if end:
            with open(path, "rb") as reader:
                reader.seek(-1, os.SEEK_END)
                line = line if reader.read(1) == b"\n" else b"\n" + line
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), end)
            raise


def published(name: str) -> Path:
    """A file of the book's results: its own in a checkout, elsewhere (in Colab) a copy of this release's, downloaded.

    Parameters
    ----------
    name
        such as 'lenet.jsonl' or 'grids/lenet_arms.toml'.

    Raises
    ------
    OSError
        there is no such file, or it cannot be downloaded.
    """
    here = Path(__file__).parents[1] / "book" / "results"
    if here.is_dir():
        if not (here / name).is_file():
            raise OSError(f"there is no {name} in {here}; see what is there: {sorted(p.name for p in here.iterdir())}")
        return here / name
    import pooch

    release = version("dpivon")
    links = metadata("dpivon").get_all("Project-URL") or []
    repository = next(link.split(", ")[1] for link in links if link.startswith("Repository"))
    address = f"{repository}/raw/v{release}/book/results/{name}"
    folder = pooch.os_cache("dpivon") / "results" / release
    pooch.get_logger().setLevel("WARNING")  # it would print each file's hash
    try:  # the release names the bytes, so no hash of each is kept here
        return Path(pooch.retrieve(address, known_hash=None, fname=name.replace("/", "-"), path=folder))
    except (OSError, ValueError) as error:
        raise OSError(f"{address} cannot be read ({error}); connect to the network, or clone the repository") from None


def read(path: str | Path, strict: bool = True) -> list[dict[str, Any]]:
    """All records of a ledger file, oldest first. A file that does not exist holds none.

    Parameters
    ----------
    path
        the JSON-lines file.
    strict
        raise at a damaged line; False skips it.

    Raises
    ------
    LedgerError
        a line is cut off or not of the schema.
    """
    if not Path(path).exists():
        return []
    records = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            validate(record)
        except ValueError as error:
            if strict:
                raise LedgerError(f"{path}, line {number}: {error}; read it with strict=False to skip it") from error
            continue
        records.append(record)
    return records


def code_state() -> dict[str, Any]:
    """The commit of the code that runs, and whether the tree had uncommitted changes; nulls outside a checkout."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return None

    if git("ls-files", "--error-unmatch", __file__) is None:  # installed inside somebody else's checkout
        return {"commit": None, "dirty": None}
    changes = git("status", "--porcelain", "--untracked-files=no", "--", ":/dpivon", ":/pyproject.toml")
    return {"commit": git("rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Versions, hardware and time, in the ledger's fields; a GPU is named if `device` is one, not if one idles."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else None
    packages = ("dpivon", "torch", "opacus", "numpy", "torchmetrics")
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "hardware": {"cpu": cpu, "gpu": gpu, "threads": torch.get_num_threads(), "system": platform.system()},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }

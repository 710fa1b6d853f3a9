"""Rank recorded runs on CIFAR-10 by test NLL, at a budget that is computed again from sigma_p, q and T.

An entry is one configuration; its runs may differ in their seeds alone, and count by their mean. A ledger line says
what its author says: repeat the best entries from their configurations and seeds before you give prizes.
"""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpivon import ledger

BUDGET, DELTA, EXAMPLES = 1.0, 1e-5, 50_000


@dataclass
class Entry:
    """A team's configuration and the NLL of each of its runs, by seed."""

    team: str
    config: dict[str, Any]
    epsilon: float
    nll: dict[Any, float] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        return statistics.mean(self.nll.values())

    def __str__(self) -> str:
        spread = statistics.stdev(self.nll.values()) if len(self.nll) > 1 else math.nan
        return (
            f"{self.mean:.4f} +- {spread:.4f}  {len(self.nll)} seeds  epsilon {self.epsilon:.3f}  "
            f"{self.config['method']:20} {self.team}"
        )


def reason(record: dict[str, Any]) -> str | None:
    """Why a record does not count, or None if it does.

    `ledger.check` computes epsilon again from sigma_p, q = b / N and T, all releases included.
    """
    try:
        ledger.validate(record)
        ledger.check(record)
    except (ledger.LedgerError, KeyError, TypeError, ValueError) as error:
        return f"not a sound record: {error}"
    config, privacy = record["config"], record["privacy"]
    if record["status"] != "finished":
        return f"the run is {record['status']}, not finished"
    if config["data"] != "cifar10":
        return f"the data are {config['data']}, not cifar10"
    if privacy is None:
        return f"{config['method']!r} is not private"
    if privacy["n"] + privacy.get("set_aside", 0) != EXAMPLES or privacy["holdout"]:
        return "trained on a part of the examples: the final run takes all, and the test set"
    if privacy["sampler"] != "Poisson":
        return f"the sampler is {privacy['sampler']!r}, and epsilon holds for Poisson"
    if privacy["delta"] > DELTA:
        return f"delta is {privacy['delta']:g}, above {DELTA:g}"
    if privacy["epsilon"] > BUDGET:
        return f"epsilon is {privacy['epsilon']:.4f}, above {BUDGET:g}"
    return None if math.isfinite(score(record)) else "the NLL is not finite"


def score(record: dict[str, Any]) -> float:
    """The test NLL of a run: of the average over posterior draws where there is one, else at the mean."""
    results = record["results"]
    return float(results.get("samples", results["mean"])["nll"])


def rank(teams: Iterable[tuple[str, list[dict[str, Any]]]]) -> tuple[list[Entry], list[str]]:
    """The entries of all teams, the lowest mean NLL first, and a line for each record that does not count."""
    entries: dict[str, Entry] = {}
    refused = []
    for team, records in teams:
        for number, record in enumerate(records, start=1):
            if (why := reason(record)) is not None:
                refused.append(f"{team}, record {number}: {why}")
                continue
            config = {name: value for name, value in record["config"].items() if name != "seed"}
            key = json.dumps([team, config], sort_keys=True)
            entry = entries.setdefault(key, Entry(team, config, record["privacy"]["epsilon"]))
            entry.nll[record["config"]["seed"]] = score(record)
    return sorted(entries.values(), key=lambda entry: entry.mean), refused


def show(files: Iterable[Path]) -> list[str]:
    """The leaderboard as lines, of ledger files named after their teams.

    Raises
    ------
    LedgerError
        a line of a file cannot be read.
    FileNotFoundError
        there is no such file, which would rank as a team without a run.
    """
    files = list(files)
    if missing := [str(path) for path in files if not path.is_file()]:
        raise FileNotFoundError(f"there is no file {', '.join(missing)}; give each team's ledger")
    entries, refused = rank((path.stem, ledger.read(path)) for path in files)
    lines = [f"{place:3}  {entry}" for place, entry in enumerate(entries, start=1)]
    head = "     NLL on the test set, mean and standard deviation over seeds"
    return [head, *lines, *([""] if refused else []), *(f"not counted: {line}" for line in refused)]

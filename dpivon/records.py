"""Look into a ledger: list and filter its lines, summarize them over seeds, check their epsilon, run one again."""

import difflib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from dpivon import grid, ledger, train
from dpivon.seeds import mean_and_error

METRICS = ("accuracy", "nll", "ece", "overconfidence")
SHOWN = ("key", "status", "method", "noise_multiplier", "lr", "seed", *METRICS, "seconds")


@dataclass(frozen=True)
class Ledger:
    """List the lines of a ledger, or what `where` leaves of them.

    A name is a setting of the configuration, a field of the privacy statement, a metric (over draws where there are
    draws), or a field of the record; a path such as privacy.epsilon or results.mean.ece says it exactly. Exit status 1
    where a check or a comparison fails.

    Parameters
    ----------
    file
        the ledger.
    where
        conditions that all must hold, such as method=dp-sgd noise_multiplier=1.
    columns
        names to show.
    summarize
        one line for each configuration: how many seeds, and mean ± standard error over them.
    check
        compute each epsilon again, from its own q, sigma and T.
    rerun
        run the line with this key, or with a key that begins so, again, and compare.
    root
        where the data lies, for a rerun.
    device
        where a rerun trains.
    """

    file: tyro.conf.Positional[Path]
    where: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    summarize: bool = False
    check: bool = False
    rerun: str | None = None
    root: Path | None = None
    device: str = "cpu"

    def __call__(self) -> None:
        if not self.file.exists():
            raise ValueError(f"there is no ledger {self.file}; `train`, `compare` and `sweep` write one with --ledger")
        found = select(ledger.read(self.file, strict=False), self.where)
        if self.rerun is not None:
            lines, right = again(one(found, self.rerun), self.root, self.device)
        elif self.check:
            lines, right = check(found)
        elif self.summarize:
            lines, right = summary(found, self.columns), True
        else:
            lines, right = listing(found, self.columns or SHOWN), True
        print("\n".join(lines))
        if not right:
            sys.exit(1)


def value(record: Mapping[str, Any], name: str) -> Any:
    """What a record says under a name, or under a path with dots; None where it says nothing."""
    if "." in name:
        found: Any = record
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found
    results = record["results"]
    places = (
        record["config"], record["privacy"] or {}, results.get("samples", results.get("mean", {})), results, record,
        record.get("cost", {}), record["hardware"], record["versions"],
    )  # fmt: skip
    return next((place[name] for place in places if place.get(name) is not None), None)


def select(records: Iterable[Mapping[str, Any]], where: Iterable[str]) -> list[Mapping[str, Any]]:
    """The records for which all conditions NAME=VALUE hold; numbers are equal as numbers.

    Raises
    ------
    ValueError
        a condition is none, or no record knows its name.

    Examples
    --------
    >>> from dpivon import records
    >>> runs = [{"config": {"lr": lr}, "privacy": None}
    ...         for lr in (1, 2, 4)]
    >>> records.select(runs, ["config.lr=2.0"])
    [{'config': {'lr': 2}, 'privacy': None}]
    """
    found = list(records)
    for condition in where:
        name, sign, wanted = condition.partition("=")
        if not sign:
            raise ValueError(f"a condition is NAME=VALUE, such as method=dp-sgd, got {condition!r}")
        require([name], found)
        found = [r for r in found if same(value(r, name), wanted)]
    return found


def same(found: Any, wanted: str) -> bool:
    """Is what a record says what was typed?"""
    if isinstance(found, int | float) and not isinstance(found, bool):
        try:
            return found == float(wanted)
        except ValueError:
            return False
    return wanted in (found if isinstance(found, str) else json.dumps(found), str(found))


def require(names: Iterable[str], records: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a name that no record knows: a setting that is nowhere, or a mistake in typing."""
    known = {name for r in records for part in (r, r["config"], r["privacy"] or {}, r.get("cost", {})) for name in part}
    known |= {*METRICS, "brier", *train.Config.__dataclass_fields__}
    for name in names:
        if records and name not in known and all(value(r, name) is None for r in records):
            near = difflib.get_close_matches(name, known, 1)
            remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
            raise ValueError(f"no record has {name!r}; {remedy}")


def text(found: Any) -> str:
    """A value in a cell."""
    if isinstance(found, float):
        return f"{found:.4g}"
    return "-" if found is None else str(found)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def listing(records: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    """A line for each record, oldest first, and their number."""
    require(columns, records)
    lines = table([columns, *([text(value(r, name)) for name in columns] for r in records)])
    return [*lines, f"{len(records)} lines"]


def groups(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The finished runs of each configuration and recipe, one a seed: of two lines with the same key, the later."""
    latest = {grid.key(r["config"], r["recipe"]): r for r in records if r["status"] == "finished"}
    found: dict[str, list[Mapping[str, Any]]] = {}
    for r in latest.values():
        found.setdefault(grid.key({**r["config"], "seed": None}, r["recipe"]), []).append(r)
    return found


def differing(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """The settings in which runs of the same method differ."""
    seen: dict[tuple[str, str], set[Any]] = {}
    for r in records:
        for name, setting in r["config"].items():
            seen.setdefault((r["config"]["method"], name), set()).add(setting)
    return list(dict.fromkeys(name for (_, name), found in seen.items() if len(found) > 1 and name != "seed"))


def summary(records: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> list[str]:
    """A line for each configuration: the settings in which they differ, or `columns`; seeds, mean ± standard error."""
    found = list(groups(records).values())
    if not found:
        return ["no finished runs"]
    first = [group[0] for group in found]
    settings = columns or ["method", *differing(first)]
    require(settings, first)
    rows = [[*settings, "seeds", *METRICS]]
    for group in sorted(found, key=lambda g: [(str(type(v)), v) for v in (value(g[0], n) for n in settings)]):
        cells = []
        for metric in METRICS:
            mean, error = mean_and_error([float(value(r, metric)) for r in group])
            cells.append(f"{mean:.4f} ± {error:.4f}" if error == error else f"{mean:.4f}")
        rows.append([*(text(value(group[0], n)) for n in settings), str(len(group)), *cells])
    return table(rows)


def check(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], bool]:
    """The records whose epsilon does not follow from their own q, sigma and T; and whether there is none."""
    lines = []
    for r in records:
        try:
            ledger.check(r)
        except ledger.LedgerError as error:
            lines.append(str(error))
    private = sum(r["privacy"] is not None for r in records)
    return [*lines, f"{private} epsilons computed again, {len(lines)} wrong"], not lines


def one(records: Sequence[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    """The latest finished record whose key begins with `key`.

    Raises
    ------
    ValueError
        there is none, or several runs have such keys.
    """
    found = {r["key"]: r for r in records if r["key"].startswith(key) and r["status"] == "finished"}
    if len(found) != 1:
        keys = ", ".join(found) or "none"
        raise ValueError(f"{key!r} must be the beginning of one finished run's key, and it is of: {keys}")
    return next(iter(found.values()))


def again(record: Mapping[str, Any], root: Path | None = None, device: str = "cpu") -> tuple[list[str], bool]:
    """Run a record again, on its number of threads, and compare metrics and trace bit for bit.

    Returns
    -------
    lines
        what is equal and what differs, and of versions, processor and threads what may be the reason.
    equal
        whether nothing differs.

    Raises
    ------
    ValueError
        it had no seed, or is of another recipe or version, so that it cannot be made again.
    """
    config = dict(record["config"])
    if config["seed"] is None:
        raise ValueError(f"{record['key']} had no seed: its noise came from the operating system, and is gone")
    if record["recipe"] != train.RECIPE:
        raise ValueError(f"{record['key']} is of recipe {record['recipe']}, this dpivon runs recipe {train.RECIPE}")
    unknown = [name for name in config if name not in train.Config.__dataclass_fields__ and config[name] is not None]
    if unknown:
        raise ValueError(f"{record['key']} has settings this dpivon does not know: {', '.join(unknown)}; update it")
    threads = torch.get_num_threads()
    torch.set_num_threads(record["hardware"]["threads"])
    try:
        known = {name: v for name, v in config.items() if name in train.Config.__dataclass_fields__}
        new = train.run(train.Config(**known), root=root, device=device, shifted="shift" in record["results"])
    finally:
        torch.set_num_threads(threads)
    return compared(record, new)


def compared(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Two records of one run: what of the results differs, and what else does; and whether the results are equal."""
    lines = []
    results = [dict(flat(r["results"])) for r in (old, new)]
    names = [name for name in results[0] if name != "resumed_at"]
    unequal = [name for name in names if repr(results[0][name]) != repr(results[1].get(name))]
    for name in unequal:
        lines.append(f"{name}: was {results[0][name]}, is {results[1].get(name)}")
    surroundings = [dict(flat({k: r[k] for k in ("versions", "hardware", "code")})) for r in (old, new)]
    changed = [n for n in surroundings[0] if surroundings[0][n] != surroundings[1].get(n)]
    for name in changed:
        lines.append(f"{name} was {surroundings[0][name]}, is {surroundings[1].get(name)}")
    equal = "bit-equal" if not unequal else f"NOT EQUAL in {len(unequal)}"
    seconds = f"{new['seconds']} s, and took {old['seconds']} s then"
    return [
        *lines,
        f"{old['key']}: {equal} of {len(names)} metrics and numbers of the trace; took {seconds}",
    ], not unequal


def flat(tree: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """The leaves of nested dictionaries and lists, with their paths."""
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, list) else None
    if items is None:
        yield path, tree
        return
    for name, branch in items:
        yield from flat(branch, f"{path}.{name}" if path else str(name))

"""Numbers of the ledger in pages that run no code, so that none is typed.

    {ledger}`lenet 1a2b3c privacy.epsilon`            what the run whose key begins with 1a2b3c says there
    {ledger}`lenet 1a2b3c privacy.delta .0e`          the same in a format of Python's
    {ledger}`lenet 1a2b3c privacy.epsilon up`         three decimals, rounded up, as a privacy statement has it
    {ledger-together}`lenet method=dp-sgd; digits lr=2`   epsilon of all the finished runs that these conditions leave

    {ledger-mean}`lenet dp-sgd nll batch_size=1024 lr=4`   mean and standard error over seeds, of one configuration
    {ledger-cost}`digits dp-sgd`                           what the method keeps and takes, medians
    {ledger-range}`lenet results.shift.strangers.*.auroc`  the least and the largest number under these names
    {ledger-best}`digits dp-sgd nll epsilon=3`             the name, if the seeds do not tell that method from the best

and as a block the whole privacy statement, computed again from the run's own numbers, or a table of methods, with
columns for each line:

    ```{ledger-statement} lenet 1a2b3c
    ```

    ```{ledger-table} accuracy nll
    digits epsilon=1
    digits epsilon=8
    ```

The first word is a file of `book/results`. A key, a name, a claim or a format that is not there stops the build.
"""

import statistics
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

RESULTS = Path(__file__).parents[1] / "book" / "results"


def run(file: str, key: str) -> dict[str, Any]:
    """The finished run of a ledger file whose key begins so.

    Raises
    ------
    ValueError
        there is no such file, no such run, or more than one.
    """
    from dpivon import records  # here, since it imports torch: a build without such a page need not

    return dict(records.one(lines(file), key))


def lines(file: str) -> list[dict[str, Any]]:
    """The lines of a ledger file of the book.

    Raises
    ------
    ValueError
        there is no such file.
    """
    path = RESULTS / f"{file}.jsonl"
    if not path.is_file():
        names = ", ".join(sorted(found.stem for found in RESULTS.glob("*.jsonl")))
        raise ValueError(f"there is no ledger {file!r}; there are {names}")
    return parsed(path, path.stat().st_mtime_ns)


@cache
def parsed(path: Path, changed: int) -> list[dict[str, Any]]:
    """A ledger file is read once for all roles of a build, and again when it has changed."""
    from dpivon import ledger

    return ledger.read(path)


def field(text: str) -> str:
    """What a role with this content shows.

    Raises
    ------
    ValueError
        the content is not FILE KEY NAME [FORMAT], or names what is not there.
    """
    from dpivon import accounting, records

    words = text.split()
    if len(words) not in (3, 4):
        raise ValueError(f"a role has FILE KEY NAME and perhaps a FORMAT, got {text!r}")
    file, key, name, *form = words
    found = records.value(run(file, key), name)
    if found is None or isinstance(found, dict | list):
        raise ValueError(f"run {key} of {file!r} says nothing under {name!r} that fits into a line")
    if not form:
        return f"{found:,}" if type(found) is int else str(found)
    return f"{accounting.up(found):.15g}" if form[0] == "up" else format(found, form[0])


def statement(file: str, key: str) -> str:
    """The privacy statement of a run, from the numbers that its line has; epsilon is computed again.

    Raises
    ------
    ValueError
        the run is not private, or its epsilon is not the one that its numbers give.
    """
    from dpivon import accounting, ledger

    record = run(file, key)
    p = record["privacy"]
    if p is None:
        raise ValueError(f"run {key} of {file!r} is not private, so it has no statement")
    ledger.check(record)
    given = ("noise_multiplier", "steps", "delta", "max_grad_norm", "batch_size", "n", "accountant", "simulation")
    perhaps = ("holdout", "besides", "set_aside", "temperature_epsilon")
    return str(accounting.statement(**{k: p[k] for k in given}, **{k: p[k] for k in perhaps if k in p}))


def together(text: str) -> str:
    """The epsilon of several runs on the same data, as if all of them had been published, rounded up.

    Raises
    ------
    ValueError
        a part is not FILE and conditions, leaves no private run, or the runs differ in delta or accountant.
    """
    from dpivon import accounting, records

    events, settings = [], set()
    for part in text.split(";"):
        file, *where = part.split()
        found = [r for r in records.select(lines(file), where) if r["status"] == "finished" and r["privacy"]]
        if not found:
            raise ValueError(f"no finished private run is left by {part.strip()!r}")
        for p in (r["privacy"] for r in found):
            events += [(p["noise_multiplier"], p["sample_rate"], p["steps"]), *map(tuple, p.get("besides", ()))]
            settings.add((p["delta"], p["accountant"]))
    if len(settings) != 1:
        raise ValueError(f"runs with different delta or accountant do not add up: {sorted(settings)}")
    delta, accountant = settings.pop()
    (noise, rate, steps), *besides = events
    return f"{accounting.up(accounting.epsilon(noise, rate, steps, delta, accountant, besides)):.15g}"


Runs = dict[str, list[dict[str, Any]]]  # of each method, one for each seed

METRICS = {  # the head of a column, and whether more is better; of the last, neither is
    "accuracy": ("accuracy", True),
    "nll": ("NLL", False),
    "ece": ("ECE", False),
    "brier": ("Brier", False),
    "overconfidence": ("confidence − accuracy", None),
}


def finished(text: str) -> list[dict[str, Any]]:
    """The finished runs that FILE and conditions leave.

    Raises
    ------
    ValueError
        there are none.
    """
    from dpivon import records

    file, *where = text.split()
    found = [dict(r) for r in records.select(lines(file), where) if r["status"] == "finished"]
    if not found:
        raise ValueError(f"no finished run is left by {text.strip()!r}")
    return found


def methods(text: str) -> Runs:
    """The same by method, without lines that a later one repeats.

    Raises
    ------
    ValueError
        there are none, or a method has several configurations, over which no mean can be taken.
    """
    from dpivon import records

    found: Runs = {}
    for runs in records.groups(finished(text)).values():
        name = runs[0]["config"]["method"]
        if name in found:
            names = ", ".join(records.differing([*found[name], *runs])) or "recipe"
            raise ValueError(f"{name} has several configurations in {text.strip()!r}; add a condition on {names}")
        found[name] = [dict(r) for r in runs]
    return found


def named(text: str, names: int) -> tuple[list[str], str]:
    """What a role with FILE, so many names, and conditions names; and FILE with the conditions.

    Raises
    ------
    ValueError
        there are fewer words.
    """
    file, *words = text.split() or [""]
    if len(words) < names:
        raise ValueError(f"a role has FILE, {names} name{'s' * (names > 1)} and perhaps conditions, got {text!r}")
    return words[:names], " ".join([file, *words[names:]])


def means(runs: Runs, metric: str) -> dict[str, tuple[float, float]]:
    """Mean and standard error of each method, the best first.

    Raises
    ------
    ValueError
        there is no such metric.
    """
    from dpivon import seeds

    if metric not in METRICS:
        raise ValueError(f"there is no metric {metric!r}; choose one of {', '.join(METRICS)}")
    found = {name: seeds.mean_and_error(seeds.values(group, metric)) for name, group in runs.items()}
    return dict(sorted(found.items(), key=lambda item: item[1][0], reverse=bool(METRICS[metric][1])))


def best(runs: Runs, metric: str, level: float = 0.05) -> list[str]:
    """The method with the best mean, and all that paired differences over seeds do not tell from it.

    The tests are at this level together, by Holm's rule (`seeds.holm`). A method with one seed is not compared, and
    overconfidence has no best.
    """
    from dpivon import seeds

    runs = {name: group for name, group in runs.items() if len(group) > 1}
    names = list(means(runs, metric))
    if METRICS[metric][1] is None:
        return []
    p = seeds.holm([seeds.paired(runs[name], runs[names[0]], metric).p for name in names[1:]])
    return [*names[:1], *(name for name, corrected in zip(names[1:], p, strict=True) if corrected > level)]


def number(mean: float, error: float, metric: str) -> str:
    """A mean, with its standard error where it is known."""
    text = f"{mean:{'+' * (metric == 'overconfidence')}.3f}".replace("-", "−")
    return f"{text} ± {error:.3f}" if error == error else text


def average(text: str) -> str:
    """The mean over seeds that FILE METHOD METRIC and conditions have."""
    (name, metric), rest = named(text, 2)
    return number(*means(methods(f"{rest} method={name}"), metric)[name], metric)


def cost(text: str) -> str:
    """What FILE METHOD and conditions cost, medians: numbers kept, networks run to predict, training time and memory.

    Raises
    ------
    ValueError
        there are no such runs, or they predict by different numbers of networks.
    """
    from dpivon import compare

    (name,), rest = named(text, 1)
    found = finished(f"{rest} method={name}")
    passes = {(r["config"]["samples"] or 1) * (r["config"]["members"] or 1) for r in found}
    if len(passes) > 1:
        raise ValueError(f"these runs predict by {sorted(passes)} networks; add a condition on samples to {text!r}")
    stored, seconds, memory = (compare.cost(found, part, ",.0f") for part in ("stored", "cpu_seconds", "memory_mib"))
    once = passes.pop()
    return f"{stored} numbers, {once} pass{'es' * (once > 1)}, {seconds} s, {memory} MiB"


def extent(text: str) -> str:
    """The least and the largest number that FILE has in paths like PATTERN, in the runs that conditions leave.

    Raises
    ------
    ValueError
        there is none.
    """
    from dpivon import records

    (pattern,), rest = named(text, 1)
    found = [v for r in finished(rest) for path, v in records.flat(r) if fnmatchcase(path, pattern)]
    if not found:
        raise ValueError(f"no run of {rest!r} has a number in {pattern!r}")
    shown = (f"{v:.3g}".replace("-", "−") for v in (min(found), max(found)))
    return " to ".join(dict.fromkeys(shown))


def claim(text: str) -> str:
    """The method that all parts FILE METHOD METRIC and conditions name, if it is among the `best` by each.

    Raises
    ------
    ValueError
        it is not: what the page says of it does not hold.
    """
    names = set()
    for part in text.split(";"):
        (name, metric), rest = named(part, 2)
        found = best(methods(rest), metric)
        if name not in found:
            raise ValueError(f"{name} is not among the best by {metric} in {rest!r}: {', '.join(found) or 'none'}")
        names.add(name)
    if len(names) > 1:
        raise ValueError(f"one method at a time, got {', '.join(sorted(names))}")
    return names.pop()


def budget(runs: Runs) -> str:
    """What these runs spend, as the head of their columns."""
    from dpivon import accounting, records

    spent = {records.value(r, "epsilon") for group in runs.values() for r in group}
    if None in spent:
        return "without privacy" if len(spent) == 1 else "with and without privacy"
    return "ε = " + " to ".join(f"{accounting.up(e):.15g}" for e in sorted({min(spent), max(spent)}))


class Table(NamedTuple):
    """Heads of groups of columns, one for each metric; a method's cells in a row, text and whether bold; a note."""

    heads: list[str]
    rows: list[tuple[str, list[tuple[str, bool]]]]
    note: str


def table(metrics: Sequence[str], selections: Sequence[str]) -> Table:
    """The methods of each selection (FILE and conditions) in each metric, in the order of their mean rank in the first.

    Bold are the `best`, where they are fewer than the methods that are compared.

    Raises
    ------
    ValueError
        there is no such metric, or a selection leaves no runs.
    """
    found = [methods(text) for text in selections]
    ranks: dict[str, list[int]] = {}
    for runs in found:
        for rank, name in enumerate(means(runs, metrics[0])):
            ranks.setdefault(name, []).append(rank)
    rows: dict[str, list[tuple[str, bool]]] = {
        name: [] for name in sorted(ranks, key=lambda n: (-len(ranks[n]), statistics.fmean(ranks[n])))
    }
    for runs in found:
        for metric in metrics:
            first = best(runs, metric)
            told = len(first) < sum(len(group) > 1 for group in runs.values())
            shown = means(runs, metric)
            for name, cells in rows.items():
                text = number(*shown[name], metric) if name in shown else "–"
                cells.append((text, told and name in first))
    counts = [len(group) for runs in found for group in runs.values()]
    return Table([budget(runs) for runs in found], list(rows.items()), note(counts))


def note(counts: Sequence[int]) -> str:
    """How a table with so many seeds in its cells is to be read."""
    low, high = min(counts), max(counts)
    text = f"{sum(counts)} runs, {low if low == high else f'{low} to {high}'} seed{'s' * (high > 1)} for each number"
    if high > 1:
        text += (
            ": mean ± standard error. Bold is the best mean of a column, with all that paired differences over seeds "
        )
        text += "do not tell from it (5%, Holm's correction); a column without bold tells no method from its best"
        text += ". A number without ± is of one run, and not compared" * (low == 1)
    return text + "."


class Shown(SphinxRole):
    """A role whose content a function turns into text; what that raises stops a strict build."""

    def __init__(self, show: Callable[[str], str], node: type[nodes.TextElement] = nodes.inline) -> None:
        super().__init__()
        self.show = show
        self.node = node

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            shown = self.show(self.text)
        except ValueError as error:
            message = self.inliner.reporter.error(f"{self.name}: {error}", line=self.lineno)
            return [nodes.problematic(self.rawtext, self.rawtext)], [message]
        for part in self.text.split(";"):
            self.env.note_dependency(str(RESULTS / f"{part.split()[0]}.jsonl"))
        return [self.node(self.rawtext, shown, classes=["from-ledger"])], []


class LedgerStatement(SphinxDirective):
    """The directive `ledger-statement`."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        file, key = self.arguments
        try:
            text = statement(file, key)
        except ValueError as error:
            raise self.error(f"ledger-statement: {error}") from error
        self.env.note_dependency(str(RESULTS / f"{file}.jsonl"))
        block = nodes.literal_block(text, text, language="text")
        self.set_source_info(block)
        return [block]


def cell(text: str, mark: type[nodes.TextElement] | None = None, **attributes: int) -> nodes.entry:
    """A cell of a table."""
    return nodes.entry("", nodes.paragraph("", "", mark(text, text) if mark else nodes.Text(text)), **attributes)


class LedgerTable(SphinxDirective):
    """The directive `ledger-table`: metrics as its argument, FILE and conditions in each line."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self) -> list[nodes.Node]:
        metrics, selections = self.arguments[0].split(), [line for line in self.content if line.strip()]
        try:
            found = table(metrics, selections)
        except ValueError as error:
            raise self.error(f"ledger-table: {error}") from error
        for line in selections:
            self.env.note_dependency(str(RESULTS / f"{line.split()[0]}.jsonl"))
        heads = [cell("method", morerows=1), *(cell(head, morecols=len(metrics) - 1) for head in found.heads)]
        below = [cell(METRICS[metric][0]) for metric in metrics * len(found.heads)]
        rows = [
            [cell(name, nodes.literal), *(cell(t, nodes.strong if b else None) for t, b in c)] for name, c in found.rows
        ]
        head = nodes.thead("", nodes.row("", *heads), nodes.row("", *below))
        body = nodes.tbody("", *(nodes.row("", *row) for row in rows))
        width = 1 + len(below)
        group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in range(width)), head, body, cols=width)
        block = nodes.table("", group, classes=["ledger-table", "colwidths-auto"])
        self.set_source_info(block)
        return [block, nodes.paragraph(found.note, found.note, classes=["ledger-note"])]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("ledger", Shown(field))
    app.add_role("ledger-together", Shown(together))
    app.add_role("ledger-mean", Shown(average))
    app.add_role("ledger-cost", Shown(cost))
    app.add_role("ledger-range", Shown(extent))
    app.add_role("ledger-best", Shown(claim, nodes.literal))
    app.add_directive("ledger-statement", LedgerStatement)
    app.add_directive("ledger-table", LedgerTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

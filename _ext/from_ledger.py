"""Numbers of the ledger in pages that run no code, so that none is typed.

    {ledger}`lenet 1a2b3c privacy.epsilon`            what the run whose key begins with 1a2b3c says there
    {ledger}`lenet 1a2b3c privacy.delta .0e`          the same in a format of Python's
    {ledger}`lenet 1a2b3c privacy.epsilon up`         three decimals, rounded up, as a privacy statement has it
    {ledger-together}`lenet method=dp-sgd; digits lr=2`   epsilon of all the finished runs that these conditions leave

and as a block the whole privacy statement, computed again from the run's own numbers:

    ```{ledger-statement} lenet 1a2b3c
    ```

The first word is a file of `book/results`. A key, a name or a format that is not there stops the build.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

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
    return f"{accounting.up(found):g}" if form[0] == "up" else format(found, form[0])


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
    return f"{accounting.up(accounting.epsilon(noise, rate, steps, delta, accountant, besides)):g}"


class Shown(SphinxRole):
    """A role whose content a function turns into text; what that raises stops a strict build."""

    def __init__(self, show: Callable[[str], str]) -> None:
        super().__init__()
        self.show = show

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            shown = self.show(self.text)
        except ValueError as error:
            message = self.inliner.reporter.error(f"{self.name}: {error}", line=self.lineno)
            return [nodes.problematic(self.rawtext, self.rawtext)], [message]
        for part in self.text.split(";"):
            self.env.note_dependency(str(RESULTS / f"{part.split()[0]}.jsonl"))
        return [nodes.inline(self.rawtext, shown, classes=["from-ledger"])], []


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


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_role("ledger", Shown(field))
    app.add_role("ledger-together", Shown(together))
    app.add_directive("ledger-statement", LedgerStatement)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

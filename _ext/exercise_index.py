"""The index of exercises, made from the chapters whenever the book is built, so that it cannot go stale.

In the place of the comment `% exercise-index` a page gets a table for each chapter: title with a link, kind, minutes.
Chapters and their order are those of the table of contents.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import yaml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

MARK = "% exercise-index"
TITLE = re.compile(r"`{3,}\{exercise-start\} *(.+) \(([^()]+), (\d+) minutes\)\n:label: *(\S+)\n")


@dataclass(frozen=True)
class Exercise:
    """An exercise, as its title in the notebook tells it: `Title (kind, 15 minutes)`."""

    label: str
    title: str
    kind: str
    minutes: int


@dataclass(frozen=True)
class Chapter:
    """A notebook that has exercises; `page` is its name for Sphinx, such as `book/02_dp_sgd`."""

    page: str
    title: str
    exercises: tuple[Exercise, ...]

    @property
    def minutes(self) -> int:
        return sum(exercise.minutes for exercise in self.exercises)


def exercises(text: str, name: str) -> tuple[Exercise, ...]:
    """The exercises of a notebook's Markdown text, in order; an error if one does not tell its kind and minutes."""
    found = []
    for start in re.finditer(r"^`{3,}\{exercise(?:-start)?\}.*$", text, re.MULTILINE):
        told = TITLE.match(text, start.start())
        if told is None:
            raise ExtensionError(
                f"{name}: `{start[0]}` must read `{{exercise-start}} Title (kind, N minutes)`, its :label: below"
            )
        found.append(Exercise(told[4], told[1], told[2], int(told[3])))
    return tuple(found)


def contents(toc: Path) -> dict[str, list[Chapter]]:
    """The chapters that have exercises, by the part of the table of contents in which they stand."""
    found: dict[str, list[Chapter]] = {}
    for part in yaml.safe_load(toc.read_text())["parts"]:
        for page in (entry["file"] for entry in part["chapters"]):
            path = toc.parent / f"{page}.ipynb"
            if not path.exists():
                continue
            cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
            title = cells[0].splitlines()[0].removeprefix("# ")
            if listed := exercises("\n\n".join(cells), path.name):
                found.setdefault(part["caption"], []).append(Chapter(page, title, listed))
    return found


def duration(minutes: int) -> str:
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


def table(chapter: Chapter) -> str:
    """The exercises of a chapter as a MyST table, and what they add up to."""
    rows = [
        "| Exercise | Kind | Minutes |",
        "| :--- | :--- | ---: |",
        *(f"| {{ref}}`{e.title} <{e.label}>` | {e.kind} | {e.minutes} |" for e in chapter.exercises),
        f"| *all {len(chapter.exercises)}* | | *{chapter.minutes}* |",
    ]
    return "\n".join(rows)


def index(toc: Path) -> str:
    """The index in MyST: a sentence that counts, then a section for each part and in it one for each chapter."""
    parts = contents(toc)
    chapters = [chapter for listed in parts.values() for chapter in listed]
    count, minutes = sum(len(c.exercises) for c in chapters), sum(c.minutes for c in chapters)
    text = [f"There are {count} exercises in {len(chapters)} chapters, and together they take {duration(minutes)}."]
    for part, listed in parts.items():
        text.append(f"## {part}")
        for chapter in listed:
            text += [f"### {{doc}}`{chapter.title} </{chapter.page}>`", table(chapter)]
    return "\n\n".join(text) + "\n"


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the index where a page has the comment `% exercise-index`, and read the page again when a chapter changes."""
    if MARK not in source[0].splitlines():
        return
    toc = Path(app.srcdir) / "_toc.yml"
    chapters = [chapter for listed in contents(toc).values() for chapter in listed]
    for path in [toc, *(toc.parent / f"{chapter.page}.ipynb" for chapter in chapters)]:
        app.env.note_dependency(str(path))
    source[0] = source[0].replace(MARK, index(toc))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""The assignments of the course kit as notebooks: their sources, their text twins, their student versions."""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jupytext
import nbformat
from nbformat import NotebookNode

from tools.notebooks import ENVIRONMENT, ROOT, colab_cell, tagged, tidy
from tools.notebooks import TEXT as TWINS

KIT = ROOT / "book" / "assignments"
TEXT = TWINS / "assignments"

# nbgrader's notes on a cell; an assignment's twin leaves these values out.
USUAL = {"cell_type": "code", "grade": False, "locked": False, "schema_version": 3, "solution": False, "task": False}


class KitError(Exception):
    """An assignment or a folder that cannot be used; the message says which, and what to do."""


def names() -> list[str]:
    """The assignments of the kit."""
    return sorted(path.stem for path in KIT.glob("[0-9]*.ipynb"))


def source(name: str) -> NotebookNode:
    """The source of an assignment, with its solutions and hidden tests, and today's Colab cell.

    Raises
    ------
    KitError
        there is none of this name.
    """
    path = KIT / f"{name}.ipynb"
    if not path.is_file():
        raise KitError(f"there is no assignment {name!r}; there are {', '.join(names())}")
    notebook = nbformat.read(path, as_version=4)
    if (colab := tagged(notebook, "colab")) is not None:
        colab.source = colab_cell()
    return notebook


def mark(cell: NotebookNode) -> dict[str, Any]:
    """nbgrader's notes on a cell, empty where there are none."""
    return dict(cell.metadata.get("nbgrader", {}))


def edit(name: str) -> Path:
    """Write the text twin of an assignment, with nbgrader's notes where they are not the usual ones."""
    notebook = source(name)
    for cell in notebook.cells:
        if notes := mark(cell):
            usual = {**USUAL, "cell_type": cell.cell_type}
            cell.metadata["nbgrader"] = {key: value for key, value in notes.items() if usual.get(key) != value}
    notebook.metadata["jupytext"] = {
        "notebook_metadata_filter": "dpivon,kernelspec,-jupytext",
        "cell_metadata_filter": "all",
    }
    TEXT.mkdir(parents=True, exist_ok=True)
    return write(TEXT / f"{name}.md", jupytext.writes(notebook, fmt="md:myst"))


def save(name: str) -> Path:
    """Write an assignment from its text twin, without outputs: the students make them."""
    twin = TEXT / f"{name}.md"
    if not twin.is_file():
        raise KitError(f"there is no {twin.relative_to(TEXT.parent)}; `edit {name}` writes it, or write it by hand")
    notebook = jupytext.reads(twin.read_text(), fmt="md:myst")
    for cell in notebook.cells:
        if notes := mark(cell):
            cell.metadata["nbgrader"] = {**USUAL, "cell_type": cell.cell_type, **notes}
    if tagged(notebook, "colab") is None:
        first = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
        notebook.cells.insert(first, nbformat.v4.new_code_cell(metadata={"tags": ["colab"]}))
    return store(name, notebook)


def store(name: str, notebook: NotebookNode) -> Path:
    """Write an assignment with today's Colab cell."""
    colab = tagged(notebook, "colab")
    assert colab is not None
    colab.source = colab_cell()
    tidy(notebook)
    return write(KIT / f"{name}.ipynb", nbformat.writes(notebook) + "\n")


def write(path: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    return partial.replace(path)


class Log(logging.Handler):
    """What nbgrader says about its failures."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().strip().split("\n")


def start(converter: Any) -> None:
    """Run a converter of nbgrader.

    Raises
    ------
    KitError
        it failed; with the last lines of what it logged, which its own exception leaves out.
    """
    from nbgrader.converters.base import NbGraderException

    logger, log = logging.getLogger("traitlets"), Log()
    handlers, propagate = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [log], False
    try:
        converter.start()
    except NbGraderException:
        raise KitError("\n".join(log.lines[-4:-2])) from None
    finally:
        logger.handlers, logger.propagate = handlers, propagate


@contextmanager
def course(name: str) -> Iterator[Any]:
    """A course of nbgrader in a folder of its own, in which the assignment has been released."""
    from nbgrader.converters import GenerateAssignment
    from nbgrader.coursedir import CourseDirectory

    # nbgrader calls a program of this environment, which need not be activated; kernels must be of it too.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {**ENVIRONMENT, "PATH": path}):
        place = Path(folder) / "source" / name / f"{name}.ipynb"
        place.parent.mkdir(parents=True)
        nbformat.write(source(name), place)
        directory = CourseDirectory(root=folder, assignment_id=name)
        start(GenerateAssignment(coursedir=directory))
        yield directory


def released(directory: Any) -> NotebookNode:
    """The student version in a course."""
    name = directory.assignment_id
    return nbformat.read(Path(directory.root) / "release" / name / f"{name}.ipynb", as_version=4)


def release(name: str, folder: Path) -> Path:
    """Write the student version of an assignment: stubs for solutions, and no hidden tests."""
    with course(name) as directory:
        folder.mkdir(parents=True, exist_ok=True)  # only now: an unknown name leaves nothing behind
        return write(folder / f"{name}.ipynb", nbformat.writes(released(directory)) + "\n")

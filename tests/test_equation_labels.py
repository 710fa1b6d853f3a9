"""Every labelled equation of the book has a test that is marked with its label, and every such mark a label."""

import re
from pathlib import Path

import nbformat
import pytest

from tools import notebooks

ROOT = Path(__file__).parents[1]
LABEL = r"\$\$ *\(([\w-]+)\) *$|^`{3,}\{math\}\n(?::.*\n)*?:label: *(\S+)|\\label\{([^}]+)\}"
MARK = r"mark\.equation\(\s*\"([\w-]+)\""


def labels(text: str) -> list[str]:
    """The labels of the equations in a Markdown text."""
    return ["".join(groups) for groups in re.findall(LABEL, text, re.MULTILINE)]


def book() -> dict[str, str]:
    """The Markdown text of every page of the book, by name."""
    pages = {path.name: path.read_text() for path in notebooks.BOOK.glob("*.md")}
    for path in notebooks.chapters():
        cells = nbformat.read(path, as_version=4).cells
        pages[path.name] = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    return pages


def marks() -> set[str]:
    tests = (path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
    return {label for path in tests for label in re.findall(MARK, path.read_text())}


def test_every_labelled_equation_has_a_test() -> None:
    missing = {f"{name}: {label}" for name, text in book().items() for label in labels(text) if label not in marks()}
    assert not missing, f"no test is marked with @pytest.mark.equation for {sorted(missing)}"


def test_every_mark_names_an_equation() -> None:
    stale = marks() - {label for text in book().values() for label in labels(text)}
    assert not stale, f"tests are marked for equations that the book does not have: {sorted(stale)}"


def test_labels_are_unique() -> None:
    found = [label for text in book().values() for label in labels(text)]
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    "equation",
    [
        "$$\nx\n$$ (eq-a)",
        "$$x$$ (eq-a)",
        "```{math}\n:label: eq-a\nx\n```",
        "$$\n\\begin{align}\\label{eq-a} x\\end{align}\n$$",
    ],
)
def test_labels_are_found(equation: str) -> None:
    assert labels(f"Before\n\n{equation}\n\nAfter $y$ (eq-b)") == ["eq-a"]

"""The stored chapters keep the book's rules, and the tool that keeps them does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from tools import notebooks

HEADER = "---\ndpivon:\n  download: none\n  epsilon: none, the data are public\n---\n\n"
CHECK = """
```{{admonition}} Check yourself {0}
:class: dropdown
**Question.** Why is it so?

**Answer.** Because it is.
```
"""
EXERCISE = """
```{{exercise-start}} Show it ({1}, 5 minutes)
:label: ex-{0}
```
Show it.
```{{exercise-end}}
```

```{{solution-start}} ex-{0}
:class: dropdown
```
Look at it.
```{{solution-end}}
```
"""
CHAPTER = (
    HEADER
    + """# A title

A question. *You need*: nothing.

## A section

```{code-cell}
:tags: [definition]
def double(x):
    return 2 * x
```

```{code-cell}
---
tags: [hide-input]
mystnb:
  image:
    alt: A line that rises from zero to one.
  figure:
    caption: What rises steadily has a slope.
---
import matplotlib.pyplot as plt
_ = plt.figure(figsize=(1, 1)).gca().plot([0, double(0.5)])
```
"""
    + "".join(CHECK.format(number) for number in (1, 2, 3))
    + "\n## Exercises\n"
    + "".join(EXERCISE.format(*each) for each in enumerate(("reading", "pencil", "proof and coding", "research")))
)


@pytest.mark.parametrize("path", notebooks.chapters(), ids=lambda path: path.name)
def test_chapter_keeps_the_rules(path: Path) -> None:
    found = notebooks.problems(path)
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chapter, saved from its text twin in a folder of its own."""
    folder = tmp_path_factory.mktemp("book")
    (folder / "01_x.md").write_text(CHAPTER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(notebooks, "BOOK", folder)
        return notebooks.save(folder / "01_x.md")


def test_saving_completes_a_chapter(saved: Path) -> None:
    notebook = nbformat.read(saved, as_version=4)
    kinds = [(cell.cell_type, *cell.metadata.get("tags", [])) for cell in notebook.cells]
    assert kinds[:4] == [("markdown",), ("markdown", "run-card"), ("code", "colab", "hide-input"), ("markdown",)]
    assert notebook.cells[2].source == notebooks.colab_cell()
    assert notebooks.address() in notebook.cells[2].source
    assert "| Privacy spent | none, the data are public |" in notebook.cells[1].source
    assert notebooks.problems(saved) == []


def test_the_run_card_tells_the_time_to_study() -> None:
    new = nbformat.v4
    solved = "```{exercise-start} A title (reading, 40 minutes)\n:label: ex-a\n```\n" + "word " * 999
    notebook = new.new_notebook(
        cells=[
            new.new_markdown_cell("# Title\n" + "word " * 3599 + "$x + unread$ 12\n$$\na = b\n$$ (eq-a)\n"),
            new.new_code_cell("a = 1\n\n" * 78),
            new.new_code_cell("a = 1\n" * 600, metadata={"tags": ["hide-input"]}),
            new.new_markdown_cell(solved + "\n```{exercise-end}\n```\n"),
            new.new_markdown_cell("````{solution-start} ex-a\n:class: dropdown\n````"),
            new.new_code_cell("a = 1\n" * 600),
            new.new_markdown_cell("````{solution-end}\n````"),
        ]
    )
    # 3600 words in 30 minutes, one formula in 2, 78 lines in 13.
    assert notebooks.study(notebook) == {"reading": "about 45 min", "exercises": "45 min"}
    notebook.cells[1].outputs = [new.new_output("display_data", {"text/markdown": "word " * 3600})]
    assert notebooks.study(notebook)["reading"] == "about 1 h 15 min"
    assert [notebooks.hours(minutes) for minutes in (1, 60, 100)] == ["15 min", "1 h", "1 h 45 min"]


def test_saving_and_executing_again_give_the_same_bytes(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    notebooks.finish(nbformat.read(saved, as_version=4), saved, None)
    assert saved.read_bytes() == before
    monkeypatch.setattr(notebooks, "BOOK", saved.parent)
    notebooks.save(saved.with_suffix(".md"))
    assert saved.read_bytes() == before


def test_a_twin_and_its_notebook_are_the_same_text(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "TEXT", tmp_path)
    before = [(cell.cell_type, cell.source) for cell in nbformat.read(saved, as_version=4).cells]
    notebooks.edit(saved)
    monkeypatch.setattr(notebooks, "BOOK", tmp_path)
    monkeypatch.setattr(notebooks, "execute", lambda notebook, name: (0, 0))
    again = notebooks.save(tmp_path / "01_x.md")
    assert [(cell.cell_type, cell.source) for cell in nbformat.read(again, as_version=4).cells] == before


def test_editing_keeps_unsaved_changes(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebooks, "TEXT", tmp_path)
    notebooks.edit(saved)
    notebooks.edit(saved)
    (tmp_path / "01_x.md").write_text("changed")
    with pytest.raises(notebooks.NotebookError, match="--force"):
        notebooks.edit(saved)
    notebooks.edit(saved, force=True)
    assert (tmp_path / "01_x.md").read_text() != "changed"


@pytest.mark.parametrize(
    ("code", "message"),
    [("1 / 0", "ZeroDivisionError"), ("import sys; print('x', file=sys.stderr)", "stderr")],
)
def test_a_chapter_that_fails_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(notebooks, "BOOK", tmp_path)
    (tmp_path / "01_x.md").write_text(HEADER + f"# T\n\n```{{code-cell}}\n{code}\n```\n")
    with pytest.raises(notebooks.NotebookError, match=message):
        notebooks.save(tmp_path / "01_x.md")
    assert not (tmp_path / "01_x.ipynb").exists()


def first(notebook: NotebookNode, text: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if text in cell.source)


def edited(old: str, new: str) -> Callable[[NotebookNode], Any]:
    def change(notebook: NotebookNode) -> None:
        cell = first(notebook, old)
        cell.source = cell.source.replace(old, new)

    return change


def stderr(notebook: NotebookNode) -> None:
    first(notebook, "def double").outputs = [nbformat.v4.new_output("stream", name="stderr", text="careful")]


def error(notebook: NotebookNode) -> None:
    first(notebook, "def double").outputs = [nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]


BREAKAGES: dict[str, Callable[[NotebookNode], Any]] = {
    "the first cell is not": lambda notebook: notebook.cells.pop(0),
    "not stored executed in order": lambda notebook: first(notebook, "plt").update(execution_count=9),
    "not the Colab cell": edited("--quiet", "--upgrade"),
    "no *You need*": edited("*You need*: nothing", "Read on"),
    "no run card": lambda notebook: notebook.cells.pop(1),
    "study of an older text": edited("about 15 min", "about 2 h"),
    "an absolute path": edited("return 2", "open('/home/me/x'); return 2"),
    "ends in `;`": edited("return 2 * x", "return 2 * x;"),
    "stored output is an error": error,
    "output on stderr": stderr,
    "a memory address": edited("return 2", "# <object at 0x7f00aa11bb22>\n    return 2"),
    "without alt text": lambda notebook: first(notebook, "plt").metadata.mystnb.image.update(alt="line"),
    "without a caption": lambda notebook: first(notebook, "plt").metadata.mystnb.pop("figure"),
    "more than one figure": lambda notebook: first(notebook, "plt").outputs.extend(first(notebook, "plt").outputs),
    "2 self-checks": edited("```{admonition} Check yourself 3", "```{admonition} Look"),
    "not numbered in order: 1, 4, 3": edited("yourself 2\n", "yourself 4\n"),
    "not numbered in order: 1, , 3": edited("yourself 2\n", "yourself\n"),
    "self-check 1: not of class": edited("yourself 1\n:class: dropdown", "yourself 1\n:class: tip"),
    "self-check 2: not of class": edited(
        "yourself 2\n:class: dropdown\n**Question.**", "yourself 2\n:class: dropdown\n**Q.**"
    ),
    "self-check 3: not of class": edited(
        "**Answer.** Because it is.\n```\n\n## Exercises", "It is.\n```\n\n## Exercises"
    ),
    "3 exercises": edited("```{exercise-start} Show it (reading, 5 minutes)\n:label: ex-0", "```{note}"),
    "must end in (kind, N minutes)": edited("(pencil, 5 minutes)", "(pencil)"),
    "the kind one of": edited("(proof and coding, 5", "(proof and fun, 5"),
    "no exercise of the kind reading": edited("(reading, 5", "(pencil, 5"),
    "no exercise of the kind research": edited("(research, 5", "(coding, 5"),
    "no solution": edited("solution-start} ex-2", "solution-start} ex-9"),
}


@pytest.mark.parametrize("problem", BREAKAGES)
def test_each_rule_is_checked(saved: Path, tmp_path: Path, problem: str) -> None:
    notebook = nbformat.read(saved, as_version=4)
    BREAKAGES[problem](notebook)
    nbformat.write(notebook, tmp_path / "01_x.ipynb")
    assert problem in "\n".join(notebooks.problems(tmp_path / "01_x.ipynb"))

"""The index of exercises lists exactly the exercises of the chapters, each with its kind and minutes."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from built_site import SITE, need_site
from sphinx.errors import ExtensionError
from test_site_links import Page

from _ext import exercise_index
from tools import notebooks

TOC = Path(__file__).parents[1] / "_toc.yml"
ROW = re.compile(r"^\| \{ref\}`(.+) <(\S+)>` \| ([a-z ]+) \| (\d+) \|$", re.MULTILINE)


def announced(path: Path) -> list[tuple[str, str, str, str]]:
    """Title, label, kind and minutes of a chapter's exercises, line by line, another way than the index finds them."""
    found = []
    for cell in nbformat.read(path, as_version=4).cells:
        lines = cell.source.splitlines() if cell.cell_type == "markdown" else []
        for number, line in enumerate(lines):
            if "{exercise" in line and "{exercise-end}" not in line:
                title, effort = line.split("} ", 1)[1].rstrip(")").rsplit(" (", 1)
                kind, minutes = effort.rsplit(", ", 1)
                label = lines[number + 1].removeprefix(":label: ")
                found.append((title, label, kind, minutes.removesuffix(" minutes")))
    return found


def test_the_index_lists_exactly_the_exercises_of_the_notebooks() -> None:
    expected = [exercise for path in notebooks.chapters() for exercise in announced(path)]
    assert len(expected) >= 4 * len(notebooks.chapters())
    assert ROW.findall(exercise_index.index(TOC)) == expected


def test_the_totals_add_up() -> None:
    text = exercise_index.index(TOC)
    for path in notebooks.chapters():
        minutes = [int(exercise[3]) for exercise in announced(path)]
        section = text.split(f" </book/{path.stem}>`")[1].split("###")[0]
        assert f"| *all {len(minutes)}* | | *{sum(minutes)}* |" in section
    assert f"There are {len(ROW.findall(text))} exercises in {len(notebooks.chapters())} chapters" in text
    hours, rest = divmod(sum(int(row[3]) for row in ROW.findall(text)), 60)
    assert f"take {hours} h {rest} min." in text


@pytest.mark.site
def test_the_page_links_to_every_exercise() -> None:
    need_site()
    links = [urlsplit(link) for link in Page((SITE / "book" / "exercises.html").read_text()).links]
    found = [(Path(link.path).stem, link.fragment) for link in links if link.fragment.startswith("ex-")]
    assert found == [(path.stem, label) for path in notebooks.chapters() for _, label, _, _ in announced(path)]


def a_book(folder: Path, *cells: str) -> Path:
    """A book of one chapter with these Markdown cells, and of one page that is missing; its table of contents."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(cell) for cell in ("# Noise", *cells)])
    nbformat.write(notebook, folder / "01_noise.ipynb")
    toc = folder / "_toc.yml"
    toc.write_text("parts:\n- caption: One\n  chapters:\n  - file: 01_noise\n  - file: 02_gone\n")
    return toc


FIRST = "Text.\n\n```{exercise-start} Add it (coding, 20 minutes)\n:label: ex-add\n```"
SECOND = "````{exercise-start} Why (and when)? (pencil and coding, 45 minutes)\n:label: ex-why\n````"


def test_a_small_book(tmp_path: Path) -> None:
    assert exercise_index.index(a_book(tmp_path, FIRST, SECOND)) == (
        "There are 2 exercises in 1 chapters, and together they take 1 h 5 min.\n\n"
        "## One\n\n"
        "### {doc}`Noise </01_noise>`\n\n"
        "| Exercise | Kind | Minutes |\n| :--- | :--- | ---: |\n"
        "| {ref}`Add it <ex-add>` | coding | 20 |\n"
        "| {ref}`Why (and when)? <ex-why>` | pencil and coding | 45 |\n"
        "| *all 2* | | *65* |\n"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        FIRST.replace(", 20 minutes", ""),
        FIRST.replace("20", "some"),
        FIRST.replace(":label: ex-add", ":class: dropdown"),
        FIRST.replace("exercise-start} Add it (coding, 20 minutes)", "exercise}"),
    ],
)
def test_an_exercise_that_would_be_lost_stops_the_build(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ExtensionError, match=r"01_noise\.ipynb: `"):
        exercise_index.index(a_book(tmp_path, wrong, SECOND))

"""Student versions are made, the check of the kit can fail, and grading survives what students hand in."""

import csv
import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbformat import NotebookNode

from tools import course, grading, kit
from tools.notebooks import colab_cell, tagged

pytestmark = pytest.mark.timeout(900)  # the limits of the batch count processor time, which a busy machine stretches

# A small assignment: given cells, three tasks, a question that is graded by hand.
TWIN = """---
dpivon:
  minutes: 10
  outcomes: [count]
kernelspec: {display_name: Python 3, language: python, name: python3}
---

# Small

You can count to $\\infty$. About 10 minutes; 12 points.

```{code-cell}
---
nbgrader: {grade_id: setup, locked: true}
---
# Given.
ONE = 1
```
"""
TASK = """
## Task: {name} (2 points, 2 minutes)

```{{code-cell}}
---
nbgrader: {{grade_id: {name}, solution: true}}
---
def {name}(x):
    ### BEGIN SOLUTION
    return x + {n} * ONE
    ### END SOLUTION
```

```{{code-cell}}
---
nbgrader: {{grade: true, grade_id: test-{name}, locked: true, points: 2}}
---
# Test of {name}
def test_{name}():
    assert {name}(0) == {n}, f"zero and {n} is {n}, not {{{name}(0)}}"
    ### BEGIN HIDDEN TESTS
    for x in range(1, 40):
        assert {name}(x) == x + {n}, f"{{x}} and {n} is {{x + {n}}}"
    ### END HIDDEN TESTS


test_{name}()
```
"""
QUESTION = """
## Why? (6 points, 4 minutes)

+++ {"nbgrader": {"grade": true, "grade_id": "why", "points": 6, "solution": true}}

### BEGIN SOLUTION
Because.
### END SOLUTION
"""
TASKS = ("first", "second", "third")
ANSWERS = {
    name: {
        "right": [{"how": "backwards", "code": f"def {name}(x):\n    return ONE * {n} + x"}],
        "wrong": [
            {"mistake": "nothing", "says": f"and {n} is {n}", "code": f"def {name}(x):\n    return x"},
            {"mistake": "twice", "says": f"zero and {n}", "code": f"def {name}(x):\n    return x + 2 * {n}"},
            {"mistake": "only at zero", "says": f"1 and {n}", "code": f"def {name}(x):\n    return {n}"},
        ],
    }
    for n, name in enumerate(TASKS, start=1)
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    """The kit's folder with the small assignment in it, instead of the book's."""
    folder = tmp_path_factory.mktemp("kit")
    text = TWIN + "".join(TASK.format(name=name, n=n) for n, name in enumerate(TASKS, start=1)) + QUESTION
    (folder / "00_small.md").write_text(text)
    (folder / "00_small.answers.yml").write_text(yaml.safe_dump(ANSWERS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(course, "KIT", folder)
        patch.setattr(kit, "KIT", folder)
        patch.setattr(course, "TEXT", folder)
        course.save("00_small")
        yield folder


@pytest.fixture(scope="module")
def student_version(small: Path) -> NotebookNode:
    course.release("00_small", small / "release")
    return nbformat.read(small / "release" / "00_small.ipynb", as_version=4)


def named(notebook: NotebookNode, name: str) -> NotebookNode:
    return next(cell for cell in notebook.cells if course.mark(cell).get("grade_id") == name)


# Sources and student versions


def test_the_student_version_has_stubs_and_no_hidden_tests(student_version: NotebookNode) -> None:
    shown = "\n".join(cell.source for cell in student_version.cells)
    assert shown.count("raise NotImplementedError()") == 3
    assert "range(1, 40)" not in shown
    assert "Because" not in shown
    assert tagged(student_version, "colab").source == colab_cell()


def test_a_twin_and_its_assignment_are_the_same(small: Path) -> None:
    before = (small / "00_small.ipynb").read_bytes()
    course.edit("00_small")
    course.save("00_small")
    assert (small / "00_small.ipynb").read_bytes() == before
    assert "schema_version" not in (small / "00_small.md").read_text()  # only what is not usual


# The check of the kit can fail


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answers: answers["first"]["wrong"].pop(), "1 right and 2 wrong answers are listed"),
        (lambda answers: answers["first"]["right"][0].update(code="first = 5"), "a right answer, backwards, fails"),
        (lambda answers: answers["first"]["wrong"][0].update(code="first = ONE.__add__"), "a wrong answer passes"),
        (lambda answers: answers["first"]["wrong"][0].update(says="seven"), "the test does not say 'seven'"),
        (lambda answers: answers["first"]["wrong"][0].update(code="first = 1 / 0"), "it says ZeroDivisionError"),
        (lambda answers: answers.update(fourth={}), "'fourth', which is no task"),
    ],
)
def test_answers_are_checked(small: Path, change: Callable[[Any], Any], message: str) -> None:
    answers = deepcopy(ANSWERS)
    change(answers)
    (small / "00_small.answers.yml").write_text(yaml.safe_dump(answers))
    try:
        assert message in "\n".join(quick_check())
    finally:
        (small / "00_small.answers.yml").write_text(yaml.safe_dump(ANSWERS))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return x + 1 * ONE", "return x + 2 * ONE", "the solution fails"),
        ("assert first(0) == 1", "return\n    assert first(0) == 1", "the stub passes"),
        ("### BEGIN HIDDEN TESTS", "# hidden", "there are no hidden tests"),
        ("(2 points, 2 minutes)", "(3 points, 2 minutes)", "the headings state the points"),
        ("12 points", "13 points", "should say: About 10 minutes; 12 points"),
        ("You can count", "You can read", "lacks the outcome: count"),
    ],
)
@pytest.mark.usefixtures("small")
def test_sources_are_checked(old: str, new: str, message: str) -> None:
    assert message in "\n".join(quick_check(lambda source: source.replace(old, new)))


def quick_check(change: Callable[[str], str] = lambda source: source) -> list[str]:
    """As `kit.check`, of a changed source and the student version of the unchanged one, which takes long."""
    notebook, stubs = course.source("00_small"), course.source("00_small")
    for cell in stubs.cells:
        cell.source = kit.HIDDEN.sub("", cell.source)
        if course.mark(cell).get("solution"):
            cell.source = f"def {course.mark(cell)['grade_id']}(x):\n    raise NotImplementedError()"
    for cell in notebook.cells:
        cell.source = change(cell.source)
    answers = yaml.safe_load((kit.KIT / "00_small.answers.yml").read_text())
    return kit.problems(notebook, stubs, answers)


@pytest.mark.usefixtures("small")
def test_a_hidden_test_that_students_see_is_found() -> None:
    notebook = course.source("00_small")
    assert "shows a hidden test" in "\n".join(kit.check_texts(notebook, notebook))


# Grading, in one batch


def solved(notebook: NotebookNode) -> NotebookNode:
    for n, name in enumerate(TASKS, start=1):
        named(notebook, name).source = f"def {name}(x):\n    return {n} + x"
    return notebook


def colab(notebook: NotebookNode) -> None:
    """No ids, no metadata, extra cells, a solution in a new cell after its stub, old outputs."""
    notebook.cells[2].metadata["colab"] = {"base_uri": "elsewhere"}
    for cell in notebook.cells:
        cell.pop("id", None)
        cell.metadata = {"id": "x" * 12}
        if cell.cell_type == "code":
            cell.outputs = [nbformat.v4.new_output("error", ename="E", evalue="old", traceback=["old"])]
    place = next(i for i, cell in enumerate(notebook.cells) if cell.source.startswith("def third"))
    notebook.cells[place].source = "helper = 3\ndef third(x):\n    raise NotImplementedError()"
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell("def third(x):\n    return helper + x"))
    notebook.cells.insert(0, nbformat.v4.new_code_cell("from google.colab import drive"))
    notebook.nbformat_minor = 2


def missing(notebook: NotebookNode) -> None:
    """No given cell, no first task and test; and tests of the others that always pass."""
    gone = ("setup", "first", "test-first")
    notebook.cells = [cell for cell in notebook.cells if course.mark(cell).get("grade_id") not in gone]
    named(notebook, "second").source = "def second(x):\n    return 7"
    named(notebook, "test-second").source = "print('all tests passed')"
    named(notebook, "test-third").source = "pass"
    named(notebook, "test-third").metadata.nbgrader.points = 100


def stops(first: str, second: str) -> Callable[[NotebookNode], None]:
    def change(notebook: NotebookNode) -> None:
        named(notebook, "first").source = first
        named(notebook, "second").source = second

    return change


def leans(first: str, third: str) -> Callable[[NotebookNode], None]:
    """The first task is wrong, and others call it."""

    def change(notebook: NotebookNode) -> None:
        named(notebook, "first").source = first
        named(notebook, "second").source = "def second(x):\n    return first(x) + ONE"
        named(notebook, "third").source = third

    return change


SUBMISSIONS: dict[str, Callable[[NotebookNode], None]] = {
    "right": lambda notebook: None,
    "colab": colab,
    "missing": missing,
    "endless": leans("def first(x):\n    while True: pass", "def third(x):\n    return 3 + x"),
    "greedy": stops("def first(x):\n    return len(bytearray(10**10))", "def second(x) return x + 2"),
    "leaning": leans("import sys\nsys.exit(0)", "def third(x):\n    return first(x) + 3"),
    "deadly": stops("import os\nos._exit(0)", "exit()\nwhile True: print('x' * 10**4)"),
}


@pytest.fixture(scope="module")
def batch(small: Path, student_version: NotebookNode) -> dict[str, dict[str, str]]:
    """The graded batch: a line of the CSV for each student."""
    folder = small / "submissions"
    for student, change in SUBMISSIONS.items():
        notebook = solved(deepcopy(student_version))
        change(notebook)
        put(folder / student / "00_small.ipynb", json.dumps(notebook))
    answered = deepcopy(student_version)
    named(answered, "why").source = "Because of this."
    put(folder / "renamed" / "Copy of 00_small.ipynb", nbformat.writes(answered))
    put(folder / "broken" / "00_small.ipynb", '{"cells": [')
    put(folder / "absent" / "essay.txt", "I forgot.")
    put(folder / "packed.zip", "PK")
    put(folder / "two" / "a.ipynb", "{}")
    put(folder / "two" / "b.ipynb", "{}")
    put(folder / ".hidden" / "00_small.ipynb", "{}")
    put(folder / "flat [1].ipynb", "[]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading, "PATIENCE", 100)  # however busy the machine
        grading.grade("00_small", folder, small / "out", grading.Limits(cell=1, notebook=300, memory=2))
    with open(small / "out" / "grades.csv") as file:
        return {row["student"]: row for row in csv.DictReader(file)}


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("student", "points"),
    [
        ("right", (2, 2, 2)),
        ("colab", (2, 2, 2)),
        ("missing", (0, 0, 2)),
        ("leaning", (0, 2, 0)),
        ("endless", (0, 2, 2)),
        ("greedy", (0, 0, 2)),
        ("deadly", (0, 0, 2)),
        ("renamed", (0, 0, 0)),
    ],
)
def test_a_submission_is_graded_as_far_as_possible(
    batch: dict[str, dict[str, str]], student: str, points: tuple[float, ...]
) -> None:
    row = batch[student]
    assert row["status"] == "graded", row
    assert tuple(float(row[f"test-{name}"]) for name in TASKS) == points
    assert float(row["points"]) == sum(points)
    assert float(row["of"]) == 12


@pytest.mark.parametrize(
    ("student", "status", "note"),
    [
        ("absent", "missing", "expected 00_small.ipynb, found essay.txt"),
        ("packed", "unreadable", "packed.zip is no notebook; ask for the file again"),
        ("two", "missing", "expected 00_small.ipynb, found a.ipynb, b.ipynb"),
        ("broken", "unreadable", "00_small.ipynb is no notebook"),
        ("flat [1]", "unreadable", "is no notebook"),
        ("renamed", "graded", "expected 00_small.ipynb, took Copy of 00_small.ipynb"),
        ("missing", "graded", "cells put back: setup, first, test-first"),
        ("endless", "graded", "test-first had not ended after 1 seconds of processor time, and was stopped"),
        ("leaning", "graded", "passed with the book's solutions of the tasks before: test-second"),
        ("deadly", "graded", "first ended Python itself"),
        ("right", "graded", ""),
        ("colab", "graded", ""),
    ],
)
def test_the_table_says_what_was_odd(batch: dict[str, dict[str, str]], student: str, status: str, note: str) -> None:
    assert batch[student]["status"] == status
    assert note in batch[student]["notes"]
    assert bool(note) == bool(batch[student]["notes"])


def test_an_answer_is_left_to_be_graded_by_hand_unless_there_is_none(batch: dict[str, dict[str, str]]) -> None:
    assert (batch["renamed"]["by hand"], batch["right"]["by hand"]) == ("6.0", "0")


def test_nobody_is_left_out(batch: dict[str, dict[str, str]]) -> None:
    assert sorted(batch) == sorted([*SUBMISSIONS, "renamed", "broken", "absent", "two", "flat [1]", "packed"])


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ("endless", "This cell had not ended after 1 seconds of processor time"),
        ("endless", "This passes with the book"),
        ("leaning", "zero and 3 is 3, not 4"),
        ("leaning", "SystemExit"),
        ("greedy", "MemoryError"),
        ("greedy", "SyntaxError"),
        ("deadly", "This cell ended Python itself"),
        ("missing", "zero and 2 is 2, not 7"),
        ("renamed", "NotImplementedError"),
    ],
)
def test_the_feedback_says_what_went_wrong(
    small: Path, batch: dict[str, dict[str, str]], student: str, message: str
) -> None:
    assert message in (small / "out" / "feedback" / f"{student}.html").read_text()


def test_the_feedback_keeps_hidden_tests_hidden(small: Path, batch: dict[str, dict[str, str]]) -> None:
    for page in (small / "out" / "feedback").glob("*.html"):
        text = re.sub("<[^>]*>", "", page.read_text())
        assert "def test_third():" in text, page.name
        assert "range(1, 40)" not in text, page.name


def test_a_feedback_page_names_the_student_and_the_tests(small: Path, batch: dict[str, dict[str, str]]) -> None:
    text = (small / "out" / "feedback" / "right.html").read_text()
    assert "<title>right: 00_small</title>" in text
    assert "<h4>right: 00_small (Score: 6.0 / 12.0)</h4>" in text
    assert [f'<a href="#test-{name}">test-{name}</a>' in text for name in TASKS] == [True] * 3
    assert "Test cell" not in text


def test_a_feedback_page_brings_its_mathjax(small: Path, batch: dict[str, dict[str, str]]) -> None:
    text = (small / "out" / "feedback" / "right.html").read_text()
    assert [(small / "out" / "feedback" / file).is_file() for file in re.findall(r'src="([^"]+)"', text)] == [True]
    assert r'[["$", "$"], ["\\(", "\\)"]]' in text


def test_results_are_not_overwritten(small: Path, batch: dict[str, dict[str, str]]) -> None:
    with pytest.raises(course.KitError, match="exists; choose another --to"):
        grading.grade("00_small", small / "submissions", small / "out")


def test_a_submission_has_an_end(small: Path, student_version: NotebookNode, tmp_path: Path) -> None:
    notebook = solved(deepcopy(student_version))
    named(notebook, "second").source = "while True: pass"
    put(tmp_path / "batch" / "slow.ipynb", json.dumps(notebook))
    (row,) = grading.grade("00_small", tmp_path / "batch", tmp_path / "out", grading.Limits(notebook=10))
    assert row.status == "graded"
    assert row.points["test-third"] == 0
    assert row.notes == ["second was running when the 10 seconds for this notebook were over"]
    assert "The 10 seconds for this notebook were over" in (tmp_path / "out" / "feedback" / "slow.html").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch", "out"]


def test_waiting_is_no_work_but_has_an_end_too(small: Path, student_version: NotebookNode, tmp_path: Path) -> None:
    """A cell that waits, as on a busy machine, gets more than its seconds of processor time, and not for ever."""
    notebook = solved(deepcopy(student_version))
    named(notebook, "first").source += "\nimport time\ntime.sleep(1.5)"
    named(notebook, "second").source += "\ntime.sleep(1000)"
    put(tmp_path / "batch" / "sleepy.ipynb", json.dumps(notebook))
    (row,) = grading.grade("00_small", tmp_path / "batch", tmp_path / "out", grading.Limits(cell=1))
    assert [row.points[f"test-{name}"] for name in TASKS] == [2, 0, 2]
    assert row.notes == ["second had not ended after 5 seconds, and was stopped"]


@pytest.mark.parametrize(
    ("limits", "given", "note"),
    [
        (grading.Limits(cell=1), "while True: pass", "setup had not ended after 1 seconds of processor time"),
        (grading.Limits(memory=0.5), "x = bytearray(10**9)", "given cells failed: setup; grade again, or raise"),
    ],
)
def test_a_given_cell_that_was_stopped_is_no_low_grade(
    small: Path, student_version: NotebookNode, tmp_path: Path, limits: grading.Limits, given: str, note: str
) -> None:
    notebook = solved(deepcopy(student_version))
    put(tmp_path / "batch" / "unlucky.ipynb", json.dumps(notebook))
    slow = course.source("00_small")
    named(slow, "setup").source += f"\n{given}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading, "PATIENCE", 100)
        patch.setattr(course, "source", lambda _: deepcopy(slow))
        (row,) = grading.grade("00_small", tmp_path / "batch", tmp_path / "out", limits)
    assert row.status == "failed"
    assert note in "; ".join(row.notes)
    assert row.points == {}
    assert not (tmp_path / "out" / "feedback" / "unlucky.html").exists()


def test_a_folder_without_submissions_is_named(tmp_path: Path, small: Path) -> None:
    with pytest.raises(course.KitError, match="there is no folder"):
        grading.grade("00_small", tmp_path / "none", tmp_path / "out")
    with pytest.raises(course.KitError, match="holds no student's folder"):
        grading.grade("00_small", tmp_path, tmp_path / "out")


# What is a submission


@pytest.mark.parametrize(
    ("files", "student", "taken", "note"),
    [
        (["fay.IPYNB"], "fay", "fay.IPYNB", ""),
        (["eve.zip"], "eve", "eve.zip", ""),
        (["eve/a.ipynb", "eve.zip"], "eve.zip", "eve.zip", ""),
        (["ann/hw.ipynb"], "ann", "ann/hw.ipynb", ""),
        (["ann/HW.ipynb"], "ann", "ann/HW.ipynb", "expected hw.ipynb, took HW.ipynb"),
        (["ann/hw.IPYNB"], "ann", "ann/hw.IPYNB", "expected hw.ipynb, took hw.IPYNB"),
        (["ann/week 1/b/hw.ipynb"], "ann", "ann/week 1/b/hw.ipynb", "expected hw.ipynb, took week 1/b/hw.ipynb"),
        (["ann/hw.ipynb", "ann/o/hw.ipynb"], "ann", "ann/hw.ipynb", "expected hw.ipynb, took hw.ipynb, not o/hw.ipynb"),
        (["ann/hw.ipynb", "ann/o/my hw.ipynb"], "ann", "ann/hw.ipynb", ""),
        (["ann/hw.ipynb", "ann/.ipynb_checkpoints/hw.ipynb"], "ann", "ann/hw.ipynb", ""),
        (["ann/.ipynb_checkpoints/hw.ipynb"], "ann", None, "expected hw.ipynb, found nothing"),
        (["ann/a/hw.ipynb", "ann/b/hw.ipynb"], "ann", None, "expected hw.ipynb, found a/hw.ipynb, b/hw.ipynb"),
        (["ann/hw.zip"], "ann", None, "expected hw.ipynb, found hw.zip"),
    ],
)
def test_submissions_are_found(tmp_path: Path, files: list[str], student: str, taken: str | None, note: str) -> None:
    for file in files:
        put(tmp_path / file, "{}")
    found = {name: rest for name, *rest in grading.submissions(tmp_path, "hw")}
    assert found[student] == [taken and tmp_path / taken, [note] if note else []]


def test_only_notebooks_are_loaded(tmp_path: Path) -> None:
    text = nbformat.writes(nbformat.v4.new_notebook())
    put(tmp_path / "fay.IPYNB", text)
    put(tmp_path / "gus.txt", text)
    assert grading.load(tmp_path / "fay.IPYNB").cells == []
    with pytest.raises(ValueError, match=r"gus\.txt is no notebook"):
        grading.load(tmp_path / "gus.txt")


# Mending


def test_mending_keeps_the_student_s_order_and_cells(student_version: NotebookNode, small: Path) -> None:
    notebook = solved(deepcopy(student_version))
    notebook.cells.insert(3, nbformat.v4.new_code_cell("extra = 1"))
    mended, gone = grading.mend(notebook, student_version)
    assert gone == []
    assert [cell.source for cell in mended.cells] == [cell.source for cell in notebook.cells]


def test_of_two_cells_with_one_id_the_last_counts(student_version: NotebookNode) -> None:
    notebook = deepcopy(student_version)
    place = notebook.cells.index(named(notebook, "first"))
    copy = deepcopy(notebook.cells[place])
    copy.source = "def first(x):\n    return x + 1"
    notebook.cells.insert(place + 1, copy)
    mended, _ = grading.mend(notebook, student_version)
    marked = [cell.source for cell in mended.cells if course.mark(cell).get("grade_id") == "first"]
    assert marked == [copy.source]

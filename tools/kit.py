"""Does each test of an assignment catch what it should? The check of the course kit.

Beside NAME.ipynb lies NAME.answers.yml, with right answers that are written otherwise than the solution, and wrong ones
as students make them, each with words that the failing test must say:

    clip:
      right:
      - how: with a loop
        code: ...
      wrong:
      - mistake: each number is cut, not the row
        says: scale the whole row
        code: ...

All run in this process, each in a namespace of its own.
"""

import contextlib
import io
import re
import warnings
from dataclasses import dataclass
from typing import Any

import yaml
from nbformat import NotebookNode

from tools.course import KIT, KitError, course, mark, released, source

LEAST_WRONG = 3
TASK = re.compile(r"^## .*\((\d+) points?, (\d+) minutes\)$", re.MULTILINE)
HIDDEN = re.compile(r"### BEGIN HIDDEN TESTS\n(.*?)### END HIDDEN TESTS", re.DOTALL)


@dataclass(frozen=True)
class Task:
    """A solution cell, its stub, its test, and the given cells and solutions that come before."""

    name: str
    before: list[str]
    solution: str
    stub: str
    test: str


def outcome(cells: list[str]) -> Exception | None:
    """Execute cells in a new namespace; the exception that ended them, or None."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, cell in enumerate(cells):
                exec(compile(cell, f"cell {number}", "exec"), namespace)
    except Exception as error:  # whatever a wrong answer raises
        return error
    return None


def tasks(notebook: NotebookNode, student_version: NotebookNode) -> list[Task]:
    """The tasks of an assignment that tests grade, in order."""
    stubs = {mark(cell)["grade_id"]: cell.source for cell in student_version.cells if mark(cell)}
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and mark(cell)]
    before: list[str] = []
    found: list[Task] = []
    solution, at = "", 0
    for cell in code:
        notes = mark(cell)
        if notes["grade"] and not notes["solution"]:
            name = notes["grade_id"].removeprefix("test-")
            if not solution or notes["grade_id"] != f"test-{solution}":
                raise KitError(f"the cell {notes['grade_id']!r} should follow the solution cell {name!r}")
            # Between the two there may be given cells: they belong to the test.
            test = "\n".join([*before[at + 1 :], cell.source])
            found.append(Task(name, before[:at], before[at], stubs[name], test))
        else:
            if notes["solution"]:
                solution, at = notes["grade_id"], len(before)
            before.append(cell.source)
    return found


def check_task(task: Task, answers: dict[str, Any]) -> list[str]:
    """What is wrong with a task's test, a line each: it must tell right answers from wrong ones, and say how."""

    def run(answer: str) -> Exception | None:
        return outcome([*task.before, answer, task.test])

    found = []
    if error := run(task.solution):
        found.append(f"the solution fails: {error!r}")
    if run(task.stub) is None:
        found.append("the stub passes")
    if not HIDDEN.search(task.test):
        found.append("there are no hidden tests")
    right, wrong = answers.get("right", []), answers.get("wrong", [])
    if not right or len(wrong) < LEAST_WRONG:
        found.append(f"{len(right)} right and {len(wrong)} wrong answers are listed; 1 and {LEAST_WRONG} are due")
    for answer in right:
        if error := run(answer["code"]):
            found.append(f"a right answer, {answer['how']}, fails: {error!r}")
    for answer in wrong:
        error = run(answer["code"])
        if error is None:
            found.append(f"a wrong answer passes: {answer['mistake']}")
        elif not isinstance(error, AssertionError) or answer["says"] not in str(error):
            found.append(f"the test does not say {answer['says']!r} of this: {answer['mistake']}; it says {error!r}")
    return found


def check_texts(notebook: NotebookNode, student_version: NotebookNode) -> list[str]:
    """What is wrong with the points and minutes that the text states, or shows what students must not see."""
    found = []
    shown = "\n".join(cell.source for cell in student_version.cells)
    visible = "\n".join(HIDDEN.sub("", cell.source) for cell in notebook.cells)
    for cell in notebook.cells:
        for hidden in HIDDEN.findall(cell.source):
            leaks = [line for line in hidden.split("\n") if line in shown and line not in visible]
            found += [f"the student version shows a hidden test: {line.strip()}" for line in leaks]
    if "SOLUTION" in shown or "HIDDEN" in shown:
        found.append("the student version has marks of solutions or hidden tests")
    graded = [float(mark(cell)["points"]) for cell in notebook.cells if mark(cell).get("grade")]
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    stated = TASK.findall(text)
    if [float(points) for points, _ in stated] != graded:
        found.append(f"the headings state the points {[points for points, _ in stated]}, the cells have {graded}")
    facts = notebook.metadata.get("dpivon", {})
    minutes = sum(int(minutes) for _, minutes in stated)
    if f"About {minutes} minutes; {sum(graded):g} points" not in text or facts.get("minutes") != minutes:
        found.append(f"the text and metadata should say: About {minutes} minutes; {sum(graded):g} points")
    found += [f"the text lacks the outcome: {line}" for line in facts.get("outcomes", ["(none)"]) if line not in text]
    return found


def problems(notebook: NotebookNode, student_version: NotebookNode, answers: dict[str, Any]) -> list[str]:
    """All that is wrong with an assignment, a line each."""
    found = check_texts(notebook, student_version)
    listed = tasks(notebook, student_version)
    found += [f"answers are listed for {key!r}, which is no task" for key in answers.keys() - {t.name for t in listed}]
    for task in listed:
        found += [f"{task.name}: {problem}" for problem in check_task(task, answers.get(task.name, {}))]
    return found


def check(name: str) -> list[str]:
    """All that is wrong with an assignment of the kit, a line each; an empty list if nothing.

    Raises
    ------
    KitError
        there is no such assignment, or a test stands without its solution.
    """
    notebook = source(name)
    with course(name) as directory:
        student_version = released(directory)
    path = KIT / f"{name}.answers.yml"
    answers = yaml.safe_load(path.read_text()) if path.exists() else {}
    return [f"{name}: {problem}" for problem in problems(notebook, student_version, answers)]

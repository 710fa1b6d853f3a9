"""Grade notebooks that nobody has read: mended first, executed within limits, scored by nbgrader.

What a student changed outside of the solution cells counts for nothing: tests and given cells come from the source.
A cell that does not end, kills its kernel or asks for too much memory costs its own points. Nothing stops the batch.

The code runs as the user who grades. The limits are against accidents; against malice, grade in a container.
"""

import csv
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import nbformat
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from nbconvert.preprocessors import CSSHTMLHeaderPreprocessor
from nbformat import NotebookNode
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde, GenerateFeedback
from nbgrader.preprocessors import (
    AssignLatePenalties,
    CheckCellMetadata,
    ClearHiddenTests,
    Execute,
    GetGrades,
    LimitOutput,
    SaveAutoGrades,
)
from nbgrader.utils import is_grade, is_solution
from sqlalchemy.exc import SAWarning
from traitlets import Float
from traitlets.config import Config

from tools.course import KitError, course, mark, released, start

ANSI = re.compile(r"\x1b\[[0-9;]*m")
NAME = re.compile(r"^(?:async +)?(?:def|class) +(\w+)|^(\w+) *(?::[^=\n]+)?=(?!=)", re.MULTILINE)
MOST_OUTPUT = 100_000  # characters a cell

# No more memory than this (of what is written to: libraries are mapped and do not count); exit() ends nothing.
LIMIT = """\
import resource
resource.setrlimit(resource.RLIMIT_DATA, ({bytes}, {bytes}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
get_ipython().ask_exit = lambda *_: None
"""


@dataclass(frozen=True)
class Limits:
    """What one submission may use.

    Parameters
    ----------
    cell
        seconds for one cell.
    notebook
        seconds for all of them, restarts of the kernel included.
    memory
        GB of the kernel.
    """

    cell: float = 60
    notebook: float = 600
    memory: float = 4


DEFAULT = Limits()


@dataclass
class Row:
    """One line of grades.csv: who, how it went, points for each test, and what a teacher should know."""

    student: str
    status: str  # graded, missing, unreadable or failed
    points: dict[str, float] = field(default_factory=dict)
    by_hand: float = 0
    notes: list[str] = field(default_factory=list)


def defines(text: str) -> set[str]:
    """The names that a cell defines at its outermost level; of a cell with a syntax error too."""
    return {a or b for a, b in NAME.findall(text)}


def found(cell: NotebookNode, free: dict[int, NotebookNode]) -> int | None:
    """Where the cell of the student version is in a submission: by nbgrader's id, by content, by Jupyter's id.

    Colab and copying lose or repeat ids. A solution is then known by the names it defines, any other cell by its first
    line. Of several, the last counts: it is what a notebook that runs from top to bottom leaves behind.
    """
    stub, first = defines(cell.source), cell.source.strip().split("\n")[0]

    def content(other: NotebookNode) -> bool:
        return stub <= defines(other.source) if stub and is_solution(cell) else other.source.strip().startswith(first)

    rules = (
        lambda other: mark(other).get("grade_id") == mark(cell)["grade_id"],
        lambda other: not mark(other) and content(other),
        lambda other: not mark(other) and other.get("id") == cell.id,
    )
    for rule in rules:
        places = [i for i, other in free.items() if other.cell_type == cell.cell_type and rule(other)]
        if places:
            return places[-1]
    return None


def mend(submission: NotebookNode, student_version: NotebookNode) -> tuple[NotebookNode, list[str]]:
    """A new notebook of the submission's cells, in their order, with nbgrader's notes where they belong.

    Missing cells come back, each in front of the next one that is there; of a solution only an empty cell, since its
    code may stand elsewhere. Other metadata, outputs and attachments are left behind.

    Returns
    -------
    notebook, missing
        `missing` names the cells that were put back.
    """
    cells = list(submission.cells)
    places: dict[str, int] = {}
    marked = {mark(cell)["grade_id"]: cell for cell in student_version.cells if mark(cell)}
    for name, cell in marked.items():
        place = found(cell, {i: other for i, other in enumerate(cells) if i not in places.values()})
        if place is not None:
            places[name] = place
    notes = {place: mark(marked[name]) for name, place in places.items()}
    before: dict[int, list[NotebookNode]] = {i: [] for i in range(len(cells) + 1)}
    after = len(cells)
    for name, cell in reversed(marked.items()):
        if name in places:
            after = places[name]
            continue
        empty = is_solution(cell) and cell.cell_type == "code"
        text = f"# The cell {name!r} is not in this submission." if empty else cell.source
        before[after].insert(0, new_cell(cell.cell_type, text, mark(cell)))
    mended = []
    for i, cell in enumerate(cells):
        mended += [*before[i], new_cell(cell.cell_type, cell.source, notes.get(i))]
    return nbformat.v4.new_notebook(cells=mended + before[len(cells)]), [name for name in marked if name not in places]


def new_cell(kind: str, text: str, notes: dict[str, Any] | None = None) -> NotebookNode:
    make = {"code": nbformat.v4.new_code_cell, "markdown": nbformat.v4.new_markdown_cell}
    metadata = {"nbgrader": notes} if notes else {}
    return make.get(kind, nbformat.v4.new_raw_cell)(text, metadata=metadata)


class Bounded(Execute):
    """nbgrader's execution, in which a cell that does not end, or ends the kernel, costs itself only.

    Such a cell is noted, and the notebook starts again in a new kernel without it.
    """

    budget = Float(600, help="seconds for the whole notebook").tag(config=True)

    def preprocess(self, notebook: NotebookNode, resources: Any, km: Any = None) -> tuple[NotebookNode, Any]:
        """Execute every cell that can be; leave a message of its own in each that cannot, and in each failed test."""
        end = time.monotonic() + self.budget
        self.timeout_func = lambda cell: max(0.1, min(self.timeout, end - time.monotonic()))
        self.stopped: dict[int, str] = {}
        while True:
            try:
                notebook, resources = super().preprocess(notebook, resources, km)
                break
            except CellTimeoutError:
                self.stopped[self.at] = f"This cell had not ended after {self.timeout} seconds and was stopped."
            except DeadKernelError:
                self.stopped[self.at] = "This cell ended Python itself (too much memory, or os._exit) and was left out."
            if time.monotonic() > end:
                self.give_up(notebook)
                break
        for cell in filter(is_grade, notebook.cells):
            tell(cell)
        return notebook, resources

    def preprocess_cell(self, cell: NotebookNode, resources: Any, index: int) -> tuple[NotebookNode, Any]:
        """Execute a cell, or leave the message that says why it was stopped in an earlier kernel."""
        self.at, self.written = index, 0
        if index not in self.stopped:
            return super().preprocess_cell(cell, resources, index)
        cell.outputs = [error("Stopped", self.stopped[index])]
        return cell, resources

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> Any:
        """Drop what a cell prints beyond `MOST_OUTPUT`."""
        if msg["msg_type"] == "stream":
            self.written += len(msg["content"]["text"])
            if self.written > MOST_OUTPUT:
                return None
        return super().process_message(msg, cell, cell_index)

    def give_up(self, notebook: NotebookNode) -> None:
        """Say in every cell from the one that was running on that the time is over."""
        for cell in notebook.cells[self.at :]:
            if cell.cell_type == "code":
                cell.outputs = [error("Stopped", f"The {self.budget:.0f} seconds for this notebook were over.")]


def error(name: str, message: str, traceback: list[str] | None = None) -> NotebookNode:
    lines = [f"{name}: {message}"] if traceback is None else traceback
    return nbformat.v4.new_output("error", ename=name, evalue=message, traceback=lines)


def tell(cell: NotebookNode) -> None:
    """Of a test's outputs keep the error, without the lines of the test; what it printed or warned is no failure."""
    here = f"Cell In[{cell.get('execution_count')}]"
    cell.outputs = [
        error(
            output.ename,
            output.evalue,
            [f"{output.ename}: {output.evalue}"]
            if output.ename == "AssertionError"
            else [frame for frame in output.traceback if here not in ANSI.sub("", frame)],
        )
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]


class Scoring(Autograde):
    """nbgrader's grading, with `Bounded` execution."""

    autograde_preprocessors: ClassVar = [Bounded, LimitOutput, SaveAutoGrades, AssignLatePenalties, CheckCellMetadata]


class Feedback(GenerateFeedback):
    """nbgrader's feedback page, without the hidden tests."""

    preprocessors: ClassVar = [GetGrades, ClearHiddenTests, CSSHTMLHeaderPreprocessor]


def settings(limits: Limits) -> Config:
    config = Config()
    config.Bounded.timeout = max(1, round(limits.cell))
    config.Bounded.budget = limits.notebook
    config.Bounded.interrupt_on_timeout = False
    config.Bounded.shutdown_kernel = "immediate"
    config.Bounded.raise_on_iopub_timeout = False
    lines = LIMIT.format(bytes=int(limits.memory * 1e9)).strip().replace("\n", "; ")
    config.Bounded.extra_arguments = [
        "--log-level=ERROR",
        "--HistoryManager.hist_file=:memory:",
        f"--IPKernelApp.exec_lines={lines}",
    ]
    return config


def submissions(folder: Path, name: str) -> Iterator[tuple[str, Path | None, list[str]]]:
    """Each student, the notebook that is the submission, and what was odd about it.

    A student is a folder in `folder`, or a notebook there. Hidden ones are none.
    """
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield entry.name, *chosen(sorted(path for path in entry.glob("*.ipynb") if path.name[0] != "."), name)
        elif entry.suffix == ".ipynb":
            yield entry.stem, entry, []


def chosen(files: list[Path], name: str) -> tuple[Path | None, list[str]]:
    """Of a student's notebooks the submission: by its name, else by part of its name, else the only one."""
    there = ", ".join(path.name for path in files) or "no notebook"
    exact = [path for path in files if path.stem == name]
    similar = [path for path in files if name in path.stem]
    for some in (exact, similar, files):
        if len(some) == 1:
            return some[0], [] if exact else [f"renamed: expected {name}.ipynb, took {some[0].name}"]
    return None, [f"expected {name}.ipynb, found {there}"]


def load(path: Path) -> NotebookNode:
    """A notebook of any version and state; ValueError says why it is none."""
    try:
        return nbformat.convert(nbformat.reader.reads(path.read_text(encoding="utf-8-sig", errors="replace")), 4)
    except Exception as error:  # whatever is in the file: the batch goes on
        raise ValueError(f"{path.name} is no notebook ({type(error).__name__}: {str(error)[:80]})") from error


def grade_one(directory: Any, identity: str, row: Row, path: Path, limits: Limits, out: Path) -> None:
    """Grade one submission into `row`, and write its feedback page to `out`."""
    name = directory.assignment_id
    try:
        notebook, missing = mend(load(path), released(directory))
    except ValueError as error:
        row.status, row.notes = "unreadable", [*row.notes, f"{error}; ask for the file again"]
        return
    if missing:
        row.notes.append(f"cells put back: {', '.join(missing)}")
    place = Path(directory.root) / "submitted" / identity / name
    place.mkdir(parents=True)
    nbformat.write(notebook, place / f"{name}.ipynb")
    directory.student_id = identity
    start(Scoring(coursedir=directory, config=settings(limits)))
    with Gradebook(directory.db_url) as book:
        result = book.find_submission_notebook(name, name, identity)
        for given in sorted(result.grades, key=lambda given: given.name):
            if given.needs_manual_grade:
                row.by_hand += given.max_score
            else:
                row.points[given.name] = given.score
    row.status = "graded"
    start(Feedback(coursedir=directory))
    page = Path(directory.root) / "feedback" / identity / name / f"{name}.html"
    page.replace(out / f"{row.student}.html")


def grade(name: str, folder: Path, out: Path, limits: Limits = DEFAULT) -> list[Row]:
    """Grade all submissions of an assignment in a folder; write `out`/grades.csv and `out`/feedback/STUDENT.html.

    Raises
    ------
    KitError
        there is no such assignment or folder, no submission in it, or `out` exists already.
    """
    if not folder.is_dir():
        raise KitError(f"there is no folder {folder}")
    if out.exists():
        raise KitError(f"{out} exists; choose another --to, or remove it")
    found = list(submissions(folder, name))
    if not found:
        raise KitError(f"{folder} holds no student's folder and no notebook")
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=out.parent) as folder_of_results,
        course(name) as directory,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", SAWarning)  # of nbgrader's own queries
        results = Path(folder_of_results) / "results"
        (results / "feedback").mkdir(parents=True)
        for number, (student, path, notes) in enumerate(found):
            row = Row(student, "missing", notes=notes)
            rows.append(row)
            try:
                if path is not None:
                    grade_one(directory, f"s{number}", row, path, limits, results / "feedback")
            except Exception as error:  # nobody's submission stops the others'
                row.status, row.notes = "failed", [*row.notes, f"could not be graded: {type(error).__name__}: {error}"]
            print(f"{student}: {row.status}, {sum(row.points.values()):g} points", *row.notes, sep="; ")
        table(results / "grades.csv", name, rows, points(released(directory)))
        results.replace(out)
    return rows


def points(student_version: NotebookNode) -> dict[str, float]:
    """The points of each test and of each answer that is graded by hand."""
    return {mark(cell)["grade_id"]: float(mark(cell)["points"]) for cell in student_version.cells if is_grade(cell)}


def table(path: Path, name: str, rows: list[Row], most: dict[str, float]) -> None:
    """Write the grades as CSV, a line for each student."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["student", "assignment", "status", "points", "of", "by hand", *most, "notes"])
        for row in rows:
            each = [row.points.get(test, "") for test in most]
            total = sum(row.points.values()) if row.status == "graded" else ""
            writer.writerow(
                [row.student, name, row.status, total, sum(most.values()), row.by_hand, *each, "; ".join(row.notes)]
            )

"""Grade notebooks that nobody has read: mended first, executed within limits, scored by nbgrader.

What a student changed outside of the solution cells counts for nothing: tests and given cells come from the source.
A cell that does not end, kills its kernel or asks for too much memory costs its own points, and so does a mistake:
what fails is tried again with the book's solutions of the earlier tasks. Nothing stops the batch.

The code runs as the user who grades. The limits are against accidents; against malice, grade in a container.
"""

import csv
import html
import re
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
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
from nbgrader.utils import is_grade, is_locked, is_solution
from sqlalchemy.exc import SAWarning
from traitlets import Dict, Float
from traitlets.config import Config

from tools.course import KitError, course, mark, released, source, start

ANSI = re.compile(r"\x1b\[[0-9;]*m")
NAME = re.compile(r"^(?:async +)?(?:def|class) +(\w+)|^(\w+) *(?::[^=\n]+)?=(?!=)", re.MULTILINE)
MOST_OUTPUT = 100_000  # characters a cell
HELPED = "This passes with the book's solutions of the tasks before it.\n"
PATIENCE = 5  # a cell may sleep, or wait for a busy machine, until the clock shows so many times its processor time

# A copy of MathJax lies beside the feedback pages. It is of another version than the one that nbgrader asks for.
MATHJAX_FILES = ("tex-svg-full.js", "ui/safe.js")
MATHJAX = """\
<script>
const tex = {inlineMath: [["$", "$"], ["\\\\(", "\\\\)"]], processEscapes: true, tags: "ams"};
MathJax = {tex, loader: {load: ["ui/safe"]}};
</script>
<script src="mathjax/tex-svg-full.js" onerror="
this.onerror = null; const other = document.createElement('script');
other.src = 'https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-svg-full.js'; document.head.append(other)"></script>"""

# No more memory than this (of what is written to: libraries are mapped and do not count), and no more processor time
# from the start of each cell, which a busy machine does not shorten; exit() ends nothing.
LIMIT = """\
import resource, time
resource.setrlimit(resource.RLIMIT_DATA, ({bytes}, {bytes}))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
get_ipython().events.register("pre_run_cell", lambda _, r=resource, now=time.process_time: \
r.setrlimit(r.RLIMIT_CPU, (int(now() + {seconds}) + 1, r.getrlimit(r.RLIMIT_CPU)[1])))
get_ipython().ask_exit = lambda *_: None
del resource, time
"""


@dataclass(frozen=True)
class Limits:
    """What one submission may use.

    Parameters
    ----------
    cell
        seconds of processor time for one cell; by the clock it gets `PATIENCE` times as much.
    notebook
        seconds by the clock for all of them, restarts of the kernel and second tries included.
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
    status: str  # graded, missing, unreadable, or failed: a given cell was stopped, or the grader
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

    Such a cell is noted in its metadata, and the notebook starts again in a new kernel without it. A test
    that failed but passes with the book's solutions of the tasks before it is noted too.
    """

    seconds = Float(60, help="of processor time for a cell").tag(config=True)
    budget = Float(600, help="seconds for the whole notebook").tag(config=True)
    solutions = Dict(help="the book's, by the names of the tests").tag(config=True)

    def preprocess(self, notebook: NotebookNode, resources: Any, km: Any = None) -> tuple[NotebookNode, Any]:
        """Execute every cell that can be; leave a message of its own in each that cannot, and in each failed test."""
        self.end = time.monotonic() + self.budget
        self.timeout_func = lambda cell: max(0.1, min(self.timeout, self.end - time.monotonic()))
        self.stopped: dict[str, str] = {}
        self.attempt(notebook, resources)
        self.try_again(notebook, resources)
        return notebook, resources

    def attempt(self, notebook: NotebookNode, resources: Any) -> None:
        """Execute a notebook, without the cells that were stopped before."""
        while True:
            try:
                super().preprocess(notebook, resources)
                break
            except CellTimeoutError:
                why = f"had not ended after {self.timeout} seconds, and was stopped"
            except DeadKernelError:
                why = "ended Python itself (too much memory, or os._exit), and was left out"
                if self.kernel.poll() == -signal.SIGXCPU:
                    why = f"had not ended after {self.seconds:g} seconds of processor time, and was stopped"
            if over := time.monotonic() > self.end:
                why = f"was running when the {self.budget:g} seconds for this notebook were over"
            running = notebook.cells[self.at]
            self.stopped[running.id] = running.metadata["stopped"] = why
            if over:
                self.give_up(notebook)
                break
        for cell in notebook.cells:
            if is_test(cell):
                tell(cell)

    def try_again(self, notebook: NotebookNode, resources: Any) -> None:
        """Repeat failed tests, each with the book's solutions of the tasks before: a mistake costs its own task only.

        The first test that failed is not repeated, since the tasks before it are right.
        """
        again = {cell.id: cell for cell in [cell for cell in notebook.cells if is_test(cell) and failed(cell)][1:]}
        if not again or time.monotonic() > self.end:
            return
        second = deepcopy(notebook)
        second.cells = []
        for cell in notebook.cells:
            solution = self.solutions.get(mark(cell).get("grade_id"))
            if solution is None or cell.id in again:
                second.cells.append(deepcopy(cell))
                second.cells[-1].metadata.pop("stopped", None)
            if solution is not None:
                second.cells.append(new_cell("code", solution))
        self.stopped = {name: why for name, why in self.stopped.items() if name not in again}
        self.attempt(second, resources)
        for cell in second.cells:
            if cell.id in again:
                if not failed(cell):
                    cell.outputs = [nbformat.v4.new_output("stream", text=HELPED)]
                    cell.metadata["helped"] = True
                again[cell.id].update(outputs=cell.outputs, metadata=cell.metadata)

    def preprocess_cell(self, cell: NotebookNode, resources: Any, index: int) -> tuple[NotebookNode, Any]:
        """Execute a cell, or leave the message that says why it was stopped in an earlier kernel."""
        self.at, self.written, self.kernel = index, 0, self.km.provisioner.process
        if cell.id not in self.stopped:
            return super().preprocess_cell(cell, resources, index)
        cell.outputs = [error("Stopped", f"This cell {self.stopped[cell.id]}.")]
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
                cell.outputs = [error("Stopped", f"The {self.budget:g} seconds for this notebook were over.")]


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


def page(text: str, student: str) -> str:
    """A feedback page with the student's name, the names of the tests, and MathJax from beside it, for want of network.

    Away from the other pages it falls back on the network.
    """
    for tag in ("<title>", "<h4>"):
        text = text.replace(tag, f"{tag}{html.escape(student)}: ", 1)
    text = re.sub(r'(<a href="#(test-[^"]+)">)Test cell</a>', r"\1\2</a>", text)
    before, _, rest = text.partition("<!-- Load mathjax -->")
    return before + MATHJAX + rest.partition("<!-- End of mathjax configuration -->")[2]


def add_mathjax(folder: Path) -> None:
    """Copy what the feedback pages need from the installed package `django-static-mathjax`."""
    spec = find_spec("mathjax")
    if spec is None or spec.origin is None:
        raise KitError("MathJax is missing: pip install -r requirements.txt (django-static-mathjax)")
    for name in MATHJAX_FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(spec.origin).parent / "static" / "mathjax" / "es5" / name, folder / name)


def settings(limits: Limits, solutions: dict[str, str]) -> Config:
    config = Config()
    config.Bounded.timeout = max(1, round(PATIENCE * limits.cell))
    config.Bounded.seconds = limits.cell
    config.Bounded.solutions = solutions
    config.Bounded.budget = limits.notebook
    config.Bounded.interrupt_on_timeout = False
    config.Bounded.shutdown_kernel = "immediate"
    config.Bounded.raise_on_iopub_timeout = False
    lines = LIMIT.format(bytes=int(limits.memory * 1e9), seconds=limits.cell).strip().replace("\n", "; ")
    config.Bounded.extra_arguments = [
        "--log-level=ERROR",
        "--HistoryManager.hist_file=:memory:",
        f"--IPKernelApp.exec_lines={lines}",
    ]
    return config


def submissions(folder: Path, name: str) -> Iterator[tuple[str, Path | None, list[str]]]:
    """Each student, the file that is the submission, and what was odd about it.

    A student is a folder in `folder`, or a file there, whatever it is; hidden ones are none. Two of one name, as
    eve.zip and eve/, go by the whole names of the files.
    """
    entries = [entry for entry in sorted(folder.iterdir()) if entry.name[0] != "."]
    names = [entry.name if entry.is_dir() else entry.stem for entry in entries]
    for entry, student in zip(entries, names, strict=True):
        if names.count(student) > 1:
            student = entry.name
        yield student, *(chosen(entry, name) if entry.is_dir() else (entry, []))


def chosen(folder: Path, name: str) -> tuple[Path | None, list[str]]:
    """Of a student's notebooks the submission: by its name, else by part of its name, else the only one.

    They may lie at any depth. Of several that qualify the one nearest to the top is taken, if it is the only one there.
    """
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in files if not any(part[0] == "." for part in path.parts)]
    notebooks = [path for path in files if path.suffix.lower() == ".ipynb"]
    exact = [path for path in notebooks if path.stem == name]
    similar = [path for path in notebooks if name in path.stem]
    for some in (exact, similar, notebooks):
        top = [path for path in some if len(path.parts) == min(len(other.parts) for other in some)]
        if len(top) == 1:
            left = ", ".join(str(path) for path in some if path != top[0])
            note = f"expected {name}.ipynb, took {top[0]}" + (f", not {left}" if left else "")
            return folder / top[0], [note] if left or str(top[0]) != f"{name}.ipynb" else []
    return None, [f"expected {name}.ipynb, found {', '.join(map(str, notebooks or files)) or 'nothing'}"]


def load(path: Path) -> NotebookNode:
    """A notebook of any version and state; ValueError says why it is none."""
    if path.suffix.lower() != ".ipynb":
        raise ValueError(f"{path.name} is no notebook")
    try:
        return nbformat.convert(nbformat.reader.reads(path.read_text(encoding="utf-8-sig", errors="replace")), 4)
    except Exception as error:  # whatever is in the file: the batch goes on
        raise ValueError(f"{path.name} is no notebook ({type(error).__name__}: {str(error)[:80]})") from error


def solutions(name: str) -> dict[str, str]:
    """The book's solution to each task, by the name of its test: test-clip grades clip."""
    return {f"test-{mark(cell)['grade_id']}": cell.source for cell in source(name).cells if is_solution(cell)}


def failed(cell: NotebookNode) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def is_given(cell: NotebookNode) -> bool:
    return is_locked(cell) and not is_grade(cell)


def is_test(cell: NotebookNode) -> bool:
    return is_grade(cell) and not is_solution(cell)


def what_happened(scored: NotebookNode) -> list[str]:
    """What a teacher should know of the execution: which cells were stopped, and which tests passed with help."""
    named = [(mark(cell).get("grade_id", f"cell {i}"), cell.metadata) for i, cell in enumerate(scored.cells, start=1)]
    notes = [f"{name} {metadata['stopped']}" for name, metadata in named if "stopped" in metadata]
    if helped := [name for name, metadata in named if "helped" in metadata]:
        notes.append(f"passed with the book's solutions of the tasks before: {', '.join(helped)}")
    return notes


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
    start(Scoring(coursedir=directory, config=settings(limits, solutions(name))))
    scored = nbformat.read(Path(directory.root) / "autograded" / identity / name / f"{name}.ipynb", as_version=4)
    row.notes += what_happened(scored)
    if given := [mark(cell)["grade_id"] for cell in scored.cells if is_given(cell) and failed(cell)]:
        row.status = "failed"
        row.notes.append(f"given cells failed: {', '.join(given)}; grade again, or raise the limits")
        return
    with Gradebook(directory.db_url) as book:
        result = book.find_submission_notebook(name, name, identity)
        for given in sorted(result.grades, key=lambda given: given.name):
            if given.needs_manual_grade:
                row.by_hand += given.max_score
            else:
                row.points[given.name] = given.score
    row.status = "graded"
    start(Feedback(coursedir=directory))
    made = Path(directory.root) / "feedback" / identity / name / f"{name}.html"
    (out / f"{row.student}.html").write_text(page(made.read_text(encoding="utf-8"), row.student), encoding="utf-8")


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
        add_mathjax(results / "feedback" / "mathjax")
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

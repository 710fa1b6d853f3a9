"""Edit, execute and check the notebooks of the book.

    python tools/notebooks.py edit book/01_x.ipynb     write its text twin, _text/01_x.md
    python tools/notebooks.py save _text/01_x.md       write the notebook from its twin and execute it
    python tools/notebooks.py execute [NOTEBOOK ...]   execute again, in place
    python tools/notebooks.py card [NOTEBOOK ...]      execute again and measure the run card
    python tools/notebooks.py check [NOTEBOOK ...]     list what breaks the book's rules

Without a name a command works on all notebooks. `save` also takes a twin that was written by hand.
Executing the same source twice gives the same bytes.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
BOOK = ROOT / "book"
TEXT = ROOT / "_text"

COLAB_CELL = """\
# Run this first in Colab: it installs the book's module there, and does nothing where the module is present.
import importlib.util

if importlib.util.find_spec("dpivon") is None:
    %pip install --quiet "dpivon[plots,sweep] @ git+{url}@v{version}\""""

RUN_CARD = """\
| Run card | on one CPU core |
| :--- | :--- |
| To read | {reading} |
| Exercises | {exercises} |
| To run | {seconds} s |
| Memory | {memory:.1f} GB |
| Download | {download} |
| Privacy spent | {epsilon} |"""

# What an exercise asks for; two of them joined by "and" where it asks for both.
KINDS = ("reading", "pencil", "proof", "computation", "coding", "experiment", "research")

ABSOLUTE_PATH = re.compile(r"(?<![\w.:/-])/(home|root|tmp|Users|work)/|\b[A-Z]:\\")
PROBE = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"

# One thread and fixed hashes, for the same bytes on every run; the kernel of this environment, no other.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "JUPYTER_PREFER_ENV_PATH": "1",
}


class NotebookError(Exception):
    """A notebook that cannot be executed or saved; the message says where and why."""


def chapters() -> list[Path]:
    return sorted(BOOK.glob("[0-9]*.ipynb"))


def address() -> str:
    """The repository's address, from its one place."""
    return yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]["url"]


def colab_cell() -> str:
    """The first code cell of every chapter: it installs the release that the chapter was written for."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    return COLAB_CELL.format(url=address(), version=version)


def tagged(notebook: NotebookNode, tag: str) -> NotebookNode | None:
    return next((cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])), None)


def headings(source: str) -> Iterator[int]:
    """The offsets of the level-2 headings of a Markdown text, those in code fences left out."""
    fence, offset = "", 0
    for line in source.splitlines(keepends=True):
        mark = re.match(r"\s*(`{3,}|~{3,}|:{3,})", line)
        if mark and not fence:
            fence = mark[1]
        elif mark and line.strip() == fence:
            fence = ""
        elif not fence and line.startswith("## "):
            yield offset
        offset += len(line)


def opening(notebook: NotebookNode) -> int:
    """Where the sections begin: the first level-2 heading, split off to a cell, or the first code cell."""
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            return index
        start = next(headings(cell.source), None)
        if start == 0:
            return index
        if start is not None:
            rest = nbformat.v4.new_markdown_cell(cell.source[start:])
            cell.source = cell.source[:start].rstrip()
            notebook.cells.insert(index + 1, rest)
            return index + 1
    return len(notebook.cells)


def complete(notebook: NotebookNode, card: NotebookNode | None) -> None:
    """Refresh or insert the Colab cell; insert the run card `card` where there is none."""
    if card is not None and tagged(notebook, "run-card") is None:
        notebook.cells.insert(opening(notebook), card)
    colab = tagged(notebook, "colab")
    if colab is None:
        colab = nbformat.v4.new_code_cell(metadata={"tags": ["colab", "hide-input"]})
        notebook.cells.insert(opening(notebook), colab)
    colab.source = colab_cell()


def study(notebook: NotebookNode) -> dict[str, str]:
    """The time that a chapter takes to read, by its length, and that of its exercises, by their titles.

    Two words a second for prose, two minutes for a displayed formula, ten seconds for a line of code that is not
    folded: the pace of a seminar. Exercises and solutions do not count as reading.
    """
    shown = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            shown.append(cell.source)
            continue
        if not {"hide-input", "remove-input"} & set(cell.metadata.get("tags", [])):
            shown.append(re.sub(r"^(?=.*\S)", "\0", cell.source, flags=re.MULTILINE))  # marks a line of code
        shown += [output.get("data", {}).get("text/markdown", "") for output in cell.outputs]
    text = "\n".join(shown)
    exercises = re.findall(r"^`{3,}\{exercise-start\}.*, (\d+) minutes\)$", text, re.MULTILINE)
    text = re.sub(r"^(`{3,})\{(exercise|solution)-start\}[\s\S]*?^\1\{\2-end\}", "", text, flags=re.MULTILINE)
    prose, lines = re.subn(r"^\0.*", "", text, flags=re.MULTILINE)
    words = len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\$+[^$]*\$+", "", prose)))
    formulas = prose.count("$$") // 2 + prose.count("{math}")
    return {
        "reading": f"about {hours(words / 120 + 2 * formulas + lines / 6)}",
        "exercises": hours(sum(map(int, exercises))),
    }


def hours(minutes: float) -> str:
    """Minutes, to the next quarter of an hour, in words: 100 are '1 h 45 min'."""
    whole, rest = divmod(15 * max(1, round(minutes / 15)), 60)
    return " ".join([f"{whole} h"] * bool(whole) + [f"{rest} min"] * bool(rest))


def refreshed(card: str, notebook: NotebookNode) -> str:
    """A run card whose times to study are those of the chapter as it is."""
    for row, needed in zip(("To read", "Exercises"), study(notebook).values(), strict=True):
        card = re.sub(rf"^\| {row} \|.*$", f"| {row} | {needed} |", card, flags=re.MULTILINE)
    return card


def tidy(notebook: NotebookNode) -> None:
    """Keep only metadata that carry meaning; derive cell ids from the source, for identical reruns."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(
        {
            "dpivon": dict(notebook.metadata.get("dpivon", {})),
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    seen: dict[str, int] = {}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    nbformat.validate(notebook)


def execute(notebook: NotebookNode, name: str, kernel: str = "python3") -> tuple[float, float]:
    """Execute in a fresh kernel and an empty folder; return the seconds and the peak memory in GB."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    probe = nbformat.v4.new_code_cell(PROBE)
    notebook.cells.append(probe)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            kernel_name=kernel,
            timeout=600,
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
            resources={"metadata": {"path": folder}},
        )
        start = time.perf_counter()
        try:
            client.execute(env={**os.environ, **ENVIRONMENT})
        except CellExecutionError as error:
            raise NotebookError(f"{name}: a cell failed\n{error}") from None
        seconds = time.perf_counter() - start
    notebook.cells.pop()
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise NotebookError(f"{name}: output on stderr, from\n{cell.source}\n---\n{output.text}")
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, int(probe.outputs[0].text) * unit / 1e9


def finish(notebook: NotebookNode, path: Path, card: NotebookNode | None, measure: bool = False) -> None:
    """Execute and write a notebook; measure its run card if `measure` or if there is none."""
    complete(notebook, card)
    seconds, memory = execute(notebook, path.name)
    card = tagged(notebook, "run-card")
    if measure or card is None or not card.source.strip():
        facts = notebook.metadata.get("dpivon", {})
        if "epsilon" not in facts or "download" not in facts:
            raise NotebookError(
                f"{path.name}: its metadata must say what the run card cannot measure, for example\n"
                "dpivon:\n  download: none\n  epsilon: none, the data are public"
            )
        if card is None:
            card = nbformat.v4.new_markdown_cell(metadata={"tags": ["run-card"]})
            notebook.cells.insert(notebook.cells.index(tagged(notebook, "colab")), card)
        card.source = RUN_CARD.format(seconds=round(seconds), memory=memory, **facts, **study(notebook))
    card.source = refreshed(card.source, notebook)
    tidy(notebook)
    path.write_text(nbformat.writes(notebook) + "\n")
    print(f"{path.name}: executed in {seconds:.0f} s, {memory:.1f} GB")


def edit(path: Path, force: bool = False) -> None:
    """Write the text twin of a notebook; refuse to overwrite a twin that was changed since it was saved."""
    twin = TEXT / f"{path.stem}.md"
    if twin.exists() and twin.stat().st_mtime > path.stat().st_mtime and not force:
        raise NotebookError(f"{twin.name} is newer than its notebook: save it, or discard it with --force")
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["jupytext"] = {
        "notebook_metadata_filter": "dpivon,kernelspec,-jupytext",
        "cell_metadata_filter": "all",
    }
    TEXT.mkdir(exist_ok=True)
    twin.write_text(jupytext.writes(notebook, fmt="md:myst"))
    os.utime(twin, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
    name = os.path.relpath(twin)
    print(f"{name}: edit it, then `python tools/notebooks.py save {name}`")


def save(twin: Path) -> Path:
    """Write and execute the notebook of a text twin."""
    path = BOOK / f"{twin.stem}.ipynb"
    card = tagged(nbformat.read(path, as_version=4), "run-card") if path.exists() else None
    finish(jupytext.reads(twin.read_text(), fmt="md:myst"), path, card)
    return path


def problems(path: Path) -> list[str]:
    """What a stored notebook has against the rules of the book; an empty list if nothing."""
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    found = []
    if not notebook.cells or not notebook.cells[0].source.startswith("# "):
        found.append("the first cell is not a Markdown title")
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        found.append("not stored executed in order: run `execute`")
    if not code or code[0].source != colab_cell() or "colab" not in code[0].metadata.get("tags", []):
        found.append("the first code cell is not the Colab cell: run `execute`")
    if "*You need*" not in text:
        found.append("no *You need*: what must a reader know?")
    card = tagged(notebook, "run-card")
    if card is None or not card.source.startswith("| Run card"):
        found.append("no run card: run `card`")
    elif card.source != refreshed(card.source, notebook):
        found.append("its run card tells the times to study of an older text: run `execute`")
    for cell in notebook.cells:
        where = f"cell `{(cell.source.strip().splitlines() or ['(empty)'])[0][:50]}`"
        if any(ABSOLUTE_PATH.search(shown) for shown in texts(cell)):
            found.append(f"{where}: an absolute path")
        if cell.cell_type == "code":
            found += [f"{where}: {problem}" for problem in cell_problems(cell)]
    return found + self_check_problems(text) + exercise_problems(text)


def self_check_problems(text: str) -> list[str]:
    """A chapter asks three questions or more, numbered in order, each with its answer."""
    found, numbers = [], []
    blocks = re.findall(r"^(`{3,})\{admonition\} Check yourself *(\d*)\n([\s\S]*?)\n\1$", text, re.MULTILINE)
    for _, number, body in blocks:
        numbers.append(number)
        if not re.fullmatch(r":class: dropdown\n\*\*Question\.\*\* \S[\s\S]*\n\n\*\*Answer\.\*\* \S[\s\S]*", body):
            found.append(f"self-check {number}: not of class dropdown with a **Question.** and an **Answer.**")
    if numbers != [str(k) for k in range(1, len(numbers) + 1)]:
        found.append(f"self-checks not numbered in order: {', '.join(numbers)}")
    if len(numbers) < 3:
        found.append(f"{len(numbers)} self-checks, at least 3 are due")
    return found


def exercise_problems(text: str) -> list[str]:
    """A chapter has four exercises or more, from reading to research, each with kind, minutes and solution."""
    exercises = re.findall(r"^`{3,}\{exercise-start\} *(.*)\n:label: *(\S+)", text, re.MULTILINE)
    found = [] if len(exercises) >= 4 else [f"{len(exercises)} exercises, at least 4 are due"]
    asked: set[str] = set()
    for title, label in exercises:
        effort = re.search(r"\(([a-z ]+), \d+ minutes\)$", title)
        kinds = effort[1].split(" and ") if effort else []
        asked.update(kinds)
        if not kinds or not set(kinds) <= set(KINDS):
            found.append(
                f"exercise {label}: its title must end in (kind, N minutes), the kind one of {', '.join(KINDS)}"
            )
        solution = rf"^`{{3,}}\{{solution-start\}} *{re.escape(label)}\n:class: dropdown"
        if not re.search(solution, text, re.MULTILINE):
            found.append(f"exercise {label}: no solution of class dropdown")
    found += [f"no exercise of the kind {kind}" for kind in ("reading", "research") if kind not in asked]
    return found


def texts(cell: NotebookNode) -> list[str]:
    """All that a reader sees of a cell as text: its source and its outputs."""
    found = [cell.source]
    for output in cell.get("outputs", []):
        found += [output.get("text", ""), *output.get("traceback", [])]
        found += [text for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return found


def cell_problems(cell: NotebookNode) -> Iterator[str]:
    if cell.source.rstrip().endswith(";"):
        yield "ends in `;`, write `_ =`"
    if any(output.output_type == "error" for output in cell.outputs):
        yield "its stored output is an error"
    if any(output.get("name") == "stderr" for output in cell.outputs):
        yield "output on stderr"
    if any(re.search(r" at 0x[0-9a-f]{6,}", text) for text in texts(cell)):
        yield "shows a memory address, which changes from run to run"
    images = sum(any(kind.startswith("image/") for kind in output.get("data", {})) for output in cell.outputs)
    if images > 1:
        yield "more than one figure: split the cell, each figure needs its own text"
    if images:
        extras = cell.metadata.get("mystnb", {})
        if len(extras.get("image", {}).get("alt", "")) < 20:
            yield "figure without alt text that says what it shows (mystnb: image: alt)"
        if len(extras.get("figure", {}).get("caption", "")) < 20:
            yield "figure without a caption that says what to conclude (mystnb: figure: caption)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["edit", "save", "execute", "card", "check"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--force", action="store_true", help="edit: overwrite a twin with unsaved changes")
    arguments = parser.parse_args()
    everything = sorted(TEXT.glob("[0-9]*.md")) if arguments.command == "save" else chapters()
    failed = False
    for file in [file.resolve() for file in arguments.files] or everything:
        try:
            if arguments.command == "edit":
                edit(file, arguments.force)
                continue
            if arguments.command == "save":
                file = save(file)
            elif arguments.command in ("execute", "card"):
                finish(nbformat.read(file, as_version=4), file, None, measure=arguments.command == "card")
            for problem in problems(file):
                print(f"{file.name}: {problem}")
                failed |= arguments.command == "check"
        except (NotebookError, OSError) as error:
            print(error, file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""The notation page is a contract: what it names exists, and what dpivon calls a number is named there."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any, NamedTuple, get_args

import nbformat
import pytest
from notebook import definitions

import dpivon

BOOK = Path(__file__).parents[1] / "book"
PAGE = (BOOK / "notation.md").read_text(encoding="utf-8")
MODULES = [info.name for info in pkgutil.iter_modules(dpivon.__path__)]

# Numbers that dpivon takes and that are no symbols of the book: sizes of the machinery, switches, diagnostics.
NOT_SYMBOLS = {
    "alone", "batch_sizes", "bins", "blocks", "budget", "budgets", "calibration", "chunk", "chunk_size", "classes",
    "clipped", "confidence", "count", "done", "errors", "height", "hidden", "high", "holdout", "level", "limit", "low",
    "mean", "narrow", "numbers", "p", "p_values", "places", "rate", "recipe", "repeats", "resources",
    "seconds", "seed", "seeds", "set_aside", "shape", "share", "sigma", "sizes", "slower", "step", "strength", "trials",
    "wide", "width", "workers",
}  # fmt: skip


class Row(NamedTuple):
    symbol: str
    names: list[str]
    where: list[str]
    chapter: str | None


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def parse(page: str) -> list[Row]:
    """The rows of all tables with the columns Name and Where, in order."""
    rows, header = [], []
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else []
        if not cells:
            header = []
        elif not header:
            header = cells
        elif "Where" in header and not re.fullmatch(r"[:\- ]+", cells[0]):
            assert len(cells) == len(header), f"a cell too many or too few: {line}"
            row = dict(zip(header, cells, strict=True))
            rows.append(Row(row["Symbol"], code(row["Name"]), code(row["Where"]), row.get("Chapter")))
    return rows


ROWS = parse(PAGE)


def has(thing: Any, name: str) -> bool:
    """Is `name` a parameter or an attribute of `thing`?"""
    return hasattr(thing, name) or (callable(thing) and name in inspect.signature(thing).parameters)


def find(path: str) -> Any:
    """The module, function or class at a path such as `accounting.epsilon`; AttributeError where there is none."""
    module, *names = path.split(".")
    thing: Any = importlib.import_module(f"dpivon.{module}")
    for name in names:
        thing = getattr(thing, name)
    return thing


def missing_in_dpivon(row: Row) -> list[str]:
    """What the row says of dpivon and is not so."""
    return [f"{path} has no {name}" for path in row.where for name in row.names if not has(find(path), name)]


def missing_in_chapter(row: Row, namespace: dict[str, Any]) -> list[str]:
    """What the row says of the functions that a chapter defines and is not so."""
    if not row.where:
        return [f"nothing is called {name}" for name in row.names if name not in namespace]
    return [
        f"{w} has no {name}"
        for w in row.where
        for name in row.names
        if w not in namespace or not has(namespace[w], name)
    ]


def is_number(annotation: Any) -> bool:
    return any(kind in (int, float) for kind in get_args(annotation) or (annotation,))


def numbers(module: Any) -> set[str]:
    """The names of all numeric parameters and fields of a module's public functions, classes and their methods."""
    things = [thing for name, thing in vars(module).items() if not name.startswith("_")]
    things = [thing for thing in things if callable(thing) and getattr(thing, "__module__", "") == module.__name__]
    things = [thing for thing in things if not (inspect.isclass(thing) and issubclass(thing, Exception))]
    for thing in [thing for thing in things if inspect.isclass(thing)]:
        things += [method for name, method in vars(thing).items() if inspect.isfunction(method) and name[0] != "_"]
    parameters = [p for thing in things for p in inspect.signature(thing).parameters.values()]
    return {p.name for p in parameters if is_number(p.annotation) and p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize("row", [row for row in ROWS if row.chapter is None], ids=lambda row: row.names[0])
def test_each_name_is_a_parameter_or_an_attribute_where_the_page_says(row):
    assert row.names
    assert row.where
    assert not missing_in_dpivon(row)


@pytest.mark.parametrize("chapter", sorted({row.chapter for row in ROWS if row.chapter} - {"appendix"}))  # has no code
def test_each_name_of_a_chapter_is_defined_in_its_code(chapter):
    (path,) = BOOK.glob(f"{int(chapter):02}_*.ipynb")
    namespace = definitions(path)
    wrong = [fault for row in ROWS if row.chapter == chapter for fault in missing_in_chapter(row, namespace)]
    assert not wrong


def test_each_number_that_dpivon_takes_has_a_symbol():
    named = {name for row in ROWS if row.chapter is None for name in row.names}
    taken = {name: module for module in MODULES for name in numbers(importlib.import_module(f"dpivon.{module}"))}
    unknown = {name: module for name, module in taken.items() if name not in named | NOT_SYMBOLS}
    assert not unknown, f"name them in book/notation.md: {unknown}"
    assert taken.keys() >= NOT_SYMBOLS, f"no longer taken: {NOT_SYMBOLS - taken.keys()}"
    # What the book is about must be found by this search, or the search is broken.
    assert taken.keys() >= {
        "noise_multiplier", "max_grad_norm", "batch_size", "sample_rate", "steps", "delta", "epsilon", "lr", "beta1",
        "weight_decay", "n",
    }  # fmt: skip


def test_no_name_or_symbol_stands_for_two_things_in_dpivon():
    rows = [row for row in ROWS if row.chapter is None]
    names = [name for row in rows for name in row.names]
    symbols = [row.symbol for row in rows]
    assert len(set(names)) == len(names)
    assert len(set(symbols)) == len(symbols)


def formulas(notebook: Path) -> str:
    """All mathematics of a notebook's text, joined."""
    text = "\n\n".join(c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "markdown")
    return "\n".join(part for pair in re.findall(r"\$\$(.+?)\$\$|\$(.+?)\$", text, flags=re.DOTALL) for part in pair)


GREEK = (
    r"\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega"
    r"|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega)(?![a-zA-Z])"
)


@pytest.mark.parametrize("notebook", sorted(BOOK.glob("[0-9]*.ipynb")), ids=lambda path: path.stem)
def test_each_greek_letter_of_a_chapter_is_explained(notebook):
    letters = set(re.findall(GREEK, formulas(notebook)))
    explained = set(re.findall(GREEK, "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))))
    assert letters, "a chapter without a Greek letter: is the search broken?"
    assert letters <= explained, f"explain in book/notation.md: {sorted(letters - explained)}"


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (Row("$C$", ["clipping_norm"], ["mechanism.mechanism"], None), "mechanism.mechanism has no clipping_norm"),
        (Row("$q$", ["sample_rate"], ["mechanism.poisson_batches"], None), "poisson_batches has no sample_rate"),
        (Row("$C$", ["EPS"], ["gradients"], None), "gradients has no EPS"),
    ],
    ids=["wrong name", "wrong place", "wrong attribute"],
)
def test_a_wrong_row_is_noticed(row, fault):
    assert fault in missing_in_dpivon(row)[0]

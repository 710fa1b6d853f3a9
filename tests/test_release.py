"""A chapter runs for a new reader: the package is installed from its wheel, and there is no repository."""

import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

from tools import address, release

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the work tree, as a checkout has it."""
    folder = tmp_path_factory.mktemp("source")
    for file in address.files(ROOT) + list((ROOT / "book" / "results").rglob("*.jsonl")):
        place = folder / file.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def python(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel. What the wheel depends on is lent from this one, so nothing is downloaded."""
    folder = tmp_path_factory.mktemp("environment")
    wheel = release.wheel(source, folder, "--no-build-isolation")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "new"], check=True)
    python = folder / "new" / "bin" / "python"
    options = ["install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *options, wheel], check=True)
    # Behind its own packages. The links to editable packages that lie here are not followed.
    (packages,) = (folder / "new" / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.fixture(scope="module")
def torch(python: Path, source: Path) -> Iterator[str]:
    with release.newcomer(python, source) as version:
        yield version


def write(source: Path, name: str, code: str) -> None:
    cell = nbformat.v4.new_code_cell(code)
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), source / "book" / f"{name}.ipynb")


def test_a_chapter_runs_from_top_to_bottom(torch: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.run("01_what_privacy_promises", source, torch), capsys.readouterr().out


def test_nothing_of_the_repository_is_there(torch: str, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither its files nor its settings; the release's results are, as if downloaded."""
    code = f"""
import os, pathlib, sys, dpivon
from dpivon import ledger
assert not list(pathlib.Path().iterdir())
assert {str(ROOT)!r} not in sys.path and {str(ROOT / "dpivon")!r} not in dpivon.__path__, sys.path
assert not [key for key in os.environ if key.startswith(("DPIVON", "PYTHONPATH"))]
found = ledger.published("lenet.jsonl")
assert "cache" in found.parts and len(ledger.read(found)) > 10, found
"""
    write(source, "x", code)
    assert release.run("x", source, torch), capsys.readouterr().out


@pytest.mark.parametrize("code", ["import no_such_module", "import warnings; warnings.warn('old')"])
def test_a_notebook_that_fails_is_reported(
    torch: str, source: Path, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    write(source, "x", code)
    assert not release.run("x", source, torch)
    assert "ERROR" in (said := capsys.readouterr().out)
    assert code.split()[-1] in said


def test_chapters_and_assignments_are_found_by_their_names(source: Path) -> None:
    every = release.notebooks(ROOT)
    assert len(every) >= 20
    assert [name for name in every if name.startswith("01")] == release.notebooks(ROOT, "01")
    assert release.notebooks(ROOT, "assignments/02") == ["assignments/02_dp_sgd"]


def test_the_supported_torch_is_what_the_requirements_say() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    package = next(Requirement(line) for line in project["dependencies"] if line.startswith("torch>"))
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    book = next(Requirement(line) for line in lines if line.startswith("torch>"))
    known = release.supported(ROOT)
    assert known["oldest"] in package.specifier
    assert known["newest"] in book.specifier
    assert str(package.specifier) == f">={known['oldest']}"
    assert f"<={known['newest']}" in str(book.specifier)


def test_the_first_cell_installs_all_that_a_chapter_imports() -> None:
    """Colab has matplotlib, a new environment has it only if the first cell asks for the plots."""
    assert release.asked(ROOT) == "dpivon[plots,sweep]"

"""The assignments of the book: each test catches what it should, and no page of the site shows a solution."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from tools import course, kit
from tools.notebooks import ROOT, colab_cell, tagged


@pytest.mark.parametrize("name", course.names())
def test_each_test_of_an_assignment_catches_what_it_should(name: str) -> None:
    found = kit.check(name)
    assert not found, "\n".join(found)


def test_the_kit_is_complete() -> None:
    assert [name[:2] for name in course.names()] == ["01", "02", "03", "04", "05", "06"]
    guide = (course.KIT / "instructors_guide.md").read_text()
    for name in course.names():
        assert name in guide, f"the instructor's guide does not mention {name}"


@pytest.mark.parametrize("name", course.names())
def test_an_assignment_is_stored_without_outputs_and_with_this_release_s_colab_cell(name: str) -> None:
    notebook = nbformat.read(course.KIT / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    assert tagged(notebook, "colab").source == colab_cell(), "run tools/assignments.py refresh"


def test_no_page_of_the_site_shows_a_solution() -> None:
    settings = yaml.safe_load((ROOT / "_config.yml").read_text())
    assert settings["only_build_toc_files"]
    assert "book/assignments/*.ipynb" in settings["exclude_patterns"]
    assert "assignments/0" not in (ROOT / "_toc.yml").read_text()


def test_unknown_assignments_are_named() -> None:
    with pytest.raises(course.KitError, match="no assignment '99_none'; there are 01_"):
        course.source("99_none")


def command(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": ""}
    line = [sys.executable, str(ROOT / "tools" / "assignments.py"), *words]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=120)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    done = command("grade", "01_gaussian_mechanism", str(tmp_path / "none"), "--to", str(tmp_path / "out"))
    assert done.returncode == 1
    assert done.stderr.startswith("there is no folder")


def test_an_unknown_name_is_named_and_leaves_nothing_behind(tmp_path):
    with pytest.raises(course.KitError, match="there is no assignment 'nobody'"):
        course.release("nobody", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(course.KitError, match=r"there is no .*nobody\.md; `edit nobody` writes it"):
        course.save("nobody")

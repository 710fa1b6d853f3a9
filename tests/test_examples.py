"""The examples of the API page run as they stand: alone, on fresh imports, and with the output that is printed."""

import ast
import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "book" / "api.md").read_text()
MODULES = re.findall(r"^\.\. automodule:: dpivon\.(\w+)$", PAGE, re.MULTILINE)
WIDEST = 60  # characters, prompt included: what a page shows without much scrolling

# Modules without an example, and why.
WITHOUT = {
    "state": "the inside of a run; train.run shows it from outside",
    "loop": "the inside of a run; train.run shows it from outside",
    "processes": "needs several processes, which tests/test_distributed.py starts",
    "checks": "one comparison and its error each, which tests/test_ivon.py and others raise",
    "weights": "the inside of every sampled_params, whose examples show it",
    "bench": "measures seconds, which differ from machine to machine",
    "__main__": "commands of a shell, which tests/test_cli.py runs",
}


def examples(module: str) -> list[doctest.DocTest]:
    """Each docstring of a module that has examples, with an empty namespace: what it uses, it must import."""
    path = ROOT / "dpivon" / f"{module}.py"
    found, parser = [], doctest.DocTestParser()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            name = f"{module}.{getattr(node, 'name', '')}"
            test = parser.get_doctest(ast.get_docstring(node) or "", {}, name, str(path), getattr(node, "lineno", 0))
            found += [test] if test.examples else []
    return found


EXAMPLES = [test for module in MODULES for test in examples(module)]


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example_runs_and_prints_what_the_page_says(test, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write a file
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.FAIL_FAST)
    runner.run(test, out=told.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(told)


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example_is_short_and_narrow(test):
    assert len(test.examples) <= 12
    lines = [f">>> {line}" for example in test.examples for line in example.source.splitlines()]
    lines += [line for example in test.examples for line in example.want.splitlines()]
    assert not [line for line in lines if len(line) > WIDEST]


@pytest.mark.parametrize("test", EXAMPLES, ids=lambda test: test.name)
def test_an_example_stands_in_its_section(test):
    assert re.search(r"^Examples\n--------\n", test.docstring, re.MULTILINE), "the page sets it apart by this heading"


def test_every_module_of_the_page_has_an_example_or_a_reason():
    having = {test.name.split(".")[0] for test in EXAMPLES}
    assert not set(MODULES) - having - WITHOUT.keys(), "give it an Examples section, or a reason in WITHOUT"
    assert not having & WITHOUT.keys(), "strike it from WITHOUT"
    assert WITHOUT.keys() <= set(MODULES)

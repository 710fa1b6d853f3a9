"""In the chapters of experiments no number is typed: what was measured is shown by a cell, from the ledger."""

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

BOOK = Path(__file__).parents[1] / "book"
EXPERIMENTS = ("11_", "13_", "14_", "15_")

# What may hold a number that is no result: mathematics, code, roles with their targets, links, names of papers.
ALLOWED = [
    r"(?s)\$\$.*?\$\$",
    r"(?<![\\$])\$(?!\s)(?:\\.|[^$\\\n]|\n(?!\s*\n))+?\$",
    r"(`+)(?!`)(?:.|\n(?!\s*\n))+?(?<!`)\1(?!`)",  # code, and the argument of a role such as {cite:p}
    r"(?<=\])\([^()\s]*\)",  # the target of a link
    r"<[^<>\s]*>",  # an address
    r"https?://\S+",
    r"(?i)arXiv[: ]\d{4}\.\d{4,5}",
    r"(?m)^ *:(?:name|label|width|height|class):.*$",  # options of a directive
    r"\b\d+\.\d+\.\d+\b",  # a release
]
TYPED = re.compile(r"\d*\.\d+|\d+(?:\s|\\)*%|\d+\s+per\s?cent\b")


def outside_fences(markdown: str) -> Iterator[str]:
    """The lines outside blocks of code and mathematics; the text of other directives, and their title, is prose."""
    block, directives = "", []
    for line in markdown.splitlines():
        fence = re.match(r" *(`{3,}|~{3,}|:{3,})(?:\{([\w:-]+)\})?(.*)", line)
        if block:
            block = "" if fence and line.strip() == block else block
        elif not fence:
            yield line
        elif directives and line.strip() == directives[-1]:
            directives.pop()
        elif fence[2] and not fence[2].startswith(("math", "code")):
            directives.append(fence[1])
            yield fence[3]
        else:
            block = fence[1]


def typed_numbers(markdown: str) -> list[str]:
    """The decimals and percentages in the prose of a Markdown text, each with its surroundings."""
    prose = "\n".join(outside_fences(markdown))
    for pattern in ALLOWED:
        prose = re.sub(pattern, " ", prose)
    return [" ".join(prose[max(0, m.start() - 30) : m.end() + 30].split()) for m in TYPED.finditer(prose)]


def typed_in(path: Path) -> list[str]:
    """The typed numbers of a notebook's Markdown cells, or of a page. A run card is measured and written by a tool."""
    if path.suffix == ".md":
        return typed_numbers(path.read_text(encoding="utf-8"))
    cells = nbformat.read(path, as_version=4).cells
    prose = [c.source for c in cells if c.cell_type == "markdown" and "run-card" not in c.metadata.get("tags", [])]
    return [found for source in prose for found in typed_numbers(source)]


def experiments(book: Path) -> list[Path]:
    """The chapters of experiments that there are."""
    return sorted(path for path in book.glob("[0-9]*") if path.name.startswith(EXPERIMENTS) and path.is_file())


def test_no_result_is_typed() -> None:
    found = [f"{path.name}: {number}" for path in experiments(BOOK) for number in typed_in(path)]
    assert not found, "show these from the ledger, by a cell tagged remove-input:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "DP-SGD reaches 52.3 here.",
        "It gains .3 points.",
        "A share of 68% is zero.",
        "A share of 68 % is zero.",
        r"A share of 68\% is zero.",
        "A share of 68 percent is zero.",
        "| method | NLL |\n| :-- | :-- |\n| DP-SGD | 1.64 |",
        "```{note}\nThe floor is 0.484.\n```",
        "```{exercise-start} Find it (reading, 10 minutes)\n:label: ex-13-x\n```\nWhy 0.5?\n```{exercise-end}\n```",
        "Costs $5 and then 3.5 more.",
        "[An accuracy of 0.5](https://a.org/1.5.html)",
        "In `code`, 0.5 of it; then `more`.",
        "A lonely ` and 0.5.\n\nAnother ` here.",
        "````{note}\n```python\nlr = 0.5\n```\nThe floor is 0.484.\n````",
        ":::{admonition} It gains 5%\nIndeed.\n:::",
        "```python\nlr = 0.5\n```\nThe floor is 0.484.\n```python\nlr = 0.5\n```",
    ],
)
def test_a_typed_number_is_found(text: str) -> None:
    assert len(typed_numbers(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "Three seeds, 10 epochs, 50,000 images, and $\\sigma_p = 1.5$ as in $$ x = 0.4839 $$ (eq-x).",
        "$$\n\\Pr = 0.6827, 68\\%\n$$ (eq-share)",
        "```{math}\n:label: eq-y\nx = 0.5\n```",
        "```{code-block} python\nlr = 0.5\n```",
        "Take `lr=0.5` or ``0.5``.",
        "```python\nlr = 0.5\n```",
        "```bash\npython -m dpivon train --lr 0.5\n```",
        "As {cite:t}`dormann2021not` says {cite:p}`a2.5b`; see {doc}`13_cifar_on_a_laptop`, and {ref}`sec-0.5`.",
        "[The paper](https://arxiv.org/abs/2607.23649), arXiv 2607.23649, <https://a.org/v1.2/>, https://a.org/3.5",
        "End of a sentence with 10. Then 5. A list:\n\n1. one\n2. two",
        "With release 0.3.0 of it.",
        "Chapter 3, figure 2, and e.g. this.",
    ],
)
def test_other_numbers_are_not(text: str) -> None:
    assert typed_numbers(text) == []


def test_of_a_small_notebook_the_prose_is_read_and_nothing_else(tmp_path: Path) -> None:
    new = nbformat.v4
    cells = [
        new.new_markdown_cell("# CIFAR-10\n\nWith $\\delta_p = 10^{-5}$ and `lr = 4.0`."),
        new.new_markdown_cell("| Time | 12.5 s |", metadata={"tags": ["run-card"]}),
        new.new_code_cell("print(0.5)", outputs=[new.new_output("stream", text="0.5 or 50%")]),
        new.new_code_cell("display(Markdown(f'{x:.1%}'))", metadata={"tags": ["remove-input"]}),
    ]
    path = tmp_path / "13_cifar.ipynb"
    nbformat.write(new.new_notebook(cells=cells), path)
    assert typed_in(path) == []
    cells.append(new.new_markdown_cell("DP-SGD reaches 52.4% of them,\nat an ECE of 0.21."))
    nbformat.write(new.new_notebook(cells=cells), path)
    (tmp_path / "13_page.md").write_text("It takes 1.5 hours.")
    (tmp_path / "02_dp_sgd.md").write_text("It takes 1.5 hours.")
    assert experiments(tmp_path) == [path, tmp_path / "13_page.md"]
    assert len(typed_in(path)) == 2
    assert "52.4%" in typed_in(path)[0]
    assert len(typed_in(tmp_path / "13_page.md")) == 1

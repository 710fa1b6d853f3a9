"""The words of the book: one spelling, plain words, and a glossary that is in order and in use."""

import re
from pathlib import Path

import nbformat
import pytest

BOOK = Path(__file__).parents[1] / "book"
PAGES = sorted([*BOOK.glob("[0-9]*.ipynb"), *BOOK.glob("*.md")])

# British spellings of words that the book uses; it is written in American English.
BRITISH = (
    r"\b(?:colour|behaviour|favour|neighbour|labell|modell|normalis|optimis(?!ti|m)|generalis|organis|recognis|randomis"
    r"|initialis|regularis|minimis|maximis|emphasis(?!\b)|summaris|centre|learnt|grey|towards|artefact|tumour|analys(?:e|ed|ing)\b)"
)
HYPE = r"\b(?:simply|obviously|trivially|novel|groundbreaking|state-of-the-art|leverag\w+|utiliz\w+)\b"


def prose(path: Path) -> str:
    """What a reader sees of a page as text: Markdown, captions and descriptions of figures; no code, no formulas."""
    if path.suffix == ".ipynb":
        parts = []
        for cell in nbformat.read(path, as_version=4).cells:
            figure = cell.metadata.get("mystnb", {})
            parts += [cell.source] if cell.cell_type == "markdown" else []
            parts += [figure.get("figure", {}).get("caption", ""), figure.get("image", {}).get("alt", "")]
        text = "\n\n".join(parts)
    else:
        text = path.read_text(encoding="utf-8")
    for hidden in (r"^(`{3,})(?:\{code-cell\}|python|bash|toml|text)[\s\S]*?^\1$", r"\$\$[\s\S]*?\$\$", r"\$[^$\n]*\$"):
        text = re.sub(hidden, "", text, flags=re.MULTILINE)
    return re.sub(r"\{(?:cite|doc|ref|eq|py|numref)[^}]*\}`[^`]*`|`[^`\n]*`(?!\s*\w*\{term\})", "", text)


def glossary() -> dict[str, str]:
    """The entries of the glossary by their term, in order."""
    body = (BOOK / "glossary.md").read_text(encoding="utf-8").split("```{glossary}\n")[1].rsplit("```", 1)[0]
    return {
        entry.partition("\n")[0]: entry.partition("\n")[2] for entry in re.split(r"\n(?=\S)", body.strip("\n")) if entry
    }


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_spelling_is_american_and_the_words_are_plain(path):
    text = prose(path)
    assert text.strip(), "a page without words: is the search broken?"
    assert not re.findall(BRITISH, text)
    assert not re.findall(HYPE, text, re.IGNORECASE)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_letter_in_parentheses_becomes_a_copyright_sign(path):
    # The site's Markdown turns (c), (r) and (tm) into signs; write (*c*).
    assert not re.findall(r"\((?:c|r|tm)\)", prose(path), re.IGNORECASE)


def test_the_glossary_is_in_alphabetical_order():
    terms = list(glossary())
    assert len(terms) > 100
    assert terms == sorted(terms, key=str.lower)
    assert len({term.lower() for term in terms}) == len(terms)


def test_each_entry_of_the_glossary_says_what_it_means():
    short = [term for term, meaning in glossary().items() if len(meaning.split()) < 6]
    assert not short


def test_each_word_of_the_glossary_is_used_in_the_book():
    text = "\n".join(
        cell.source for path in PAGES if path.suffix == ".ipynb" for cell in nbformat.read(path, as_version=4).cells
    )
    text += "\n".join(path.read_text(encoding="utf-8") for path in BOOK.glob("*.md") if path.stem != "glossary")
    text = re.sub(r"\s+", " ", text).lower()
    linked = {link.lower() for link in re.findall(r"\{term\}`(?:[^`<]*<)?([^`>]+)>?`", text)}
    unused = [term for term in glossary() if term.lower() not in text and term.lower() not in linked]
    assert not unused, f"define only what a page uses: {unused}"

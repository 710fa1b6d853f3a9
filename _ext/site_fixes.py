"""Small repairs that make the built site self-contained, accessible and free of errors.

Each function mends one thing that the tools get wrong or leave out, and says what.
"""

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

MATHJAX = ("tex-mml-chtml.js", "output/chtml/fonts/woff-v2")


def copy_mathjax(app: Sphinx) -> None:
    """Serve MathJax from the site itself: copy it from the installed package `django-static-mathjax`."""
    if app.builder.format != "html":
        return
    spec = find_spec("mathjax")
    if spec is None or spec.origin is None:
        raise ExtensionError("MathJax is missing: pip install -r requirements.txt (django-static-mathjax)")
    source = Path(spec.origin).parent / "static" / "mathjax" / "es5"
    target = Path(app.outdir) / "_static" / "mathjax"
    for name in MATHJAX:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, dirs_exist_ok=True)
        else:
            shutil.copy2(source / name, target / name)


def drop_thebe(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Drop the scripts of sphinx-thebe: unused here, and declared twice, a JavaScript error on every page."""
    for files in ("script_files", "css_files"):
        context[files] = [
            file
            for file in context.get(files, [])
            if "thebe" not in str(getattr(file, "filename", file)) + str(getattr(file, "attributes", ""))
        ]


def drop_icon_script(app: Sphinx, failure: Exception | None) -> None:
    """Drop Font Awesome's script, half a megabyte on every page: the fonts of the style sheet draw the same icons."""
    if failure is not None or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text()
        mended = re.sub(r'\s*<script defer src="[^"]*/fontawesome\.js[^"]*"></script>', "", text)
        if mended != text:
            page.write_text(mended)


def mend_body(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Mend what the tools write into a page."""
    body = context.get("body", "")
    # A list role without list items is of no use to a screen reader.
    body = body.replace('<div role="list" class="citation-list">', '<div class="citation-list">')
    # The same id in every exercise, solution and proof of a page.
    body = re.sub(r' id="(exercise|solution|proof)-content"', "", body)
    # "Exercise 1.1 (Title (coding, 10 minutes))": brackets within brackets.
    body = re.sub(
        r'(<span class="caption-number">Exercise [\d.]+ ?</span>) \((.*) \(([^()]*)\)\)</p>',
        r'\1 \2 <span class="exercise-effort">\3</span></p>',
        body,
    )
    # The parameters of a long signature, a line each, as a definition list that defines nothing.
    body = re.sub(
        r'<dl>\n((?:<dd><em class="sig-param">.*</dd>\n)+)</dl>\n*',
        lambda match: '<span class="sig-lines">' + re.sub(r"<(/?)dd>", r"<\1span>", match[1]) + "</span>",
        body,
    )
    # A comma or a full stop after a formula never starts a line.
    body = re.sub(
        r'(<span class="math notranslate nohighlight">\\\([^<]*\\\)</span>)([.,;:!?)]+)',
        r'<span class="keep-together">\1\2</span>',
        body,
    )
    context["body"] = body


def mark_run_cards(app: Sphinx, doctree: nodes.document) -> None:
    """Give the table that starts with "Run card" a class, so that the style sheet can draw it as a card."""
    for table in doctree.findall(nodes.table):
        first = next(table.findall(nodes.entry), None)
        if first is not None and first.astext() == "Run card":
            table["classes"].append("run-card")


def ask_before_answering(app: Sphinx, doctree: nodes.document) -> None:
    """Show the question of a "Check yourself" box at once, and fold only its answer."""
    for box in list(doctree.findall(nodes.admonition)):
        at = next((i for i, part in enumerate(box) if part.astext().startswith("Answer.")), None)
        if at is None or not box.astext().startswith("Check yourself") or "dropdown" not in box["classes"]:
            continue
        answer = box.children[at:]
        del box[at:]
        answer[0].remove(next(answer[0].findall(nodes.strong)))  # the word itself, which becomes the title
        box["classes"] = ["check-yourself"]
        box += nodes.admonition("", nodes.title("", "Answer"), *answer, classes=["dropdown"])


def split_parameters(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Read `name : what it is` as a name and its description; napoleon takes it for a name and its type.

    A short text above an indented description is a type, and stays. Likewise "text: more" that opens the docstring
    of a property is a sentence; napoleon would take its beginning for a type, but not an empty one.
    """
    if what in ("attribute", "data", "property") and lines:
        lines[0] = f": {lines[0]}"
    for index in range(len(lines) - 1, -1, -1):
        entry = re.match(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*) : (.+)", lines[index])
        described = index + 1 < len(lines) and lines[index + 1].startswith(" ")
        if entry and not (described and len(lines[index]) <= 60):
            lines[index : index + 1] = [entry[1], f"    {entry[2]}"]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", copy_mathjax)
    app.connect("build-finished", drop_icon_script)
    app.connect("html-page-context", drop_thebe, priority=900)
    app.connect("html-page-context", mend_body, priority=900)
    app.connect("doctree-read", mark_run_cards)
    app.connect("doctree-read", ask_before_answering)
    app.connect("autodoc-process-docstring", split_parameters, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

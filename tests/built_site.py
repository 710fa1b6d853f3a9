"""Where the built site is, and what to do without it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SITE = Path(os.environ.get("DPIVON_SITE", ROOT / "_build" / "html"))


def pages() -> list[str]:
    """The addresses of all pages, relative to the site; the index only forwards to the first of them."""
    if not (SITE / "index.html").exists():
        return []
    return sorted(str(page.relative_to(SITE)) for page in SITE.rglob("*.html") if "_static" not in page.parts)


def missing(reason: str) -> None:
    """Skip, or fail under CI, where nothing that a test needs may be missing."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def need_site() -> None:
    if not pages():
        missing("the site is not built: run `make book` first")

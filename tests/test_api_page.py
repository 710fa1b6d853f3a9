"""The API page shows every module."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_module_is_on_the_page() -> None:
    page = (ROOT / "book" / "api.md").read_text()
    shown = re.findall(r"^\.\. automodule:: dpivon\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(path.stem for path in (ROOT / "dpivon").glob("*.py") if path.stem != "__init__")

"""The repository's address and the version have one place each; everything else agrees with it."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import dpivon
from tools import address

ROOT = Path(__file__).parents[1]


def test_every_file_shows_the_address_of_the_config() -> None:
    found = [path.name for path, _ in address.stragglers(ROOT, {"dpivon"})]
    assert not found, f"{found} show another address or tag: run `python tools/address.py`"


def test_the_address_stands_where_readers_need_it() -> None:
    url = "https://github.com/" + "/".join(address.current())
    for name in ("README.md", "CITATION.cff", "pyproject.toml"):
        assert url in (ROOT / name).read_text(), name


# Not written out, lest this file shows another address itself.
HUB = "https://github" + ".com"
TEXT = (
    "[a](https://colab.research.google.com/github/{0}/blob/x.ipynb) git+"
    + HUB
    + "/{0}@v1 https://{1}.github.io/{2}/x\n"
    "but " + HUB + "/pytorch/opacus and " + HUB + "/you/dpivon-data\n"
)
OPENS = "https://colab.research.google.com/github/{0}/blob/{1}/x.ipynb https://mybinder.org/v2/gh/{0}/{1}?urlpath=x"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "_config.yml").write_text(f"repository:\n  url: {HUB}/me/dpivon\n  branch: v7.0\n")
    (tmp_path / "README.md").write_text(TEXT.format("you/dpivon", "you", "dpivon"))
    (tmp_path / "binary.bin").write_bytes(b"\0" + f"{HUB}/you/dpivon".encode())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_stragglers_are_found_and_set(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["address.py", "--check"])
    assert address.main(repository) == 1
    monkeypatch.setattr(sys, "argv", ["address.py", f"{HUB}/them/book/"])
    assert address.main(repository) == 0
    assert address.current(repository) == ("them", "book")
    assert (repository / "README.md").read_text() == TEXT.format("them/book", "them", "book")
    monkeypatch.setattr(sys, "argv", ["address.py", "--check"])
    assert address.main(repository) == 0


def test_links_that_open_a_notebook_open_the_release(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["address.py"])
    (repository / "README.md").write_text(OPENS.format("me/dpivon", "main"))
    assert address.main(repository) == 0
    assert (repository / "README.md").read_text() == OPENS.format("me/dpivon", "v7.0")


def test_a_bad_address_changes_nothing(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (repository / "_config.yml").read_text()
    monkeypatch.setattr(sys, "argv", ["address.py", "https://example.org/x"])
    assert address.main(repository) == 1
    assert (repository / "_config.yml").read_text() == before


def test_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert dpivon.__version__ == version
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == version
    assert address.tag() == f"v{version}", "repository.branch of _config.yml is what Colab and Binder open"
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

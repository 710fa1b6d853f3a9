"""Carry the repository's address and the release's tag from `_config.yml` to every place that shows them.

    python tools/address.py              after editing `repository.url` or `repository.branch` in _config.yml
    python tools/address.py URL          write URL there first
    python tools/address.py --check      only list the places that show another one

`repository.branch` is the tag whose notebooks Colab and Binder open. Chapters are changed without being executed
again: only the address in their first code cell moves.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import yaml

ROOT = Path(__file__).parents[1]
# Where the address stands in a text: behind these, as owner/name, and as the owner's pages.
HOSTS = r"github\.com/|colab\.research\.google\.com/github/|mybinder\.org/v2/gh/|mybinder\.org/badge/"


def current(root: Path = ROOT) -> tuple[str, str]:
    """Owner and name of the repository."""
    url = yaml.safe_load((root / "_config.yml").read_text())["repository"]["url"]
    parts = urlsplit(url)
    owner, _, name = parts.path.strip("/").partition("/")
    if parts.scheme != "https" or parts.netloc != "github.com" or not name or "/" in name:
        raise ValueError(f"repository.url must be https://github.com/OWNER/NAME, got {url!r}")
    return owner, name


def tag(root: Path = ROOT) -> str:
    """The release that Colab and Binder open."""
    return str(yaml.safe_load((root / "_config.yml").read_text())["repository"]["branch"])


def files(root: Path = ROOT) -> list[Path]:
    """The text files of the repository: what git tracks or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return [root / name for name in listed if (root / name).is_file() and b"\0" not in (root / name).read_bytes()]


def corrected(text: str, owner: str, name: str, names: set[str], release: str) -> str:
    """The text with this address in place of any other owner's repository that is called one of `names`.

    Links that open a notebook open that of the tag `release`.
    """
    called = "|".join(map(re.escape, sorted(names)))
    text = re.sub(rf"({HOSTS})[\w.-]+/(?:{called})(?![\w-])", rf"\g<1>{owner}/{name}", text)
    opens = rf"(colab\.research\.google\.com/github/{owner}/{name}/blob/|mybinder\.org/v2/gh/{owner}/{name}/)"
    text = re.sub(rf"{opens}[\w.-]+(?=[/?])", rf"\g<1>{release}", text)
    return re.sub(rf"https://[\w-]+\.github\.io/(?:{called})(?![\w-])", f"https://{owner}.github.io/{name}", text)


def stragglers(root: Path, names: set[str]) -> Iterator[tuple[Path, str]]:
    """Each file that shows another address, with its corrected text."""
    owner, name = current(root)
    for path in files(root):
        text = path.read_text()
        new = corrected(text, owner, name, names | {name}, tag(root))
        if new != text:
            yield path, new


def main(root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    names = {"dpivon", current(root)[1]}
    if arguments.url:
        config = root / "_config.yml"
        text = config.read_text()
        config.write_text(re.sub(r"(?m)^(  url:) \S+$", rf"\1 {arguments.url.rstrip('/')}", text, count=1))
        try:
            current(root)
        except ValueError as error:
            config.write_text(text)
            print(error, file=sys.stderr)
            return 1
    found = list(stragglers(root, names))
    for path, new in found:
        print(path.relative_to(root))
        if not arguments.check:
            path.write_text(new)
    return int(arguments.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())

"""Run the notebooks as a new reader does: the released package is installed, and no repository is there.

    python tools/release.py                         all notebooks, on the oldest and the newest supported torch
    python tools/release.py --chapter 02            the chapter whose name begins so; assignments/02 for an assignment
    python tools/release.py --torch newest          one torch: oldest, newest, or a version such as 2.9.1
    python tools/release.py --data FOLDER           with CIFAR-10, which a new reader has not

For each torch a new virtual environment gets the wheel of the last commit, as the first cell of a notebook asks for it.
Each notebook is executed from top to bottom in an empty folder; an assignment with its solutions. The results that a
chapter would download from the release's tag, which need not be set yet, lie in a cache. The exit status is 1 if a
notebook fails. pip needs the network, and 6 GB of disk where it takes torch with CUDA.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import nbformat

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.notebooks import ROOT, NotebookError, execute, tagged

# What would show the repository, or this environment, to the kernel of another one.
OURS = re.compile(r"DPIVON_|PYTHON|VIRTUAL_ENV|JUPYTER|XDG_")


def checkout(folder: Path) -> Path:
    """The last commit, in a folder of its own."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "-x"], cwd=folder, input=archive, check=True)
    return folder


def supported(source: Path) -> dict[str, str]:
    """The oldest torch that the package admits, and the newest that the book's own requirements do."""
    where = {
        "oldest": ("pyproject.toml", r'"torch>=([\d.]+)'),
        "newest": ("requirements.txt", r"(?m)^torch\b.*<=([\d.]+)"),
    }
    found = {which: re.search(pattern, (source / file).read_text()) for which, (file, pattern) in where.items()}
    return {which: match[1] for which, match in found.items() if match}


def notebooks(source: Path, start: str = "") -> list[str]:
    """The names of the chapters and the assignments that begin with `start`."""
    book = source / "book"
    paths = sorted(book.glob("[0-9]*.ipynb")) + sorted(book.glob("assignments/[0-9]*.ipynb"))
    names = [str(path.relative_to(book).with_suffix("")) for path in paths]
    return [name for name in names if name.startswith(start)]


def wheel(source: Path, folder: Path, *options: str) -> Path:
    """The package of a checkout, built into `folder`."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", *options]
    subprocess.run([*pip, "--wheel-dir", folder, source], check=True)
    return next(folder.glob("dpivon-*.whl"))


def asked(source: Path) -> str:
    """What the first cell of the notebooks installs, such as `dpivon[plots,sweep]`."""
    cell = tagged(nbformat.read(source / "book" / f"{notebooks(source)[0]}.ipynb", as_version=4), "colab")
    found = re.search(r'"(dpivon[^"@]*?) @ ', cell.source if cell else "")
    if found is None:
        raise NotebookError("the first code cell of the first chapter installs no dpivon")
    return found[1]


def environment(folder: Path, *requirements: str) -> Path:
    """The Python of a new virtual environment, with these requirements and what a notebook's kernel needs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "ipykernel", *requirements], check=True)
    return python


@contextmanager
def newcomer(python: Path, source: Path, data: Path | None = None) -> Iterator[str]:
    """The machine of a new reader: a kernel of `python`, called release, and no trace of ours; yields its torch."""
    with tempfile.TemporaryDirectory() as name, patch.dict(os.environ):
        folder = Path(name)
        for key in filter(OURS.match, list(os.environ)):
            del os.environ[key]
        os.environ |= {"XDG_CACHE_HOME": str(folder / "cache"), "JUPYTER_PATH": str(folder)}
        if data is not None:
            os.environ["DPIVON_DATA"] = str(data.resolve())
        kernel = folder / "kernels" / "release" / "kernel.json"
        kernel.parent.mkdir(parents=True)
        argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel.write_text(json.dumps({"argv": argv, "display_name": "release", "language": "python"}))
        # The drawing library makes its list of fonts now: it would say so on stderr, in the first notebook.
        look = "import dpivon, torch, matplotlib.pyplot; print(dpivon.__file__, dpivon.__version__, torch.__version__)"
        seen = subprocess.run([python, "-c", look], cwd=folder, text=True, capture_output=True)
        if seen.returncode:
            raise NotebookError(f"the installed package cannot be imported:\n{seen.stderr}")
        place, version, torch = seen.stdout.split()
        if not Path(place).resolve().is_relative_to(python.parents[1].resolve()):
            raise NotebookError(f"dpivon is imported from {place}, not from the new environment")
        results = folder / "cache" / "dpivon" / "results" / version
        results.mkdir(parents=True)
        for file in filter(Path.is_file, (source / "book" / "results").rglob("*")):
            name = str(file.relative_to(source / "book" / "results")).replace("/", "-")
            (results / name).write_bytes(file.read_bytes())
        yield torch


def run(name: str, source: Path, torch: str) -> bool:
    """Execute one notebook in an empty folder with the newcomer's kernel, and print a line of the table."""
    notebook = nbformat.read(source / "book" / f"{name}.ipynb", as_version=4)
    try:
        seconds, memory = execute(notebook, name, kernel="release")
    except NotebookError as error:
        print(f"{name:40} {torch:14} {'':12} ERROR\n{error}", flush=True)
        return False
    print(f"{name:40} {torch:14} {seconds:4.0f} s {memory:4.1f} GB  ok", flush=True)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chapter", default="", metavar="NAME")
    parser.add_argument("--torch", default="both", metavar="VERSION")
    parser.add_argument("--data", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = checkout(folder / "source")
        names = notebooks(source, arguments.chapter)
        if not names:
            parser.error(f"{arguments.chapter!r} begins no notebook's name; there are {', '.join(notebooks(source))}")
        known = supported(source)
        versions = known.values() if arguments.torch == "both" else [known.get(arguments.torch, arguments.torch)]
        package = f"{asked(source)} @ {wheel(source, folder).as_uri()}"
        passed = []
        for version in versions:
            try:
                python = environment(folder / version, f"torch=={version}", package)
                with newcomer(python, source, arguments.data) as torch:
                    passed += [run(name, source, torch) for name in names]
            except (NotebookError, subprocess.CalledProcessError) as error:
                print(f"torch {version}: ERROR\n{error}", flush=True)
                passed.append(False)
        print(f"{sum(passed)} of {len(passed)} ran from top to bottom")
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())

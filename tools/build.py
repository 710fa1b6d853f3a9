"""Build the site into _build/html; any warning is an error.

    python tools/build.py

Every page is read again: a page that Sphinx has kept from the last build would keep its warnings to itself.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
SITE = ROOT / "_build" / "html"


def build() -> bool:
    """Build strictly; print the warnings if there are any. True if there are none."""
    start = time.perf_counter()
    jupyter_book = str(Path(sys.executable).with_name("jupyter-book"))
    command = [jupyter_book, "build", ".", "--all", "-W", "--keep-going", "-n", "-q"]
    # Only the index page says that a build is complete.
    (SITE / "index.html").unlink(missing_ok=True)
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode == 0:
        lighten(SITE / "_images")
        print(f"Built {len(list(SITE.rglob('*.html')))} pages without a warning in {time.perf_counter() - start:.0f} s")
        return True
    (SITE / "index.html").unlink(missing_ok=True)
    output = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)
    warnings = [line for line in output.splitlines() if re.search(r"WARNING|ERROR|CRITICAL", line)]
    print("\n".join(warnings) or output or f"jupyter-book ended with status {result.returncode}")
    print(f"error: the site has {len(warnings) or 'some'} problems, see above; mend them and build again")
    return False


def lighten(folder: Path) -> None:
    """Draw each picture of the folder with 256 colors, enough for a plot to the eye, and a third of the bytes."""
    for path in folder.glob("*.png"):
        with Image.open(path) as picture:
            if picture.mode == "P":
                continue
            if picture.mode == "RGBA" and picture.getchannel("A").getextrema() != (255, 255):
                continue  # what is see-through stays as it is
            size, dpi = path.stat().st_size, picture.info.get("dpi")
            few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
        lighter = path.with_suffix(".lighter")
        few.save(lighter, "PNG", optimize=True, **({"dpi": dpi} if dpi else {}))
        if lighter.stat().st_size < size:
            lighter.replace(path)
        else:
            lighter.unlink()


if __name__ == "__main__":
    sys.exit(not build())

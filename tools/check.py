"""Run every check of the project and end with a summary: what passed, what was skipped and why, what was slow.

    python tools/check.py

A check that fails does not hide the ones after it. Where there is no browser or no CIFAR-10, the tests that need
them are skipped, with the remedy; under CI=true they fail instead.
"""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.build import ROOT, build
from tools.notebooks import ENVIRONMENT

BIN = Path(sys.executable).parent
PYTEST = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--strict-markers", "--no-header"]
# A notebook's cells stay together (loadscope), and so do the pages in one colour scheme (loadgroup).
WORKERS = ["-n", "2", "--max-worker-restart", "0", "--dist"]
UNITS = ["tests", "book", "-m", "not site and not browser", "--nbval-lax", "--nbval-current-env"]
SITE = ["tests", "-m", "site or browser"]


class Summary:
    """What the checks have found so far."""

    def __init__(self) -> None:
        self.rows: list[tuple[bool, str, str, float]] = []
        self.tests: Counter[str] = Counter()
        self.times: list[tuple[float, str]] = []
        self.skipped: Counter[str] = Counter()

    def add(self, passed: bool, name: str, result: str, start: float) -> None:
        self.rows.append((passed, name, result, time.perf_counter() - start))

    def read(self, report: Path) -> str:
        """Add up a JUnit report of pytest; return its counts in words."""
        counts: Counter[str] = Counter()
        for case in ElementTree.parse(report).iter("testcase"):
            outcome = "passed"
            for child in case:
                if child.tag in ("failure", "error"):
                    outcome = "failed"
                elif child.tag == "skipped":
                    outcome = "skipped"
                    self.skipped[child.get("message", "")] += 1
            counts[outcome] += 1
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            self.times.append((float(case.get("time", 0)), name))
        self.tests += counts
        return ", ".join(f"{counts[key]} {key}" for key in ("passed", "failed", "skipped") if counts[key])

    def show(self) -> None:
        print("\n\nThe ten slowest tests")
        for seconds, name in sorted(self.times, reverse=True)[:10]:
            print(f"  {seconds:6.1f} s  {name}")
        if self.skipped:
            print("\nSkipped")
            for reason, count in self.skipped.items():
                print(f"  {count} x {reason}")
        print("\nSummary")
        for passed, name, result, seconds in self.rows:
            print(f"  {'ok    ' if passed else 'FAILED'}  {name:22} {seconds:5.0f} s   {result}")
        failed = [name for passed, name, *_ in self.rows if not passed]
        print(f"\nNot passed: {', '.join(failed)}. Their output is above." if failed else "\nAll checks passed.")
        print(f"{self.tests['passed']} passed, {self.tests['failed']} failed, {self.tests['skipped']} skipped")


def heading(name: str) -> float:
    print(f"\n--- {name}", flush=True)
    return time.perf_counter()


def command(summary: Summary, name: str, *words: str) -> None:
    start = heading(name)
    code = subprocess.run([BIN / words[0], *words[1:]], cwd=ROOT).returncode
    summary.add(code == 0, name, " ".join(words), start)


def pytest(summary: Summary, name: str, arguments: list[str]) -> None:
    start = heading(name)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        environment = {**os.environ, **ENVIRONMENT}
        code = subprocess.run([*PYTEST, f"--junitxml={report}", *arguments], cwd=ROOT, env=environment).returncode
        counts = summary.read(report) if report.exists() else "no report"
    summary.add(code == 0, name, counts, start)


def main() -> int:
    summary = Summary()
    command(summary, "style", "ruff", "check", ".")
    command(summary, "format", "ruff", "format", "--check", ".")
    command(summary, "types", "mypy")
    pytest(summary, "units and notebooks", [*UNITS, *WORKERS, "loadscope"])
    start = heading("strict build")
    built = build()
    summary.add(built, "strict build", "warnings are errors", start)
    if built:
        pytest(summary, "site and browser", [*SITE, *WORKERS, "loadgroup"])
    else:
        summary.add(False, "site and browser", "not run: there is no site", time.perf_counter())
    summary.show()
    return int(not all(passed for passed, *_ in summary.rows))


if __name__ == "__main__":
    sys.exit(main())

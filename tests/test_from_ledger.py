"""The roles that put numbers of the ledger into pages: what they show, what they refuse, and that every page's work."""

import re
import sys
from pathlib import Path

import pytest

from dpivon import accounting, ledger, records

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "_ext"))

import from_ledger  # noqa: E402

PAGES = sorted((ROOT / "book").glob("*.md"))
ROLE = re.compile(r"\{(ledger[\w-]*)\}`([^`]+)`")
SHOWN = {
    "ledger": from_ledger.field,
    "ledger-together": from_ledger.together,
    "ledger-mean": from_ledger.average,
    "ledger-cost": from_ledger.cost,
    "ledger-range": from_ledger.extent,
    "ledger-best": from_ledger.claim,
}
BLOCK = re.compile(r"^`{3}\{ledger-statement\} (\S+) (\S+)$", re.MULTILINE)
FILE = "lenet"


@pytest.fixture(scope="module")
def record():
    return next(r for r in ledger.read(from_ledger.RESULTS / f"{FILE}.jsonl") if r["config"]["method"] == "dp-sgd")


def test_a_field(record):
    start = f"{FILE} {record['key'][:10]}"
    privacy = record["privacy"]
    assert from_ledger.field(f"{start} privacy.steps") == f"{privacy['steps']:,}"
    assert from_ledger.field(f"{start} privacy.unit") == "one training example"
    assert from_ledger.field(f"{start} privacy.epsilon .1f") == f"{privacy['epsilon']:.1f}"
    assert privacy["epsilon"] <= float(from_ledger.field(f"{start} privacy.epsilon up")) < privacy["epsilon"] + 1e-3
    assert from_ledger.field(f"{start} privacy.simulation") == "True"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{file} {key}", "FILE KEY NAME"),
        ("nowhere {key} seed", "there is no ledger 'nowhere'"),
        ("{file} zzz seed", "'zzz' must be the beginning"),
        ("{file} {key} privacy.epsilo", "says nothing under 'privacy.epsilo'"),
        ("{file} {key} privacy", "says nothing under 'privacy' that fits"),
        ("{file} {key} privacy.unit .2f", "Unknown format code 'f'"),
    ],
)
def test_what_is_not_there_is_refused(record, text, message):
    with pytest.raises(ValueError, match=message):
        from_ledger.field(text.format(file=FILE, key=record["key"]))


def test_the_statement_is_that_of_the_run(record):
    text = from_ledger.statement(FILE, record["key"])
    assert text.startswith(f"({accounting.up(record['privacy']['epsilon']):g}, 1e-05)-differential privacy")
    assert f"sigma {record['privacy']['noise_multiplier']:.4g}" in text
    assert "simulation" in text


def test_a_statement_is_checked(record, monkeypatch):
    wrong = {**record, "privacy": {**record["privacy"], "epsilon": 1.0}}
    monkeypatch.setattr(from_ledger, "lines", lambda file: [wrong])
    with pytest.raises(ValueError, match="epsilon is recorded as 1"):
        from_ledger.statement(FILE, record["key"])
    monkeypatch.setattr(from_ledger, "lines", lambda file: [{**record, "privacy": None}])
    with pytest.raises(ValueError, match="is not private"):
        from_ledger.statement(FILE, record["key"])


def test_runs_together_cost_what_their_steps_cost(record):
    p = record["privacy"]
    one = f"{FILE} key={record['key']}"
    twice = accounting.epsilon(p["noise_multiplier"], p["sample_rate"], 2 * p["steps"], p["delta"])
    assert from_ledger.together(one) == f"{accounting.up(p['epsilon']):g}"
    assert float(from_ledger.together(f"{one}; {one}")) == pytest.approx(twice, abs=2e-3)
    with pytest.raises(ValueError, match="no finished private run"):
        from_ledger.together(f"{FILE} method=none-of-them")


def test_every_role_of_the_book_shows_something():
    found = [(name, text) for page in PAGES for name, text in ROLE.findall(page.read_text())]
    assert found
    for name, text in found:
        assert SHOWN[name](text)
    for page in PAGES:
        for file, key in BLOCK.findall(page.read_text()):
            assert from_ledger.statement(file, key)


def test_the_report_counts_its_trials():
    """The page says that eight settings were tried, and adds up these and the run: nine in all."""
    text = (ROOT / "book" / "reporting.md").read_text()
    assert "Eight settings were tried" in text
    assert "adding up all nine" in text
    (parts,) = (argument for name, argument in ROLE.findall(text) if name == "ledger-together")
    trials, run = (part.split() for part in parts.split(";"))
    assert len(records.select(from_ledger.lines(trials[0]), trials[1:])) == 8
    assert len(records.select(from_ledger.lines(run[0]), run[1:])) == 1

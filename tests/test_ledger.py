"""The ledger: whole lines or none, whatever happens to the writers."""

import email.message
import http.server
import json
import multiprocessing
import os
import threading
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from dpivon import ledger, train


def record(seed=0):
    config = asdict(train.resolve(train.Config(method="dp-sgd", seed=seed)))
    return {
        "schema": ledger.SCHEMA,
        "recipe": 1,
        "key": ledger.key(config, 1),
        "status": "finished",
        "config": config,
        "privacy": None,
        "results": {"mean": {"accuracy": 0.5}},
        "code": ledger.code_state(),
        "seconds": 1.5,
        **ledger.environment(),
    }


def test_a_gpu_is_named_where_the_run_was_on_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"chip of {device}")
    assert [ledger.environment(d)["hardware"]["gpu"] for d in ("cpu", "cuda:1")] == [None, "chip of cuda:1"]


def test_what_is_written_is_read_back(tmp_path):
    file = tmp_path / "läufe.jsonl"
    for seed in range(3):
        ledger.append(file, record(seed))
    records = ledger.read(file)
    assert [r["config"]["seed"] for r in records] == [0, 1, 2]
    assert len({r["key"] for r in records}) == 3
    assert records[0]["versions"]["torch"]
    assert ledger.read(tmp_path / "none.jsonl") == []


def test_the_key_depends_on_configuration_and_recipe_only():
    config = asdict(train.Config(method="dp-sgd", seed=1))
    assert ledger.key(config, 1) == ledger.key(dict(reversed(config.items())), 1)
    assert ledger.key(config, 1) != ledger.key(config, 2)
    assert ledger.key(config, 1) != ledger.key({**config, "seed": 2}, 1)
    assert ledger.key(config, 1) == ledger.key({**config, "a_later_option": None}, 1)
    assert ledger.key(config, 1) != ledger.key({**config, "a_later_option": 0}, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "schema 99 is not 1"),
        ({"seconds": "long"}, "field 'seconds' has the wrong type: 'long'"),
        ({"recipe": 2}, "does not belong to the record's configuration"),
        ({"status": "done"}, "status 'done' is none of finished, interrupted, failed"),
        ({"status": "failed"}, "a record has an error if and only if it failed, and this one is failed"),
        ({"error": "OSError"}, "a record has an error if and only if it failed, and this one is finished"),
        ({"status": "failed", "error": 3}, "field 'error' has the wrong type: 3"),
        ({"cost": 3}, "field 'cost' has the wrong type: 3"),
    ],
)
def test_what_does_not_fit_the_schema_is_not_written(tmp_path, change, message):
    file = tmp_path / "runs.jsonl"
    with pytest.raises(ledger.LedgerError, match=message):
        ledger.append(file, {**record(), **change})
    incomplete = record()
    del incomplete["results"]
    with pytest.raises(ledger.LedgerError, match="lacks results"):
        ledger.append(file, incomplete)
    assert not file.exists()


def test_a_line_cut_in_half_spoils_no_other(tmp_path):
    file = tmp_path / "runs.jsonl"
    ledger.append(file, record(0))
    with open(file, "ab") as torn:
        torn.write(json.dumps(record(1)).encode()[:100])
    ledger.append(file, record(2))
    with pytest.raises(ledger.LedgerError, match=r"runs.jsonl, line 2: .*strict=False"):
        ledger.read(file)
    assert [r["config"]["seed"] for r in ledger.read(file, strict=False)] == [0, 2]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "runs.jsonl"
    ledger.append(file, record(0))
    before = file.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ledger.append(file, record(1))
    assert file.read_bytes() == before


def write_many(arguments):
    file, start = arguments
    for seed in range(start, start + 20):
        ledger.append(file, record(seed))


def test_two_writers_lose_nothing(tmp_path):
    file = str(tmp_path / "runs.jsonl")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.map(write_many, [(file, 0), (file, 100)])
    assert sorted(r["config"]["seed"] for r in ledger.read(file)) == [*range(20), *range(100, 120)]


def test_failed_runs_and_lines_of_earlier_releases_can_be_read(tmp_path):
    file = tmp_path / "runs.jsonl"
    ledger.append(file, {**record(0), "status": "failed", "error": "FloatingPointError: diverged", "results": {}})
    ledger.append(file, record(1))  # without cost, as it was written before there was one
    assert [r.get("error") for r in ledger.read(file)] == ["FloatingPointError: diverged", None]


def test_published_results_are_the_checkouts_own() -> None:
    path = ledger.published("grids/lenet_arms.toml")
    assert path == Path(__file__).parents[1] / "book" / "results" / "grids" / "lenet_arms.toml"
    with pytest.raises(OSError, match=r"there is no lenet.json in .*lenet.jsonl"):
        ledger.published("lenet.json")


def test_elsewhere_published_results_are_downloaded_once_from_this_release(tmp_path, monkeypatch) -> None:
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path.endswith("/a.toml") else 404)
            self.end_headers()
            self.wfile.write(b"[base]\n")

        def log_message(self, *arguments) -> None:
            pass

    links = email.message.Message()
    monkeypatch.setattr(ledger, "__file__", str(tmp_path / "site" / "dpivon" / "ledger.py"))
    monkeypatch.setattr(ledger, "metadata", lambda name: links)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        links["Project-URL"] = "Documentation, http://127.0.0.1:9/"
        links["Project-URL"] = f"Repository, http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            assert ledger.published("grids/a.toml").read_bytes() == b"[base]\n"
            ledger.published("grids/a.toml")
            assert asked == [f"/raw/v{version('dpivon')}/book/results/grids/a.toml"]
            with pytest.raises(OSError, match=r"b.toml cannot be read .*404.*clone the repository"):
                ledger.published("b.toml")
        finally:
            server.shutdown()

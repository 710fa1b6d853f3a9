"""The script for a GPU, in its tiny form: every variant computes what the engine computes, and the file says so."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from dpivon import ledger

SCRIPT = Path(__file__).parent.parent / "tools" / "gpu.py"


def tiny(out, *options):
    """Run the script on a CPU in its tiny form, and return its exit status."""
    threads, arguments = torch.get_num_threads(), sys.argv
    sys.argv = [str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out), *map(str, options)]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = arguments
        torch.set_num_threads(threads)
    return ended.value.code


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu")
    (out / "grid.toml").write_text("[[grid]]\nmethod = ['dp-sgd', 'dp-ivon-gradsq']\nepochs = 1\nseed = 0\n")
    assert tiny(out, "--grid", out / "grid.toml") == 0
    found = json.loads((out / "speed.json").read_text())
    return {**found, "runs": ledger.read(out / "runs.jsonl")}


def test_each_variant_gives_the_engine_s_sum(rows):
    assert len(rows["rows"]) == 5
    for row in rows["rows"]:
        assert row["error"] < (0.3 if "bf16" in row["variant"] else 1e-5), row
        assert row["images_per_second"] > 0


def test_bfloat16_is_really_used(rows):
    assert [row["error"] > 1e-4 for row in rows["rows"]] == ["bf16" in row["variant"] for row in rows["rows"]]


def test_the_grid_is_run_and_recorded(rows):
    assert [r["config"]["method"] for r in rows["runs"]] == ["dp-sgd", "dp-ivon-gradsq"]
    assert all(r["status"] == "finished" for r in rows["runs"])


def test_the_file_names_the_hardware(rows):
    assert rows["hardware"]["cpu"]
    assert "commit" in rows["code"]


def test_a_variant_that_fails_is_a_line_and_the_others_go_on(tmp_path, monkeypatch):
    real = torch.autocast

    def gives_up(*arguments, **options):
        if torch.bfloat16 in arguments:
            raise RuntimeError("no bfloat16 here\nand a page of explanations")
        return real(*arguments, **options)

    monkeypatch.setattr(torch, "autocast", gives_up)
    assert tiny(tmp_path) == 1
    *most, last = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert ["failed" in row for row in most] == ["bf16" in row["variant"] for row in most] == [False] * 3 + [True]
    assert most[-1]["failed"] == "RuntimeError: no bfloat16 here"
    assert "images_per_second" not in most[-1]
    assert last["variant"] == "2 models stacked, 8 images each"
    assert last["error"] < 1e-5


def test_what_was_measured_is_on_disk_when_the_script_is_stopped(tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.func, "stack_module_state", stop)
    with pytest.raises(KeyboardInterrupt):
        tiny(tmp_path)
    assert len(json.loads((tmp_path / "speed.json").read_text())["rows"]) == 4


def test_masked_examples_do_not_count():
    script = runpy.run_path(str(SCRIPT))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x, y = torch.randn(6, 3, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    mask = torch.tensor([1.0, 1, 1, 1, 0, 0])
    padded = script["fixed_shape"](model, parameters, x, y, mask)
    alone = script["fixed_shape"](model, parameters, x[:4], y[:4], mask[:4])
    all_of_them = script["fixed_shape"](model, parameters, x, y, torch.ones(6))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(padded, alone, strict=True))
    assert not torch.allclose(padded[0], all_of_them[0], atol=1e-3)

"""The script for a GPU, in its tiny form: every variant computes what the engine computes, and the file says so."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from dpivon import ledger

SCRIPT = Path(__file__).parent.parent / "tools" / "gpu.py"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu")
    (out / "grid.toml").write_text("[[grid]]\nmethod = ['dp-sgd', 'dp-ivon-gradsq']\nepochs = 1\nseed = 0\n")
    threads, arguments = torch.get_num_threads(), sys.argv
    sys.argv = [str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out), "--grid", str(out / "grid.toml")]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = arguments
        torch.set_num_threads(threads)
    assert ended.value.code == 0
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

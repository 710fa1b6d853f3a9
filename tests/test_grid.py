"""Grids: a sum of products of settings, in their types; all that is wrong with one is said before anything runs."""

from collections import Counter
from pathlib import Path

import pytest

from dpivon import grid, ledger, seeds, train
from dpivon.methods import METHODS

RESULTS = Path(__file__).parents[1] / "book" / "results"
GRID = """
[base]
epochs = 1
seed = 0

[[grid]]
method = ["dp-sgd", "dp-adam"]
noise_multiplier = [1, 4]
"""


def test_a_grid_is_a_sum_of_products(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(GRID + '[[grid]]\nname = "more"\nmethod = "dp-sgd"\nnoise_multiplier = [4, 8]\nseed = [0, 1]\n')
    configs = grid.read(file)
    found = [(c.method, c.noise_multiplier, c.seed) for c in configs]
    assert found == [
        ("dp-sgd", 1.0, 0), ("dp-sgd", 4.0, 0), ("dp-adam", 1.0, 0), ("dp-adam", 4.0, 0),
        ("dp-sgd", 8.0, 0), ("dp-sgd", 4.0, 1), ("dp-sgd", 8.0, 1),
    ]  # fmt: skip
    assert all(c == train.resolve(c) and c.epochs == 1 for c in configs)


def test_all_that_is_wrong_with_a_grid_is_said_at_once(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(
        """
        [base]
        epoch = 3
        batch_size = "large"
        [[grid]]
        method = ["dp-sgd", "dp-adm"]
        lr = [1, true]
        [[grid]]
        name = "with curvature"
        method = ["dp-sgd", "dp-ivon-gradsq"]
        hess_init = [0.1, 1]
        model = "resnet"
        [[grid]]
        seed = []
        batch_size = 12.5
        """
    )
    with pytest.raises(ValueError, match="nothing was") as caught:
        grid.read(file)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines[0] == f"{file} cannot be run, and nothing was:"
    assert sorted(lines[1:]) == sorted(
        [
            "[base]: there is no setting 'epoch' (= 3); did you mean epochs?",
            "[base]: batch_size = 'large' is not understood; write a whole number",
            "[[grid]] 1: lr = True is not understood; write a number",
            f"[[grid]] 1: unknown method 'dp-adm'; choose one of {', '.join(METHODS)}",
            "[[grid]] 2 (with curvature): model = 'resnet' is not understood; write one of 'mlp', 'lenet', 'tanh_cnn'",
            "[[grid]] 2 (with curvature): 'dp-sgd' does not read hess_init; it reads beta1, weight_decay",
            "[[grid]] 3: seed = [] has no value; give one, or leave seed out",
            "[[grid]] 3: batch_size = 12.5 is not understood; write a whole number",
        ]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = ", "grid.toml is no TOML file: Invalid value"),
        ("[base]\nlr = 1", "needs at least one table \\[\\[grid\\]\\], in double brackets"),
        ("[grid]\nlr = 1", "needs at least one table"),
        ("base = 3\n[[grid]]\nlr = 1", "base must be a table"),
        ("[common]\nlr = 1\n[[grid]]\nlr = 1", "'common' is no part of a grid; write \\[base\\] or \\[\\[grid\\]\\]"),
        ("[[grid]]\nlr = [[1, 2]]", "lr = \\[1, 2\\] is not understood; write a number"),
        (
            f"[[grid]]\nlr = {list(range(1, 400))}\nseed = {list(range(400))}",
            "more than 100000 runs; take shorter lists",
        ),
        ("[[grid]]\nlr = nan", "lr must be 0, or between"),
    ],
)
def test_what_is_no_grid_is_named(tmp_path, text, message):
    file = tmp_path / "grid.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        grid.read(file)


def test_the_grids_of_the_book_can_be_read():
    found = {file.stem: grid.read(file) for file in (RESULTS / "grids").glob("*.toml")}
    for tuning in (found["lenet_tuning"], found["lenet_rivals_tuning"]):
        for noise in {c.noise_multiplier for c in tuning}:  # as many trials for each method
            assert len(set(Counter(c.method for c in tuning if c.noise_multiplier == noise).values())) == 1
        assert all(c.holdout == 5000 for c in tuning)  # and none on the test set
    strong = found["strong_tuning"]
    trials = Counter(c.method for c in strong)
    assert set(trials.values()) == {6}
    assert all(c.holdout == 5000 and c.epsilon == 1 and c.max_grad_norm == 5 for c in strong)
    settled = found["strong"]
    assert all(c.holdout == 0 and c.epsilon == 1 and c.max_grad_norm == 5 for c in settled)
    assert {c.seed for c in settled}.isdisjoint(c.seed for c in strong)
    for c in settled:  # what is run at last was tried before, but for the temperature
        name = {
            "dp-sgd-tempered": "dp-sgd",
            "dp-sgd-average": "dp-sgd-snapshots",
            "dp-adam-average": "dp-adam-snapshots",
        }
        tried = [t for t in strong if t.method == name.get(c.method, c.method)]
        assert (c.lr, c.weight_decay, c.hess_init, c.ess) in {(t.lr, t.weight_decay, t.hess_init, t.ess) for t in tried}
    star = found["lenet_center"] + found["lenet_arms"]
    assert {round(c.epochs * 50_000 / c.batch_size) for c in star} == {488}  # T is fixed
    arms = [
        {(c.noise_multiplier, c.batch_size, c.max_grad_norm, c.seed) for c in star if c.method == method}
        for method in dict.fromkeys(c.method for c in star)
    ]
    assert len(arms) == 4
    assert all(arm == arms[0] for arm in arms)  # the same noise, batches and seeds for each method
    assert all(c.holdout == 0 for c in star)


def test_what_is_run_at_other_budgets_has_the_settings_of_its_best_trial():
    """Of all trials on the images left out, at its budget, with the loss that counts for it."""
    trials = [r for r in ledger.read(RESULTS / "strong_tuning.jsonl") if r["status"] == "finished"]
    shared = {"dp-adam-average": "dp-adam-snapshots"}  # read out at the mean of the same walk
    runs = grid.read(RESULTS / "grids" / "strong_budgets.toml")
    assert {c.epsilon for c in runs} >= {0.5, 8}
    for c in runs:
        name = shared.get(c.method, c.method)
        tried = [
            r for r in trials
            if [r["config"][s] for s in ("method", "epsilon", "calibration")] == [name, c.epsilon, c.calibration]
        ]  # fmt: skip
        if c.method in shared:
            tried = [{**r, "results": {"mean": r["results"]["mean"]}} for r in tried]
        best = min(tried, key=lambda r: seeds.values([r], "nll")[0])["config"]
        settings = ("lr", "weight_decay", "hess_init", "ess")
        assert [best[s] for s in settings] == [getattr(c, s) for s in settings], (c.method, c.epsilon)
        assert (c.holdout, best["holdout"], c.seed > 0, best["seed"]) == (0, 5000, True, 0)

"""The README's figure shows what the recorded runs say, and its sentence holds."""

import re
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest

from dpivon import plots, records, seeds, sweep
from tools import result


@pytest.fixture(scope="module")
def found():
    return result.differences()


def test_the_figure_is_of_the_recorded_runs(found):
    assert result.drawn() == found, "the figure is stale; draw it again: python tools/result.py"
    assert found["nll"].keys() == found["accuracy"].keys() >= {"dp-adam", "dp-ivon-gradsq", "dp-ivon-constant"}


def test_a_point_is_the_paired_difference(found):
    runs, missing = sweep.results(result.RESULTS / "grids" / "lenet_center.toml", result.RESULTS / "lenet.jsonl")
    assert not missing
    at = [r for r in runs if r["config"]["noise_multiplier"] == 4]
    groups = seeds.by_method(at)
    d = seeds.paired(groups["dp-ivon-gradsq"], groups["dp-sgd"], "accuracy")
    row = [records.value(at[0], "epsilon"), d.mean, d.low, d.high]
    assert pytest.approx(row, abs=1e-5) in found["accuracy"]["dp-ivon-gradsq"]
    assert "dp-sgd" not in found["nll"]


def test_the_same_runs_give_the_same_bytes_without_a_date(found):
    first = result.draw(found)
    assert first == result.draw(found)
    assert b"<dc:date>" not in first


def test_the_marks_stand_where_the_numbers_are(found):
    figure, ax = plt.subplots()
    names = list(found["nll"])
    result.panel(ax, found["nll"], names, [0.4, 3.0])
    assert [drawn.get_label() for drawn in ax.containers] == [result.NAMES[name] for name in names]
    for name, (marks, _, (bars,)) in zip(names, ax.containers, strict=True):
        rows = np.array(found["nll"][name])
        at, height = marks.get_xydata().T
        assert height == pytest.approx(rows[:, 1])
        assert np.array(bars.get_segments())[:, :, 1] == pytest.approx(rows[:, 2:])
        assert np.abs(np.log(at / rows[:, 0])).max() < 0.2, "aside, but near its budget"
    assert ax.get_xlim()[0] > ax.get_xlim()[1], "strong privacy is on the right"
    plt.close(figure)


def test_an_experiment_is_one_line(found, monkeypatch):
    """A method and a budget that only one experiment has are drawn, too."""
    monkeypatch.setattr(result, "EXPERIMENTS", [*result.EXPERIMENTS, ("lenet_between", "lenet")])
    with pytest.raises(ValueError, match="need two seeds"):  # that grid has one seed
        result.differences()
    more = {metric: {**rows, "dp-new": [[1.0, -0.1, -0.2, 0.1]]} for metric, rows in found.items()}
    assert b"dp-new" in result.draw(more)


def test_a_figure_without_numbers_is_refused(tmp_path):
    path = tmp_path / "x.svg"
    path.write_text("<svg></svg>")
    with pytest.raises(ValueError, match="draw it again"):
        result.drawn(path)


def test_dark_readers_see_light_ink(found):
    """Each dark color of the drawing has a rule; the ground is transparent."""
    text = result.draw(found).decode()
    ElementTree.fromstring(text)
    for color in (plots.COLORS["ink"], result.GRID[0]):
        assert len(re.findall(f"(?:fill|stroke): {color}", text)) > 4, "the rules, and what they are for"
        assert f'[style*="stroke: {color}"]' in text
    assert "prefers-color-scheme: dark" in text
    assert "fill: #ffffff" not in text
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text.split("</style>", 1)[1]))
    assert used <= {*plots.COLORS.values(), result.GRID[0], "#000000"}


def test_the_readmes_sentence_holds(found):
    """Both methods with a posterior are ahead in NLL at the moderate budget, and little is left at the strong one."""
    for name in ("dp-ivon-gradsq", "dp-ivon-constant"):
        (_, mean, _, high), (_, strong, _, _) = found["nll"][name]
        assert high < 0
        assert abs(strong) < abs(mean) / 4
    runs, _ = sweep.results(result.RESULTS / "grids" / "lenet_center.toml", result.RESULTS / "lenet.jsonl")
    groups = seeds.by_method([r for r in runs if r["config"]["noise_multiplier"] == 1])
    learned = seeds.paired(groups["dp-ivon-gradsq"], groups["dp-ivon-constant"], "nll")
    assert learned.high > 0, "a curvature that is not learned does as well"
    adam = seeds.paired(groups["dp-ivon-gradsq"], groups["dp-adam"], "nll")
    assert adam.high < 0


def experiment(grid, name):
    """The runs of a grid by method; averaged weights, and those with a temperature, are methods of their own."""
    runs, missing = sweep.results(result.RESULTS / "grids" / f"{grid}.toml", result.RESULTS / f"{name}.jsonl")
    assert not missing
    renamed = []
    for r in runs:
        c = r["config"]
        if c["method"] == "dp-sgd-average" and c["calibration"]:
            c = {**c, "method": "dp-sgd-average, tempered"}
        renamed.append({**r, "config": c})
        if c["method"] == "dp-sgd-snapshots":
            renamed.append(
                {**r, "config": {**c, "method": "dp-sgd-average"}, "results": {"mean": r["results"]["mean"]}}
            )
    return seeds.by_method(renamed)


def test_what_the_readme_claims_of_the_recommended_method_is_what_the_ledger_says():
    text = (result.RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    (claim,) = re.findall(r"The seeds tell it from (\w+) of (\w+) controls", text)
    groups, finalists = experiment("strong", "strong"), ("dp-sgd-snapshots", "dp-ivon-snapshots")
    controls = [m for m in groups if m not in finalists]
    tests = [(a, b, seeds.paired(groups[a], groups[b], "nll")) for a in finalists for b in controls]
    corrected = seeds.holm([d.p for _, _, d in tests])
    ours = {b: (d.mean, p) for (a, b, d), p in zip(tests, corrected, strict=True) if a == finalists[0]}
    told = {b for b, (mean, p) in ours.items() if mean < 0 and p <= 0.05}
    words = dict(zip(("five", "six", "seven", "eight", "nine"), range(5, 10), strict=True))
    assert (words[claim[0]], words[claim[1]]) == (len(told), len(controls))
    assert all(mean < 0 for mean, _ in ours.values())
    assert {"dp-sgd", "dp-ivon-gradsq"} <= told
    assert set(controls) - told == {"dp-sgd-tempered", "dp-ivon-constant"}
    assert {len(group) for group in groups.values()} == {5}


def at(epsilon):
    """The groups at one of the other budgets, and the p-values of both finalists against all controls, corrected."""
    groups = {
        name: [r for r in group if r["config"]["epsilon"] == epsilon]
        for name, group in experiment("strong_budgets", "strong_budgets").items()
    }
    groups = {name: group for name, group in groups.items() if group}
    finalists = ("dp-sgd-snapshots", "dp-ivon-snapshots")
    pairs = [(a, b) for a in finalists for b in groups if b not in finalists]
    found = [seeds.paired(groups[a], groups[b], "nll") for a, b in pairs]
    assert {d.seeds for d in found} == {5}
    corrected = seeds.holm([d.p for d in found])
    return groups, {b: (d, p) for (a, b), d, p in zip(pairs, found, corrected, strict=True) if a == finalists[0]}


def test_at_the_strongest_budget_the_readme_says_from_how_many_controls_it_is_told():
    text = (result.RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert "At ε = 1/2 they tell it from seven of eight,\nall but DP-Adam; its accuracy is not worse by a point" in text
    groups, found = at(0.5)
    assert len(found) == 8
    assert all(d.mean < 0 for d, _ in found.values())
    assert {name for name, (_, p) in found.items() if p > 0.05} == {"dp-adam"}
    assert min(seeds.paired(groups["dp-sgd-snapshots"], groups[name], "accuracy").low for name in found) > -0.01


def test_at_a_weak_budget_it_is_ahead_of_what_the_readme_names():
    groups, found = at(8)
    assert found["dp-sgd"][0].high < 0
    assert found["dp-ivon-gradsq"][0].high < 0
    assert found["dp-ivon-constant"][0].low < 0 < found["dp-ivon-constant"][0].high
    assert seeds.paired(groups["dp-sgd-snapshots"], groups["dp-ivon-gradsq"], "accuracy").low > -0.01

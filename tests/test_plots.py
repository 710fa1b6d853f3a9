"""The figures draw what the records say: every method, at its means, with intervals where there are several seeds."""

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import pytest

from dpivon import plots, seeds
from dpivon.methods import METHODS


@pytest.fixture
def ax() -> Iterator[Any]:
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


def record(method: str, batch_size: int, seed: int, nll: float) -> dict[str, Any]:
    return {
        "config": {"method": method, "batch_size": batch_size, "seed": seed},
        "privacy": None, "results": {"mean": {"nll": nll}}, "hardware": {}, "versions": {},
    }  # fmt: skip


def test_every_method_is_drawn_at_its_means_with_its_intervals(ax: Any) -> None:
    records = [record("dp-sgd", 64, seed, nll) for seed, nll in enumerate((1.0, 2.0, 3.0))]
    records += [record("dp-sgd", 32, 0, 5.0), record("my-method", 64, 0, 4.0)]
    plots.against(ax, records, "batch_size", "nll")
    lines = {line.get_label(): line for line in ax.lines if not line.get_label().startswith("_")}
    assert list(lines) == ["dp-sgd", "my-method"]
    assert lines["dp-sgd"].get_xydata().tolist() == [[32, 5], [64, 2]]
    assert lines["my-method"].get_xydata().tolist() == [[64, 4]]
    bars = [segment for c in ax.collections for segment in c.get_segments() if len(segment)]
    assert len(bars) == 1  # three seeds in one place only
    width = seeds.half_width([1.0, 2.0, 3.0])
    assert bars[0][:, 1].tolist() == pytest.approx([2 - width, 2 + width])


def test_runs_of_two_configurations_are_not_averaged(ax: Any) -> None:
    with pytest.raises(ValueError, match="dp-sgd has several runs of a seed at batch_size = 64"):
        plots.against(ax, [record("dp-sgd", 64, 0, 1.0), record("dp-sgd", 64, 0, 2.0)], "batch_size", "nll")


def test_an_unknown_axis_is_named(ax: Any) -> None:
    with pytest.raises(ValueError, match="no record has 'batchsize'; did you mean batch_size"):
        plots.against(ax, [record("dp-sgd", 64, 0, 1.0)], "batchsize", "nll")


def test_all_methods_at_once_look_different_and_keep_their_looks() -> None:
    private = [name for name, method in METHODS.items() if method.private]
    found = plots.looks(private)
    assert len({tuple(look.values()) for look in found.values()}) == len(private) >= 20
    assert plots.looks(["other", "dp-sgd"])["dp-sgd"] == found["dp-sgd"]
    more = plots.looks([*private, *(f"of one's own {k}" for k in range(10))])
    assert len({tuple(look.values()) for look in more.values()}) == len(more)

"""Draw the README's figure from the recorded runs: how each method differs from DP-SGD, seed by seed.

    python tools/result.py

It writes `book/_static/result.svg`, with the numbers that are drawn in its description. The same runs give the same
bytes.
"""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[1]))

from dpivon import plots, records, seeds, sweep

RESULTS = Path(__file__).parents[1] / "book" / "results"
FIGURE = Path(__file__).parents[1] / "book" / "_static" / "result.svg"

# A grid file of `book/results/grids`, and the ledger that holds its runs; dp-sgd must be one of its methods.
EXPERIMENTS = [
    ("lenet_center", "lenet"),
]
METRICS = {"nll": "NLL: lower is better", "accuracy": "Accuracy: higher is better"}
NAMES = {
    "dp-adam": "DP-Adam",
    "dp-ivon-gradsq": "DP-IVON-Gradsq",
    "dp-ivon-constant": "DP-IVON, constant curvature",
}

# What is dark on white becomes light on black; the other colors are legible on both.
DARK = {"ink": "#dcdfde", "blue": plots.COLORS["sky"]}
GRID = ("#e6e6e6", "#3a4043")

Points = dict[str, dict[str, list[list[float]]]]


def differences() -> Points:
    """For each metric and method: at each epsilon the mean difference from DP-SGD and its 95% interval over seeds."""
    found: Points = {metric: {} for metric in METRICS}
    for grid, kept in EXPERIMENTS:
        runs, _ = sweep.results(RESULTS / "grids" / f"{grid}.toml", RESULTS / f"{kept}.jsonl")
        for epsilon in sorted({records.value(r, "epsilon") for r in runs}, reverse=True):
            groups = seeds.by_method([r for r in runs if records.value(r, "epsilon") == epsilon])
            base = groups.pop("dp-sgd")
            for name, group in groups.items():
                for metric in METRICS:
                    d = seeds.paired(group, base, metric)
                    row = [round(v, 5) for v in (epsilon, d.mean, d.low, d.high)]
                    found[metric].setdefault(name, []).append(row)
    return found


def draw(found: Points) -> bytes:
    """The figure as SVG, which follows the reader's color scheme."""
    names = list(dict.fromkeys(name for methods in found.values() for name in methods))
    budgets = sorted({row[0] for methods in found.values() for rows in methods.values() for row in rows})
    plots.use_style()
    figure, axes = plt.subplots(1, 2, figsize=(7.0, 3.4))
    for ax, metric in zip(axes, METRICS, strict=True):
        panel(ax, found[metric], names, budgets)
        ax.set_title(METRICS[metric])
    axes[0].set_ylabel("difference from DP-SGD")
    axes[0].text(0.5, 0, "DP-SGD", transform=axes[0].get_yaxis_transform(), ha="center", va="bottom")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "dpivon"}):
        about = {
            "Title": "Private methods against DP-SGD",
            "Description": json.dumps(found),
            "Date": None,
            "Creator": None,
        }
        figure.savefig(file, format="svg", transparent=True, metadata=about)
    plt.close(figure)
    return re.sub(rb"(<svg [^>]*>)", lambda found: found[1] + b"\n" + dark().encode(), file.getvalue(), count=1)


def panel(ax: Any, rows: dict[str, list[list[float]]], names: list[str], budgets: list[float]) -> None:
    """One metric: the methods side by side at each budget, DP-SGD as the line at zero."""
    looks = plots.looks(names)
    ax.axhline(0, color=plots.COLORS["ink"], lw=1.2)
    for k, name in enumerate(names):
        epsilon, mean, low, high = zip(*rows.get(name, []), strict=True)
        aside = 1.1 ** ((len(names) - 1) / 2 - k)  # the axis runs to the left
        ax.errorbar(
            [e * aside for e in epsilon], mean,
            [[m - v for m, v in zip(mean, low, strict=True)], [v - m for m, v in zip(mean, high, strict=True)]],
            label=NAMES.get(name, name), color=looks[name]["color"], marker=looks[name]["marker"],
            linestyle="none", markersize=6, elinewidth=1.6, capsize=3,
        )  # fmt: skip
    plots.epsilon_axis(ax, budgets)
    ax.locator_params(axis="y", nbins=6)
    ax.set_xlim(budgets[-1] * 1.7, budgets[0] / 1.7)
    ax.set_xlabel("ε, stronger privacy to the right")


def dark() -> str:
    """A style sheet that exchanges colors where the reader prefers a dark scheme."""
    pairs = [(plots.COLORS[name], color) for name, color in DARK.items()] + [GRID]
    rules = " ".join(
        f'[style*="{part}: {old}"] {{ {part}: {new} !important }}' for old, new in pairs for part in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"


def drawn(path: Path = FIGURE) -> Points:
    """The numbers that a figure shows, from its description."""
    text = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(encoding="utf-8"), re.DOTALL)
    if text is None:
        raise ValueError(f"{path} has no description; draw it again: python tools/result.py")
    return dict(json.loads(text[1].replace("&quot;", '"')))


if __name__ == "__main__":
    FIGURE.write_bytes(draw(differences()))
    print(f"drawn in {FIGURE}")

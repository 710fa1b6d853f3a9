"""The book's figures: one look, legible in print, on a projector, and (through the site's style sheet) in dark mode."""

from collections.abc import Mapping, Sequence
from typing import Any

from dpivon import seeds

# Okabe and Ito's palette (2008), which readers with any color vision can tell apart, on white; yellow is left out.
COLORS = {
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#009e73",
    "pink": "#cc79a7",
    "sky": "#56b4e9",
    "amber": "#e69f00",
    "ink": "#222222",
    "grey": "#888888",
}


def use_style() -> None:
    """Set matplotlib's defaults for the book: white ground, dark ink, few lines, the palette of `COLORS`."""
    import matplotlib as mpl
    from cycler import cycler

    cycle = [COLORS[name] for name in ("blue", "orange", "green", "pink", "sky", "amber")]
    mpl.rcParams.update(
        {
            "figure.figsize": (6.4, 3.6),
            "figure.dpi": 100,
            "savefig.dpi": 160,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.facecolor": "white",
            "axes.edgecolor": COLORS["grey"],
            "axes.labelcolor": COLORS["ink"],
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.prop_cycle": cycler(color=cycle),
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.color": "#e6e6e6",
            "grid.linewidth": 0.8,
            "lines.linewidth": 2,
            "text.color": COLORS["ink"],
            "xtick.color": COLORS["ink"],
            "ytick.color": COLORS["ink"],
            "font.family": "DejaVu Sans",
            "font.size": 10,
            "legend.frameon": False,
            "image.cmap": "cividis",
        }
    )


def epsilon_axis(ax: Any, budgets: list[float]) -> None:
    """An inverted log axis for epsilon: weak privacy on the left, strong privacy on the right, as in the paper."""
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    ax.set_xscale("log")
    ax.set_xlim(max(budgets) * 1.15, min(budgets) / 1.15)
    ax.xaxis.set_major_locator(FixedLocator(budgets))
    ax.xaxis.set_major_formatter(FixedFormatter([f"{budget:.3g}" for budget in budgets]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(r"privacy budget $\varepsilon$ (stronger privacy to the right)")


# The methods that the book compares most keep their looks in all figures; any other takes the next free ones.
LOOKS = {
    "dp-sgd": ("blue", "o"),
    "dp-adam": ("orange", "s"),
    "dp-ivon-gradsq": ("green", "D"),
    "dp-ivon-constant": ("pink", "^"),
}
STYLES: tuple[Any, ...] = ("--", ":", "-.", (0, (6, 2)), (0, (2, 2, 6, 2)))


def looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Color, marker and line style of each method, the same for a name whatever else is drawn where `LOOKS` has it.

    Examples
    --------
    >>> from dpivon import plots
    >>> alone = plots.looks(["dp-adam"])["dp-adam"]
    >>> alone["color"], alone["marker"], alone["linestyle"]
    ('#d55e00', 's', '-')
    >>> plots.looks(["sgd", "dp-adam"])["dp-adam"] == alone
    True
    """
    free = [
        ("sky", "v"), ("amber", "P"), ("ink", "X"), ("grey", "*"), ("blue", "<"), ("orange", ">"), ("green", "p"),
        ("pink", "h"),
    ]  # fmt: skip
    others = [name for name in names if name not in LOOKS]
    found = {}
    for name in names:
        k = others.index(name) if name in others else 0
        color, marker = LOOKS.get(name, free[k % len(free)])
        style = "-" if name in LOOKS else STYLES[k // len(free) % len(STYLES)]
        found[name] = {"color": COLORS[color], "marker": marker, "linestyle": style}
    return found


def against(ax: Any, records: Sequence[Mapping[str, Any]], x: str, metric: str, level: float = 0.95) -> None:
    """Draw the metric of each method against x: means over seeds, with Student's intervals where there are several.

    Every method in the records is drawn and labeled. On an axis of epsilon, see `epsilon_axis`.

    Parameters
    ----------
    ax
        matplotlib's axes.
    records
        finished runs of the ledger; those of a method that agree in x must differ in nothing but their seeds.
    x
        a name that `records.value` understands: 'epsilon', 'batch_size', 'max_grad_norm'.
    metric
        'accuracy', 'nll', 'ece', 'brier' or 'overconfidence', over draws where there are draws.
    level
        of the intervals.

    Raises
    ------
    ValueError
        a method has two runs with the same x and the same seed, or x or the metric is unknown.
    """
    from dpivon.records import require, value

    require([] if "." in x else [x], records)
    groups = seeds.by_method(records)
    for name, look in looks(list(groups)).items():
        points: dict[float, list[Any]] = {}
        for r in groups[name]:
            points.setdefault(value(r, x), []).append(r)
        for place, runs in points.items():
            if len({r["config"]["seed"] for r in runs}) < len(runs):
                raise ValueError(f"{name} has several runs of a seed at {x} = {place}; select one configuration of it")
        at = sorted(points)
        numbers = [seeds.values(points[one], metric) for one in at]
        middle = [seeds.mean_and_error(n)[0] for n in numbers]
        widths = [seeds.half_width(n, level) for n in numbers]
        ax.plot(at, middle, label=name, markersize=5, **look)
        several = [k for k, width in enumerate(widths) if width == width]
        ax.errorbar(
            [at[k] for k in several], [middle[k] for k in several], [widths[k] for k in several],
            fmt="none", ecolor=look["color"], elinewidth=1.5, capsize=3,
        )  # fmt: skip

"""The book's figures: one look, legible in print, on a projector, and (through the site's style sheet) in dark mode."""

from typing import Any

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
    ax.xaxis.set_major_formatter(FixedFormatter([f"{budget:g}" for budget in budgets]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel(r"privacy budget $\varepsilon$ (stronger privacy to the right)")

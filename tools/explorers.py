"""Compute what the two explorers of the book show, and write it beside the pages as plain JavaScript.

    python tools/explorers.py               both; minutes on one core, nearly all of them for the PRV accountant
    python tools/explorers.py curvature     one of them

Everything is computed by `dpivon`: epsilon by `dpivon.accounting`, estimates by `dpivon.curvature`. A second run writes
the same bytes. The files assign to a variable instead of being JSON, since a page that is opened from a disk must not
fetch a file. For readers without JavaScript there is a small table in HTML for each page.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
from scipy.stats import ncx2, norm, spearmanr

sys.path.insert(0, str(Path(__file__).parents[1]))

from dpivon import accounting, curvature

STATIC = Path(__file__).parents[1] / "book" / "_static"

Array = np.ndarray[Any, Any]

# ---------------------------------------------------------------- curvature

# The signal of a block of weights, its root mean square, in units of the noise; and over how many steps is averaged.
SIGNALS = [
    0.003, 0.004, 0.005, 0.007, 0.01, 0.014, 0.02, 0.03, 0.04, 0.05, 0.07,
    0.1, 0.14, 0.2, 0.3, 0.4, 0.5, 0.7, 1, 1.4, 2, 3,
]  # fmt: skip
STEPS = [1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000]
WEIGHTS = 1000  # in the block; every WEIGHTS / SHOWN-th is drawn
SHOWN = 50
SPREAD = 0.6  # standard deviation of the logarithms of the signals in the block
DRAWS = 20  # repetitions behind the figures for shrinking and for ranks
SEED = 0
SQUARES = [round(-7 + k / 8, 3) for k in range(8 * 9 + 1)]  # log10 of a squared signal, along the axis

# What turns a curvature in units of the noise into steps and widths: N_ess, delta_v, and the noise of a few runs.
ESS, DAMPING = 50_000, 2e-4
RUNS = [(512, 1.0, 1.0), (1024, 1.0, 4.0), (256, 5.0, 4.0)]  # b, C, sigma_p

UNIT = {"scale": 1.0, "noise_std": 1.0}


def block() -> Array:
    """The signals of the block's weights over their root mean square: log-normal, at its quantiles, in order."""
    u = np.exp(SPREAD * norm.ppf((np.arange(WEIGHTS) + 0.5) / WEIGHTS))
    return u / np.sqrt(np.mean(u**2))


def projected_mean(a: Any) -> Any:
    """E max((a + z)^2 - 1, 0) for a standard normal z: what projecting each step returns, however long one averages.

    .. math:: a^2 [\\Phi(a - 1) + \\Phi(-a - 1)] + (1 + a) \\varphi(a - 1) + (1 - a) \\varphi(a + 1)
    """
    kept = norm.cdf(a - 1) + norm.cdf(-a - 1)
    return a**2 * kept + (1 + a) * norm.pdf(a - 1) + (1 - a) * norm.pdf(a + 1)


def projected_zeros(a: Any, steps: int) -> Any:
    """The probability that all of the steps are cut to zero, [Phi(1 - a) - Phi(-1 - a)]^n."""
    return (norm.cdf(1 - a) - norm.cdf(-1 - a)) ** steps


def averaged_mean(a: Any, steps: int) -> Any:
    """E max(mean of n times ((a + z)^2 - 1), 0): the sum of squares is noncentral chi-squared.

    With X of n degrees of freedom and noncentrality n a^2, E[X; X > n] = n P(X_{n+2} > n) + n a^2 P(X_{n+4} > n).
    """
    n = steps
    above = [ncx2.sf(n, n + more, n * a**2) for more in (0, 2, 4)]
    return above[1] + a**2 * above[2] - above[0]


def averaged_zeros(a: Any, steps: int) -> Any:
    """The probability that the average of n corrected squares is not positive."""
    return ncx2.cdf(steps, steps, steps * a**2)


def shrink(average: Array, steps: int) -> Array:
    """`dpivon.curvature.shrunk` of one block, cut at zero; the average of n squares of the noise has variance 2 / n."""
    values = torch.from_numpy(average)
    noise = torch.full_like(values, 2 / steps)
    return curvature.shrunk(values, noise, [len(average)]).clamp(min=0).numpy()


def noise_steps(steps: Sequence[int]) -> Iterator[tuple[int, Array]]:
    """The noise, (some steps, weights) at a time; with it the number of steps so far if it is one of `steps`, or 0."""
    rng = np.random.default_rng(SEED)
    for low, high in pairwise([0, *steps]):
        for start in range(low, high, 1000):
            size = min(1000, high - start)
            yield start + size if start + size == high else 0, rng.standard_normal((size, WEIGHTS))


def simulate(steps: Sequence[int], signals: Sequence[float]) -> tuple[Array, Array, Array]:
    """Average the same noise at all signals: (mean z, mean z^2, mean of the projected estimates) at each of `steps`.

    Shapes (steps, weights) twice, and (signals, steps, weights).
    """
    u, nothing = block(), torch.zeros(0)
    first, second, projected = np.zeros(WEIGHTS), np.zeros(WEIGHTS), np.zeros((len(signals), WEIGHTS))
    found: list[tuple[Array, Array, Array]] = []
    for full, z in noise_steps(steps):
        first, second = first + z.sum(0), second + (z**2).sum(0)
        for k, a in enumerate(signals):
            g = torch.from_numpy(a * u + z)
            projected[k] += curvature.noise_corrected(g, nothing, {}, UNIT).sum(0).numpy()
        if full:
            found.append((first / full, second / full, projected / full))
    return np.array([f[0] for f in found]), np.array([f[1] for f in found]), np.stack([f[2] for f in found], 1)


def rank(truth: Array, estimate: Array) -> float | None:
    """Spearman's correlation; None where all estimates are the same."""
    return None if np.ptp(estimate) == 0 else float(spearmanr(truth, estimate).statistic)


def repeated(a: float, steps: int) -> dict[str, list[float | None]]:
    """Mean, share of zeros and rank correlation of averaging first, and of shrinking, over DRAWS blocks."""
    u, rng = block(), np.random.default_rng([SEED, steps, round(1000 * a)])
    found: dict[str, list[tuple[float, float, float | None]]] = {"average": [], "shrink": []}
    for _ in range(DRAWS):
        average = rng.noncentral_chisquare(steps, steps * (a * u) ** 2) / steps - 1
        for name, estimate in (("average", average.clip(0)), ("shrink", shrink(average, steps))):
            found[name].append((float(estimate.mean()), float((estimate == 0).mean()), rank(u, estimate)))
    means: dict[str, list[float | None]] = {}
    for name, rows in found.items():
        ranks = [row[2] for row in rows if row[2] is not None]
        means[name] = [
            float(np.mean([row[0] for row in rows])),
            float(np.mean([row[1] for row in rows])),
            float(np.mean(ranks)) if len(ranks) > DRAWS // 2 else None,
        ]
    return means


def short(value: Any, digits: int = 4) -> Any:
    """Numbers with few digits, in nested lists; what is not a number stays."""
    if isinstance(value, dict):
        return {key: short(v, digits) for key, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [short(v, digits) for v in value]
    if value is None or isinstance(value, str | bool):
        return value
    number = float(f"{float(value):.{digits}g}")
    return int(number) if number == int(number) and abs(number) < 1e15 else number


def curvature_data() -> dict[str, Any]:
    """All that the curvature explorer shows; curvatures in units of N_ess s^2."""
    u = block()
    shown = np.arange(SHOWN) * (WEIGHTS // SHOWN) + WEIGHTS // SHOWN // 2
    first, second, projected = simulate(STEPS, SIGNALS)
    table: dict[str, list[list[Any]]] = {"project": [], "average": [], "shrink": []}
    toward: list[list[list[float]]] = []
    for k, a in enumerate(SIGNALS):
        rows: dict[str, list[Any]] = {name: [] for name in table}
        toward.append([])
        for t, steps in enumerate(STEPS):
            drawn = repeated(a, steps)
            rows["project"].append(
                [projected_mean(a * u).mean(), projected_zeros(a * u, steps).mean(), rank(u, projected[k, t])]
            )
            exact = [averaged_mean(a * u, steps).mean(), averaged_zeros(a * u, steps).mean()]
            rows["average"].append([*exact, drawn["average"][2]])
            rows["shrink"].append(drawn["shrink"])
            average = second[t] + 2 * a * u * first[t] + (a * u) ** 2 - 1
            spread = max(float(np.mean((average - average.mean()) ** 2)), 1e-300)
            toward[k].append([float(average.mean()), max(1 - 2 / steps / spread, 0.0)])
        for name in table:
            table[name].append(rows[name])
    x = 10 ** (np.array(SQUARES) / 2)
    return {
        "signals": SIGNALS, "steps": STEPS, "weights": WEIGHTS, "spread": SPREAD, "seed": SEED, "draws": DRAWS,
        "ess": ESS, "damping": DAMPING, "runs": RUNS,
        "floor": short(curvature.noise_floor(UNIT), 6), "zero": short(projected_zeros(0.0, 1)),
        "u": short(u[shown]), "first": short(first[:, shown]), "second": short(second[:, shown] - 1),
        "projected": short(projected[:, :, shown], 3), "toward": short(toward), "table": short(table),
        "squares": SQUARES, "mean": {
            "project": short(projected_mean(x)), "average": short([averaged_mean(x, steps) for steps in STEPS]),
        },
    }  # fmt: skip


# --------------------------------------------------------------- accounting

DELTA = 1e-5
RATES = [2.0**-k for k in range(10, 0, -1)]
NOISES = [0.5, 0.6, 0.72, 0.87, 1.05, 1.3, 1.6, 2, 2.7, 4, 6, 9, 14, 20]
UPDATES = [10, 30, 90, 250, 700, 2000, 6000, 20_000]
RESOLUTION = 10_000  # stored is the logarithm of epsilon, times this
SHOWN_EPSILONS = (0.05, 20.0)  # what the page shows; the stored values go further, to interpolate up to these
CHECKED = 60  # random runs at which the interpolation is measured


def rdp_prices(noise: float, rate: float, steps: Sequence[int]) -> list[float]:
    """Epsilon by RDP for several numbers of steps, from one curve: what `accounting.epsilon` gives, and faster."""
    with accounting.quiet(), np.errstate(invalid="ignore"):
        one = compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=accounting.RDP_ORDERS)
        return [get_privacy_spent(orders=accounting.RDP_ORDERS, rdp=one * t, delta=DELTA)[0] for t in steps]


def prv_price(noise: float, rate: float, steps: int) -> float:
    """Epsilon by the PRV accountant."""
    return accounting.epsilon(noise, rate, steps, DELTA, "prv")


def affordable(epsilon: float, steps: int) -> bool:
    """Whether PRV is asked: its work grows with epsilon and with the steps, and above 20 nobody needs the answer."""
    return epsilon < (60 if steps <= 2000 else 36)


def prv_prices() -> list[float | None]:
    """Epsilon by PRV on the grid of rates, noises and steps, the last fastest; None where it is not computed."""
    found: list[float | None] = []
    for rate in RATES:
        for noise in NOISES:
            for steps, rdp in zip(UPDATES, rdp_prices(noise, rate, UPDATES), strict=True):
                found.append(prv_price(noise, rate, steps) if affordable(rdp, steps) else None)
    return found


def through(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Lagrange's polynomial through the points, at x."""
    weights = [math.prod((x - other) / (own - other) for other in xs if other != own) for own in xs]
    return sum(weight * y for weight, y in zip(weights, ys, strict=True))


def interpolated(noise: float, rate: float, steps: float, prv: Sequence[int | None]) -> float | None:
    """Epsilon by PRV between the stored values, as the page computes it; None where a neighbor is missing.

    Along each of the three axes, in logarithms, a cubic through the two nodes on either side, or through as many of
    them as are stored.
    """
    wanted = [math.log(value) for value in (rate, noise, steps)]
    grid = [[math.log(node) for node in nodes] for nodes in (RATES, NOISES, UPDATES)]
    cells = []
    for x, nodes in zip(wanted, grid, strict=True):
        if not nodes[0] - 1e-9 <= x <= nodes[-1] + 1e-9:
            return None
        cells.append(min(len(nodes) - 2, max(0, sum(node <= x for node in nodes) - 1)))

    def value(axis: int, offset: int) -> float | None:
        if axis == 3:
            stored = prv[offset]
            return None if stored is None else stored / RESOLUTION
        nodes, cell = grid[axis], cells[axis]
        xs, ys = [], []
        for i in range(max(0, cell - 1), min(len(nodes), cell + 3)):
            y = value(axis + 1, offset * len(nodes) + i)
            if y is not None:
                xs.append(nodes[i])
                ys.append(y)
            elif i in (cell, cell + 1):
                return None
        return through(wanted[axis], xs, ys)

    found = value(0, 0)
    return None if found is None else math.exp(found)


def random_runs(seed: int | list[int]) -> Iterator[tuple[float, float, int]]:
    """Random (noise, rate, steps) with an epsilon that the page shows."""
    rng = np.random.default_rng(seed)
    low, high = SHOWN_EPSILONS
    while True:
        noise, rate, steps = (
            math.exp(rng.uniform(math.log(nodes[0]), math.log(nodes[-1]))) for nodes in (NOISES, RATES, UPDATES)
        )
        if low <= rdp_prices(noise, rate, [round(steps)])[0] <= high:
            yield noise, rate, round(steps)


def interpolation_error(prv: Sequence[int | None], runs: Iterator[tuple[float, float, int]], number: int) -> float:
    """The largest relative difference between interpolation and accountant over a number of runs."""
    worst, done = 0.0, 0
    for run in runs:
        found = interpolated(*run, prv)
        if found is not None:
            worst, done = max(worst, abs(found / prv_price(*run) - 1)), done + 1
        if done == number:
            break
    return worst


def accounting_data() -> dict[str, Any]:
    """All that the accountant explorer does not compute by itself: PRV's epsilon on a grid, and RDP's orders."""
    prv = [None if price is None else round(RESOLUTION * math.log(price)) for price in prv_prices()]
    return {
        "delta": DELTA, "orders": [float(order) for order in accounting.RDP_ORDERS], "rates": RATES, "noises": NOISES,
        "steps": UPDATES, "resolution": RESOLUTION, "prv": prv, "checked": CHECKED,
        "error": short(interpolation_error(prv, random_runs(SEED), CHECKED), 2),
    }  # fmt: skip


# ------------------------------------------------------------------ writing


def rows(head: Sequence[str], body: Sequence[Sequence[str]], caption: str) -> str:
    """A table in HTML."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = [
        f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>"
        for first, *rest in body
    ]
    return "\n".join(
        [
            f'<table class="table"><caption>{caption}</caption>',
            f"<thead><tr>{top}</tr></thead>",
            "<tbody>",
            *lines,
            "</tbody></table>\n",
        ]
    )


def accounting_table() -> str:
    """What a reader without JavaScript sees: one curve, straight from the accountants."""
    rate, steps = 512 / 50_000, round(10 * 50_000 / 512)
    body = [
        [f"{noise:g}", f"{rdp_prices(noise, rate, [steps])[0]:.3g}", f"{prv_price(noise, rate, steps):.3g}"]
        for noise in (0.6, 0.8, 1, 1.5, 2, 4, 8)
    ]
    return rows(
        ["noise multiplier", "epsilon by RDP", "epsilon by PRV"],
        body,
        f"The explorer needs JavaScript. One of its curves: N = 50,000, b = 512, {steps} steps, delta = 1e-5.",
    )


def curvature_table() -> str:
    """What a reader without JavaScript sees: exact means, for weights of one signal."""
    body = [
        [
            f"{a:g}",
            f"{a * a:.2g}",
            f"{projected_mean(a):.3g}",
            f"{projected_zeros(a, 1):.1%}",
            f"{averaged_mean(a, 1000):.2g}",
            f"{averaged_zeros(a, 1000):.1%}",
        ]
        for a in (0.01, 0.03, 0.1, 0.3, 1, 3)
    ]
    head = ["signal a", "truth", "cut in each step", "zero in a step", "1,000 steps averaged first", "zero then"]
    return rows(
        head, body, "The explorer needs JavaScript. Mean estimates for weights of one signal, in units of the noise."
    )


def write(name: str, data: dict[str, Any], table: str, static: Path = STATIC) -> None:
    """Write a data file and a table."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    variable = "explore" + name.capitalize()
    (static / f"explore_{name}.js").write_text(
        f"// Written by tools/explorers.py.\nwindow.{variable} = {text};\n", encoding="utf-8"
    )
    (static / f"explore_{name}.html").write_text(table, encoding="utf-8")


def read(name: str, static: Path = STATIC) -> dict[str, Any]:
    """The data of a file that `write` has written."""
    text = (static / f"explore_{name}.js").read_text(encoding="utf-8")
    return dict(json.loads(text[text.index("{") : text.rindex("}") + 1]))


def main(names: Sequence[str]) -> None:
    makers = {"accounting": (accounting_data, accounting_table), "curvature": (curvature_data, curvature_table)}
    if unknown := set(names) - set(makers):
        raise SystemExit(f"error: unknown explorer {', '.join(sorted(unknown))}; choose from {', '.join(makers)}")
    for name in names or makers:
        data, table = makers[name]
        write(name, data(), table())
        print(f"wrote explore_{name}.js and explore_{name}.html in {STATIC}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Many methods, budgets and seeds on one data set, as one table with standard errors and costs; resumable."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpivon import data, grid, ledger, train
from dpivon.methods import METHODS
from dpivon.seeds import by_method, mean_and_error, values

SHOWN = ("accuracy", "nll", "ece", "overconfidence")
COSTS = {  # the head of a column, the part of the cost below it, and its format
    "numbers kept": ("stored", ",.0f"),
    "train CPU s": ("cpu_seconds", ".1f"),
    "predict s": ("predict_seconds", ".2f"),
    "memory MiB": ("memory_mib", ".0f"),
}


@dataclass(frozen=True)
class Compare:
    """Train methods at equal budgets with several seeds, and print one table for each budget.

    Settings are the methods' defaults, which are not equally tuned: the table shows what happens, not who is best. Runs
    that the ledger holds already are not repeated, so a comparison goes on where it was stopped.

    Parameters
    ----------
    data
        'digits', 'tumors' or 'cifar10'.
    model
        a network; by default the data set's.
    epsilon
        budgets.
    methods
        names in the table of methods; all private ones where none is given.
    seeds
        how many: 0, 1, ...
    epochs
        passes over the data; by default the data set's.
    ledger
        the file that holds the runs.
    figure
        draw NLL and calibration against the budget into this file; None for no figure.
    root
        where the data lies.
    """

    data: str = "digits"
    model: str | None = None
    epsilon: tuple[float, ...] = (1.0, 3.0, 8.0)
    methods: tuple[str, ...] = ()
    seeds: int = 5
    epochs: float | None = None
    ledger: Path = Path("compare.jsonl")
    figure: Path | None = Path("compare.png")
    root: Path | None = None

    def __call__(self) -> None:
        for path in (self.ledger, self.figure):
            train.check_writable(path)
        records = self.run(lambda line: print(line, flush=True))
        for epsilon in self.epsilon:
            print(f"\nepsilon {epsilon:g}, {self.seeds} seeds, mean ± standard error, over draws if there are any")
            print("\n".join(table([r for r in records if r["config"]["epsilon"] == epsilon])))
        if self.figure is not None:
            draw(records, self.figure)
            print(f"\ndrawn in {self.figure}")

    def configs(self) -> list[train.Config]:
        """Every run, resolved.

        Raises
        ------
        ValueError
            a name is unknown, a method is not private, or there is nothing to run.

        Examples
        --------
        >>> from dpivon.compare import Compare
        >>> both = ("dp-sgd", "dp-adam")
        >>> runs = Compare(methods=both, epsilon=(1, 8)).configs()
        >>> len(runs)  # 2 methods, 2 budgets, 5 seeds
        20
        >>> runs[1].method, runs[1].epsilon, runs[1].lr
        ('dp-adam', 1, 0.01)
        """
        names = self.methods or tuple(name for name, method in METHODS.items() if method.private)
        for epsilon in self.epsilon:
            if not 0 < epsilon < math.inf:
                raise ValueError(f"epsilon must be finite and > 0, got {epsilon}; each is a budget")
        if self.seeds < 1 or not self.epsilon:
            raise ValueError(f"need at least one seed and one budget, got {self.seeds} and {self.epsilon}")
        base = train.Config(data=self.data, model=self.model, epochs=self.epochs)  # type: ignore[arg-type]
        return [
            train.resolve(replace(base, method=name, epsilon=epsilon, seed=seed))
            for seed in range(self.seeds)
            for epsilon in self.epsilon
            for name in names
        ]

    def run(self, report: Callable[[str], None]) -> list[dict[str, Any]]:
        """The records of all runs, those that were missing appended to the ledger as they end."""
        configs = self.configs()
        images = data.load(self.data, self.root)
        lines = ledger.read(self.ledger, strict=False)
        done = {grid.key(r["config"], r["recipe"]): r for r in lines if r["status"] == "finished"}
        found = []
        for i, config in enumerate(configs, start=1):
            key = grid.key(config)
            if key not in done:
                done[key] = train.run(config, images=images, ledger_path=self.ledger)
                report(f"{i} of {len(configs)}: {config.method}, epsilon {config.epsilon:g}, seed {config.seed}")
                if done[key]["status"] != "finished":
                    raise KeyboardInterrupt
            found.append(done[key])
        return found


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of text: a row for each method, with its metrics and what it costs."""
    heads = "".join(f"{head:>16s}" for head in (*SHOWN[:3], "conf. - acc.", *COSTS))
    lines = [f"{'method':20s}{heads}"]
    for name, group in by_method(records).items():
        cells = []
        for metric in SHOWN:
            mean, error = mean_and_error(values(group, metric))
            cells.append(f"{mean:9.3f} ± {error:.3f}" if error == error else f"{mean:9.3f}        ")
        cells += [cost(group, part, form) for part, form in COSTS.values()]
        lines.append(f"{name:20s}" + "".join(f"{cell:>16s}" for cell in cells))
    return lines


def cost(records: Sequence[Mapping[str, Any]], name: str, form: str) -> str:
    """The median of one part of the cost; a dash where no record tells it.

    The memory is the training's, and a process' first run also loads libraries.
    """
    found = [r.get("cost", {}).get(name) for r in records]
    known = [number for number in found if number is not None]
    return f"{statistics.median(known):{form}}" if known else "-"


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """NLL and calibration error of each method against the budget, with 95% intervals over seeds."""
    import matplotlib.pyplot as plt

    from dpivon import plots

    plots.use_style()
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.2))
    for ax, metric in zip(axes, ("nll", "ece"), strict=True):
        plots.against(ax, records, "config.epsilon", metric)
        plots.epsilon_axis(ax, sorted({r["config"]["epsilon"] for r in records}))
        ax.set_title(metric.upper())
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path)
    plt.close(figure)

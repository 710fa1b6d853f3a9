"""What several seeds say: a mean with its interval, and the difference of two methods, seed by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


def values(records: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """The metric `name` of each record, averaged over draws where the method draws.

    Raises
    ------
    ValueError
        a record does not have it.
    """
    found = [r["results"].get("samples", r["results"]["mean"]) for r in records]
    for metrics in found:
        if name not in metrics:
            raise ValueError(f"there is no metric {name!r}; choose one of {', '.join(metrics)}")
    return [metrics[name] for metrics in found]


def mean_and_error(numbers: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error; the error of one number is not known, NaN."""
    error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan
    return statistics.fmean(numbers), error


def half_width(numbers: Sequence[float], level: float = 0.95) -> float:
    """Half of Student's interval for the mean of n numbers, NaN for one.

    .. math:: t_{n-1,\\, (1 + \\text{level}) / 2} \\; s / \\sqrt{n}

    Raises
    ------
    ValueError
        the level is not between 0 and 1.
    """
    from scipy.stats import t

    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}; 0.95 is usual")
    if len(numbers) < 2:
        return math.nan
    return float(t.ppf((1 + level) / 2, len(numbers) - 1)) * mean_and_error(numbers)[1]


class Difference(NamedTuple):
    """A mean difference over seeds, its interval, the p-value of no difference, and the number of seeds."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int


def paired(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], name: str, level: float = 0.95
) -> Difference:
    """The metric of the first records minus that of the second at the same seed, by Student's paired test.

    Runs with the same seed share their initial weights, batches and privacy noise, so what they share cancels in
    the difference. How much that is differs from pair to pair; where noise dominates it can be nothing.

    Parameters
    ----------
    first, second
        records of one configuration each, of one run for each seed.
    name
        a metric.
    level
        of the interval.

    Raises
    ------
    ValueError
        a seed occurs twice, or only in one, as where the other diverged; or there are fewer than two.

    Examples
    --------
    Seeds differ by 1, and the methods by a tenth of that, at each seed:

    >>> from dpivon import seeds
    >>> def runs(*nll):
    ...     return [
    ...         {"config": {"seed": k},
    ...          "results": {"mean": {"nll": v}}}
    ...         for k, v in enumerate(nll)]
    >>> one, other = runs(1.0, 2.0, 3.0), runs(1.1, 2.1, 3.11)
    >>> found = seeds.paired(one, other, "nll")
    >>> round(found.mean, 2)
    -0.1
    >>> round(found.low, 2), round(found.high, 2)
    (-0.12, -0.09)
    """
    from scipy.stats import ttest_1samp

    found = []
    for records in (first, second):
        seeds = [r["config"]["seed"] for r in records]
        if len(set(seeds)) < len(seeds):
            raise ValueError(f"each seed must occur once, got {seeds}; give the records of one configuration")
        found.append(dict(zip(seeds, values(records, name), strict=True)))
    if single := sorted(found[0].keys() ^ found[1].keys(), key=str):
        raise ValueError(f"seeds {single} are in one of the two only; run them, or say why they are left out of both")
    both = sorted(found[0], key=str)
    if len(both) < 2:
        raise ValueError(f"need two seeds, got {both}; run more seeds")
    differences = [found[0][seed] - found[1][seed] for seed in both]
    mean, width = statistics.fmean(differences), half_width(differences, level)
    p = 1.0 if not any(differences) else float(ttest_1samp(differences, 0).pvalue)
    return Difference(mean, mean - width, mean + width, p, len(both))


def by_method(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The records of each method, in order of appearance."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for r in records:
        groups.setdefault(r["config"]["method"], []).append(r)
    return groups


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of m tests, corrected so that one bound holds for a false alarm in any of them (Holm, 1979).

    .. math:: \\tilde p_{(k)} = \\max_{j \\le k} \\min\\left( (m - j + 1)\\, p_{(j)},\\, 1 \\right)

    in ascending order of p. A test whose corrected value is at most 0.05 counts.

    Raises
    ------
    ValueError
        a value is not between 0 and 1.
    """
    if not all(0 <= p <= 1 for p in p_values):
        raise ValueError(f"p-values must be between 0 and 1, got {list(p_values)}")
    corrected, largest, m = [0.0] * len(p_values), 0.0, len(p_values)
    for place, k in enumerate(sorted(range(m), key=lambda k: p_values[k])):
        largest = max(largest, min((m - place) * p_values[k], 1.0))
        corrected[k] = largest
    return corrected

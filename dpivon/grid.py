"""A grid of runs in a TOML file: read, checked as a whole, and combined into configurations."""

import difflib
import itertools
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dpivon import ledger
from dpivon.config import RECIPE, Config, resolve

HINTS = get_type_hints(Config)
MOST = 100_000


def read(path: str | Path) -> list[Config]:
    """The runs that a grid file asks for, resolved, each once, in the order of the file.

    A value of a [[grid]] table replaces that of [base]. Lists combine as a product, tables add up.

    Raises
    ------
    ValueError
        the file is no grid; all that is wrong is named, with table, setting, value and remedy.

    Examples
    --------
    >>> from pathlib import Path
    >>> from dpivon import grid
    >>> _ = Path("small.toml").write_text('''
    ... [base]
    ... data = "digits"
    ... [[grid]]
    ... method = ["dp-sgd", "dp-adam"]
    ... epsilon = [1, 3, 8]
    ... ''')
    >>> runs = grid.read("small.toml")
    >>> len(runs), runs[-1].method, runs[-1].epsilon
    (6, 'dp-adam', 8.0)
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no grid file {path}; write one, after those in book/results/grids")
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no TOML file: {error}") from None
    base, tables = document.get("base", {}), document.get("grid", [])
    problems = [
        f"{name!r} is no part of a grid; write [base] or [[grid]]" for name in document.keys() - {"base", "grid"}
    ]
    if not isinstance(base, dict):
        problems.append("base must be a table; write [base]")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        problems.append("a grid needs at least one table [[grid]], in double brackets")
    if problems:
        raise ValueError(listed(path, problems))
    values = columns("[base]", base, problems)
    found: dict[Config, None] = {}  # in order; equal ones are one
    for number, table in enumerate(tables, start=1):
        where = f"[[grid]] {number}" + (f" ({table['name']})" if "name" in table else "")
        own = columns(where, {name: value for name, value in table.items() if name != "name"}, problems)
        merged = {**values, **own}
        if math.prod(map(len, merged.values())) > MOST:
            problems.append(f"{where}: asks for more than {MOST} runs; take shorter lists")
            continue
        for combination in itertools.product(*merged.values()):
            try:
                found[resolve(Config(**dict(zip(merged, combination, strict=True))))] = None
            except ValueError as error:
                problems.append(f"{where}: {error}")
    if problems:
        raise ValueError(listed(path, problems))
    return list(found)


def listed(path: str | Path, problems: Iterable[str]) -> str:
    """All problems of a file, each once, one a line."""
    return "\n  ".join([f"{path} cannot be run, and nothing was:", *dict.fromkeys(problems)])


def columns(where: str, table: Mapping[str, Any], problems: list[str]) -> dict[str, list[Any]]:
    """The values of each setting of a table, as a list, in the setting's type; what is wrong goes to `problems`."""
    found = {}
    for name, value in table.items():
        if name not in HINTS:
            near = difflib.get_close_matches(name, HINTS, 1)
            remedy = f"did you mean {near[0]}?" if near else f"choose of {', '.join(HINTS)}"
            problems.append(f"{where}: there is no setting {name!r} (= {value!r}); {remedy}")
            continue
        several = value if isinstance(value, list) else [value]
        if not several:
            problems.append(f"{where}: {name} = [] has no value; give one, or leave {name} out")
        try:
            found[name] = [typed(name, one) for one in several]
        except ValueError as error:
            problems.append(f"{where}: {error}")
    return found


def typed(name: str, value: Any) -> Any:
    """`value` in the type of the setting `name`: a whole number will do for a real one, or it is a ValueError."""
    kinds = expected(HINTS[name])
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) in kinds or (isinstance(value, str) and value in kinds):
        return value
    words = {float: "a number", int: "a whole number", str: "a text in quotes"}
    options = ", ".join(words.get(kind, repr(kind)) for kind in kinds)
    raise ValueError(f"{name} = {value!r} is not understood; write {'one of ' * (len(kinds) > 1)}{options}")


def expected(hint: Any) -> list[Any]:
    """The types and the literal values that a type annotation allows, besides None."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    parts = [part for part in get_args(hint) if part is not type(None)]
    return [kind for part in parts for kind in expected(part)] or [hint]


def key(config: Config | Mapping[str, Any], recipe: int | None = None) -> str:
    """The ledger's key of a configuration in which 30 and 30.0 are the same number, as they are to a run."""
    fields = dict(config) if isinstance(config, Mapping) else asdict(config)
    return ledger.key(
        {name: float(v) if type(v) is int and float in expected(HINTS.get(name)) else v for name, v in fields.items()},
        RECIPE if recipe is None else recipe,
    )

"""Load what a chapter defines, so that tests can compare it with the module."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat

ROOT = Path(__file__).parents[1]


def definitions(path: str | Path) -> dict[str, Any]:
    """Execute the cells of a notebook that are tagged `definition`, in order, and return their names.

    Parameters
    ----------
    path
        The notebook, relative to the repository's root.

    Returns
    -------
    dict
        The namespace in which all the cells ran: imports, functions, constants.
    """
    cells = [
        cell
        for cell in nbformat.read(ROOT / path, as_version=4).cells
        if cell.cell_type == "code" and "definition" in cell.metadata.get("tags", [])
    ]
    if not cells:
        raise ValueError(f"{path} has no cell tagged `definition`")
    # A module of its own, because dataclasses look their module up by name.
    module = ModuleType("chapter_" + Path(path).stem)
    sys.modules[module.__name__] = module
    for number, cell in enumerate(cells, start=1):
        exec(compile(cell.source, f"{path}, definition {number}", "exec"), module.__dict__)
    return module.__dict__

"""`summary_of`: one line about a program of an entry point, without importing it, which would take seconds."""

from __future__ import annotations

import ast
import re
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path


def summary_of(point: EntryPoint) -> str:
    """Return the first sentence of the docstring of a program's module, without the name of the command.

    A program whose source cannot be found is described by the module that it is in.
    """
    top, *rest = point.module.split(".")
    spec = find_spec(top)  # of a package at the top: imports nothing
    folder = Path(next(iter(spec.submodule_search_locations or ()), "")) if spec is not None else Path()
    module = folder.joinpath(*rest)
    for source in (module.with_suffix(".py"), module / "__init__.py"):
        if rest and source.is_file():
            return _sentence(ast.get_docstring(ast.parse(source.read_bytes())) or "") or f"Runs {point.module}."
    return f"Runs {point.module}."


def _sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    text = re.sub(r"^``errata[^`]*``:? *", "", paragraph)
    first = re.split(r"(?<=\.)\s", text, maxsplit=1)[0]
    return first[:1].upper() + first[1:]

"""Reads Python source of any origin, also of a version of Python that this one cannot read."""

from __future__ import annotations

import ast


def parsed(source: str) -> ast.Module | None:
    """Return the syntax tree of a module; None where it has none here."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None

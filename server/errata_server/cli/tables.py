"""Tables of a command's output, whose cells may hold text of another party."""

from __future__ import annotations

from rich import table
from rich.console import Console
from rich.text import Text

from errata_protocol.printable import printable

_CELL = 400
"""Most characters of a cell."""


class Table:
    """A table without lines, printed without colours.

    Args:
        *columns: Headings of the columns, or columns with a layout of their own.
    """

    def __init__(self, *columns: str | table.Column) -> None:
        self._table = table.Table(*columns, box=None)

    def add(self, *cells: str) -> None:
        """Add a row."""
        # Text, because rich would interpret brackets in a str as markup.
        self._table.add_row(*(Text(printable(cell, _CELL)) for cell in cells))

    def print(self) -> None:
        """Print the table to standard output."""
        Console(color_system=None, highlight=False).print(self._table)

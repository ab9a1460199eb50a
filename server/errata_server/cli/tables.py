"""Tables of a command's output, whose cells may hold text of another party.

Rows are printed as they come, so that a table of any length takes little memory. Only at a terminal is a cell cut to
the width of its column; a program that reads the output, such as grep, gets all of it.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import IO

from rich.cells import cell_len, set_cell_size

from errata_protocol.printable import printable, printable_lines

_ROWS = 200
_CHARACTERS = 256 * 1024
"""Rows are kept until there are so many of them, or so much text: they decide how wide the columns are."""

_SHOWN = 1000
"""Most characters of a cell that are looked at for a terminal, which is not as wide."""

_NARROWEST = 8


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Args:
        heading: Text above the column.
        right: Whether its cells are aligned to the right, as numbers are.
        whole: Whether its cells are never cut.
        most: Largest width at a terminal, in cells of the terminal.
    """

    heading: str
    right: bool = False
    whole: bool = False
    most: int = 60


class Table:
    """A table without lines and colours. Call `end` after the last row.

    Args:
        *columns: The columns; a text stands for a column with this heading.
        file: Where the table is printed; None for standard output.
    """

    def __init__(self, *columns: str | Column, file: IO[str] | None = None) -> None:
        self._columns = [Column(column) if isinstance(column, str) else column for column in columns]
        self._file = file or sys.stdout
        self._at_terminal = self._file.isatty()
        self._rows: list[tuple[list[str], str | None]] = []
        self._size = 0
        self._widths: list[int] | None = None

    def add(self, *cells: str, below: str | None = None) -> None:
        """Add a row.

        Args:
            cells: Text of each column.
            below: Text of several lines that is printed below the row, indented.
        """
        made = [printable(cell, _SHOWN if self._at_terminal else len(cell)) for cell in cells]
        self._rows.append((made, below))
        self._size += sum(map(len, made)) + len(below or "")
        if self._widths is not None or len(self._rows) >= _ROWS or self._size >= _CHARACTERS:
            self._flush()

    def end(self) -> None:
        """Print what is left: the headings, if there was no row, or the last rows."""
        self._flush()

    def _flush(self) -> None:
        if self._widths is None:
            self._widths = self._fitting()
            self._print([column.heading for column in self._columns], self._widths)
        for cells, below in self._rows:
            self._print(cells, self._widths)
            if below is not None:
                self._file.write("".join(f"    {line}\n" for line in printable_lines(below).split("\n")))
        self._rows, self._size = [], 0

    def _print(self, cells: list[str], widths: list[int]) -> None:
        padded = []
        for cell, width, column in zip(cells, widths, self._columns, strict=True):
            if self._at_terminal and not column.whole and cell_len(cell) > width:
                cell = set_cell_size(cell, width - 1) + "…"
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if column.right else cell + space)
        self._file.write("  ".join(padded).rstrip() + "\n")

    def _fitting(self) -> list[int]:
        """Return the widths of the columns: what the first rows need; at a terminal no more than fits."""
        widths = [cell_len(column.heading) for column in self._columns]
        for cells, _ in self._rows:
            widths = [max(width, cell_len(cell[:_SHOWN])) for width, cell in zip(widths, cells, strict=True)]
        most = [width if column.whole else column.most for width, column in zip(widths, self._columns, strict=True)]
        widths = [min(pair) for pair in zip(widths, most, strict=True)]
        if not self._at_terminal:
            return widths
        excess = sum(widths) + 2 * (len(widths) - 1) - shutil.get_terminal_size().columns
        while excess > 0:
            can = [n for n, column in enumerate(self._columns) if not column.whole and widths[n] > _NARROWEST]
            if not can:
                break
            widths[max(can, key=widths.__getitem__)] -= 1
            excess -= 1
        return widths

"""The table of an episode's turns, as ``errata replay`` and the demos print it."""

from __future__ import annotations

from typing import IO

from errata_protocol.turns import Turn

from .tables import Column, Table


class TurnTable:
    """Prints turns, one in a row.

    Args:
        file: Where the table is printed; None for standard output.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self._table = Table(
            Column("t", right=True, whole=True),
            Column("action", most=58),
            Column("exit", right=True, most=20),
            Column("reward", right=True, whole=True),
            Column("kind", most=24),
            Column("site", most=44),
            Column("hint key", most=28),
            Column("took", right=True, whole=True),
            file=file,
        )

    def add(self, turn: Turn, output: str | None = None) -> None:
        """Print a turn.

        Args:
            turn: The turn.
            output: Text that is printed below it.
        """
        self._table.add(
            "" if turn.t is None else str(turn.t),
            turn.action_text,
            turn.outcome_text,
            "" if turn.reward is None else f"{turn.reward:g}",
            turn.error_kind or "",
            turn.site_text,
            turn.hint_template_key or "",
            "" if turn.duration_s is None else f"{turn.duration_s:.3g} s",
            below=output,
        )

    def end(self) -> None:
        """Print what is left."""
        self._table.end()

"""Where the tokens of a trainer's rows lie in the tensors of its forward pass.

A row is a prompt and its completion, without padding. Positions in items and pairs are those of a row; hidden states
are taken at rows and columns of the model's input. What is over completions, as a batch's old log-probabilities
``[B, T]``, does not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

LAYOUT = "channel_layout"
"""Key of a batch: its `Layout`. Without it prompts are padded on the left to the width of ``prompt_ids``."""

PROMPT_LENGTHS = "channel_prompt_lengths"
"""Key of a batch: tokens of each row's prompt, as numbers: a device that is asked for them waits for its queue."""


class Layout(Protocol):
    """Arrangement of a batch's rows in the input of the model, on the host."""

    def columns(self, row: int, positions: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return the row of the model's input that has a row of the batch, and the column of each position.

        Args:
            row: Index of the row in the batch.
            positions: Positions in the row, without padding.
        """
        ...


@dataclass(frozen=True, slots=True)
class PaddedPrompts:
    """Prompts padded on the left to one width, completions behind them: TRL's layout.

    Attributes:
        width: Columns of the prompts.
        lengths: Number of tokens of each row's prompt.
    """

    width: int
    lengths: Sequence[int]

    def columns(self, row: int, positions: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return the row itself, and its columns; see `Layout`."""
        first = self.width - self.lengths[row]
        return row, [first + position for position in positions]


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Rows that begin at column 0 and are padded on the right, or not at all."""

    def columns(self, row: int, positions: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return the row itself, and the positions as they are; see `Layout`."""
        return row, positions


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows one after the other in a single row ``[1, total]``. Give the model position ids that begin again with each
    row, or what else it takes: otherwise the rows see each other.

    Attributes:
        offsets: Column at which each row begins, and the one at which the last row ends, B + 1 in all.
    """

    offsets: Sequence[int]

    def columns(self, row: int, positions: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Return 0, and the columns of the only row; see `Layout`.

        Raises:
            ValueError: A position outside of its row: its column would be another row's.
        """
        first, end = self.offsets[row], self.offsets[row + 1]
        if any(not 0 <= position < end - first for position in positions):
            raise ValueError(f"packed row {row} has {end - first} tokens, positions asked for are {list(positions)}")
        return 0, [first + position for position in positions]


def layout_of(batch: Mapping[str, Any]) -> Layout:
    """Return the layout of a batch: the one that it carries, or that of prompts padded on the left.

    Args:
        batch: Batch of a trainer, with `LAYOUT`, or with ``prompt_ids`` ``[B, W]`` and `PROMPT_LENGTHS`.
    """
    carried: Layout | None = batch.get(LAYOUT)
    if carried is not None:
        return carried
    return PaddedPrompts(batch["prompt_ids"].size(1), batch[PROMPT_LENGTHS])

"""Batches of recorded rollouts with error sites and pairs, for tests of several trainers' layouts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from errata_trainer import DpoPair, Rollout, SdpoItem
from errata_trainer.channels.splicing import splice

sys.path.insert(0, str(Path(__file__).parent / "channels"))
from three_turns import BODY, HEADER, HINT, rollout


@dataclass(frozen=True)
class Case:
    """A batch.

    Attributes:
        sites: Turns of each row that are distilled.
        paired: Turns of each row that are rejected in a pair.
        cut: Row whose completion ends in the middle of its second turn; None for none.
        elsewhere: Whether the pairs' states are those of rows that are not in the batch.
    """

    sites: Sequence[Sequence[int]]
    paired: Sequence[Sequence[int]]
    cut: int | None = None
    elsewhere: bool = False


CASES = {
    "no site": Case([[], [], []], [[0], [], [2]]),
    "one site": Case([[], [1], []], [[], [], []]),
    "many sites": Case([[0, 1, 2], [2], [0, 2]], [[1], [0, 1, 2], []]),
    "a truncated turn": Case([[0], [1], [0, 1]], [[], [1], [0]], cut=1),
    "pairs of other rows": Case([[2], [], []], [[1], [0, 2], []], elsewhere=True),
    "one row": Case([[0, 2]], [[1]]),
}


def rollouts(case: Case) -> list[Rollout]:
    """Return rollouts whose prompts differ in length."""
    whole = rollout()
    made = [
        Rollout(BODY[row:] + HEADER, whole.completion_ids, whole.mask, whole.turns) for row in range(len(case.sites))
    ]
    if case.cut is not None:
        first, second, _ = whole.turns
        end = second.stop - 2
        turns = (first, type(second)(second.index, second.start, end))
        made[case.cut] = Rollout(made[case.cut].prompt_ids, whole.completion_ids[:end], whole.mask[:end], turns)
    return made


def items_of(case: Case, rows: Sequence[Rollout]) -> list[tuple[SdpoItem, ...]]:
    return [
        tuple(splice(row, turn, HINT, header_ids=HEADER, weight=1.0) for turn in turns)
        for row, turns in zip(rows, case.sites, strict=True)
    ]


def pairs_of(case: Case, rows: Sequence[Rollout]) -> list[tuple[DpoPair, ...]]:
    made = []
    for row, turns in zip(rows, case.paired, strict=True):
        of_row = []
        for number in turns:
            turn = row.turns[number]
            context = row.prompt_ids + row.completion_ids[: turn.start]
            context = (*((7,) if case.elsewhere else ()), *context)
            rejected = row.completion_ids[turn.start : turn.stop]
            of_row.append(DpoPair(context, (60 + number, 61, 99), rejected, weight=0.5 + number))
        made.append(tuple(of_row))
    return made


def ids_of(row: Rollout) -> list[int]:
    return [*row.prompt_ids, *row.completion_ids]

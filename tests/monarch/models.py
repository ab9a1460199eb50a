"""The model of channel 2's tests, and rollouts with error sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from errata_trainer import Rollout, SdpoItem, Turn
from errata_trainer.tiny import tiny_model, tiny_tokenizer


def model() -> Any:
    """Return a tiny model whose answers differ from token to token."""
    made = tiny_model(tiny_tokenizer(["look at the red shelf"], vocab_size=300), hidden=32)
    with torch.no_grad():
        for n, weight in enumerate(made.parameters()):
            weight.add_(torch.sin(torch.arange(weight.numel()) * 1.7 + n).view_as(weight), alpha=0.5)
    return made


def moved(student: Any, by: float) -> None:
    """Move the weights of a student as a step of an optimizer would."""
    with torch.no_grad():
        for n, weight in enumerate(student.parameters()):
            weight.add_(torch.cos(torch.arange(weight.numel()) * 0.7 + n).view_as(weight), alpha=by)


def rollouts() -> list[Rollout]:
    """Return rollouts of two turns."""
    return [
        Rollout(
            tuple(range(5 + row, 12 + row)),
            tuple(range(30 + row, 50 + row)),
            (1,) * 20,
            (Turn(0, 0, 8), Turn(1, 8, 20)),
        )
        for row in range(2)
    ]


def items(of: Sequence[Rollout]) -> list[tuple[SdpoItem, ...]]:
    """Return both turns of the first rollout and one of the second as error sites, with weights and hints."""
    found: list[tuple[SdpoItem, ...]] = []
    for row, rollout in enumerate(of):
        ids = rollout.prompt_ids + rollout.completion_ids
        sites = []
        for turn in rollout.turns[: 2 - row]:
            first = len(rollout.prompt_ids) + turn.start
            hint, targets = (70 + turn.index, 71, 72), ids[first : len(rollout.prompt_ids) + turn.stop]
            student = tuple(range(first - 1, first - 1 + len(targets)))
            teacher = tuple(one + len(hint) for one in student)
            sites.append(
                SdpoItem(
                    turn.index, (*ids[:first], *hint, *targets), student, teacher, targets, weight=1.0 + turn.index
                )
            )
        found.append(tuple(sites))
    return found

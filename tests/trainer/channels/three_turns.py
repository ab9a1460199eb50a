"""A rollout whose tokens say what they are, and a model small enough to count in."""

from __future__ import annotations

from errata_trainer import Rollout, Turn

BODY, HEADER, HINT = (1, 2, 3, 4, 5, 6), (90, 91), (80, 81, 82)
TURNS = ((10, 11, 99), (20, 21, 22, 99), (30, 99))
RESULTS = ((40, 41), (50, 51, 52))


def rollout() -> Rollout:
    """Prompt, turn 0, result, header, turn 1, result, header, turn 2."""
    completion: list[int] = []
    mask: list[int] = []
    turns: list[Turn] = []
    for index, tokens in enumerate(TURNS):
        turns.append(Turn(index, len(completion), len(completion) + len(tokens)))
        completion += tokens
        mask += [1] * len(tokens)
        if index < len(RESULTS):
            between = (*RESULTS[index], *HEADER)
            completion += between
            mask += [0] * len(between)
    return Rollout(BODY + HEADER, tuple(completion), tuple(mask), tuple(turns))

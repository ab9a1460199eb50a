"""What the student of `cpu_plugin` says. All rollouts of a group err first, and one of them then succeeds."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from errata_trainer.demo.script import LOOK, REPAIR, SUBMIT, WRONG_PATH, Turn, run, turn_text

from ..environments.killed import KILL
from ..envs.swe.sessions import instance

LOST = "nekorb"
"""End of the name of a shelf's place, ``broken`` backwards, whose first rollout breaks the machine."""
ORPHAN = "nahpro"
"""End of the name of a place, ``orphan`` backwards, whose first turn kills the workers."""


def said(text: str, rollout: int) -> str:
    """Return what a student says next.

    Args:
        text: The conversation so far.
        rollout: Number of the rollout among those with this prompt, in the order of their first turns; of later turns
            the text shows which it was.
    """
    opening, *turns = text.split("<|im_start|>assistant\n")
    first = rollout == 0 if len(turns) == 1 else FIRST in turns[0]
    say: Callable[[str, list[str], bool], Turn] = _shelf
    if "apply_patch" in opening:
        say = _swe
    elif "write_file" in opening:
        say = _terminal
    return turn_text(say(opening, turns, first))


FIRST = "nowhere-0"
"""What only the first rollout of a group has in its first turn."""


ACTIONS = tuple(map(turn_text, (run("cat nowhere"), LOOK, REPAIR, SUBMIT, ("step", {"tool": "read", "path": FIRST}))))
"""Samples of what is said."""


def _shelf(opening: str, turns: Sequence[str], first: bool) -> Turn:
    place = re.findall(r"Not in ([\w:,]+)", opening)[-1][::-1]
    if place.startswith(LOST[::-1]):
        return _step(tool="read", path="broken") if first else _step(tool="submit", word="owl")
    if len(turns) == 1:
        return _step(tool="read", path=FIRST if first else "nowhere-1")
    if place == "hold" or place.startswith("kill:"):
        return _step(tool="read", path=place if first else "hold")
    if len(turns) == 2:
        return _step(tool="read", path=place)
    return _step(tool="submit", word="owl" if first else "elk")


def _terminal(opening: str, turns: Sequence[str], first: bool) -> Turn:
    script = [run(f"cd /{FIRST}"), run(KILL), LOOK, REPAIR, SUBMIT] if first else [WRONG_PATH, SUBMIT]
    return script[len(turns) - 1]


def _swe(opening: str, turns: Sequence[str], first: bool) -> Turn:
    if first:
        return [run(f"cat {FIRST}"), ("apply_patch", {"patch": instance().patch}), SUBMIT][len(turns) - 1]
    return [run("cat nowhere-1"), SUBMIT][len(turns) - 1]


def _step(**arguments: Any) -> Turn:
    return "step", arguments

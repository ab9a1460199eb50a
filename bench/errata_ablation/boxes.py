"""A controlled family of terminal tasks in which the hint contains what the student does not know.

In each task there is a box, and ``./open KEY`` opens it. Only the program's complaint about a wrong key, in the way of
``argparse``, names the key that fits::

    open: error: invalid choice: 'red' (choose from blue)

The terminal marks the failing command, and the template that ships for ``args.invalid`` quotes the complaint. An
episode is one command: it is over when the student gets that complaint. So a group of rollouts without a right guess
teaches GRPO nothing, while each of its failing turns has a hint. That is the purpose of the family, and its limit: it
shows whether the channels use what a hint contains, not how often hints of real tasks contain as much.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from errata_protocol.detect import detect
from errata_protocol.rollouts import ErrorMarker
from errata_trainer.hints import FailedTurn, TemplateHinter
from errata_trainer.rollouts.rollout import Call, Rollout, Turn

from .task_files import TASK_TOML

KEYS = (
    "red", "blue", "green", "gold", "black", "white", "pink", "gray",
    "north", "south", "east", "west", "sun", "moon", "star", "rain",
)  # fmt: skip
BOXES = (
    "oak", "elm", "ash", "fir", "yew", "fig", "pear", "plum",
    "owl", "fox", "elk", "cat", "hen", "bee", "ram", "cow",
)  # fmt: skip

_OPEN = """\
#!/bin/sh
if [ "$#" = 1 ] && [ "$1" = {key} ]; then
  : > opened
  echo opened
else
  echo "open: error: invalid choice: '$1' (choose from {key})" >&2
  exit 2
fi
"""
_VERIFY = """\
import os

from errata_verify import check, path


@check()
def the_box_is_open():
    assert os.path.exists(path("opened")), "it is closed"
"""


@dataclass(frozen=True)
class Boxes:
    """The family.

    Attributes:
        boxes: Tasks, at most 16.
        keys: Keys that the student knows, at most 16; a box's own is one of them.
        belief: Probability with which a taught student tries the key that it believes in, which is a wrong one; else it
            tries any. So it reads which box is asked for, and is right with a probability of ``(1 - belief) / keys``.
        seed: Seed that decides which key fits which box.
    """

    boxes: int = 4
    keys: int = 8
    belief: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the sizes."""
        if not 1 <= self.boxes <= len(BOXES) or not 2 <= self.keys <= len(KEYS):
            raise ValueError(f"there are 1 to {len(BOXES)} boxes and 2 to {len(KEYS)} keys")

    @cached_property
    def answers(self) -> dict[str, str]:
        """The key of each box."""
        chance = random.Random(self.seed)
        return {
            box: chance.choice([key for key in KEYS[: self.keys] if key != self.believed(box)])
            for box in BOXES[: self.boxes]
        }

    def believed(self, box: str) -> str:
        """Return the key that a taught student believes to fit a box."""
        return KEYS[BOXES.index(box) * 5 % self.keys]

    def write(self, directory: Path) -> None:
        """Write the tasks as directories that the terminal environment serves."""
        for box, key in self.answers.items():
            root = directory / self.task_id(box)
            (root / "environment").mkdir(parents=True, exist_ok=True)
            (root / "tests").mkdir(exist_ok=True)
            (root / "task.toml").write_text(TASK_TOML)
            (root / "instruction.md").write_text(self.instruction(box) + "\n")
            (root / "tests" / "verify.py").write_text(_VERIFY)
            program = root / "environment" / "open"
            program.write_text(_OPEN.format(key=key))
            program.chmod(0o755)

    @staticmethod
    def task_id(box: str) -> str:
        """Return the name of a box's task."""
        return f"box-{box}"

    @staticmethod
    def instruction(box: str) -> str:
        """Return the instruction of a task."""
        return f"open the {box} box"

    @staticmethod
    def command(key: str) -> str:
        """Return the command that opens a box with that key."""
        return f"./open {key}"

    @staticmethod
    def complaint(tried: str, key: str) -> str:
        """Return the program's error message for a wrong key."""
        return f"open: error: invalid choice: '{tried}' (choose from {key})\n"

    def rows(self) -> list[dict[str, Any]]:
        """Return the tasks as rows of a dataset."""
        return [
            {"prompt": [{"role": "user", "content": ""}], "box": box, "task_id": self.task_id(box)}
            for box in self.answers
        ]


def hint_of(tried: str, key: str, hinter: TemplateHinter) -> str:
    """Return the hint that the trainer would write for a wrong key, by the same detector and template.

    Args:
        tried: The wrong key.
        key: The right one.
        hinter: Writes it.
    """
    command = Boxes.command(tried)
    found = detect(command, 2, "", Boxes.complaint(tried, key), timed_out=False, limit_hit=None, cwd="/workspace")
    assert found.error_kind is not None and found.error_site is not None
    marker = ErrorMarker(
        error_kind=found.error_kind.value,
        hint_template_key=found.hint_template_key,
        severity="error",
        error_site=found.error_site,
    )
    call = Call("run", {"command": command}, 1, marker)
    turn = Turn(0, 0, 0, (call,))
    rollout = Rollout((), (), (), (turn,), environment="terminal")
    hint = hinter.hint(FailedTurn(rollout, turn, call, {"exit_code": 2}))
    if hint is None:
        raise ValueError(f"no template says anything of {command!r}: {dict(hinter.counts)}")
    return hint.text


@dataclass(frozen=True, slots=True)
class Lesson:
    """One conversation of the warm-up.

    Attributes:
        messages: Messages before the turn that is learnt.
        command: The student's command.
        result: The result of the command.
    """

    messages: tuple[Mapping[str, str], ...]
    command: str
    result: str


CLOSING = "done"
"""The student's closing text after its command."""


def lessons(family: Boxes, seed: int) -> Iterator[Lesson]:
    """Yield conversations without end. Without a hint the command has the believed key or any, with one the hint's key.

    They do not reveal which key fits which box: the box of a lesson and its key are drawn independently. Hints are
    placed as the trainer places them, in a message of their own, or after the instruction, where TRL's `SDPOTrainer`
    places its feedback. All boxes occur, so that families with any number of them share a policy.
    """
    chance = random.Random(seed)
    hinter = TemplateHinter()
    keys = KEYS[: family.keys]
    while True:
        for form in ("plain", "message", "inline", "message"):
            box, key, tried = chance.choice(BOXES), chance.choice(keys), chance.choice(keys)
            asked = Boxes.instruction(box)
            if form == "plain":
                if chance.random() < family.belief:
                    tried = family.believed(box)
                yield Lesson(
                    ({"role": "user", "content": asked},), Boxes.command(tried), _shown(Boxes.complaint(tried, key))
                )
                continue
            hint = hint_of(tried, key, hinter)
            if form == "message":
                messages: tuple[Mapping[str, str], ...] = (
                    {"role": "user", "content": asked}, {"role": "user", "content": hint},
                )  # fmt: skip
            else:
                messages = ({"role": "user", "content": f"{asked}\n{hint}"},)
            yield Lesson(messages, Boxes.command(key), "opened\n[exit 0]")


def _shown(complaint: str) -> str:
    return f"[stderr]\n{complaint}[exit 2]"

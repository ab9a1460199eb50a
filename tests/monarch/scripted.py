"""Scripted teachers, which are made in the processes of actors too."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from errata_trainer.teachers import (
    Answer,
    Budget,
    FakeTeacher,
    Prompt,
    Spend,
    TeacherBroken,
    TeacherFailed,
    says,
)

BOUND = Spend(tokens=10)
COST = Spend(tokens=3)


def prompt(text: str) -> Prompt:
    """Return a prompt of one message."""
    return Prompt(({"role": "user", "content": text},))


def answer_to(asked: Prompt) -> Any:
    """Say what the last word of the prompt asks for."""
    text = str(asked.messages[-1]["content"])
    if text.startswith("fail"):
        return TeacherBroken("the model is broken")
    if text.startswith("hang"):
        return "hang"
    if text.startswith("crash"):
        raise ZeroDivisionError("a mistake of the teacher's own")
    return says("read", path="red", spent=COST)


class HeldTeacher(FakeTeacher):
    """A teacher that notes the process of each question, and answers ``held`` ones when the directory has ``go``."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(answer_to, name=name, bound=BOUND)
        self._directory, self._now = directory, 0

    async def ask(self, prompt: Prompt, budget: Budget) -> Answer:
        """Return the script's answer, with the process as the model."""
        text = str(prompt.messages[-1]["content"])
        self._now += 1
        try:
            note = f"{text.partition(' ')[0]}-{os.getpid()}-{len(self.asked)}-{self._now}"
            (self._directory / note).touch()
            while text.startswith("held") and not (self._directory / "go").exists():  # noqa: ASYNC110  of another process
                await asyncio.sleep(0.01)
            found = await super().ask(prompt, budget)
        finally:
            self._now -= 1
        return Answer(found.text, found.calls, found.finish_reason, found.spent, str(os.getpid()))


class MakeHeld:
    """Makes the teachers ``a`` and ``b`` in any process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self) -> list[HeldTeacher]:
        return [HeldTeacher(name, self.directory) for name in ("a", "b")]

    def notes(self, kind: str) -> list[list[int]]:
        """Return the process, the number of questions before and of those at the same time, of each question."""
        return [[int(one) for one in path.name.split("-")[1:]] for path in self.directory.glob(f"{kind}-*")]


def refuse() -> list[FakeTeacher]:
    """Fail in the process of an actor only."""
    if os.environ.get("ERRATA_TEST_TRAINER") != str(os.getpid()):
        raise TeacherFailed("no key in the process of the actor")
    return [FakeTeacher(says("read"))]

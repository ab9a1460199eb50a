"""Scripted teachers, which are made in the processes of actors too, and the models of tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from errata_trainer import Rollout, SdpoItem, Turn
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
from errata_trainer.tiny import tiny_model, tiny_tokenizer

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


# Models


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

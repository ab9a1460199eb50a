"""A scripted teacher for tests, demonstrations and runs without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .budget import Budget
from .teacher import Answer, Prompt, RawCall, Spend, TeacherFailed

Script = Callable[[Prompt], Answer | TeacherFailed | Literal["hang"]]


class FakeTeacher:
    """A teacher that answers with what a script returns.

    Args:
        script: Answer to every prompt, or a function from a prompt to an answer, a failure to raise, or ``"hang"`` for
            an answer that never comes.
        name: Name of the teacher; must be unique in a pool.
        family: Model family. Defaults to `name`.
        bound: The most that a call can cost, which each call reserves of a budget; None for nothing.

    Attributes:
        asked: Every prompt that was asked, in order.
    """

    def __init__(
        self, script: Script | Answer, *, name: str = "fake", family: str = "", bound: Spend | None = None
    ) -> None:
        self._script: Script = (lambda prompt: script) if isinstance(script, Answer) else script
        self._name = name
        self._family = family or name
        self._bound = bound or Spend()
        self.asked: list[Prompt] = []

    @property
    def name(self) -> str:
        """Name of the teacher."""
        return self._name

    @property
    def family(self) -> str:
        """Name of the model family."""
        return self._family

    @property
    def identity(self) -> Mapping[str, Any]:
        """The teacher's name, on which alone its answers are cached."""
        return {"fake": self._name}

    def check(self, budget: Budget) -> None:
        """Accept any budget."""

    async def ask(self, prompt: Prompt, budget: Budget) -> Answer:
        """Return the script's answer."""
        self.asked.append(prompt)
        with await budget.reserve(self._bound) as reservation:
            answer = self._script(prompt)
            if answer == "hang":
                await asyncio.Event().wait()
            if isinstance(answer, TeacherFailed):
                if answer.free:
                    reservation.cost(Spend())
                raise answer
            if not isinstance(answer, Answer):
                raise TypeError(f"the script of {self.name} returned {answer!r}: an Answer, a TeacherFailed or 'hang'")
            reservation.cost(answer.spent)
            return answer

    async def aclose(self) -> None:
        """Do nothing."""


def says(name: str, /, *, spent: Spend | None = None, **arguments: Any) -> Answer:
    """Return an answer that calls a tool."""
    call = RawCall(name, json.dumps(arguments))
    return Answer(calls=(call,), finish_reason="tool_calls", spent=spent or Spend())

"""A teacher that says what it was told to, for tests, demonstrations and runs without a network."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

from .budget import Budget
from .teacher import Answer, Prompt, RawCall, Spend, TeacherFailed

Script = Callable[[Prompt], Answer | TeacherFailed | Literal["hang"]]


class FakeTeacher:
    """Answers by a script.

    Args:
        script: From a prompt to an answer, a failure to raise, or ``"hang"`` for an answer that never comes.
        name: Unique in a pool.
        family: Likewise its name without.
        bound: What each call reserves of a budget.

    Attributes:
        asked: Every prompt, in order.
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
        """As given."""
        return self._name

    @property
    def family(self) -> str:
        """As given."""
        return self._family

    @property
    def identity(self) -> Mapping[str, Any]:
        """Its name is all there is."""
        return {"fake": self._name}

    def check(self, budget: Budget) -> None:
        """Any budget will do."""

    async def ask(self, prompt: Prompt, budget: Budget) -> Answer:
        """Return what the script says."""
        self.asked.append(prompt)
        with await budget.reserve(self._bound) as reservation:
            said = self._script(prompt)
            if said == "hang":
                await asyncio.Event().wait()
            if isinstance(said, TeacherFailed):
                if said.free:
                    reservation.cost(Spend())
                raise said
            if not isinstance(said, Answer):
                raise TypeError(f"the script of {self.name} returned {said!r}: an Answer, a TeacherFailed or 'hang'")
            reservation.cost(said.spent)
            return said

    async def aclose(self) -> None:
        """Nothing is open."""


def says(name: str, /, *, spent: Spend | None = None, **arguments: Any) -> Answer:
    """Return an answer that calls a tool."""
    call = RawCall(name, json.dumps(arguments))
    return Answer(calls=(call,), finish_reason="tool_calls", spent=spent or Spend())

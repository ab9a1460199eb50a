"""A client of an environment whose answers are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from errata_protocol.labels import NO_LABELS, Labels


class ScriptedSession:
    """A session that answers from a list.

    Args:
        answers: Answers of resets and steps, in order, which sessions of one runner share: an exception, or text,
            reward and done, and behind them the seconds that it takes or the fields of an error marker.
        asked: List to which each request is added; None for a new one.
        name: Beginning of the session's eids.
    """

    def __init__(self, answers: list[Any], asked: list[Any] | None = None, name: str = "e") -> None:
        self.answers = answers
        self.asked: list[Any] = [] if asked is None else asked
        self.name = name
        self.eid: str | None = None
        self.t: int | None = None
        self.slow_s = 0.0
        self.closed = False
        self.labels = NO_LABELS
        self.labelled: list[Labels] = []

    def _answer(self, asked: Any) -> Any:
        self.asked.append(asked)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        text, reward, done, *more = answer
        self.slow_s = more[0] if more and isinstance(more[0], float) else 0.0
        marked = more[0] if more and isinstance(more[0], dict) else {}
        return SimpleNamespace(observation={"text": text, **marked}, reward=reward, done=done, metadata=None)

    def reset(self, **task: Any) -> Any:
        self.labelled.append(self.labels)
        result = self._answer(task)
        self.eid, self.t = f"{self.name}-{len(self.asked)}", 0
        return result

    def step(self, action: Any) -> Any:
        result = self._answer(action)
        self.t = (self.t or 0) + 1
        return result

    def fork(self, t: int, *, eid: str | None = None) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True

"""Plays each history of commands once in the real environment and then returns the recorded answer (decision 112).

The tasks of a controlled family are deterministic: the same files and the same steps have the same answer. A recorded
answer includes its marker and reward. A history without one is played in a real session. Tasks with equal files share
their histories, whatever their instructions are; the answer to a reset belongs to each task.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from openenv.core.client_types import StepResult

History = tuple[str, ...]
"""Key of an answer: the name of the files and the actions so far, both as JSON. For a reset: the task."""

LIVE = 32
"""Number of real sessions that are kept for the next step of their history."""


class Memo:
    """The recorded answers by history.

    Args:
        connect: Opens a real session.
        files_of: Returns the name of a task's files: tasks with one name have the same answers to the same actions.
        path: File in which answers are kept between processes; None keeps them in this process only.

    Attributes:
        played: Resets and steps that the real environment made.
        asked: Resets, forks and steps that were asked for.
    """

    def __init__(
        self, connect: Callable[[], Any], files_of: Callable[[Mapping[str, Any]], str], path: Path | None = None
    ) -> None:
        self._connect, self.files_of, self._path = connect, files_of, path
        self._answers: dict[History, dict[str, Any]] = {}
        self._tasks: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._live: OrderedDict[History, Any] = OrderedDict()
        self._numbers = count(1)
        self.played = self.asked = 0
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                history, answer = json.loads(line)
                self._answers[tuple(history)] = answer
        self._saved = len(self._answers)

    def session(self) -> RememberedSession:
        """Return a session; it makes no request until a history is new."""
        return RememberedSession(self)

    def capabilities(self) -> Any:
        """Return the real environment's."""
        session = self._connect()
        try:
            return session.capabilities()
        finally:
            session.close()

    def number(self) -> int:
        """Return a number for an episode."""
        return next(self._numbers)

    def count(self) -> None:
        """Count a request."""
        with self._lock:
            self.asked += 1

    def reset(self, task: dict[str, Any]) -> dict[str, Any]:
        """Return what the environment answers to a reset."""
        self.count()
        key = (json.dumps(task, sort_keys=True),)
        with self._lock:
            known = self._answers.get(key)
        if known is None:
            session = self._connect_or_reuse()
            known = self._reset(session, task)
            self._keep(key, known)
            self._put((self.files_of(task),), session)
        return known

    def step(self, task: dict[str, Any], history: History) -> dict[str, Any]:
        """Return what the environment answers to the last action of a history."""
        self.count()
        with self._lock:
            known = self._answers.get(history)
            live = None if known is not None else self._live.pop(history[:-1], None)
        if known is None:
            known, session = self.play(task, history, live)
            self._keep(history, known)
            self._put(history, session)
        return known

    def play(self, task: dict[str, Any], history: History, live: Any = None) -> tuple[dict[str, Any], Any]:
        """Play a history in the real environment; return the last answer and the session.

        Args:
            task: A task with these files.
            history: The actions.
            live: A session in which all but the last action were played; without one all are played.
        """
        session = live or self._connect_or_reuse()
        try:
            if live is None:
                self._reset(session, task)
            answer: dict[str, Any] = {}
            for action in history[1:] if live is None else history[-1:]:
                answer = self._answer_of(session, session.step(json.loads(action)))
        except BaseException:
            session.close()
            raise
        return answer, session

    def _reset(self, session: Any, task: dict[str, Any]) -> dict[str, Any]:
        return self._answer_of(session, session.reset(**task))

    def _answer_of(self, session: Any, result: Any) -> dict[str, Any]:
        with self._lock:
            self.played += 1
        return {
            "observation": dict(result.observation),
            "reward": result.reward,
            "done": bool(result.done),
            "metadata": getattr(result, "metadata", None),
            "t": session.t,
        }

    def _keep(self, history: History, answer: dict[str, Any]) -> None:
        with self._lock:
            self._answers.setdefault(history, answer)

    def _connect_or_reuse(self) -> Any:
        with self._lock:
            if len(self._live) >= LIVE:
                return self._live.popitem(last=False)[1]
        return self._connect()

    def _put(self, history: History, session: Any) -> None:
        with self._lock:
            replaced = self._live.pop(history, None)
            self._live[history] = session
            over = self._live.popitem(last=False)[1] if len(self._live) > 2 * LIVE else None
        for one in (replaced, over):
            if one is not None:
                one.close()

    def histories(self) -> dict[History, dict[str, Any]]:
        """Return all recorded answers."""
        with self._lock:
            return dict(self._answers)

    def save(self) -> None:
        """Append new answers to the file."""
        if self._path is None:
            return
        with self._lock:
            new = list(self._answers.items())[self._saved :]
            self._saved += len(new)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as kept:
            kept.writelines(json.dumps([list(history), answer]) + "\n" for history, answer in new)

    def close(self) -> None:
        """Save, and end the real sessions."""
        self.save()
        with self._lock:
            sessions, self._live = list(self._live.values()), OrderedDict()
        for session in sessions:
            session.close()


class RememberedSession:
    """A session of a `Memo`; it implements `errata_trainer.episodes.playing.Session`.

    Args:
        memo: The recorded answers.

    Attributes:
        eid: Name of the running episode; no journal has it.
        t: Its last delivery.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._task: dict[str, Any] = {}
        self._history: History = ()
        self._ts: tuple[int | None, ...] = ()
        self.eid: str | None = None
        self.t: int | None = None

    def capabilities(self) -> Any:
        """Return the real environment's."""
        return self._memo.capabilities()

    def reset(self, **task: Any) -> Any:
        """Start an episode."""
        answer = self._memo.reset(task)
        self._task, self._history, self._ts = task, (self._memo.files_of(task),), (answer["t"],)
        self.eid = f"remembered-{self._memo.number()}"
        return self._reply(answer)

    def step(self, action: Any) -> Any:
        """Return the answer to an action."""
        history = (*self._history, json.dumps(action, sort_keys=True))
        answer = self._memo.step(self._task, history)
        self._history, self._ts = history, (*self._ts, answer["t"])
        return self._reply(answer)

    def _reply(self, answer: dict[str, Any]) -> Any:
        self.t = answer["t"]
        return StepResult(
            observation=dict(answer["observation"]),
            reward=answer["reward"],
            done=answer["done"],
            metadata=answer["metadata"],
        )

    def fork(self, t: int, *, eid: str | None = None) -> RememberedSession:
        """Return another session at delivery ``t`` of the episode."""
        del eid
        self._memo.count()
        made = RememberedSession(self._memo)
        place = self._ts.index(t) + 1
        made._task, made._history, made._ts = self._task, self._history[:place], self._ts[:place]
        made.t, made.eid = t, f"remembered-{self._memo.number()}"
        return made

    def close(self) -> None:
        """Do nothing: the memo closes real sessions."""

"""Sessions that remember: each history of commands is played once in the real environment, and then told from memory.

The tasks of a controlled family are deterministic, so the same task and the same steps so far have the same answer. A
remembered session returns the recorded one, with its marker and reward; a history that was never played is played in a
real session, from its beginning.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openenv.core.client_types import StepResult

History = tuple[str, ...]


class Memo:
    """What was answered to each history.

    Args:
        connect: Opens a real session.
        path: Where answers are kept between processes; None keeps them in this one only.

    Attributes:
        played: Steps and resets that the real environment made.
        asked: Steps and resets that were asked for.
    """

    def __init__(self, connect: Callable[[], Any], path: Path | None = None) -> None:
        self._connect, self._path = connect, path
        self._answers: dict[History, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._saved = 0
        self.played = self.asked = 0
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                history, answer = json.loads(line)
                self._answers[tuple(history)] = answer
            self._saved = len(self._answers)

    def session(self) -> RememberedSession:
        """Return a session; it costs nothing until a history is new."""
        return RememberedSession(self)

    def capabilities(self) -> Any:
        """Return the real environment's."""
        session = self._connect()
        try:
            return session.capabilities()
        finally:
            session.close()

    def answer(self, history: History, *, fresh: bool = False) -> dict[str, Any]:
        """Return what the environment answers to the last entry of a history.

        Args:
            history: The task, and the steps so far, as JSON.
            fresh: Play it in the real environment, whether it is known or not.
        """
        with self._lock:
            self.asked += 1
            known = self._answers.get(history)
        return known if known is not None and not fresh else self._play(history, keep=not fresh)

    def _play(self, history: History, *, keep: bool) -> dict[str, Any]:
        with self._lock:
            session = self._idle.pop() if self._idle else None
        session = session or self._connect()
        answers = []
        try:
            for place, entry in enumerate(history):
                result = session.step(json.loads(entry)) if place else session.reset(**json.loads(entry))
                answers.append(
                    {
                        "observation": dict(result.observation),
                        "reward": result.reward,
                        "done": bool(result.done),
                        "metadata": getattr(result, "metadata", None),
                        "t": session.t,
                    }
                )
        except BaseException:
            session.close()
            raise
        with self._lock:
            self.played += len(history)
            self._idle.append(session)
            if keep:
                for place, answer in enumerate(answers):
                    self._answers.setdefault(history[: place + 1], answer)
        return answers[-1]

    def save(self) -> None:
        """Add what is new to the file."""
        if self._path is None:
            return
        with self._lock:
            new = list(self._answers.items())[self._saved :]
            self._saved += len(new)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as kept:
            kept.writelines(json.dumps([list(history), answer]) + "\n" for history, answer in new)

    def histories(self) -> list[History]:
        """Return all that are known, in the order in which they were first played."""
        with self._lock:
            return list(self._answers)

    def close(self) -> None:
        """End the real sessions and save."""
        self.save()
        with self._lock:
            idle, self._idle = self._idle, []
        for session in idle:
            session.close()


class RememberedSession:
    """A session of a `Memo`; what `errata_trainer.playing.Session` asks for.

    Args:
        memo: Knows the answers.
    """

    def __init__(self, memo: Memo) -> None:
        self._memo = memo
        self._history: History = ()
        self._ts: tuple[int | None, ...] = ()
        self.eid: str | None = None
        self.t: int | None = None

    def capabilities(self) -> Any:
        """Return the real environment's."""
        return self._memo.capabilities()

    def reset(self, **task: Any) -> Any:
        """Begin an episode."""
        self._history, self._ts = (), ()
        return self._next(json.dumps(task, sort_keys=True))

    def step(self, action: Any) -> Any:
        """Act."""
        return self._next(json.dumps(action, sort_keys=True))

    def _next(self, entry: str) -> Any:
        history = (*self._history, entry)
        answer = self._memo.answer(history)
        self._history, self.t = history, answer["t"]
        self._ts = (*self._ts, self.t)
        self.eid = f"remembered-{id(self)}-{len(self._history)}" if len(history) == 1 else self.eid
        return StepResult(
            observation=dict(answer["observation"]),
            reward=answer["reward"],
            done=answer["done"],
            metadata=answer["metadata"],
        )

    def fork(self, t: int, *, eid: str | None = None) -> RememberedSession:
        """Return another session that stands at delivery ``t`` of the episode."""
        del eid
        made = RememberedSession(self._memo)
        count = self._ts.index(t) + 1
        made._history, made._ts, made.t, made.eid = self._history[:count], self._ts[:count], t, self.eid
        return made

    def close(self) -> None:
        """Do nothing: real sessions are the memo's."""

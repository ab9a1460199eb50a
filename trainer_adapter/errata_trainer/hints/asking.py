"""Uses a teacher of `errata_trainer.teachers` as the model behind `ModelHinter`, with its deadline, retries, budget and
cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from ..teachers import AnswerCache, Budget, Prompt, Spend, Teacher, cache_key
from .model import PROMPT_VERSION, Completion


class TeacherModel:
    """Adapts a teacher to the `Complete` interface of `ModelHinter`; it may be called from any thread.

    The teacher runs on an event loop of its own, begun by the first completion, and belongs to this object until
    `close`. How long an answer may be is the teacher's own setting.

    Args:
        teacher: Teacher to ask, e.g. `errata_trainer.teachers.endpoint.ChatTeacher`.
        budget: Limit of money or tokens; None has no limit. Do not share it with a pool, which has another event loop.
        cache: Cache of answers, e.g. in a directory; None keeps them in memory.

    Raises:
        ValueError: The teacher cannot keep the budget.
    """

    def __init__(self, teacher: Teacher, *, budget: Budget | None = None, cache: AnswerCache | None = None) -> None:
        self.budget = budget if budget is not None else Budget()
        teacher.check(self.budget)
        self._teacher = teacher
        self._cache = cache if cache is not None else AnswerCache()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def __call__(self, messages: Sequence[Mapping[str, str]], *, max_tokens: int) -> Completion:
        """Return the teacher's answer.

        Raises:
            TeacherFailed: There is none, for a reason that the class names.
            RuntimeError: It is closed.
        """
        del max_tokens  # the endpoint's own bound includes what the model thinks
        prompt = Prompt(tuple(messages), version=f"hint-{PROMPT_VERSION}")
        with self._lock:  # what is asked before `close` is there for it to end
            loop = self._running()
            asked = asyncio.run_coroutine_threadsafe(self._ask(prompt), loop)
        return asked.result()

    async def _ask(self, prompt: Prompt) -> Completion:
        """Return the cached answer to a prompt, at no cost, or else ask the teacher and cache its answer.

        Raises:
            TeacherFailed: The teacher gave no answer.
        """
        key = cache_key(prompt, self._teacher.identity)
        answer = self._cache.get(key)
        spent = Spend()
        if answer is None:
            answer = await self._teacher.ask(prompt, self.budget)
            spent = answer.spent
            if answer.text.strip() and answer.finish_reason != "length":
                self._cache.put(key, answer)
        return Completion(answer.text, spent.tokens, answer.finish_reason != "length")

    def state_dict(self) -> dict[str, Any]:
        """Return what is spent, for a checkpoint."""
        return {"spent": asdict(self.budget.spent)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count at least as much as spent as a checkpoint says."""
        self.budget.resume(Spend(**state["spent"]))

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._closed:
            raise RuntimeError("this model is closed: make another")
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="errata-hints", daemon=True)
            self._thread.start()
        return self._loop

    def close(self) -> None:
        """Close the teacher's connections and end the thread. Pending completions fail. Idempotent."""
        with self._lock:
            self._closed = True
            loop, thread, self._loop = self._loop, self._thread, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(self._end(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._teacher.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

"""Runs the tool calls of a batch in parallel inside TRL's tool loop.

TRL calls the tools of one rollout after those of another. That loop is not changed: at the first call of an iteration
the pending calls of all rollouts are made, those of one rollout in order and in a thread of its own, and TRL gets the
results when it makes the calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ...assembly.batch import Transcripts

THREADS = 64
"""Rollouts whose tools are at work at once."""


class ParallelTools:
    """Mixin for a trainer with TRL's tool loop; name it before the trainer among the bases.

    Episodes begin, act and are graded side by side. It needs these private names of TRL 1.16:
    ``_tool_call_loop(prompts, prompt_ids, completion_ids, completions, ...)``, ``_sync_tool_dicts``,
    ``environment_factories``, ``_environment_pool``, ``_multi_environment``. Asynchronous tools are left to TRL.

    Attributes:
        tool_threads: Most rollouts whose tools run at once; 1 is TRL's own loop.
        transcripts: Transcripts of the last batch.
    """

    tool_threads: int = THREADS
    transcripts: Transcripts | None = None
    environments: list[Any] | None
    environment_factories: dict[str | None, Callable[[], Any]] | None
    _environment_pool: dict[str | None, list[Any]]
    _multi_environment: bool
    _sync_tool_dicts: list[dict[str, Callable[..., Any]]]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self.transcripts = None
        if self.environment_factories is not None:
            pooled = self._pooled(inputs, self.environment_factories)
            self._label_all([environment for environment, _ in pooled])
            if self.tool_threads > 1:
                self._begin_all(pooled)
        scored: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        return scored

    def _label_all(self, environments: Sequence[Any]) -> None:
        """Give the episodes of a batch their labels, before they begin. A trainer that has any overrides this.

        Args:
            environments: Environment of each row of the batch; none if TRL is going to refuse a row.
        """

    def _pooled(
        self, inputs: Sequence[Mapping[str, Any]], factories: Mapping[str | None, Callable[[], Any]]
    ) -> list[tuple[Any, Mapping[str, Any]]]:
        """Return the environment that TRL will take for each row, with the row.

        Environments come from TRL's pool, which is extended as far as the batch needs. If a row names an unknown
        environment, there are none: TRL reports it.

        Args:
            inputs: Rows of the batch. With several environments, ``environment`` names the one of a row.
            factories: Functions that make an environment, by name; the name is None if there is only one kind.
        """
        used: dict[str | None, int] = {}
        pooled = []
        for row in inputs:
            name = row.get("environment") if self._multi_environment else None
            pool = self._environment_pool.get(name)
            if pool is None:
                return []  # TRL says what is wrong with the row
            place = used.get(name, 0)
            used[name] = place + 1
            if place == len(pool):
                pool.append(factories[name]())
            pooled.append((pool[place], row))
        return pooled

    def _begin_all(self, pooled: Sequence[tuple[Any, Mapping[str, Any]]]) -> None:
        """Reset the environments of a batch in a thread pool, before TRL resets them one after the other.

        An environment's ``reset``, which TRL calls later, returns the result of this one. Those without a ``_begin``
        method are left to TRL.
        """
        begun = [(environment, row) for environment, row in pooled if hasattr(environment, "_begin")]
        if begun:
            with ThreadPoolExecutor(min(self.tool_threads, len(begun)), "errata-resets") as threads:
                list(threads.map(lambda pair: pair[0]._begin(pair[1]), begun))

    def _tool_call_loop(self, *arguments: Any) -> Any:
        prompts = [list(prompt) for prompt in arguments[0]]  # TRL appends the turns to its own
        if self.tool_threads > 1:
            found = self._side_by_side(super()._tool_call_loop, arguments)  # type: ignore[misc]
        else:
            found = super()._tool_call_loop(*arguments)  # type: ignore[misc]
        masks, messages, completion_ids, logprobs = found[:4]
        self.transcripts = Transcripts(prompts, arguments[1], completion_ids, masks, messages, logprobs)
        return found

    def _side_by_side(self, loop: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        tools, completions = self._sync_tool_dicts, arguments[3]
        with ThreadPoolExecutor(min(self.tool_threads, max(1, len(tools))), "errata-tools") as threads:
            ahead = PrefetchedCalls(tools, completions, threads)
            self._sync_tool_dicts = [
                {name: partial(ahead.take, row, name) for name in own} for row, own in enumerate(tools)
            ]
            try:
                found = loop(*arguments)
            finally:
                self._sync_tool_dicts = tools
            graded = [environment for environment in self.environments or () if hasattr(environment, "_finish")]
            list(threads.map(lambda environment: environment._finish(), graded))
        return found


class PrefetchedCalls:
    """Tool calls that are made ahead of the loop that asks for their results.

    Args:
        tools: Tools of each rollout, by name.
        completions: Messages of each rollout so far; the trainer appends to them.
        threads: Executor that runs the calls.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Callable[..., Any]]],
        completions: Sequence[list[dict[str, Any]]],
        threads: ThreadPoolExecutor,
    ) -> None:
        self._tools = tools
        self._completions = completions
        self._threads = threads
        self._made: list[deque[tuple[str, Any, BaseException | None]]] = [deque() for _ in tools]
        self._seen: set[tuple[int, int]] = set()

    def take(self, row: int, name: str, /, **_: Any) -> Any:
        """Return the result of a call, or raise its exception."""
        if not self._made[row]:
            self._make()
        made, result, error = self._made[row].popleft()
        if made != name:
            raise RuntimeError(f"the trainer asks for {name!r} where the student called {made!r}: TRL's loop changed")
        if error is not None:
            raise error
        return result

    def _make(self) -> None:
        jobs = []
        for row, messages in enumerate(self._completions):
            # A rollout whose results were too long has its last message again: its calls are not made twice.
            place = (row, len(messages))
            if messages and messages[-1].get("tool_calls") and place not in self._seen:
                self._seen.add(place)
                jobs.append(self._threads.submit(self._make_one, row, messages[-1]["tool_calls"]))
        for job in jobs:
            job.result()

    def _make_one(self, row: int, calls: Sequence[Mapping[str, Any]]) -> None:
        for call in calls:
            function = call.get("function") if call.get("type") == "function" else None
            if not isinstance(function, Mapping):
                continue
            name, arguments = str(function.get("name")), function.get("arguments")
            tool = self._tools[row].get(name)
            if tool is None or not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
                continue  # TRL answers these itself, without a tool
            try:
                made: tuple[str, Any, BaseException | None] = (name, tool(**arguments), None)
            except BaseException as error:  # raised where TRL asks, as if it had been made there
                made = (name, None, error)
            self._made[row].append(made)

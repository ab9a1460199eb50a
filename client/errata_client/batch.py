"""Requests to several sessions at once, their outcomes in the order they come, and one deadline for all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from errata_protocol.errors import ErrataError
from errata_protocol.replay import Kind

from .client import ErrataClient
from .doors import Begun

Client = ErrataClient[Any, Any, Any]
Result = Any
"""A `StepResult`, or the exception of an environment that failed."""


class Batch:
    """What becomes of one request for each of several clients.

    Args:
        requests: (client, ``data``) by place.
        kind: reset or step.
        settled: Called once for each place with its result.

    Attributes:
        call_timeout_s: How long the server says that the longest of them can take; 0 where it says nothing.
    """

    def __init__(
        self, requests: Sequence[tuple[Client, Any]], kind: Kind, settled: Callable[[Kind, Result], None]
    ) -> None:
        self.results: list[Result] = [None] * len(requests)
        self._pending: dict[int, Begun | _Asked | None] = {}
        self._arrived: deque[int] = deque()
        self._changed: asyncio.Future[None] | None = None
        self._kind = kind
        self._settled = settled
        self.call_timeout_s = 0.0
        for place, (client, data) in enumerate(requests):
            self._pending[place] = None
            try:
                fields = client._step_payload(data) if kind == "step" else dict(data)
                self.call_timeout_s = max(self.call_timeout_s, client._call_timeout_s(kind, fields))
                done = partial(self._take, place, client._parse_result)
                self._pending[place] = client._begin(kind, fields, done) or _Asked(client, kind, fields, done)
            except Exception as error:  # of this environment only
                self._settle(place, error)

    def _take(self, place: int, parse: Callable[[Any], Any], outcome: Any) -> None:
        if place not in self._pending:
            return  # its caller is gone
        if not isinstance(outcome, BaseException):
            try:
                outcome = parse(outcome)
            except Exception as error:
                outcome = error
        self._settle(place, outcome)

    def _settle(self, place: int, result: Result) -> None:
        del self._pending[place]
        self.results[place] = result
        self._arrived.append(place)
        self._settled(self._kind, result)
        changed = self._changed
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def all(self, timeout_s: float) -> list[Result]:
        """Wait for every result; what takes longer than ``timeout_s`` is asked back, and its result is TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._pending:
                    await self._change()
        except TimeoutError:
            self.give_up(timeout_s)
        except BaseException:
            self.drop()
            raise
        return self.results

    async def next(self, until: float) -> int | None:
        """Return the place of the next result, None when all were returned.

        Args:
            until: Loop time after which what is missing is asked back.
        """
        if not self._arrived and self._pending:
            loop = asyncio.get_running_loop()
            since = loop.time()
            try:
                async with asyncio.timeout_at(until):
                    while not self._arrived:
                        await self._change()
            except TimeoutError:
                self.give_up(until - since)
        return self._arrived.popleft() if self._arrived else None

    async def _change(self) -> None:
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def give_up(self, waited_s: float) -> None:
        """Ask back what has no result, and let it be TimeoutError."""
        for place, begun in list(self._pending.items()):
            if begun is not None:
                begun.ask_back()
            text = f"no reply to a {self._kind} within {waited_s:g} s; it was asked back and may still act: see by t"
            self._settle(place, TimeoutError(text))

    def drop(self) -> None:
        """Ask back what has no result; nobody waits."""
        pending, self._pending = self._pending, {}
        for begun in pending.values():
            if begun is not None:
                begun.ask_back()
            self._settled(self._kind, ErrataError("nobody waits for it any more"))


class _Asked:
    """A request where nothing can be sent at once: on a plain socket, or of a session that is not open yet."""

    __slots__ = ("_done", "_task")

    def __init__(self, client: Client, kind: Kind, fields: dict[str, Any], done: Callable[[Any], None]) -> None:
        self._done = done
        self._task = asyncio.ensure_future(client._send_and_receive({"type": kind, "data": fields}))
        self._task.add_done_callback(self._take)

    def ask_back(self) -> None:
        """Let nobody wait for it."""
        self._task.cancel()

    def _take(self, task: asyncio.Task[dict[str, Any]]) -> None:
        error: BaseException | None = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._done(task.result()["data"] if error is None else error)

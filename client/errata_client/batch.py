"""Sends requests to several sessions at once and collects their outcomes, with one deadline for all."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from errata_protocol.errors import ErrataError
from errata_protocol.replay import Kind

from .client import ErrataClient
from .connections.waiting import waits_at
from .doors.door import PendingRequest

Client = ErrataClient[Any, Any, Any]
Result = Any
"""A `StepResult`, or the exception of a request that failed."""


class Batch:
    """One request for each of several clients; they are sent when it is made.

    Args:
        requests: (client, ``data``) for each place of the batch.
        kind: reset or step.
        settled: Called with (kind, result) once for each place.

    Attributes:
        results: Results by place; None for those that are pending.
        call_timeout_s: Longest time that one of the requests may take by the servers' capabilities; 0 where they name
            none.
    """

    def __init__(
        self, requests: Sequence[tuple[Client, Any]], kind: Kind, settled: Callable[[Kind, Result], None]
    ) -> None:
        self.results: list[Result] = [None] * len(requests)
        self._pending: dict[int, PendingRequest | _TaskRequest | None] = {}
        self._arrived: deque[int] = deque()
        self._changed: asyncio.Future[None] | None = None
        self._kind = kind
        self._settled = settled
        self.call_timeout_s = 0.0
        self._waits = waits_at(requests[0][0]._ws_url if requests else None)
        self._wait = self._waits.begin(f"the replies to a batch of {kind}s", why=self._left)
        for place, (client, data) in enumerate(requests):
            self._pending[place] = None
            try:
                fields = client._step_payload(data) if kind == "step" else dict(data)
                self.call_timeout_s = max(self.call_timeout_s, client._call_timeout_s(kind, fields))
                done = partial(self._take, place, client._parse_result)
                self._pending[place] = client._begin(kind, fields, done) or _TaskRequest(client, kind, fields, done)
            except Exception as error:  # fails this place only
                self._settle(place, error)
        if not self._pending:
            self._waits.end(self._wait)

    def _take(self, place: int, parse: Callable[[Any], Any], outcome: Any) -> None:
        if place not in self._pending:
            return  # the batch timed out or was cancelled
        if not isinstance(outcome, BaseException):
            try:
                outcome = parse(outcome)
            except Exception as error:
                outcome = error
        self._settle(place, outcome)

    def _settle(self, place: int, result: Result) -> None:
        del self._pending[place]
        if not self._pending:
            self._waits.end(self._wait)
        self.results[place] = result
        self._arrived.append(place)
        self._settled(self._kind, result)
        changed = self._changed
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def all(self, timeout_s: float) -> list[Result]:
        """Wait for every result. Requests without a reply after ``timeout_s`` are cancelled and give TimeoutError."""
        self._wait.most_s = timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while self._pending:
                    await self._change()
        except TimeoutError:
            self._time_out(timeout_s)
        except BaseException:
            self.cancel()
            raise
        return self.results

    async def next(self, until: float) -> int | None:
        """Wait for the next result and return its place; None when all were returned.

        Args:
            until: Loop time at which the pending requests are cancelled and give TimeoutError.
        """
        if not self._arrived and self._pending:
            loop = asyncio.get_running_loop()
            since = loop.time()
            self._wait.most_s = until - self._wait.since
            try:
                async with asyncio.timeout_at(until):
                    while not self._arrived:
                        await self._change()
            except TimeoutError:
                self._time_out(until - since)
        return self._arrived.popleft() if self._arrived else None

    def _left(self) -> str:
        return f"{len(self._pending):,} of {len(self.results):,} are missing"

    async def _change(self) -> None:
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def _time_out(self, waited_s: float) -> None:
        """Cancel the pending requests; their result is TimeoutError."""
        for place, begun in list(self._pending.items()):
            if begun is not None:
                begun.cancel()
            text = (
                f"no reply to a {self._kind} within {waited_s:g} s; it was cancelled, which may have come too late: "
                "compare t"
            )
            self._settle(place, TimeoutError(text))

    def cancel(self) -> None:
        """Cancel the pending requests, whose results nobody will read."""
        pending, self._pending = self._pending, {}
        self._waits.end(self._wait)
        for begun in pending.values():
            if begun is not None:
                begun.cancel()
            self._settled(self._kind, ErrataError("the batch was cancelled"))


class _TaskRequest:
    """A `PendingRequest` in a task: on a plain socket, or of a session that is not open yet."""

    __slots__ = ("_done", "_task")

    def __init__(self, client: Client, kind: Kind, fields: dict[str, Any], done: Callable[[Any], None]) -> None:
        self._done = done
        self._task = asyncio.ensure_future(client._send_and_receive({"type": kind, "data": fields}))
        self._task.add_done_callback(self._take)

    def cancel(self) -> None:
        """See `PendingRequest.cancel`."""
        self._task.cancel()

    def _take(self, task: asyncio.Task[dict[str, Any]]) -> None:
        error: BaseException | None = asyncio.CancelledError() if task.cancelled() else task.exception()
        self._done(task.result()["data"] if error is None else error)

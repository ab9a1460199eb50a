"""`event_stream`: the body of ``GET /episodes/events``, server-sent events of what happens to episodes (PROTOCOL G)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from errata_protocol.errors import JournalUnavailable

from ..journal.base import EpisodeRow
from ..runtime.changes import Change, Changes, Event, Reader
from ..runtime.store import Store
from .input_errors import error_json

PACE_S = 0.25
"""Shortest time between two batches of events, seconds: what happens to an episode in between is one event."""

QUICK_READERS = 8
"""Number of readers up to which each takes a batch at this pace; more take turns, so that all together cost no more."""

HEARTBEAT_S = 15.0
"""Longest time in which nothing is sent, seconds: proxies cut connections that are silent for longer."""

RETRY_MS = 2_000
"""Time after which a client shall connect again, milliseconds."""

UNWARNED_S = 30.0
"""How long a stream lasts on a server that does not tell when it begins to stop, seconds; its client connects again."""

MAX_EVENT_CURSOR = 8192
"""Longest cursor, characters: that of a fleet is those of all its workers."""

MEDIA_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # the second: nginx passes events on at once


class EventStream:
    """One who reads events. It holds a place among the readers from now on, until `close`, or the end of `body`.

    Args:
        changes: What happens.
        store: The journal, to look up whose episodes changed; None where nothing ever happens.
        principal: Whose episodes are shown.
        environment: Only episodes of this environment; None for all.
        episode: Only this episode; None for all.
        cursor: Id of an event of an earlier stream, behind which this one goes on; None to begin now.
        warned: Whether the server says to ``changes`` when it begins to stop.

    Raises:
        Overloaded: There are as many readers as there may be.
    """

    def __init__(
        self,
        changes: Changes,
        store: Store | None,
        *,
        principal: str | None,
        environment: str | None,
        episode: EpisodeRow | None,
        cursor: str | None,
        warned: bool,
    ) -> None:
        self._changes, self._store = changes, store
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._reader = Reader(principal, environment, episode, self._wake)
        self._ends = None if warned else self._loop.time() + UNWARNED_S
        self._why = changes.open(self._reader, cursor)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # its loop was closed before it was
            self._loop.call_soon_threadsafe(self._woken.set)

    def close(self) -> None:
        """Give the place back. Idempotent."""
        self._changes.close(self._reader)

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the messages of the stream until the server stops, or its time is over."""
        changes, reader = self._changes, self._reader
        try:
            cursor = changes.cursor(reader)
            yield b"retry: %d\n\n" % RETRY_MS + (_list(cursor, self._why) if self._why is not None else _kept(cursor))
            sent = self._loop.time()
            while not self._is_over():
                self._woken.clear()
                events, unknown, why = changes.take(reader)
                if unknown:
                    try:
                        await self._look_up(unknown)
                    except JournalUnavailable:  # the server has stopped
                        return
                    continue
                if why is not None:
                    yield _list(changes.cursor(reader), why)
                    sent = self._loop.time()
                elif events:
                    yield b"".join(_event(cursor, event) for cursor, event in events)
                    sent = self._loop.time()
                elif reader.waits and not await self._until(sent + HEARTBEAT_S):
                    yield _kept(changes.cursor(reader))
                    sent = self._loop.time()
                    continue
                await self._pause()
        finally:
            self.close()

    async def _look_up(self, unknown: Sequence[Change]) -> None:
        if self._store is None:
            raise RuntimeError("something happened where there is no journal")
        await self._store.read(lambda journal: self._changes.look_up(journal, unknown))

    def _is_over(self) -> bool:
        return self._changes.ended or (self._ends is not None and self._loop.time() >= self._ends)

    async def _until(self, when: float) -> bool:
        """Wait until something may be there, and return True; False if that was not before ``when``."""
        if self._ends is not None and self._ends < when:
            when = self._ends
        try:
            async with asyncio.timeout_at(when):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True

    async def _pause(self) -> None:
        """Let changes come together, unless the server stops."""
        end = self._loop.time() + PACE_S * max(1.0, self._changes.readers / QUICK_READERS)
        while not self._changes.ended and await self._until(end):
            self._woken.clear()


class EventResponse(StreamingResponse):
    """Answers with a stream; its place among the readers is given back however the answer ends.

    Args:
        stream: The stream.
    """

    def __init__(self, stream: EventStream) -> None:
        super().__init__(stream.body(), media_type=MEDIA_TYPE, headers=HEADERS)
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.close()


def _list(cursor: str, why: str) -> bytes:
    return b"event: list\nid: %s\ndata: %s\n\n" % (cursor.encode(), error_json({"reason": why}))


def _event(cursor: str, event: Event) -> bytes:
    return b"event: episode\nid: %s\ndata: %s\n\n" % (cursor.encode(), error_json(event))


def _kept(cursor: str) -> bytes:
    """Return a comment with the cursor so far, which clients note and show nobody."""
    return b": nothing happened\nid: %s\n\n" % cursor.encode()

"""`MergedEvents`: the streams of events of all workers as one (``GET /episodes/events``).

An episode is one worker's, so its events are in one stream and keep their order. A cursor of the merged stream has the
cursors of all workers' streams, and each of them goes on from its own. When a worker ends, the merged stream ends: its
client connects again, and the worker that has started again answers with ``restart``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import httpx
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ..doors.event_stream import HEADERS, MEDIA_TYPE

CURSORS = "."
"""What stands between the cursors of the workers, in their order."""


def cursors_of(cursor: str | None, workers: int) -> list[str | None]:
    """Return each worker's part of a cursor; the whole for each, which then says ``restart``, of another fleet's."""
    parts = cursor.split(CURSORS) if cursor is not None else []
    return list(parts) if len(parts) == workers else [cursor] * workers


class MergedEvents(StreamingResponse):
    """Answers with the streams of all workers as one.

    Args:
        answers: Answers of the workers, in their order, of which nothing has been read.
        opened: Closes them.
    """

    def __init__(self, answers: Sequence[httpx.Response], opened: AsyncExitStack) -> None:
        super().__init__(_merged(answers), media_type=MEDIA_TYPE, headers=HEADERS)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request; the workers' answers are closed however that ends."""
        async with self._opened:
            await super().__call__(scope, receive, send)


async def _merged(answers: Sequence[httpx.Response]) -> AsyncIterator[bytes]:
    """Yield the messages of all workers, each worker's in their order, until one of the streams ends."""
    cursors: list[str | None] = [None] * len(answers)
    read: asyncio.Queue[tuple[int, list[bytes] | None]] = asyncio.Queue(maxsize=len(answers))
    tasks = [asyncio.create_task(_read(worker, answer, read)) for worker, answer in enumerate(answers)]
    try:
        while (got := await read.get())[1] is not None:
            worker, messages = got
            yield b"".join(_renamed(message, cursors, worker) for message in messages or ())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(worker: int, answer: httpx.Response, read: asyncio.Queue[tuple[int, list[bytes] | None]]) -> None:
    """Put the messages of a worker's stream, several at once as they come, and None at its end."""
    rest = b""
    try:
        async for part in answer.aiter_bytes():
            *messages, rest = (rest + part).split(b"\n\n")
            if messages:
                await read.put((worker, messages))
    except httpx.HTTPError:
        pass  # the worker has ended
    await read.put((worker, None))


def _renamed(message: bytes, cursors: list[str | None], worker: int) -> bytes:
    """Return a message of a worker with the cursor of all as its id.

    It has no id until each worker has sent its first message: a stream that went on from there would miss something.

    Args:
        message: The message, without the empty line at its end.
        cursors: The newest cursor of each worker; the worker's is replaced by the message's.
        worker: Number of the worker.
    """
    lines = message.split(b"\n")
    kept = [line for line in lines if not line.startswith(b"id: ")]
    if len(kept) < len(lines):
        cursors[worker] = next(line for line in lines if line.startswith(b"id: ")).removeprefix(b"id: ").decode()
    known = [cursor for cursor in cursors if cursor is not None]
    if len(known) == len(cursors):
        kept.append(b"id: " + CURSORS.join(known).encode())
    return b"\n".join(kept) + b"\n\n"

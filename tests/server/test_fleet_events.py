"""The merged stream of events (`errata_server.fleet.events`), with streams that are written here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import httpx
from hypothesis import given
from hypothesis import strategies as st

from errata_server.fleet.events import MergedEvents, cursors_of

END = "the end"
Sent = list[list[bytes]]
"""Of each worker the parts that its stream comes in."""


class _Stream(httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes], ends: asyncio.Event | None) -> None:
        self._parts = parts
        self._ends = ends
        self.is_closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part
            await asyncio.sleep(0)
        if self._ends is not None:
            await self._ends.wait()

    async def aclose(self) -> None:
        self.is_closed = True


async def _merged(sent: Sent, *, until: int) -> tuple[list[dict[str, str]], list[_Stream]]:
    """Return the first messages of the merged stream, and the workers' streams after it was left."""
    never = asyncio.Event()
    streams = [_Stream(parts, never) for parts in sent]
    text, enough = b"", asyncio.Event()
    async with AsyncExitStack() as opened:
        answers = [httpx.Response(200, stream=stream) for stream in streams]
        for answer in answers:
            opened.push_async_callback(answer.aclose)
        response = MergedEvents(answers, opened.pop_all())

    async def receive() -> dict[str, Any]:
        await enough.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal text
        text += message.get("body", b"")
        if text.count(b"\n\n") >= until:
            enough.set()
            await asyncio.sleep(0)

    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET"}
    async with asyncio.timeout(60):
        await response(scope, receive, send)
    messages = [message.split("\n") for message in text.decode().split("\n\n")[:-1]]
    return [dict(line.partition(": ")[::2] for line in message) for message in messages], streams


def _cut(text: bytes, cuts: list[int]) -> list[bytes]:
    at = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[begin:end] for begin, end in pairwise(at) if begin < end]


@given(
    st.lists(
        st.tuples(st.integers(min_value=1, max_value=6), st.lists(st.integers(min_value=0, max_value=500), max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_each_message_comes_once_in_its_workers_order_and_cursors_only_go_on(
    workers: list[tuple[int, list[int]]],
) -> None:
    sent = [
        _cut(b"".join(b"event: episode\nid: r-%d\ndata: %d/%d\n\n" % (n, worker, n) for n in range(count)), cuts)
        for worker, (count, cuts) in enumerate(workers)
    ]
    total = sum(count for count, _ in workers)
    messages, streams = asyncio.run(_merged(sent, until=total))
    for worker, (count, _) in enumerate(workers):
        own = [message["data"] for message in messages if message["data"].startswith(f"{worker}/")]
        assert own == [f"{worker}/{n}" for n in range(count)]
    seen = [-1] * len(workers)
    for message in messages:
        worker, n = map(int, message["data"].split("/"))
        seen[worker] = n
        if "id" in message:
            assert message["id"] == ".".join(f"r-{n}" for n in seen), "a cursor names what was sent before, and no more"
        else:
            assert -1 in seen, "a message has no cursor only while a worker has sent none"
    assert messages[-1]["id"] == ".".join(f"r-{count - 1}" for count, _ in workers)
    assert all(stream.is_closed for stream in streams)


def test_a_comment_moves_the_cursor_and_nothing_else() -> None:
    sent = [[b"retry: 2000\n\n: nothing happened\nid: a-1\n\n"], [b": nothing happened\nid: b-1\n\n"]]
    messages, _ = asyncio.run(_merged(sent, until=3))
    assert [message.get("id") for message in messages][-1] == "a-1.b-1"
    assert not any("data" in message for message in messages)


def test_the_stream_ends_with_the_first_that_does() -> None:
    async def ends() -> list[str]:
        streams = [_Stream([b"id: a\n\n"], None), _Stream([b"id: b\n\n"], asyncio.Event())]
        sent: list[str] = []

        async def receive() -> dict[str, Any]:
            await asyncio.Event().wait()
            return {}

        async def send(message: Any) -> None:
            sent.append(message["type"] if message.get("more_body", True) else END)

        async with AsyncExitStack() as opened, asyncio.timeout(60):
            response = MergedEvents([httpx.Response(200, stream=stream) for stream in streams], opened.pop_all())
            await response({"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET"}, receive, send)
        return sent

    assert asyncio.run(ends())[-1] == END


def test_each_worker_gets_its_own_part_of_a_cursor() -> None:
    assert cursors_of(None, 3) == [None, None, None]
    assert cursors_of("a-1.b-2.c-3", 3) == ["a-1", "b-2", "c-3"]
    assert cursors_of("a-1.b-2", 3) == ["a-1.b-2"] * 3, "of a fleet with another number of workers: each says restart"

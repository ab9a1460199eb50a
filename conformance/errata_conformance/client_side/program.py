"""The client under test, as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ..results import Broken, NotSupported, ensure

Answer = dict[str, Any]
LINE_BYTES = 64 * 1024**2
"""Longest line that a client may print."""


class Program:
    """A running client.

    Args:
        process: Its process.
        reply_s: Time limit for an answer, in seconds.
    """

    def __init__(self, process: asyncio.subprocess.Process, reply_s: float) -> None:
        self.process, self.reply_s = process, reply_s
        self.printed: list[Answer] = []
        self._news = asyncio.Condition()
        self._ended = ""
        self._reader = asyncio.create_task(self._read())
        self._errors = asyncio.create_task(self._drain())
        self.errors = b""

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            async for line in self.process.stdout:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue  # a client may print a log beside
                if isinstance(found, dict) and "session" in found:
                    self.printed.append(found)
                async with self._news:
                    self._news.notify_all()
            self._ended = "; the client has ended"
        except ValueError:  # of `StreamReader.readline`
            self._ended = f"; the client printed a line of more than {LINE_BYTES} bytes"
        async with self._news:
            self._news.notify_all()

    async def _drain(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.errors = (self.errors + line)[-4000:]

    async def say(self, session: str, kind: str, data: Any = None) -> None:
        """Send a request to the client."""
        assert self.process.stdin is not None
        line = {"session": session, "type": kind, **({} if data is None else {"data": data})}
        try:
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            await self.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise Broken(f"the client has ended: {self.errors.decode(errors='replace')[-500:]}") from None

    async def answer(self, session: str) -> Answer:
        """Wait for the next answer of a session.

        Raises:
            Broken: None came in time.
        """
        deadline = time.monotonic() + self.reply_s
        async with self._news:
            while True:
                for i, one in enumerate(self.printed):
                    if one["session"] == session:
                        return self.printed.pop(i)
                left = deadline - time.monotonic()
                if left <= 0 or self._reader.done():
                    errors = self.errors.decode(errors="replace")[-300:]
                    raise Broken(f"the client printed no answer within {self.reply_s:.0f} s{self._ended}: {errors}")
                try:
                    await asyncio.wait_for(self._news.wait(), left)
                except TimeoutError:
                    continue

    async def ask(self, session: str, kind: str, data: Any = None) -> Answer:
        """Send a request and wait for its answer."""
        await self.say(session, kind, data)
        return await self.answer(session)

    async def total(self, session: str, kind: str, data: Any, total: float) -> Answer:
        """Send a request and check that its observation has this total.

        Raises:
            Broken: The observation has another total, or the answer is not an observation.
        """
        answer = await self.ask(session, kind, data)
        if answer["type"] == "error" and (answer.get("data") or {}).get("code") == "NOT_SUPPORTED":
            raise NotSupported(f"the client: {answer['data'].get('message', '')}")
        wanted = f"{kind} {data}: an observation with total {total} was expected: {json.dumps(answer)[:400]}"
        ensure(answer["type"] == "observation", wanted)
        ensure(answer["data"]["observation"]["total"] == total, wanted)
        return answer


@asynccontextmanager
async def program(command: Sequence[str], url: str, reply_s: float) -> AsyncIterator[Program]:
    """Start a client against a server, and kill its process group at the end.

    Args:
        command: Its command line; ``url`` is appended, and is also in the variable ``BASE_URL``.
        url: URL of the server.
        reply_s: Time limit for each of its answers, in seconds.

    Raises:
        OSError: The command cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        url,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "BASE_URL": url},
        start_new_session=True,
        limit=LINE_BYTES,
    )
    try:
        yield Program(process, reply_s)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.wait()

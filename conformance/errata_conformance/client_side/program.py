"""The client under test: a process, or anything else that takes requests and gives answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from ..results import Broken, NotSupported, ensure

Answer = dict[str, Any]
LINE_BYTES = 64 * 1024**2
"""Longest line that a client may print."""


class Program:
    """A client under test that is driven by requests and prints answers.

    Args:
        reply_s: Time limit for an answer, in seconds.
    """

    def __init__(self, reply_s: float) -> None:
        self.reply_s = reply_s
        self.printed: list[Answer] = []
        self.errors = b""
        self._news = asyncio.Condition()
        self._ended: str | None = None
        """Why no more answers come; None while they may."""

    async def say(self, session: str, kind: str, data: Any = None) -> None:
        """Send a request to the client."""
        await self.write({"session": session, "type": kind, **({} if data is None else {"data": data})})

    async def write(self, line: Answer) -> None:
        """Hand a request to the client."""
        raise NotImplementedError

    async def took(self, answer: Answer) -> None:
        """Note an answer."""
        self.printed.append(answer)
        async with self._news:
            self._news.notify_all()

    async def ended(self, why: str) -> None:
        """Note that no more answers come."""
        self._ended = why
        async with self._news:
            self._news.notify_all()

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
                if left <= 0 or self._ended is not None:
                    errors = self.errors.decode(errors="replace")[-300:]
                    ended = self._ended or ""
                    raise Broken(f"the client printed no answer within {self.reply_s:.0f} s{ended}: {errors}")
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


class Process(Program):
    """A client that is a process.

    Args:
        process: The process.
        reply_s: Time limit for an answer, in seconds.
    """

    def __init__(self, process: asyncio.subprocess.Process, reply_s: float) -> None:
        super().__init__(reply_s)
        self.process = process
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._drain())]

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            async for line in self.process.stdout:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue  # a client may print a log beside
                if isinstance(found, dict) and "session" in found:
                    await self.took(found)
            await self.ended("; the client has ended")
        except ValueError:  # of `StreamReader.readline`
            await self.ended(f"; the client printed a line of more than {LINE_BYTES} bytes")

    async def _drain(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.errors = (self.errors + line)[-4000:]

    async def write(self, line: Answer) -> None:
        """Write a request to the client's standard input."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(line).encode() + b"\n")
            await self.process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise Broken(f"the client has ended: {self.errors.decode(errors='replace')[-500:]}") from None


Start = Callable[[str, float], AbstractAsyncContextManager[Program]]
"""Starts a client against the URL of a server, with a time limit for its answers in seconds."""


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
        yield Process(process, reply_s)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.wait()

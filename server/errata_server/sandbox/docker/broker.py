"""`Broker`: the verbs of ``errata sandboxd`` as coroutines, each with a deadline of its own."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from errata_protocol.errors import SandboxFailed, SandboxUnavailable

_LINE_BYTES = 64 * 1024**2
_SENT_AT_ONCE = 512 * 1024
_GRACE_S = 45.0
"""What the broker itself may take to end a program whose time is over."""
CALL_S, LONG_S = 60.0, 330.0

Sink = Callable[[str, bytes], None]


class BrokerRefused(SandboxFailed):
    """The broker did not carry out a request.

    Args:
        why: Its code: ``unknown``, ``image_missing``, ``image_refused``, ``not_running``, ``conflict``, ``too_large``,
            ``invalid``, ``engine_away``, ``engine_failed`` or ``deadline``.
        message: Its words.
    """

    def __init__(self, why: str, message: str) -> None:
        super().__init__(f"container sandboxes: {message}")
        self.why = why


class Broker:
    """One broker's socket.

    Args:
        path: The socket that the broker serves this server on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble: str | None = None
        """Why the last request got no answer of the engine; None when it did."""

    async def call(self, verb: str, *, timeout_s: float = CALL_S, **arguments: Any) -> dict[str, Any]:
        """Carry out a verb that has neither input nor output besides its answer."""
        async with self._request(verb, timeout_s, arguments) as (reader, _):
            return await _answer(verb, reader, _nothing)

    async def exec(
        self,
        container: str,
        argv: Sequence[str],
        stdin: bytes,
        sink: Sink,
        *,
        timeout_s: float,
        output_bytes: int,
        root: bool = False,
        stop: asyncio.Event | None = None,
    ) -> tuple[str, int | None]:
        """Run a program; return why it ended (``exit``, ``timeout``, ``output``, ``stopped``) and its exit status.

        Unless it ended by itself no process is left: the broker restarts the container, also when its caller went.

        Args:
            container: Where.
            argv: Program and arguments.
            stdin: Its standard input.
            sink: Gets ``stdout`` or ``stderr`` and the next bytes of it.
            timeout_s: Wall time until it is killed with all its processes.
            output_bytes: Output until it is killed.
            root: As root, which has no capabilities, instead of the agent.
            stop: Set, it ends the program.
        """
        arguments = {
            "container": container,
            "argv": list(argv),
            "timeout_s": timeout_s,
            "output_bytes": output_bytes,
            "root": root,
        }
        async with self._request("exec", timeout_s + _GRACE_S, arguments) as (reader, writer):
            giving = asyncio.ensure_future(_give(writer, stdin, stop))
            try:
                answer = await _answer("exec", reader, sink)
            finally:
                giving.cancel()
        return answer["ended"], answer["exit"]

    async def copy_in(self, container: str, archive: bytes) -> None:
        """Unpack a tar archive at the root of a container."""
        async with self._request("copy_in", LONG_S, {"container": container}) as (reader, writer):
            giving = asyncio.ensure_future(_give(writer, archive))
            try:
                await _answer("copy_in", reader, _nothing)
            finally:
                giving.cancel()

    async def copy_out(self, container: str, path: str, sink: Sink, *, max_bytes: int = 2**40) -> dict[str, Any]:
        """Give a tar archive of a path to ``sink``, which ends it early by raising `EnoughRead`."""
        arguments = {"container": container, "path": path, "max_bytes": max_bytes}
        async with self._request("copy_out", LONG_S, arguments) as (reader, _):
            try:
                return await _answer("copy_out", reader, sink)
            except EnoughRead:
                return {}

    @asynccontextmanager
    async def _request(
        self, verb: str, timeout_s: float, arguments: dict[str, Any]
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await self._connected()
                try:
                    writer.write(json.dumps({"do": verb, **arguments}).encode() + b"\n")
                    await writer.drain()
                    yield reader, writer
                except (OSError, ValueError) as error:
                    raise BrokerRefused(
                        "engine_away", f"the broker closed the connection of {verb}: {error}"
                    ) from error
                finally:
                    writer.close()
            self.trouble = None
        except TimeoutError:
            self.trouble = f"the broker did not answer {verb} in {timeout_s:.0f} s"
            raise BrokerRefused("deadline", self.trouble) from None
        except SandboxUnavailable as error:
            self.trouble = error.message
            raise
        except BrokerRefused as error:
            self.trouble = error.message if error.why in ("engine_away", "deadline") else None
            raise

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(self.path, limit=_LINE_BYTES)
        except OSError as error:
            why = error.strerror or error
            fix = "start `errata sandboxd`, or name its socket in ERRATA_SANDBOXD_SOCKET"
            raise SandboxUnavailable(f"no broker answers on {self.path} ({why}): {fix}") from error


class EnoughRead(Exception):
    """What is wanted of an archive has come."""


def _nothing(_stream: str, _data: bytes) -> None:
    return None


async def _give(writer: asyncio.StreamWriter, data: bytes, stop: asyncio.Event | None = None) -> None:
    try:
        for at in range(0, len(data), _SENT_AT_ONCE):
            piece = base64.b64encode(data[at : at + _SENT_AT_ONCE]).decode("ascii")
            writer.write(json.dumps({"data": piece}).encode() + b"\n")
            await writer.drain()
        writer.write(b'{"end": true}\n')
        await writer.drain()
        if stop is not None:
            await stop.wait()
            writer.write(b'{"stop": true}\n')
    except OSError:  # the answer says why
        return


async def _answer(verb: str, reader: asyncio.StreamReader, sink: Sink) -> dict[str, Any]:
    while True:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise BrokerRefused("engine_away", f"the broker closed the connection of {verb}: it was stopped")
        message = json.loads(line)
        for stream, value in message.items():
            if stream == "ok":
                found: dict[str, Any] = value
                return found
            if stream == "error":
                raise BrokerRefused(value["code"], value["message"])
            sink(stream, base64.b64decode(value))

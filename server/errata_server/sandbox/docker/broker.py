"""`Broker`: a client of ``errata sandboxd``. `Broker.call` makes a simple request; exec, copy_in and copy_out also
stream data. Each has a deadline."""

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
_CHUNK_BYTES = 512 * 1024
_GRACE_S = 45.0
"""Time that the broker may take to end a program after its deadline."""
CALL_S, LONG_S = 60.0, 330.0

Sink = Callable[[str, bytes], None]


class BrokerRefused(SandboxFailed):
    """The broker refused a request or could not carry it out.

    Args:
        why: The error code: ``unknown``, ``image_missing``, ``image_refused``, ``not_running``, ``conflict``,
            ``too_large``, ``invalid``, ``engine_away``, ``engine_failed`` or ``deadline``.
        message: The broker's message.
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
        """Why the last request got no answer of the engine; None if it did."""

    async def call(self, verb: str, *, timeout_s: float = CALL_S, **arguments: Any) -> dict[str, Any]:
        """Make a request without input and output, and return the broker's answer.

        Args:
            verb: Name of the request.
            timeout_s: Deadline.
            arguments: Its arguments.

        Raises:
            BrokerRefused: The broker refused it, closed the connection or did not answer in time.
            SandboxUnavailable: No broker listens on the socket.
        """
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
        """Run a program in a container.

        If the program is killed the broker restarts the container, so that no process is left. It also does so if this
        call is cancelled.

        Args:
            container: Id of the container.
            argv: Program and arguments.
            stdin: Content of standard input.
            sink: Called with ``stdout`` or ``stderr`` and the next bytes of that stream.
            timeout_s: Wall time after which the program is killed.
            output_bytes: Output after which the program is killed.
            root: Run it as root, without capabilities, instead of as the agent.
            stop: When set, the program is killed.

        Returns:
            Why it ended (``exit``, ``timeout``, ``output`` or ``stopped``) and its exit status.

        Raises:
            BrokerRefused: The broker refused it, closed the connection or did not answer in time.
            SandboxUnavailable: No broker listens on the socket.
        """
        arguments = {
            "container": container,
            "argv": list(argv),
            "timeout_s": timeout_s,
            "output_bytes": output_bytes,
            "root": root,
        }
        async with self._request("exec", timeout_s + _GRACE_S, arguments) as (reader, writer):
            sending = asyncio.ensure_future(_send_input(writer, stdin, stop))
            try:
                answer = await _answer("exec", reader, sink)
            finally:
                sending.cancel()
        return answer["ended"], answer["exit"]

    async def copy_in(self, container: str, archive: bytes) -> None:
        """Unpack a tar archive in the root directory of a container; raises as `call` does."""
        async with self._request("copy_in", LONG_S, {"container": container}) as (reader, writer):
            sending = asyncio.ensure_future(_send_input(writer, archive))
            try:
                await _answer("copy_in", reader, _nothing)
            finally:
                sending.cancel()

    async def copy_out(self, container: str, path: str, sink: Sink, *, max_bytes: int = 2**40) -> dict[str, Any]:
        """Read a tar archive of a path; raises as `call` does.

        Args:
            container: Id of the container.
            path: Path in the container.
            sink: Called with the stream's name and the next bytes. It may raise `StopReading` to end the transfer.
            max_bytes: Largest archive to accept.

        Returns:
            The broker's answer; empty if ``sink`` ended the transfer.
        """
        arguments = {"container": container, "path": path, "max_bytes": max_bytes}
        async with self._request("copy_out", LONG_S, arguments) as (reader, _):
            try:
                return await _answer("copy_out", reader, sink)
            except StopReading:
                return {}

    @asynccontextmanager
    async def _request(
        self, verb: str, timeout_s: float, arguments: dict[str, Any]
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect and send a request; yield the streams for its answer. Sets `trouble`."""
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
        """Connect to the broker; raise SandboxUnavailable if that fails."""
        try:
            return await asyncio.open_unix_connection(self.path, limit=_LINE_BYTES)
        except OSError as error:
            why = error.strerror or error
            fix = "start `errata sandboxd`, or name its socket in ERRATA_SANDBOXD_SOCKET"
            raise SandboxUnavailable(f"no broker answers on {self.path} ({why}): {fix}") from error


class StopReading(Exception):
    """Raised by a sink to end a transfer, because it has what it needs."""


def _nothing(_stream: str, _data: bytes) -> None:
    return None


async def _send_input(writer: asyncio.StreamWriter, data: bytes, stop: asyncio.Event | None = None) -> None:
    """Send the data of a request and its end; then, when ``stop`` is set, the request to kill the program."""
    try:
        for at in range(0, len(data), _CHUNK_BYTES):
            piece = base64.b64encode(data[at : at + _CHUNK_BYTES]).decode("ascii")
            writer.write(json.dumps({"data": piece}).encode() + b"\n")
            await writer.drain()
        writer.write(b'{"end": true}\n')
        await writer.drain()
        if stop is not None:
            await stop.wait()
            writer.write(b'{"stop": true}\n')
    except OSError:  # reading the answer reports the error
        return


async def _answer(verb: str, reader: asyncio.StreamReader, sink: Sink) -> dict[str, Any]:
    """Pass output to ``sink`` until the broker answers; return the answer, or raise `BrokerRefused`."""
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

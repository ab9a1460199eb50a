"""`Broker`: a client of ``errata sandboxd``. `Broker.call` makes a simple request; exec, copy_in and copy_out also
stream data. Each has a deadline."""

from __future__ import annotations

import asyncio
import base64
import errno
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from errata_protocol.errors import SandboxFailed, SandboxUnavailable

_LINE_BYTES = 64 * 1024**2
_CHUNK_BYTES = 512 * 1024
_GRACE_S = 45.0
"""Time that the broker may take to end a program after its deadline."""
CALL_S, LONG_S = 60.0, 330.0
WAIT_S = 30.0
"""How long a request waits for a broker that is away or busy: as long as one waits for the journal."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0

_NOT_SENT = (errno.ENOTCONN, errno.EPIPE)
"""Errors of a connection on which the end of the request's line was not sent."""

Sink = Callable[[str, bytes], None]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[dict[str, Any]]]


class BrokerRefused(SandboxFailed):
    """The broker refused a request or could not carry it out.

    Args:
        why: The error code: ``unknown``, ``image_missing``, ``image_refused``, ``not_running``, ``conflict``,
            ``too_large``, ``invalid``, ``busy``, ``engine_away``, ``engine_failed`` or ``deadline``.
        message: The broker's message.
    """

    def __init__(self, why: str, message: str) -> None:
        super().__init__(f"container sandboxes: {message}")
        self.why = why


class Broker:
    """One broker's socket.

    A broker that is being restarted, or that has no capacity left, is waited for: a request that it did not take is
    made again for up to ``wait_s``, as a commit waits for a journal that cannot write.

    Args:
        path: The socket that the broker serves this server on.
        wait_s: How long a request waits for a broker that is away or busy, in seconds.
    """

    def __init__(self, path: Path, wait_s: float = WAIT_S) -> None:
        self.path = path
        self.wait_s = wait_s
        self.trouble: str | None = None
        """Why the last request got no answer of the engine; None if it did."""

    async def call(
        self, verb: str, *, timeout_s: float = CALL_S, wait_s: float | None = None, **arguments: Any
    ) -> dict[str, Any]:
        """Make a request without input and output, and return the broker's answer.

        A broker that closes the connection without an answer is asked again: at most a container or layer is there that
        nobody knows, which the next start or collection removes.

        Args:
            verb: Name of the request.
            timeout_s: Deadline of one attempt.
            wait_s: How long to wait for a broker that is away or busy; None for the broker's own.
            arguments: Arguments of the request.

        Raises:
            BrokerRefused: The broker refused it, closed the connection or did not answer in time.
            SandboxUnavailable: No broker listens on the socket.
        """

        async def talk(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> dict[str, Any]:
            return await _answer(verb, reader, _nothing)

        return await self._ask(verb, timeout_s, arguments, talk, wait_s=wait_s, again=_always)

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

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Any]:
            return await _answer_to("exec", reader, sink, _send_input(writer, stdin, stop))

        # Not again once it may run: a program is run once or fails.
        answer = await self._ask("exec", timeout_s + _GRACE_S, arguments, talk, again=lambda: False)
        return answer["ended"], answer["exit"]

    async def copy_in(self, container: str, archive: bytes) -> None:
        """Unpack a tar archive in the root directory of a container; raises as `call` does."""

        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> dict[str, Any]:
            return await _answer_to("copy_in", reader, _nothing, _send_input(writer, archive))

        await self._ask("copy_in", LONG_S, {"container": container}, talk, again=_always)

    async def copy_out(self, container: str, path: str, sink: Sink, *, max_bytes: int = 2**40) -> dict[str, Any]:
        """Read a tar archive of a path; raises as `call` does.

        Args:
            container: Id of the container.
            path: Path in the container.
            sink: Called with the stream's name and the next bytes. It may raise `StopReading` to end the transfer.
            max_bytes: Largest archive to accept. The broker has a bound of its own.

        Returns:
            The broker's answer; empty if ``sink`` ended the transfer.
        """
        arguments = {"container": container, "path": path, "max_bytes": max_bytes}
        came = False

        def pass_on(stream: str, data: bytes) -> None:
            nonlocal came
            came = True
            sink(stream, data)

        async def talk(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> dict[str, Any]:
            try:
                return await _answer("copy_out", reader, pass_on)
            except StopReading:
                return {}
            except BrokerRefused as error:
                if came and error.why == "busy":  # a disk that became full in the middle
                    raise BrokerRefused("engine_failed", error.message) from error
                raise

        # Again only while the sink has got nothing: it would get the beginning twice.
        return await self._ask("copy_out", LONG_S, arguments, talk, again=lambda: not came)

    async def _ask(
        self,
        verb: str,
        timeout_s: float,
        arguments: dict[str, Any],
        talk: Talk,
        *,
        again: Callable[[], bool],
        wait_s: float | None = None,
    ) -> dict[str, Any]:
        """Connect, send a request, and return what ``talk`` returns, waiting for a broker that is away or busy.

        Args:
            verb: Name of the request.
            timeout_s: Deadline of one attempt.
            arguments: Arguments of the request.
            talk: Sends the rest of the request and reads the answer.
            again: Returns whether the request may be made again although the broker may have carried it out.
            wait_s: How long to wait; None for `wait_s`.
        """
        wait_s = self.wait_s if wait_s is None else wait_s
        waited, pause = 0.0, _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await self._once(verb, arguments, talk)
                self.trouble = None
                return answer
            except TimeoutError:
                self.trouble = f"the broker did not answer {verb} in {timeout_s:.0f} s"
                raise BrokerRefused("deadline", self.trouble) from None
            except SandboxUnavailable as error:
                self.trouble = error.message
                if waited >= wait_s:
                    raise
            except _Cut as error:
                self.trouble = error.message
                if not again() or waited >= wait_s:
                    raise
            except BrokerRefused as error:
                self.trouble = error.message if error.why in ("engine_away", "deadline") else None
                if error.why != "busy" or waited >= wait_s:
                    raise
            await asyncio.sleep(pause)
            waited += pause
            pause = min(2 * pause, _LAST_PAUSE_S)

    async def _once(self, verb: str, arguments: dict[str, Any], talk: Talk) -> dict[str, Any]:
        """Make a request.

        Raises:
            SandboxUnavailable: No broker listens, or it closed the connection before it had the request.
            _Cut: It closed the connection later; the request may have been carried out.
        """
        try:
            reader, writer = await asyncio.open_unix_connection(self.path, limit=_LINE_BYTES)
        except OSError as error:
            raise self._nobody(error) from error
        try:
            writer.write(json.dumps({"do": verb, **arguments}).encode() + b"\n")
            await writer.drain()
            return await talk(reader, writer)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno in _NOT_SENT:
                raise self._nobody(error) from error
            raise _Cut("engine_away", f"the broker closed the connection of {verb}: {error}") from error
        finally:
            writer.close()

    def _nobody(self, error: OSError) -> SandboxUnavailable:
        why = error.strerror or error
        fix = "start `errata sandboxd`, or name its socket in ERRATA_SANDBOXD_SOCKET"
        return SandboxUnavailable(f"no broker answers on {self.path} ({why}): {fix}")


class _Cut(BrokerRefused):
    """The broker closed a connection without an answer: it was stopped or killed meanwhile."""


class StopReading(Exception):
    """Raised by a sink to end a transfer, because it has what it needs."""


def _always() -> bool:
    return True


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


async def _answer_to(
    verb: str, reader: asyncio.StreamReader, sink: Sink, send: Coroutine[Any, Any, None]
) -> dict[str, Any]:
    """Return the answer as `_answer` does, while ``send`` sends the input."""
    sending = asyncio.ensure_future(send)
    try:
        return await _answer(verb, reader, sink)
    finally:
        sending.cancel()


async def _answer(verb: str, reader: asyncio.StreamReader, sink: Sink) -> dict[str, Any]:
    """Pass output to ``sink`` until the broker answers; return the answer, or raise `BrokerRefused`."""
    while True:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise _Cut("engine_away", f"the broker closed the connection of {verb}: it was stopped")
        message = json.loads(line)
        for stream, value in message.items():
            if stream == "ok":
                found: dict[str, Any] = value
                return found
            if stream == "error":
                raise BrokerRefused(value["code"], value["message"])
            sink(stream, base64.b64decode(value))

"""One request to one runner: sends it, reads its output, kills it at its limits, and returns how it ended."""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import marshal
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from errata_os.descriptors import EXHAUSTED, explained
from errata_protocol.errors import SandboxFailed

from ..base import LimitHit
from ..output import BoundedOutput
from .runner_pool import Runner

log = logging.getLogger("errata.sandbox")

FAST_BYTES = 16 * 1024**2
"""Up to so many bytes output is read as fast as it comes, the rest at `SLOW_BYTES_PER_S`: `yes` prints 2 GB/s, and
reading that would use a core that other sessions need."""
SLOW_BYTES_PER_S = 32 * 1024**2
_PAUSE_S = 0.05
_READ_BYTES = 1 << 16
_KILL_GRACE_S = 10.0

Killed = Literal["timeout", "full"] | LimitHit
"""Why the server killed a request; ``full``: the server's own disk is full."""
Watch = Callable[[], Awaitable[Killed]]


@dataclass(slots=True)
class Ending:
    """How a request ended.

    Args:
        status: Exit code of the child, negative for a signal.
        background: Command names of processes that were killed because they outlived the child.
        cpu_s: CPU seconds of all its processes.
        killed: Why the server killed it; None if it did not.
        answer: The child's answer; None for a command, which has none.
    """

    status: int
    background: tuple[str, ...]
    cpu_s: float
    killed: Killed | None
    answer: tuple[Any, ...] | None


class Exchange:
    """Carries out one request in the event loop of the caller.

    Args:
        runner: The runner, which serves this request only.
        timeout_s: Wall time after which the request is killed.
        output_bytes: Output after which the request is killed.
    """

    def __init__(self, runner: Runner, *, timeout_s: float, output_bytes: int = 0) -> None:
        self._runner = runner
        self._timeout_s = timeout_s
        self._output_bytes = output_bytes
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[Any, ...]] = self._loop.create_future()
        self._streams: dict[int, BoundedOutput] = {}
        self._killed: Killed | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._total = self._burst = 0

    async def run(
        self,
        request: Mapping[str, Any],
        fds: Sequence[int],
        streams: Mapping[int, BoundedOutput],
        *,
        after_send: Callable[[], None],
        kill: Callable[[], None],
        watch: Watch | None = None,
    ) -> Ending:
        """Send a request and wait for its end.

        Args:
            request: The request; see `launcher.messages`.
            fds: Descriptors to send with it.
            streams: Non-blocking read ends of pipes, and the buffers for their data.
            after_send: Called after the request was sent; closes this process's copies of ``fds``.
            kill: Called if the processes do not end 10 s after the time limit; kills the runner.
            watch: Runs while the request does. When it returns, the request is killed for the reason that it returned.

        Raises:
            SandboxFailed: The request could not be sent or set up, the runner was killed, or its processes do not end.
        """
        self._streams = dict(streams)
        control = self._runner.control.fileno()  # read now, because destroying the sandbox closes it
        watcher: asyncio.Future[None] | None = None
        try:
            try:
                _send(self._runner.request, request, fds)
            except OSError as error:
                if error.errno in EXHAUSTED:
                    raise SandboxFailed(f"the command could not be sent: {explained(error)}") from error
                raise SandboxFailed(f"the sandbox process died before the command: {error}") from error
            finally:
                after_send()
            self._loop.add_reader(control, self._on_control)
            for fd in self._streams:
                self._loop.add_reader(fd, self._on_output, fd)
            self._timers.append(self._loop.call_later(self._timeout_s, self._kill, "timeout"))
            hard = self._timeout_s + _KILL_GRACE_S
            self._timers.append(self._loop.call_later(hard, self._give_up, kill))
            if watch is not None:
                watcher = asyncio.ensure_future(self._watch(watch))
            message = await self._ended
        finally:
            self._loop.remove_reader(control)
            for fd in self._streams:
                self._loop.remove_reader(fd)
            for timer in self._timers:
                timer.cancel()
            if watcher is not None:
                watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watcher
        for fd in self._streams:
            self._drain(fd)
        answer = self._answer()
        if answer is not None and answer[0] == "broken":
            raise SandboxFailed(f"the sandbox could not be set up: {answer[1]}")
        _, status, background, cpu_s = message
        names = tuple(name.decode("utf-8", "backslashreplace") for name in background)
        return Ending(status, names, cpu_s, self._killed, answer)

    async def _watch(self, watch: Watch) -> None:
        """Kill the request for the reason that ``watch`` returns; an exception of it fails the request."""
        try:
            why = await watch()
        except Exception as error:  # nothing would enforce the command's limits any more
            self._stop()
            if not self._ended.done():
                log.exception("a command could not be watched, and was killed")
                self._ended.set_exception(SandboxFailed(f"the command could not be watched: {error}"))
            return
        self._kill(why)

    def _on_control(self) -> None:
        """Handle a message of init: the end of the request, or an error."""
        try:
            data = self._runner.control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if self._ended.done():
            return
        if not data:
            self._ended.set_exception(SandboxFailed("the sandbox process was killed from outside"))
            return
        message = marshal.loads(data)
        if message[0] == "broken":
            self._ended.set_exception(SandboxFailed(f"the sandbox could not be set up: {message[1]}"))
        else:
            self._ended.set_result(message)

    def _answer(self) -> tuple[Any, ...] | None:
        """Return the child's answer; None if it sent none."""
        for _ in range(2):
            try:
                data = self._runner.request.recv(65536)
                return marshal.loads(data) if data else None
            except ConnectionError:
                continue  # it ended without reading the request; its answer comes after that error
            except BlockingIOError:
                break
        return None

    def _on_output(self, fd: int) -> None:
        """Read output, kill the request at its limit, and pause reading where it exceeds the rate."""
        size = self._read(fd)
        if size == 0:
            self._loop.remove_reader(fd)
            return
        if self._total > self._output_bytes:
            self._kill("output")
        if self._total <= FAST_BYTES:
            return
        self._burst += size
        if self._burst >= SLOW_BYTES_PER_S * _PAUSE_S:
            self._burst = 0
            for other in self._streams:
                self._loop.remove_reader(other)
            self._timers.append(self._loop.call_later(_PAUSE_S, self._go_on))

    def _go_on(self) -> None:
        """Read output again after a pause."""
        self._timers = [timer for timer in self._timers if timer.when() > self._loop.time()]
        if not self._ended.done():
            for fd in self._streams:
                self._loop.add_reader(fd, self._on_output, fd)

    def _read(self, fd: int) -> int:
        """Read from a pipe once; return the number of bytes, 0 at the end and -1 if nothing is available."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return -1
        self._total += len(data)
        self._streams[fd].feed(data)
        return len(data)

    def _drain(self, fd: int) -> None:
        """Read what is left in a pipe. Its writers have ended, so this is at most the pipe's buffer."""
        while self._read(fd) > 0:
            pass

    def _kill(self, why: Killed) -> None:
        """Kill the request for a reason, unless it was killed or has ended."""
        if self._killed is not None or self._ended.done():
            return
        self._killed = why
        self._stop()

    def _stop(self) -> None:
        with contextlib.suppress(OSError):
            self._runner.control.send(b"kill")

    def _give_up(self, kill: Callable[[], None]) -> None:
        if not self._ended.done():
            kill()
            self._ended.set_exception(SandboxFailed(f"processes survive SIGKILL for {_KILL_GRACE_S:.0f} s"))


def _send(sock: socket.socket, request: Mapping[str, Any], fds: Sequence[int]) -> None:
    packed = array.array("i", fds)
    sock.sendmsg([marshal.dumps(dict(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if fds else [])

"""`RunnerPool`: a bounded pool of runners, which the launcher makes in advance; callers get them in order.

A thread reads the launcher's socket, so the pool can be used from several event loops: a caller waits on a future of
its own loop. If the launcher dies, its runners end too, and the next caller starts another.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import functools
import logging
import marshal
import os
import select
import socket
import subprocess
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from errata_os.descriptors import EXHAUSTED, explained
from errata_os.service_threads import ServiceThread
from errata_protocol.errors import SandboxFailed

from ..launcher import PROGRAMS
from ..launcher.messages import LauncherConfig

log = logging.getLogger("errata.sandbox")

_LAUNCHER = PROGRAMS / "launcher.py"
_WAIT_S = 120.0
_PAUSE_S = 0.25
"""Time between two attempts to make a runner while the machine lacks a resource."""
_RETRY_FOR_S = 20.0
"""How long attempts go on before waiting callers get an error."""
_TRANSIENT = (*EXHAUSTED, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
"""Errors that may pass: the machine lacks a resource at the moment."""
_END_S = 10.0


@dataclass(slots=True, eq=False)
class Runner:
    """A prepared pair of processes, init and child, for one request.

    Args:
        pid: Host pid of init.
        slot: Name of its slot (network namespace, cgroup).
        request: Socket to the child.
        control: Socket to init.
    """

    pid: int
    slot: str
    request: socket.socket
    control: socket.socket

    @property
    def alive(self) -> bool:
        """Whether its init runs. If the launcher dies, init may have ended before the pool is notified."""
        try:
            return self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def has_taken_request(self) -> bool:
        """Whether its child has received all that was sent on ``request``, or the socket is closed."""
        unread = array.array("i", [0])
        try:
            fcntl.ioctl(self.request, termios.TIOCOUTQ, unread)  # SIOCOUTQ of a socket
        except (OSError, ValueError):
            return True
        return unread[0] == 0

    def stop(self) -> None:
        """Kill its processes; an `Exchange` that waits for its end raises an error."""
        with contextlib.suppress(OSError):  # it has ended
            self.control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the sockets: an unused runner then exits, and init kills a command that is running."""
        self.request.close()
        self.control.close()


_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class RunnerPool:
    """The pool and the launcher process behind it.

    Args:
        config: Called before each start of a launcher; cleans up after the last one and returns the configuration.
        spare: Number of runners to keep ready.
        bound: Most runners at one time; further callers wait.
        started: Called with the pid of each new launcher.
    """

    def __init__(
        self, config: Callable[[], LauncherConfig], *, spare: int, bound: int, started: Callable[[int], None]
    ) -> None:
        self._config = config
        self._spare = spare
        self._bound = bound
        self._started = started
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._ready: deque[Runner] = deque()
        self._waiters: deque[_Waiter] = deque()
        self._leaving: dict[int, list[_Waiter]] = {}
        self._alive: set[int] = set()
        self._making = 0
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: ServiceThread | None = None
        self._failure = ""
        self._failing_since: float | None = None
        self._next_attempt = 0.0
        self.shared_uid = ""
        """Why commands share one host uid; empty if each has its own."""
        self.userns = -1
        """Descriptor of a user namespace with the same mapping as those of commands, to try id-mapped mounts; or -1."""

    @property
    def pids(self) -> set[int]:
        """Host pids of the launcher and of every runner's init."""
        with self._lock:
            return self._alive | ({self._process.pid} if self._process else set())

    @property
    def trouble(self) -> str | None:
        """The reason why no runner can be made now; None if one can."""
        if self._failing_since is not None:
            return f"no sandbox process can be made: {self._failure}"
        return self._thread.trouble if self._thread is not None else None

    @property
    def in_use(self) -> int:
        """Number of runners that are not ready to be taken: they have a command, are starting or are ending."""
        return max(0, len(self._alive) - len(self._ready))

    def start(self) -> None:
        """Start the launcher if none runs. Blocks for some 50 ms.

        Raises:
            SandboxFailed: It cannot be started.
        """
        with self._starting:
            if self._socket is not None:
                return
            try:
                config = self._config()
                server_end, process = _launch()
            except OSError as error:
                raise SandboxFailed(f"the launcher of sandboxes cannot be started: {explained(error)}") from error
            try:
                self._started(process.pid)
                server_end.send(marshal.dumps(dict(config)))
                with self._lock:
                    self._failure, self._failing_since, self._next_attempt = "", None, 0.0
                    self._making = 0
                    self._process = process
                    self._socket = server_end
                read = functools.partial(self._read, server_end, process)
                self._thread = ServiceThread("errata-runners", read, restarts=False)
            except BaseException as error:
                with self._lock:
                    self._socket = None
                server_end.close()
                _stop(process)
                if isinstance(error, (OSError, RuntimeError)):  # the latter: no thread
                    raise SandboxFailed(f"the launcher of sandboxes cannot be started: {error}") from error
                raise
            with self._lock:
                self._top_up()

    async def take(self) -> Runner:
        """Return an unused runner for the caller; if the bound is reached, wait behind earlier callers.

        Raises:
            SandboxFailed: The launcher cannot make one, or none is free for 120 s.
        """
        try:
            return await self._take_alive()
        except _LauncherEnded:  # nothing of this caller has run, so it can wait for a runner of the next launcher
            try:
                return await self._take_alive()
            except _LauncherEnded as error:
                raise SandboxFailed("no sandbox process could be made: the launcher ended twice") from error

    async def _take_alive(self) -> Runner:
        """Return a runner whose init runs, closing those that have ended; raises `_LauncherEnded`."""
        while not (runner := await self._next()).alive or self._launcher_ended():
            runner.close()
            await self.wait_until_gone(runner)
        return runner

    def _launcher_ended(self) -> bool:
        """Return whether the launcher has ended; then its runners are ending, even if they still accept a request."""
        process = self._process
        if process is None or process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the reading thread has just reaped it
            return True

    async def _next(self) -> Runner:
        """Return the next ready runner, waiting behind earlier callers; starts the launcher if none runs."""
        if self._socket is None:
            await asyncio.to_thread(self.start)
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._ready and not self._waiters:
                runner = self._ready.popleft()
                if not self._ready:
                    # Only then: made now, the next runner would compete with the command for the CPU. Otherwise the
                    # end of this runner asks for it.
                    self._top_up()
                return runner
            waiter: _Waiter = (loop, loop.create_future())
            self._waiters.append(waiter)
            self._serve()
            self._top_up()
        try:
            async with asyncio.timeout(_WAIT_S):
                found: Runner = await waiter[1]
                return found
        except TimeoutError as error:
            why = f"the last attempt to make one failed: {self._failure}; " if self._failing_since is not None else ""
            raise SandboxFailed(
                f"no free sandbox process for {_WAIT_S:.0f} s: {why}lower the load or raise the bound"
            ) from error
        finally:
            with self._lock:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                elif waiter[1].cancelled():
                    pass  # `_deliver` puts the runner back
                self._top_up()

    def kill(self, runner: Runner) -> None:
        """Have the launcher kill a runner's init, which ends all its processes."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.send(marshal.dumps(("kill", runner.pid)))

    async def wait_until_gone(self, runner: Runner, *, timeout_s: float = 20.0) -> None:
        """Wait until no process and no mount of ``runner`` is left.

        Raises:
            SandboxFailed: It has not ended after ``timeout_s``; it was then killed once more.
        """
        loop = asyncio.get_running_loop()
        with self._lock:
            if runner.pid not in self._alive:
                return
            waiter: _Waiter = (loop, loop.create_future())
            self._leaving.setdefault(runner.pid, []).append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter[1]
        except TimeoutError as error:
            self.kill(runner)
            raise SandboxFailed(f"processes of a sandbox did not end within {timeout_s:.0f} s of SIGKILL") from error

    def close(self) -> None:
        """End the launcher and all runners, and wait for its end; kill it after 10 s."""
        with self._lock:
            server_end, self._socket = self._socket, None
        if server_end is not None:
            # shutdown wakes the reading thread; close would not.
            with contextlib.suppress(OSError):
                server_end.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            _stop(self._process, _END_S)

    def _top_up(self) -> None:
        """Ask the launcher for as many runners as are missing. The caller holds the lock."""
        if self._socket is None or time.monotonic() < self._next_attempt:
            return
        wanted = self._spare + len(self._waiters) - len(self._ready) - self._making
        for _ in range(min(wanted, self._bound - len(self._alive) - self._making)):
            try:
                self._socket.send(marshal.dumps(("make",)))
            except OSError:
                return  # the launcher has ended; the reading thread handles that
            self._making += 1

    def _serve(self) -> None:
        """Give ready runners to waiting callers. The caller of this method holds the lock."""
        while self._ready and self._waiters:
            waiter, runner = self._waiters.popleft(), self._ready.popleft()
            try:
                waiter[0].call_soon_threadsafe(self._deliver, waiter[1], runner)
            except RuntimeError:  # its loop was closed meanwhile
                self._ready.appendleft(runner)

    def _deliver(self, future: asyncio.Future[Any], runner: Runner) -> None:
        """Give a runner to a waiting caller, or put it back if that was cancelled."""
        if not future.done():
            future.set_result(runner)
            return
        with self._lock:
            self._ready.appendleft(runner)
            self._serve()

    def _read(self, server_end: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Handle the launcher's messages until it ends; runs in a thread.

        If handling a message fails, the launcher is ended and the next caller starts another: without a reading thread
        callers would wait for ever.
        """
        try:
            poll = select.poll()
            poll.register(server_end, select.POLLIN)
            while True:
                if not poll.poll(_PAUSE_S * 1000 if self._failing_since is not None else None):
                    with self._lock:
                        self._top_up()
                    continue
                try:
                    message, fds, complete = _receive(server_end)
                except OSError:
                    break
                if message is None:
                    break
                with self._lock:
                    self._handle(message, fds, complete)
        except Exception:
            log.exception(
                "a message of the launcher could not be handled: it is ended with its runners; another starts"
            )
            with contextlib.suppress(OSError):
                server_end.shutdown(socket.SHUT_RDWR)
        finally:
            self._end(server_end, process)

    def _handle(self, message: tuple[Any, ...], fds: list[int], complete: bool) -> None:
        """Handle one message. The caller holds the lock.

        Args:
            message: The message.
            fds: Its descriptors.
            complete: No descriptor was lost.

        Raises:
            OSError: The descriptor of the launcher's user namespace was lost.
        """
        kind = message[0]
        if kind == "runner":
            self._making -= 1
            self._alive.add(message[1])
            if not complete or len(fds) != 2:
                # The runner ends when its sockets are closed, and "ended" follows.
                for fd in fds:
                    os.close(fd)
                self._failed(errno.EMFILE, explained(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
                return
            if self._failing_since is not None:
                self._failing_since = None
                log.warning("sandbox processes can be made again")
            request, control = (socket.socket(fileno=fd) for fd in fds)
            request.setblocking(False)
            control.setblocking(False)
            self._ready.append(Runner(message[1], message[2], request, control))
            self._serve()
        elif kind == "users":
            if not complete:  # commands would share a host uid although they need not: another launcher is started
                for fd in fds:
                    os.close(fd)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.shared_uid = message[1]
            if self.userns >= 0:
                os.close(self.userns)
            self.userns = fds[0] if fds else -1
        elif kind == "ended":
            self._alive.discard(message[1])
            dead = [runner for runner in self._ready if runner.pid == message[1]]
            for runner in dead:
                self._ready.remove(runner)
                runner.close()
            for loop, future in self._leaving.pop(message[1], ()):
                _resolve(loop, future, None)
        elif kind == "failed":
            self._making -= 1
            self._failed(message[2], message[1])
            return
        else:
            self._failure = message[1]
            self._fail_waiters()
            return
        self._top_up()

    def _failed(self, number: int | None, why: str) -> None:
        """Handle that a runner could not be made: try again later, or fail the waiting callers. The lock is held.

        Args:
            number: The errno, if known.
            why: The error.
        """
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            log.error("no sandbox process can be made, commands wait: %s", why)
        self._failure = why
        self._next_attempt = now + _PAUSE_S
        if number not in _TRANSIENT or now - self._failing_since > _RETRY_FOR_S:
            self._fail_waiters()

    def _fail_waiters(self) -> None:
        failure = SandboxFailed(f"no sandbox process could be made: {self._failure}")
        while self._waiters:
            _resolve(*self._waiters.popleft(), failure)

    def _end(self, server_end: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Reap an ended launcher, wait for the end of its runners and wake all waiting callers."""
        _stop(process, _END_S)
        with self._lock:
            alive, self._alive = self._alive, set()
            ready, self._ready = self._ready, deque()
            leaving, self._leaving = self._leaving, {}
            # Before the wait below, so that new callers wait for another launcher.
            waiting, self._waiters = self._waiters, deque()
            ended: Exception = SandboxFailed("no sandbox process can be made: sandboxes were closed")
            if self._socket is server_end:
                self._socket = None
                self._failing_since = None
                ended = _LauncherEnded()
        server_end.close()
        for runner in ready:
            runner.close()
        _wait_for_end(alive)
        for loop, future in waiting:
            _resolve(loop, future, ended)
        for waiters in leaving.values():
            for loop, future in waiters:
                _resolve(loop, future, None)


class _LauncherEnded(Exception):
    """The launcher ended unexpectedly while a caller waited for a runner."""


def _launch() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a launcher, which waits for its configuration; return the socket to it and the process."""
    server_end, launcher_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with launcher_end:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-E", str(_LAUNCHER), str(launcher_end.fileno())],
                env={},
                cwd="/",
                pass_fds=[launcher_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            server_end.close()
            raise
    return server_end, process


def _receive(sock: socket.socket) -> tuple[tuple[Any, ...] | None, list[int], bool]:
    """Receive a message of the launcher.

    Returns:
        The message, None at the end of the connection; its descriptors; and whether all of them arrived. If this
        process has too many open files, the kernel drops descriptors and only sets a flag.
    """
    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(65536, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
    return (marshal.loads(data) if data else None), list(fds), not flags & socket.MSG_CTRUNC


def _stop(process: subprocess.Popen[bytes], timeout_s: float = 0.0) -> None:
    """Wait for a launcher to end, and kill it after ``timeout_s``."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for_end(pids: set[int]) -> None:
    """Wait up to 5 s until the runners of an ended launcher have ended, and reap those that became children.

    They become this process's children if it is pid 1 or a subreaper. It waits for these pids only, because other code
    waits for its own children.
    """
    deadline = time.monotonic() + 5.0
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                pids.discard(pid)
        time.sleep(0.005)


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: object) -> None:
    """Set the result of a future of another thread's loop, or its exception; do nothing if it is done already."""

    def settle() -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
        loop.call_soon_threadsafe(settle)

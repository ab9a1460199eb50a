"""`Runners`: the bounded pool of runners that the launcher makes ahead of need, handed out in order of asking.

A thread reads the launcher's socket, so that nothing here belongs to an event loop: a caller waits with a future of its
own loop. A launcher that dies takes its runners along; the next caller starts another.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import functools
import logging
import marshal
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from errata_protocol.errors import SandboxFailed

from ...descriptors import EXHAUSTED, explained
from ...service_threads import ServiceThread
from ..launcher import PROGRAMS

log = logging.getLogger("errata.sandbox")

_LAUNCHER = PROGRAMS / "launcher.py"
_WAIT_S = 120.0
_PAUSE_S = 0.25
"""Between two attempts to make a runner while the machine lacks what one needs."""
_PATIENCE_S = 20.0
"""How long such attempts go on before those who wait are refused."""
_PASSING = (*EXHAUSTED, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)
"""What the machine may have again in a moment."""
_END_S = 10.0


@dataclass(slots=True, eq=False)
class Runner:
    """One prepared process pair.

    Args:
        pid: Of its init, on the host.
        slot: Name of the slot (network namespace, cgroup) it occupies.
        request: Socket to the child.
        control: Socket to init.
    """

    pid: int
    slot: str
    request: socket.socket
    control: socket.socket

    @property
    def alive(self) -> bool:
        """Its init has not ended: a launcher that dies takes the waiting runners along before anyone is told."""
        try:
            return self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def stop(self) -> None:
        """Kill what runs; whoever waits for its end gets an error."""
        with contextlib.suppress(OSError):  # it has ended
            self.control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go: an unused runner ends, one with a command is killed by its init."""
        self.request.close()
        self.control.close()


_Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class Runners:
    """The pool and the launcher process behind it.

    Args:
        config: Called before each start of a launcher, to clean up after the last one; returns what it is told.
        spare: Runners kept ready.
        bound: Runners at any one time; further callers wait.
        started: Called with the pid of each launcher.
    """

    def __init__(
        self, config: Callable[[], dict[str, Any]], *, spare: int, bound: int, started: Callable[[int], None]
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
        """Why commands do not get a host uid each; empty when they do."""
        self.users = -1
        """Descriptor of a user namespace that maps as those of commands do, to try a file system with; or -1."""

    @property
    def pids(self) -> set[int]:
        """Host pids of the launcher and of every runner's init."""
        with self._lock:
            return self._alive | ({self._process.pid} if self._process else set())

    @property
    def trouble(self) -> str | None:
        """Say why no runner can be made now; None when one can."""
        if self._failing_since is not None:
            return f"no sandbox process can be made: {self._failure}"
        return self._thread.trouble if self._thread is not None else None

    @property
    def taken(self) -> int:
        """Runners that are not waiting to be taken: each has a command, or is being made or cleaned up."""
        return max(0, len(self._alive) - len(self._ready))

    def start(self) -> None:
        """Start the launcher if none runs. Blocks some 50 ms."""
        with self._starting:
            if self._socket is not None:
                return
            try:
                config = self._config()
                ours, process = _launch()
            except OSError as error:
                raise SandboxFailed(f"the launcher of sandboxes cannot be started: {explained(error)}") from error
            try:
                self._started(process.pid)
                ours.send(marshal.dumps(config | {"server": os.getpid()}))
                with self._lock:
                    self._failure, self._failing_since, self._next_attempt = "", None, 0.0
                    self._making = 0
                    self._process = process
                    self._socket = ours
                read = functools.partial(self._read, ours, process)
                self._thread = ServiceThread("errata-runners", read, restarts=False)
            except BaseException as error:
                with self._lock:
                    self._socket = None
                ours.close()
                _stop(process)
                if isinstance(error, (OSError, RuntimeError)):  # the latter: no thread
                    raise SandboxFailed(f"the launcher of sandboxes cannot be started: {error}") from error
                raise
            with self._lock:
                self._top_up()

    async def take(self) -> Runner:
        """Return a runner that nobody else has, waiting behind earlier callers if the bound is reached.

        Raises:
            SandboxFailed: The launcher cannot make one.
        """
        try:
            return await self._taken()
        except _LauncherEnded:  # before anything of this caller's ran: it waits for the next launcher instead
            try:
                return await self._taken()
            except _LauncherEnded as error:
                raise SandboxFailed("no sandbox process could be made: the launcher ended twice") from error

    async def _taken(self) -> Runner:
        while not (runner := await self._next()).alive or self._launcher_ended():
            runner.close()
            await self.gone(runner)
        return runner

    def _launcher_ended(self) -> bool:
        """Return whether the launcher is dead: then its runners soon are, also those that still take requests."""
        process = self._process
        if process is None or process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the reading thread has just waited for it
            return True

    async def _next(self) -> Runner:
        if self._socket is None:
            await asyncio.to_thread(self.start)
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._ready and not self._waiters:
                runner = self._ready.popleft()
                if not self._ready:
                    # Otherwise its end asks for the next one: made now, that would compete with the command.
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
                    pass  # `_deliver` takes the runner back
                self._top_up()

    def kill(self, runner: Runner) -> None:
        """Kill a runner whose init does not answer, with all that runs in it."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.send(marshal.dumps(("kill", runner.pid)))

    async def gone(self, runner: Runner, *, timeout_s: float = 20.0) -> None:
        """Wait until no process and no mount of ``runner`` is left.

        Raises:
            SandboxFailed: It does not end.
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
        """End the launcher with all runners and wait for it."""
        with self._lock:
            ours, self._socket = self._socket, None
        if ours is not None:
            # shutdown wakes the reading thread, close alone would not.
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            _stop(self._process, _END_S)

    def _top_up(self) -> None:
        """Ask for as many runners as are missing. The lock is held."""
        if self._socket is None or time.monotonic() < self._next_attempt:
            return
        wanted = self._spare + len(self._waiters) - len(self._ready) - self._making
        for _ in range(min(wanted, self._bound - len(self._alive) - self._making)):
            try:
                self._socket.send(marshal.dumps(("make",)))
            except OSError:
                return  # the reading thread meets the end of the launcher too
            self._making += 1

    def _serve(self) -> None:
        """Give ready runners to waiters. The lock is held."""
        while self._ready and self._waiters:
            waiter, runner = self._waiters.popleft(), self._ready.popleft()
            try:
                waiter[0].call_soon_threadsafe(self._deliver, waiter[1], runner)
            except RuntimeError:  # its loop was closed meanwhile
                self._ready.appendleft(runner)

    def _deliver(self, future: asyncio.Future[Any], runner: Runner) -> None:
        if not future.done():
            future.set_result(runner)
            return
        with self._lock:
            self._ready.appendleft(runner)
            self._serve()

    def _read(self, ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """Do what the launcher reports, until it ends; if that cannot be done, end it: the next caller starts another.

        Nothing that goes wrong here may leave the pool without a reader: callers would wait for ever.
        """
        try:
            poll = select.poll()
            poll.register(ours, select.POLLIN)
            while True:
                if not poll.poll(_PAUSE_S * 1000 if self._failing_since is not None else None):
                    with self._lock:
                        self._top_up()
                    continue
                try:
                    message, fds, whole = _receive(ours)
                except OSError:
                    break
                if message is None:
                    break
                with self._lock:
                    self._obey(message, fds, whole)
        except Exception:
            log.exception(
                "a message of the launcher could not be handled: it is ended with its runners; another starts"
            )
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)
        finally:
            self._end(ours, process)

    def _obey(self, message: tuple[Any, ...], fds: list[int], whole: bool) -> None:
        kind = message[0]
        if kind == "runner":
            self._making -= 1
            self._alive.add(message[1])
            if not whole or len(fds) != 2:
                # The runner ends when its sockets are closed, and "gone" follows.
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
            if not whole:  # commands would share a uid that need not: another launcher is tried
                for fd in fds:
                    os.close(fd)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self.shared_uid = message[1]
            if self.users >= 0:
                os.close(self.users)
            self.users = fds[0] if fds else -1
        elif kind == "gone":
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
        """A runner could not be made: try again soon if the machine may have what it lacked. The lock is held."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since = now
            log.error("no sandbox process can be made, commands wait: %s", why)
        self._failure = why
        self._next_attempt = now + _PAUSE_S
        if number not in _PASSING or now - self._failing_since > _PATIENCE_S:
            self._fail_waiters()

    def _fail_waiters(self) -> None:
        failure = SandboxFailed(f"no sandbox process could be made: {self._failure}")
        while self._waiters:
            _resolve(*self._waiters.popleft(), failure)

    def _end(self, ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """The launcher is gone and its runners with it."""
        _stop(process, _END_S)
        with self._lock:
            alive, self._alive = self._alive, set()
            ready, self._ready = self._ready, deque()
            leaving, self._leaving = self._leaving, {}
            # Now, not after the wait below: who comes from here on waits for another launcher.
            waiting, self._waiters = self._waiters, deque()
            ended: Exception = SandboxFailed("no sandbox process can be made: sandboxes were closed")
            if self._socket is ours:
                self._socket = None
                self._failing_since = None
                ended = _LauncherEnded()
        ours.close()
        for runner in ready:
            runner.close()
        _wait_for_end(alive)
        for loop, future in waiting:
            _resolve(loop, future, ended)
        for waiters in leaving.values():
            for loop, future in waiters:
                _resolve(loop, future, None)


class _LauncherEnded(Exception):
    """The launcher ended unasked while somebody waited for a runner."""


def _launch() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a launcher, which waits for its configuration; return the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-E", str(_LAUNCHER), str(theirs.fileno())],
                env={},
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return ours, process


def _receive(sock: socket.socket) -> tuple[tuple[Any, ...] | None, list[int], bool]:
    """Return a message of the launcher, None at its end; its descriptors; and whether all of these arrived.

    The kernel drops descriptors that this process has no room for, and says so in a flag alone.
    """
    fds = array.array("i")
    data, ancillary, flags, _ = sock.recvmsg(65536, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
    return (marshal.loads(data) if data else None), list(fds), not flags & socket.MSG_CTRUNC


def _stop(process: subprocess.Popen[bytes], timeout_s: float = 0.0) -> None:
    """Wait for the end of a launcher, kill it if that does not come in time."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for_end(pids: set[int]) -> None:
    """Wait until the runners of a dead launcher are gone, and reap those that became our children.

    They do where this process is pid 1 or a subreaper. Only known pids are waited for: every other child has an owner.
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
    def settle() -> None:
        if future.done():
            return
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # its loop was closed meanwhile
        loop.call_soon_threadsafe(settle)

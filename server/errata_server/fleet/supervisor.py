"""`supervise`: binds the address, forks the workers of a fleet, and starts again those that end.

The supervisor has no event loop and serves nothing. It is the fork server, too: it imports the server and OpenEnv once
and forks from that, so that a worker costs a tenth of a process of its own. Environments are imported in the workers,
since they may start threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from errata_os.restarts import Backoff
from errata_protocol.errors import InvalidRequest, JournalUnavailable

from ..runtime.shard_dirs import FOLDER, names_of, shards, sockets_in
from ..sandbox.host import cgroups
from ..serve.health_port import listen_for_probes
from ..serve.server import SHUTDOWN_S, Bind, listen, url_of
from . import logins
from .acceptor import accepted, received
from .board import Board, Phase
from .member import Plan
from .worker import Worker

log = logging.getLogger("errata.fleet")

LOGINS = "logins"
"""Name of the folder in `FOLDER` that has the viewer's logins."""

CLOSED = ".drained"
"""Suffix that the Unix socket of a drained worker has in place of its own: nobody asks it."""

STOP_S = SHUTDOWN_S + 15.0
"""How long workers may take to stop, seconds; then they are killed."""

LOOK_S = 0.5
"""Longest time until the supervisor looks at its workers without a signal, seconds."""

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Running:
    """One worker's process.

    Args:
        backoff: Pauses before the worker's restarts.
        pid: Process id of the worker; 0 while it does not run.
        since: Time of the worker's last start, monotonic seconds.
        due: Time of the worker's next start, monotonic seconds; infinite once it has been drained.
    """

    backoff: Backoff
    pid: int = 0
    since: float = 0.0
    due: float = 0.0


class WorkerEnded(Exception):  # how the whole server ends, not an error of this process
    """Raised where a worker ends before it has ever served: its own error has been printed.

    Args:
        status: The exit status of the server.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"a worker ended with status {status} before it served")
        self.status = status


def supervise(directory: Path, bind: Bind, workers: int, health_port: int | None = None) -> Worker | None:
    """Fork workers, and keep them running until SIGTERM or SIGINT.

    Args:
        directory: The data directory of the fleet.
        bind: Where to listen.
        workers: Number of workers.
        health_port: Port for probes, which all workers answer; None for no such port.

    Returns:
        In each worker, what it is; in the supervisor None, once all have ended.

    Raises:
        InvalidRequest: The address cannot be listened on, or a thread runs, with which no process can be forked.
        JournalUnavailable: The data directory cannot be used, or another fleet uses it.
        WorkerEnded: The first worker could not serve.
    """
    directory = Path(os.path.realpath(directory.expanduser()))
    with _locked(directory):
        directories = shards(directory, workers)
        names = names_of(directories)
        with _plan(bind, names, directories, health_port) as plan:
            cgroups.prepare()
            _preload()
            return _Supervisor(plan).run()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a fleet's data directory.

    Raises:
        JournalUnavailable: Another fleet holds it, or the directory cannot be used.
    """
    folder = directory / FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalUnavailable(f"cannot use the data directory {directory}: {error.strerror}") from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(held)
        raise JournalUnavailable(
            f"the data directory {directory} is in use by another errata serve --workers: stop it, or give another"
        ) from error
    yield  # the kernel releases it when this process and its workers have ended


@contextmanager
def _plan(bind: Bind, names: Sequence[str], directories: Sequence[Path], health_port: int | None) -> Iterator[Plan]:
    """Make what the workers inherit. A worker leaves this context right after its fork, and keeps what it inherited.

    Raises:
        InvalidRequest: An address cannot be listened on.
        JournalUnavailable: The data directory can have no Unix sockets.
    """
    own, listening = os.getpid(), listen(bind)
    listening.setblocking(False)
    probes = None if health_port is None else listen_for_probes(bind.host, health_port)
    if probes is not None:
        log.info("probes are answered on port %d: /health and /ready", probes.getsockname()[1])
    folder = sockets_in(directories[0])
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        # By the descriptor, which all workers inherit: the path of a socket has at most 107 bytes.
        paths = [Path(f"/proc/self/fd/{opened}/{number}.sock") for number in range(len(names))]
        doors = [_door(path) for path in paths]
    except OSError as error:
        raise JournalUnavailable(f"cannot make Unix sockets in {folder}: {error.strerror}") from error
    logins.empty(directories[0] / FOLDER / LOGINS)
    try:
        yield Plan(
            url=url_of(listening),
            listening=listening,
            probes=probes,
            board=Board(len(names)),
            names=tuple(names),
            directories=tuple(directories),
            inboxes=tuple(_inbox() for _ in names),
            placed=tuple(_inbox() for _ in names),
            doors=tuple(doors),
            paths=tuple(paths),
            logins=directories[0] / FOLDER / LOGINS,
        )
    finally:
        if os.getpid() == own:
            os.close(opened)


def _door(path: Path) -> socket.socket:
    """Return a listening Unix socket; one that a killed supervisor left is replaced."""
    path.unlink(missing_ok=True)
    path.with_suffix(CLOSED).unlink(missing_ok=True)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(path))
    door.listen(1024)
    door.setblocking(False)
    return door


def _inbox() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a socket that descriptors are sent through: that of the others, and the worker's."""
    sent, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    taken.setblocking(False)
    return sent, taken


def _preload() -> None:
    """Import what all workers need, and leave it where a fork shares it."""
    import httpx  # noqa: F401

    from ..app import factory, server  # noqa: F401
    from ..environments import discovery  # noqa: F401
    from ..targets import load  # noqa: F401

    if factory.web_is_wanted():
        factory.import_web()
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        raise InvalidRequest(f"workers cannot be forked beside the threads {names}: use --workers 1")
    gc.collect()
    gc.freeze()


class _Supervisor:
    """Starts workers, and starts them again.

    Args:
        plan: What they inherit.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._running = [_Running(Backoff()) for _ in plan.names]
        self._parent = os.getpid()

    def run(self) -> Worker | None:
        """Run until a signal; see `supervise`."""
        signals = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            while True:
                for number in self._due():
                    pid = os.fork()
                    if pid == 0:
                        signal.pthread_sigmask(signal.SIG_SETMASK, before)
                        return self._born(number)
                    self._running[number].pid, self._running[number].since = pid, time.monotonic()
                got = signal.sigtimedwait(signals, LOOK_S)
                if got is not None and got.si_signo != signal.SIGCHLD:
                    log.info("%s: the workers stop", signal.Signals(got.si_signo).name)
                    self._stop(signals)
                    return None
                self._reap()
                self._return()
                self._close_late()
        except WorkerEnded:
            self._stop(signals)
            raise
        finally:
            if os.getpid() == self._parent:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _due(self) -> list[int]:
        """Return the workers to start now: the first alone until it serves, so that its error is said once."""
        now = time.monotonic()
        found = [number for number, one in enumerate(self._running) if not one.pid and one.due <= now]
        return found if self._plan.board.has_started(0) else [number for number in found if number == 0]

    def _born(self, number: int) -> Worker:
        """Called in a new worker."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the journal's lock ends with it
        if os.getppid() != self._parent:
            os._exit(1)  # it ended before that
        os.setsid()  # ^C at the terminal is for the supervisor, which lets the workers complete what runs
        return Worker(self._plan, number)

    def _reap(self) -> None:
        """Note which workers have ended, and when each is started again.

        Raises:
            WorkerEnded: One has ended by itself and has never served.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            number = next((n for n, one in enumerate(self._running) if one.pid == pid), None)
            if number is None:
                continue
            one, now, code = self._running[number], time.monotonic(), os.waitstatus_to_exitcode(status)
            one.pid = 0
            self._plan.board.clear(number)
            if self._plan.board.is_drained(number):
                self._end(number)
                continue
            if code != -signal.SIGKILL and not self._plan.board.has_started(number):  # killed: no error of its own
                raise WorkerEnded(code if code > 0 else 1)
            pause = one.backoff.pause_s(now - one.since)
            one.due = now + pause
            log.warning("worker %d ended with status %d; it starts again in %g s", number, code, pause)

    def _end(self, number: int) -> None:
        """Called when a worker has ended that was drained: it is not started again."""
        self._running[number].due = math.inf
        self._plan.board.drain(number, Phase.ENDED, 0)
        door = self._door_of(number)
        with suppress(FileNotFoundError):
            door.rename(door.with_suffix(CLOSED))
        log.warning(
            "worker %d is drained: %s is not served until the next start or errata fleet undrain",
            number,
            self._plan.directories[number],
        )

    def _return(self) -> None:
        """Let workers that were drained be started again where that was asked for."""
        for number, one in enumerate(self._running):
            if self._plan.board.phase(number) is not Phase.RETURNS:
                continue
            if not one.pid:
                self._close_late()
                door = self._door_of(number)
                try:
                    door.with_suffix(CLOSED).rename(door)
                except OSError as error:
                    log.error("worker %d stays drained: its socket %s: %s", number, door, error.strerror)
                    self._plan.board.drain(number, Phase.ENDED, 0)
                    continue
                one.due, one.backoff = 0.0, Backoff()
                log.warning("worker %d is to serve %s again", number, self._plan.directories[number])
            self._plan.board.drain(number, Phase.SERVES, 0)

    def _door_of(self, number: int) -> Path:
        """Return where a worker's Unix socket is, by the folder's own path."""
        return sockets_in(self._plan.directories[0]) / self._plan.paths[number].name

    def _close_late(self) -> None:
        """Close what was sent to workers that have been drained in the moment in which they ended."""
        for number, one in enumerate(self._running):
            if one.due == math.inf:
                for connection in (*accepted(self._plan.doors[number]), *received(self._plan.inboxes[number][1])):
                    connection.close()

    def _stop(self, signals: set[signal.Signals]) -> None:
        """Stop all workers; kill those that do not stop within `STOP_S`."""
        self._plan.listening.close()
        if self._plan.probes is not None:
            self._plan.probes.close()
        end = time.monotonic() + STOP_S
        for one in self._running:
            if one.pid:
                os.kill(one.pid, signal.SIGTERM)
        while any(one.pid for one in self._running):
            if (left := end - time.monotonic()) <= 0:
                for one in self._running:
                    if one.pid:
                        log.warning("a worker did not stop within %g s and is killed", STOP_S)
                        os.kill(one.pid, signal.SIGKILL)
                end = float("inf")
            signal.sigtimedwait(signals, min(LOOK_S, max(0.0, left)))
            for one in self._running:
                if one.pid and os.waitpid(one.pid, os.WNOHANG)[0]:
                    one.pid = 0

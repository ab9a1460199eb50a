"""Builds the application of a server and runs it with uvicorn until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI

from errata_os import descriptors
from errata_protocol.capabilities import Capabilities
from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import InvalidRequest

from ..app.multi_environment import compose, mount_by_name
from ..doors.auth import LOOPBACK_NAMES, is_loopback
from ..journal import registry as journal_registry
from ..log import say
from ..runtime.data_lock import DRAIN_SIGNAL, announce_url
from ..runtime.registry import RUNTIMES
from ..runtime.runtime import Runtime
from ..sandbox import registry
from ..settings import Settings
from ..targets.load import Stated, load_all
from .announcement import announcement_lines, example
from .connections import Connections
from .detached_sockets import allows_detached_sockets
from .health_port import HealthPort, listen_for_probes
from .last_sessions import LastSessions, sessions_left
from .leased import end
from .uvicorn_protocols import BoundedHttp, BoundedSocket, DetachableSocket, MessageBounds

log = logging.getLogger("errata.server")

SHUTDOWN_S = 30
"""Time for running requests to commit after SIGTERM, seconds."""

DRAIN_S = 25
"""Part of `SHUTDOWN_S` in which multiplexed clients get their replies, before their sockets are closed."""

END_S = 5
"""Time for tasks that are cancelled at the end to clean up, seconds."""

GARBAGE_OBJECTS = 500_000
"""Threshold of the garbage collector's first generation: some 100 MiB of containers, more than 10,000 requests and a
batch of the journal's index hold. At 50,000, collections took a sixth of the time and found nothing."""

SPARE_DESCRIPTORS = 8
"""Descriptors for connections that are accepted and not counted yet, or not counted any more and not closed yet."""

MAX_WIRE_FRAME = 64 * 1024**2
"""Largest frame that is read: one over ``Settings.max_frame`` is answered with an error (PROTOCOL A6), bytes."""


@dataclass(frozen=True, slots=True)
class Bind:
    """Where to listen.

    Args:
        host: Address or name.
        port: Port; 0 takes a free one.
        insecure: Allow requests from other machines without a token.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    insecure: bool = False


class Entrance(Protocol):
    """Where the connections of a server come from that has no listening socket of its own."""

    url: str
    """Address of the server."""
    probes: socket.socket | None
    """Listening socket of the health port; None where the settings name none."""

    def stuck_others(self) -> list[str]:
        """Return a text for each other worker that is stuck; see `HealthPort`."""

    async def open(self, server: uvicorn.Server) -> bool:
        """Begin to take connections; return whether this process announces the server."""

    async def close(self) -> None:
        """Take no further connections."""


@dataclass(frozen=True, slots=True)
class Served:
    """An application and the environments that it serves.

    Args:
        app: The application.
        runtime: Journal and sandboxes of all environments.
        specs: The environments.
        capabilities: Capabilities of each environment, by name.
        announcement: Returns the lines to say when the port is open, from the server's address.
        example: Returns an example client, from the server's address.
    """

    app: FastAPI
    runtime: Runtime
    specs: tuple[EnvironmentSpec, ...]
    capabilities: Mapping[str, Capabilities]
    announcement: Callable[[str], list[str]] = lambda url: []
    example: Callable[[str], str] = lambda url: ""


def build(
    targets: Sequence[str],
    settings: Settings,
    *,
    bind: Bind,
    mode: str | None,
    max_sessions: int | None = None,
    stated: Stated | None = None,
    deterministic: bool = False,
    volatile: Sequence[str] | str = (),
    detect: Sequence[str] | str | None = None,
) -> Served:
    """Load environments and create their application.

    A single environment is served at the root and under its name, several environments each under its name.

    Args:
        targets: Environments; see `targets.load`.
        settings: Settings of the server.
        bind: Address that the server will listen on.
        mode: ``simulation`` or ``production``; None for ``OPENENV_MODE``.
        max_sessions: Upper bound of instances of each environment.
        stated: Action and observation classes of an environment that does not declare them.
        deterministic: As in `create_fastapi_app`, for all environments.
        volatile: As in `create_fastapi_app`, for a single environment.
        detect: As in `create_fastapi_app`, for a single environment; or several, each as ``NAME:MAP`` with the name of
            its environment.

    Raises:
        InvalidRequest: A target cannot be served, other machines could use the server without a token, ``volatile`` or
            ``detect`` is not valid or does not say for which environment it is, applications were made with different
            data directories, or the limit of open files is too low after raising it.
        JournalUnavailable: The data directory cannot be used.
    """
    descriptors.checked(descriptors.raise_limit(), 0)  # before opening a file fails for lack of descriptors
    settings = checked_settings(settings, bind)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # for pages that a loaded application creates
    if len(targets) > 1 and volatile:
        raise InvalidRequest(
            "--volatile applies to one environment: serve it alone, or make its application with "
            "errata_server.create_app"
        )
    with _in_environment(settings):
        found = load_all(targets, mode=mode, stated=stated)
    detected = _detected([detect] if isinstance(detect, str) else detect or (), [one.name for one in found])
    given = {id(runtime): runtime for servable in found if (runtime := servable.runtime) is not None}
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(targets)} were made with different data directories: give all the same")
    runtime = next(iter(given.values())) if given else RUNTIMES.shared(settings)
    apps = {
        servable.name: servable.application(
            runtime,
            mode=mode,
            max_sessions=max_sessions,
            insecure=bind.insecure,
            deterministic=deterministic,
            volatile=volatile,
            detect=detected.get(servable.name),
        )
        for servable in found
    }
    specs = tuple(servable.spec for servable in found)
    capabilities = {name: app.state.errata.offered() for name, app in apps.items()}
    says = (
        functools.partial(announcement_lines, found, capabilities, max_sessions, detected),
        functools.partial(example, found),
    )
    if len(apps) == 1:
        ((name, app),) = apps.items()
        mount_by_name(app, app.router, name)
        return Served(app, runtime, specs, capabilities, *says)
    replayable = all("state_at" in offered.extensions for offered in capabilities.values())
    composed = compose(apps, runtime, replayable=replayable, insecure=bind.insecure)
    return Served(composed, runtime, specs, capabilities, *says)


def _detected(given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Return the mappings of ``--detect`` by environment.

    Raises:
        InvalidRequest: One names no environment that is served, or none although there are several; or an environment
            has two.
    """
    found: dict[str, str] = {}
    for entry in given:
        before, separator, mapping = entry.partition(":")
        name, mapping = (before.strip(), mapping) if separator else (names[0], entry)
        if name not in names or (not separator and len(names) > 1):
            raise InvalidRequest(
                f"--detect {entry}: say for which environment, NAME:FIELD=...; they are called {', '.join(names)}"
            )
        if name in found:
            raise InvalidRequest(f"--detect is there twice for {name}: give it all its fields at once")
        found[name] = mapping
    return found


def checked_settings(settings: Settings, bind: Bind) -> Settings:
    """Check that the server is protected; on a loopback address allow only the machine's own names as Host.

    Returns:
        The settings, with ``allowed_hosts`` set if the address is a loopback address and they were empty.

    Raises:
        InvalidRequest: Other machines could use the server without a token; or the journal store is not installed.
    """
    if settings.journal_store is not None:
        journal_registry.STORES.check(settings.journal_store)
    if not is_loopback(bind.host) and settings.token is None and not (bind.insecure or settings.insecure):
        raise InvalidRequest(
            f"{bind.host} can be reached from other machines and no token is set: set ERRATA_TOKEN, "
            "bind 127.0.0.1, or give --insecure"
        )
    if is_loopback(bind.host) and not settings.allowed_hosts:
        return settings.model_copy(update={"allowed_hosts": (*LOOPBACK_NAMES, bind.host)})
    return settings


@contextlib.contextmanager
def _in_environment(settings: Settings) -> Iterator[None]:
    """Set these settings as environment variables: importing a target may call ``create_app``, which reads them."""
    before = dict(os.environ)
    os.environ.update(settings.in_environment())
    try:
        yield
    finally:
        for name in settings.in_environment():
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


async def prepare(served: Served) -> None:
    """Start the runtime, and the sandbox backend if an environment needs it.

    Raises:
        JournalUnavailable: The data directory cannot be used.
        SandboxUnavailable: An environment runs commands and this machine cannot sandbox them.
    """
    await served.runtime.start()
    if any(spec.sandbox for spec in served.specs):
        info = await served.runtime.sandboxes.start()
        for note in info.notes:
            log.warning("sandbox: %s", note)


def run(served: Served, bind: Bind, entrance: Entrance | None = None) -> None:
    """Serve until SIGTERM or SIGINT; return after the last commit.

    Args:
        served: What to serve.
        bind: Where to listen.
        entrance: Where connections come from instead; None to listen.

    Raises:
        InvalidRequest: The address cannot be listened on, or the limit of open files is too low.
        JournalUnavailable: See `prepare`.
        SandboxUnavailable: See `prepare`.
    """
    served.runtime.lease_lost = end
    sandboxed = any(spec.sandbox for spec in served.specs)
    commands = registry.backend_type(served.runtime.settings.sandbox).descriptors if sandboxed else 0
    connections = _connections(commands)
    connections.show(served.runtime.metrics)
    served.runtime.readiness.add(connections.trouble)
    listening = [listen(bind)] if entrance is None else []
    bounds = MessageBounds(served.runtime.settings.max_frame, served.runtime.quotas.unfinished)
    config = _config(served.app, bind, connections, bounds)
    url = url_of(listening[0]) if entrance is None else entrance.url
    server = _AnnouncingServer(config, served, url, entrance)
    with _health_port(served.runtime, bind.host, entrance):
        _run(_serve(server, served, listening), config.get_loop_factory() or asyncio.new_event_loop)


@contextlib.contextmanager
def _health_port(runtime: Runtime, host: str, entrance: Entrance | None = None) -> Iterator[HealthPort | None]:
    """Answer probes on the health port inside the block, if the settings name one."""
    if runtime.settings.health_port is None:
        yield None
        return
    if entrance is not None and entrance.probes is not None:
        health = HealthPort(entrance.probes, runtime.readiness, runtime.lag, entrance.stuck_others)
    else:
        health = HealthPort(listen_for_probes(host, runtime.settings.health_port), runtime.readiness, runtime.lag)
        log.info("probes are answered on port %d: /health and /ready", health.port)
    runtime.readiness.add(health.trouble)
    try:
        yield health
    finally:
        health.close()


def run_read_only(
    app: FastAPI,
    bind: Bind,
    what: str,
    stopping: Callable[[], None],
    ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve an application without a journal until SIGTERM or SIGINT.

    Args:
        app: The application.
        bind: Address to listen on.
        what: Text that the announcement names as what is served.
        stopping: Called when the server begins to stop.
        ready: Called with the server's URL once connections to it are taken.

    Raises:
        InvalidRequest: The address cannot be listened on, or the limit of open files is too low.
    """
    descriptors.raise_limit()
    connections = _connections(0)
    listening = listen(bind)
    config = _config(app, bind, connections)
    say(f"serving {what} at {url_of(listening)}")
    ready(url_of(listening))
    _run(
        _ReadOnlyServer(config, stopping).serve(sockets=[listening]),
        config.get_loop_factory() or asyncio.new_event_loop,
    )


def _connections(commands: int) -> Connections:
    """Return `Connections` with the limit that open files allow, besides ``commands`` descriptors for commands."""
    budget = descriptors.checked(descriptors.limit(), commands)
    log.info(
        "%d open files at most: %d for connections, %d for commands", budget.limit, budget.connections, budget.commands
    )
    return Connections(budget.connections - SPARE_DESCRIPTORS)


class _Config(uvicorn.Config):
    connections: Connections
    bounds: MessageBounds | None


def _config(
    app: FastAPI, bind: Bind, connections: Connections | None = None, bounds: MessageBounds | None = None
) -> uvicorn.Config:
    config = _Config(
        app,
        host=bind.host,
        port=bind.port,
        loop="uvloop" if sys.platform == "linux" else "asyncio",
        http=BoundedHttp,
        ws=DetachableSocket if allows_detached_sockets(app) else BoundedSocket,
        ws_max_size=MAX_WIRE_FRAME,
        ws_per_message_deflate=False,
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    config.connections = Connections() if connections is None else connections
    config.bounds = bounds
    return config


def _run(main: Coroutine[Any, Any, None], make_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Run a coroutine in a new event loop; unlike asyncio.Runner, do not wait for tasks that ignore cancellation.

    SystemExit of another task or callback does not end it: environments start some, and agents' code may run there.
    """
    loop = make_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(main)
    try:
        while not task.done():
            try:
                loop.run_until_complete(task)
            except (SystemExit, KeyboardInterrupt) as error:
                # Python's own handler is installed: this is Ctrl-C, not an environment's exception
                is_signal = signal.getsignal(signal.SIGINT) is signal.default_int_handler
                if task.done() or (isinstance(error, KeyboardInterrupt) and is_signal):
                    raise
                log.error("code of an environment raised %s in a task of its own", type(error).__name__, exc_info=error)
    finally:
        try:
            loop.run_until_complete(_end_tasks())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    left.add(asyncio.create_task(asyncio.get_running_loop().shutdown_asyncgens()))
    _, hanging = await asyncio.wait(left, timeout=END_S)
    if hanging:
        log.warning("%d calls ignore their cancellation and end with this process", len(hanging))


async def _serve(server: uvicorn.Server, served: Served, listening: list[socket.socket]) -> None:
    try:
        await prepare(served)
        _spare_garbage_collection()
        await server.serve(sockets=listening)
    finally:
        await served.runtime.close()
    log.info("stopped: every acknowledged step is in the journal")


def _spare_garbage_collection() -> None:
    """Run the garbage collector less often, and exclude the objects that exist now.

    Requests create no cycles and are freed by reference counts. But a thousand running requests hold more objects than
    the default threshold of 700, so that the collector would examine them again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS, 10, 10)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on a signal. uvicorn's own method would raise the signal again afterwards, and exit status 0 be lost."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


class _ReadOnlyServer(_Server):
    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stopping()
        await super().shutdown(sockets)


class _AnnouncingServer(_Server):
    def __init__(self, config: uvicorn.Config, served: Served, url: str, entrance: Entrance | None = None) -> None:
        super().__init__(config)
        self._entrance = entrance
        self._served = served
        self._runtime = served.runtime
        self._runtime.shutdown.is_announced = True
        self._url = url
        self._names = ", ".join(spec.name for spec in served.specs)
        self._last = LastSessions(lambda: sessions_left(self._runtime), self._runtime.clock.monotonic)
        self._runtime.readiness.add(self._runtime.drain_trouble)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop on SIGTERM and SIGINT, and drain on SIGUSR1 if this is a server of one process."""
        with super().capture_signals():
            loop = asyncio.get_running_loop()
            if self._entrance is None:
                loop.add_signal_handler(DRAIN_SIGNAL, self._begin_to_drain)
            try:
                yield
            finally:
                loop.remove_signal_handler(DRAIN_SIGNAL)

    def _begin_to_drain(self) -> None:
        if not self._runtime.drains:
            self._runtime.drains = True
            self._last.forget()
            self._runtime.members.look()
            left = sessions_left(self._runtime)
            log.info("drains: this server is to get no new sessions, and ends after the %d that it has", left)

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second: stop once the server has been drained."""
        if self._runtime.drains and not self.should_exit and self._last.count() is not None and self._last.are_over:
            log.info("drained: no session is left, and this server ends")
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        announce_url(self._runtime.data_dir, self._url, drains=self._entrance is None)
        if self._entrance is not None and not await self._entrance.open(self):
            return
        kept = self._runtime.data_dir or "memory only, lost when this process ends"
        address = f"serving {self._names} at {self._url} (journal: {kept})"
        say(address, *self._served.announcement(self._url), example=self._served.example(self._url))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        name = signal.Signals(sig).name
        if not self.should_exit:
            active, detached = self._runtime.metrics.sessions()
            log.info(
                "%s: the server stops; its %d sessions, %d of them without a client, have %g s to complete what runs",
                *(name, active, detached, DRAIN_S),
            )
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._runtime.shutdown.begin()
        for server in self.servers:  # new connections go to the next process, if there is one
            server.close()
        for listening in sockets or []:
            listening.close()
        if self._entrance is not None:
            await self._entrance.close()
        log.info("%d connections are closed once their requests are answered", len(Connections.of(self.config)))
        await self._runtime.shutdown.drain(DRAIN_S)
        await super().shutdown(sockets)


def listen(bind: Bind) -> socket.socket:
    """Return a listening socket.

    Raises:
        InvalidRequest: The address cannot be listened on.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(bind.host, bind.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, proto)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(4096)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = f"{bind.host} is not an address of this machine: give another --host (0.0.0.0 for all of them)"
        else:
            remedy = "give another --port (0 takes a free one)"
        raise InvalidRequest(
            f"cannot listen on {bind.host}:{bind.port}: {error.strerror or error}; {remedy}"
        ) from error
    return listening


def url_of(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://{'[' + host + ']' if ':' in host else host}:{port}"


__all__ = ["Bind", "Entrance", "build", "listen", "prepare", "run", "url_of"]

"""``errata fleet``: shows the workers of a running ``errata serve --workers``, drains one of them, and undoes that;
drains a server of one process; and starts, shows, drains and ends fleets on a cluster, which an engine runs.

Workers are asked on their Unix sockets, which only the user of the server can open: a token of the address is that of
somebody who plays episodes, and does not take a worker away from others.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from errata_protocol.errors import InvalidRequest, JournalUnavailable, error_from_wire

from ..fleet_engines import ENGINES, FleetEngine, ShardStatus, Wanted
from ..runtime import data_lock
from ..runtime.shard_dirs import sockets_in
from ..settings import tokens_in_environment
from . import data_dirs
from .source import Json, directory
from .tables import Column, Table

cli = typer.Typer(
    help="Workers of a server, and fleets on Ray.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ASK_S = 5.0
"""How long a worker may take to answer, seconds; then another one is asked."""

DRAIN_S = 40.0
"""How long a worker may take to answer that another one drains, seconds: it may be starting again."""

LOOK_S = 0.5
"""Time between two looks at a worker that drains or starts, seconds."""

START_S = 300.0
"""How long a worker that was drained may take to serve again, seconds; then something keeps it from starting."""

Shard = Annotated[str, typer.Argument(metavar="SHARD", help="Name of its shard, as errata fleet workers shows it.")]

DataDir = Annotated[
    Path | None,
    typer.Option(
        parser=directory,
        metavar="PATH",
        help="Data directory of the server, or a directory of several. "
        "[default: ERRATA_DATA_DIR, else what is below errata in XDG_DATA_HOME or ~/.local/share]",
    ),
]

OnRay = Annotated[bool, typer.Option("--ray", help="A fleet on a Ray cluster.")]

Address = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Ray cluster; auto: that of RAY_ADDRESS, else of this machine.")
]

Name = Annotated[str, typer.Option(metavar="NAME", help="Name of the fleet on its cluster.")]

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")


@cli.command("up")
def up(
    target: Annotated[str, typer.Argument(metavar="ENVIRONMENT", help="As for errata serve.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="Further options of errata serve.")
    ] = None,
    ray: OnRay = False,
    address: Address = "auto",
    name: Name = "errata",
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes to use. [default: all that have the CPUs]")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes on each node, with one CPU of Ray each.")] = 1,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            parser=directory,
            metavar="PATH",
            help="Directory of the shards on each node, with {node} for the node's id. "
            "[default: errata/fleet-NAME in XDG_DATA_HOME or ~/.local/share]",
        ),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="All nodes see --data-dir: sessions of a dead node go on at another.")
    ] = False,
    insecure: Annotated[bool, typer.Option(help="Accept other machines without a token.")] = False,
    as_json: Json = False,
) -> None:
    """Start a fleet on a Ray cluster: an errata serve process for each shard, spread over the nodes.

    Clients use the address of any member, or ray://NAME in a process that can reach the cluster. ERRATA_TOKEN or
    ERRATA_TOKEN_FILE has the token of the processes.
    """
    if shared and data_dir is None:
        raise InvalidRequest("--shared needs --data-dir: a directory that all nodes see")
    wanted = Wanted(
        environments=[target],
        options=options or [],
        nodes=nodes,
        workers=workers,
        data_dir=data_dir.absolute() if data_dir is not None else None,
        is_shared=shared,
        token=",".join(tokens_in_environment()) or None,
        is_insecure=insecure,
    )
    found = _engine(ray, name).up(address, name, wanted, _progress)
    _show(found, as_json)


@cli.command("status")
def status(ray: OnRay = False, address: Address = "auto", name: Name = "errata", as_json: Json = False) -> None:
    """Show the shards of a fleet on a cluster: nodes, states, sessions, steps a second, lag of the event loop."""
    _show(_engine(ray, name).status(address, name), as_json)


@cli.command("down")
def down(
    ray: OnRay = False,
    address: Address = "auto",
    name: Name = "errata",
    now: Annotated[bool, typer.Option("--now", help="End at once; sessions stay in the directories.")] = False,
) -> None:
    """End a fleet on a cluster once its sessions have ended, and keep its data directories."""
    _engine(ray, name).down(address, name, now, _progress)


def _engine(ray: bool, name: str) -> FleetEngine:
    """Return the engine that an option names.

    Raises:
        InvalidRequest: None is named, or the fleet's name is none.
    """
    if not ray:
        raise InvalidRequest("give --ray: a fleet on a Ray cluster (errata serve --workers is one on this machine)")
    if not _NAME.fullmatch(name):
        raise InvalidRequest("the name of a fleet has lower-case letters, digits and hyphens, at most 41")
    return ENGINES.load("ray")


def _progress(line: str) -> None:
    typer.echo(f"errata fleet: {line}", err=True)


def _show(found: Sequence[ShardStatus], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found]))
        return
    table = Table(
        Column("shard", whole=True),
        Column("node", whole=True),
        "state",
        Column("sessions", right=True),
        Column("steps/s", right=True),
        Column("lag", right=True),
        Column("address", whole=True),
        Column("problem", most=200),
    )
    for one in found:
        table.add(
            one.shard or "-",
            one.node or "-",
            "drained" if one.is_drained else one.state,
            "-" if one.sessions is None else str(one.sessions),
            "-" if one.steps_s is None else f"{one.steps_s:.1f}",
            "-" if one.lag_s is None else f"{one.lag_s * 1000:.0f} ms",
            one.url or "-",
            one.problem,
        )
    table.end()


@cli.command("workers")
def workers(data_dir: DataDir = None, as_json: Json = False) -> None:
    """Show the workers of a running server: their shards, states and directories."""
    found = _workers(_running(data_dir))
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table(
        Column("shard", whole=True), "state", Column("sessions left", right=True), Column("directory", most=200)
    )
    for one in found:
        left = one["sessions_left"]
        table.add(one["shard"], _state(one), "-" if left is None else str(left), one["directory"])
    table.end()


@cli.command("drain")
def drain(
    shard: Annotated[
        str | None,
        typer.Argument(metavar="[SHARD]", help="Name of its shard, as errata fleet workers shows it."),
    ] = None,
    data_dir: DataDir = None,
    server: Annotated[
        bool, typer.Option("--server", help="Drain a server of one process, in place of a worker.")
    ] = False,
    most: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="SECONDS", help="With --server: longest wait; then the status is 1. [default: without end]"
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the worker has ended.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable: a line at each change.")] = False,
    ray: OnRay = False,
    address: Address = "auto",
    name: Name = "errata",
) -> None:
    """Let a worker end once its sessions have.

    New sessions go to the other workers. Those that the worker has go on; it ends when none has a client or an
    instance. Its data directory is kept, and served again by the next start of the server with as many workers, or by
    errata fleet undrain. Where this command is interrupted the worker drains all the same.

    With --server, a server of one process ends in the same way: /ready is red and GET /fleet says draining, so that
    balancers and clients take new sessions elsewhere. Those that come all the same are served.
    """
    if server:
        if shard is not None or as_json or ray:
            raise typer.BadParameter("--server takes no SHARD, --json or --ray: it drains the only process of a server")
        _drain_server(data_dir, most if wait else 0.0)
        return
    if shard is None or most is not None:
        raise typer.BadParameter("give the SHARD of a worker, without --most; or --server")
    if ray:
        engine = _engine(ray, name)
        engine.drain(address, name, shard, True)
        _follow(engine, address, name, shard, lambda one: one.is_drained or not wait, as_json)
        return
    chosen = _running(data_dir, shard)
    _ask(chosen, "/fleet/drain", {"shard": shard}, DRAIN_S)
    for one in _changes(chosen, shard, lambda one: one["drained"]):
        if as_json:
            typer.echo(json.dumps(one))
        elif one["drained"]:
            typer.echo(
                f"{shard} is drained: {one['directory']} is kept, and not served until the next start "
                "or errata fleet undrain"
            )
        else:
            typer.echo(f"{shard} is {_state(one)}; sessions left: {one['sessions_left'] or 0}")
        if not wait:
            return


@cli.command("undrain")
def undrain(
    shard: Shard,
    data_dir: DataDir = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the worker serves.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable: a line at each change.")] = False,
    ray: OnRay = False,
    address: Address = "auto",
    name: Name = "errata",
) -> None:
    """Let a worker that was drained serve again.

    One that still drains takes new sessions again. One that has ended is started again on its data directory; sessions
    that were kept there go on. After five minutes in which it did not come to serve the command fails; the supervisor
    goes on starting it.
    """
    if ray:
        engine = _engine(ray, name)
        engine.drain(address, name, shard, False)
        _follow(engine, address, name, shard, lambda one: one.state == "up" or not wait, as_json)
        return
    chosen = _running(data_dir, shard)
    _ask(chosen, "/fleet/undrain", {"shard": shard}, DRAIN_S)
    for one in _changes(chosen, shard, lambda one: one["state"] == "up", START_S):
        typer.echo(json.dumps(one) if as_json else f"{shard} is {_state(one)}: {one['directory']}")
        if not wait:
            return


def _drain_server(data_dir: Path | None, most_s: float | None) -> None:
    """Ask a server of one process to end once its sessions have, and wait for its end.

    Args:
        data_dir: Data directory that the command names.
        most_s: Longest wait, seconds; None for no end, 0 for no wait.

    Raises:
        InvalidRequest: No server of one process runs on it, or several do.
        Exit: The time is over and the server has not ended; status 1.
    """
    owners = {
        one: owner for one in data_dirs.for_reading(data_dir) if (owner := data_lock.draining_owner(one)) is not None
    }
    try:
        if not owners:
            raise InvalidRequest("no errata serve of one process runs here: give --data-dir with that of the server")
        owner = owners[data_dirs.only(list(owners))]
        try:
            signal.pidfd_send_signal(owner, data_lock.DRAIN_SIGNAL)
        except PermissionError as error:
            raise InvalidRequest("the server is another user's: be the user of the server") from error
        typer.echo("the server drains: it ends once no session has a client or an instance")
        if most_s == 0:
            return
        ended = select.poll()
        ended.register(owner, select.POLLIN)
        if not ended.poll(None if most_s is None else most_s * 1000):
            typer.echo(f"sessions are left after {most_s:g} s: the server still drains", err=True)
            raise typer.Exit(1)
        typer.echo("the server is drained and has ended: its data directory is kept")
    finally:
        for owner in owners.values():
            os.close(owner)


def _follow(
    engine: FleetEngine,
    address: str,
    name: str,
    shard: str,
    is_last: Callable[[ShardStatus], bool],
    as_json: bool,
) -> None:
    """Print a member of a fleet on a cluster now, and after each change, until what is printed is the last."""
    shown: tuple[object, ...] = ()
    while True:
        one = next((one for one in engine.status(address, name) if one.shard == shard), None)
        if one is None:
            raise JournalUnavailable(f"the fleet {name} has no shard {shard} any more")
        state = "drained" if one.is_drained else one.state
        if (state, one.sessions) != shown:
            shown = (state, one.sessions)
            typer.echo(
                json.dumps(asdict(one)) if as_json else f"{shard} is {state}; sessions left: {one.sessions or 0}"
            )
        if is_last(one):
            return
        time.sleep(LOOK_S)


def _changes(
    chosen: Path, shard: str, is_last: Callable[[dict[str, Any]], bool], most_s: float = math.inf
) -> Iterator[dict[str, Any]]:
    """Yield what is shown of a worker now, and after each change, until what is shown is the last.

    Args:
        chosen: Data directory of the server.
        shard: Name of the worker's shard.
        is_last: Whether what is shown is the last.
        most_s: Seconds of waiting after which it has to be.

    Raises:
        JournalUnavailable: It was not.
    """
    shown: dict[str, Any] = {}
    looks = 0
    while not shown or not is_last(shown):
        one = next(one for one in _workers(chosen) if one["shard"] == shard)
        if one != shown:
            yield one
            shown = one
        elif looks * LOOK_S >= most_s:
            raise JournalUnavailable(
                f"{shard} is {_state(one)} after {most_s:g} s: the server's log says why; it is still being started"
            )
        else:
            looks += 1
            time.sleep(LOOK_S)


def _state(one: Mapping[str, Any]) -> str:
    return "drained" if one["drained"] else str(one["state"])


def _running(given: Path | None, shard: str | None = None) -> Path:
    """Return the data directory of the server that runs.

    Args:
        given: The directory that the command names.
        shard: Name of a shard, which tells where several servers run; None for none.

    Raises:
        InvalidRequest: No server with several workers runs on it, or several do.
    """
    found: dict[Path, list[str]] = {}
    for one in data_dirs.fleets(given):
        try:
            found[one] = [worker["shard"] for worker in _workers(one)]
        except JournalUnavailable:
            continue
    if not found:
        where = f" on {given}" if given is not None else ""
        raise InvalidRequest(f"no errata serve --workers runs{where}: give --data-dir with that of the server")
    return data_dirs.only([one for one, names in found.items() if shard in names] or list(found))


def _workers(chosen: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _ask(chosen, "/fleet/workers", {}, ASK_S)["workers"]
    return found


def _ask(chosen: Path, path: str, asked: Mapping[str, Any], most_s: float) -> dict[str, Any]:
    """Return what the first worker of a server answers that answers at all.

    Raises:
        ErrataError: It refuses.
        JournalUnavailable: None answers.
    """
    with _sockets(chosen) as sockets:
        for socket in sockets:
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(socket), verify=False), base_url="http://fleet", timeout=most_s
            ) as client:
                try:
                    answer = client.post(path, json=dict(asked))
                except httpx.TransportError:
                    continue
            if answer.is_client_error:
                raise error_from_wire(answer.json())
            if answer.is_success:
                found: dict[str, Any] = answer.json()
                return found
    raise JournalUnavailable(f"no worker of the server on {chosen} answers: has it stopped?")


@contextmanager
def _sockets(chosen: Path) -> Iterator[list[Path]]:
    """Give the Unix sockets of a server's workers, by a short path: that of a socket has at most 107 bytes.

    Raises:
        JournalUnavailable: This user may not open them.
    """
    folder = sockets_in(chosen)
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise JournalUnavailable(f"cannot open {folder}: {error.strerror}; be the user of the server") from error
    try:
        short = Path(f"/proc/self/fd/{opened}")
        yield sorted((path for path in short.glob("*.sock") if path.stem.isdecimal()), key=lambda path: int(path.stem))
    finally:
        os.close(opened)

"""How a worker drains (`errata_server.fleet.drain`), and what becomes of its connections, without any process."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from errata_protocol.errors import InvalidRequest, JournalUnavailable, Misdirected
from errata_protocol.shards import named
from errata_server.cli import commands, data_dirs
from errata_server.cli import workers as shown
from errata_server.fleet.board import RECENT_SIDS, Board, Phase
from errata_server.fleet.drain import DRAIN, UNDRAIN, Drain, workers_of
from errata_server.fleet.member import Member, Plan
from errata_server.fleet.routes import NO_SOLE, Sole, of_request
from errata_server.fleet.supervisor import _Supervisor
from errata_server.runtime.data_lock import lock
from errata_server.runtime.shard_dirs import sockets_in
from errata_server.runtime.shard_name import write
from errata_server.serve.last_sessions import COUNT_S, QUIET_S

from .test_members import planned

NAMES = ("aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc")


class Fleet:
    """The workers of a fleet in one process, with a clock that stands."""

    def __init__(self, directory: Path, workers: int = 3) -> None:
        self.now = 100.0
        self.board = Board(workers, lambda: self.now)
        directories = tuple(directory / str(worker) for worker in range(workers))
        plan = planned(self.board, NAMES[:workers], directory, directories)
        self.members = [Member(plan, worker) for worker in range(workers)]
        self.left = [0] * workers
        self.stopped: list[int] = []
        self.drains = [self._drain(worker) for worker in range(workers)]
        for worker, member in enumerate(self.members):
            self.board.beat(worker, 0)
            member.ask = self._ask  # type: ignore[method-assign]

    def _drain(self, worker: int) -> Drain:
        return Drain(
            self.members[worker], lambda: self.left[worker], lambda: self.stopped.append(worker), lambda: self.now
        )

    async def _ask(self, other: int, path: str, asked: Any) -> dict[str, Any]:
        asking = {DRAIN: self.drains[other].ask, UNDRAIN: self.drains[other].undo}
        return await asking[path](asked["shard"])

    def drain(self, worker: int, asked_at: int = 0) -> None:
        asyncio.run(self.drains[asked_at].ask(NAMES[worker]))

    def undrain(self, worker: int, asked_at: int = 0) -> None:
        asyncio.run(self.drains[asked_at].undo(NAMES[worker]))

    def beat(self, worker: int, seconds: float = COUNT_S) -> None:
        self.now += seconds
        for each in range(len(self.members)):
            self.board.beat(each, 0)
        self.drains[worker].beaten()

    @property
    def states(self) -> list[str]:
        return [one.state for one in self.members[0].members()]


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path)


def test_a_worker_that_drains_ends_once_it_has_had_no_session_for_a_while(fleet: Fleet) -> None:
    fleet.left[1] = 2
    fleet.drain(1)
    assert fleet.states == ["up", "draining", "up"]
    fleet.left[1] = 1
    fleet.beat(1, 10 * QUIET_S)
    assert workers_of(fleet.members[2])[1]["sessions_left"] == 1
    fleet.left[1] = 0
    fleet.beat(1)
    fleet.beat(1, QUIET_S / 2)
    fleet.left[1] = 1  # a client whose socket was lost has come back
    fleet.beat(1)
    fleet.left[1] = 0
    fleet.beat(1, QUIET_S)
    assert fleet.stopped == []
    fleet.beat(1, QUIET_S)
    fleet.beat(1, QUIET_S)
    assert fleet.stopped == [1], "it is stopped once"
    assert fleet.states == ["up", "down", "up"] and not workers_of(fleet.members[0])[1]["drained"]
    fleet.board.drain(1, Phase.ENDED, 0)
    assert [one["drained"] for one in workers_of(fleet.members[0])] == [False, True, False]
    assert workers_of(fleet.members[0])[1]["directory"].endswith("/1")


def test_a_worker_that_is_killed_while_it_drains_goes_on_draining(fleet: Fleet) -> None:
    fleet.drain(1)
    fleet.board.clear(1)
    assert fleet.states == ["up", "down", "up"]
    fleet.drains[1] = fleet._drain(1)
    fleet.beat(1)
    assert fleet.states == ["up", "draining", "up"] and fleet.stopped == [], "its clients have time to come back"
    fleet.beat(1, QUIET_S)
    assert fleet.stopped == [1]


def test_a_worker_that_serves_ends_for_no_lack_of_sessions(fleet: Fleet) -> None:
    fleet.beat(0, 10 * QUIET_S)
    fleet.beat(0, 10 * QUIET_S)
    assert fleet.stopped == [] and fleet.drains[0].trouble() is None


def test_what_cannot_be_drained_is_said(fleet: Fleet) -> None:
    with pytest.raises(InvalidRequest, match=f"'nobody'.*{', '.join(NAMES)}"):
        asyncio.run(fleet.drains[0].ask("nobody"))
    fleet.left[1] = 4
    fleet.drain(1)
    with pytest.raises(InvalidRequest, match="drains already: 4 of its sessions"):
        fleet.drain(1)
    for phase in (Phase.ENDS, Phase.ENDED):
        fleet.board.drain(1, phase, 0)
        with pytest.raises(InvalidRequest, match="has been drained already"):
            fleet.drain(1)
    fleet.drain(2)
    with pytest.raises(InvalidRequest, match="last shard"):
        fleet.drain(0, asked_at=2)
    assert fleet.states == ["up", "down", "draining"]
    assert fleet.drains[2].trouble() is not None


def test_a_worker_that_still_drains_serves_again(fleet: Fleet) -> None:
    fleet.left[1] = 1
    fleet.drain(1)
    fleet.left[1] = 0
    fleet.beat(1)
    fleet.undrain(1, asked_at=2)
    assert fleet.states == ["up"] * 3 and fleet.drains[1].trouble() is None
    fleet.beat(1, 10 * QUIET_S)
    fleet.drain(1, asked_at=1)
    fleet.beat(1)
    assert fleet.stopped == [], "what was counted before it served again does not count"
    fleet.undrain(1, asked_at=1)
    assert fleet.states == ["up"] * 3


@pytest.mark.parametrize("asked_at", [0, 1])
def test_a_worker_that_has_ended_is_to_be_started_again(fleet: Fleet, asked_at: int) -> None:
    directory = fleet.members[2].plan.directories[2]
    directory.mkdir()
    write(directory, NAMES[2])
    fleet.board.drain(2, Phase.ENDED, 0)
    fleet.undrain(2, asked_at)
    assert fleet.board.phase(2) is Phase.RETURNS and fleet.states == ["up", "up", "down"]
    assert fleet.members[0].served == [0, 1], "it is asked nothing until it starts"
    fleet.undrain(2, asked_at)
    with pytest.raises(InvalidRequest, match="has been drained already"):
        fleet.drain(2)


def test_what_cannot_be_undone_is_said(fleet: Fleet) -> None:
    directory = fleet.members[1].plan.directories[1]
    with pytest.raises(InvalidRequest, match=r"'nobody'.*they are"):
        asyncio.run(fleet.drains[0].undo("nobody"))
    with pytest.raises(InvalidRequest, match="is not drained: it serves"):
        fleet.undrain(1)
    fleet.board.drain(1, Phase.ENDS, 0)
    with pytest.raises(InvalidRequest, match="is ending: ask again once"):
        fleet.undrain(1)
    fleet.board.drain(1, Phase.ENDED, 0)
    with pytest.raises(InvalidRequest, match=r"does not have the shard .* move it back"):
        fleet.undrain(1)
    assert not directory.exists(), "a directory that was moved is not made again"
    directory.mkdir()
    write(directory, NAMES[0])
    with pytest.raises(InvalidRequest, match="does not have the shard"):
        fleet.undrain(1)
    write(directory, NAMES[1])
    held = lock(directory)
    with pytest.raises(InvalidRequest, match=r"cannot be served again: .* is in use by process"):
        fleet.undrain(1)
    assert fleet.board.phase(1) is Phase.ENDED
    os.close(held)
    fleet.undrain(1)
    assert fleet.board.phase(1) is Phase.RETURNS


def test_of_two_that_are_drained_at_once_one_at_least_serves_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 2)
    for worker in (0, 1):
        fleet.board.drain(1 - worker, Phase.DRAINS, 0)  # it has not looked yet whether another one serves
        with pytest.raises(InvalidRequest, match="last shard"):
            fleet.drains[worker]._begin()
        assert fleet.board.phase(worker) is Phase.SERVES


def test_a_worker_that_drains_gets_no_connections_and_opens_nothing(fleet: Fleet) -> None:
    fleet.drain(1)
    seen: list[Any] = []

    def choose(alive: Any, count: int) -> Any:
        seen.append(list(alive))
        return alive[:count]

    assert fleet.board.place(1, choose) == 0 and seen == [[0, 2]]
    assert [member.for_new("/ws") for member in (fleet.members[0], fleet.members[2])] == [0, 2]
    assert fleet.members[1].for_new("/ws") in (0, 2)
    fleet.board.clear(0)
    fleet.board.clear(2)
    assert fleet.board.place(1) == 1 == fleet.members[1].for_new("/ws"), "while the others start again"


def test_the_environments_with_one_instance_move_to_the_next_worker(fleet: Fleet) -> None:
    for member in fleet.members:
        assert member.sole == NO_SOLE
        capacity = member.capacity("maze", 1)
        member.capacity("count", 8)
        member.serve(["maze", "count"])
        assert member.sole == Sole(frozenset({"/maze"}), 0) and member.for_new("/maze/ws") == 0
    capacity.used += 1
    assert fleet.members[0].capacity("maze", 1).full, "an instance of any worker is the only one"
    fleet.drain(0)
    assert [member.for_new("/maze/ws") for member in fleet.members] == [1, 1, 1]
    assert fleet.members[2].for_new("/count/ws") == 2
    fleet.members[0].serve(["maze"])
    assert fleet.members[0].places == {"", "/maze"}


def test_the_ids_of_a_drained_worker_are_nobodys(fleet: Fleet) -> None:
    fleet.board.drain(1, Phase.ENDS, 0)
    member = fleet.members[0]
    assert member.names == (NAMES[0], "", NAMES[2]) and member.served == [0, 2]
    own = f"/episodes/{'ep_' + named(NAMES[1], 'x' * 24)}"
    for path, query in ((own, ""), ("/ws", f"shard={NAMES[1]}"), ("/ws", f"session_id={named(NAMES[1], 'x' * 24)}")):
        assert of_request("GET", path, query, member.names) == of_request("GET", "/reset", "", NAMES), path
    with pytest.raises(Misdirected) as refused:
        member.check_served(1)
    assert refused.value.details["shard"] == NAMES[1] == member.absent(1)
    member.check_served(2)


async def test_a_session_that_the_board_may_have_forgotten_is_not_lost(fleet: Fleet) -> None:
    async def nobodys(path: str, asked: Any) -> dict[int, dict[str, Any]]:
        return {2: {"has": []}}

    member = fleet.members[0]
    member.ask_others = nobodys  # type: ignore[method-assign]
    for worker in range(3):
        fleet.board.start(worker)
    sids = ["o" * 30, named(NAMES[2], "p" * 30)]
    fleet.board.take_sid(1, "the last")
    fleet.board.drain(1, Phase.ENDED, 0)
    assert await member.owners_of([*sids, "the last"]) == {sids[1]: 2, "the last": 1}
    for n in range(RECENT_SIDS):
        fleet.board.take_sid(1, f"{n}")
    assert await member.owners_of(sids) == {sids[0]: 1, sids[1]: 2}
    assert fleet.board.owner_of("the last") is None


def test_what_was_handed_to_a_worker_that_ended_meanwhile_is_closed(tmp_path: Path) -> None:
    folder = sockets_in(tmp_path)
    folder.mkdir(parents=True)
    door = socket.socket(socket.AF_UNIX)
    door.bind(str(folder / "1.sock"))
    door.listen()
    door.setblocking(False)
    sent, inbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    inbox.setblocking(False)
    unused = socket.socketpair()
    plan = Plan(
        "http://localhost",
        None,  # type: ignore[arg-type]
        None,
        Board(2),
        NAMES[:2],
        (tmp_path, tmp_path / "shards" / "1"),
        (unused, (sent, inbox)),
        (unused, unused),
        (unused[0], door),
        (folder / "0.sock", folder / "1.sock"),
        tmp_path / "logins",
    )
    supervisor = _Supervisor(plan)
    plan.board.start(0)
    client, handed = socket.socketpair()
    asking = socket.socket(socket.AF_UNIX)
    asking.connect(str(folder / "1.sock"))
    sent.sendmsg([b"c"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handed.fileno()]))])
    handed.close()
    supervisor._close_late()
    supervisor._end(1)
    supervisor._close_late()
    assert client.recv(1) == b"" == asking.recv(1)
    assert plan.board.phase(1) is Phase.ENDED and not (folder / "1.sock").exists()
    assert supervisor._due() == [0], "it is not started again"
    supervisor._return()
    assert supervisor._due() == [0]
    plan.board.drain(1, Phase.RETURNS, 0)
    supervisor._return()
    assert supervisor._due() == [0, 1] and plan.board.phase(1) is Phase.SERVES
    with socket.socket(socket.AF_UNIX) as again:
        again.connect(str(folder / "1.sock"))
        supervisor._close_late()
        assert door.accept(), "what is asked now waits for the worker"
    supervisor._end(1)
    (folder / "1.drained").unlink()
    plan.board.drain(1, Phase.RETURNS, 0)
    supervisor._return()
    assert supervisor._due() == [0] and plan.board.phase(1) is Phase.ENDED, "nobody could ask it"
    for one in (client, asking, door, sent, inbox, *unused):
        one.close()


class Server:
    """Answers the command: a worker has two sessions, then one, then none, and has ended; asked to, it serves again."""

    def __init__(self) -> None:
        self.left = [2, 2, 1]
        self.asked: list[tuple[str, Any]] = []

    def ask(self, chosen: Path, path: str, asked: Any, most_s: float) -> dict[str, Any]:
        self.asked.append((path, asked))
        if path in (DRAIN, UNDRAIN):
            return {}
        if self.asked[0][0] == UNDRAIN:
            state = "up" if len(self.asked) > 3 else "down"
            one = {"shard": NAMES[1], "directory": "/d/shards/1", "state": state, "sessions_left": None}
            return {"workers": [{**one, "drained": False}]}
        drains = len(self.asked) > 1
        state = ("draining" if self.left else "down") if drains else "up"
        left = (self.left.pop(0) if self.left else None) if drains else None
        one = {"shard": NAMES[1], "directory": "/d/shards/1", "state": state, "sessions_left": left}
        first = {"shard": NAMES[0], "directory": "/d", "state": "up", "sessions_left": None, "drained": False}
        return {"workers": [first, {**one, "drained": state == "down"}]}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    sockets_in(tmp_path).mkdir(parents=True)
    monkeypatch.setenv("ERRATA_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(shown, "_ask", made.ask)
    monkeypatch.setattr(shown.time, "sleep", lambda seconds: None)
    return made


def run(*arguments: str) -> str:
    result = CliRunner().invoke(commands.cli, ["fleet", *arguments])
    assert result.exit_code == 0, result.exception
    return result.output


def test_the_command_shows_what_is_left_until_the_worker_has_ended(server: Server) -> None:
    assert run("drain", NAMES[1]).splitlines() == [
        f"{NAMES[1]} is draining; sessions left: 2",
        f"{NAMES[1]} is draining; sessions left: 1",
        f"{NAMES[1]} is drained: /d/shards/1 is kept, and not served until the next start or errata fleet undrain",
    ]
    assert server.asked[1] == ("/fleet/drain", {"shard": NAMES[1]})


def test_the_command_speaks_json_and_need_not_wait(server: Server) -> None:
    lines = [json.loads(line) for line in run("drain", NAMES[1], "--json", "--no-wait").splitlines()]
    assert [(one["state"], one["sessions_left"]) for one in lines] == [("draining", 2)]
    assert [one["shard"] for one in json.loads(run("workers", "--json"))] == list(NAMES[:2])
    assert run("workers").splitlines()[1].split() == [NAMES[0], "up", "-", "/d"]


def test_the_command_waits_until_the_worker_serves_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "_running", lambda data_dir, shard: Path("/d"))
    assert run("undrain", NAMES[1]).splitlines() == [
        f"{NAMES[1]} is down: /d/shards/1",
        f"{NAMES[1]} is up: /d/shards/1",
    ]
    assert server.asked[0] == (UNDRAIN, {"shard": NAMES[1]})
    server.asked.clear()
    lines = [json.loads(line) for line in run("undrain", NAMES[1], "--json", "--no-wait").splitlines()]
    assert [one["state"] for one in lines] == ["down"]


def test_the_command_fails_where_the_worker_does_not_come_to_serve(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shown, "_running", lambda data_dir, shard: Path("/d"))
    one = {"shard": NAMES[1], "directory": "/d/shards/1", "state": "down", "sessions_left": None, "drained": False}
    asked: list[str] = []

    def ask(chosen: Path, path: str, given: Any, most_s: float) -> dict[str, Any]:
        asked.append(path)
        return {} if path == UNDRAIN else {"workers": [one]}

    monkeypatch.setattr(shown, "_ask", ask)
    result = CliRunner().invoke(commands.cli, ["fleet", "undrain", NAMES[1]])
    assert isinstance(result.exception, JournalUnavailable)
    assert "is down after 300 s: the server's log says why" in str(result.exception)
    assert result.output.splitlines() == [f"{NAMES[1]} is down: /d/shards/1"]
    assert len(asked) == 1 + 1 + shown.START_S / shown.LOOK_S + 1


def test_a_command_without_a_running_server_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no errata serve --workers runs on"):
        shown._running(tmp_path)
    sockets = sockets_in(tmp_path)
    sockets.mkdir(parents=True)
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(sockets / "0.sock"))  # of a server that was killed
    left.close()
    (sockets / "other").touch()
    assert data_dirs.fleets(tmp_path) == [tmp_path]
    with pytest.raises(InvalidRequest, match="no errata serve --workers runs on"):
        shown._running(tmp_path)
    with pytest.raises(JournalUnavailable, match="no worker"):
        shown._ask(tmp_path, "/fleet/workers", {}, 1.0)
    with pytest.raises(JournalUnavailable, match="be the user of the server"):
        shown._ask(tmp_path / "none", "/fleet/workers", {}, 1.0)

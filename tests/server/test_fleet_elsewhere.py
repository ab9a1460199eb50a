"""Sessions of one worker that go on from episodes of another one, which is asked in this process and not over a socket.

With real processes: `tests/chaos/test_fleet.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State
from pydantic import SecretStr

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.environment import Snapshot, SnapshotRef
from errata_protocol.errors import JournalUnavailable
from errata_protocol.shards import shard_of
from errata_server.app import create_fastapi_app
from errata_server.episodes.retention import all_held, apply
from errata_server.fleet.board import Board, Phase
from errata_server.fleet.drain import Drain
from errata_server.fleet.forwarder import Arrivals
from errata_server.fleet.member import Member
from errata_server.runtime import shard_name
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

from .conftest import Socket, connect
from .environments import CountAction, CountEnvironment, CountObservation


class Counted(Environment[CountAction, CountObservation, State]):
    """Is continued by re-execution: it says how often it was reset, and what its steps add up to."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._resets = self._n = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self._resets, self._n = self._resets + 1, 0
        return CountObservation(n=0, text=f"reset {self._resets}")

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        self._n += action.n
        return CountObservation(n=self._n, text=f"reset {self._resets}", reward=1.0)

    @property
    def state(self) -> State:
        return State()


class Layered(CountEnvironment):
    """Its snapshots have a layer of a sandbox."""

    async def snapshot(self) -> Snapshot:
        return Snapshot((await super().snapshot()).state, (SnapshotRef("base", "b"),))


class _Down(httpx.AsyncBaseTransport):
    """A worker that has been killed."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("the worker was killed")


class Worker(Member):
    """A worker whose questions to others are calls in this process.

    Args:
        fleet: The fleet of which it is one.
        number: Number of the worker.
    """

    def __init__(self, fleet: Fleet, number: int) -> None:
        super().__init__(SimpleNamespace(names=fleet.names, board=fleet.board), number)  # type: ignore[arg-type]
        self.fleet = fleet

    def client(self, other: int) -> httpx.AsyncClient:
        self.fleet.asked += 1
        arrivals = self.fleet.arrivals[other]
        transport = _Down() if arrivals is None else httpx.ASGITransport(arrivals)
        return httpx.AsyncClient(transport=transport, base_url="http://fleet")


class Fleet:
    """Two workers of one server.

    Args:
        directory: Where their data directories are made.
        environment: Class of the environment that they serve.
        tokens: Tokens of the server.
    """

    def __init__(self, directory: Path, environment: type[Any], tokens: str | None = None) -> None:
        self.directories = [directory / "0", directory / "1"]
        for one in self.directories:
            one.mkdir()
        self.names = tuple(shard_name.draw(one) for one in self.directories)
        self.board = Board(2)
        for number in range(2):
            self.board.start(number)
        self.environment, self.tokens = environment, tokens
        self.arrivals: list[Arrivals | None] = [None, None]
        self.runtimes: dict[int, Runtime] = {}
        self.asked = 0

    @contextmanager
    def runs(self, number: int, *, alone: bool = False) -> Iterator[TestClient]:
        """Run a worker; without the other one, as a server of its own, if ``alone``."""
        member = None if alone else Worker(self, number)
        token = SecretStr(self.tokens) if self.tokens is not None else None
        settings = Settings(data_dir=self.directories[number], token=token, fsync=False, insecure=True)
        runtime = Runtime(settings, fleet=member)
        given: dict[str, Any] = {"env_name": "env", "max_concurrent_envs": 8, "deterministic": True, "runtime": runtime}
        app = create_fastapi_app(self.environment, CountAction, CountObservation, **given)
        if member is not None:
            drain = Drain(member, lambda: 0, lambda: None, runtime.clock.monotonic)
            self.arrivals[number] = Arrivals(app, runtime, member, drain)
        self.runtimes[number] = runtime
        try:
            with TestClient(app) as client:
                yield client
        finally:
            self.arrivals[number] = None


@pytest.fixture(params=[CountEnvironment, Counted], ids=["snapshot", "reexecute"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Fleet:
    return Fleet(tmp_path, request.param)


@pytest.fixture
def both(fleet: Fleet) -> Iterator[list[TestClient]]:
    with fleet.runs(0) as first, fleet.runs(1) as second:
        yield [first, second]


def place(eid: str, t: int) -> dict[str, Any]:
    return {"injected_state": {"episode_id": eid, "t": t}}


def played(
    client: TestClient, steps: int, resets: int = 1, headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Play an episode on a plain socket; return its deliveries. Each step adds its number."""
    with client.websocket_connect("/ws", headers={**(headers or {})}) as ws:
        socket = Socket(ws)
        socket.ask("capabilities")
        for _ in range(resets):
            found = [socket.ask("reset", {})]
        found += [socket.ask("step", {"n": n}) for n in range(1, steps + 1)]
    return found


def n_of(answer: dict[str, Any]) -> int:
    assert answer["type"] == "observation", answer
    return int(answer["data"]["observation"]["n"])


def code_of(answer: dict[str, Any]) -> str:
    assert answer["type"] == "error", answer
    return str(answer["data"]["code"])


def test_a_reset_goes_on_from_another_workers_episode(fleet: Fleet, both: list[TestClient]) -> None:
    seen = played(both[0], 3)
    with connect(both[1]) as socket:
        began = socket.ask("reset", place(seen[0]["eid"], 2))
        assert (began["data"], began["digest"], began["t"]) == (seen[2]["data"], seen[2]["digest"], 0)
        assert shard_of(began["eid"]) == fleet.names[1], "it is this worker's episode"
        assert n_of(socket.ask("step", {"n": 10})) == 13
        again = socket.ask("state", {"t": 0, "eid": began["eid"]})
        assert (again["data"], again["digest"]) == (seen[2]["data"], seen[2]["digest"])


def test_a_named_request_is_answered_once(both: list[TestClient]) -> None:
    seen = played(both[0], 2)
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    sid = both[1].post("/mcp", json=create).json()["result"]["session_id"]
    with connect(both[1], f"/ws?session_id={sid}") as socket:
        asked = place(seen[0]["eid"], 1)
        began = socket.ask("reset", asked, request_id="r")
        assert n_of(socket.ask("step", {"n": 5}, request_id="s")) == 6
        assert socket.ask("reset", asked, request_id="r")["eid"] == began["eid"]
        assert n_of(socket.ask("step", {"n": 1}, request_id="u")) == 7


def test_the_fork_is_there_after_either_worker_has_ended(fleet: Fleet) -> None:
    with ExitStack() as first:
        owner = first.enter_context(fleet.runs(0))
        seen = played(owner, 2)
        with fleet.runs(1) as client:
            create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
            sid = client.post("/mcp", json=create).json()["result"]["session_id"]
            with connect(client, f"/ws?session_id={sid}") as socket:
                socket.ask("reset", place(seen[0]["eid"], 1))
        with fleet.runs(1) as client, connect(client, f"/ws?session_id={sid}") as socket:
            assert n_of(socket.ask("step", {"n": 10})) == 11
    with fleet.runs(1) as client:
        with connect(client, f"/ws?session_id={sid}") as socket:
            answer = socket.ask("step", {"n": 10})
            if fleet.environment is CountEnvironment:
                assert n_of(answer) == 21, "a snapshot needs nothing of its parent"
                return
            assert code_of(answer) == "JOURNAL_UNAVAILABLE"
        with fleet.runs(0), connect(client, f"/ws?session_id={sid}") as socket:
            assert n_of(socket.ask("step", {"n": 10})) == 21, "nothing was lost, and the step acted once"


def test_a_directory_that_is_served_alone_says_where_the_parent_is(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, Counted)
    with fleet.runs(0) as owner, fleet.runs(1) as client:
        seen = played(owner, 2)
        create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
        sid = client.post("/mcp", json=create).json()["result"]["session_id"]
        with connect(client, f"/ws?session_id={sid}") as socket:
            socket.ask("reset", place(seen[0]["eid"], 1))
    with fleet.runs(1, alone=True) as client, connect(client, f"/ws?session_id={sid}") as socket:
        for _ in range(2):  # it is not lost
            answer = socket.ask("step", {"n": 1})
            assert code_of(answer) == "MISDIRECTED" and answer["data"]["shard"] == fleet.names[0]
    with fleet.runs(0), fleet.runs(1) as client, connect(client, f"/ws?session_id={sid}") as socket:
        assert n_of(socket.ask("step", {"n": 1})) == 2


def test_forks_of_forks_lead_back_through_all_workers(both: list[TestClient]) -> None:
    eid, total = played(both[0], 3)[0]["eid"], 3  # at t=2
    for client in (both[1], both[0], both[1]):
        with connect(client) as socket:
            socket.ask("reset", place(eid, 2))
            for n in (10, 20):
                total += n
                answer = socket.ask("step", {"n": n})
                assert n_of(answer) == total
            eid = answer["eid"]


def test_earlier_episodes_of_the_parents_session_are_run_again_where_they_count(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, Counted)
    with fleet.runs(0) as owner, fleet.runs(1) as client:
        seen = played(owner, 2, resets=3)
        with connect(client) as socket:
            socket.ask("reset", place(seen[0]["eid"], 1))
            answer = socket.ask("step", {"n": 1})
    assert answer["data"]["observation"] == {**seen[1]["data"]["observation"], "n": 2}, "after three resets"


def test_errors_are_those_of_one_process_and_leave_the_session_where_it_is(
    fleet: Fleet, both: list[TestClient]
) -> None:
    seen = played(both[0], 1)
    eid = seen[0]["eid"]
    other = eid[:-1] + ("a" if eid[-1] != "a" else "b")
    with connect(both[1]) as socket:
        socket.ask("reset", {})
        for asked, code in (((eid, 2), "T_OUT_OF_RANGE"), ((other, 0), "UNKNOWN_EPISODE")):
            assert code_of(socket.ask("reset", place(*asked))) == code
        assert n_of(socket.ask("step", {"n": 4})) == 4
        before = fleet.asked
        for eid in ("", "ep_" + "x" * 1000, "../fleet", "."):
            assert code_of(socket.ask("reset", place(eid, 0))) == "UNKNOWN_EPISODE"
        assert fleet.asked == before, "what is no id of an episode is asked of nobody"
        assert n_of(socket.ask("step", {"n": 4})) == 8


def test_another_principals_episode_is_not_there(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, CountEnvironment, tokens="mine,yours")
    mine, yours = ({"authorization": f"Bearer {token}"} for token in ("mine", "yours"))
    with fleet.runs(0) as owner, fleet.runs(1) as client:
        eid = played(owner, 1, headers=mine)[0]["eid"]
        told = []
        for asked in (eid, eid[:-1] + ("a" if eid[-1] != "a" else "b")):
            with client.websocket_connect("/ws", headers={**yours}) as ws:
                answer = Socket(ws).ask("reset", place(asked, 0))
                assert code_of(answer) == "UNKNOWN_EPISODE"
                told.append(answer["data"]["message"].replace(asked, ""))
        assert told[0] == told[1], "it is not told from one that does not exist"
        with client.websocket_connect("/ws", headers={**mine}) as ws:
            assert n_of(Socket(ws).ask("reset", place(eid, 1))) == 1


def test_without_tokens_a_reader_of_another_machine_needs_the_read_key(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, CountEnvironment)
    away = {"x-forwarded-for": "198.51.100.7"}
    with fleet.runs(0) as owner, fleet.runs(1) as client:
        with connect(owner) as socket:
            eid = socket.ask("reset", {})["eid"]
            key = socket.ask("capabilities")["data"]["session"]["read_key"]
        for headers, reads in (({}, True), (away, False), (away | {"authorization": f"Bearer {key}"}, True)):
            with client.websocket_connect("/ws", headers={**headers}) as ws:
                answer = Socket(ws).ask("reset", place(eid, 0))
            assert n_of(answer) == 0 if reads else code_of(answer) == "UNKNOWN_EPISODE", headers


def test_layers_of_a_sandbox_stay_at_their_worker(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, Layered)
    with fleet.runs(0) as owner, fleet.runs(1) as client:
        eid = played(owner, 1)[0]["eid"]
        with connect(client) as socket:
            answer = socket.ask("reset", place(eid, 1))
    assert code_of(answer) == "MISDIRECTED" and answer["data"]["shard"] == fleet.names[0]


class Mux:
    """One multiplexed session, and what it is answered."""

    def __init__(self, ws: Any) -> None:
        self._ws = ws
        self._sid = "s" * 22
        assert self._asked({"type": "open", "data": {"key": "k" * 22}})["type"] == "opened"

    def ask(self, id: int, type_: str, data: Any) -> dict[str, Any]:
        return self._asked({"id": id, "type": type_, "data": data})

    def read(self, type_: str, data: Any) -> dict[str, Any]:
        return self._asked({"q": 1, "type": type_, "data": data})

    def _asked(self, message: dict[str, Any]) -> dict[str, Any]:
        self._ws.send_text(json.dumps({"sid": self._sid, **message}))
        return dict(json.loads(self._ws.receive_text()))


def test_a_multiplexed_session_goes_on_from_another_workers_episode(fleet: Fleet) -> None:
    """While that worker is not there, nothing is recorded: the request takes its id later."""
    with fleet.runs(1) as client, client.websocket_connect("/ws", subprotocols=[PROTOCOL_NAME]) as ws:
        with fleet.runs(0) as owner:
            seen = played(owner, 2)
        mux, asked = Mux(ws), place(seen[0]["eid"], 1)
        refused = mux.ask(1, "reset", asked)
        assert code_of(refused) == "JOURNAL_UNAVAILABLE" and refused["data"]["next_id"] == 1
        with fleet.runs(0):
            began = mux.ask(1, "reset", asked)
            assert (began["data"], began["digest"]) == (seen[1]["data"], seen[1]["digest"])
            again = mux.ask(1, "reset", asked)
            assert again["eid"] == began["eid"], "sent again, it is the same reply"
            assert n_of(mux.ask(2, "step", {"n": 10})) == 11
        assert n_of(mux.ask(3, "step", {"n": 10})) == 21


def test_a_fork_of_no_episode_of_its_session_is_unknown_wherever_it_is(both: list[TestClient]) -> None:
    eid = played(both[0], 1)[0]["eid"]
    with both[1].websocket_connect("/ws", subprotocols=[PROTOCOL_NAME]) as ws:
        mux = Mux(ws)
        mux.ask(1, "reset", {})
        fork = {"t": 0, "eid": eid, "child": {"sid": "c" * 22, "key": "k" * 22}}
        assert code_of(mux.ask(2, "fork", fork)) == "UNKNOWN_EPISODE"


def test_late_rewards_of_another_workers_episode_are_listed(both: list[TestClient]) -> None:
    eid = played(both[0], 1)[0]["eid"]
    post = {"t": 1, "value": 0.1, "source": "vérifier", "reward_id": "r"}
    assert both[0].post(f"/episodes/{eid}/rewards", json=post).status_code == 200
    with both[1].websocket_connect("/ws", subprotocols=[PROTOCOL_NAME]) as ws:
        mux = Mux(ws)
        assert mux.read("rewards", {"eid": eid})["data"] == [{"eid": eid, **post}]
        other = eid[:-1] + ("a" if eid[-1] != "a" else "b")
        assert code_of(mux.read("rewards", {"eid": other})) == "UNKNOWN_EPISODE"


def test_an_episode_is_kept_for_its_forks_at_other_workers(fleet: Fleet, both: list[TestClient]) -> None:
    kept, free = (played(both[0], 1)[0]["eid"] for _ in range(2))
    with connect(both[1]) as socket:
        fork = socket.ask("reset", place(kept, 1))["eid"]

    def deleted() -> dict[str, Any]:
        return dict(both[0].post("/episodes/delete", json={"eids": [kept, free], "unused_only": True}).json())

    first = deleted()
    assert first["in_use"] == [kept] and list(first["deleted"]) == [free]
    assert both[1].delete(f"/episodes/{fork}").status_code == 200
    assert list(deleted()["deleted"]) == [kept]


async def test_retention_keeps_it_too_and_deletes_nothing_where_a_worker_does_not_answer(fleet: Fleet) -> None:
    with fleet.runs(0) as owner:
        with fleet.runs(1) as client:
            eid = played(owner, 1)[0]["eid"]
            with connect(client) as socket:
                socket.ask("reset", place(eid, 1))
            store, collect = fleet.runtimes[0].store, fleet.runtimes[0].collect
            held = [one async for one in all_held(store)]
            assert await apply(store, collect, held) == 0
        for phase in (Phase.SERVES, Phase.ENDED):  # a drained worker's directory may have a fork, too
            fleet.board.drain(1, phase, 0)
            with pytest.raises(JournalUnavailable):
                await apply(store, collect, held)
        assert store.journal.episode(eid) is not None


@pytest.mark.parametrize("owner", [0, 1])
def test_an_episode_of_a_drained_worker_is_misdirected(fleet: Fleet, owner: int) -> None:
    with fleet.runs(owner) as client:
        eid = played(client, 1)[0]["eid"]
    fleet.board.drain(owner, Phase.ENDED, 0)
    with fleet.runs(1 - owner) as client:
        with connect(client) as socket:
            for asked in (("reset", place(eid, 1)), ("state", {"t": 1, "eid": eid})):
                assert code_of(socket.ask(*asked)) == "MISDIRECTED"
        with client.websocket_connect("/ws", subprotocols=[PROTOCOL_NAME]) as ws:
            assert code_of(Mux(ws).read("rewards", {"eid": eid})) == "MISDIRECTED"


async def test_a_fork_and_a_deletion_of_one_moment_see_each_other(fleet: Fleet) -> None:
    with fleet.runs(0) as owner, fleet.runs(1) as client:
        eid = played(owner, 1)[0]["eid"]
        here, there = (fleet.runtimes[number].fleet.elsewhere for number in (0, 1))  # type: ignore[union-attr]
        async with there.parent(eid, 1, None, None) as parent, here.deleting(eid) as forked:
            assert parent.row.t == 1 and forked
        async with here.deleting(eid) as forked:
            assert not forked
            with connect(client) as socket:
                assert code_of(socket.ask("reset", place(eid, 1))) == "JOURNAL_UNAVAILABLE"
        with connect(client) as socket:
            socket.ask("reset", place(eid, 1))
        async with here.deleting(eid) as forked:
            assert forked

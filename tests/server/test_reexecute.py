"""Sessions of environments without snapshots: run again where that is declared, lost where it is not (PROTOCOL E2)."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from errata_protocol.environment import Recovery
from errata_server.app import create_fastapi_app
from errata_server.settings import Settings
from errata_server.simulation import SimulatedMachine

from .booted import Booted, boot
from .conftest import Socket, connect
from .environments import CountAction, CountObservation
from .repeatable import (
    AsyncDiceEnvironment,
    DiceEnvironment,
    LiarEnvironment,
    StampedEnvironment,
    ToolEnvironment,
    UndeclaredEnvironment,
)


def served(env: Any, **more: Any) -> FastAPI:
    more.setdefault("settings", Settings(detach_ttl_s=0.0))
    return create_fastapi_app(env, CountAction, CountObservation, max_concurrent_envs=8, **more)


def given_out(socket: Socket) -> str:
    asked = socket.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}})
    return str(asked["data"]["result"]["session_id"])


def fork(client: TestClient, eid: str, t: int, request_id: str = "f") -> dict[str, Any]:
    found = client.post(f"/episodes/{eid}/fork", json={"t": t, "request_id": request_id})
    assert found.status_code == 200, found.text
    return dict(found.json())


def asleep(app: FastAPI) -> None:
    """Wait until no session has an instance."""
    sessions = app.state.errata.sessions
    gone = threading.Event()
    for _ in range(1000):
        if sessions.capacity.used == 0:
            return
        gone.wait(0.01)
    raise AssertionError("a session did not hibernate")


# -- after a crash -----------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path) -> SimulatedMachine:
    return SimulatedMachine(7, power_loss=False, index=tmp_path)


def test_killed_at_t_50_it_comes_back_at_t_50_and_the_next_step_is_right(machine: SimulatedMachine) -> None:
    sids: list[str] = []
    before: list[Any] = []
    expected: dict[str, Any] = {}

    async def kept(server: Booted, eid: str) -> list[Any]:
        turns = (await server.episode(eid))["turns"][:51]
        return [turns, *[(await server.state(eid, t)).content for t in (0, 25, 50)]]

    async def play(server: Booted) -> None:
        sids.extend([await server.give_out(), await server.give_out()])
        async with server.connect(sids[0]) as twin, server.connect(sids[1]) as socket:
            assert (await socket.act("capabilities"))["data"]["recovery"] == Recovery.REEXECUTE.value
            for one in (socket, twin):
                await one.act("reset", seed=7)
            for n in range(1, 51):
                for one in (socket, twin):
                    await one.act("step", n=n)
                    if n % 20 == 0:
                        assert "boom" in (await one.act("step", n=500, do="raise"))["data"]["message"]
            expected.update(await twin.act("step", n=1))
            eid = (await socket.act("capabilities"))["data"]["session"]["eid"]
            before.extend(await kept(server, eid))
            await server.kill()

    async def go_on(server: Booted) -> None:
        async with server.connect(sids[1]) as again:
            eid = again.told["session"]["eid"]
            assert again.told["session"]["t"] == 50
            after = await again.act("step", n=1)
            assert (after["t"], after["data"]["observation"]) == (51, expected["data"]["observation"])
            assert (await again.act("state"))["data"]["step_count"] == 53
        assert await kept(server, eid) == before

    boot(machine, DiceEnvironment, play)
    boot(machine, DiceEnvironment, go_on)


async def played(server: Booted, steps: int, **reset: Any) -> tuple[str, str]:
    """Reset and step a new given-out session; return its sid and eid."""
    sid = await server.give_out()
    async with server.connect(sid) as socket:
        eid = (await socket.act("reset", **reset))["eid"]
        for n in range(steps):
            await socket.act("step", n=n)
    return sid, eid


def test_a_liar_is_lost_with_the_path_that_differs_and_stays_lost(machine: SimulatedMachine) -> None:
    session: list[str] = []

    async def play(server: Booted) -> None:
        session.extend(await played(server, 5))
        await server.kill()

    async def lose(server: Booted) -> None:
        sid, eid = session
        async with server.connect(sid) as socket:
            lost = (await socket.act("step", n=1))["data"]
        assert lost["code"] == "SESSION_LOST"
        assert re.search(r"t=3 of episode .*\$\.observation\.text.*noise", lost["message"])
        assert lost["differs"] == {"eid": eid, "t": 3, "path": "$.observation.text"}
        assert (lost["eid"], lost["t"]) == (eid, 5)
        assert (await server.episode(eid))["deliveries"] == 6
        await server.kill()

    async def still(server: Booted) -> None:
        async with server.connect(session[0]) as socket:
            lost = socket.told
        assert lost["code"] == "SESSION_LOST" and "$.observation.text" in lost["message"]

    for program in (play, lose, still):
        boot(machine, LiarEnvironment, program)


def test_what_is_not_declared_is_lost_even_if_it_would_repeat(machine: SimulatedMachine) -> None:
    session: list[str] = []

    async def play(server: Booted) -> None:
        session.extend(await played(server, 1, seed=7))
        refused = await server.fork(session[1], 0)
        assert (refused.status_code, refused.json()["code"]) == (501, "NOT_SUPPORTED")
        await server.kill()

    async def lose(server: Booted) -> None:
        sid, eid = session
        async with server.connect(sid) as socket:
            lost = socket.told
        assert lost["code"] == "SESSION_LOST" and f"t=1 of episode {eid}" in lost["message"]
        assert (lost["eid"], lost["t"]) == (eid, 1)

    boot(machine, UndeclaredEnvironment, play)
    boot(machine, UndeclaredEnvironment, lose, deterministic=True)  # too late for this session


def test_the_operator_declares_it_and_names_what_may_differ(machine: SimulatedMachine) -> None:
    session: list[str] = []

    async def play(server: Booted) -> None:
        session.extend(await played(server, 3))
        await server.kill()

    async def go_on(server: Booted) -> None:
        async with server.connect(session[0]) as again:
            assert (await again.act("step", n=1))["data"]["observation"]["n"] == 4

    for program in (play, go_on):
        boot(machine, StampedEnvironment, program, deterministic=True, volatile="stamp")


# -- within one server -------------------------------------------------------------------------------------------------


def test_a_hibernated_session_wakes_where_it_stood() -> None:
    app = served(DiceEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            socket.ask("reset", {})
            socket.ask("step", {"n": 4})
            assert socket.ask("step", {"n": 100, "do": "raise"})["type"] == "error"
            before = socket.ask("state")["data"]
        asleep(app)
        made = DiceEnvironment.made
        with connect(client, f"/ws?session_id={sid}") as socket:
            assert socket.ask("state")["data"] == before  # the server drew the episode_id too
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 105
        assert DiceEnvironment.made == made + 1


def test_the_first_reset_gets_the_sessions_seed_and_later_ones_others_each_journaled() -> None:
    app = served(DiceEnvironment)
    DiceEnvironment.seeds.clear()
    with TestClient(app) as client, connect(client) as socket:
        sid = given_out(socket)
        eids = [socket.ask("reset", {})["eid"] for _ in range(2)]
        eids.append(socket.ask("reset", {"seed": 5})["eid"])
        eids.append(socket.ask("reset", {"seed": None})["eid"])
        first, second, third, fourth = DiceEnvironment.seeds
        journal = app.state.errata.runtime.store.journal
        assert first == journal.session(sid).seed
        assert third == 5 and len({first, second, fourth}) == 3
        for eid, seed in zip(eids, DiceEnvironment.seeds, strict=True):
            row = journal.delivery(eid, 0)
            assert f'"seed":{seed}'.encode() in row.request


def test_other_environments_see_no_seed_of_ours() -> None:
    UndeclaredEnvironment.seeds.clear()
    with TestClient(served(UndeclaredEnvironment)) as client, connect(client) as socket:
        socket.ask("reset", {})
        assert UndeclaredEnvironment.seeds == [None]
        assert socket.ask("state")["data"]["episode_id"] is None


def test_a_failed_reset_is_part_of_what_is_run_again() -> None:
    app = served(DiceEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            eid = socket.ask("reset", {})["eid"]
            socket.ask("step", {"n": 1})
            assert "no such task" in socket.ask("reset", {"do": "raise"})["data"]["message"]
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 1002
        asleep(app)
        with connect(client, f"/ws?session_id={sid}") as socket:
            after = socket.ask("step", {"n": 1})
            assert (after["eid"], after["t"], after["data"]["observation"]["n"]) == (eid, 3, 1003)


def test_after_a_step_past_its_deadline_the_session_goes_on_from_its_last_commit() -> None:
    DiceEnvironment.hanging = threading.Event()
    try:
        app = served(DiceEnvironment, settings=Settings(step_timeout_s=0.3))
        with TestClient(app) as client, connect(client) as socket:
            socket.ask("reset", {})
            socket.ask("step", {"n": 2})
            assert socket.ask("step", {"n": 50, "do": "hang"})["data"]["code"] == "TIMEOUT"
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 3
            assert socket.ask("step", {"n": 50, "do": "unserializable"})["data"]["code"] == "ENV_OUTPUT_INVALID"
            after = socket.ask("step", {"n": 1})
            assert (after["t"], after["data"]["observation"]["n"]) == (3, 4)
    finally:
        DiceEnvironment.hanging.set()
        DiceEnvironment.hanging = None


def test_without_recovery_a_step_past_its_deadline_loses_the_session() -> None:
    DiceEnvironment.hanging = threading.Event()
    try:
        app = served(UndeclaredEnvironment, settings=Settings(step_timeout_s=0.3))
        with TestClient(app) as client, connect(client) as socket:
            eid = socket.ask("reset", {})["eid"]
            assert socket.ask("step", {"n": 50, "do": "hang"})["data"]["code"] == "TIMEOUT"
            lost = socket.ask("step", {"n": 1})["data"]
            assert lost["code"] == "SESSION_LOST" and (lost["eid"], lost["t"]) == (eid, 0)
    finally:
        DiceEnvironment.hanging.set()
        DiceEnvironment.hanging = None


def test_a_session_that_could_not_wake_is_not_hibernated() -> None:
    app = served(UndeclaredEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            socket.ask("reset", {})
            socket.ask("step", {"n": 4})
        made = UndeclaredEnvironment.made
        sessions = app.state.errata.sessions
        client.portal.call(sessions.lifetime.hibernate, sessions.table.live[sid])  # type: ignore[union-attr]
        with connect(client, f"/ws?session_id={sid}") as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 5
        assert UndeclaredEnvironment.made == made


def test_where_there_is_no_canonical_form_bytes_are_compared() -> None:
    app = served(DiceEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            eid = socket.ask("reset", {})["eid"]
            socket.ask("step", {"n": 1, "do": "big"})
        assert client.get(f"/episodes/{eid}").json()["turns"][1]["semantic_digest"] is None
        asleep(app)
        with connect(client, f"/ws?session_id={sid}") as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 2


def test_a_stamp_that_nobody_named_ends_in_session_lost_and_a_fork_goes_on_once_it_is_named(tmp_path: Path) -> None:
    app = served(StampedEnvironment, deterministic=True, data_dir=tmp_path)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            eid = socket.ask("reset", {})["eid"]
            socket.ask("step", {"n": 3})
            client.portal.call(app.state.errata.sessions.lifetime.hibernate, app.state.errata.sessions.table.live[sid])  # type: ignore[union-attr]
        asleep(app)
        with connect(client, f"/ws?session_id={sid}") as socket:
            lost = socket.ask("step", {"n": 1})["data"]
        assert lost["code"] == "SESSION_LOST" and lost["differs"]["path"] == "$.metadata.stamp"
        assert "--volatile" in lost["message"]
    named = served(StampedEnvironment, deterministic=True, volatile=["stamp"], data_dir=tmp_path)
    with TestClient(named) as client:
        child = fork(client, eid, 1)
        with connect(client, f"/ws?session_id={child['session_id']}") as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 4


# -- fork --------------------------------------------------------------------------------------------------------------


def test_a_fork_of_a_fork_runs_its_ancestors_requests_and_no_instance_before_its_first_request() -> None:
    app = served(AsyncDiceEnvironment)
    with TestClient(app) as client:
        assert client.get("/capabilities").json()["extensions"]["fork"] == 1
        with connect(client) as socket:
            eid = socket.ask("reset", {})["eid"]
            for n in (1, 2, 3):
                socket.ask("step", {"n": n})
            socket.ask("reset", {})  # of an older episode of the session, too
            made = AsyncDiceEnvironment.made
            child = fork(client, eid, 2)
            assert AsyncDiceEnvironment.made == made
            parents = client.get(f"/episodes/{eid}/states/2").content
            assert client.get(f"/episodes/{child['eid']}/states/0").content == parents
        with connect(client, f"/ws?session_id={child['session_id']}") as socket:
            assert socket.ask("state")["data"]["step_count"] == 0
            socket.ask("step", {"n": 10})
            assert socket.ask("step", {"n": 0, "do": "raise"})["type"] == "error"
            second = socket.ask("step", {"n": 20})
            assert second["data"]["observation"]["n"] == 33
            assert second["data"]["observation"]["text"].endswith("child 1")
        asleep(app)
        grandchild = fork(client, child["eid"], 1)
        with connect(client, f"/ws?session_id={grandchild['session_id']}") as socket:
            third = socket.ask("step", {"n": 5})
            assert third["data"]["observation"]["n"] == 18
            assert third["data"]["observation"]["text"].endswith("child 2")
        with connect(client, f"/ws?session_id={child['session_id']}") as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 34


def test_a_fork_whose_parent_was_deleted_before_it_woke_is_lost_and_says_so() -> None:
    app = served(DiceEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            eid = socket.ask("reset", {})["eid"]
            socket.ask("step", {"n": 1})
            child = fork(client, eid, 1)
        assert client.delete(f"/episodes/{eid}").status_code == 200
        with connect(client, f"/ws?session_id={child['session_id']}") as socket:
            lost = socket.ask("step", {"n": 1})["data"]
        assert lost["code"] == "SESSION_LOST" and f"episode {eid}" in lost["message"] and "deleted" in lost["message"]
        assert client.get(f"/episodes/{child['eid']}/states/0").status_code == 200


def test_a_fork_of_a_liar_from_before_its_lie_goes_on() -> None:
    app = served(LiarEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            eid = socket.ask("reset", {})["eid"]
            for _ in range(4):
                socket.ask("step", {"n": 1})
        for t, answer in ((2, "observation"), (3, "error")):
            child = fork(client, eid, t, f"at {t}")
            with connect(client, f"/ws?session_id={child['session_id']}") as socket:
                assert socket.ask("step", {"n": 1})["type"] == answer


def test_an_mcp_environment_says_its_class() -> None:
    assert served(ToolEnvironment).state.errata.sessions.recovery.name is Recovery.REEXECUTE

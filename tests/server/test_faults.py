"""Environments and clients that misbehave: the session is never left half-run, and nobody else pays."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server.http_server import create_fastapi_app as stock_app
from openenv.core.env_server.types import ConcurrencyConfig

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError, ServiceError, SessionUnknown
from errata_server.app import create_fastapi_app
from errata_server.process import ServerProcess
from errata_server.runtime.runtime import Runtime
from errata_server.sessions.session import Request
from errata_server.sessions.sessions import Sessions
from errata_server.settings import Settings

from .asgi_peer import Peer
from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation, PinnedEnvironment

HANGING = "tests.server.test_faults:HangingEnvironment"


class OddEnvironment(CountEnvironment):
    """Returns what is no observation when it is told to."""

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        made = await super().step_async(action, timeout_s, **kwargs)
        match action.do:
            case "none":
                return None
            case "huge":
                return made.model_copy(update={"reward": 10**400})
            case "surrogate":
                return made.model_copy(update={"metadata": dict.fromkeys(["\ud800", "\udc00"])})
            case "object":
                return made.model_copy(update={"text": object()})
        return made


class TimingOutEnvironment(PinnedEnvironment):
    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        if action.do:
            raise TimeoutError("db connect timed out")
        return super().step(action)

    def reset(self, timeout_s: float = 0.0, context: str = "", **kwargs: Any) -> CountObservation:  # type: ignore[override]
        return super().reset().model_copy(update={"text": f"{timeout_s} {context}"})


class StatelessEnvironment(PinnedEnvironment):
    @property
    def state(self) -> Any:
        return object()


class SingleThreadEnvironment(PinnedEnvironment):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True
    threads: set[int] = set()  # noqa: RUF012

    def step(self, action: CountAction, timeout_s: float | None = None, **kwargs: Any) -> CountObservation:
        self.threads.add(threading.get_ident())
        return super().step(action)


class HangingEnvironment(PinnedEnvironment):
    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        time.sleep(3600)
        raise AssertionError("not reached")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("how", ["none", "huge", "surrogate", "object"])
def test_what_is_no_observation_is_an_error_and_the_step_did_not_happen(how: str, tmp_path: Path) -> None:
    app = create_fastapi_app(OddEnvironment, CountAction, CountObservation, data_dir=tmp_path)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        socket.ask("step", {"n": 5})
        error = socket.ask("step", {"n": 100, "do": how})
        assert error["type"] == "error" and error["data"]["code"] == "ENV_OUTPUT_INVALID"
        after = socket.ask("step", {"n": 1})
        assert (after["t"], after["data"]["observation"]["n"]) == (2, 6)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("how", ["none", "object"])
def test_what_is_no_observation_has_openenvs_own_code_for_a_client_that_asked_for_no_capabilities(how: str) -> None:
    codes = []
    for made in (create_fastapi_app, stock_app):
        app = made(OddEnvironment, CountAction, CountObservation)
        with TestClient(app) as client, connect(client, told=False) as socket:
            socket.ask("reset", {})
            codes.append(socket.ask("step", {"n": 100, "do": how})["data"]["code"])
    assert codes == ["EXECUTION_ERROR"] * 2


def test_an_environments_own_timeout_is_its_exception_and_not_our_deadline() -> None:
    app = create_fastapi_app(TimingOutEnvironment, CountAction, CountObservation)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        error = socket.ask("step", {"do": "x"})
        assert error["data"] == {"message": "db connect timed out", "code": "EXECUTION_ERROR"}
        assert socket.ask("step", {"n": 1})["t"] == 1


def test_reset_arguments_may_have_any_name() -> None:
    app = create_fastapi_app(TimingOutEnvironment, CountAction, CountObservation)
    with TestClient(app) as client, connect(client) as socket:
        first = socket.ask("reset", {"timeout_s": 2.5, "context": "c", "method": "m", "thread": 1})
        assert first["data"]["observation"]["text"] == "2.5 c"


def test_a_state_that_is_no_mapping_does_not_hinder_reset() -> None:
    app = create_fastapi_app(StatelessEnvironment, CountAction, CountObservation)
    with TestClient(app) as client, connect(client) as socket:
        assert socket.ask("reset", {"episode_id": "a"})["t"] == 0


def test_environments_that_ask_for_one_thread_share_it() -> None:
    app = create_fastapi_app(SingleThreadEnvironment, CountAction, CountObservation, max_concurrent_envs=4)
    with TestClient(app) as client, connect(client) as one, connect(client) as two:
        for socket in (one, two, one):
            socket.ask("reset", {})
            socket.ask("step", {"n": 1})
        assert len(SingleThreadEnvironment.threads) == 1


def test_a_factory_that_makes_something_else_is_told_and_leaves_the_server_alive() -> None:
    app = create_fastapi_app(lambda: object(), CountAction, CountObservation)  # type: ignore[arg-type,return-value]
    with TestClient(app) as client:
        for _ in range(2):  # the place it took is free again
            with client.websocket_connect("/ws") as ws:
                assert "FACTORY_ERROR" in ws.receive_text()


def test_an_app_can_be_started_a_second_time() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation)
    for _ in range(2):
        with TestClient(app) as client, connect(client) as socket:
            assert socket.ask("reset", {})["t"] == 0


async def test_what_a_lost_socket_left_queued_does_not_act_on_its_successors_session() -> None:
    runtime = Runtime(Settings())
    sessions = Sessions(runtime, CountEnvironment, "count", ConcurrencyConfig(max_concurrent_envs=4))
    runtime.live_sessions.add(sessions)
    session = await sessions.open(resumable=True)
    lost, successor = object(), object()
    sessions.lifetime.attach(session, lost)
    await sessions.admit(session, Request("reset", b"{}"), lost)
    stale = [
        asyncio.create_task(sessions.admit(session, Request("step", b"{}", action=CountAction(n=100)), lost))
        for _ in range(3)
    ]
    await sessions.lifetime.detach(session, lost)
    sessions.lifetime.attach(session, successor)
    outcomes = await asyncio.gather(*stale, return_exceptions=True)
    assert all(isinstance(o, SessionUnknown) for o in outcomes)
    reply = await sessions.admit(session, Request("step", b"{}", action=CountAction(n=1)), successor)
    assert reply.t == 1 and b'"n":1,' in reply.payload
    await sessions.close_all()
    await runtime.close()


async def test_deleting_the_running_episode_ends_its_session(tmp_path: Path) -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, data_dir=tmp_path)
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 1})
        assert client.delete(f"/episodes/{eid}").json()["deleted"] == 2
        assert socket.ask("step", {"n": 1})["data"]["code"] == "SESSION_ERROR"
        assert client.get("/episodes").json()["episodes"] == []


async def test_a_step_that_hangs_for_ever_does_not_keep_the_server_from_stopping(tmp_path: Path) -> None:
    with ServerProcess(HANGING, tmp_path, "--step-timeout", "1") as server:
        async with ErrataClient(server.url) as client:
            await client.reset()
            with pytest.raises(ErrataError) as caught:
                await client.step({"n": 1})
            assert caught.value.code == "TIMEOUT"
        assert server.stop(timeout_s=60) == 0


def test_an_empty_token_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="token is empty") as caught:
        ServerProcess("tests.server.environments:CountEnvironment", tmp_path, env={"ERRATA_TOKEN": ""})
    assert "Traceback" not in str(caught.value)


def test_the_journal_is_its_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, data_dir=directory)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        assert directory.stat().st_mode & 0o77 == 0
        assert all(
            file.stat().st_mode & 0o77 == 0 for file in (directory / "journal", *(directory / "journal").iterdir())
        )


class OwnSnapshots(PinnedEnvironment):
    """An environment of somebody else's, in which the word means something else."""

    def snapshot(self, path: str) -> None:
        raise AssertionError("not meant for the server")

    def restore(self, path: str) -> None:
        raise AssertionError("not meant for the server")


class DeclaredSnapshots(OwnSnapshots):
    def snapshot(self) -> Path:  # type: ignore[override]
        raise AssertionError("not meant for the server")


class UndeclaredSnapshots(OwnSnapshots):
    def snapshot(self):  # type: ignore[no-untyped-def,override]
        return {3}


@pytest.mark.parametrize("env", [OwnSnapshots, DeclaredSnapshots, UndeclaredSnapshots])
def test_an_environment_with_snapshots_of_its_own_goes_on_as_without(env: type) -> None:
    app = create_fastapi_app(env, CountAction, CountObservation, max_concurrent_envs=2)
    with TestClient(app) as client, connect(client) as socket:
        assert socket.ask("reset", {})["t"] == 0
        assert socket.ask("step", {"n": 3})["data"]["observation"]["n"] == 3
        assert socket.ask("capabilities")["data"]["recovery"] == "none"
        assert client.get("/capabilities").json()["recovery"] == "none"


def test_what_an_environment_raised_is_logged_with_its_type(caplog: pytest.LogCaptureFixture) -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation)
    with TestClient(app) as client, connect(client) as socket, caplog.at_level("DEBUG", "errata.sessions"):
        socket.ask("reset", {})
        socket.ask("step", {"do": "raise"})
    (line,) = [record for record in caplog.records if "failed" in record.getMessage()]
    assert "step for t=1 failed: ValueError: boom" in line.getMessage()
    assert line.exc_info is not None


@pytest.mark.parametrize("subprotocols", [(), ("openenv.mux.v1",)], ids=["plain", "mux"])
@pytest.mark.parametrize("first", ["websocket.connect", "websocket.disconnect"])
async def test_a_peer_that_leaves_while_it_shakes_hands_is_no_error(
    app: FastAPI, subprotocols: tuple[str, ...], first: str
) -> None:
    """Uvicorn raises a kind of OSError where it has nobody to send the acceptance to."""

    class Left(OSError):
        pass

    async def send(message: dict[str, Any]) -> None:
        raise Left

    async def receive() -> dict[str, Any]:
        return {"type": first, "code": 1006}

    peer = Peer(app, subprotocols=subprotocols)
    await app(peer._scope, receive, send)  # type: ignore[arg-type]

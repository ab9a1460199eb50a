"""Error information of a server's observations (PROTOCOL B5): the same through every door; journals of before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Observation, State

from errata_client import ErrataClient
from errata_protocol import markers
from errata_protocol.error_info import KEY
from errata_protocol.markers import Detection, ErrorKind, ErrorSite
from errata_protocol.rollouts import marker_of
from errata_server.app import create_fastapi_app
from errata_server.simulation import SimulatedMachine

from .booted import Booted, boot
from .conftest import connect, simulated
from .environments import CountAction, CountObservation
from .local_server import LocalServer
from .repeatable import DiceEnvironment

TOLD = {"kind": "nonzero_exit", "sites": [{"action_field": "do", "action_span": [0, 4]}]}
OWN = {"kind": "invalid_args", "message": "the square is taken", "sites": [{"action_field": "do"}]}
COUNT = "tests.server.environments:CountEnvironment"


class OwnObservation(Observation):
    """Without markers."""

    n: int = 0


class OwnEnvironment(Environment[CountAction, OwnObservation, State]):
    """Tells its errors itself, without importing Errata."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> OwnObservation:
        return OwnObservation()

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> OwnObservation:
        told = {"own": OWN, "text": "no object"}.get(action.do)
        return OwnObservation(n=action.n, metadata={} if told is None else {KEY: told})

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=0)


def test_a_plain_socket_and_http_tell_it_and_only_of_errors(client: TestClient) -> None:
    with connect(client, told=False) as socket:
        assert "metadata" not in socket.ask("reset", {})["data"]
        assert "metadata" not in socket.ask("step", {"n": 1})["data"]
        marked = socket.ask("step", {"n": 1, "do": "mark"})["data"]
    assert marked["metadata"][KEY] == marked["observation"]["metadata"][KEY] == TOLD
    posted = client.post("/step", json={"action": {"n": 1, "do": "mark"}}).json()
    assert posted["observation"]["metadata"][KEY] == TOLD
    assert KEY not in client.post("/step", json={"action": {"n": 1}}).text


@pytest.mark.parametrize("mux", [True, False])
async def test_our_client_gets_it_on_both_sockets(mux: bool, tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path / "data") as server:
        async with ErrataClient[Any, Any, Any](server.url, mux=mux) as env:
            await env.reset()
            result = await env.step({"n": 1, "do": "mark"})
            assert result.metadata[KEY] == TOLD
            assert json.loads((await env.state_at(1)).payload)["metadata"] == result.metadata
            assert (await env.step({"n": 1})).metadata is None


def test_an_environment_that_tells_its_errors_itself_is_listed_by_them() -> None:
    app = create_fastapi_app(OwnEnvironment, CountAction, OwnObservation, runtime=simulated())
    with TestClient(app) as client:
        with connect(client) as socket:
            eid = socket.ask("reset", {})["eid"]
            data = [socket.ask("step", {"n": 1, "do": do})["data"] for do in ("own", "text", "")]
        assert [one.get("metadata") for one in data] == [{KEY: OWN}, {KEY: "no object"}, None]
        assert client.get(f"/episodes/{eid}").json()["error_kinds"] == {"invalid_arguments": 1}
        turn = client.get(f"/episodes/{eid}").json()["turns"][1]
        assert (turn["error_kind"], turn["hint_template_key"]) == ("invalid_arguments", "args.invalid")
    marker = marker_of(data[0])
    assert marker is not None and marker.error_kind == "invalid_arguments" and marker_of(data[1]) is None


class MarkedDiceEnvironment(DiceEnvironment):
    """Fails at each third step, in a way that only its seed decides."""

    kind = ErrorKind.RUNTIME_ERROR

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        observation = super().step(action)
        if self._state.step_count % 3:
            return observation
        site = ErrorSite(action_field="n", action_span=(0, 1), message=f"rolled {observation.text}")
        return observation.with_detection(Detection.of(self.kind, site))


@pytest.mark.parametrize("later", [ErrorKind.RUNTIME_ERROR, ErrorKind.TIMEOUT])
def test_a_session_of_before_it_is_run_again_and_its_markers_are_compared(
    later: ErrorKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = SimulatedMachine(7, power_loss=False, index=tmp_path)
    session: list[str] = []

    async def play(server: Booted) -> None:
        session.append(await server.give_out())
        async with server.connect(session[0]) as socket:
            session.append((await socket.act("reset", seed=3))["eid"])
            marked = [await socket.act("step", n=n) for n in range(4)][2]
        assert "error_kind" in marked["data"]["metadata"] and KEY not in marked["data"]["metadata"]
        await server.kill()

    async def go_on(server: Booted) -> None:
        async with server.connect(session[0]) as socket:
            after = await socket.act("step", n=4)
            if later is ErrorKind.TIMEOUT:
                assert after["data"]["code"] == "SESSION_LOST"
                assert after["data"]["differs"] == {"eid": session[1], "t": 3, "path": "$.metadata.error_kind"}
                return
            assert after["t"] == 5
            assert (await socket.act("step", n=5))["data"]["metadata"][KEY]["kind"] == "runtime_error"

    with monkeypatch.context() as earlier:
        earlier.setattr(markers, "error_info", lambda *_: None)
        boot(machine, MarkedDiceEnvironment, play)
    monkeypatch.setattr(MarkedDiceEnvironment, "kind", later)
    boot(machine, MarkedDiceEnvironment, go_on)

"""What an environment returns and JSON cannot carry concerns one request, never the socket, the journal or exports."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app as stock_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import State

from errata_protocol.bundle_check import verify_bundle
from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentFailed, EnvironmentOutputInvalid, ErrataError
from errata_protocol.mux import ClientSession
from errata_server.app import create_fastapi_app
from errata_server.doors.mux.translation import replayed_reply
from errata_server.runtime import rows
from errata_server.settings import Settings

from .asgi_peer import Peer
from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation, ToolsEnvironment
from .mux_trainer import Trainer


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = [value]
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "the first half of a pair": lambda: "\ud83d and on",
    "the second half of a pair": lambda: "name-\udcff.txt",
    "halves the wrong way round": lambda: "\udc00\ud800",
    "a text of a model": lambda: json.loads('"cut \\ud83d"'),
    "half a pair in a key": lambda: {"\ud800": {"\udfff": 1}},
    "keys that become equal": lambda: dict.fromkeys(["\ud800", "\ud801"], 1),
    "a path that is not UTF-8": lambda: Path("/a/\udcff"),
    "bytes": lambda: b"\xff\xfe",
    "bytes as a key": lambda: {b"\xff": 1},
    "an integer of 400 digits": lambda: 10**400,
    "an integer of 5,000 digits": lambda: -(10**5000),
    "300 levels": lambda: nested(300),
    "5,000 levels": lambda: nested(5000),
    "itself": cyclic,
    "keys that are no texts": lambda: {1: 2, None: 3, (4, 5): 6, 7.5: 8},
    "NaN": lambda: float("nan"),
    "NaN beside half a pair": lambda: [float("inf"), "\ud800"],
    "NaN as a key": lambda: {float("nan"): 1},
    "an object": object,
    "a type": lambda: int,
    "a set of halves": lambda: {"\ud800"},
}
TEXTS = [what for what in VALUES if isinstance(VALUES[what](), str | Path)]


class AnyObservation(CountObservation):
    """An observation with a field of any value."""

    held: Any = None


class AnyState(State):
    """A state with a field of any value."""

    held: Any = None


class ValueEnvironment(CountEnvironment):
    """Puts the value that the action names where the action says."""

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **more: Any) -> CountObservation:
        place, _, what = action.do.partition(": ")
        made = await super().step_async(CountAction(n=action.n), timeout_s, **more)
        value = VALUES[what]() if what else None
        match place:
            case "observation":
                return AnyObservation(n=made.n, reward=1.0, held=value)
            case "metadata":
                return made.model_copy(update={"metadata": {"held": value}})
            case "marker":
                return made.model_copy(update={"metadata": {"error_kind": value, "hint_template_key": value}})
            case "reward":
                return made.model_copy(update={"reward": value})
            case "done":
                return made.model_copy(update={"done": value})
            case "state":
                self._state = AnyState.model_construct(episode_id="e", step_count=1, held=value)
            case "episode":
                self._state = State.model_construct(episode_id=value, step_count=1)
            case "error":
                raise ValueError(value)
        return made

    async def snapshot(self) -> Snapshot:
        return Snapshot(json.dumps([self._n, 0, "e"]).encode())

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Any:
        made = await super().reset_async(seed, None, **more)
        place, _, what = (episode_id or "").partition(": ")
        if place == "episode":
            self._state = State.model_construct(episode_id=VALUES[what](), step_count=0)
        return made


def application() -> FastAPI:
    runtime = simulated(Settings(journal_wait_s=0.3))
    return create_fastapi_app(ValueEnvironment, CountAction, AnyObservation, max_concurrent_envs=8, runtime=runtime)


@asynccontextmanager
async def joined(app: FastAPI) -> AsyncIterator[Trainer]:
    """A client of the multiplexed socket that also reads each frame as clients before decision 163 do."""
    trainer = Trainer(app, chance=random.Random(163))
    receive = trainer.protocol.receive

    def checked(frame: bytes | str, now: float) -> Any:
        msgspec.json.Decoder(msgspec.Raw).decode(frame)
        return receive(frame, now)

    trainer.protocol.receive = checked  # type: ignore[method-assign]
    await trainer.join()
    yield trainer
    await trainer.cut()


async def outcome(trainer: Trainer, session: ClientSession, do: str) -> Any:
    """Step and return the observation, or the error, which is the environment's."""
    try:
        return json.loads((await trainer.ask(session, "step", {"do": do})).payload)
    except (EnvironmentFailed, EnvironmentOutputInvalid) as error:
        error.message.encode()
        return error


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("place", ["observation", "metadata", "marker", "reward", "done", "error"])
async def test_a_value_that_cannot_be_carried_concerns_one_step_of_one_session(place: str, what: str) -> None:
    app = application()
    async with joined(app) as trainer:
        one, other = await trainer.open(), await trainer.open()
        eid = (await trainer.ask(one, "reset")).eid
        await trainer.ask(other, "reset")
        asked = [trainer.ask_later(other, "step", {"n": 1}) for _ in range(3)]
        found = await outcome(trainer, one, f"{place}: {what}")
        assert [(await reply).t for reply in asked] == [1, 2, 3]
        delivered = isinstance(found, dict)
        after = await trainer.ask(one, "step", {"n": 1})
        assert after.t == 1 + delivered
        if place == "error":
            assert not delivered
        elif place == "observation" and what in TEXTS:
            assert isinstance(found, dict) and "\ufffd" in found["observation"]["held"]
        for t in range(1 + delivered):
            assert (await trainer.read("state", one, {"t": t})).payload
        await trainer.cut()
        await trainer.join()
        assert (await trainer.ask(one, "step", {"n": 1})).t == 2 + delivered
    with TestClient(app) as client:
        bundle = client.get(f"/episodes/{eid}/bundle")
        assert bundle.status_code == 200 and verify_bundle(bundle.content.splitlines(keepends=True)).ok
        for t in range(3 + delivered):
            assert json.loads(client.get(f"/episodes/{eid}/states/{t}").content)


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("what", VALUES)
async def test_a_state_that_cannot_be_carried_concerns_one_read(what: str) -> None:
    async with joined(application()) as trainer:
        one, other = await trainer.open(), await trainer.open()
        for session in (one, other):
            await trainer.ask(session, "reset")
        await trainer.ask(one, "step", {"do": f"state: {what}"})
        try:
            assert json.loads((await trainer.read("state", one)).payload)["episode_id"] == "e"
        except (EnvironmentFailed, EnvironmentOutputInvalid):
            pass
        assert json.loads((await trainer.read("state", other)).payload)["episode_id"] == "count"
        assert (await trainer.ask(one, "step")).t == 2


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("what", VALUES)
async def test_an_episode_id_that_cannot_be_carried_begins_an_episode_all_the_same(what: str) -> None:
    async with joined(application()) as trainer:
        session = await trainer.open()
        assert (await trainer.ask(session, "reset", {"episode_id": f"episode: {what}"})).t == 0
        assert (await trainer.ask(session, "step")).t == 1


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("place", ["observation", "metadata", "marker", "reward", "done", "error", "state"])
def test_a_plain_socket_answers_each_such_step_and_goes_on(place: str) -> None:
    with TestClient(application()) as client, connect(client, told=False) as socket:
        socket.ask("reset", {})
        for what in VALUES:
            answer = socket.ask("step", {"do": f"{place}: {what}"})
            assert answer["type"] == "observation" or answer["data"]["code"] == "EXECUTION_ERROR", what
            state = socket.ask("state")
            assert state["type"] == "state" or state["data"]["code"] == "EXECUTION_ERROR", what
            assert socket.ask("step", {})["type"] == "observation", what


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("place", ["observation", "metadata", "reward", "done", "error"])
def test_http_answers_each_such_step_with_a_code(place: str) -> None:
    with TestClient(application(), raise_server_exceptions=False) as client:
        for what in VALUES:
            answer = client.post("/step", json={"action": {"do": f"{place}: {what}"}})
            assert answer.status_code == 200 or answer.json()["code"] in ("EXECUTION_ERROR", "ENV_OUTPUT_INVALID"), what
            json.dumps(answer.json(), ensure_ascii=False).encode()


class BoardState(State):
    """A state with a field of its own."""

    board: str = "x"


class BoardEnvironment(CountEnvironment):
    """Its state has fields of a subclass and further ones."""

    @property
    def state(self) -> State:
        return BoardState(episode_id="a", step_count=2, more=5)  # type: ignore[call-arg]


def test_a_state_over_http_has_the_fields_that_it_has_upstream() -> None:
    ours = create_fastapi_app(BoardEnvironment, CountAction, CountObservation, runtime=simulated(Settings()))
    answers = []
    for app in (ours, stock_app(BoardEnvironment, CountAction, CountObservation)):
        with TestClient(app) as client:
            answers.append((client.get("/state").json(), client.get("/metadata").json()))
    assert answers[0] == answers[1]


class ValueTools(ToolsEnvironment):
    """Tools that return such values, or raise errors that quote them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server: FastMCP[Any] = FastMCP("values")

        @server.tool
        def give(what: str) -> Any:
            return VALUES[what]()

        @server.tool
        def fail(what: str) -> Any:
            raise ValueError(VALUES[what]())

        super().__init__(server)


@pytest.fixture
def no_logs() -> Iterator[None]:
    """FastMCP logs what its tools raise; pytest-xdist cannot report output with half of a surrogate pair."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_logs")
@pytest.mark.parametrize("tool", ["give", "fail"])
async def test_a_tools_value_that_cannot_be_carried_concerns_one_call(tool: str) -> None:
    app = create_fastapi_app(
        ValueTools, CallToolAction, CallToolObservation, max_concurrent_envs=8, runtime=simulated(Settings())
    )
    async with joined(app) as trainer, Peer(app, "/mcp") as peer:
        one, other = await trainer.open(), await trainer.open()
        for session in (one, other):
            await trainer.ask(session, "reset")
        for t, what in enumerate(VALUES, 1):
            arguments = {"name": tool, "arguments": {"what": what}}
            call = {"jsonrpc": "2.0", "id": t, "method": "tools/call", "params": arguments}
            try:
                assert json.loads((await trainer.ask(one, "mcp", call)).payload)["id"] == t, what
            except EnvironmentOutputInvalid:
                pass
            action = {"type": "call_tool", "tool_name": tool, "arguments": {"what": what}}
            try:
                await trainer.ask(one, "step", action)
            except EnvironmentOutputInvalid:
                pass
            answer = await peer.ask(call) or {}
            assert answer["id"] == t and ("result" in answer or answer["error"]["message"]), what
            listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            assert len(json.loads((await trainer.read("mcp", other, listed)).payload)["result"]["tools"]) == 2


async def test_a_payload_of_an_earlier_version_is_read_whole_where_it_cannot_hurt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = application()
    with monkeypatch.context() as earlier:
        earlier.setattr(rows, "encode_payload", lambda data, finite: json.dumps(data, separators=(",", ":")).encode())
        async with Peer(app) as peer:
            await peer.ask({"type": "capabilities"})
            old = (await peer.ask({"type": "reset"}) or {})["eid"]
            await peer.ask({"type": "step", "data": {"do": "metadata: the first half of a pair"}})
    row = await app.state.errata.runtime.store.owned_delivery(old, 1, None)
    assert b"\\ud83d" in row.payload and replayed_reply(row).type == "error"
    async with joined(app) as trainer:
        one, other = await trainer.open(), await trainer.open()
        for session in (one, other):
            await trainer.ask(session, "reset")
        back = {"injected_state": {"episode_id": old, "t": 1}}
        with pytest.raises(EnvironmentOutputInvalid, match="states/0 has its bytes"):
            await trainer.ask(one, "reset", back)
        with pytest.raises(EnvironmentOutputInvalid, match="states/0 has its bytes"):
            await trainer.read("state", one, {"t": 0})
        assert (await trainer.ask(other, "step")).t == 1
        assert (await trainer.ask(one, "step")).t == 1
    with TestClient(app) as client, connect(client) as socket:
        state = client.get(f"/episodes/{old}/states/1")
        assert state.content == row.payload
        bundle = client.get(f"/episodes/{old}/bundle")
        assert verify_bundle(bundle.content.splitlines(keepends=True)).ok
        assert "\ud83d" in socket.ask("state", {"eid": old, "t": 1})["data"]["metadata"]["held"]


OWN_MESSAGES = {
    "open": ("", '{"key":"\\ud800"}'),
    "resume": ("", '[{"sid":"\\ud800"}]'),
    "ack": ("", '{"id":"\\ud800"}'),
    "part": (',"id":2', '{"n":1,"of":1,"text":"\\ud800"}'),
    "state": (',"q":5', '{"t":1,"eid":"\\ud800"}'),
    "rewards": (',"q":6', '{"eid":"\\ud800"}'),
    "close_group": (',"q":7', '{"group":"\\ud800"}'),
    "\\ud800": (',"id":2', "{}"),
}
ARGUMENTS = {
    "mcp": '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"\\ud800"}}',
    "reset": '{"seed":"\\ud800"}',
    "step": '{"do":"\\ud800"}',
    "fork": '{"t":0,"child":{"sid":"\\ud800","key":"x"}}',
}


async def test_half_a_pair_in_any_message_concerns_that_message() -> None:
    """PROTOCOL D1: INVALID_ENVELOPE in the protocol's own messages, VALIDATION_ERROR, recorded, in arguments."""
    async with Peer(application(), subprotocols=("openenv.mux.v1",)) as peer:
        one, other = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "Zq3vK8s0T1u5Wb7Yc9Xd2B"
        for sid in (one, other):
            await peer.ask(f'{{"sid":"{sid}","type":"open","data":{{"key":"n4Jr6Lm8Po0Qs2Tu4Vw6Xy"}}}}')
            await peer.ask(f'{{"sid":"{sid}","id":1,"type":"reset"}}')
        steps, ids = 1, 1

        async def codes(message: str) -> list[str]:
            nonlocal steps
            steps += 1
            peer.send(f'[{message},{{"sid":"{other}","id":{steps},"type":"step"}}]')
            found = []
            while not ("step" in found and len(found) == 2):
                frame = json.loads((await peer.got.get())["text"])
                for answer in frame if isinstance(frame, list) else [frame]:
                    is_step = answer.get("sid") == other and answer.get("t") == steps - 1
                    found.append("step" if is_step else answer["data"]["code"])
            return sorted(found)

        for kind, (address, data) in OWN_MESSAGES.items():
            message = f'{{"sid":"{one}"{address},"type":"{kind}","data":{data}}}'
            assert await codes(message) == ["INVALID_ENVELOPE", "step"], kind
        for kind, data in ARGUMENTS.items():
            ids += 1
            message = f'{{"sid":"{one}","id":{ids},"type":"{kind}","data":{data}}}'
            assert await codes(message) == ["VALIDATION_ERROR", "step"], kind


@pytest.mark.parametrize("data", ['{"do":"\\ud800"}', '{"\\udfff":1}', '{"do":"\\udc00\\ud800"}'])
async def test_half_a_pair_in_an_action_is_the_recorded_error_of_its_own_request(data: str) -> None:
    async with joined(application()) as trainer, Peer(application(), subprotocols=("openenv.mux.v1",)) as peer:
        sids = ["Zq3vK8s0T1u5Wb7Yc9Xd2A", "Zq3vK8s0T1u5Wb7Yc9Xd2B"]
        for sid in sids:
            await peer.ask(f'{{"sid":"{sid}","type":"open","data":{{"key":"n4Jr6Lm8Po0Qs2Tu4Vw6Xy"}}}}')
            assert ((await peer.ask(f'{{"sid":"{sid}","id":1,"type":"reset"}}')) or {})["t"] == 0
        bad = f'{{"sid":"{sids[0]}","id":2,"type":"step","data":{data}}}'
        peer.send(f'[{{"sid":"{sids[1]}","id":2,"type":"step"}},{bad},{{"sid":"{sids[0]}","id":3,"type":"step"}}]')
        found = {}
        while len(found) < 3:
            frame = json.loads((await peer.got.get())["text"])
            for answer in frame if isinstance(frame, list) else [frame]:
                found[answer["sid"], answer["id"]] = answer
        assert found[sids[0], 2]["data"]["code"] == "VALIDATION_ERROR"
        assert (found[sids[1], 2]["t"], found[sids[0], 3]["t"]) == (1, 1)
        with pytest.raises(ErrataError):  # our own client refuses it before it is sent
            trainer.protocol.request(await trainer.open(), "step", data.encode())

"""Our client against stock servers of both generations: every method works, or says why not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from websockets.asyncio.client import connect

from errata_client import ErrataClient
from errata_protocol.errors import (
    EnvironmentFailed,
    InvalidRequest,
    NotSupported,
    ServiceError,
    SessionUnknown,
    StateOutOfRange,
)
from errata_protocol.payload import digest

from .conftest import GENERATIONS
from .foreign.worlds import LedgerAction, LedgerObservation, LedgerState

Urls = dict[str, dict[str, str]]
RESET = {"episode_id": "ep-7", "opening": 10}
ACTIONS = [{"amount": 4, "note": "n4 é\u2028"}, {"amount": -2, "note": 'quote " and \\'}]

pytestmark = pytest.mark.parametrize("generation", GENERATIONS)


async def test_the_client_knows_a_vanilla_server_and_plays_on_it(stock: Urls, generation: str) -> None:
    async with ErrataClient(stock[generation]["ledger"]) as client:
        assert await client.capabilities() is None
        assert (await client.reset(**RESET)).observation["balance"] == 10
        result = await client.step(ACTIONS[0])
        assert (result.observation["balance"], result.reward, result.done) == (14, 1.0, False)
        assert await client.state() == {"episode_id": "ep-7", "step_count": 1, "last_note": ACTIONS[0]["note"]}
        for action, error in (({"amount": 1, "note": "refuse"}, EnvironmentFailed), ({"wrong": 1}, InvalidRequest)):
            with pytest.raises(error):
                await client.step(action)
        assert (client.t, (await client.step({"amount": 1, "note": "close"})).done) == (1, True)


async def test_state_at_returns_the_bytes_of_the_wire(stock: Urls, generation: str) -> None:
    url = stock[generation]["ledger"]
    async with connect(url.replace("http", "ws", 1) + "/ws") as raw:
        frames = [{"type": "reset", "data": RESET}, *({"type": "step", "data": action} for action in ACTIONS)]
        sent = []
        for frame in frames:
            await raw.send(json.dumps(frame))
            sent.append(str(await raw.recv()).encode())
    async with ErrataClient(url) as client:
        await client.reset(**RESET)
        for action in ACTIONS:
            await client.step(action)
        history = await client.history()
        assert len(history) == len(sent) == 3
        for t, frame in enumerate(sent):
            state = await client.state_at(t)
            assert b'{"type":"observation","data":' + state.payload + b"}" == frame
            assert state == history[t]
            assert (state.source, state.digest) == ("history", digest(state.payload))
        with pytest.raises(StateOutOfRange):
            await client.state_at(3)
        with pytest.raises(NotSupported, match="cannot fork"):
            await client.fork(1)


async def test_typed_clients_get_their_classes(stock: Urls, generation: str) -> None:
    client = ErrataClient(
        stock[generation]["ledger"],
        action_cls=LedgerAction,
        observation_cls=LedgerObservation,
        state_cls=LedgerState,
    )
    async with client:
        await client.reset()
        result = await client.step(LedgerAction(amount=2, note="typed"))
        assert isinstance(result.observation, LedgerObservation)
        assert (result.observation.balance, result.observation.reward) == (2, 0.5)
        state = await client.state()
        assert isinstance(state, LedgerState) and (state.last_note, state.step_count) == ("typed", 1)


def test_the_blocking_form_works(stock: Urls, generation: str) -> None:
    with ErrataClient(stock[generation]["counter"]).sync() as client:
        client.reset(seed=5)
        totals = [client.step({"n": n}).observation["total"] for n in (1, 2, 3)]
        assert (totals, client.t, client.capabilities()) == ([6, 8, 11], 3, None)
        assert json.loads(client.state_at(2).payload)["observation"]["total"] == 8
        sibling = client.new_session()
        assert sibling.reset().observation["total"] == 0


async def test_tools_are_called_within_the_session(stock: Urls, generation: str) -> None:
    async with ErrataClient(stock[generation]["echo"]) as client:
        await client.reset()
        first: Any = await client.call_tool("echo_with_length", {"message": "four"})
        second: Any = await client.call_tool("echo_with_length", {"message": "é"})
        assert [_data(result)["before"] for result in (first, second)] == [0, 1]
        assert _data(second) == {"message": "é", "length": 1, "before": 1}
        assert client.t == 2, "a tool call is a delivery"
        assert (await client.state_at(2)).kind == "mcp"
        with pytest.raises(ServiceError, match="as asked"):
            await client.call_tool("fail", {"reason": "as asked"})
        assert client.t == 2, "a call that failed is none"
        step = await client.step({"type": "call_tool", "tool_name": "echo_message", "arguments": {"message": "s"}})
        assert step.observation["tool_name"] == "echo_message" and client.t == 3


async def test_a_durable_session_is_attached_again_or_refused(stock: Urls, generation: str) -> None:
    client = ErrataClient(stock[generation]["ledger"], durable=True)
    if generation == "0.3.0":  # ignores ?session_id and would silently play on another environment
        with pytest.raises(NotSupported, match="durable"):
            await client.connect()
        return
    async with client:
        await client.reset()
        await client.step({"amount": 3})
        await client.reattach()
        assert (await client.step({"amount": 4})).observation["balance"] == 7
        assert [state.t for state in await client.history()] == [0, 1, 2]
        await client.end_session()
        with pytest.raises(SessionUnknown):
            await client.reattach()


def _data(result: Any) -> Any:
    return result.get("structuredContent") or result.get("structured_content") or result.get("data") or result

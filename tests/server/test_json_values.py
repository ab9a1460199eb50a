"""Messages with too many JSON values are refused at every door before they are parsed, and long texts are not.

The watch on event loops (`tests.loop_watch`) fails a test in which a door parses on the loop for longer than it may.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import FrameTooLarge, InvalidRequest
from errata_protocol.json_text import MAX_VALUES, ValueCounter
from errata_server.app import create_fastapi_app
from errata_server.doors.json_values import exceeds, excess
from errata_server.doors.strict_json import Refused, parse_json
from errata_server.settings import Settings

from .asgi_peer import Peer
from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation
from .mux_trainer import Trainer

MANY = {"n": 1, "metadata": {"a": [[]] * (MAX_VALUES + 1)}}
LONG = {"n": 1, "metadata": {"a": 'a "quoted", [bracketed] \\ text, {' * 100_000}}
"""Three million characters that would be values outside of a text."""


def marks(value: Any) -> int:
    """Commas and brackets of a value that are not in texts."""
    if isinstance(value, dict | list):
        inner = list(value.values()) if isinstance(value, dict) else value
        return 1 + max(0, len(inner) - 1) + sum(map(marks, inner))
    return 0


VALUES = st.recursive(
    st.text(alphabet='ab"\\,[{\n', max_size=12) | st.integers() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(alphabet='a"\\,{', max_size=5), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(VALUES, st.integers(1, 9))
def test_values_are_counted_whatever_texts_hold_and_however_a_message_is_cut(value: Any, piece: int) -> None:
    text = json.dumps(value).encode()
    counter = ValueCounter()
    for at in range(0, len(text), piece):
        counter._count_piece(text[at : at + piece])
    assert counter._count == marks(value)


@given(VALUES, st.integers(1, 9), st.integers(0, 30))
def test_a_message_exceeds_the_bound_with_the_part_in_which_it_does(value: Any, part: int, bound: int) -> None:
    text = json.dumps(value).encode()

    async def some_part_does() -> bool:
        counter = ValueCounter(bound)
        return any([await exceeds(counter, text[at : at + part]) for at in range(0, len(text), part)])

    assert asyncio.run(some_part_does()) == (marks(value) > bound)


@pytest.mark.parametrize("text", [str, bytes])
async def test_only_too_many_values_are_refused(text: type) -> None:
    def message(value: Any) -> Any:
        written = json.dumps(value)
        return written if text is str else written.encode()

    assert isinstance(await excess(message(MANY)), FrameTooLarge)
    assert await excess(message({"a": [1] * (MAX_VALUES - 10)})) is None
    assert await excess(message(LONG)) is None
    assert await excess(message(LONG)[:-3] + message("x")[:1]) is None, "not JSON: its reader says so"


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" * 400 + ".0"])
def test_a_long_message_is_held_to_the_same_rules(number: str) -> None:
    for padding in ("", "x" * 100_000):
        with pytest.raises(Refused, match="Invalid JSON"):
            parse_json({"text": json.dumps({"a": padding, "b": [{"c": 0.5}]}).replace("0.5", number)}, 1 << 24)
        with pytest.raises(Exception, match="surrogate"):
            parse_json({"text": json.dumps({"a": padding + "\ud800"})}, 1 << 24)
        assert parse_json({"text": json.dumps({"a": padding + "é\U0001f600", "b": 1e300})}, 1 << 24)["b"] == 1e300


@pytest.fixture
def client() -> Iterator[TestClient]:
    with TestClient(served()) as client:
        yield client


def test_the_plain_socket_answers_a_message_of_too_many_values_and_goes_on(client: TestClient) -> None:
    with connect(client) as socket:
        socket.ask("reset", {})
        error = socket.ask("step", MANY)
        assert error["data"]["code"] == "FRAME_TOO_LARGE" and "JSON values" in error["data"]["message"]
        assert socket.ask("step", LONG)["data"]["observation"]["n"] == 1


def test_http_bodies_of_too_many_values_are_refused(client: TestClient) -> None:
    for path, body in (("/step", {"action": MANY}), ("/episodes/delete", {"eids": ["x"] * MAX_VALUES + ["y"] * 9})):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["code"]) == (413, "FRAME_TOO_LARGE"), path
    assert client.post("/step", json={"action": LONG}).status_code == 200
    kinds = [("content-type", "application/json"), ("content-type", "multipart/form-data; boundary=x")]
    for headers in (kinds, kinds[::-1]):
        assert client.post("/step", content=json.dumps({"action": MANY}), headers=headers).status_code == 413
    rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": MANY}
    assert "JSON values" in client.post("/mcp", json=rpc).json()["error"]["message"]


def served() -> FastAPI:
    runtime = simulated(Settings())
    return create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=8, runtime=runtime)


@pytest.mark.parametrize("in_parts", [False, True])
async def test_a_mux_request_of_too_many_values_is_refused_also_in_parts(in_parts: bool) -> None:
    many = MANY | {"metadata": {"a": [[]] * 4_000_000}} if in_parts else MANY
    trainer = Trainer(served(), chance=random.Random(1))
    await trainer.join()
    session = await trainer.open()
    await trainer.ask(session, "reset")
    with pytest.raises(InvalidRequest, match="JSON values"):
        await trainer.ask(session, "step", many)
    reply = await trainer.ask(session, "step", LONG)
    assert json.loads(reply.payload)["observation"]["n"] == 1
    await trainer.cut()


async def send_in_parts(peer: Peer, envelope: str, length: int = 1024**2, **address: Any) -> None:
    pieces = [envelope[at : at + length] for at in range(0, len(envelope), length)]
    for n, piece in enumerate(pieces, 1):
        peer.send(json.dumps({"type": "part", **address, "data": {"n": n, "of": len(pieces), "text": piece}}))
        await asyncio.sleep(0)


LISTS = "[" + "[]," * 5_000_000 + "[]]"
DEEP = "[" + (60 * "[" + 60 * "]" + ",") * 120_000 + "[]]"


@pytest.mark.parametrize(
    "envelope",
    [
        pytest.param('{"type": "step", "sid": 5, "id": 1, "data": LISTS}', id="of another form"),
        pytest.param('{"type": "step", "id": 1, "data": ["\\ud800", LISTS]}', id="with half a surrogate pair"),
        pytest.param('{"type": "step", "id": 1, "data": LISTS, "data": 1}', id="with two data"),
        pytest.param('{"type": "step", "id": 1, "data": LISTS, "data": {}}', id="with two data that nest"),
        pytest.param('{"type": "step", "id": 1, "data": LISTS, "d\\u0061ta": {}}', id="with two data, one escaped"),
        pytest.param('{"type": "step", "id": 1, "q": 1, "data": LISTS}', id="with two numbers"),
        pytest.param('{"type": "resume", "data": LISTS}', id="resume"),
        pytest.param('{"type": "mcp", "q": 1, "data": LISTS}', id="a read"),
        pytest.param('{"type": "step", "id": 1, "data": LISTS', id="no JSON"),
        pytest.param('{"type": "step", "id": 1, "data": DEEP}', id="nested"),
        pytest.param("LISTS", id="an array"),
    ],
)
async def test_parts_of_too_many_values_are_refused_without_delay_of_others(envelope: str) -> None:
    # The watch on event loops (tests/loop_watch.py) fails this where it takes long.
    envelope = envelope.replace("LISTS", LISTS).replace("DEEP", DEEP)
    async with Peer(served(), subprotocols=(PROTOCOL_NAME,)) as peer:
        await send_in_parts(peer, envelope, id=1)
        answer = await peer.receive()
        assert answer is not None and answer["type"] == "error", answer
        assert answer["data"]["code"] in ("INVALID_ENVELOPE", "NOT_ATTACHED"), answer


SOURCE = "def f(x):\n    return {'a': [x]}  # \"\\\\\"\n" * 100_000
"""A text of five million characters, with as many brackets and escapes as source code has."""


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize(
    "envelope",
    [
        pytest.param('{"type": "step", "sid": "SID", "id": 1, "data": {"note": TEXT}}', id="a request"),
        pytest.param('{"type": "step", "sid": "SID", "id": 1, "x": 1, "data": {"note": TEXT}}', id="an unknown field"),
        pytest.param('{"type": "step", "sid": "SID", "id": 1, "data": [NESTED, TEXT]}', id="too deep"),
        pytest.param('{"type": "step", "sid": "SID", "id": 1, "data": ["\\ud800", TEXT]}', id="half a surrogate pair"),
        pytest.param('{"type": "open", "sid": "SID", "data": {"key": TEXT}}', id="a control message"),
    ],
)
async def test_a_long_text_with_brackets_and_escapes_delays_no_others(envelope: str, in_parts: bool) -> None:
    # The watch on event loops (tests/loop_watch.py) fails this where it takes long.
    sid = "a" * 24
    nested = "[" * 100 + "]" * 100
    envelope = envelope.replace("SID", sid).replace("NESTED", nested).replace("TEXT", json.dumps(SOURCE))
    async with Peer(served(), subprotocols=(PROTOCOL_NAME,)) as peer:
        if in_parts:
            await send_in_parts(peer, envelope, sid=sid, id=1)
        else:
            peer.send(envelope)
        answer = await peer.receive()
        assert answer is not None and answer["type"] == "error", answer
        assert answer["data"]["code"] in ("INVALID_ENVELOPE", "NOT_ATTACHED"), answer


async def test_a_long_request_that_comes_again_with_other_spaces_is_another_one() -> None:
    sid = "a" * 24
    action = json.dumps({"n": 1, "metadata": {"a": SOURCE}})
    async with Peer(served(), subprotocols=(PROTOCOL_NAME,)) as peer:

        async def step(data: str) -> dict[str, Any]:
            reply = await peer.ask(f'{{"type": "step", "sid": "{sid}", "id": 2, "data": {data}}}')
            assert reply is not None
            return reply

        opened = await peer.ask({"type": "open", "sid": sid, "data": {"key": "k" * 24}})
        await peer.ask({"type": "reset", "sid": sid, "id": 1})
        first = await step(action)
        assert opened is not None and opened["type"] == "opened" and first["type"] == "observation", first
        assert await step(action) == first
        assert (await step(action.replace("1", " 1", 1)))["data"]["code"] == "CONFLICT"


async def test_a_large_mux_frame_of_too_many_values_is_refused_whole() -> None:
    async with Peer(served(), subprotocols=(PROTOCOL_NAME,)) as peer:
        answer = await peer.ask({"type": "open", "data": {"a": [[]] * 4_000_000}})
        assert (
            answer is not None
            and answer["data"]["code"] == "FRAME_TOO_LARGE"
            and "JSON values" in answer["data"]["message"]
        )


@pytest.mark.parametrize("text", ["1e999", "[1e999]", '{"a": [1e999]}'])
@pytest.mark.parametrize("blanks", [0, 70_000])
def test_a_number_beyond_a_double_is_refused_however_long_the_text(text: str, blanks: int) -> None:
    with pytest.raises(Refused, match="beyond what a double holds"):
        parse_json({"text": text + " " * blanks}, 10**6)

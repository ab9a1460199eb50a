"""What a caller gives and JSON cannot carry is an error of that call, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openenv.core.env_server.types import Action

from errata_client import ErrataClient, FrameInvalid
from errata_client.doors.mux_door import encode
from errata_client.doors.socket_client import SocketClient
from errata_client.wire.codec import Codec
from errata_protocol.errors import InvalidRequest


class AnyAction(Action):
    """An action with a field of any value."""

    held: Any = None


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


def deep() -> Any:
    value: Any = 1
    for _ in range(5000):
        value = [value]
    return value


VALUES: dict[str, Callable[[], Any]] = {
    "half a pair": lambda: "\ud800",
    "half a pair in a key": lambda: {"\ud800": 1},
    "NaN": lambda: float("nan"),
    "bytes": lambda: b"\xff",
    "a tuple as a key": lambda: {(1, 2): 3},
    "an integer of 5,000 digits": lambda: 10**5000,
    "deep": deep,
    "itself": cyclic,
    "an object": object,
}


@pytest.mark.parametrize("what", VALUES)
def test_a_mapping_without_a_json_form_is_refused_on_a_multiplexed_socket(what: str) -> None:
    with pytest.raises(InvalidRequest, match="no JSON form"):
        encode({"held": VALUES[what]()})


@pytest.mark.parametrize("what", [what for what in VALUES if "half" not in what and what != "NaN"])
def test_and_on_a_plain_one(what: str) -> None:  # the server refuses the others, as OpenEnv's client sends them
    with pytest.raises(InvalidRequest, match="no JSON form"):
        SocketClient.encode({"type": "step", "data": {"held": VALUES[what]()}})


@pytest.mark.parametrize("what", ["half a pair in a key", "bytes", "deep", "itself", "an object"])
def test_a_typed_action_without_a_json_form_is_refused(what: str) -> None:
    with pytest.raises(InvalidRequest, match="AnyAction has no JSON form"):
        Codec(AnyAction).action(AnyAction(held=VALUES[what]()))


@pytest.mark.parametrize("payload", [[1], None, "x", {"observation": 5}])
def test_a_payload_of_another_form_is_the_servers_fault(payload: Any) -> None:
    with pytest.raises(FrameInvalid, match="no object"):
        Codec(observation_cls=AnyAction).result(payload)


async def test_a_call_that_was_refused_changes_nothing(stock_url: str) -> None:
    async with ErrataClient(stock_url) as client:
        await client.reset()
        for what in ("bytes", "itself", "deep", "an object"):
            with pytest.raises(InvalidRequest):
                await client.step({"text": VALUES[what]()})
        await client.step({"text": "a"})
        assert client.t == 1

"""Reads of episodes of any length, and posts of many rewards, take turns with other requests.

The watch on event loops (`tests.loop_watch`) fails a test in which one of them does not.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from msgspec.structs import replace
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.bundle import DeliveryRecord
from errata_server.app import create_fastapi_app
from errata_server.episodes import bundles
from errata_server.journal.base import DeliveryRow
from errata_server.runtime.store import Store
from errata_server.settings import Settings

from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation

TURNS = 100_000


@pytest.fixture
def client() -> Iterator[TestClient]:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, max_concurrent_envs=8, runtime=simulated(Settings())
    )
    with TestClient(app) as client:
        yield client


def test_an_episode_of_a_hundred_thousand_turns_is_listed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 1})
    short = client.get(f"/episodes/{eid}").json()
    assert [turn["t"] for turn in short["turns"]] == [0, 1] and list(short)[-2:] == ["turns", "agent_text_version"]
    owned_turns = Store.owned_turns

    async def many(self: Store, eid: str, principal: str | None, attached: object) -> object:
        row, (first, step) = await owned_turns(self, eid, principal)
        return row, [first, *(replace(step, t=t) for t in range(1, TURNS))]

    monkeypatch.setattr(Store, "owned_turns", many)
    long = client.get(f"/episodes/{eid}").json()
    assert (long["deliveries"], len(long["turns"])) == (TURNS, TURNS)
    assert long["turns"][:2] == short["turns"] and long["turns"][-1]["t"] == TURNS - 1


def test_thousands_of_rewards_are_posted_and_read(client: TestClient) -> None:
    with connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
    posts = [{"t": 0, "value": n / 2, "source": "judge", "reward_id": f"r{n}"} for n in range(9_000)]
    made = client.post(f"/episodes/{eid}/rewards", json=posts).json()
    assert [reward["reward_id"] for reward in made] == [post["reward_id"] for post in posts]
    assert client.get(f"/episodes/{eid}/rewards").json() == made


def test_thousands_of_wrong_values_are_one_answer(client: TestClient) -> None:
    with connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        wrong = socket.ask("step", {"n": [["x"]] * 20_000})
        assert wrong["data"]["code"] == "VALIDATION_ERROR" and len(json.dumps(wrong)) < 20_000
    answer = client.post(f"/episodes/{eid}/rewards", json=[{}] * 20_000)
    assert answer.status_code == 422 and len(answer.content) < 20_000
    answer = client.post("/episodes/delete", json={"eids": [1] * 40_000})
    assert answer.status_code == 422 and len(answer.content) < 20_000


MIB = 1024**2


class TextAction(Action):
    text: str = ""


class TextObservation(Observation):
    text: str = ""


class EchoEnvironment(Environment[TextAction, TextObservation, State]):
    """Returns what it gets."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> TextObservation:
        return TextObservation()

    async def step_async(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        return TextObservation(text=action.text)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> TextObservation:
        raise NotImplementedError

    def step(self, action: TextAction, timeout_s: float | None = None, **_: Any) -> TextObservation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


@pytest.mark.parametrize(
    "text", ["x" * 15 * MIB, "é\n" * (2 * MIB - 99), 'a,"\\' * (2 * MIB)], ids=["ascii", "utf-8", "escapes"]
)
def test_large_actions_and_observations_take_turns(text: str, tmp_path: Path) -> None:
    app = create_fastapi_app(EchoEnvironment, TextAction, TextObservation, max_concurrent_envs=8, data_dir=tmp_path)
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        seen = socket.ask("step", {"text": text})
        assert seen["data"]["observation"]["text"] == text
        assert socket.ask("state", {"t": 1})["data"]["observation"]["text"] == text
        assert json.loads(client.get(f"/episodes/{eid}/states/1").content)["observation"]["text"] == text
        lines = client.get(f"/episodes/{eid}/bundle").text.splitlines()
        assert any(len(line) > len(text) for line in lines)


def test_the_record_of_a_large_delivery_is_made_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    delivery_record = bundles.delivery_record

    def watched(row: DeliveryRow) -> DeliveryRecord:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            made.append(True)
        else:
            made.append(False)
        return delivery_record(row)

    monkeypatch.setattr(bundles, "delivery_record", watched)
    app = create_fastapi_app(EchoEnvironment, TextAction, TextObservation, max_concurrent_envs=8, data_dir=tmp_path)
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"text": "x" * bundles.INLINE_CHARACTERS})
        assert len(client.get(f"/episodes/{eid}/bundle").content) > bundles.INLINE_CHARACTERS
    assert made == [False, True]

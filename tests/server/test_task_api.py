"""The Task API and attaching by id work alike at the root, under the environment's name, below mounts, and composed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from openenv.core.env_server import create_app as upstream_create_app

from errata_server import adopt
from errata_server.app import create_fastapi_app
from errata_server.app.multi_environment import compose
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation

TASKS = [{"id": f"train-{index}"} for index in range(5)]


class Quiz(CountEnvironment):
    """Has tasks; one method of the provider is async, as it may be."""

    def list_splits(self) -> list[Any]:
        return ["train", {"name": "test", "type": "test"}]

    def list_tasks(self, split: str) -> list[Any]:
        return TASKS if split == "train" else []

    async def num_tasks(self, split: str) -> int:
        return len(self.list_tasks(split))

    def get_task(self, split: str, index: int) -> Any:
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        return self.list_tasks(split)[start:stop]


def quiz(runtime: Runtime | None = None) -> FastAPI:
    return create_fastapi_app(
        Quiz, CountAction, CountObservation, env_name="quiz", max_concurrent_envs=2, runtime=runtime
    )


def mounted() -> FastAPI:
    outer = FastAPI()
    outer.mount("/some/where", quiz())
    return outer


def adopted() -> FastAPI:
    return adopt(upstream_create_app(Quiz, CountAction, CountObservation, env_name="quiz", max_concurrent_envs=2))


def composed() -> FastAPI:
    runtime = Runtime(Settings())
    count = create_fastapi_app(CountEnvironment, CountAction, CountObservation, env_name="count", runtime=runtime)
    return compose({"quiz": quiz(runtime), "count": count}, runtime, replayable=True)


PLACES = {
    "root": (quiz, "/quiz"),
    "short": (quiz, ""),
    "name": (quiz, "/quiz/quiz"),
    "mount": (mounted, "/some/where/quiz"),
    "mount, short": (mounted, "/some/where"),
    "adopted": (adopted, "/quiz"),
    "adopted, name": (adopted, "/quiz/quiz"),
    "composed": (composed, "/quiz"),
    "composed, other case": (composed, "/QUIZ"),
    "composed, name": (composed, "/quiz/quiz"),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[TestClient, str]]:
    """A client, and the path in front of the Task API's last segment."""
    make, prefix = PLACES[request.param]
    with TestClient(make()) as client:
        yield client, prefix


def test_tasks_are_listed_counted_and_fetched(place: tuple[TestClient, str]) -> None:
    client, prefix = place
    splits = client.get(f"{prefix}/splits").json()
    assert [split["name"] for split in splits] == ["train", "test"]

    def ask(what: str, **body: Any) -> Any:
        return client.post(f"{prefix}/{what}", json={"split": "train", **body})

    assert ask("tasks").json() == {"tasks": TASKS, "env_name": "quiz"}
    assert ask("num_tasks").json() == {"num_tasks": 5}
    assert ask("task", index=3).json() == {"task": TASKS[3]}
    assert ask("task_range", start=1, stop=3).json() == {"tasks": TASKS[1:3]}
    assert ask("task", index=5).status_code == 400
    assert ask("task", index="x").status_code == 422
    assert client.post(f"{prefix}/tasks", json={}).status_code == 422


def test_an_unknown_environment_is_not_found_and_one_without_tasks_says_so() -> None:
    with TestClient(composed()) as client:
        assert client.get("/nothing/splits").status_code == 404
        for prefix in ("/count", "/count/count"):
            assert client.get(f"{prefix}/splits").status_code == 501
            assert client.post(f"{prefix}/task", json={"split": "train", "index": 0}).status_code == 501
        assert client.get("/quiz/count/splits").status_code == 404
    with TestClient(quiz()) as client:
        assert client.get("/nothing/splits").status_code == 404


def test_no_instance_of_the_task_api_is_left(place: tuple[TestClient, str]) -> None:
    client, prefix = place
    made, closed = Quiz.made, Quiz.closed
    client.get(f"{prefix}/splits")
    client.post(f"{prefix}/task", json={"split": "train", "index": 9})
    assert (Quiz.made - made, Quiz.closed - closed) == (2, 2)


@pytest.mark.parametrize(
    ("make", "prefix"),
    [(quiz, ""), (quiz, "/quiz"), (mounted, "/some/where"), (adopted, ""), (adopted, "/quiz"), (composed, "/quiz")],
)
def test_a_session_that_was_given_out_is_attached_by_its_id(make: Any, prefix: str) -> None:
    create = {"jsonrpc": "2.0", "method": "openenv/session/create", "params": {}, "id": 1}
    with TestClient(make()) as client:
        sid = client.post(f"{prefix}/mcp", json=create).json()["result"]["session_id"]
        with connect(client, f"{prefix}/ws?session_id={sid}") as socket:
            socket.ask("reset", {})
            assert socket.ask("step", {"n": 3})["data"]["observation"]["n"] == 3
        with connect(client, f"{prefix}/ws?session_id={sid}") as socket:
            assert socket.ask("step", {"n": 4})["data"]["observation"]["n"] == 7
        with client.websocket_connect(f"{prefix}/ws?session_id={'0' * len(sid)}") as ws:
            assert ws.receive_json()["data"]["code"] == "SESSION_ERROR"

"""What is refused is named: the field, the query parameter, the environment, and what there is instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError
from errata_server.app import create_fastapi_app
from errata_server.doors.input_errors import named_fields

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation
from .local_server import LocalServer

ONE = "tests.server.environments:CountEnvironment"


@pytest.fixture
def client() -> Any:
    with TestClient(create_fastapi_app(CountEnvironment, CountAction, CountObservation)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("method", "path", "takes"),
    [
        ("GET", "/episodes?reward=1", "limit, cursor, sort, order, environment, task, status, error_kind"),
        ("GET", "/episodes?limit=2&Limit=3", "limit, cursor"),
        ("GET", "/episodes/{eid}?limit=2", "no parameters"),
        ("GET", "/episodes/{eid}/states/0?raw=1", "no parameters"),
        ("GET", "/episodes/{eid}/rewards?source=me", "no parameters"),
        ("GET", "/episodes/{eid}/bundle?parents=1", "also, ancestors"),
        ("POST", "/episodes/{eid}/rewards?dry=1", "no parameters"),
        ("DELETE", "/episodes/{eid}?dry_run=1", "no parameters"),
    ],
)
def test_an_unknown_parameter_is_refused_and_the_known_ones_are_named(
    method: str, path: str, takes: str, client: TestClient
) -> None:
    with connect(client) as socket:
        eid = socket.ask("reset")["eid"]
        told = client.request(method, path.format(eid=eid), json=None if method == "GET" else {})
        assert told.status_code == 422 and told.json()["code"] == "VALIDATION_ERROR"
        assert "unknown query parameter" in told.json()["message"] and takes in told.json()["message"]
        assert client.get(f"/episodes/{eid}").status_code == 200  # nothing was deleted


def test_a_wrong_field_is_named_on_every_door(tmp_path: Path, client: TestClient) -> None:
    with connect(client) as socket:
        told = socket.ask("step", {"n": "x"})["data"]
        assert told["code"] == "VALIDATION_ERROR" and "n: Input should be" in told["message"]
        assert "q: Extra inputs" in socket.ask("step", {"q": 1})["data"]["message"]
        eid = socket.ask("reset")["eid"]
    told = client.post(f"/episodes/{eid}/rewards", json={"t": -1, "value": "x"}).json()["message"]
    assert "0.t: " in told and "greater than or equal to 0" in told
    assert "request_id: " in client.post(f"/episodes/{eid}/fork", json={"t": 1}).json()["message"]
    assert "eids: " in client.post("/episodes/delete", json={"eids": 3}).json()["message"]
    assert "n: " in client.post("/step", json={"action": {"n": "x"}}).json()["message"]
    with LocalServer(ONE, tmp_path) as server, ErrataClient(server.url, mux=True).sync() as session:
        session.reset()
        with pytest.raises(ErrataError, match="n: Input should be a valid integer"):
            session.step({"n": "x"})


def test_many_wrong_fields_are_counted_and_long_names_cut() -> None:
    wrong = [{"loc": ("a" * 10_000, n), "msg": "m"} for n in range(10)]
    told = named_fields(wrong)
    assert told.endswith("; and 7 more") and len(told) < 2_000
    assert named_fields([]) == "" and named_fields([{"msg": "Value error"}]) == "Value error"


@pytest.mark.parametrize("path", ["cuont/health", "cuont", "cuont/episodes", "cuont/splits"])
def test_a_wrong_name_is_an_error_that_lists_the_names(path: str, tmp_path: Path) -> None:
    with LocalServer([ONE, "tests.server.environments:PinnedEnvironment"], tmp_path) as server:
        answer = httpx.get(f"{server.url}/{path}")
        assert answer.status_code == 404
        assert all(name in answer.text.lower() for name in ("countenvironment", "pinnedenvironment"))
        for mux in (True, False, None):
            client = ErrataClient(f"{server.url}/cuont", mux=mux).sync()
            with pytest.raises((ErrataError, ConnectionError), match="PinnedEnvironment"):
                client.reset()
            client.close()

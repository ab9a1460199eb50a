"""The plain door: upstream's messages, our additions, and whatever else a client may send (PROTOCOL A, C)."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from errata_server.app import create_fastapi_app
from errata_server.settings import Settings

from .conftest import connect, simulated
from .environments import CountAction, CountEnvironment, CountObservation, PinnedEnvironment


def test_a_vanilla_client_sees_upstreams_frames_only(client: TestClient) -> None:
    with connect(client, told=False) as socket:
        assert socket.ask("reset", {}) == {
            "type": "observation",
            "data": {
                "observation": {
                    "metadata": {}, "n": 0, "text": "go", "error_kind": None, "hint_template_key": None,
                    "error_site": None, "error_sites": [], "severity": None,
                },
                "reward": None,
                "done": False,
            },
        }  # fmt: skip
        assert set(socket.ask("step", {"n": 2})) == {"type", "data"}
        assert socket.ask("state") == {"type": "state", "data": {"episode_id": "count", "step_count": 1}}


def test_after_the_probe_frames_carry_eid_t_and_the_digest_of_the_exact_data_bytes(client: TestClient) -> None:
    with connect(client) as socket:
        socket.ask("reset", {})
        raw = socket.raw('{"type":"step","data":{"n":3}}')
        frame = json.loads(raw)
        assert frame["t"] == 1
        data = raw[raw.index('"data":') + len('"data":') : -1]
        assert frame["digest"] == "sha256:" + hashlib.sha256(data.encode()).hexdigest()


def test_state_at_returns_the_bytes_of_each_delivery_and_leaves_step_count_alone(client: TestClient) -> None:
    with connect(client) as socket:
        sent = [socket.raw('{"type":"reset","data":{}}')]
        sent += [socket.raw(json.dumps({"type": "step", "data": {"n": n}})) for n in range(1, 30)]
        for t, raw in enumerate(sent):
            found = socket.raw(json.dumps({"type": "state", "data": {"t": t}}))
            assert found[found.index('"data":') :] == raw[raw.index('"data":') :]
            assert json.loads(found)["kind"] == ("step" if t else "reset")
        assert socket.ask("state")["data"]["step_count"] == 29


def test_earlier_episodes_of_a_session_stay_readable(client: TestClient) -> None:
    with connect(client) as socket:
        first = socket.ask("reset", {})
        socket.ask("step", {"n": 5})
        second = socket.ask("reset", {})
        assert first["eid"] != second["eid"] and second["t"] == 0
        found = socket.ask("state", {"t": 1, "eid": first["eid"]})
        assert found["data"]["observation"]["n"] == 5
        assert socket.ask("state", {"t": 1})["data"]["code"] == "T_OUT_OF_RANGE"


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ({"t": 2}, "T_OUT_OF_RANGE"),
        ({"t": -1}, "VALIDATION_ERROR"),
        ({"t": "1"}, "VALIDATION_ERROR"),
        ({"t": True}, "VALIDATION_ERROR"),
        ({}, "VALIDATION_ERROR"),
        ({"t": 0, "more": 1}, "VALIDATION_ERROR"),
        ({"t": 0, "eid": "ep_nobody"}, "UNKNOWN_EPISODE"),
        ([], "VALIDATION_ERROR"),
        ({"t": 2**70}, "VALIDATION_ERROR"),
    ],
)
def test_a_wrong_state_at_request_is_told_why_and_costs_nothing(client: TestClient, data: Any, code: str) -> None:
    with connect(client) as socket:
        socket.ask("reset", {})
        socket.ask("step", {"n": 1})
        error = socket.ask("state", data)
        assert error["type"] == "error" and error["data"]["code"] == code and error["data"]["message"]
        assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 2


def test_state_at_before_any_reset_says_so(client: TestClient) -> None:
    with connect(client) as socket:
        assert socket.ask("state", {"t": 0})["data"]["code"] == "NO_RESET"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[1]", "VALIDATION_ERROR"),
        ("3", "VALIDATION_ERROR"),
        ("null", "VALIDATION_ERROR"),
        ("{", "INVALID_JSON"),
        ("", "INVALID_JSON"),
        ('{"type":"step","data":{"n":NaN}}', "INVALID_JSON"),
        ('{"type":"step","type":"reset","data":{}}', "INVALID_JSON"),
        ("[" * 40_000, "INVALID_JSON"),
        ("[" * 100_000, "FRAME_TOO_LARGE"),
        ("[" * 100_000, "FRAME_TOO_LARGE"),
        ('{"type":"step","data":' + '{"a":' * 2000 + "1" + "}" * 2001, "INVALID_JSON"),
        ('{"type":"step","data":' + '{"a":' * 300 + "1" + "}" * 301, "INVALID_JSON"),
        ('{"type":"step","data":' + '{"a":' * 200 + "1" + "}" * 201, "VALIDATION_ERROR"),
        ('{"type":"nonsense"}', "UNKNOWN_TYPE"),
        ('{"type":["x"]}', "UNKNOWN_TYPE"),
        ('{"data":{}}', "UNKNOWN_TYPE"),
        ('{"type":"step"}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"n":"x"}}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"n":1},"id":4}', "VALIDATION_ERROR"),
        ('{"type":"reset","data":3}', "VALIDATION_ERROR"),
        ('{"type":"step","data":{"do":"\\ud800"}}', "VALIDATION_ERROR"),
        ('{"type":"close","data":{}}', "VALIDATION_ERROR"),
    ],
)
def test_bad_input_gets_an_error_with_a_code_and_the_session_lives(client: TestClient, text: str, code: str) -> None:
    with connect(client) as socket:
        socket.ask("reset", {})
        error = json.loads(socket.raw(text))
        assert (error["type"], error["data"]["code"]) == ("error", code)
        assert socket.ask("step", {"n": 7})["data"]["observation"]["n"] == 7


def test_a_binary_frame_is_read_as_text_or_refused(client: TestClient) -> None:
    with connect(client) as socket:
        socket.ws.send_bytes(b'{"type":"reset","data":{}}')
        assert json.loads(socket.ws.receive_text())["type"] == "observation"
        socket.ws.send_bytes(b"\xff\xfe")
        assert json.loads(socket.ws.receive_text())["data"]["code"] == "INVALID_JSON"


def test_a_frame_over_the_limit_is_refused_and_the_session_lives() -> None:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, runtime=simulated(Settings(max_frame=1000))
    )
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        assert socket.ask("step", {"do": "x" * 2000})["data"]["code"] == "FRAME_TOO_LARGE"
        assert socket.ask("step", {"n": 1})["t"] == 1


def test_a_nan_reward_is_sent_as_null(client: TestClient) -> None:
    with connect(client) as socket:
        socket.ask("reset", {})
        assert socket.ask("step", {"do": "nan"})["data"]["reward"] is None


def test_a_marked_turn_says_its_t_in_the_payload_and_the_listing(client: TestClient) -> None:
    with connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 1})
        marked = socket.ask("step", {"do": "mark"})["data"]
        assert marked["observation"]["error_site"]["t"] == 2
        assert marked["observation"]["error_sites"][0]["t"] == 2
        assert marked["metadata"]["error_kind"] == "nonzero_exit"
        assert marked["metadata"]["error_site"]["t"] == 2
    listing = client.get(f"/episodes/{eid}").json()
    assert [turn["error_kind"] for turn in listing["turns"]] == [None, None, "nonzero_exit"]
    assert listing["error_kinds"] == {"nonzero_exit": 1}


def test_an_exception_of_the_environment_is_an_error_frame_without_observation_or_t(client: TestClient) -> None:
    with connect(client) as socket:
        socket.ask("reset", {})
        error = socket.ask("step", {"do": "raise"})
        assert error == {"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}
        assert socket.ask("step", {"n": 1})["t"] == 1


def test_a_broken_machine_rolls_the_session_back_to_its_last_commit(client: TestClient) -> None:
    with connect(client) as socket:
        socket.ask("reset", {})
        socket.ask("step", {"n": 5})
        error = socket.ask("step", {"n": 100, "do": "break"})
        assert error["data"]["code"] == "SANDBOX_FAILED" and "observation" not in error["data"]
        after = socket.ask("step", {"n": 1})
        assert after["t"] == 2 and after["data"]["observation"]["n"] == 6
        assert socket.ask("state")["data"]["step_count"] == 2


def test_a_step_past_the_deadline_is_infrastructure_and_rolls_back() -> None:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, runtime=simulated(Settings(step_timeout_s=0.2))
    )
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        socket.ask("step", {"n": 5})
        assert socket.ask("step", {"n": 100, "do": "hang"})["data"]["code"] == "TIMEOUT"
        assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 6


def test_capacity_is_refused_in_upstreams_words() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=1)
    with TestClient(app) as client, connect(client, told=False) as first:
        first.ask("reset", {})
        with client.websocket_connect("/ws") as ws:
            refused = json.loads(ws.receive_text())
        assert refused["data"]["code"] == "CAPACITY_REACHED"
        assert (refused["data"]["active_sessions"], refused["data"]["max_sessions"]) == (1, 1)


def test_a_pinned_environment_keeps_its_thread_and_offers_no_fork() -> None:
    app = create_fastapi_app(PinnedEnvironment, CountAction, CountObservation, max_concurrent_envs=2)
    with TestClient(app) as client, connect(client) as socket:
        told = socket.ask("capabilities")["data"]
        assert told["recovery"] == "none" and "fork" not in told["extensions"] and told["extensions"]["state_at"] == 1
        eid = socket.ask("reset", {})["eid"]
        for n in range(1, 20):
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == n
        assert socket.ask("state")["data"]["step_count"] == 19
        assert socket.ask("state", {"t": 7})["data"]["observation"]["n"] == 7
        refused = client.post(f"/episodes/{eid}/fork", json={"t": 7, "request_id": "r"})
        assert refused.status_code == 501 and refused.json()["code"] == "NOT_SUPPORTED"


def test_production_mode_has_no_replay() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, mode="production")
    with TestClient(app) as client, connect(client) as socket:
        assert socket.ask("capabilities")["data"]["extensions"] == {"error_markers": 2, "mux": 1, "labels": 2}
        eid = socket.ask("reset", {})["eid"]
        assert socket.ask("state", {"t": 0})["data"]["code"] == "VALIDATION_ERROR"  # what a vanilla server answers
        for path in ("/episodes", f"/episodes/{eid}", f"/episodes/{eid}/states/0"):
            assert client.get(path).status_code == 404
        assert client.post(f"/episodes/{eid}/fork", json={"t": 0, "request_id": "r"}).status_code == 404


# -- reset to a state(t) --------------------------------------------------------------------------------------------


def injected(eid: str, t: Any, **more: Any) -> dict[str, Any]:
    return {"injected_state": {"episode_id": eid, "t": t}, **more}


def test_a_reset_to_a_state_goes_on_from_there(client: TestClient) -> None:
    with connect(client) as socket:
        first = socket.ask("reset", {})
        at = [socket.ask("step", {"n": 5}) for _ in range(3)]
        again = socket.ask("reset", injected(first["eid"], 2))
        assert (again["type"], again["t"], again["data"]) == ("observation", 0, at[1]["data"])
        assert again["eid"] != first["eid"] and again["digest"] == at[1]["digest"]
        reply = socket.ask("step", {"n": 1})
        assert (reply["data"]["observation"]["n"], reply["t"], reply["eid"]) == (11, 1, again["eid"])
        assert socket.ask("state", {"t": 3, "eid": first["eid"]})["data"] == at[2]["data"]


def test_another_session_goes_on_from_an_episode_of_its_principal(client: TestClient) -> None:
    with connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 7})
    with connect(client, told=False) as socket:
        assert socket.ask("reset", injected(eid, 1))["data"]["observation"]["n"] == 7
        assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 8


@pytest.mark.parametrize(("t", "code"), [(9, "T_OUT_OF_RANGE"), (0, "UNKNOWN_EPISODE")])
def test_a_reset_to_a_state_that_is_not_there_is_an_error_and_resets_nothing(
    client: TestClient, t: int, code: str
) -> None:
    with connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 5})
        told = socket.ask("reset", injected(eid if t else "ep_nobody", t))
        assert (told["type"], told["data"]["code"]) == ("error", code)
        reply = socket.ask("step", {"n": 1})
        assert (reply["eid"], reply["t"], reply["data"]["observation"]["n"]) == (eid, 2, 6)


def test_a_reset_to_a_state_of_an_environment_that_cannot_is_refused_and_resets_nothing() -> None:
    app = create_fastapi_app(PinnedEnvironment, CountAction, CountObservation)
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 5})
        assert socket.ask("reset", injected(eid, 1))["data"]["code"] == "NOT_SUPPORTED"
        assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 6


@pytest.mark.parametrize("state", [{"episode_id": "e"}, {"episode_id": "e", "t": 1, "more": 2}, "e", {"t": 1}])
def test_any_other_injected_state_is_the_environments(client: TestClient, state: Any) -> None:
    with connect(client) as socket:
        assert socket.ask("reset", {"injected_state": state})["data"]["observation"]["n"] == 0


def test_in_production_an_injected_state_is_the_environments() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, mode="production")
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 5})
        assert socket.ask("reset", injected(eid, 1))["data"]["observation"]["n"] == 0


def test_a_stateless_reset_continues_nothing(client: TestClient) -> None:
    answer = client.post("/reset", json=injected("ep_nobody", 1))
    assert answer.status_code == 422 and "/episodes/{eid}/fork" in answer.json()["message"]


def test_a_stateless_reset_reads_nan_as_upstreams_does(client: TestClient) -> None:
    assert client.post("/reset", content=b'{"t":NaN}', headers={"content-type": "application/json"}).status_code == 200


# -- one instance -----------------------------------------------------------------------------------------------------


class Single(CountEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = False


def capacity_told(cls: type[CountEnvironment], **more: Any) -> dict[str, Any]:
    app = create_fastapi_app(cls, CountAction, CountObservation, **more)
    with TestClient(app) as client, contextlib.ExitStack() as stack:
        while True:
            ws = stack.enter_context(client.websocket_connect("/ws"))
            ws.send_text('{"type":"capabilities"}')
            told: dict[str, Any] = json.loads(ws.receive_text())
            if told["type"] == "error":
                return told["data"]


def test_a_full_environment_is_told_what_its_class_can() -> None:
    single = capacity_told(Single)
    assert "SUPPORTS_CONCURRENT_SESSIONS" in single["message"] and "--max-sessions" not in single["message"]
    assert "parent" in single["message"] and "retry_after" not in single
    one = capacity_told(CountEnvironment, max_concurrent_envs=1)
    assert "--max-sessions" in one["message"] and "retry_after" not in one
    two = capacity_told(CountEnvironment, max_concurrent_envs=2)
    assert "--max-sessions" in two["message"] and two["retry_after"] > 0

"""A turn as people look at it: whatever an environment and an agent put into it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.bundle import DeliveryRecord, FailureRecord
from errata_protocol.payload import digest
from errata_protocol.task_names import MAX_BYTES, MAX_NAME, task_of
from errata_protocol.turns import turn_from, turn_of


def site(field: str | None, *span: int, **more: Any) -> dict[str, Any]:
    return {"error_site": {"action_field": field, "action_span": list(span), **more}}


@pytest.mark.parametrize(
    ("kind", "action", "observation", "shown", "place"),
    [
        ("step", {"command": "cat a.txt"}, {}, "cat a.txt", ""),
        ("step", {"tool": "run", "command": "cat a"}, site("command", 4, 5), "cat «a»", "«a»"),
        ("step", {"tool": "run", "command": "cat a"}, site(None, 4, 5), "cat «a»", "«a»"),
        ("step", {"tool": "run", "command": "é cat ü"}, site("command", 6, 7), "é cat «ü»", "«ü»"),
        ("step", {"tool": "read_file", "path": "a"}, site("path", 0, 1), "read_file «a»", "«a»"),
        ("step", {"tool": "write_file", "path": "a", "content": "x\n" * 9}, {}, "write_file a (9 lines)", ""),
        ("step", {"tool": "submit", "command": ""}, {}, "submit", ""),
        ("step", {"tool": "search", "command": "x"}, site("tool", 0, 6), "«search» x", "«search»"),
        ("step", {"tool": "click", "x": 1, "y": 2}, {}, 'click {"x": 1, "y": 2}', ""),
        ("step", {"column": 3, "metadata": {}}, {}, '{"column": 3}', ""),
        ("step", {"message": "hi", "metadata": {}}, {}, "hi", ""),
        ("step", {"type": "call_tool", "tool_name": "sh", "arguments": {"c": "ls"}}, {}, 'sh {"c": "ls"}', ""),
        ("step", {"tool_name": "sh", "arguments": {"c": "ls"}}, site("c", 0, 2), 'sh {"c": "«ls»"}', "«ls»"),
        ("mcp", {"method": "tools/call", "params": {"name": "sh", "arguments": {}}}, {}, "sh {}", ""),
        ("mcp", {"params": {"name": "sh", "arguments": {"c": "ls"}}}, site("c", 0, 2), 'sh {"c": "«ls»"}', "«ls»"),
        ("reset", {"task_id": "a", "seed": None}, {}, 'reset {"task_id": "a"}', ""),
        ("reset", {}, {}, "reset", ""),
        ("reset", None, {}, "reset", ""),
        ("step", "left", {}, "left", ""),
        ("step", [1, 2], {}, "[1, 2]", ""),
        ("step", {"command": "x"}, site("command", 0, 9), "x", "in command"),
        ("step", {"command": "x"}, site("command", -1, 1), "x", "in command"),
        ("step", {"command": "x"}, site("command", 0, 1, file="a.py", line=3), "«x»", "a.py:3"),
        ("step", {"command": "x"}, {"error_site": {"test_id": "t::a", "file": "a.py"}}, "x", "t::a a.py"),
        ("step", {"command": "x"}, {"error_site": "here"}, "x", ""),
    ],
)
def test_an_action_is_one_text_and_the_wrong_part_is_marked(
    kind: str, action: Any, observation: dict[str, Any], shown: str, place: str
) -> None:
    turn = turn_from(1, kind, action, {"observation": observation})
    assert (turn.action_text, turn.site_text) == (shown, place)


@pytest.mark.parametrize(
    ("payload", "outcome"),
    [
        ({"observation": {"exit_code": 0}}, "0"),
        ({"observation": {"exit_code": None, "timed_out": True}}, "timed out"),
        ({"observation": {"exit_code": True, "error": "no such tool"}}, "no such tool"),
        ({"observation": {"error": {"error_type": "tool_not_found", "message": "m"}}}, "tool_not_found"),
        ({"jsonrpc": "2.0", "error": {"code": -32601, "message": "no method"}}, "no method"),
        ({"jsonrpc": "2.0", "result": {"isError": True}}, "tool error"),
        ({"observation": {"error": ""}}, ""),
        ({"observation": 3}, ""),
        ([], ""),
        (None, ""),
    ],
)
def test_an_outcome_is_the_exit_code_or_the_error(payload: Any, outcome: str) -> None:
    assert turn_from(1, "step", {}, payload).outcome_text == outcome


@pytest.mark.parametrize(
    "metadata",
    [
        {"error_kind": "path_not_found", "error_site": {"action_field": "command", "action_span": [4, 5]}},
        {"error_info": {"kind": "path_not_found", "sites": [{"action_field": "command", "action_span": [4, 5]}]}},
    ],
)
def test_an_error_that_stands_in_metadata_alone_is_shown(metadata: dict[str, Any]) -> None:
    turn = turn_from(1, "step", {"command": "cat a"}, {"observation": {}, "metadata": metadata})
    assert (turn.error_kind, turn.action_text) == ("path_not_found", "cat «a»")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(("command", "tool", "params")), inner),
    max_leaves=8,
)
NAMES = ("error_site", "action_field", "action_span", "exit_code", "error", "duration_s", "reward", "error_kind")


@given(JSON, st.dictionaries(st.sampled_from(NAMES), JSON), st.sampled_from(("reset", "step", "mcp")))
def test_no_value_of_others_is_an_error(action: Any, observation: dict[str, Any], kind: Any) -> None:
    text = json.dumps({"observation": {**observation, "error_site": observation}})
    where = {"eid": "ep_x", "kind": kind, "request": json.dumps(action), "created": 1.0}
    for record in (
        DeliveryRecord(t=1, payload=text, digest=digest(text.encode()), **where),
        FailureRecord(after_t=1, code="X", payload=text, digest=digest(text.encode()), **where),
    ):
        turn = turn_of(record)
        assert all(isinstance(text, str) for text in (turn.action_text, turn.site_text, turn.outcome_text))
        json.dumps(turn.shown)


@pytest.mark.parametrize(
    ("observation", "request_", "named"),
    [
        ({"task_id": "a"}, {"task_id": "b"}, "a"),
        ({"instance_id": "i", "task_id": "a"}, {}, "i"),
        ({"task_id": ""}, {"task_id": "b"}, "b"),
        ({"task": {"name": "x"}}, {}, None),
        ({"task": 7}, {}, "7"),
        ({"task": True}, {}, None),
        ({"task_id": "x" * 999}, {}, "x" * MAX_NAME),
        ({"task_id": "a", "text": "x" * MAX_BYTES}, {"task_id": "b"}, "b"),
        ([1], [2], None),
        ("x", 3, None),
    ],
)
def test_a_task_is_what_the_first_observation_names(observation: Any, request_: Any, named: str | None) -> None:
    payload = json.dumps({"observation": observation}).encode()
    assert task_of(payload, json.dumps(request_).encode()) == named


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_no_bytes_are_an_error_of_a_task(payload: bytes, request: bytes) -> None:
    assert isinstance(task_of(payload, request), str | None)

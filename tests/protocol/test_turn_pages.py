"""What a page of turns says of a delivery: little of a large payload, and the same as of the whole one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from errata_protocol import turn_pages
from errata_protocol.payload import digest
from errata_protocol.replay import PlayedTurn, TurnRecord
from errata_protocol.rollouts import META_KEY, marker_of
from errata_protocol.turn_pages import MAX_ACTION_BYTES, MAX_ACTION_TEXT, MAX_ERROR, action_of, played_turn
from errata_protocol.turns import turn_from

SITE = {"t": 1, "action_field": "command", "action_span": [4, 9], "file": "a.py", "line": 3, "message": "no"}
MARKED = {"error_kind": "path_not_found", "error_site": SITE, "hint_template_key": "fs.missing", "severity": "error"}
INFO = {"error_info": {"kind": "invalid_args", "message": "m", "sites": [{"file": "a.py", "line": 3}]}}


def played(payload: Any, request: bytes = b"{}", kind: str | None = "path_not_found", **more: Any) -> PlayedTurn:
    encoded = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    record = TurnRecord(t=1, kind="step", error_kind=kind, digest=digest(encoded))
    given = {"created": 10.0, "before": 7.5, "late_rewards": 2, **more}
    return played_turn(record, request=request, payload=encoded, **given)


PAYLOADS: list[Any] = [
    {"observation": {**MARKED, "exit_code": 2, "duration_s": 0.25, "output": "x" * 100}, "reward": 1.0, "done": True},
    {"observation": {"metadata": MARKED, "timed_out": True}},
    {"metadata": MARKED, "observation": {}},
    {"observation": {"metadata": INFO, "error": "boom"}},
    {"observation": {"error": {"error_type": "FileNotFoundError", "message": "no"}}},
    {"jsonrpc": "2.0", "id": 1, "result": {"isError": True, "_meta": {META_KEY: MARKED}, "content": ["x" * 100]}},
    {"jsonrpc": "2.0", "id": 1, "error": {"code": -32000, "message": "no", "data": {META_KEY: MARKED}}},
    {"observation": {"error_kind": 5, "exit_code": True, "duration_s": "long", "error_site": []}},
    {"observation": {"error_kind": "own", "error_site": {"unknown": 1}}},
    {"observation": [1, 2]},
    {"observation": None, "result": "text", "error": "text"},
    {"error": 7},
    [],
    5,
    "text",
    None,
    {},
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_fields_that_are_decoded_say_what_the_whole_payload_says(payload: Any) -> None:
    whole, marker = turn_from(1, "step", None, payload), marker_of(payload)
    turn = played(payload, kind=marker.error_kind if marker is not None else None)
    assert (turn.exit_code, turn.duration_s, turn.error) == (whole.exit_code, whole.duration_s, whole.error)
    assert turn.severity == (marker.severity if marker is not None else None)
    assert turn.error_site == (marker.error_site if marker is not None else None)


@pytest.mark.parametrize("payload", [b"", b"{", b"\xff", b"[" * 5000, b'{"observation":' * 3000, b'{"a":NaN}'])
def test_what_is_no_json_has_a_turn_without_what_it_would_say(payload: bytes) -> None:
    turn = played(payload)
    assert turn.error_site is turn.error is turn.exit_code is turn.severity is None
    assert (turn.created, turn.since_s, turn.late_rewards, turn.error_kind) == (10.0, 2.5, 2, "path_not_found")


def test_a_field_that_is_too_large_is_left_out_and_the_others_stay() -> None:
    site = {**SITE, "message": "x" * turn_pages.MAX_FIELD_BYTES}
    turn = played({"observation": {**MARKED, "error_site": site, "exit_code": 1}})
    assert turn.error_site is None and (turn.severity, turn.exit_code) == ("error", 1)


def test_a_site_of_another_kind_than_the_row_has_is_not_the_turns() -> None:
    turn = played({"observation": MARKED}, kind="timeout")
    assert turn.error_kind == "timeout" and turn.error_site is None and turn.severity is None
    assert played({"observation": MARKED}, kind=None).error_site is None


def test_the_first_delivery_has_no_time_since_another_and_time_never_runs_back() -> None:
    assert played({}, before=None).since_s is None
    assert played({}, before=11.0).since_s == 0.0


def test_an_error_is_cut() -> None:
    assert played({"observation": {"error": "x" * 1000}}).error == "x" * MAX_ERROR


LONG = "é" * 3000


@pytest.mark.parametrize(
    ("request_", "action", "cut"),
    [
        (b"", None, False),
        (b'{"command":"ls"}', {"command": "ls"}, False),
        (b"not JSON", "not JSON", False),
        (b'{"n":NaN}', '{"n":NaN}', False),
        (b"[1,2]", [1, 2], False),
        (
            json.dumps({"tool": "write", "edits": [{"path": "a", "text": LONG}], "n": 1}, ensure_ascii=False).encode(),
            {"tool": "write", "edits": [{"path": "a", "text": "é" * MAX_ACTION_TEXT}], "n": 1},
            True,
        ),
        (json.dumps(list(range(3000))).encode(), json.dumps(list(range(3000)))[:MAX_ACTION_BYTES], True),
        (b"x" + LONG.encode(), "x" + "é" * ((MAX_ACTION_BYTES - 1) // 2), True),
        (b'"' + b"a" * turn_pages.MAX_DECODED_BYTES + b'"', '"' + "a" * (MAX_ACTION_BYTES - 1), True),
    ],
)
def test_an_action_is_whole_or_has_its_texts_cut_or_is_the_beginning_of_its_text(
    request_: bytes, action: Any, cut: bool
) -> None:
    assert action_of(request_) == (action, cut)
    turn = played({}, request=request_)
    assert (turn.action, turn.action_cut, turn.action_bytes) == (action, cut, len(request_))
    text = turn.action if isinstance(turn.action, str) else json.dumps(turn.action, ensure_ascii=False)
    assert len(text.encode()) <= MAX_ACTION_BYTES


@pytest.mark.parametrize(
    ("action", "tool"),
    [
        ({"tool": "search", "command": "x"}, "search"),
        ({"type": "call_tool", "tool_name": "sh", "arguments": {}}, "sh"),
        ({"method": "tools/call", "params": {"name": "sh", "arguments": {}}}, "sh"),
        ({"command": "ls"}, None),
        ({"tool": 5, "params": []}, None),
        ("text", None),
    ],
)
def test_the_tool_that_an_action_calls_is_named(action: Any, tool: str | None) -> None:
    assert played({}, request=json.dumps(action).encode()).tool == tool

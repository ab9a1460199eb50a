"""What teachers read: what the student saw, of exact payloads or of a transcript."""

from __future__ import annotations

import json
from typing import Any

import pytest

from errata_protocol.markers import ErrorSite
from errata_protocol.replay import StateAt
from errata_protocol.rollouts import ErrorMarker
from errata_trainer import Call, Turn
from errata_trainer.teachers import NotReadable, Prompter
from terminal_env import SPEC

PROMPTER = Prompter(SPEC.tools, SPEC.agent_text)


def state(t: int, eid: str = "e", kind: Any = "step", **observation: Any) -> StateAt:
    content = {"tool": "reset" if kind == "reset" else "run", "cwd": "/w", **observation}
    payload = json.dumps({"observation": content, "reward": None, "done": False}).encode()
    return StateAt(eid, t, kind, payload, "sha256:0")


RESET = state(0, kind="reset", instruction="List the files.")
FIRST = state(1, stdout="a  b\n", exit_code=0, duration_s=0.1)
SECOND = state(2, stderr="no\n", exit_code=1, cwd="/w/sub", error_kind="command_failed", hint_template_key="cmd.failed")
TURNS = (
    Turn(0, 0, 1, (Call("run", {"command": "ls"}, 1),)),
    Turn(1, 1, 2, (Call("fly", {}), Call("run", {"command": "cd sub; false"}, 2))),
)


def test_a_prompt_is_what_the_student_saw_byte_for_byte() -> None:
    prompt = PROMPTER.from_states([RESET, FIRST, SECOND], TURNS, [{"role": "user", "content": "Be brief."}])
    assert prompt.source == "agent_text"
    assert prompt.cwd == "/w/sub"
    roles = [message["role"] for message in prompt.messages]
    assert roles == ["system", "user", "user", "assistant", "tool", "assistant", "tool", "tool"]
    texts = [message["content"] for message in prompt.messages[1:]]
    no = "[stderr]\nno\n[exit 1]"
    assert texts == ["Be brief.", "List the files.", "", "a  b\n[exit 0]", "", "[no result]", no]
    asked = prompt.messages[3]["tool_calls"][0]
    assert asked["function"] == {"name": "run", "arguments": '{"command": "ls"}'}
    assert prompt.messages[4]["tool_call_id"] == asked["id"]
    assert [prompt.messages[6]["tool_call_id"], prompt.messages[7]["tool_call_id"]] == [
        call["id"] for call in prompt.messages[5]["tool_calls"]
    ]
    assert prompt.tools[0] == {"type": "function", "function": SPEC.tools[0]}
    assert "cmd.failed" not in json.dumps(prompt.messages)


def test_fields_that_nobody_reads_do_not_change_a_state() -> None:
    slower = state(1, stdout="a  b\n", exit_code=0, duration_s=9.9)
    one, other = (PROMPTER.from_states([RESET, first], TURNS[:1]) for first in (FIRST, slower))
    assert one.state_digest == other.state_digest
    assert one.state_digest != PROMPTER.from_states([RESET, FIRST]).state_digest


def test_deliveries_that_the_student_never_saw_are_left_out() -> None:
    seen = PROMPTER.from_states([RESET, FIRST], TURNS[:1])
    longer = PROMPTER.from_states([RESET, FIRST, state(2, stdout="unseen\n", exit_code=0)], TURNS[:1])
    assert longer.messages == seen.messages


def test_a_fork_begins_with_its_parents_states() -> None:
    prompt = PROMPTER.from_states([RESET, FIRST, state(1, "child", stdout="c\n", exit_code=0)], TURNS[:1])
    assert [message["content"] for message in prompt.messages[1:]] == [
        "List the files.", "a  b\n[exit 0]", "", "c\n[exit 0]",
    ]  # fmt: skip


def test_a_call_that_never_arrived_says_why() -> None:
    why = ErrorMarker(error_kind="invalid_arguments", error_site=ErrorSite(message="run() needs command"))
    prompt = PROMPTER.from_states([RESET], [Turn(0, 0, 1, (Call("run", {}, None, why),))])
    assert prompt.messages[-1]["content"] == "run() needs command"


@pytest.mark.parametrize(
    "states",
    [
        [],
        [StateAt("e", 1, "mcp", b"{}", "sha256:0")],
        [StateAt("e", 0, "reset", b"[]", "sha256:0")],
        [StateAt("e", 0, "reset", b'{"observation": 3}', "sha256:0")],
    ],
)
def test_what_has_no_text_is_not_readable(states: list[StateAt]) -> None:
    with pytest.raises(NotReadable):
        PROMPTER.from_states(states)


def test_an_agent_text_that_fails_is_not_readable() -> None:
    def broken(observation: Any) -> str:
        raise KeyError("tool")

    with pytest.raises(NotReadable, match="t=0 of episode e"):
        Prompter(agent_text=broken).from_states([RESET])


def test_a_transcript_is_put_into_the_form_of_chat_requests() -> None:
    call = {"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}
    other = {"function": {"name": "read_file", "arguments": '{"path": "a"}'}, "id": "mine"}
    prompt = PROMPTER.from_transcript(
        [
            {"role": "system", "content": "You are terse."},
            {"role": "user", "content": "List."},
            {"role": "assistant", "content": None, "tool_calls": [call, other]},
            {"role": "tool", "name": "read_file", "content": "text"},
            {"role": "tool", "name": "run", "content": "a"},
            {"role": "assistant", "content": "It is a."},
            {"role": "user", "content": "And?"},
        ],
        cwd="/w",
    )
    assert [message["role"] for message in prompt.messages].count("system") == 1
    assert prompt.messages[0]["content"].endswith("You are terse.")
    first, second = prompt.messages[2]["tool_calls"]
    assert first["function"]["arguments"] == '{"command": "ls"}'
    assert [prompt.messages[n]["tool_call_id"] for n in (3, 4)] == ["mine", first["id"]]
    assert second == {**other, "type": "function"}
    assert (prompt.source, prompt.cwd) == ("transcript", "/w")

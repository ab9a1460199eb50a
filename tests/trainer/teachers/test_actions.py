"""Keys of actions: equal for the same action, different for any other."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_trainer import Call
from errata_trainer.teachers import Action, ActionKeys, ToolCall, Unusable
from terminal_env import SPEC

KEYS = ActionKeys(SPEC.tools, read_only=("read_file",), aliases={"bash": "run"})
SCHEMA = {
    "name": "tool",
    "parameters": {
        "type": "object",
        "properties": {
            "ratio": {"type": "number", "default": 1},
            "count": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "mode": {"type": ["string", "null"], "default": "fast"},
            "box": {"$ref": "#/$defs/Box"},
            "list": {"type": "array", "items": {"type": "number"}},
        },
        "$defs": {
            "Box": {"type": "object", "properties": {"width": {"type": "number"}, "inner": {"$ref": "#/$defs/Box"}}}
        },
    },
}
TOOL = ActionKeys([{"type": "function", "function": SCHEMA}])


def run(command: str) -> Action:
    return Action((ToolCall("run", {"command": command}),))


def call(name: str = "tool", /, **arguments: Any) -> Action:
    return Action((ToolCall(name, arguments),))


def same(keys: ActionKeys, one: Action, other: Action, cwd: str | None = None) -> bool:
    return keys.keyed(one, cwd=cwd) == keys.keyed(other, cwd=cwd)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(), call(ratio=1.0)),
        (call(ratio=2), call(ratio=2.0)),
        (call(count=None), call()),
        (call(list=[1, 2.0]), call(list=[1.0, 2])),
        (call(box={"width": 1, "inner": {"width": 2.0}}), call(box={"inner": {"width": 2}, "width": 1.0})),
        (call(mode="fast"), call()),
    ],
)
def test_what_the_schema_calls_the_same_is_the_same(one: Action, other: Action) -> None:
    assert same(TOOL, one, other)
    assert not same(ActionKeys([SCHEMA], level="exact"), one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(count=1), call(count=1.0)),
        (call(mode=None), call()),
        (call(mode="Fast"), call(mode="fast")),
        (call(mode=" fast"), call(mode="fast")),
        (call(ratio=True), call(ratio=1)),
        (call(list=[1, 2]), call(list=[2, 1])),
        (call("Tool"), call("tool")),
        (call(more=1), call()),
    ],
)
def test_what_the_schema_does_not_call_the_same_is_not(one: Action, other: Action) -> None:
    assert not same(TOOL, one, other)


def test_shell_commands_paths_and_contents() -> None:
    assert same(KEYS, run("ls 'a b'"), run('ls  "a b"'))
    assert same(KEYS, run("cd /w && ls"), run("ls"), cwd="/w")
    assert not same(KEYS, run("cd /w && ls"), run("ls"), cwd="/")
    assert same(KEYS, call("read_file", path="./a/../b"), call("read_file", path="/w/b"), cwd="/w")
    assert not same(KEYS, call("read_file", path="b"), call("read_file", path="/w/b"))
    crlf = (call("write_file", path="a", content="x\r\ny"), call("write_file", path="a", content="x\ny"))
    assert same(KEYS, *crlf)
    assert not same(KEYS, call("write_file", path="a", content="x\n"), call("write_file", path="a", content="x"))


def test_a_command_that_cannot_be_read_equals_only_its_own_bytes() -> None:
    broken = "echo 'a"
    assert same(KEYS, run(broken), run(broken))
    assert not same(KEYS, run(broken), run("echo  'a"))
    assert not same(KEYS, run(broken), run("echo \\'a"))


def test_calls_are_a_list_unless_all_only_read() -> None:
    read, other, write = (ToolCall("read_file", {"path": "a"}), ToolCall("read_file", {"path": "b"}), run("x").calls[0])
    assert same(KEYS, Action((read, other)), Action((other, read)))
    assert not same(KEYS, Action((read, write)), Action((write, read)))
    assert not same(KEYS, Action((read, read)), Action((read,)))


def test_what_is_said_beside_a_call_does_not_count_and_a_final_answer_is_its_words() -> None:
    assert same(KEYS, Action(run("a").calls, "I will"), run("a"))
    assert same(KEYS, Action(text=" the\n answer "), Action(text="the answer"))
    assert not same(KEYS, Action(text="The answer"), Action(text="the answer"))
    assert not same(KEYS, Action(text="a"), run("a"))


def test_an_alias_is_another_name_of_a_tool() -> None:
    assert same(KEYS, call("bash", command="a"), run("a"))


def test_a_students_calls_are_an_action() -> None:
    assert same(KEYS, Action.of_calls((Call("run", {"command": "a"}, t=3),)), run("a"))


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Action(), "empty"),
        (call("fly"), "unknown_tool"),
        (call("run"), "wrong_arguments"),
        (call("run", command=3), "wrong_arguments"),
        (call("run", command="a", shell=True), "wrong_arguments"),
        (Action((ToolCall("run", "ls"),)), "wrong_arguments"),  # type: ignore[arg-type]
    ],
)
def test_what_the_tools_cannot_take_is_no_vote(action: Action, reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        KEYS.check(action)
    assert caught.value.reason == reason


def test_what_the_tools_take_is_a_vote() -> None:
    for action in (run("a"), call("run", command="a", timeout_s=1), call("bash", command="a"), Action(text="done")):
        KEYS.check(action)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["ratio", "count", "mode", "box", "list", "command", "path"]), JSON)


@given(ARGUMENTS)
def test_the_form_of_a_form_is_itself(arguments: dict[str, Any]) -> None:
    arguments.pop("command", None)  # a command's form is no command: tests of the shell
    form = TOOL.canonical(call(**arguments))["calls"][0][1]
    assert TOOL.canonical(call(**form))["calls"][0][1] == form


@given(ARGUMENTS)
def test_the_order_of_arguments_and_the_form_of_letters_make_no_difference(arguments: dict[str, Any]) -> None:
    turned = dict(reversed(arguments.items()))
    decomposed = json.loads(json.dumps(turned, ensure_ascii=False))
    assert same(TOOL, call(**arguments), call(**decomposed))
    nfc, nfd = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    assert same(TOOL, call(mode=nfc), call(mode=nfd))


def test_options_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError):
        ActionKeys([], level="effect")  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        ActionKeys([{"type": "function"}])

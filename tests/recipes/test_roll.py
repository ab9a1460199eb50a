"""What the recipe for ROLL does without ROLL: tool calls in text, and a history as rows of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl

from errata_trainer.recipes.roll.calls import tool_calls
from errata_trainer.recipes.roll.rows import settled, trajectory_rows
from errata_trainer.tiny import tiny_tokenizer

TOOLS = {
    "read": {
        "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}, "more": {"type": ["array", "null"]}}
    },
    "submit": {"properties": {}},
}


def names_and_arguments(text: str) -> tuple[list[tuple[str, Any]], int]:
    calls, unread = tool_calls(text, TOOLS)
    assert all(one["type"] == "function" for one in calls)
    return [(one["function"]["name"], one["function"]["arguments"]) for one in calls], unread


@pytest.mark.parametrize(
    ("text", "calls", "unread"),
    [
        ("I know.", [], 0),
        ('<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>', [("read", {"path": "a"})], 0),
        ('a <tool_call>{"name": "submit"}</tool_call> b', [("submit", {})], 0),
        ('<tool_call>{"name": "read", "arguments": {}}', [("read", {})], 0),
        (
            '<tool_call>{"name": "submit"}</tool_call><tool_call>{"name": "fly", "arguments": "x"}</tool_call>',
            [("submit", {}), ("fly", "x")],
            0,
        ),
        (
            "<tool_call>\n<function=read>\n<parameter=path>\n a\nb \n</parameter>\n<parameter=lines>\n3\n</parameter>\n"
            "<parameter=more>[1]</parameter>\n<parameter=other>4</parameter></function>\n</tool_call>",
            [("read", {"path": " a\nb ", "lines": 3, "more": [1], "other": "4"})],
            0,
        ),
        ("<tool_call><function=submit></function></tool_call>", [("submit", {})], 0),
        ("<tool_call><function=read><parameter=lines>many</parameter>", [("read", {"lines": "many"})], 0),
        ("<tool_call><function=read><parameter=path>a", [("read", {})], 0),
        ('<think><tool_call>{"name": "read"}</tool_call></think>', [], 0),
        ('<tool_call>{"name": "read"}</tool_call></think> x <tool_call>{"name": "submit"}', [("submit", {})], 0),
        (
            """<tool_call>{"name": "read", "arguments": {"path": "grep '</think> <tool_call>' a"}}</tool_call>""",
            [("read", {"path": "grep '</think> <tool_call>' a"})],
            0,
        ),
        (
            "<tool_call><function=read><parameter=path></think><tool_call></tool_call></parameter></function></tool_call>",
            [("read", {"path": "</think><tool_call></tool_call>"})],
            0,
        ),
        (r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>', [], 1),
        ("<tool_call></tool_call>", [], 1),
        ("<tool_call>{", [], 1),
        ('<tool_call>["read"]</tool_call><tool_call>{"name": 3}</tool_call>', [], 2),
        ("<tool_call><function=read", [], 1),
        (f"<tool_call>{'[' * 100_000}</tool_call>", [], 1),
    ],
)
def test_calls_in_a_turn(text: str, calls: list[tuple[str, Any]], unread: int) -> None:
    assert names_and_arguments(text) == (calls, unread)


@pytest.mark.parametrize(
    "part",
    ["<tool_call>", "<tool_call><function=", '<tool_call>"', "<parameter=", "<function=", "</parameter>", "</think>"],
)
def test_many_tags_are_read_in_one_pass(part: str) -> None:
    """A million of them: a reader that began again at each would not end in a test's time."""
    tool_calls(f"<tool_call><function=read>{part * 1_000_000}", TOOLS)


def turn(prompt: int, response: list[int], reward: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"prompt_ids": list(range(prompt)), "response_ids": response, "reward": reward, **more}


def test_turns_that_continue_each_other_are_one_row() -> None:
    history = [
        turn(3, [3, 4], infer_logprobs=[-1.0, -2.0]),
        turn(7, [7], infer_logprobs=[-3.0]),
        turn(10, [10, 11], 1.0, infer_logprobs=[-4.0, -5.0]),
    ]
    [row] = trajectory_rows(history, max_tokens=20, gamma=0.5, step_gamma=0.9)
    assert row.ids == tuple(range(12)) and row.first == 3
    assert row.segments == (-1, -1, -1, 0, 0, -1, -1, 1, -1, -1, 2, 2)
    assert row.logprobs == (0, 0, 0, -1, -2, 0, 0, -3, 0, 0, -4, -5)
    assert (row.turns, row.rewards, row.score) == ((0, 1, 2), (0.0, 0.0, 1.0), 1.0)
    assert [row.returns[at] for at in (3, 7, 10, 5)] == pytest.approx([0.81, 0.9, 1.0, 0.0])


def test_a_row_that_is_not_the_last_has_the_discount_of_the_turns_behind_it() -> None:
    history = [
        turn(3, [3, 4]),
        turn(7, [7]),
        {"prompt_ids": [9, 9], "response_ids": [1], "reward": 0.5},
        turn(4, [4], 1.0),
    ]
    rows = trajectory_rows(history, max_tokens=20, gamma=0.5)
    assert [row.turns for row in rows] == [(0, 1), (2,), (3,)]
    assert [row.score for row in rows] == [1.5 * 0.25, 1.5 * 0.5, 1.5]
    assert [row.logprobs for row in rows] == [None] * 3
    assert [one for one in rows[0].returns if one] == [1.5] * 3 and rows[1].returns[-1] == 1.5


def test_an_observation_only_tail_is_no_turn_and_its_reward_is_the_last_turns() -> None:
    history = [turn(3, [3]), {"prompt_ids": list(range(30)), "reward": 1.0, "observation": []}]
    [row] = trajectory_rows(settled(history), max_tokens=20, gamma=0.5)
    assert (row.turns, row.rewards, row.score) == ((0,), (1.0,), 1.0)
    assert [one["reward"] for one in history] == [1.0, 0.0]
    assert settled(history[1:]) == [] and trajectory_rows([], max_tokens=20) == []


def test_a_tail_that_is_too_long_is_left_out_whole_and_counts() -> None:
    history = [turn(3, [3]), turn(5, [5] * 9), turn(15, [15], 1.0)]
    [row] = trajectory_rows(history, max_tokens=10, gamma=0.5)
    assert (row.turns, row.score, row.returns[3]) == ((0,), 0.25, 1.0)
    assert trajectory_rows(history, max_tokens=3) == []


def test_runs_of_turns_without_a_token_between_them_are_apart() -> None:
    """ROLL finds turns as runs in a mask, and would take them for one."""
    rows = trajectory_rows([turn(3, [3]), turn(4, [4])], max_tokens=10)
    assert [row.turns for row in rows] == [(0,), (1,)]
    assert json.dumps([row.ids for row in rows]) == "[[0, 1, 2, 3], [0, 1, 2, 3, 4]]"


@pytest.mark.parametrize(
    ("template", "is_kept"),
    [("qwen3_instruct_2507", True), ("qwen2_5", True), ("qwen3_5_nothink", True), ("qwen3", False)],
)
def test_templates_that_show_turns_as_they_were_sampled(template: str, is_kept: bool) -> None:
    """docs/roll.md names them. ROLL renders the whole history again for each turn, without reasoning."""
    tokenizer = tiny_tokenizer([])
    tokenizer.chat_template = Path(trl.__file__).parent.joinpath("chat_templates", f"{template}.jinja").read_text()
    tools = [{"type": "function", "function": {"name": "read", "description": "", "parameters": {"type": "object"}}}]
    said = '<tool_call>\n{"name": "read", "arguments": {}}\n</tool_call>'
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find it."}]
    history = []
    for _ in range(3):
        prompt = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, enable_thinking=False, return_dict=False
        )
        history.append({"prompt_ids": prompt, "response_ids": tokenizer.encode(f"{said}<|im_end|>"), "reward": 0.0})
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "name": "read", "content": "no file"}]
    assert len(trajectory_rows(history, max_tokens=10_000)) == (1 if is_kept else 3)

"""From a trainer's transcript and a journal to a `Rollout`: each call finds its delivery, whatever happened."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errata_protocol.rollouts import ErrorMarker, RolloutTurn
from errata_trainer import Delivery, Rollout, build_rollout, deliveries_of
from errata_trainer.rollouts.transcript import MALFORMED, trainer_error, unmarked_errors

END = 9
TOOLS = [
    {
        "name": "run",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout_s": {"type": "number"}},
            "required": ["command"],
        },
    },
    {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}},
]
FAILED = ErrorMarker(error_kind="path_not_found", hint_template_key="fs.missing", severity="error")


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def answered(name: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": content, **more}


def built(messages: list[dict[str, Any]], deliveries: list[Delivery], **more: Any) -> Rollout:
    """Give each assistant message three tokens and each group of tool results two."""
    ids: list[int] = []
    mask: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            ids += [1, 2, END]
            mask += [1, 1, 1]
        elif mask and mask[-1]:
            ids += [5, 6]
            mask += [0, 0]
    return build_rollout([7, 7], ids, mask, messages, deliveries, end_ids={END}, **more)


def ts(rollout: Rollout) -> list[list[int | None]]:
    return [[one.t for one in turn.calls] for turn in rollout.turns]


def kinds(rollout: Rollout) -> list[list[str | None]]:
    return [[one.marker.error_kind if one.marker else None for one in turn.calls] for turn in rollout.turns]


def test_turns_are_the_runs_of_the_mask_with_their_end_token() -> None:
    rollout = built(
        [said("", call("run", command="ls")), answered("run", "a"), said("done")],
        [Delivery(1, "run", {"command": "ls"}, "a", FAILED)],
        eid="e",
        task={"task_id": "x"},
    )
    assert [(turn.start, turn.stop) for turn in rollout.turns] == [(0, 3), (5, 8)]
    assert rollout.turns[0].calls[0].t == 1
    assert rollout.turns[0].failed is rollout.turns[0].calls[0]
    assert (rollout.eid, rollout.truncated, rollout.task) == ("e", False, {"task_id": "x"})


def test_calls_that_never_reach_the_environment_get_a_marker_of_ours() -> None:
    messages = [
        said("", call("grep", text="a"), call("run", cmd="ls"), call("run", command="ls")),
        answered("grep", "{'error': 'Tool grep not found.'}"),
        answered("run", str({"error": "Env.run() got an unexpected keyword argument 'cmd'"})),
        answered("run", "a"),
        said("", {"type": "function", "function": {"name": "run", "arguments": ["ls"]}}),
        answered("run", "{'error': 'Env.run() argument after ** must be a mapping, not list'}"),
        said("", call("run")),
        answered("run", """{'error': "Env.run() missing 1 required positional argument: 'command'"}"""),
        said("end"),
    ]
    rollout = built(messages, [Delivery(1, "run", {"command": "ls"}, "a")])
    assert ts(rollout) == [[None, None, 1], [None], [None], []]
    assert kinds(rollout) == [
        ["tool_not_found", "invalid_arguments", None],
        ["invalid_arguments"],
        ["invalid_arguments"],
        [],
    ]
    marker = rollout.turns[0].calls[0].marker
    assert marker is not None and marker.hint_template_key == "tool.unknown"
    assert marker.error_site is not None
    assert (marker.error_site.source, marker.error_site.message) == ("message", "Tool grep not found.")


def test_another_trainers_words_are_read_by_the_tools_schemas() -> None:
    messages = [
        said("", call("grep"), call("run", cmd="ls"), call("submit")),
        answered("grep", '{"error": "no such function"}'),
        answered("run", '{"error": "bad call"}'),
        answered("submit", '{"error": "connection lost"}'),
        said(""),
    ]
    rollout = built(messages, [], tools=TOOLS)
    assert kinds(rollout) == [["tool_not_found", "invalid_arguments", None], []]


def test_an_error_of_the_machine_is_no_error_of_the_student() -> None:
    messages = [said("", call("run", command="ls")), answered("run", "{'error': 'session s-1 is lost'}"), said("")]
    rollout = built(messages, [Delivery(None, "run", {"command": "ls"}, code="SESSION_LOST")], lost="SESSION_LOST")
    assert (ts(rollout), kinds(rollout), rollout.lost) == ([[None], []], [[None], []], "SESSION_LOST")


def test_arguments_that_the_environment_refused_are_the_students_error() -> None:
    messages = [said("", call("run", command=3)), answered("run", "{'error': 'command: not a string'}"), said("")]
    rollout = built(messages, [Delivery(None, "run", {"command": 3}, code="VALIDATION_ERROR")])
    assert kinds(rollout) == [["invalid_arguments"], []]


def test_a_call_that_a_runner_refused_keeps_its_marker() -> None:
    marker = ErrorMarker(error_kind="invalid_arguments", hint_template_key="args.invalid", severity="error")
    messages = [
        said("", call("run", command="a", n=1), call("zz"), call("run", command="b")),
        answered("run", "{'error': 'no argument n'}"),
        answered("zz", "{'error': 'Tool zz not found.'}"),
        answered("run", "fine"),
        said(""),
    ]
    journal = [
        Delivery(None, "run", {"command": "a", "n": 1}, "no argument n", marker),
        Delivery(1, "run", {"command": "b"}, "fine"),
    ]
    rollout = built(messages, journal)
    assert (ts(rollout), kinds(rollout)) == (
        [[None, None, 1], []],
        [["invalid_arguments", "tool_not_found", None], []],
    )
    assert rollout.turns[0].calls[0].marker is marker


def test_a_result_that_was_taken_back_leaves_the_transcript_as_the_truth() -> None:
    messages = [
        said("", call("run", command="a")),
        answered("run", "1"),
        said("", call("run", command="b"), call("run", command="a")),
    ]
    journal = [Delivery(t, "run", {"command": c}, str(t), FAILED) for t, c in [(1, "a"), (2, "b"), (3, "a")]]
    rollout = built(messages, journal)
    assert ts(rollout) == [[1], [None, None]]
    assert kinds(rollout)[1] == [None, None]


def test_a_last_call_that_was_not_executed_has_no_delivery_and_no_marker() -> None:
    rollout = built([said("", call("grep"))], [], tools=TOOLS)
    assert (ts(rollout), kinds(rollout)) == ([[None]], [[None]])


def test_synchronous_results_that_overtake_asynchronous_ones_stay_with_their_calls() -> None:
    messages = [
        said("", call("wait", n=1), call("run", command="s"), call("wait", n=3)),
        answered("run", "two"),
        answered("wait", "one"),
        answered("wait", "three"),
        said(""),
    ]
    journal = [
        Delivery(1, "run", {"command": "s"}, "two"),
        Delivery(2, "wait", {"n": 3}, "three"),
        Delivery(3, "wait", {"n": 1}, "one"),
    ]
    assert ts(built(messages, journal)) == [[3, 1, 2], []]


def test_results_that_name_their_call_are_found_by_id() -> None:
    one, two = {**call("run", cmd="x"), "id": "c1"}, {**call("run", command="y"), "id": "c2"}
    messages = [
        said("", one, two),
        answered("run", "fine", tool_call_id="c2"),
        answered("run", "{'error': \"run() got an unexpected keyword argument 'cmd'\"}", tool_call_id="c1"),
        said(""),
    ]
    rollout = built(messages, [Delivery(1, "run", {"command": "y"})])
    assert (ts(rollout), kinds(rollout)) == ([[None, 1], []], [["invalid_arguments", None], []])


def test_an_environment_that_is_used_again_keeps_its_episodes_apart() -> None:
    journal = [
        Delivery(1, "run", {"command": "a"}, "old", FAILED, eid="e1"),
        Delivery(1, "run", {"command": "a"}, "new", None, eid="e2"),
    ]
    rollout = built([said("", call("run", command="a")), answered("run", "new"), said("")], journal, eid="e2")
    assert (ts(rollout), kinds(rollout)) == ([[1], []], [[None], []])


def test_a_malformed_tool_call_is_a_turn_without_calls_or_a_marked_one() -> None:
    messages = [said('<tool_call>{"name": "run", "arg')]
    assert built(messages, []).turns[0].calls == ()
    (marked,) = built(messages, [], opening="<tool_call>").turns[0].calls
    assert marked.name == MALFORMED
    assert marked.marker is not None and marked.marker.error_kind == "invalid_arguments"
    cut = build_rollout([7], [1, 2], None, messages, opening="<tool_call>", end_ids={END})
    assert cut.truncated and cut.turns[0].calls == ()  # it was cut off, not malformed


@pytest.mark.parametrize(
    ("ids", "mask", "truncated"),
    [([1, END], [1, 1], False), ([1, 2], [1, 1], True), ([1, END, 5], [1, 1, 0], True), ([], [], False)],
)
def test_a_completion_that_ends_without_an_end_token_is_truncated(
    ids: list[int], mask: list[int], truncated: bool
) -> None:
    rollout = build_rollout([7], ids, mask, [said("")], end_ids={END})
    assert rollout.truncated is truncated
    assert len(rollout.turns) == (1 if ids else 0)


def test_a_mask_that_does_not_fit_the_messages_is_refused() -> None:
    with pytest.raises(ValueError, match="2 runs of sampled tokens, 1 assistant messages"):
        build_rollout([7], [1, 5, 1], [1, 0, 1], [said("")])
    with pytest.raises(ValueError, match="pad neither"):
        build_rollout([7], [1, 5, 1], [1, 0], [said("")])


def test_log_probabilities_of_what_was_not_sampled_are_zero() -> None:
    rollout = build_rollout([7], [1, 5, 1], [1, 0, 1], [said(""), said("")], logprobs=[-1.0, float("nan"), -2.0])
    assert rollout.logprobs == (-1.0, 0.0, -2.0)


def test_rows_of_a_journal_export_are_deliveries() -> None:
    def row(t: int, kind: str, action: Any, **more: Any) -> dict[str, Any]:
        base = {"eid": "e", "environment": "terminal", "session": "s", "digest": "d", "created": 1.0}
        return {**base, "t": t, "kind": kind, "action_t": json.dumps(action), **more}

    refused = {"kind": "step", "action": '{"tool": 3}', "code": "VALIDATION_ERROR", "message": "tool"}
    rows = [
        row(0, "reset", {}),
        row(1, "step", {"tool": "run", "command": "ls", "timeout_s": None}, agent_text_t="a", errors_t=[refused]),
        row(
            2,
            "mcp",
            {"method": "tools/call", "params": {"name": "look", "arguments": {"at": 1}}},
            state_t=json.dumps({"result": {"_meta": {"openenv/error_markers": {"error_kind": "timeout"}}}}),
        ),
    ]
    first, bad, second = deliveries_of(rows)
    assert first == Delivery(1, "run", {"command": "ls"}, "a", None, "e")
    assert (bad.t, bad.code) == (None, "VALIDATION_ERROR")
    assert (second.t, second.name, second.arguments) == (2, "look", {"at": 1})
    assert second.marker is not None and second.marker.error_kind == "timeout"
    assert deliveries_of([RolloutTurn.model_validate(rows[1])])[0] == first


def test_only_an_error_of_the_trainers_own_form_is_read_as_one() -> None:
    assert trainer_error("{'error': 'boom'}") == "boom"
    assert trainer_error("{'error': 'boom', 'code': 3}") is None
    assert trainer_error("{'errors'") is None
    assert trainer_error([{"type": "text", "text": '{"error": "b"}'}]) == "b"


@dataclass
class Truth:
    """An episode as it happened, and which delivery answered which call."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    journal: list[Delivery] = field(default_factory=list)
    ts: list[list[int | None]] = field(default_factory=list)
    kinds: list[list[str | None]] = field(default_factory=list)


@st.composite
def episodes(draw: st.DrawFn) -> Truth:
    """Draw an episode as TRL's loop would make it: tools ``s*`` are synchronous, ``a*`` asynchronous."""
    truth = Truth()
    texts_known = draw(st.booleans())
    t = 0
    if draw(st.booleans()):  # the environment acts on its own at reset
        t += 1
        truth.journal.append(Delivery(t, "prepare", {}, "ready"))
    count = draw(st.integers(1, 6))
    ending = draw(st.sampled_from(["text", "unexecuted", "taken back"]))
    for index in range(count):
        last = index == count - 1
        if last and ending == "text":
            truth.messages.append(said("done"))
            truth.ts.append([])
            truth.kinds.append([])
            break
        shapes = draw(
            st.lists(
                st.tuples(
                    st.sampled_from(["fine", "fine", "fine", "failing", "unknown", "wrong"]),
                    st.sampled_from(["s1", "s2", "a1", "a2"]),
                    st.sampled_from(["x", "y"]),
                ),
                min_size=1,
                max_size=4,
            )
        )
        calls, at_once, later, found, marked = [], [], [], [], []
        for kind, tool, command in shapes:
            position = len(calls)
            found.append(None)
            if kind == "unknown":
                calls.append(call("zz", command=command))
                at_once.append((position, None, "zz", "{'error': 'Tool zz not found.'}"))
                marked.append("tool_not_found")
            elif kind == "wrong":
                calls.append(call(tool, cmd=command))
                error = {"error": f"Env.{tool}() got an unexpected keyword argument 'cmd'"}
                at_once.append((position, None, tool, str(error)))
                marked.append("invalid_arguments")
            else:
                calls.append(call(tool, command=command))
                marker = FAILED if kind == "failing" else None
                (at_once if tool.startswith("s") else later).append((position, (command, marker), tool, ""))
                marked.append("path_not_found" if kind == "failing" else None)
        answers = []
        for position, delivered, tool, text in [*at_once, *later]:
            if delivered is not None:
                command, marker = delivered
                t += 1
                # Outputs repeat, as those of commands that say nothing do.
                text = draw(st.sampled_from(["", f"out {t}"]))
                truth.journal.append(Delivery(t, tool, {"command": command}, text if texts_known else None, marker))
                found[position] = t
            answers.append(answered(tool, text))
        truth.messages.append(said("", *calls))
        if last and ending == "unexecuted":
            del truth.journal[len(truth.journal) - sum(one is not None for one in found) :]
        if last and ending != "text":
            found, marked = [None] * len(calls), [None] * len(calls)
        else:
            truth.messages += answers
        truth.ts.append(found)
        truth.kinds.append(marked)
    if draw(st.booleans()) and ending != "taken back":
        truth.journal.append(Delivery(t + 1, "submit", {}, "[submitted]"))
    return truth


@settings(max_examples=400, deadline=None)
@given(episodes())
def test_every_call_finds_its_delivery(truth: Truth) -> None:
    rollout = built(truth.messages, truth.journal)
    # Which of two calls that are the same in one message was answered first cannot be told, and changes nothing.
    for turn, expected_ts in zip(rollout.turns, truth.ts, strict=True):
        groups: dict[tuple[str, str], list[int]] = {}
        for index, one in enumerate(turn.calls):
            groups.setdefault((one.name, json.dumps(one.arguments)), []).append(index)
        for indexes in groups.values():
            assert {turn.calls[i].t for i in indexes} == {expected_ts[i] for i in indexes}
    for got, expected in zip(kinds(rollout), truth.kinds, strict=True):
        assert sorted(map(str, got)) == sorted(map(str, expected))


@settings(max_examples=100, deadline=None)
@given(episodes(), st.randoms(use_true_random=False))
def test_a_journal_with_gaps_never_gives_a_call_anothers_delivery(truth: Truth, random: Any) -> None:
    journal = [one for one in truth.journal if random.random() < 0.7]
    rollout = built(truth.messages, journal)
    by_t = {one.t: one for one in journal}
    seen: list[int] = []
    for turn in rollout.turns:
        delivered = sorted(one.t for one in turn.calls if one.t is not None)
        assert not seen or not delivered or delivered[0] > seen[-1]  # turns keep their order
        seen += delivered
        for one in turn.calls:
            if one.t is not None:
                assert by_t[one.t].name == one.name
                assert by_t[one.t].arguments == one.arguments
    assert len(set(seen)) == len(seen)


def test_a_call_that_failed_leaves_its_delivery_to_the_same_call_made_again() -> None:
    messages = [
        said("", call("run", command="ls")),
        answered("run", "{'error': 'connection lost'}"),
        said("", call("run", command="ls")),
        answered("run", "a"),
        said(""),
    ]
    for text in ("a", None):
        assert ts(built(messages, [Delivery(1, "run", {"command": "ls"}, text)])) == [[None], [1], []]


def test_a_command_may_print_what_looks_like_a_trainers_error() -> None:
    text = "{'error': 'Tool run not found.'}"
    rollout = built(
        [said("", call("run", command="cat log")), answered("run", text), said("")],
        [Delivery(1, "run", {"command": "cat log"}, text)],
    )
    assert (ts(rollout), kinds(rollout)) == ([[1], []], [[None], []])


@pytest.mark.parametrize("own", [{"n": "1"}, {"n": 1}, {"n": 1.0}, {"n": 1, "path": "", "more": None}])
def test_arguments_are_the_same_when_the_environment_would_take_them_as_the_same(own: dict[str, Any]) -> None:
    messages = [said("", call("run", **own)), answered("run", "a"), said("")]
    assert ts(built(messages, [Delivery(1, "run", {"n": 1, "tags": []}, "a")])) == [[1], []]
    assert ts(built(messages, [Delivery(1, "run", {"n": 2}, "a")])) == [[None], []]


def test_a_long_episode_with_calls_that_reached_nothing_is_matched_call_by_call() -> None:
    messages: list[dict[str, Any]] = []
    journal = []
    for n in range(400):
        name = "zz" if n % 7 == 3 else "run"
        output = "{'error': 'Tool zz not found.'}" if name == "zz" else "same"
        messages += [said("", call(name, command=str(n % 3))), answered(name, output)]
        if name == "run":
            journal.append(Delivery(len(journal) + 2, "run", {"command": str(n % 3)}, "same"))
    rollout = built([*messages, said("")], [Delivery(1, "prepare"), *journal])  # the detour: one more at the beginning
    found = [one.t for turn in rollout.turns for one in turn.calls if one.t is not None]
    assert found == list(range(2, len(journal) + 2))


@pytest.mark.parametrize(
    ("answer", "unmarked"),
    [
        ("{'error': 'Tool open not found.'}", 0),
        ("{'error': 'the words of another release'}", 1),
        ("{'error': 'printed by a command'}", 0),
        ("no error at all", 0),
    ],
)
def test_an_error_of_the_trainers_loop_in_words_that_nobody_knows_is_counted(answer: str, unmarked: int) -> None:
    name = "open" if "not found" in answer else "read"
    messages = [
        {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {"path": "x"}}}]},
        {"role": "tool", "name": name, "content": answer},
    ]
    printed = [Delivery(1, "read", {"path": "x"}, answer)] if "printed" in answer else []
    tools = [{"function": {"name": "read", "parameters": {"properties": {"path": {}}, "required": ["path"]}}}]
    rollout = build_rollout([1], [2, 3, 4], [1, 0, 0], messages, printed, tools=tools)
    assert unmarked_errors(rollout, messages, printed) == unmarked

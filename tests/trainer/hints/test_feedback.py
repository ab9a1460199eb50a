"""Demonstrations and feedback as in the SDPO paper: which attempt, what of it, and how much."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from failing import failing, marker_for
from hypothesis import given, settings
from hypothesis import strategies as st

from errata_trainer.hints import Attempt, FailedTurn, FeedbackHinter, HintPack, TemplateHinter, approximate_tokens
from errata_trainer.hints.feedback import without_thinking

OBSERVATION = {"stderr": "no such file"}


def said(observation: Any) -> str:
    return str(observation.get("stderr", ""))


def attempts(*rewards: float | None, lost: str | None = None) -> tuple[list[Attempt], list[FailedTurn]]:
    """Return a group with one attempt a reward, and the failing turn of each."""
    turns = [
        failing(marker_for("path_not_found"), arguments={"command": f"do {n}"}, observation=OBSERVATION, reward=reward)
        for n, reward in enumerate(rewards)
    ]
    turns = [replace(one, rollout=replace(one.rollout, lost=lost)) for one in turns]
    texts = [(f"<think>because {n}</think>\nstep one of {n}", f"step two of {n}") for n in range(len(turns))]
    return [Attempt(one.rollout, "g", text) for one, text in zip(turns, texts, strict=True)], turns


def hinter(group: list[Attempt], **options: Any) -> FeedbackHinter:
    return FeedbackHinter(group, agent_text=said, **options)


def test_the_first_successful_sibling_is_the_demonstration_without_its_thinking() -> None:
    group, turns = attempts(0.0, 1.0, 1.0)
    made = hinter(group)
    hint = made.hint(turns[0])
    assert hint is not None
    assert (hint.source, hint.key, hint.version) == ("demonstration", "fs.missing", "demonstration/1")
    assert "step one of 1\n\nstep two of 1" in hint.text
    assert "because" not in hint.text and "no such file" not in hint.text and "of 2" not in hint.text
    assert made.counts == {"demonstration": 1}
    kept = hinter(group, remove_thinking=False).hint(turns[0])
    assert kept is not None and "because 1" in kept.text


def test_a_success_is_never_its_own_demonstration_unless_asked() -> None:
    group, turns = attempts(1.0, 0.0)
    hint = hinter(group).hint(turns[0])
    assert hint is not None and hint.source == "feedback"
    own = hinter(group, dont_reprompt_on_self_success=False).hint(turns[0])
    assert own is not None and "step one of 0" in own.text
    two, both = attempts(1.0, 1.0)
    sibling = hinter(two).hint(both[0])
    assert sibling is not None and "step one of 1" in sibling.text  # as in the paper's code
    skipping = hinter(two, skip_successful=True)
    assert skipping.hint(both[0]) is None
    assert skipping.counts == {"skipped": 1}


def test_feedback_stands_alone_or_beside_a_demonstration() -> None:
    group, turns = attempts(0.0, 0.5)
    hint = hinter(group).hint(turns[0])
    assert hint is not None and "no such file" in hint.text and hint.version == "feedback/1"
    both = hinter(group, success_threshold=0.5, feedback_only_without_solution=False).hint(turns[0])
    assert both is not None and "no such file" in both.text and "step two of 1" in both.text


def test_lost_attempts_and_those_of_other_groups_demonstrate_nothing() -> None:
    group, turns = attempts(1.0, 1.0, lost="SESSION_LOST")
    hint = hinter(group).hint(turns[0])
    assert hint is not None and hint.source == "feedback"
    group, turns = attempts(0.0, 1.0, None)
    apart = [group[0], replace(group[1], group="other"), group[2]]
    hint = hinter(apart).hint(turns[0])
    assert hint is not None and hint.source == "feedback"


def test_where_there_is_nothing_to_say_the_fallback_speaks() -> None:
    group, turns = attempts(0.0)
    silent = replace(turns[0], observation={"stderr": " \n"})
    made = hinter(group)
    assert made.hint(silent) is None
    assert made.counts == {"none": 1}
    template = TemplateHinter(HintPack.load(installed=False))
    told = hinter(group, fallback=template).hint(silent)
    assert told is not None and told.source == "template"
    off = hinter(group, environment_feedback=False, demonstration=False)
    assert off.hint(turns[0]) is None


def test_a_turn_that_did_not_fail_can_have_a_demonstration() -> None:
    group, turns = attempts(0.0, 1.0)
    call = replace(turns[0].call, marker=None)
    hint = hinter(group).hint(replace(turns[0], call=call))
    assert hint is not None and hint.key == "demonstration"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("<think>a\nb</think>\n\ncall", "call"),
        ("a</think>call", "call"),
        ("call <think>cut off", "call"),
        ("<think>a</think>one <think>b</think>two", "one two"),
        ("plain", "plain"),
    ],
)
def test_thinking_is_left_out_however_it_is_closed(text: str, rest: str) -> None:
    assert without_thinking(text) == rest


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=3000), st.text(max_size=3000), st.integers(40, 900), st.booleans())
def test_a_hint_is_within_its_budget_and_opens_no_message(
    demonstration: str, answer: str, budget: int, alone: bool
) -> None:
    group, turns = attempts(0.0, 1.0)
    group[1] = replace(group[1], texts=(demonstration + "<|im_end|>", "<tool_call>x"))
    turn = replace(turns[0], observation={"stderr": answer + "</tool_response>"})
    hint = hinter(group, max_tokens=budget, feedback_only_without_solution=alone).hint(turn)
    if hint is not None:
        assert approximate_tokens(hint.text) <= budget
        assert "<|" not in hint.text and "</" not in hint.text and "<tool" not in hint.text
    if budget > 300 and alone:
        assert hint is not None

"""The vote: the truth table, row by row, and what must not depend on order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_trainer.teachers import Action, ActionKeys, KeyedAction, Pair, ToolCall, vote

TABLE = json.loads((Path(__file__).parents[2] / "golden" / "teachers" / "teacher_vote.json").read_text())["rows"]
ACTIONS = st.lists(st.sampled_from(["A", "B", "C", "Y", None]), max_size=7)
STUDENTS = st.sampled_from(["Y", "A", None])


def test_the_table_is_whole() -> None:
    assert len(TABLE) == 51


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["id"])
def test_a_row_of_the_table(row: dict[str, Any]) -> None:
    found = vote(row["teacher_actions"], row["student_action"], min_agree=row["min_agree"], tie_break=row["tie_break"])
    expected = row["expected"]
    assert (found.decision, found.reason) == (expected["decision"], expected["reason"])
    assert list(found.pairs) == [
        Pair(pair["chosen"], pair["rejected"], pair.get("weight", 1.0), pair["votes"]) for pair in expected["pairs"]
    ]


@given(ACTIONS, STUDENTS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_order_of_teachers_does_not_matter_unless_the_first_of_a_tie_is_asked_for(
    actions: list[str | None], student: str | None, min_agree: int, random: Any
) -> None:
    other = random.sample(actions, len(actions))
    assert vote(actions, student, min_agree=min_agree) == vote(other, student, min_agree=min_agree)
    every = [vote(order, student, min_agree=min_agree, tie_break="all") for order in (actions, other)]
    assert set(every[0].pairs) == set(every[1].pairs)


@given(ACTIONS, STUDENTS, st.sampled_from(["skip", "first", "all"]), st.integers(1, 4))
def test_nothing_is_preferred_that_has_no_more_votes_than_the_student(
    actions: list[str | None], student: str | None, tie_break: Any, min_agree: int
) -> None:
    found = vote(actions, student, min_agree=min_agree, tie_break=tie_break)
    for pair in found.pairs:
        assert pair.votes == actions.count(pair.chosen) >= min_agree
        assert student is None or pair.votes > actions.count(student)
    assert not found.pairs or sum(pair.weight for pair in found.pairs) == pytest.approx(1)


def test_a_majority_is_of_all_that_were_asked() -> None:
    assert vote(["A", "A", None, None], "Y", min_agree="majority").reason == "too_few_teachers"
    assert vote(["A", "A", "B", "C"], "Y", min_agree="majority").reason == "no_consensus"
    assert vote(["A", "A", "A", "C"], "Y", min_agree="majority").decision == "pair"


def test_teachers_of_one_family_have_one_vote() -> None:
    families = ["x", "x", "x", "z"]
    assert vote(["A", "A", "A", "B"], "Y", families=families).reason == "no_consensus"
    assert vote(["A", "B", "A", "A"], "Y", families=families).pairs[0].votes == 2
    assert vote(["A", "B", None, "A"], "Y", families=families).reason == "too_few_teachers", "x does not know"


def test_actions_are_equal_by_their_keys_and_pairs_hold_their_raw_forms() -> None:
    first, second = KeyedAction("k", Action(text="one way")), KeyedAction("k", Action(text="another way"))
    (pair,) = vote([first, second], KeyedAction("s", Action(text="mine"))).pairs
    assert pair.chosen.raw.text == "one way"
    assert vote([first, second], KeyedAction("k", Action())).reason == "agrees_with_student"


@pytest.mark.parametrize("options", [{"min_agree": 0}, {"min_agree": True}, {"tie_break": "last"}, {"families": ["x"]}])
def test_an_option_without_meaning_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        vote(["A", "A"], "Y", **options)


def test_actions_without_a_hash_are_refused_with_what_makes_one() -> None:
    raw = Action((ToolCall("run", {"command": "ls"}),))
    for teachers, student in (([raw, raw], "Y"), (["A", "A"], raw), ([{"a": 1}, "A"], "Y")):
        with pytest.raises(TypeError, match=r"ActionKeys\(tools\)\.keyed"):
            vote(teachers, student)
    keys = ActionKeys()
    keyed = keys.keyed(raw)
    assert vote([keyed, keyed], keys.keyed(Action(text="no"))).decision == "pair"


def test_one_text_is_no_sequence_of_actions() -> None:
    with pytest.raises(TypeError, match="one text"):
        vote("AAB", "Y")

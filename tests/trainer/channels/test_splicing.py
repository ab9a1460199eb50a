"""Where the hint goes, which tokens are compared, and what is left out of a row that is too long."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from three_turns import BODY, HEADER, HINT, RESULTS, TURNS, rollout

from errata_trainer import Rollout, Turn
from errata_trainer.channels.splicing import DoesNotFit, common_prefix, splice


def test_the_hint_stands_directly_before_the_header_of_the_failing_turn_and_the_row_ends_with_the_turn() -> None:
    first = splice(rollout(), 0, HINT, header_ids=HEADER)
    assert first.teacher_ids == BODY + HINT + HEADER + TURNS[0]
    second = splice(rollout(), 1, HINT, header_ids=HEADER)
    assert second.teacher_ids == BODY + HEADER + TURNS[0] + RESULTS[0] + HINT + HEADER + TURNS[1]


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("hint", [(), HINT, HINT * 5])
def test_both_sides_predict_the_same_tokens_of_the_turn_at_the_positions_given(
    turn: int, hint: tuple[int, ...]
) -> None:
    whole = rollout()
    item = splice(whole, whole.turns[turn], hint, header_ids=HEADER)
    student = whole.prompt_ids + whole.completion_ids
    assert item.target_ids == TURNS[turn]
    assert tuple(student[p + 1] for p in item.student_positions) == TURNS[turn]
    assert tuple(item.teacher_ids[p + 1] for p in item.teacher_positions) == TURNS[turn]
    # the first of them is predicted by the header's last token on both sides
    assert student[item.student_positions[0]] == item.teacher_ids[item.teacher_positions[0]] == HEADER[-1]
    assert item.teacher_positions[0] - item.student_positions[0] == len(hint)


def test_what_both_share_is_counted_not_assumed() -> None:
    item = splice(rollout(), 1, HINT, header_ids=HEADER)
    assert item.shared_prefix == len(BODY + HEADER + TURNS[0] + RESULTS[0])
    alike = splice(rollout(), 1, (HEADER[0], 7), header_ids=HEADER)
    assert alike.shared_prefix == item.shared_prefix + 1
    empty = splice(rollout(), 1, (), header_ids=HEADER)
    assert empty.shared_prefix == len(empty.teacher_ids)


def test_a_row_that_is_too_long_loses_whole_turns_the_oldest_first() -> None:
    whole = splice(rollout(), 2, HINT, header_ids=HEADER)
    fits = splice(rollout(), 2, HINT, header_ids=HEADER, max_length=len(whole.teacher_ids))
    assert fits == whole
    shorter = splice(rollout(), 2, HINT, header_ids=HEADER, max_length=len(whole.teacher_ids) - 1)
    assert shorter.teacher_ids == BODY + HEADER + TURNS[1] + RESULTS[1] + HINT + HEADER + TURNS[2]
    assert shorter.shared_prefix == len(BODY + HEADER)
    assert shorter.student_positions == whole.student_positions
    shortest = splice(rollout(), 2, HINT, header_ids=HEADER, max_length=len(shorter.teacher_ids) - 1)
    assert shortest.teacher_ids == BODY + HINT + HEADER + TURNS[2]


def test_then_the_prompt_loses_tokens_behind_its_head_and_hint_and_turn_stay() -> None:
    needed = len(HINT + HEADER + TURNS[2])
    item = splice(rollout(), 2, HINT, header_ids=HEADER, max_length=needed + 3, prompt_head=2)
    assert item.teacher_ids == BODY[:2] + BODY[-1:] + HINT + HEADER + TURNS[2]
    assert tuple(item.teacher_ids[p + 1] for p in item.teacher_positions) == TURNS[2]
    with pytest.raises(DoesNotFit, match="room for 1 tokens"):
        splice(rollout(), 2, HINT, header_ids=HEADER, max_length=needed + 1, prompt_head=2)


@given(max_length=st.integers(0, 40), turn=st.integers(0, 2), hint=st.lists(st.integers(80, 89), max_size=6))
def test_a_row_is_never_longer_than_allowed_and_never_without_its_hint_and_turn(
    max_length: int, turn: int, hint: list[int]
) -> None:
    needed = (*hint, *HEADER, *TURNS[turn])
    try:
        item = splice(rollout(), turn, hint, header_ids=HEADER, max_length=max_length)
    except DoesNotFit:
        assert max_length < len(needed) + 1
        return
    assert len(item.teacher_ids) <= max_length
    assert item.teacher_ids[-len(needed) :] == needed
    assert item.teacher_ids[0] == BODY[0]
    student = rollout().prompt_ids + rollout().completion_ids
    assert item.shared_prefix == common_prefix(item.teacher_ids, student)
    assert tuple(item.teacher_ids[p + 1] for p in item.teacher_positions) == item.target_ids


def test_a_context_that_does_not_end_with_the_header_is_refused() -> None:
    with pytest.raises(ValueError, match="not preceded by the generation prompt"):
        splice(rollout(), 1, HINT, header_ids=(7, 91))
    bare = Rollout((), (1, 2), (1, 1), (Turn(0, 0, 2),))
    with pytest.raises(ValueError, match="not preceded"):
        splice(bare, 0, HINT, header_ids=HEADER)


def test_a_turn_of_another_rollout_and_an_empty_one_are_refused() -> None:
    with pytest.raises(ValueError, match="none of the rollout's 3"):
        splice(rollout(), Turn(7, 0, 3), HINT, header_ids=HEADER)
    hollow = replace(rollout(), turns=(Turn(0, 0, 0),))
    with pytest.raises(ValueError, match=r"\[0, 0\)"):
        splice(hollow, 0, HINT, header_ids=HEADER)


def test_tokens_before_the_first_turn_are_history_too() -> None:
    """Some trainers give the generation prompt with the completion: what stands there must not fall out of a row."""
    plain = rollout()
    lead = len(HEADER)
    moved = Rollout(
        BODY,
        HEADER + plain.completion_ids,
        (0,) * lead + plain.mask,
        tuple(Turn(turn.index, turn.start + lead, turn.stop + lead) for turn in plain.turns),
    )
    for turn in range(3):
        assert splice(moved, turn, HINT, header_ids=HEADER) == splice(plain, turn, HINT, header_ids=HEADER)
    with pytest.raises(ValueError, match="cannot be cut"):
        splice(moved, 2, HINT, header_ids=HEADER, max_length=len(HINT + HEADER + TURNS[2]) + len(BODY) + 1)

"""What a first sketch of channel 2 got wrong, each mistake with the test that shows it made and avoided."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from three_turns import BODY, HEADER, HINT, RESULTS, TURNS, rollout
from toy_models import VOCABULARY, toy

from errata_trainer import SdpoItem
from errata_trainer.channels.distil import distil
from errata_trainer.channels.forward import frozen_states, trained_states
from errata_trainer.channels.heads import output_head
from errata_trainer.channels.sdpo import generalized_jsd_loss
from errata_trainer.channels.splicing import check_alignment, splice

STUDENT = rollout().prompt_ids + rollout().completion_ids


def site(turn: int = 1, hint: tuple[int, ...] = HINT) -> SdpoItem:
    return splice(rollout(), turn, hint, header_ids=HEADER)


def test_1_rows_of_different_lengths_are_compared_by_positions_not_as_wholes() -> None:
    model, item = toy("qwen3"), site()
    student = model(input_ids=torch.tensor([STUDENT])).logits
    teacher = model(input_ids=torch.tensor([item.teacher_ids])).logits
    with pytest.raises(ValueError, match="gather both"):
        generalized_jsd_loss(student, teacher, torch.ones(student.shape[:2], dtype=torch.bool))
    check_alignment(item, STUDENT)
    shifted = replace(item, teacher_positions=item.student_positions)  # as after padding to one length
    with pytest.raises(ValueError, match="not behind position"):
        check_alignment(shifted, STUDENT)
    with pytest.raises(ValueError, match="4 targets, 3 positions"):
        check_alignment(replace(item, student_positions=item.student_positions[1:]), STUDENT)


def test_2_labels_are_no_mask_and_a_mask_is_no_labels() -> None:
    logits = torch.randn(1, 3, 5)
    labels = torch.tensor([[-100, 0, 4]])
    with pytest.raises(ValueError, match="labels != -100"):
        generalized_jsd_loss(logits, -logits, labels)
    right = generalized_jsd_loss(logits, -logits, labels != -100)
    torch.testing.assert_close(right, generalized_jsd_loss(logits[:, 1:], -logits[:, 1:], torch.ones(1, 2)))


def test_3_a_batch_without_a_site_is_zero_not_nan_although_it_has_tokens() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    loss = generalized_jsd_loss(logits, -logits, torch.zeros(1, 3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad.abs().sum() == 0.0


def test_4_each_site_has_a_row_of_its_own_that_ends_with_its_turn() -> None:
    first, second = site(0), site(1)
    assert first.teacher_ids == BODY + HINT + HEADER + TURNS[0]
    # the first hint is not in the second row: it would shift every later turn and tell it more than the student knew
    assert second.teacher_ids[: second.shared_prefix] == STUDENT[: second.shared_prefix]
    assert second.teacher_ids == BODY + HEADER + TURNS[0] + RESULTS[0] + HINT + HEADER + TURNS[1]


def test_5_the_loss_is_on_the_failing_action_given_the_hint_not_on_what_comes_after() -> None:
    item = site()
    hint_at = len(item.teacher_ids) - len(HINT + HEADER + TURNS[1])
    assert item.teacher_ids[hint_at : hint_at + len(HINT)] == HINT
    assert min(item.teacher_positions) >= hint_at + len(HINT)
    assert item.target_ids == TURNS[1]
    assert RESULTS[1][0] not in item.teacher_ids[hint_at:]


def test_6_history_is_cut_never_the_hint_or_the_turn() -> None:
    needed = HINT + HEADER + TURNS[2]
    short = splice(rollout(), 2, HINT, header_ids=HEADER, max_length=len(needed) + 2)
    assert short.teacher_ids[-len(needed) :] == needed
    check_alignment(short, STUDENT)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_7_without_a_hint_nothing_is_learnt_unless_dropout_makes_a_difference(dropout: float) -> None:
    model, item = toy("qwen3", attention_dropout=dropout).train(), site(hint=())
    torch.manual_seed(0)
    student = trained_states(model, [STUDENT], [item.student_positions])
    head = output_head(model)
    loss, _ = distil(student, frozen_states(model, [item.teacher_ids], [item.teacher_positions]), head.weight)
    loss.backward()
    largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    if dropout:
        assert loss.item() > 1e-3  # what `active_dropout` warns of
    else:
        assert abs(loss.item()) < 1e-6
        assert largest < 1e-6


def test_8_only_the_turns_tokens_are_ever_as_wide_as_the_vocabulary() -> None:
    model, item = toy("qwen3"), site()
    widths: list[int] = []
    model.lm_head.register_forward_hook(lambda _m, _a, logits: widths.append(logits.numel() // VOCABULARY))
    student = trained_states(model, [STUDENT], [item.student_positions])
    teacher = frozen_states(model, [item.teacher_ids], [item.teacher_positions])
    assert len(student) == len(teacher) == len(TURNS[1])
    assert widths == [1, 1]  # a position for each pass, because models make one at least

"""What a first sketch of channel 2 got wrong, each mistake with the test that shows it made and avoided.

And what callers may give that would be broadcast, or computed, to a number that means nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from three_turns import BODY, HEADER, HINT, RESULTS, TURNS, rollout
from torch import Tensor
from toy_models import VOCABULARY, toy

from errata_trainer import SdpoItem
from errata_trainer.channels.compose import compose
from errata_trainer.channels.distil import action_logprobs, distil
from errata_trainer.channels.forward import frozen_states, trained_states
from errata_trainer.channels.heads import output_head
from errata_trainer.channels.sdpo import (
    Divergence,
    aggregate,
    generalized_jsd_loss,
    importance_weights,
    log_probabilities,
    sampled_token_loss,
    sdpo_loss,
)
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


B, T, V = 2, 3, 5
LOGITS = torch.randn(B, T, V, generator=torch.Generator().manual_seed(0))
MASK, IDS, OLD = torch.ones(B, T, dtype=torch.bool), torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize(
    "given",
    [
        {"old_logprobs": OLD[..., None]},
        {"old_logprobs": OLD[:1]},
        {"old_logprobs": OLD[:, :1]},
        {"old_logprobs": OLD.flatten()},
        {"target_ids": IDS[..., None]},
        {"target_ids": IDS[:, :2]},
        {"target_ids": IDS.flatten()},
    ],
    ids=lambda given: " ".join(f"{name} {list(value.shape)}" for name, value in given.items()),
)
def test_ids_and_old_log_probabilities_of_another_shape_are_refused(given: dict[str, Tensor], aggregation: Any) -> None:
    options = {"target_ids": IDS, "old_logprobs": OLD} | given
    (name,) = given
    with pytest.raises(ValueError, match=rf"{name} is .*\[B, T\]"):
        sdpo_loss(LOGITS, -LOGITS, MASK, is_clip=2.0, aggregation=aggregation, **options)
    with pytest.raises(ValueError, match=rf"{name} is .*\[B, T\]"):
        sampled_token_loss(LOGITS, -LOGITS, mask=MASK, is_clip=2.0, aggregation=aggregation, **options)


def test_what_is_weighed_and_aggregated_has_the_shape_of_what_weighs() -> None:
    with pytest.raises(ValueError, match="old_logprobs is"):
        importance_weights(torch.zeros(3), torch.zeros(3, 1), 2.0)
    with pytest.raises(ValueError, match="per_token is"):
        aggregate(torch.zeros(2, 1), MASK)
    with pytest.raises(ValueError, match="teacher_logits is"):
        Divergence(top_k=2)(LOGITS, LOGITS[..., :4])  # its likeliest ids exist on both sides


HIDDEN, WEIGHT = torch.randn(4, 6), torch.randn(V, 6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_weights": torch.ones(4, 1)}, r"token_weights is \[4, 1\]"),
        ({"token_weights": torch.ones(1)}, r"token_weights is \[1\]"),
        ({"token_weights": torch.ones(())}, r"token_weights is \[\]"),
        ({"bias": torch.ones(V, 1)}, r"bias is \[5, 1\]"),
        ({"bias": torch.ones(1)}, r"bias is \[1\]"),
        ({"weight": torch.randn(V, 7)}, r"weight is \[5, 7\]"),
        ({"weight": torch.randn(6)}, r"weight is \[6\]"),
        ({"student_hidden": torch.randn(4, 1, 6)}, r"student_hidden is \[4, 1, 6\]"),
        ({"teacher_hidden": torch.randn(4, 1, 6)}, r"teacher_hidden is \[4, 1, 6\]"),
        ({"teacher_weight": torch.randn(V + 1, 6)}, r"teacher_weight is \[6, 6\]"),
        ({"teacher_weight": torch.randn(V, 6), "teacher_bias": torch.ones(1)}, r"teacher_bias is \[1\]"),
        ({"teacher_bias": torch.ones(V)}, "comes with teacher_weight"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_head_or_weights_that_do_not_fit_are_refused(wrong: dict[str, Tensor], message: str) -> None:
    given: dict[str, Any] = {"student_hidden": HIDDEN, "teacher_hidden": HIDDEN, "weight": WEIGHT} | wrong
    with pytest.raises(ValueError, match=message):
        distil(**given)
    if wrong.keys() <= {"weight", "bias"}:
        with pytest.raises(ValueError, match=message):
            action_logprobs(HIDDEN, torch.zeros(4, dtype=torch.int64), given["weight"], given.get("bias"))


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_an_option_that_means_nothing_is_refused_wherever_it_is_given(value: float) -> None:
    for act in (
        lambda: sampled_token_loss(LOGITS, -LOGITS, IDS, MASK, temperature=value),
        lambda: log_probabilities(LOGITS, value),
        lambda: action_logprobs(HIDDEN, torch.zeros(4, dtype=torch.int64), WEIGHT, temperature=value),
    ):
        with pytest.raises(ValueError, match="temperature is"):
            act()
    with pytest.raises(ValueError, match="is_clip is"):
        sampled_token_loss(LOGITS, -LOGITS, IDS, MASK, old_logprobs=OLD, is_clip=value)
    with pytest.raises(ValueError, match="is_clip is"):
        sdpo_loss(LOGITS, -LOGITS, MASK, target_ids=IDS, old_logprobs=OLD, is_clip=value)
    with pytest.raises(ValueError, match="averaged_over is"):
        compose(torch.ones(()), averaged_over=value)  # type: ignore[arg-type]
    if value != 0.0:  # a channel can be off
        for name in ("alpha_sdpo", "beta_replay"):
            with pytest.raises(ValueError, match=f"{name} is"):
                compose(torch.ones(()), **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("b", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("support", ["teacher", "student"])
@pytest.mark.parametrize("low", [-math.inf, -1e9])
def test_a_side_to_which_the_likeliest_ids_are_impossible_is_far_away_not_below_nothing(
    low: float, support: Any, b: float, tail: bool
) -> None:
    student = torch.tensor([[[0.0, low, low]]], requires_grad=True)
    teacher = torch.tensor([[[low, 1.0, 2.0]]])
    divergence = Divergence(b, 1.0, 10.0, "token", 2, support, tail)
    value = divergence(student, teacher)
    assert 0.0 <= value.item() <= 10.0
    value.sum().backward()
    assert student.grad.isfinite().all()


def test_an_impossible_likeliest_id_is_the_clip_with_top_k_as_without() -> None:
    student = torch.tensor([[[0.0, -math.inf, -math.inf]]], requires_grad=True)
    teacher = torch.tensor([[[-math.inf, 1.0, 2.0]]])
    mask = torch.ones(1, 1, dtype=torch.bool)
    for top_k in (None, 2):
        loss = generalized_jsd_loss(student, teacher, mask, jsd_beta=0.0, top_k=top_k, clip_mode="token")
        assert loss.item() == 10.0

"""The flat tensors give the losses that the records mean, whatever the padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from errata_trainer import Call, DpoPair, Rollout, SdpoItem, Turn
from errata_trainer.assembly.collator import IGNORED, collate_columns, collate_dpo, collate_rollouts, collate_sdpo
from errata_trainer.channels.sdpo import generalized_jsd_loss
from errata_trainer.channels.splicing import splice
from errata_trainer.tiny import tiny_model, tiny_tokenizer

HEADER = (8, 9)
HINT = (20, 21, 22)
PAD = 0


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(tiny_tokenizer(["abc"]), seed=3).double()


def rollouts() -> list[Rollout]:
    """Two of different lengths, the first with two turns."""
    first = Rollout(
        (5, 6, *HEADER), (31, 32, 33, 40, *HEADER, 34, 35), (1, 1, 1, 0, 0, 0, 1, 1), (Turn(0, 0, 3), Turn(1, 6, 8))
    )
    second = Rollout((7, *HEADER), (36, 37), (1, 1), (Turn(0, 0, 2),), reward=1.0)
    return [first, second]


def items(hint: tuple[int, ...] = HINT) -> list[list[SdpoItem]]:
    one, two = rollouts()
    return [[splice(one, turn, hint, header_ids=HEADER) for turn in (0, 1)], [splice(two, 0, hint, header_ids=HEADER)]]


def published_jsd(student: Any, teacher: Any, labels: Any, beta: float = 0.5) -> Any:
    """Return what OPSD's function returns for whole tensors and labels, written out."""
    valid = labels != -100
    s, t = student[valid].log_softmax(-1), teacher[valid].log_softmax(-1)
    mixture = torch.logsumexp(torch.stack([s + torch.tensor(1 - beta).log(), t + torch.tensor(beta).log()]), 0)
    return (beta * (t.exp() * (t - mixture)).sum(-1) + (1 - beta) * (s.exp() * (s - mixture)).sum(-1)).mean()


def test_rows_of_one_site_end_together_and_the_labels_are_the_turn(model: Any) -> None:
    batch = collate_sdpo(rollouts(), items(), pad_id=PAD)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        "ctx_teacher_input_ids": (3, 15),
        "ctx_teacher_attention_mask": (3, 15),
        "ctx_student_input_ids": (3, 15),
        "ctx_student_attention_mask": (3, 15),
        "sdpo_loss_mask": (3, 15),
        "sdpo_weights": (3,),
        "sdpo_rows": (3,),
    }
    assert batch["sdpo_rows"].tolist() == [0, 0, 1]
    labels = batch["sdpo_loss_mask"]
    for name in ("ctx_teacher_input_ids", "ctx_student_input_ids"):
        after = batch[name].roll(-1, dims=1)
        assert torch.equal(labels[labels != IGNORED], after[labels != IGNORED])
    assert [row[row != IGNORED].tolist() for row in labels] == [[31, 32, 33], [34, 35], [36, 37]]


def test_the_loss_of_the_flat_tensors_is_the_loss_of_the_records(model: Any) -> None:
    batch = collate_sdpo(rollouts(), items(), pad_id=PAD)
    with torch.no_grad():
        flat = {}
        for side in ("student", "teacher"):
            ids, mask = batch[f"ctx_{side}_input_ids"], batch[f"ctx_{side}_attention_mask"]
            flat[side] = model(input_ids=ids, attention_mask=mask).logits
        students, teachers = [], []
        for rollout, of_rollout in zip(rollouts(), items(), strict=True):
            whole = model(input_ids=torch.tensor([rollout.prompt_ids + rollout.completion_ids])).logits[0]
            for item in of_rollout:
                students.append(whole[list(item.student_positions)])
                hinted = model(input_ids=torch.tensor([item.teacher_ids])).logits[0]
                teachers.append(hinted[list(item.teacher_positions)])
    student, teacher = torch.cat(students)[None], torch.cat(teachers)[None]
    expected = generalized_jsd_loss(student, teacher, torch.ones(student.shape[:2], dtype=torch.bool))
    labels = batch["sdpo_loss_mask"]
    for loss in (
        generalized_jsd_loss(flat["student"], flat["teacher"], labels != IGNORED),
        published_jsd(flat["student"], flat["teacher"], labels),
    ):
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)  # Qwen3's norms and angles are in float32
    assert expected.item() > 1e-6


def test_an_empty_hint_has_no_loss(model: Any) -> None:
    batch = collate_sdpo(rollouts(), items(hint=()), pad_id=PAD)
    assert torch.equal(batch["ctx_teacher_input_ids"], batch["ctx_student_input_ids"])


def test_without_sites_and_pairs_there_are_no_tensors() -> None:
    assert collate_sdpo(rollouts(), [[], []], pad_id=PAD) == {}
    assert collate_dpo([], pad_id=PAD) == {}


def test_an_item_of_another_rollout_is_refused() -> None:
    one, two = rollouts()
    with pytest.raises(ValueError, match="not the ones of rollout 0"):
        collate_sdpo([replace(two, completion_ids=(36, 38))], [items()[1]], pad_id=PAD)
    item = items()[0][0]
    with pytest.raises(ValueError, match="not the ones of rollout 0"):
        collate_sdpo([one], [[replace(item, teacher_ids=(*item.teacher_ids, 1))]], pad_id=PAD)
    with pytest.raises(ValueError, match="is not behind position"):
        collate_sdpo([one], [[replace(item, target_ids=(*item.target_ids[:-1], 1))]], pad_id=PAD)
    with pytest.raises(ValueError, match="no tokens"):
        collate_sdpo([one], [[SdpoItem(0, (1,), (), (), ())]], pad_id=PAD)


def test_the_labels_of_a_pair_give_the_summed_log_probability_of_each_action(model: Any) -> None:
    pairs = [
        DpoPair((5, 6, 7), (31, 32), (33,), -1.0, -2.0, "r"),
        DpoPair((5,), (34,), (35, 36, 37), -3.0, -4.0, "r", weight=0.5),
    ]
    batch = collate_dpo(pairs, pad_id=PAD)
    assert batch["dpo_chosen_ref_logprobs"].tolist() == [-1.0, -3.0]
    assert batch["dpo_rejected_ref_logprobs"].tolist() == [-2.0, -4.0]
    assert batch["dpo_weights"].tolist() == [1.0, 0.5]
    for side in ("chosen", "rejected"):
        with torch.no_grad():
            logits = model(
                input_ids=batch[f"dpo_{side}_input_ids"], attention_mask=batch[f"dpo_{side}_attention_mask"]
            ).logits
        labels = batch[f"dpo_{side}_labels"][:, 1:]
        flat = logits[:, :-1].transpose(1, 2)
        sums = -functional.cross_entropy(flat, labels, ignore_index=IGNORED, reduction="none").sum(1)
        for pair, got in zip(pairs, sums, strict=True):
            action = pair.chosen_ids if side == "chosen" else pair.rejected_ids
            with torch.no_grad():
                row = model(input_ids=torch.tensor([pair.context_ids + action])).logits[0].log_softmax(-1)
            at = len(pair.context_ids) - 1
            expected = sum(row[at + n, token].item() for n, token in enumerate(action))
            assert got.item() == pytest.approx(expected, rel=1e-6)


def test_reference_log_probabilities_come_together_or_not_at_all() -> None:
    pair = DpoPair((5,), (6,), (7,))
    assert not any("ref" in name for name in collate_dpo([pair], pad_id=PAD))
    known = replace(pair, ref_chosen=-1.0, ref_rejected=-1.0, reference="a")
    with pytest.raises(ValueError, match="pair 1 has no reference"):
        collate_dpo([known, pair], pad_id=PAD)
    with pytest.raises(ValueError, match="2 references"):
        collate_dpo([known, replace(known, reference="b")], pad_id=PAD)


def test_rollouts_are_padded_on_the_right_and_a_lost_one_has_no_reward() -> None:
    one, two = rollouts()
    batch = collate_rollouts([one, two, replace(two, lost="SESSION_LOST")], pad_id=PAD)
    assert batch["input_ids"].shape == (3, 12)
    assert batch["input_ids"][1].tolist() == [7, 8, 9, 36, 37] + [PAD] * 7
    assert batch["completion_mask"].sum(1).tolist() == [5, 2, 2]
    assert batch["attention_mask"].sum(1).tolist() == [12, 5, 5]
    assert [value != value for value in batch["rewards"].tolist()] == [True, False, True]


def test_a_mask_of_another_length_than_its_completion_is_refused() -> None:
    one, two = rollouts()
    for mask in (two.mask[:-1], (*two.mask, 1)):
        with pytest.raises(ValueError, match=rf"rollout 1 has a mask of {len(mask)} for 2 completion ids"):
            collate_rollouts([one, replace(two, mask=mask)], pad_id=PAD)


def test_columns_stand_at_the_tokens_themselves() -> None:
    turns = (Turn(0, 0, 2, (Call("run", {}, 1),)), Turn(1, 3, 5, (Call("run", {}, 2),)))
    long = Rollout((1, 2), (10, 11, 7, 12, 13), (1, 1, 0, 1, 1), turns, eid="a")
    short = Rollout((1,), (10, 11), (1, 1), turns[:1], eid="b")
    item = SdpoItem(1, (1, 2, 9, 12, 13), (4, 5), (2, 3), (12, 13), weight=0.5)
    votes = {("a", 1): {"x": "key", "y": None}, ("b", 3): {"x": "other"}}
    batch = collate_columns([short, long], [[], [item]], pad_id=0, teacher_logprobs=[[], [[-0.5, -1.5]]], votes=votes)
    assert batch["input_ids"].tolist() == [[1, 10, 11, 0, 0, 0, 0], [1, 2, 10, 11, 7, 12, 13]]
    assert batch["input_ids"][batch["sdpo_error_mask"]].tolist() == [12, 13]
    assert batch["sdpo_weights"].tolist() == [[0.0] * 7, [0, 0, 0, 0, 0, 0.5, 0.5]]
    assert batch["sdpo_teacher_logprobs"][1].tolist() == [0, 0, 0, 0, 0, -0.5, -1.5]
    assert batch["teacher_actions"] == [{}, {1: {"x": "key", "y": None}}]
    plain = collate_columns([short], [[]], pad_id=0)
    assert "teacher_actions" not in plain and "sdpo_teacher_logprobs" not in plain
    with pytest.raises(ValueError, match="tokens are not the ones of rollout 0"):
        collate_columns([short], [[item]], pad_id=0)
    with pytest.raises(ValueError, match="has 2 tokens and 1 log-probabilities"):
        collate_columns([long], [[item]], pad_id=0, teacher_logprobs=[[[-0.5]]])

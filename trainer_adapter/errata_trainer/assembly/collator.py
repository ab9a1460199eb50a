"""Rollouts, error sites and pairs as padded tensors, for trainers of your own.

Channel 2 has two rows for each error site: the student's without the hint and the teacher's with it. Both are padded on
the left and end with the failing turn, so the turn's tokens are in the same columns and whole logit tensors can be
compared::

    student = model(batch["ctx_student_input_ids"], attention_mask=batch["ctx_student_attention_mask"]).logits
    with torch.no_grad():
        teacher = model(batch["ctx_teacher_input_ids"], attention_mask=batch["ctx_teacher_attention_mask"]).logits
    kl = generalized_jsd_loss(student, teacher, batch["sdpo_loss_mask"] != -100)

This computes the student's logits a second time and for whole rows. It is simple and expensive; the recipes do neither.
A model with absolute position embeddings also needs ``position_ids=(attention_mask.cumsum(-1) - 1).clamp(min=0)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..channels.splicing import check_alignment
from ..rollouts.rollout import DpoPair, Rollout, SdpoItem, state_of_turns
from .pair_source import Votes

IGNORED = -100
"""Label of a position that does not count, as in PyTorch's losses."""


def collate_rollouts(rollouts: Sequence[Rollout], *, pad_id: int) -> dict[str, Tensor]:
    """Return rollouts as tensors padded on the right.

    Args:
        rollouts: The batch's B rollouts.
        pad_id: Token to pad with.

    Returns:
        ``input_ids`` [B, T] int64, prompt and completion; ``attention_mask`` [B, T] int64; ``completion_mask`` [B, T]
        bool, true where the student sampled; ``rewards`` [B] float32, NaN for a rollout without one.

    Raises:
        ValueError: A mask of another length than its completion.
    """
    for row, rollout in enumerate(rollouts):
        if len(rollout.mask) != len(rollout.completion_ids):
            raise ValueError(
                f"rollout {row} has a mask of {len(rollout.mask)} for {len(rollout.completion_ids)} completion ids"
            )
    rows = [rollout.prompt_ids + rollout.completion_ids for rollout in rollouts]
    sampled = [(0,) * len(rollout.prompt_ids) + rollout.mask for rollout in rollouts]
    return {
        "input_ids": _padded(rows, pad_id),
        "attention_mask": _padded([(1,) * len(row) for row in rows], 0),
        "completion_mask": _padded(sampled, 0).bool(),
        "rewards": torch.tensor(
            [float("nan") if one.reward is None or one.lost is not None else one.reward for one in rollouts]
        ),
    }


def collate_sdpo(rollouts: Sequence[Rollout], items: Sequence[Sequence[SdpoItem]], *, pad_id: int) -> dict[str, Tensor]:
    """Return error sites as a student row and a teacher row each, padded on the left.

    Args:
        rollouts: The batch's B rollouts.
        items: Items of each rollout, S in all.
        pad_id: Token to pad with.

    Returns:
        Empty without items, else

        - ``ctx_teacher_input_ids``, ``ctx_student_input_ids`` [S, T] int64: what teacher and student read up to the
          end of the failing turn;
        - ``ctx_teacher_attention_mask``, ``ctx_student_attention_mask`` [S, T] int64;
        - ``sdpo_loss_mask`` [S, T] int64, labels of the logits at the same place: at column c the target token
          that stands at c + 1 in both rows, -100 elsewhere. They are shifted already, as OPSD's loss wants them; a
          0/1 mask in its place would mask nothing there. ``sdpo_loss_mask != -100`` is a mask;
        - ``sdpo_weights`` [S] float32, ``sdpo_rows`` [S] int64: which rollout.

    Raises:
        ValueError: An item has no tokens or does not fit its rollout.
    """
    students, teachers, labels, weights, rows = [], [], [], [], []
    for row, (rollout, of_rollout) in enumerate(zip(rollouts, items, strict=True)):
        ids = rollout.prompt_ids + rollout.completion_ids
        for item in of_rollout:
            if not item.target_ids:
                raise ValueError(f"turn {item.turn} has no tokens")
            # Targets may be a part of the turn; both rows go on from the first one to the turn's end.
            first, other = item.teacher_positions[0], item.student_positions[0]
            rest = item.teacher_ids[first + 1 :]
            student = ids[: other + 1 + len(rest)]
            if student[other + 1 :] != rest:
                raise ValueError(f"turn {item.turn}: its tokens are not the ones of rollout {row}")
            check_alignment(item, student)
            students.append(student)
            teachers.append(item.teacher_ids)
            label = [IGNORED] * (len(rest) + 1)  # the last logits predict what comes after the turn
            for position, token in zip(item.teacher_positions, item.target_ids, strict=True):
                label[position - first] = token
            labels.append(label)
            weights.append(item.weight)
            rows.append(row)
    if not students:
        return {}
    length = max(map(len, [*students, *teachers]))
    return {
        "ctx_teacher_input_ids": _padded(teachers, pad_id, length, left=True),
        "ctx_teacher_attention_mask": _padded([(1,) * len(one) for one in teachers], 0, length, left=True),
        "ctx_student_input_ids": _padded(students, pad_id, length, left=True),
        "ctx_student_attention_mask": _padded([(1,) * len(one) for one in students], 0, length, left=True),
        "sdpo_loss_mask": _padded(labels, IGNORED, length, left=True),
        "sdpo_weights": torch.tensor(weights, dtype=torch.float32),
        "sdpo_rows": torch.tensor(rows, dtype=torch.int64),
    }


def collate_columns(
    rollouts: Sequence[Rollout],
    items: Sequence[Sequence[SdpoItem]],
    *,
    pad_id: int,
    teacher_logprobs: Sequence[Sequence[Sequence[float]]] | None = None,
    votes: Votes | None = None,
) -> dict[str, Any]:
    """Return error sites as extra columns of the padded rollouts, for trainers whose batches are such columns (VeRL's
    DataProto).

    Everything stands at the place of the token itself, as a response mask does, not at the place that predicts it: the
    log-probability of ``input_ids[:, c]`` belongs to column c.

    Args:
        rollouts: The batch's B rollouts.
        items: Items of each rollout.
        pad_id: Token to pad with.
        teacher_logprobs: Log-probabilities of each item's ``target_ids`` with the hint before them, e.g. from
            `channels.sampled.target_logprobs`; None leaves the column out.
        votes: Teachers' votes at states, as `DpoPair.votes`, by episode and delivery; None leaves the column out.

    Returns:
        The tensors of `collate_rollouts`, and

        - ``sdpo_error_mask`` [B, T] bool: the targets of failing turns that have a hint: whole turns or their calls;
        - ``sdpo_weights`` [B, T] float32: of each in the loss, 0 elsewhere;
        - ``sdpo_teacher_logprobs`` [B, T] float32, with ``teacher_logprobs``: 0 elsewhere;
        - ``teacher_actions``: a list of B mappings from turn to votes, with ``votes``.

    Raises:
        ValueError: An item does not fit its rollout, or has another number of log-probabilities.
    """
    batch: dict[str, Any] = collate_rollouts(rollouts, pad_id=pad_id)
    mask = torch.zeros_like(batch["completion_mask"])
    weights, logprobs = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for row, (rollout, of_rollout) in enumerate(zip(rollouts, items, strict=True)):
        ids = rollout.prompt_ids + rollout.completion_ids
        for number, item in enumerate(of_rollout):
            places = [position + 1 for position in item.student_positions]
            if not places or places[-1] >= len(ids) or tuple(ids[place] for place in places) != item.target_ids:
                raise ValueError(f"turn {item.turn}: its tokens are not the ones of rollout {row}")
            mask[row, places] = True
            weights[row, places] = item.weight
            if teacher_logprobs is not None:
                found = teacher_logprobs[row][number]
                if len(found) != len(places):
                    raise ValueError(
                        f"turn {item.turn} of rollout {row} has {len(places)} tokens and {len(found)} log-probabilities"
                    )
                logprobs[row, places] = torch.tensor(found, dtype=torch.float32)
    batch |= {"sdpo_error_mask": mask, "sdpo_weights": weights}
    if teacher_logprobs is not None:
        batch["sdpo_teacher_logprobs"] = logprobs
    if votes is not None:
        batch["teacher_actions"] = [votes_of_turns(rollout, votes) for rollout in rollouts]
    return batch


def votes_of_turns(rollout: Rollout, votes: Votes) -> dict[int, dict[str, str | None]]:
    """Return the teachers' votes at the state of each turn, by the turn's index; turns without votes are left out.

    Args:
        rollout: Rollout with the turns.
        votes: Teachers' votes at states.
    """
    return {
        turn: dict(votes[rollout.eid, t])
        for turn, t in state_of_turns(rollout).items()
        if rollout.eid is not None and t is not None and (rollout.eid, t) in votes
    }


def collate_dpo(pairs: Sequence[DpoPair], *, pad_id: int) -> dict[str, Tensor]:
    """Return preference pairs as tensors padded on the right.

    Args:
        pairs: The batch's P pairs.
        pad_id: Token to pad with.

    Returns:
        Empty without pairs, else, for ``chosen`` and ``rejected`` alike,

        - ``dpo_chosen_input_ids`` [P, T] int64, context and action; ``dpo_chosen_attention_mask`` [P, T] int64;
        - ``dpo_chosen_labels`` [P, T] int64: the tokens of the action at their own places, -100 elsewhere: the
          log-probability of ``labels[:, 1:]`` is that of ``logits[:, :-1]``;
        - ``dpo_chosen_ref_logprobs`` [P] float32, summed over the action; not there where no pair has them yet;

        and ``dpo_weights`` [P] float32.

    Raises:
        ValueError: Some pairs have reference log-probabilities and some have none, or they are of two references.
    """
    if not pairs:
        return {}
    known = [pair.ref_chosen is not None and pair.ref_rejected is not None for pair in pairs]
    if any(known) and not all(known):
        raise ValueError(f"pair {known.index(False)} has no reference log-probabilities, others do: compute them first")
    references = {pair.reference for pair in pairs} if all(known) else set()
    if len(references) > 1:
        raise ValueError(f"the pairs' log-probabilities are of {len(references)} references: keep them apart")
    batch: dict[str, Tensor] = {}
    for side in ("chosen", "rejected"):
        actions = [pair.chosen_ids if side == "chosen" else pair.rejected_ids for pair in pairs]
        rows = [pair.context_ids + action for pair, action in zip(pairs, actions, strict=True)]
        labels = [(IGNORED,) * len(pair.context_ids) + action for pair, action in zip(pairs, actions, strict=True)]
        batch[f"dpo_{side}_input_ids"] = _padded(rows, pad_id)
        batch[f"dpo_{side}_attention_mask"] = _padded([(1,) * len(row) for row in rows], 0)
        batch[f"dpo_{side}_labels"] = _padded(labels, IGNORED)
        if all(known):
            sums = [pair.ref_chosen if side == "chosen" else pair.ref_rejected for pair in pairs]
            batch[f"dpo_{side}_ref_logprobs"] = torch.tensor(sums, dtype=torch.float32)
    batch["dpo_weights"] = torch.tensor([pair.weight for pair in pairs], dtype=torch.float32)
    return batch


def _padded(rows: Sequence[Sequence[int]], value: int, length: int | None = None, *, left: bool = False) -> Tensor:
    length = max((len(row) for row in rows), default=0) if length is None else length
    out = torch.full((len(rows), length), value, dtype=torch.int64)
    for index, row in enumerate(rows):
        if row:
            out[index, length - len(row) if left else 0 : length if left else len(row)] = torch.tensor(row)
    return out

"""Channel 2 from log-probabilities instead of logits, e.g. with a teacher on an inference server.

An inference server returns the log-probability of each prompt token and of some other tokens at its position (vLLM's
``prompt_logprobs``). The teacher's row is such a prompt, so the trainer's GPUs need not hold the teacher::

    answer = complete(prompt=list(item.teacher_ids), max_tokens=1, prompt_logprobs=20)   # any client
    ids, logprobs = top_k_lists(answer.prompt_logprobs, item.teacher_positions, k=20)
    loss = top_k_divergence(student_logits, ids, logprobs, tail=True).sum()
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import not_negative, shaped, upper_bound
from .precision import wide
from .sdpo import Aggregation, Divergence, aggregate, compare_lists, importance_weights, log_probabilities

PADDING = -1
"""Id of a place in a list that has no entry."""


def sampled_token_loss_from_logprobs(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    is_clip: float | None = None,
    aggregation: Aggregation = "token-mean",
) -> Tensor:
    """Return SDPO's sampled-token loss from log-probabilities; `errata_trainer.channels.sdpo.sampled_token_loss`
    computes it from logits.

    Args:
        student_logprobs: ``[B, T]`` the student's log-probabilities of the sampled ids, attached.
        teacher_logprobs: ``[B, T]`` the teacher's log-probabilities of the same ids, with the hint; no gradient flows
            into it.
        mask: ``[B, T]`` bool, True where a token counts; values elsewhere are not read.
        old_logprobs: ``[B, T]`` log-probabilities of the ids when they were sampled; needed for ``is_clip``.
        is_clip: Upper bound of the importance weight, > 0; None for no weights.
        aggregation: Reduction of the tokens' losses to a scalar; see `aggregate`.

    Returns:
        Scalar. Its gradient is that of KL(S||T) over samples of S; its value is no divergence. 0 for an empty mask.

    Raises:
        ValueError: Shapes that differ; ``is_clip`` without ``old_logprobs`` or out of its range.
    """
    mask = _checked(student_logprobs, teacher_logprobs, mask)
    shaped("old_logprobs", old_logprobs, tuple(mask.shape), "[B, T]")
    student = wide(student_logprobs[mask])
    per_token = (student.detach() - wide(teacher_logprobs.detach()[mask])) * student
    if is_clip is not None:
        if old_logprobs is None:
            raise ValueError("is_clip needs old_logprobs: without them there is no ratio to clip")
        per_token = per_token * importance_weights(student, wide(old_logprobs[mask]), is_clip)
    spread = torch.zeros(mask.shape, dtype=per_token.dtype, device=per_token.device).masked_scatter(mask, per_token)
    return aggregate(spread, mask, aggregation)


def sampled_token_advantages(
    student_logprobs: Tensor,
    teacher_logprobs: Tensor,
    mask: Tensor,
    *,
    weight: float = 1.0,
    clip: float | None = None,
) -> Tensor:
    """Return advantages that have the same effect as the sampled-token loss in a policy gradient.

    Minus the mean over tokens of advantage times log-probability has the gradient of
    `sampled_token_loss_from_logprobs`.

    Args:
        student_logprobs: ``[B, T]`` the student's log-probabilities of the sampled ids.
        teacher_logprobs: ``[B, T]`` the teacher's log-probabilities of the same ids, with the hint.
        mask: ``[B, T]`` bool, True where a token counts.
        weight: Factor of the advantages, >= 0: alpha_sdpo.
        clip: Upper bound of the absolute log-ratio, in nats; None for no bound.

    Returns:
        ``[B, T]`` without gradient: ``weight * (log T - log S)`` under the mask, 0 elsewhere.

    Raises:
        ValueError: Shapes that differ; an option out of its range.
    """
    not_negative("weight", weight)
    upper_bound("clip", clip)
    mask = _checked(student_logprobs, teacher_logprobs, mask)
    ratio = wide(teacher_logprobs.detach()) - wide(student_logprobs.detach())
    if clip is not None:
        ratio = ratio.clamp(-clip, clip)
    return weight * torch.where(mask, ratio, torch.zeros_like(ratio))


def top_k_divergence(
    student_logits: Tensor,
    ids: Tensor,
    teacher_logprobs: Tensor,
    *,
    jsd_beta: float = 0.5,
    temperature: float = 1.0,
    tail: bool = False,
    token_clip: float | None = 10.0,
) -> Tensor:
    """Return the divergence at each position from a teacher of which only the top-k log-probabilities are known.

    Where the lists are the teacher's own top k, it is ``Divergence(top_k=k, support="teacher", tail=tail)`` of logits.

    Args:
        student_logits: ``[..., V]`` logits of the student, attached.
        ids: ``[..., K]`` int64 ids of the teacher's lists, distinct in each list; `PADDING` where a list is shorter.
        teacher_logprobs: ``[..., K]`` the teacher's log-probabilities of ``ids``, at temperature 1; values at `PADDING`
            are not read.
        jsd_beta: Weight of the teacher in the mixture, in [0, 1]; 0 is KL(T||S), 1 is KL(S||T).
        temperature: Divisor of both sides' logits, > 0. It has to be 1 with ``tail``: the rest of the teacher's
            distribution at another temperature cannot be computed from a list.
        tail: Whether the rest of both distributions counts as one more id; otherwise both are renormalised.
        token_clip: Upper bound of each (token, vocabulary id) summand, > 0; None for no bound.

    Returns:
        ``[...]`` in nats.

    Raises:
        ValueError: Shapes that differ; an option out of its range; an id beyond the vocabulary; a list without entries.
    """
    if tail and temperature != 1.0:
        raise ValueError("tail needs temperature 1: the rest of the teacher's distribution is known at no other one")
    if ids.shape != teacher_logprobs.shape or ids.shape[:-1] != student_logits.shape[:-1]:
        raise ValueError(
            f"ids are {list(ids.shape)}, teacher_logprobs {list(teacher_logprobs.shape)}, student_logits "
            f"{list(student_logits.shape)}: they have to be [..., K], [..., K] and [..., V]"
        )
    known = ids != PADDING
    if not bool(known.any(-1).all()):
        raise ValueError("a position has no id at all: leave it out")
    if bool((ids[known] < 0).any()) or bool((ids[known] >= student_logits.shape[-1]).any()):
        raise ValueError(f"ids have to lie in [0, {student_logits.shape[-1]}), or be PADDING ({PADDING})")
    divergence = Divergence(jsd_beta, temperature, token_clip, top_k=ids.shape[-1], tail=tail)
    student = log_probabilities(student_logits, temperature).gather(-1, ids.clamp(min=0))
    teacher = wide(teacher_logprobs.detach()) / temperature
    return compare_lists(divergence, student, teacher.to(student.dtype), known)


def top_k_lists(
    prompt_logprobs: Sequence[Mapping[Any, Any] | None], positions: Sequence[int], *, k: int
) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities at the positions that predict the turn, from a server's answer.

    Args:
        prompt_logprobs: One entry for each token of the row, as vLLM and its OpenAI-compatible server give them: None
            for the first, else a mapping from id (an integer, or its decimal text) to a log-probability, or to an
            object or a mapping with ``logprob``. The entry at a token is the distribution before it.
        positions: Position before each target token, `SdpoItem.teacher_positions`.
        k: Most ids of each list; the likeliest are kept.

    Returns:
        ``[N, k]`` ids, int64, `PADDING` where there were fewer, and ``[N, k]`` log-probabilities, float32, -inf there.

    Raises:
        ValueError: A position without an entry, or ``k`` below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}: at least 1")
    ids = torch.full((len(positions), k), PADDING, dtype=torch.int64)
    logprobs = torch.full((len(positions), k), -math.inf)
    for row, position in enumerate(positions):
        entry = _entry(prompt_logprobs, position)
        best = sorted(((_logprob(value), int(key)) for key, value in entry.items()), reverse=True)[:k]
        ids[row, : len(best)] = torch.tensor([key for _, key in best], dtype=torch.int64)
        logprobs[row, : len(best)] = torch.tensor([value for value, _ in best])
    return ids, logprobs


def target_logprobs(
    prompt_logprobs: Sequence[Mapping[Any, Any] | None], positions: Sequence[int], target_ids: Sequence[int]
) -> list[float]:
    """Return the log-probability of each target token, from a server's answer.

    Args:
        prompt_logprobs: One entry for each token of the row; see `top_k_lists`.
        positions: Position before each target token, `SdpoItem.teacher_positions`.
        target_ids: Target tokens, `SdpoItem.target_ids`.

    Raises:
        ValueError: A position without an entry, or an entry without the target token.
    """
    found = []
    for position, target in zip(positions, target_ids, strict=True):
        entry = _entry(prompt_logprobs, position)
        value = entry.get(target, entry.get(str(target)))
        if value is None:
            raise ValueError(f"the entry of token {position + 1} has no log-probability of the token itself, {target}")
        found.append(_logprob(value))
    return found


def _entry(prompt_logprobs: Sequence[Mapping[Any, Any] | None], position: int) -> Mapping[Any, Any]:
    at = position + 1
    entry = prompt_logprobs[at] if 0 < at < len(prompt_logprobs) else None
    if not entry:
        raise ValueError(f"no log-probabilities of token {at}, {len(prompt_logprobs)} entries: ask for the whole row")
    return entry


def _logprob(value: Any) -> float:
    if isinstance(value, Mapping):
        return float(value["logprob"])
    return float(getattr(value, "logprob", value))


def _checked(student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    shaped("teacher_logprobs", teacher_logprobs, tuple(student_logprobs.shape), "as student_logprobs")
    shaped("mask", mask, tuple(student_logprobs.shape), "as student_logprobs")
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask is {mask.dtype}: pass bool, e.g. labels != -100")
    return mask

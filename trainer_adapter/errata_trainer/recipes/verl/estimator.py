"""`grpo_composer`: VeRL's GRPO advantages, without those of rows that failures left alone in their group, and with
channels 2 and 3 as parts of the advantage of a token.

VeRL takes mean 0 and standard deviation 1 for a group of one, so a row whose siblings were lost has its raw reward as
advantage at every token: a failed machine would move the policy. Here such a row has advantage 0.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est

from ...channels.arguments import not_negative, shaped
from ...channels.sampled import sampled_token_advantages
from .columns import ERROR_MASK, TEACHER_LOGPROBS, WEIGHTS

GRPO_COMPOSER = "grpo_composer"
"""Name of the estimator: ``algorithm.adv_estimator``."""

log = logging.getLogger("errata.trainer")

_PADDING = re.compile("pad[0-9a-f]{32}")
"""Group of the rows with which VeRL's V1 trainer fills a batch up."""


@dataclass(slots=True)
class Shaping:
    """What is added to the advantages of one batch of B rows with R response tokens each, padded on the right.

    Attributes:
        error_mask: ``[B, R]`` bool, true at the tokens of failing turns that have a hint; None for no channel 2.
        teacher_logprobs: ``[B, R]`` the teacher's log-probabilities of the response with the hint, read under the mask.
        old_logprobs: ``[B, R]`` the student's log-probabilities of the response.
        weights: ``[B, R]`` weight of each token in channel 2; None weighs each 1.
        turn_scores: ``[B, R]`` teachers' consensus score of the turn that a token belongs to, 0 where nobody voted;
            None for no channel 3.
        alpha: Weight of channel 2 in this step; None for ``algorithm.alpha_sdpo``.
        beta: Weight of channel 3 in this step; None for ``algorithm.beta_replay``.
        alone: Number of rows that were alone in their group, set by the estimator.
    """

    error_mask: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    old_logprobs: Tensor | None = None
    weights: Tensor | None = None
    turn_scores: Tensor | None = None
    alpha: float | None = None
    beta: float | None = None
    alone: int = 0


_SHAPING: ContextVar[Shaping | None] = ContextVar("shaping", default=None)


@contextmanager
def shaping(columns: Shaping) -> Iterator[Shaping]:
    """Give the estimator a batch's columns, which VeRL 0.9.1 does not: it passes rewards, mask and groups only.

    Args:
        columns: The columns of the batch whose advantages are computed in the block; those that VeRL may pass itself
            are not read then.
    """
    token = _SHAPING.set(columns)
    try:
        yield columns
    finally:
        _SHAPING.reset(token)


def grpo_composer(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: Any = None,
    index: Sequence[Any] | None = None,
    batch: Mapping[str, Any] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of a batch of B rows with R response tokens each.

    Of a group with two rows or more, GRPO's part is VeRL's ``grpo`` to the last bit. Channel 2 adds ``alpha_sdpo``
    times the teacher's log-probability minus the student's at the tokens of failing turns, and channel 3
    ``beta_replay`` times the teachers' consensus score of a turn. A row that is alone in its group has these parts too.

    Args:
        token_level_rewards: ``[B, R]`` rewards.
        response_mask: ``[B, R]`` 1 at the tokens that the student sampled.
        config: VeRL's ``algorithm`` settings: ``norm_adv_by_std_in_grpo`` (true), ``alpha_sdpo`` (0.1), ``beta_replay``
            (0.05).
        index: ``[B]`` group of each row, by any name.
        batch: The batch's columns by name, where VeRL passes them: ``sdpo_error_mask``, ``sdpo_teacher_logprobs``,
            ``sdpo_weights``, ``prm_scores``, ``old_log_probs``; not read inside `shaping`.

    Returns:
        Two equal tensors ``[B, R]``.

    Raises:
        ValueError: There are no groups; a weight below 0; columns of another shape than the mask, or some without the
            others that they need.
    """
    if index is None:
        raise ValueError(f"{GRPO_COMPOSER} needs the group of each row: VeRL's batch has no uid")
    settings: Mapping[str, Any] = config if config is not None else {}
    columns = _SHAPING.get() or _columns_of(batch if batch is not None else {})
    advantages, _ = compute_grpo_outcome_advantage(
        token_level_rewards,
        response_mask,
        index,
        norm_adv_by_std_in_grpo=settings.get("norm_adv_by_std_in_grpo", True),
    )
    alone = _alone(index).to(advantages.device)
    columns.alone = int(alone.sum())
    if columns.alone:
        log.warning("%d of %d rows are alone in their group, and have no advantage", columns.alone, len(index))
    advantages = torch.where(alone.unsqueeze(-1), torch.zeros_like(advantages), advantages)
    advantages = _with_channels(advantages, response_mask, columns, settings)
    return advantages, advantages


def _alone(index: Sequence[Any]) -> Tensor:
    """Return ``[B]`` bool: which rows are alone in their group. Those with which VeRL fills a batch up are not."""
    members = Counter(str(group) for group in index)
    return torch.tensor([members[str(group)] == 1 and not _PADDING.fullmatch(str(group)) for group in index])


def _with_channels(advantages: Tensor, response_mask: Tensor, columns: Shaping, settings: Mapping[str, Any]) -> Tensor:
    """Return advantages with the parts of channels 2 and 3; the same tensor where there is nothing to add."""
    sampled = response_mask.bool()
    alpha = float(settings.get("alpha_sdpo", 0.1)) if columns.alpha is None else columns.alpha
    beta = float(settings.get("beta_replay", 0.05)) if columns.beta is None else columns.beta
    if columns.error_mask is not None and alpha != 0:
        if columns.teacher_logprobs is None or columns.old_logprobs is None:
            raise ValueError("channel 2 needs the log-probabilities of the teacher and of the student: both columns")
        added = sampled_token_advantages(
            columns.old_logprobs, columns.teacher_logprobs, columns.error_mask.bool() & sampled, weight=alpha
        )
        weighted = added if columns.weights is None else added * columns.weights
        advantages = advantages + weighted.to(advantages.dtype)
    if columns.turn_scores is not None and beta != 0:
        not_negative("beta_replay", beta)
        shaped("turn_scores", columns.turn_scores, tuple(advantages.shape), "as the response mask")
        advantages = advantages + beta * columns.turn_scores.to(advantages.dtype) * sampled
    return advantages


def _columns_of(batch: Mapping[str, Any]) -> Shaping:
    """Return the columns that VeRL passed."""
    return Shaping(
        error_mask=batch.get(ERROR_MASK, None),
        teacher_logprobs=batch.get(TEACHER_LOGPROBS, None),
        old_logprobs=batch.get("old_log_probs", None),
        weights=batch.get(WEIGHTS, None),
        turn_scores=batch.get("prm_scores", None),
    )


register_adv_est(GRPO_COMPOSER)(grpo_composer)

"""Importance ratios and returns of turns, in samples that hold several turns each.

A segment is the tokens of one turn in a row. `errata_trainer.packing` has the segments of its samples; `runs_of_mask`
finds them in a mask, as ROLL does, where turns without a token between them are one. The functions equal ROLL's
``compute_segment_masked_mean`` and ``compute_agentic_reinforce_return`` there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..packing import NOT_SAMPLED
from .arguments import shaped
from .precision import wide


def runs_of_mask(mask: Tensor) -> Tensor:
    """Return the segment of each token where segments are the runs of 1 in a mask.

    Args:
        mask: ``[B, T]`` bool, or 0 and 1: where the student sampled.

    Returns:
        ``[B, T]`` int64: the number of the run in its row, from 0; -1 outside of the mask.

    Raises:
        ValueError: The mask holds other values.
    """
    sampled = _bool(mask)
    before = torch.nn.functional.pad(sampled, (1, 0))[..., :-1]
    numbers = (sampled & ~before).long().cumsum(-1) - 1
    return torch.where(sampled, numbers, torch.full_like(numbers, NOT_SAMPLED))


def segment_mean(values: Tensor, segments: Tensor) -> Tensor:
    """Return the mean of each segment at each of its tokens.

    Args:
        values: ``[B, T]`` values; those outside of segments are not read.
        segments: ``[B, T]`` int64 segment of each token, -1 for none. A number names one segment of its row, whether
            its tokens stand together or not.

    Returns:
        ``[B, T]``, 0 outside of segments. Gradients flow to the values.

    Raises:
        ValueError: Shapes that differ; a segment below -1.
    """
    shaped("segments", segments, tuple(values.shape), "as values")
    inside, places, count = _places(segments)
    kept = torch.where(inside, wide(values), torch.zeros_like(wide(values)))
    sums = _added(kept, places, count)
    lengths = _added(inside.to(kept.dtype), places, count)
    means = (sums / lengths.clamp(min=1)).gather(-1, places)
    return torch.where(inside, means, torch.zeros_like(means))


def segment_ratio(logprobs: Tensor, old_logprobs: Tensor, segments: Tensor) -> Tensor:
    """Return the importance ratio of each segment at each of its tokens: the geometric mean of its tokens' ratios.

    Args:
        logprobs: ``[B, T]`` log-probabilities of the sampled tokens, attached.
        old_logprobs: ``[B, T]`` log-probabilities of the tokens when they were sampled; no gradient flows into it.
        segments: ``[B, T]`` int64 segment of each token, -1 for none.

    Returns:
        ``[B, T]``, 1 outside of segments. Gradients flow to all log-probabilities of the segment.

    Raises:
        ValueError: Shapes that differ; a segment below -1.
    """
    shaped("old_logprobs", old_logprobs, tuple(logprobs.shape), "as logprobs")
    return segment_mean(wide(logprobs) - wide(old_logprobs.detach()), segments).exp()


def segment_returns(rewards: Tensor, segments: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return the discounted return of each segment at each of its tokens, ``G_k = r_k + gamma * G_(k+1)``.

    Args:
        rewards: ``[B, T]`` rewards. That of a segment stands at its last token; others are not read.
        segments: ``[B, T]`` int64 segment of each token, -1 for none. They are numbered in the order of the turns; a
            number that a row does not have is a turn without a reward, whose discount counts.
        gamma: Discount of a segment, in [0, 1].

    Returns:
        ``[B, T]`` without gradient, 0 outside of segments.

    Raises:
        ValueError: Shapes that differ; a segment below -1; ``gamma`` out of its range.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ValueError(f"gamma is {gamma}: it has to lie in [0, 1]")
    shaped("segments", segments, tuple(rewards.shape), "as rewards")
    if not segments.numel():
        return torch.zeros_like(wide(rewards.detach()))
    inside, places, count = _places(segments)
    columns = torch.arange(segments.shape[-1], device=segments.device).expand_as(segments)
    last = torch.full((*segments.shape[:-1], count), -1, dtype=torch.int64, device=segments.device)
    last = last.scatter_reduce(-1, places, torch.where(inside, columns, torch.full_like(columns, -1)), "amax")
    given = wide(rewards.detach()).gather(-1, last.clamp(min=0))
    given = torch.where(last >= 0, given, torch.zeros_like(given))
    returns = torch.zeros_like(given)
    following = torch.zeros_like(given[..., 0])
    for segment in reversed(range(count)):
        following = given[..., segment] + gamma * following
        returns[..., segment] = following
    spread = returns.gather(-1, places)
    return torch.where(inside, spread, torch.zeros_like(spread))


def _bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("the mask holds other values than 0 and 1")
    return mask.bool()


def _places(segments: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return where segments are, the place of each token's segment among ``count`` of them, and ``count``."""
    if segments.numel() and int(segments.min()) < NOT_SAMPLED:
        raise ValueError(f"a segment is {int(segments.min())}: give the index of a turn, or -1 for no segment")
    count = int(segments.max()) + 1 if segments.numel() else 0
    return segments != NOT_SAMPLED, segments.clamp(min=0), max(count, 1)


def _added(values: Tensor, places: Tensor, count: int) -> Tensor:
    """Return the sum of the values at each place, ``[B, count]``."""
    return torch.zeros((*values.shape[:-1], count), dtype=values.dtype, device=values.device).scatter_add(
        -1, places, values
    )

"""`segment_ratio`: PPO's clipped loss in VeRL's actor with one importance ratio for each turn, as ROLL's ``segment``.

VeRL has ratios of single tokens (``vanilla``) and of whole rows (``gspo``); a row of several turns has one each here,
the geometric mean of its tokens' ratios.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils.torch_functional import masked_mean

from ...channels.segments import runs_of_mask, segment_mean

SEGMENT_RATIO = "segment_ratio"
"""Name of the loss: ``actor_rollout_ref.actor.policy_loss.loss_mode``."""


def segment_ratio_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss of B rows with R response tokens each, and VeRL's metrics of it.

    Args:
        old_log_prob: ``[B, R]`` log-probabilities before the update.
        log_prob: ``[B, R]`` log-probabilities, attached.
        advantages: ``[B, R]`` advantages.
        response_mask: ``[B, R]`` 1 at the tokens that the student sampled; each run of 1 is a turn.
        loss_agg_mode: VeRL's reduction of the tokens' losses.
        config: VeRL's settings of the actor: ``clip_ratio``, ``clip_ratio_low``, ``clip_ratio_high`` and what its
            reduction takes.
        rollout_is_weights: ``[B, R]`` VeRL's weights for a generator with other numerics; None for none.
    """
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    # Held as VeRL holds its own: an infinite ratio would make a gradient of NaN where the bound counts.
    ratio = segment_mean(log_prob - old_log_prob, runs_of_mask(response_mask)).clamp(-20.0, 20.0).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    losses = torch.maximum(unclipped, clipped)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    with torch.no_grad():
        metrics = {
            "actor/pg_clipfrac": masked_mean((clipped > unclipped).float(), response_mask).item(),
            "actor/ppo_kl": masked_mean(old_log_prob - log_prob, response_mask).item(),
            "actor/pg_clipfrac_lower": 0.0,
        }
    return loss, metrics


register_policy_loss(SEGMENT_RATIO)(segment_ratio_loss)

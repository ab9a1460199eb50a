"""Channel 3: DPO between an action that teachers agreed on and the student's own action at the same state.

    L = -log sigmoid(beta_dpo ((pi_c - ref_c) - (pi_r - ref_r)))        (arXiv:2305.18290, equation 7)

pi and ref are the summed log-probabilities of an action's tokens under the policy and under a frozen reference. If both
are equal, L is ln 2 = 0.693 and its gradient is not zero but -+beta_dpo/2 for each pair, so a loss of 0.693 does not
show whether training works. `dpo_metrics` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .arguments import positive
from .precision import wide

LossType = Literal["sigmoid", "sigmoid_norm"]
Lengths = tuple[Tensor, Tensor]


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta_dpo: float = 0.1,
    loss_type: LossType = "sigmoid",
    lengths: Lengths | None = None,
) -> Tensor:
    """Return the mean DPO loss of P pairs.

    Args:
        policy_chosen: ``[P]`` summed log-probability of the chosen action's tokens under the policy, without the
            context's.
        policy_rejected: ``[P]`` summed log-probability of the rejected action's tokens under the policy.
        ref_chosen: ``[P]`` summed log-probability of the chosen action's tokens under the reference; no gradient flows
            into it.
        ref_rejected: ``[P]`` summed log-probability of the rejected action's tokens under the reference; no gradient
            flows into it.
        beta_dpo: Strength of the pull towards the reference, > 0.
        loss_type: Kind of loss: ``sigmoid``, or ``sigmoid_norm``, which first divides each log-ratio by its own
            action's length. That takes away the weight of long actions and wants a larger ``beta_dpo``.
        lengths: ``([P], [P])`` tokens of the chosen and rejected actions, of an integer dtype; for ``sigmoid_norm``.
            On the CPU they are checked without waiting for a device.

    Returns:
        Scalar, float32 at least. Without pairs 0, attached to the graph.

    Raises:
        ValueError: Shapes that differ, ``sigmoid_norm`` without lengths or with some that are no whole numbers from 1,
            an option out of its range.
    """
    losses = dpo_losses(
        policy_chosen,
        policy_rejected,
        ref_chosen,
        ref_rejected,
        beta_dpo=beta_dpo,
        loss_type=loss_type,
        lengths=lengths,
    )
    return losses.sum() / max(losses.numel(), 1)


def dpo_losses(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta_dpo: float = 0.1,
    loss_type: LossType = "sigmoid",
    lengths: Lengths | None = None,
) -> Tensor:
    """Return the DPO loss of each pair, ``[P]``. Weight them and divide by the number of pairs of the whole optimizer
    step.

    Args:
        policy_chosen: ``[P]`` summed log-probability of the chosen action's tokens under the policy.
        policy_rejected: ``[P]`` summed log-probability of the rejected action's tokens under the policy.
        ref_chosen: ``[P]`` summed log-probability of the chosen action's tokens under the reference.
        ref_rejected: ``[P]`` summed log-probability of the rejected action's tokens under the reference.
        beta_dpo: Strength of the pull towards the reference, > 0.
        loss_type: Kind of loss, ``sigmoid`` or ``sigmoid_norm``; see `dpo_loss`.
        lengths: ``([P], [P])`` tokens of the chosen and rejected actions, of an integer dtype; for ``sigmoid_norm``.

    Returns:
        ``[P]``, float32 at least.

    Raises:
        ValueError: See `dpo_loss`.
    """
    margins = _margins(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta_dpo, loss_type, lengths)
    return -F.logsigmoid(margins)


def chosen_nll(policy_chosen: Tensor, lengths: Lengths) -> Tensor:
    """Return the negative log-likelihood per token of each chosen action, the term that RPO adds to DPO.

    DPO compares. It is content with a policy under which both actions become unlikely, the rejected one faster
    (Pang et al. 2024, Iterative Reasoning Preference Optimization; ``rpo_alpha`` in TRL's `DPOConfig`).

    Args:
        policy_chosen: ``[P]`` summed log-probability of the chosen action's tokens under the policy.
        lengths: ``([P], [P])`` tokens of the chosen and of the rejected actions, at least 1.

    Returns:
        ``[P]``, in nats per token, attached.

    Raises:
        ValueError: Lengths of another shape, no integers, or below 1.
    """
    if lengths[0].shape != policy_chosen.shape:
        raise ValueError(f"{list(policy_chosen.shape)} chosen actions, lengths of {list(lengths[0].shape)}")
    _check_integers(lengths[0])
    if bool((lengths[0] < 1).any()):
        raise ValueError("an action without tokens has no mean log-probability: leave its pair out (`skip_reason`)")
    return -wide(policy_chosen) / lengths[0].to(policy_chosen.device)


def dpo_metrics(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta_dpo: float = 0.1,
    loss_type: LossType = "sigmoid",
    lengths: Lengths | None = None,
) -> dict[str, Tensor]:
    """Return metrics as sums over pairs, which can be added over micro-batches and ranks.

    Args:
        policy_chosen: ``[P]`` summed log-probability of the chosen action's tokens under the policy.
        policy_rejected: ``[P]`` summed log-probability of the rejected action's tokens under the policy.
        ref_chosen: ``[P]`` summed log-probability of the chosen action's tokens under the reference.
        ref_rejected: ``[P]`` summed log-probability of the rejected action's tokens under the reference.
        beta_dpo: Strength of the pull towards the reference, > 0.
        loss_type: Kind of loss, ``sigmoid`` or ``sigmoid_norm``; see `dpo_loss`.
        lengths: ``([P], [P])`` tokens of the chosen and rejected actions, of an integer dtype; for ``sigmoid_norm``.

    Returns:
        0-d tensors without gradient: ``pairs``; ``loss``; ``margin``, the difference of the log-ratios, in nats;
        ``reward_accuracy``, how many margins are above 0; ``chosen_reward`` and ``rejected_reward``, beta_dpo times the
        log-ratios.

    Raises:
        ValueError: See `dpo_loss`.
    """
    with torch.no_grad():
        margins = _margins(policy_chosen, policy_rejected, ref_chosen, ref_rejected, beta_dpo, loss_type, lengths)
        chosen, rejected = _log_ratio(policy_chosen, ref_chosen), _log_ratio(policy_rejected, ref_rejected)
        if loss_type == "sigmoid_norm" and lengths is not None:
            chosen, rejected = (r / n.to(r.device) for r, n in zip((chosen, rejected), lengths, strict=True))
        return {
            "pairs": torch.full_like(margins.sum(), len(margins)),
            "loss": -F.logsigmoid(margins).sum(),
            "margin": (chosen - rejected).sum(),
            "reward_accuracy": (margins > 0).to(margins.dtype).sum(),
            "chosen_reward": beta_dpo * chosen.sum(),
            "rejected_reward": beta_dpo * rejected.sum(),
        }


def segment_sums(logprobs: Tensor, lengths: Tensor | Sequence[int]) -> Tensor:
    """Return the sum of the log-probabilities of each action's tokens.

    Args:
        logprobs: ``[sum(lengths)]`` log-probabilities of all actions' tokens, one action after the other.
        lengths: ``[A]`` number of tokens of each action, int64; or a list, which is checked without waiting for a
            device.

    Returns:
        ``[A]``, attached; added up in float32 at least.

    Raises:
        ValueError: Lengths that do not add up to the tokens there are, are negative or no integers; other shapes.
    """
    if isinstance(lengths, Tensor):
        if lengths.dim() != 1:
            raise ValueError(f"lengths are {list(lengths.shape)}: they have one dimension")
        _check_integers(lengths)
        lengths = lengths.tolist()
    if logprobs.dim() != 1:
        raise ValueError(f"logprobs are {list(logprobs.shape)}: they have one dimension")
    if lengths and min(lengths) < 0:
        raise ValueError(f"a length is {min(lengths)}: an action has no fewer than 0 tokens")
    if sum(lengths) != len(logprobs):
        raise ValueError(f"lengths add up to {sum(lengths)}, there are {len(logprobs)} tokens")
    logprobs = wide(logprobs)
    action = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)], dtype=torch.int64)
    return logprobs.new_zeros(len(lengths)).index_add(0, action.to(logprobs.device), logprobs)


def _log_ratio(policy: Tensor, reference: Tensor) -> Tensor:
    return wide(policy) - wide(reference.detach())


def _check_integers(lengths: Tensor) -> None:
    if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.is_complex():
        raise ValueError(f"lengths are {lengths.dtype}: tokens are counted in integers")


def _margins(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta_dpo: float,
    loss_type: LossType,
    lengths: Lengths | None,
) -> Tensor:
    sides = (policy_chosen, policy_rejected, ref_chosen, ref_rejected)
    if len({side.shape for side in sides}) != 1 or policy_chosen.dim() != 1:
        raise ValueError(f"four [P] tensors are needed, these are {', '.join(str(tuple(s.shape)) for s in sides)}")
    positive("beta_dpo", beta_dpo)
    chosen, rejected = _log_ratio(policy_chosen, ref_chosen), _log_ratio(policy_rejected, ref_rejected)
    if loss_type == "sigmoid_norm":
        if lengths is None or lengths[0].shape != chosen.shape or lengths[1].shape != chosen.shape:
            raise ValueError("sigmoid_norm needs lengths: ([P], [P]) tokens of the chosen and the rejected actions")
        _check_integers(lengths[0])
        _check_integers(lengths[1])
        if bool((torch.stack(lengths) < 1).any()):
            raise ValueError("an action without tokens has no mean log-probability: leave its pair out (`skip_reason`)")
        chosen, rejected = (r / n.to(r.device) for r, n in zip((chosen, rejected), lengths, strict=True))
    elif loss_type != "sigmoid":
        raise ValueError(f"loss_type is {loss_type!r}: 'sigmoid' or 'sigmoid_norm'")
    return beta_dpo * (chosen - rejected)

"""One importance ratio for each turn, in VeRL's registry of policy losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from errata_trainer.recipes.verl import SEGMENT_RATIO

MASK = torch.tensor([[1, 1, 1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 0, 0, 0]])


def actor(**given: Any) -> ActorConfig:
    return ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **given)


NARROW = actor(clip_ratio_low=0.05, clip_ratio_high=0.05)


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities before and after an update, and advantages."""
    numbers = torch.Generator().manual_seed(3)
    old = -torch.rand(MASK.shape, generator=numbers)
    new = old + 0.1 * torch.randn(MASK.shape, generator=numbers)
    return old, new.requires_grad_(), torch.randn(MASK.shape, generator=numbers)


def loss_of(mode: str, config: ActorConfig, **given: Any) -> tuple[float, torch.Tensor, dict[str, Any]]:
    old, new, advantages = drawn()
    mask = given.pop("mask", MASK)
    loss, metrics = get_policy_loss_fn(mode)(old, new, advantages, mask, "token-mean", config, **given)
    loss.backward()
    assert new.grad is not None
    return loss.item(), new.grad, metrics


def test_the_loss_is_that_of_each_turns_own_ratio() -> None:
    weights = torch.rand(MASK.shape, generator=torch.Generator().manual_seed(9))
    loss, gradient, metrics = loss_of(SEGMENT_RATIO, NARROW, rollout_is_weights=weights)
    old, new, advantages = drawn()
    losses, clipped = [], 0
    for row, first, end in ((0, 0, 3), (0, 4, 6), (0, 7, 8), (1, 0, 2), (1, 4, 5)):
        turn = (row, slice(first, end))
        ratio = (new[turn] - old[turn]).mean().exp()
        bounded = ratio.clamp(0.95, 1.05)
        for place in range(first, end):
            one, other = -advantages[row, place] * ratio, -advantages[row, place] * bounded
            losses.append(torch.maximum(one, other) * weights[row, place])
            clipped += int(other > one)
    expected = torch.stack(losses).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, new.grad)
    assert 0 < metrics["actor/pg_clipfrac"] == pytest.approx(clipped / len(losses))
    assert metrics["actor/ppo_kl"] == pytest.approx((old - new)[MASK.bool()].mean().item(), abs=1e-6)


def test_turns_of_one_token_have_verls_own_loss() -> None:
    mask = torch.tensor([[1, 0, 1, 0, 1, 0, 0, 1]] * 2)
    ours, gradient, metrics = loss_of(SEGMENT_RATIO, NARROW, mask=mask)
    stock, of_stock, others = loss_of("vanilla", NARROW, mask=mask)
    assert ours == pytest.approx(stock, rel=1e-6)
    torch.testing.assert_close(gradient, of_stock)
    assert metrics == pytest.approx({name: others[name] for name in metrics})


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [(1.5, 1.0, -1.1), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8), (1.5, -1.0, 1.5)],
)
def test_ratios_are_bounded_where_they_would_gain(ratio: float, advantage: float, expected: float) -> None:
    """With the ratios 2 * ratio and ratio / 2 of its two tokens, the turn has their geometric mean."""
    old = torch.full((1, 2), -3.0)
    new = old + torch.tensor([[2 * ratio, ratio / 2]]).log()
    loss, _ = get_policy_loss_fn(SEGMENT_RATIO)(
        old,
        new,
        torch.full((1, 2), advantage),
        torch.ones(1, 2),
        "token-mean",
        actor(clip_ratio_low=0.2, clip_ratio_high=0.1),
    )
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_ratio_beyond_all_bounds_leaves_no_nan() -> None:
    old = torch.full((1, 2), -200.0)
    new = torch.full((1, 2), -0.5, requires_grad=True)
    loss, _ = get_policy_loss_fn(SEGMENT_RATIO)(old, new, torch.ones(1, 2), torch.ones(1, 2), "token-mean", NARROW)
    loss.backward()
    assert loss.item() == pytest.approx(-1.05) and new.grad is not None and torch.isfinite(new.grad).all()

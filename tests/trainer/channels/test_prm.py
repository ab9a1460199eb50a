"""Votes as scores of turns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errata_trainer import Call, Rollout, Turn
from errata_trainer.channels.prm import (
    score_regression_loss,
    scores_of_ballots,
    scores_of_rewards,
    scores_of_voted_turns,
    shaped_advantages,
    turn_scores,
)


def rollout(eid: str | None, turns: int, lost: str | None = None) -> Rollout:
    """Return turns of two tokens with one delivery each, and one token of the environment's between them."""
    made = tuple(Turn(n, 3 * n, 3 * n + 2, (Call("run", {}, n + 1),)) for n in range(turns))
    tokens = 3 * turns - 1
    return Rollout((1,), tuple(range(tokens)), (1, 1, 0) * turns, made, eid=eid, lost=lost)


def ballot(eid: str | None, t: int | None, margin: float, voters: int = 3) -> Any:
    return SimpleNamespace(ask=SimpleNamespace(eid=eid, t=t), actions=dict.fromkeys(range(voters)), margin=margin)


def test_margins_are_scores_of_the_turn_that_answered_the_state() -> None:
    scores = scores_of_ballots(
        [
            ballot("a", 0, 1.0),
            ballot("a", 1, -0.5),
            ballot("b", 0, 0.25),
            ballot("b", 1, 0.9, voters=0),
            ballot(None, 0, 1),
        ]
    )
    assert scores == {("a", 0): 1.0, ("a", 1): -0.5, ("b", 0): 0.25}
    rollouts = [rollout("a", 3), rollout("b", 2), rollout(None, 1), rollout("a", 1, lost="the server was gone")]
    assert turn_scores(rollouts, scores) == [[1.0, -0.5, None], [0.25, None], [None], [None]]


def test_a_vote_scores_its_own_turn_and_no_other_at_the_same_state() -> None:
    calls = (Call("unknown", {}, None),), (Call("run", {}, 1),)
    turns = tuple(Turn(n, 3 * n, 3 * n + 2, of_turn) for n, of_turn in enumerate(calls))
    twice = Rollout((1,), tuple(range(5)), (1, 1, 0, 1, 1), turns, eid="a")
    voted = SimpleNamespace(ask=SimpleNamespace(eid="a", t=0, turns=()), actions={"x": 1}, margin=-1.0)
    assert scores_of_voted_turns([voted]) == {("a", 0, 0): -1.0}
    assert turn_scores([twice], scores_of_voted_turns([voted])) == [[-1.0, None]]
    assert turn_scores([twice], {("a", 0): -1.0}) == [[None, None]], "it does not say which of the two it is about"


def test_late_rewards_of_a_source_are_the_same_scores() -> None:
    rewards = [
        SimpleNamespace(t=0, value=0.5, source="teachers"),
        SimpleNamespace(t=1, value=1.0, source="counterfactual"),
        SimpleNamespace(t=0, value=-1, source="teachers"),
    ]
    assert scores_of_rewards("a", rewards) == {("a", 0): -1.0}, "the last one of a state"
    assert scores_of_rewards("a", rewards, source="counterfactual") == {("a", 1): 1.0}


def test_each_token_of_a_voted_turn_has_its_score() -> None:
    rollouts = [rollout("a", 2), rollout("b", 1)]
    found = shaped_advantages(rollouts, [[1.0, -0.5], [None]], weight=0.1)
    expected = torch.tensor([[0.1, 0.1, 0.0, -0.05, -0.05], [0.0] * 5])
    torch.testing.assert_close(found, expected)
    assert shaped_advantages(rollouts, [[None, 3.0], [None]], clip=1.0, length=8)[0].tolist() == [
        0,
        0,
        0,
        1,
        1,
        0,
        0,
        0,
    ]


def test_scores_are_centred_by_batch_or_group() -> None:
    rollouts = [rollout("a", 1), rollout("b", 1), rollout("c", 1)]
    scores: list[list[float | None]] = [[1.0], [0.0], [0.5]]
    assert shaped_advantages(rollouts, scores, centre="batch")[:, 0].tolist() == [0.5, -0.5, 0.0]
    by_group = shaped_advantages(rollouts, scores, centre="group", groups=["x", "x", "y"])
    assert by_group[:, 0].tolist() == [0.5, -0.5, 0.0]
    for options in ({"centre": "group"}, {"centre": "group", "groups": ["x"]}, {"centre": "rows"}, {"length": 1}):
        with pytest.raises(ValueError):
            shaped_advantages(rollouts, scores, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 turns and 2 scores"):
        shaped_advantages(rollouts[:1], [[1.0, 2.0]])


@pytest.mark.parametrize("delta", [0.5, 1.0, float("inf")])
def test_the_regression_is_hubers(delta: float) -> None:
    made = torch.Generator().manual_seed(3)
    predicted = torch.randn(9, generator=made, dtype=torch.float64).requires_grad_()
    targets, weights = torch.randn(9, generator=made, dtype=torch.float64), torch.rand(9, generator=made)
    loss = score_regression_loss(predicted, targets, weights, delta=delta)
    each = (
        0.5 * (predicted - targets) ** 2
        if delta == float("inf")
        else torch.nn.functional.huber_loss(predicted, targets, reduction="none", delta=delta)
    )
    expected = (each * weights).sum() / weights.sum()
    torch.testing.assert_close(loss, expected)
    (one,) = torch.autograd.grad(loss, predicted)
    (other,) = torch.autograd.grad(expected, predicted)
    torch.testing.assert_close(one, other)


def test_no_votes_are_no_loss() -> None:
    nothing = torch.zeros(0, requires_grad=True)
    assert float(score_regression_loss(nothing, torch.zeros(0)).detach()) == 0.0
    assert float(score_regression_loss(torch.ones(2), torch.zeros(2), torch.zeros(2))) == 0.0
    with pytest.raises(ValueError, match="delta"):
        score_regression_loss(torch.ones(2), torch.zeros(2), delta=0.0)
    with pytest.raises(ValueError, match="targets"):
        score_regression_loss(torch.ones(2), torch.zeros(3))

"""Ratios and returns of turns against ROLL's numbers, and packed samples against samples of single turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from loss_vectors import tensor, vectors
from torch import Tensor
from toy_models import VOCABULARY, toy

from errata_trainer.channels.segments import runs_of_mask, segment_mean, segment_ratio, segment_returns
from errata_trainer.packing import NOT_SAMPLED, Sample, SampledTurn, counted, discounted, pack

ROLL = vectors("roll_traj")


def cases(name: str) -> list[Any]:
    return [pytest.param(case, id=f"{case.get('name', '')} {case.get('gamma', '')}") for case in ROLL[name]]


@pytest.mark.parametrize("case", cases("segment_masked_mean"))
@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float64])
def test_means_ratios_and_gradients_are_rolls(case: dict[str, Any], kind: torch.dtype) -> None:
    segments = runs_of_mask(tensor(case["mask"]).to(kind))
    values = tensor(case["tensor"], grad=True)
    means = segment_mean(values, segments)
    tolerance = ROLL["tolerance"]["segment_masked_mean"]
    torch.testing.assert_close(means, tensor(case["expected_segment_masked_mean"]), **tolerance)
    ratio = segment_ratio(values, torch.zeros_like(values), segments)
    torch.testing.assert_close(ratio, tensor(case["expected_ratio"]), **tolerance)
    (means * tensor(case["grad_weights"])).sum().backward()
    torch.testing.assert_close(values.grad, tensor(case["expected_grad_of_weighted_sum"]), **tolerance)


@pytest.mark.parametrize("case", cases("reinforce_return"))
def test_returns_of_segments_are_rolls(case: dict[str, Any]) -> None:
    segments = runs_of_mask(tensor(case["mask"]))
    returns = segment_returns(tensor(case["token_level_rewards"]), segments, gamma=case["gamma"])
    torch.testing.assert_close(returns, tensor(case["expected_returns"]), **ROLL["tolerance"]["reinforce_return"])


@pytest.mark.parametrize("case", cases("discounted_returns"))
def test_returns_of_turns_are_rolls(case: dict[str, Any]) -> None:
    returns = discounted(case["step_scores"], case["gamma"])
    torch.testing.assert_close(tensor(returns), tensor(case["expected_G"]), **ROLL["tolerance"]["discounted_returns"])


@pytest.mark.parametrize("case", ROLL["seed_G_k"])
def test_a_reward_at_the_end_is_discounted_by_the_turns_behind(case: dict[str, Any]) -> None:
    returns = discounted([0.0] * (case["K"] - 1) + [case["R_final"]], case["gamma"])
    assert returns == pytest.approx(case["expected_G_k_for_k_1_to_K"], rel=1e-7)


def test_segments_need_not_stand_together_and_a_missing_one_is_discounted() -> None:
    segments = torch.tensor([[0, 0, -1, 2, 0, -1]])
    values = tensor([[1.0, 2.0, 100.0, 7.0, 3.0, torch.nan]], grad=True)
    means = segment_mean(values, segments)
    assert means.tolist() == [[2.0, 2.0, 0.0, 7.0, 2.0, 0.0]]
    means.sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[1.0, 1.0, 0.0, 1.0, 1.0, 0.0]]
    returns = segment_returns(values, segments, gamma=0.5)
    assert returns.tolist() == [[3 + 7 / 4, 3 + 7 / 4, 0.0, 7.0, 3 + 7 / 4, 0.0]]


def test_turns_that_touch_are_told_apart_by_their_segments_only() -> None:
    values, mask = tensor([[1.0, 3.0, 5.0]]), torch.tensor([[1, 1, 1]])
    assert segment_mean(values, torch.tensor([[0, 0, 1]])).tolist() == [[2.0, 2.0, 5.0]]
    assert segment_mean(values, runs_of_mask(mask)).tolist() == [[3.0, 3.0, 3.0]]


def test_no_tokens_and_wrong_arguments() -> None:
    empty = torch.zeros((2, 0), dtype=torch.int64)
    assert segment_mean(torch.zeros(2, 0), empty).shape == (2, 0)
    assert segment_returns(torch.zeros(2, 0), empty).shape == (2, 0)
    assert runs_of_mask(empty).shape == (2, 0)
    with pytest.raises(ValueError, match="the mask holds other values than 0 and 1"):
        runs_of_mask(torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="a segment is -100"):
        segment_mean(torch.zeros(1, 1), torch.tensor([[-100]]))
    with pytest.raises(ValueError, match="segments is"):
        segment_mean(torch.zeros(1, 2), torch.tensor([[0]]))
    with pytest.raises(ValueError, match="old_logprobs is"):
        segment_ratio(torch.zeros(1, 2), torch.zeros(1, 1), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="gamma is -1"):
        segment_returns(torch.zeros(1, 1), torch.tensor([[0]]), gamma=-1)


# -- one packed sample and the samples of its turns --------------------------------------------------------------------


def episode(lengths: Sequence[tuple[int, int]], *, broken: int | None = None, empty: bool = False) -> list[SampledTurn]:
    """Return the turns of an episode of random tokens.

    Args:
        lengths: Number of sampled tokens of each turn, and of the tokens behind it.
        broken: Index of the turn whose prompt has another first token than the one before; None for none.
        empty: Whether a turn without tokens stands at the end.
    """
    numbers = torch.Generator().manual_seed(len(lengths))

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, VOCABULARY, (count,), generator=numbers).tolist())

    turns, prompt = [], drawn(5)
    for index, (sampled, after) in enumerate(lengths):
        if index == broken:
            prompt = (prompt[0] % (VOCABULARY - 1) + 1, *prompt[1:])
        ids = drawn(sampled)
        logprobs = (torch.rand(sampled, generator=numbers) * -3).tolist()
        turns.append(SampledTurn(prompt, ids, tuple(logprobs)))
        prompt += ids + drawn(after)
    return [*turns, SampledTurn(prompt, ())] if empty else turns


def policy_loss(model: Any, samples: Sequence[Sample], returns: Sequence[float]) -> Tensor:
    """Return the sum over sampled tokens of minus the turn's return times its ratio to when it was sampled.

    Rows are padded on the right, and go through the model in one pass.
    """
    width = max(len(one.ids) for one in samples)

    def padded(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], dtype=dtype)

    ids = padded([one.ids for one in samples], 0, torch.int64)
    segments = padded([one.segments for one in samples], NOT_SAMPLED, torch.int64)[:, 1:]
    old = padded([one.logprobs or () for one in samples], 0.0, torch.float64)[:, 1:]
    advantages = padded([one.spread(returns) for one in samples], 0.0, torch.float64)[:, 1:]
    attention = padded([[1] * len(one.ids) for one in samples], 0, torch.int64)
    logits = model(ids, attention_mask=attention).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    ratio = segment_ratio(logprobs, old, segments)
    return -(advantages * ratio * (segments != NOT_SAMPLED)).sum()


def loss_and_gradient(samples: Sequence[Sample], returns: Sequence[float]) -> tuple[float, Tensor]:
    model = toy("qwen3")
    loss = policy_loss(model, samples, returns)
    loss.backward()
    return float(loss.detach()), torch.cat([one.grad.flatten() for one in model.parameters()])


LENGTHS = [(4, 3), (6, 2), (3, 4), (5, 2)]


@pytest.mark.parametrize(
    "turns, options, samples",
    [
        pytest.param(episode(LENGTHS), {}, 1, id="prefix kept"),
        pytest.param(episode(LENGTHS, broken=2), {}, 2, id="prefix broken"),
        pytest.param(episode([(4, 0), (6, 0), (3, 4)]), {}, 1, id="empty delta"),
        pytest.param(episode([(4, 0), (6, 0), (3, 4)]), {"separate_runs": True}, 3, id="empty delta, turns apart"),
        pytest.param(episode(LENGTHS), {"max_tokens": 26}, 1, id="tail turn cut"),
        pytest.param(episode(LENGTHS, empty=True), {}, 1, id="observation-only tail"),
    ],
)
def test_a_packed_sample_equals_the_samples_of_its_turns(
    turns: list[SampledTurn], options: dict[str, Any], samples: int
) -> None:
    returns = discounted([0.0] * (len(turns) - 1) + [1.0], 0.9)
    limit = options.get("max_tokens")
    packed, apart = pack(turns, **options), pack(turns, merge=False, max_tokens=limit)
    assert len(packed.samples) == samples
    assert packed.left_out == apart.left_out
    loss, gradient = loss_and_gradient(packed.samples, returns)
    other, of_turns = loss_and_gradient(apart.samples, returns)
    assert loss == pytest.approx(other, rel=1e-6)
    assert abs(loss) > 0.01 and gradient.norm() > 0.01
    assert (gradient - of_turns).norm() <= 1e-6 * of_turns.norm()
    assert counted(packed.samples).tokens <= counted(apart.samples).tokens

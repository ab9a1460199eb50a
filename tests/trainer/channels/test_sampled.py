"""Channel 2 from log-probabilities and from lists: the same numbers as from logits."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errata_trainer.channels.sampled import (
    PADDING,
    sampled_token_advantages,
    sampled_token_loss_from_logprobs,
    target_logprobs,
    top_k_divergence,
    top_k_lists,
)
from errata_trainer.channels.sdpo import Divergence, sampled_token_loss

B, T, V = 3, 7, 11


@pytest.fixture
def given() -> dict[str, Any]:
    made = torch.Generator().manual_seed(5)
    student = torch.randn(B, T, V, generator=made, dtype=torch.float64) * 2
    teacher = torch.randn(B, T, V, generator=made, dtype=torch.float64) * 2
    ids = torch.randint(0, V, (B, T), generator=made)
    mask = torch.rand(B, T, generator=made) < 0.6
    mask[2] = False
    old = -torch.rand(B, T, generator=made, dtype=torch.float64) * 3
    return {"student": student, "teacher": teacher, "ids": ids, "mask": mask, "old": old}


def of_ids(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


@pytest.mark.parametrize("is_clip", [None, 2.0])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_loss_of_log_probabilities_is_that_of_logits(given: dict[str, Any], aggregation: Any, is_clip: Any) -> None:
    options = {"aggregation": aggregation, "is_clip": is_clip, "old_logprobs": given["old"]}
    logits = [given["student"].clone().requires_grad_() for _ in range(2)]
    one = sampled_token_loss(logits[0], given["teacher"], given["ids"], given["mask"], **options)
    teacher = of_ids(given["teacher"], given["ids"])
    teacher = torch.where(given["mask"], teacher, torch.nan)  # not read there
    other = sampled_token_loss_from_logprobs(of_ids(logits[1], given["ids"]), teacher, given["mask"], **options)
    one.backward()
    other.backward()
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(logits[0].grad, logits[1].grad)
    assert logits[0].grad is not None and logits[0].grad.abs().sum() > 0.1


def test_a_policy_gradient_with_the_advantages_has_the_losss_gradient(given: dict[str, Any]) -> None:
    grads = []
    for by_advantage in (False, True):
        logits = given["student"].clone().requires_grad_()
        own, teacher = of_ids(logits, given["ids"]), of_ids(given["teacher"], given["ids"])
        if by_advantage:
            advantages = sampled_token_advantages(own, teacher, given["mask"], weight=0.3)
            loss = -(advantages * own).sum() / given["mask"].sum()
        else:
            loss = 0.3 * sampled_token_loss_from_logprobs(own, teacher, given["mask"])
        loss.backward()
        grads.append(logits.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_advantages_are_bounded_and_zero_outside_the_mask(given: dict[str, Any]) -> None:
    own, teacher = of_ids(given["student"], given["ids"]), of_ids(given["teacher"], given["ids"])
    found = sampled_token_advantages(own, teacher, given["mask"], weight=2.0, clip=0.5)
    assert found.abs().max() == 1.0 and not found[~given["mask"]].any() and not found.requires_grad
    nothing = torch.zeros(B, T, dtype=torch.bool)
    assert sampled_token_loss_from_logprobs(own.requires_grad_(), teacher, nothing).item() == 0.0


@pytest.mark.parametrize("jsd_beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("tail", "temperature"), [(False, 1.0), (False, 0.7), (True, 1.0)])
def test_lists_of_the_likeliest_ids_are_the_top_k_of_logits(
    given: dict[str, Any], jsd_beta: float, tail: bool, temperature: float
) -> None:
    expected = Divergence(jsd_beta, temperature, None, top_k=4, tail=tail)
    logits = [given["student"].clone().requires_grad_() for _ in range(2)]
    one = expected(logits[0], given["teacher"])
    logprobs, ids = given["teacher"].log_softmax(-1).topk(4)
    padded = torch.nn.functional.pad(ids, (0, 2), value=PADDING)
    values = torch.nn.functional.pad(logprobs, (0, 2), value=-math.inf)
    other = top_k_divergence(
        logits[1], padded, values, jsd_beta=jsd_beta, temperature=temperature, tail=tail, token_clip=None
    )
    torch.testing.assert_close(one, other)
    one.sum().backward()
    other.sum().backward()
    torch.testing.assert_close(logits[0].grad, logits[1].grad)


def test_what_a_server_says_of_a_row_becomes_lists_at_the_turns_positions() -> None:
    row: list[Any] = [
        None,
        {"3": {"logprob": -0.5, "rank": 1}, "4": {"logprob": -1.5, "rank": 2}, "9": {"logprob": -3.0}},
        {5: -0.25},
        {7: SimpleNamespace(logprob=-0.75), 8: SimpleNamespace(logprob=-0.125)},
    ]
    ids, logprobs = top_k_lists(row, [0, 1, 2], k=2)
    assert ids.tolist() == [[3, 4], [5, PADDING], [8, 7]]
    assert logprobs.tolist() == [[-0.5, -1.5], [-0.25, -math.inf], [-0.125, -0.75]]
    assert target_logprobs(row, [0, 2], [4, 7]) == [-1.5, -0.75]
    with pytest.raises(ValueError, match="no log-probabilities of token 4, 4 entries"):
        top_k_lists(row, [3], k=2)
    with pytest.raises(ValueError, match="no log-probability of the token itself, 6"):
        target_logprobs(row, [1], [6])
    with pytest.raises(ValueError, match="k is 0"):
        top_k_lists(row, [0], k=0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tail": True, "temperature": 0.5}, "temperature 1"),
        ({"ids": torch.zeros(2, 3, dtype=torch.int64)}, r"\[..., K\]"),
        ({"ids": torch.full((2, 2), PADDING)}, "no id at all"),
        ({"ids": torch.tensor([[0, 5], [0, 1]])}, r"\[0, 5\)"),
        ({"ids": torch.tensor([[0, -2], [0, 1]])}, r"\[0, 5\)"),
        ({"jsd_beta": 2.0}, "jsd_beta"),
    ],
)
def test_lists_that_do_not_fit_are_refused(change: dict[str, Any], says: str) -> None:
    options = {"ids": torch.tensor([[0, 1], [2, 3]]), **change}
    ids = options.pop("ids")
    with pytest.raises(ValueError, match=says):
        top_k_divergence(torch.zeros(2, 5), ids, torch.full((2, 2), -1.0), **options)


def test_masks_and_weights_without_their_tensors_are_refused() -> None:
    ones = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"torch\.int64"):
        sampled_token_loss_from_logprobs(ones, ones, torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="old_logprobs"):
        sampled_token_loss_from_logprobs(ones, ones, torch.ones(2, 3, dtype=torch.bool), is_clip=2.0)
    with pytest.raises(ValueError, match="teacher_logprobs"):
        sampled_token_advantages(ones, torch.zeros(2, 4), torch.ones(2, 3, dtype=torch.bool))

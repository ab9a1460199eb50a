"""The pair loss: the textbook formula, its ends, and sums over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from loss_vectors import close, tensor, vectors
from torch import Tensor

from errata_trainer.channels.dpo import dpo_loss, dpo_losses, dpo_metrics, segment_sums

DPO = vectors("dpo_replay")
EDGES = {case["name"]: case for case in DPO["edge_cases"]}
SIDES = ("policy_chosen", "policy_rejected", "ref_chosen", "ref_rejected")


def sides() -> list[Tensor]:
    return [tensor(DPO["inputs"][name], grad=True) for name in SIDES]


def options(case: dict[str, Any]) -> dict[str, Any]:
    if case["length_norm"] == "sum":
        return {"beta_dpo": case["beta_dpo"]}
    lengths = tuple(torch.tensor(DPO["inputs"][name]) for name in ("len_chosen", "len_rejected"))
    return {"beta_dpo": case["beta_dpo"], "loss_type": "sigmoid_norm", "lengths": lengths}


@pytest.mark.parametrize("case", DPO["cases"], ids=lambda case: f"{case['beta_dpo']} {case['length_norm']}")
def test_dpo_is_the_textbooks(case: dict[str, Any]) -> None:
    tensors = sides()
    loss = dpo_loss(*tensors, **options(case))
    loss.backward()
    close("dpo_replay", loss, case["expected_loss"])
    close("dpo_replay", dpo_losses(*tensors, **options(case)), case["expected_per_pair"])
    close("dpo_replay", tensors[0].grad, case["expected_grad_chosen"])
    close("dpo_replay", tensors[1].grad, case["expected_grad_rejected"])
    assert tensors[2].grad is None
    assert tensors[3].grad is None
    metrics = dpo_metrics(*tensors, **options(case))
    close("dpo_replay", metrics["reward_accuracy"] / metrics["pairs"], case["expected_reward_accuracy"])
    close("dpo_replay", metrics["margin"], sum(case["expected_margin"]))
    close(
        "dpo_replay",
        metrics["chosen_reward"] - metrics["rejected_reward"],
        case["beta_dpo"] * sum(case["expected_margin"]),
    )


def test_a_policy_that_is_its_reference_has_a_loss_of_ln_2_and_a_gradient() -> None:
    case = EDGES["policy equals reference (ln 2 trap)"]
    chosen, rejected, *_ = sides()
    loss = dpo_loss(chosen, rejected, chosen, rejected, beta_dpo=case["beta_dpo"])
    loss.backward()
    close("dpo_replay", loss, math.log(2))
    close("dpo_replay", chosen.grad, case["expected_grad_chosen"])
    close("dpo_replay", rejected.grad, case["expected_grad_rejected"])


def test_extreme_margins_stay_finite() -> None:
    case = EDGES["extreme margins stay finite"]
    zero = torch.zeros(2, dtype=torch.float64)
    chosen = tensor(case["margins"], grad=True)
    losses = dpo_losses(chosen, zero, zero, zero, beta_dpo=case["beta_dpo"])
    losses.sum().backward()
    close("dpo_replay", losses, case["expected_per_pair"])
    assert chosen.grad.isfinite().all()


def test_no_pairs_are_an_attached_zero() -> None:
    empty = [torch.zeros(0, requires_grad=True) for _ in range(4)]
    loss = dpo_loss(*empty)
    assert loss.item() == EDGES["no pairs"]["expected_loss"] == 0.0
    loss.backward()
    assert dpo_metrics(*empty)["pairs"].item() == 0


def test_sums_go_by_action_an_empty_one_included() -> None:
    tokens = torch.arange(5.0, requires_grad=True)
    sums = segment_sums(tokens, torch.tensor([2, 0, 3]))
    assert sums.tolist() == [1.0, 0.0, 9.0]
    (sums * torch.tensor([1.0, 5.0, 2.0])).sum().backward()
    assert tokens.grad.tolist() == [1.0, 1.0, 2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="add up to 4"):
        segment_sums(tokens, torch.tensor([2, 2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_and_compared_in_float32(dtype: torch.dtype) -> None:
    tokens = torch.full((4096,), -1.25, dtype=dtype, requires_grad=True)
    sums = segment_sums(tokens, torch.tensor([4096]))
    assert sums.dtype == torch.float32 and sums.item() == -5120.0
    sums.sum().backward()
    assert tokens.grad.dtype == dtype and (tokens.grad == 1.0).all()
    zero, small = torch.zeros(1, dtype=dtype), torch.full((1,), 2.0**-12, dtype=dtype)
    given = (1.0 + zero, zero, 1.0 - 2 * small.float(), zero)  # a half and a wide one
    assert dpo_losses(*given).dtype == dpo_loss(zero, zero, zero, small).dtype == torch.float32
    metrics = dpo_metrics(zero, small, zero, zero, beta_dpo=0.1)
    assert metrics["margin"].item() == -(2.0**-12) and metrics["loss"].dtype == torch.float32


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (torch.tensor([3, -1]), "a length is -1"),
        (torch.tensor([1.0, 1.0]), "counted in integers"),
        (torch.tensor([True, True]), "counted in integers"),
        (torch.tensor([[2]]), "one dimension"),
    ],
    ids=["negative", "float", "bool", "rank"],
)
def test_lengths_that_count_nothing_are_refused(lengths: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        segment_sums(torch.zeros(2), lengths)
    if lengths.dim() == 1:
        zero = torch.zeros(2)
        with pytest.raises(ValueError, match="without tokens" if message.endswith("-1") else message):
            dpo_loss(zero, zero, zero, zero, loss_type="sigmoid_norm", lengths=(lengths, lengths))


def test_no_actions_have_no_sums() -> None:
    assert segment_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_what_cannot_be_meant_is_refused() -> None:
    pi, ref = torch.zeros(2), torch.zeros(2)
    with pytest.raises(ValueError, match=r"four \[P\]"):
        dpo_loss(pi, pi, ref[:1], ref)
    with pytest.raises(ValueError, match="beta_dpo"):
        dpo_loss(pi, pi, ref, ref, beta_dpo=0.0)
    with pytest.raises(ValueError, match="lengths"):
        dpo_loss(pi, pi, ref, ref, loss_type="sigmoid_norm")
    with pytest.raises(ValueError, match="without tokens"):
        dpo_loss(pi, pi, ref, ref, loss_type="sigmoid_norm", lengths=(torch.tensor([1, 0]), torch.tensor([1, 1])))
    with pytest.raises(ValueError, match="'sigmoid'"):
        dpo_loss(pi, pi, ref, ref, loss_type="hinge")

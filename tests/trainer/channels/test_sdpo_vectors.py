"""The published implementations' numbers, value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_vectors import close, tensor, vectors
from torch import Tensor

from errata_trainer.channels.sdpo import Divergence, generalized_jsd_loss, sampled_token_loss, sdpo_loss

OPSD, SDPO, TRL = (vectors(name) for name in ("opsd_jsd", "sdpo_loss", "trl_sdpo"))


def named(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items() if not isinstance(value, list | dict))


def logits(file: dict[str, Any]) -> tuple[Tensor, Tensor]:
    inputs = file["inputs"]
    return tensor(inputs["student_logits"], grad=True), tensor(inputs["teacher_logits"], grad=True)


def opsd(case: dict[str, Any], **other: Any) -> tuple[Tensor, Tensor]:
    """Our loss for one of OPSD's cases, and the student's logits."""
    student, teacher = logits(OPSD)
    mask = torch.tensor(OPSD["inputs"]["labels"]) != -100
    options = {key: case[key] for key in ("temperature", "token_clip", "top_k")}
    return generalized_jsd_loss(student, teacher, mask, jsd_beta=case["beta"], **options, **other), student


BATCHMEAN = [case for case in OPSD["cases"] if case["use_labels"] and case["reduction"] == "batchmean"]


@pytest.mark.parametrize("case", BATCHMEAN, ids=named)
def test_generalized_jsd_is_opsds(case: dict[str, Any]) -> None:
    loss, student = opsd(case)
    loss.backward()
    close("opsd_jsd", loss, case["expected_loss"])
    close("opsd_jsd", student.grad, case["expected_grad_student"])


@pytest.mark.parametrize("case", [c for c in BATCHMEAN if "derived_clip_after_sum_loss" in c], ids=named)
def test_the_token_clip_mode_clips_after_the_sum(case: dict[str, Any]) -> None:
    loss, student = opsd(case, clip_mode="token")
    loss.backward()
    close("opsd_jsd", loss, case["derived_clip_after_sum_loss"])
    if "derived_clip_after_sum_grad_student" in case:
        close("opsd_jsd", student.grad, case["derived_clip_after_sum_grad_student"])


@pytest.mark.parametrize("case", [c for c in BATCHMEAN if "unclipped_per_token" in c], ids=named)
def test_the_divergence_before_the_clip_and_what_was_clipped_are_reported(case: dict[str, Any]) -> None:
    student, teacher = logits(OPSD)
    mask = torch.tensor(OPSD["inputs"]["labels"]) != -100
    divergence = Divergence(case["beta"], case["temperature"], case["token_clip"], "token")
    stats = divergence.measure(student[mask], teacher[mask])[1]
    close("opsd_jsd", stats[:, 0], case["unclipped_per_token"])
    close("opsd_jsd", stats[:, 2].mean(), case["clipped_fraction_after_sum"])


@pytest.mark.parametrize("case", [c for c in OPSD["cases"] if c["reduction"] != "batchmean"], ids=named)
def test_the_divergence_per_token_makes_opsds_other_reductions(case: dict[str, Any]) -> None:
    student, teacher = logits(OPSD)
    mask = torch.tensor(OPSD["inputs"]["labels"]) != -100
    if not case["use_labels"]:
        mask = torch.ones_like(mask)
    per_token = Divergence(case["beta"], case["temperature"], case["token_clip"])(student[mask], teacher[mask])
    loss = per_token.sum() / (1 if case["reduction"] == "sum" else per_token.numel() * student.shape[-1])
    loss.backward()
    close("opsd_jsd", loss, case["expected_loss"])
    close("opsd_jsd", student.grad, case["expected_grad_student"])


def divergence_of(case: dict[str, Any], topk: int | None) -> Divergence:
    tail = bool(case["add_tail"])
    return Divergence(case["alpha"], token_clip=None, top_k=topk, support="student", tail=tail)


def sdpo(file: dict[str, Any], case: dict[str, Any], mask: Tensor, **other: Any) -> tuple[Tensor, Tensor]:
    """Our loss for one of SDPO's cases, and the student's logits."""
    student, teacher = logits(file)
    ids, old = torch.tensor(file["inputs"]["completion_ids"]), tensor(file["inputs"]["old_log_probs"])
    other |= {"old_logprobs": old, "is_clip": case["is_clip"]}
    if case["mode"] == "sampled_token":
        return sampled_token_loss(student, teacher, ids, mask, **other), student
    divergence = divergence_of(case, case["topk"])
    return sdpo_loss(student, teacher, mask, divergence=divergence, target_ids=ids, **other), student


@pytest.mark.parametrize("case", SDPO["cases"], ids=named)
def test_sdpo_is_lasgroups(case: dict[str, Any]) -> None:
    mask = torch.tensor(SDPO["inputs"]["response_mask"]).bool()
    if case["use_self_distillation_mask"]:
        mask &= torch.tensor(SDPO["inputs"]["self_distillation_mask"]).bool()[:, None]
    loss, student = sdpo(SDPO, case, mask, aggregation=case["loss_agg_mode"])
    loss.backward()
    close("sdpo_loss", loss, case["expected_loss"])
    close("sdpo_loss", student.grad, case["expected_grad_student_logits"])


@pytest.mark.parametrize("case", TRL["cases"], ids=named)
def test_sdpo_per_token_is_trls(case: dict[str, Any]) -> None:
    shape = torch.tensor(TRL["inputs"]["response_mask"]).shape
    actual = torch.zeros(shape, dtype=torch.float64)
    for row, column in torch.ones(shape).nonzero().tolist():
        mask = torch.zeros(shape, dtype=torch.bool)
        mask[row, column] = True
        actual[row, column] = sdpo(TRL, case, mask)[0].detach()
    close("trl_sdpo", actual, case["expected_per_token"])


@pytest.mark.parametrize("case", TRL["cases"], ids=named)
def test_trls_aggregation_differs_from_the_token_mean_and_its_gradient_follows(case: dict[str, Any]) -> None:
    mask = torch.tensor(TRL["inputs"]["response_mask"]).bool()
    mask &= torch.tensor(TRL["inputs"]["self_distillation_mask"]).bool()[:, None]
    token_mean, _ = sdpo(TRL, case, mask)
    close("trl_sdpo", token_mean, case["expected_loss_token_mean"])
    # TRL means over all rows, those without a token included
    rows, student = sdpo(TRL, case, mask, aggregation="seq-mean-token-mean")
    rows = rows * mask.any(-1).sum() / len(mask)
    rows.backward()
    close("trl_sdpo", rows, case["expected_loss_trl_aggregation"])
    close("trl_sdpo", student.grad, case["expected_grad_trl_aggregation"])

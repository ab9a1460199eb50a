"""In which precision the channels project states to the vocabulary: that of TRL's own log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trl_channels import NO_SITE, TEXTS, TWO_SITES, Pairs, made, scripts

from errata_server.process import ServerProcess
from errata_trainer.channels import distil
from errata_trainer.recipes.trl import ChannelSettings
from errata_trainer.tiny import tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(TEXTS)


@pytest.mark.parametrize("form", ["distribution", "sampled"])
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"bf16": False}, torch.float32),
        ({"bf16": True}, torch.bfloat16),
        ({"bf16": True, "cast_lm_head_to_fp32": True}, torch.float32),
    ],
    ids=["fp32", "bf16", "bf16, head fp32"],
)
def test_student_teacher_policy_and_reference_are_projected_as_trl_projects(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any],
    dtype: torch.dtype, form: Any,
) -> None:  # fmt: skip
    seen: list[torch.dtype] = []
    plain = distil.project

    def project(hidden: Any, weight: Any, bias: Any = None) -> Any:
        assert hidden.dtype == weight.dtype
        seen.append(hidden.dtype)
        logits = plain(hidden, weight, bias)
        assert logits.dtype == torch.float32
        return logits

    monkeypatch.setattr(distil, "project", project)
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(TWO_SITES, NO_SITE), pairs=Pairs(), alpha_sdpo=0.7, beta_replay=0.3,
        settings=ChannelSettings(dpo_reference="initial", sdpo_form=form), learning_rate=0.0, **options,
    )  # fmt: skip
    trainer.train()
    assert set(seen) == {dtype} and len(seen) > 6
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log["dpo/pairs"] > 0 and abs(log["dpo/margin"]) < 1e-6, "the policy is its reference, to the last bit"
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in trainer.model.parameters())


def test_the_heads_gradient_is_added_up_in_float32() -> None:
    torch.manual_seed(0)
    hidden, teacher = torch.randn(64, 16), torch.randn(64, 16)
    weight = torch.randn(32, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = distil.distil(hidden, teacher, weight, chunk_elements=8 * 32)
    loss.backward()
    gradient = weight.grad
    assert gradient is not None and gradient.dtype == torch.float32
    assert not torch.equal(gradient, gradient.bfloat16().float())
    exact = weight.detach().double().requires_grad_()
    distil.distil(hidden.double(), teacher.double(), exact)[0].backward()
    assert exact.grad is not None
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=0.05, atol=0.02)

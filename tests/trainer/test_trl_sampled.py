"""Channel 2 in TRL's loss in SDPO's own forms: sampled tokens alone, importance weights, a teacher that stays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import _logprobs, _row_ids
from test_trl_channels import (
    BAD_CALL,
    NO_SITE,
    ONE_SITE,
    TEXTS,
    TWO_SITES,
    ThreeChannelGRPOTrainer,
    Trainer,
    made,
    scripts,
)
from torch.nn.functional import log_softmax

from errata_server.process import ServerProcess
from errata_trainer.assembly.distillation import ITEMS, Distillation
from errata_trainer.assembly.layouts import PROMPT_LENGTHS
from errata_trainer.channels.sampled import sampled_token_loss_from_logprobs
from errata_trainer.channels.sdpo import Divergence
from errata_trainer.recipes.trl import ChannelSettings
from errata_trainer.rollouts.rollout import SdpoItem
from errata_trainer.tiny import tiny_tokenizer

pytestmark = pytest.mark.training


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(TEXTS)


def slow(model: Any, teacher: Any, inputs: Any, form: str, is_clip: float | None) -> tuple[float, list[float]]:
    """Return the sum over a micro-batch's target tokens, token by token, and the importance ratios before the bound."""
    total, ratios = 0.0, []
    old = inputs.get("old_per_token_logps")
    for row, items in enumerate(inputs["sdpo_items"]):
        prompt = int(inputs["prompt_mask"][row].sum())
        student = _logprobs(model, _row_ids(inputs, row)) if items else None
        for item in items:
            other = _logprobs(teacher, list(item.teacher_ids))
            for n, token in enumerate(item.target_ids):
                s, t = student[item.student_positions[n]], other[item.teacher_positions[n]]
                ratio = 1.0
                if is_clip is not None and old is not None:
                    ratios.append(math.exp(float(s[token]) - float(old[row, item.student_positions[n] + 1 - prompt])))
                    ratio = min(ratios[-1], is_clip)
                if form == "sampled":
                    total += ratio * float((s[token] - t[token]) * s[token])
                else:
                    mixture = torch.logaddexp(s, t) + math.log(0.5)
                    total += ratio * 0.5 * float((t.exp() * (t - mixture)).sum() + (s.exp() * (s - mixture)).sum())
    return total, ratios


class Compared(Trainer):  # type: ignore[misc]
    """Computes each micro-batch's channel 2 once more, slowly, with the weights of that moment."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        taught = model if self.settings.teacher == "live" else self._distillation.separate_teacher.model
        found, ratios = slow(model, taught, inputs, self.settings.sdpo_form, self.settings.is_clip)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.seen[-1] |= {"slow": found, "ratios": ratios}
        return loss


@pytest.mark.parametrize("form", ["sampled", "distribution"])
@pytest.mark.parametrize("teacher", ["live", "initial"])
def test_the_loss_is_the_slow_ones_also_after_the_policy_has_moved(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, form: Any, teacher: Any
) -> None:
    settings = ChannelSettings(sdpo_form=form, is_clip=1.02, teacher=teacher, divergence_guard=None)
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(TWO_SITES, NO_SITE, ONE_SITE, BAD_CALL), Compared, alpha_sdpo=0.7,
        settings=settings, num_iterations=2, max_steps=2, learning_rate=3e-3, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.train()
    assert len(trainer.seen) == 2
    for seen in trainer.seen:
        expected = 0.7 * seen["slow"] / float(seen["inputs"]["sdpo_tokens"])
        assert float(seen["loss"] - seen["plain"]) == pytest.approx(expected, rel=2e-4, abs=1e-5)
    first, second = (seen["ratios"] for seen in trainer.seen)
    assert first == pytest.approx([1.0] * len(first), abs=1e-3), "nothing has moved yet"
    assert max(second) > 1.02 > min(second), "the bound binds some tokens and not others"


def test_sites_of_a_fixed_teacher_are_computed_once_for_a_batch_that_is_used_again(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    passes = {}
    for teacher in ("initial", "ema"):
        trainer = made(
            tokenizer, server.url, tmp_path / teacher, scripts(TWO_SITES), num_iterations=2, max_steps=4,
            settings=ChannelSettings(teacher=teacher), learning_rate=1e-3,
        )  # fmt: skip
        trainer.compute_loss = lambda *a, t=trainer, **k: ThreeChannelGRPOTrainer.compute_loss(t, *a, **k)
        follower = trainer._distillation.separate_teacher
        seen: list[int] = []
        follower.model.model.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        before = {name: p.clone() for name, p in follower.model.named_parameters()}
        trainer.train()
        passes[teacher] = len(seen)
        stays = all(torch.equal(p, before[name]) for name, p in follower.model.named_parameters())
        assert stays is (teacher == "initial")
    assert passes["initial"] * 2 == passes["ema"] > 0


def test_the_sampled_forms_gradient_is_that_of_the_documented_function() -> None:
    import sys

    sys.path.insert(0, str(Path(__file__).parent / "channels"))
    from three_turns import HEADER, HINT, rollout
    from toy_models import toy

    from errata_trainer.channels.splicing import splice

    whole, model = rollout(), toy("qwen3").train()
    items: tuple[SdpoItem, ...] = tuple(splice(whole, turn, HINT, header_ids=HEADER) for turn in range(3))
    prompt, completion = torch.tensor([[0, 0, *whole.prompt_ids]]), torch.tensor([list(whole.completion_ids)])
    inputs = {"prompt_ids": prompt, ITEMS: [items], PROMPT_LENGTHS: [len(whole.prompt_ids)]}
    channel = Distillation(Divergence(), "live", form="sampled")
    with channel.capturing(model, inputs) as captured:
        model(
            input_ids=torch.cat((prompt, completion), 1),
            attention_mask=(torch.cat((prompt, completion), 1) != 0).long(),
        )
    summed, metrics, sites = channel.loss(model, inputs, captured)
    summed.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    def chosen(ids: Any, positions: Any, targets: Any) -> torch.Tensor:
        logits = model(input_ids=torch.tensor([list(ids)])).logits[0][list(positions)]
        return log_softmax(logits, -1).gather(1, torch.tensor(targets)[:, None])[:, 0]

    student_ids = whole.prompt_ids + whole.completion_ids
    own = torch.cat([chosen(student_ids, i.student_positions, i.target_ids) for i in items])[None]
    with torch.no_grad():
        other = torch.cat([chosen(i.teacher_ids, i.teacher_positions, i.target_ids) for i in items])[None]
    mean = sampled_token_loss_from_logprobs(own, other, torch.ones_like(own, dtype=torch.bool))
    (mean * own.numel()).backward()
    assert summed.item() == pytest.approx(mean.item() * own.numel(), rel=1e-6)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, dict(model.named_parameters())[name].grad, rtol=1e-4, atol=1e-7)
    assert float(metrics.divergence) == pytest.approx((own - other).sum().item(), rel=1e-6)
    assert sum(float(site.divergence) for site in sites) == pytest.approx((own - other).abs().sum().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sdpo_form": "tokens"}, "sdpo_form is 'tokens'"),
        ({"sdpo_form": "sampled", "top_k": 5}, "top_k has to be None"),
        ({"is_clip": 0.0}, "is_clip"),
    ],
)
def test_settings_that_mean_nothing_are_refused_at_construction(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        made(tokenizer, server.url, tmp_path, scripts(NO_SITE), settings=ChannelSettings(**settings))

"""One batch in the layouts of several trainers: channels 2 and 3 have the same losses and gradients, those of the slow
implementation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_cases import CASES, Case, ids_of, items_of, pairs_of, rollouts
from slow import slow_dpo, slow_sdpo

from errata_trainer import DpoPair, Rollout
from errata_trainer.assembly.distillation import ITEMS, Distillation
from errata_trainer.assembly.layouts import LAYOUT, PROMPT_LENGTHS, PackedRows, PaddedPrompts, PaddedRows, layout_of
from errata_trainer.assembly.preferences import OWN, PAIRS, Preferences, rejected_here
from errata_trainer.assembly.teacher_weights import TeacherCopy
from errata_trainer.channels.forward import capture_hidden
from errata_trainer.channels.sdpo import Divergence

sys.path.insert(0, str(Path(__file__).parent / "channels"))
from three_turns import BODY, HEADER
from toy_models import toy

LAYOUTS = ("padded prompts", "padded rows", "packed rows")
NEAR: dict[str, float] = {"rtol": 1e-9, "atol": 1e-9}
MODEL = "gpt2"
"""Kind of the student. It is in float64 from end to end: others have norms and rotary embeddings in float32."""
TOKENIZER = SimpleNamespace(encode=lambda *_, **__: list(HEADER))


def padded(rows: Sequence[Sequence[int]], *, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    zeros = [[0] * (width - len(row)) for row in rows]
    return torch.tensor(
        [[*(zero if left else ()), *row, *(() if left else zero)] for row, zero in zip(rows, zeros, strict=True)]
    )


def laid_out(layout: str, rows: Sequence[Rollout]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a trainer with this layout has in its batch, and how it calls the model."""
    batch: dict[str, Any] = {PROMPT_LENGTHS: [len(row.prompt_ids) for row in rows]}
    if layout == "packed rows":
        whole = [ids_of(row) for row in rows]
        offsets = [sum(map(len, whole[:n])) for n in range(len(whole) + 1)]
        ids = torch.tensor([[one for row in whole for one in row]])
        positions = torch.tensor([[n for row in whole for n in range(len(row))]])
        # No mask and no cache: with either, transformers does not look for rows in the positions.
        call = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        return {**batch, LAYOUT: PackedRows(offsets)}, call
    if layout == "padded rows":
        ids = padded([ids_of(row) for row in rows])
        return {**batch, LAYOUT: PaddedRows()}, {"input_ids": ids, "attention_mask": (ids != 0).long()}
    prompts, completions = padded([r.prompt_ids for r in rows], left=True), padded([r.completion_ids for r in rows])
    batch |= {"prompt_ids": prompts, "prompt_mask": (prompts != 0).long()}
    batch |= {"completion_ids": completions, "completion_mask": (completions != 0).long()}
    ids = torch.cat((prompts, completions), 1)
    mask = (ids != 0).long()
    return batch, {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def other_weights(by: float) -> Any:
    """Return a frozen model with weights near those of the student."""
    model = toy(MODEL)
    with torch.no_grad():
        for n, weight in enumerate(model.parameters()):
            weight.add_(torch.sin(torch.arange(weight.numel()) + n).view_as(weight), alpha=by)
    return model.requires_grad_(False)


TEACHER, REFERENCE = 0.3, 0.2
"""How far the weights of teacher and reference are from the student's."""


@dataclass
class Losses:
    """What channels 2 and 3 gave for a batch: sums, metrics and the gradient by name."""

    sdpo: float
    dpo: float
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor]


def channels() -> tuple[Distillation, Preferences]:
    distillation = Distillation(Divergence(0.5), "initial")
    distillation.separate_teacher = TeacherCopy(other_weights(TEACHER), 0.0)
    return distillation, Preferences(0.1)


def referred(case: Case, rows: Sequence[Rollout], preferences: Preferences) -> list[tuple[DpoPair, ...]]:
    made, reference = pairs_of(case, rows), other_weights(REFERENCE)
    return [tuple(preferences.referred(reference, pairs, "other", adapter=False)) for pairs in made]


def losses(
    layout: str, case: Case, *, distillation: Distillation | None = None, old: torch.Tensor | None = None
) -> Losses:
    model, rows = toy(MODEL), rollouts(case)
    made, preferences = channels()
    distillation = distillation or made
    pairs = referred(case, rows, preferences)
    batch, call = laid_out(layout, rows)
    batch |= {ITEMS: items_of(case, rows), PAIRS: pairs}
    batch[OWN] = [rejected_here(of_row, row, trained=True) for of_row, row in zip(pairs, rows, strict=True)]
    with distillation.capturing(model, batch) as captured, preferences.capturing(model, batch) as own:
        model(**call)
    total = torch.zeros((), dtype=torch.float64)
    sdpo = dpo = total
    metrics: dict[str, float] = {}
    if captured is not None:
        sdpo, sums, _ = distillation.loss(model, batch, captured, old)
        metrics["divergence"] = float(sums.divergence)
    if own.pairs:
        dpo, of_pairs = preferences.loss(model, own, pad_id=0)
        metrics |= {name: float(value) for name, value in of_pairs.items()}
    (sdpo + dpo).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Losses(float(sdpo.detach()), float(dpo.detach()), metrics, gradients)


def assert_same(found: Losses, expected: Losses) -> None:
    assert found.sdpo == pytest.approx(expected.sdpo, rel=1e-9, abs=1e-9)
    assert found.dpo == pytest.approx(expected.dpo, rel=1e-9, abs=1e-9)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-9)
    assert found.gradients.keys() == expected.gradients.keys() != set()
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, **NEAR)


def slow(model: Any, case: Case) -> tuple[float, float]:
    """Return both losses of the slow implementation, which knows no layout."""
    rows = rollouts(case)
    batch, _ = laid_out("padded prompts", rows)
    batch |= {"sdpo_items": items_of(case, rows), "dpo_pairs": pairs_of(case, rows)}
    sdpo = slow_sdpo(model, batch, TOKENIZER, jsd_beta=0.5, clip=10.0, teacher=other_weights(TEACHER))
    return sdpo, slow_dpo(model, batch, beta_dpo=0.1, reference=other_weights(REFERENCE))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_losses_and_gradients_are_the_same_in_every_layout_and_those_of_the_slow_ones(case: Case) -> None:
    padded_prompts, *others = (losses(layout, case) for layout in LAYOUTS)
    for other in others:
        assert_same(other, padded_prompts)
    sdpo, dpo = slow(toy(MODEL), case)
    assert padded_prompts.sdpo == pytest.approx(sdpo, rel=1e-9, abs=1e-9)
    assert padded_prompts.dpo == pytest.approx(dpo, rel=1e-9, abs=1e-9)
    assert (sdpo > 0.01) is any(case.sites) and (dpo > 0.01) is any(case.paired), "or being equal says little"
    here = 0 if case.elsewhere else sum(map(len, case.paired))
    assert padded_prompts.metrics.get("reused", 0.0) == here, "which rejected actions are the batch's own"


def test_the_gradient_in_every_layout_is_that_of_the_slow_losses() -> None:
    case = CASES["a truncated turn"]
    model = toy(MODEL)
    way = {name: torch.cos(torch.arange(p.numel())).view_as(p).double() for name, p in model.named_parameters()}

    def along(by: float) -> float:
        moved = toy(MODEL)
        with torch.no_grad():
            for name, weight in moved.named_parameters():
                weight.add_(way[name], alpha=by)
        return sum(slow(moved, case))

    slope = (along(1e-5) - along(-1e-5)) / 2e-5
    assert abs(slope) > 0.01, "or being equal says little"
    for layout in LAYOUTS:
        gradients = losses(layout, case).gradients
        assert sum(float((g * way[name]).sum()) for name, g in gradients.items()) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("form", ["distribution", "sampled"])
def test_importance_weights_are_those_of_the_completions_in_every_layout(form: Any) -> None:
    case = CASES["a truncated turn"]
    rows = rollouts(case)
    width = max(len(row.completion_ids) for row in rows)
    old = -3.0 + torch.sin(torch.arange(len(rows) * width)).view(len(rows), width).double()
    old[0, 1] = torch.nan
    found = []
    for layout in LAYOUTS:
        channel = Distillation(Divergence(0.5), "initial", form=form, is_clip=2.0)
        channel.separate_teacher = TeacherCopy(other_weights(TEACHER), 0.0)
        found.append(losses(layout, case, distillation=channel, old=old))
    for other in found[1:]:
        assert_same(other, found[0])
    assert found[0].sdpo != pytest.approx(losses(LAYOUTS[0], case).sdpo, rel=1e-3), "the weights have an effect"


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(("kind", "near"), [("gpt2", 1e-9), ("qwen3", 1e-5)])
def test_packed_rows_do_not_see_each_other_on_a_cpu(kind: str, near: float, attention: str) -> None:
    model, rows = toy(kind), rollouts(CASES["a truncated turn"])[:2]
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    _, call = laid_out("packed rows", rows)
    whole = [ids_of(row) for row in rows]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in whole])
        torch.testing.assert_close(model(**call).logits[0], alone, rtol=near, atol=near)
        seen = model(**{**call, "position_ids": torch.arange(len(alone))[None]}).logits[0]
    assert not torch.allclose(seen, alone, rtol=1e-3), "without position ids that begin again, rows see each other"


def test_a_batch_has_padded_prompts_unless_it_carries_another_layout() -> None:
    rows = rollouts(CASES["no site"])
    batch, call = laid_out("padded prompts", rows)
    layout = layout_of(batch)
    assert layout == PaddedPrompts(len(BODY + HEADER), batch[PROMPT_LENGTHS])
    for name in LAYOUTS:
        batch, call = laid_out(name, rows)
        for number, row in enumerate(rows):
            place, columns = layout_of(batch).columns(number, range(len(ids_of(row))))
            assert call["input_ids"][place, list(columns)].tolist() == ids_of(row)


@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_in_another_packed_row_is_refused(position: int) -> None:
    packed = PackedRows([0, 4, 9, 11])
    assert packed.columns(1, [0, 4]) == (0, [4, 8])
    with pytest.raises(ValueError, match=r"packed row 1 has 5 tokens, positions asked for are \[0, -?\d\]"):
        packed.columns(1, [0, position])


def test_states_of_packed_rows_are_captured_from_one_pass() -> None:
    model, rows = toy(MODEL), rollouts(CASES["many sites"])
    batch, call = laid_out("packed rows", rows)
    places = [layout_of(batch).columns(number, [3, 9]) for number in (2, 0)]
    at = [(row, column) for row, columns in places for column in columns]
    with capture_hidden(model, torch.tensor([row for row, _ in at]), torch.tensor([c for _, c in at])) as captured:
        model(**call)
    alone = [model.transformer(input_ids=torch.tensor([ids_of(rows[n])]))[0][0, [3, 9]] for n in (2, 0)]
    torch.testing.assert_close(captured.hidden(), torch.cat(alone), **NEAR)

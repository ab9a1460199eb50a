"""States at positions: the plain pass's, with fewer tokens computed, and the student's without a pass."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from three_turns import HEADER, HINT, rollout
from torch import Tensor
from toy_models import KINDS, toy
from trl.trainer.utils import add_fused_lm_head

from errata_trainer.channels import forward
from errata_trainer.channels.distil import action_logprobs, distil
from errata_trainer.channels.dpo import segment_sums
from errata_trainer.channels.forward import (
    NothingCaptured,
    active_dropout,
    capture_hidden,
    evaluating,
    frozen_states,
    idle_loss,
    shares_prefixes,
    trained_states,
)
from errata_trainer.channels.heads import backbone, output_head
from errata_trainer.channels.pairs import pair_rows
from errata_trainer.channels.sdpo import Divergence
from errata_trainer.channels.splicing import splice
from errata_trainer.rollouts.rollout import DpoPair

MODEL = toy("qwen3")


def plain(model: Any, rows: Any, positions: Any) -> Tensor:
    """States by a pass for each row."""
    with torch.no_grad():
        parts = [
            backbone(model)(input_ids=torch.tensor([list(r)]))[0][0][list(p)]
            for r, p in zip(rows, positions, strict=True)
        ]
    return torch.cat(parts)


@contextmanager
def counted(model: Any) -> Any:
    """Count passes and the tokens they compute."""
    counts = {"passes": 0, "tokens": 0}

    def count(_module: Any, _args: Any, kwargs: Any, output: Any) -> None:
        counts["passes"] += 1
        counts["tokens"] += output[0].shape[0] * output[0].shape[1]

    hook = backbone(model).register_forward_hook(count, with_kwargs=True)
    yield counts
    hook.remove()


TOKENS = st.lists(st.integers(2, 4), min_size=1, max_size=9)  # few different ones: long common beginnings


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), rows=st.lists(TOKENS, min_size=1, max_size=8))
def test_shared_beginnings_change_no_state(
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, rows: list[list[int]]
) -> None:
    positions = [sorted(data.draw(st.sets(st.integers(0, len(row) - 1)))) for row in rows]
    monkeypatch.setattr(forward, "LEAST_TRUNK", data.draw(st.sampled_from([1, 128])))
    actual = frozen_states(MODEL, rows, positions, batch_tokens=data.draw(st.sampled_from([0, 12, 1000])))
    if sum(map(len, positions)):
        torch.testing.assert_close(actual, plain(MODEL, rows, positions), rtol=1e-9, atol=1e-9)
    assert len(actual) == sum(map(len, positions))


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_gives_the_states_of_whole_rows(kind: str) -> None:
    model = toy(kind)
    items = [splice(rollout(), turn, HINT, header_ids=HEADER) for turn in range(3)]
    rows, positions = [i.teacher_ids for i in items], [i.teacher_positions for i in items]
    torch.testing.assert_close(frozen_states(model, rows, positions), plain(model, rows, positions))


def test_a_rollouts_history_is_computed_once_for_all_its_sites() -> None:
    items = [splice(rollout(), turn, HINT, header_ids=HEADER) for turn in range(3)]
    rows, positions = [i.teacher_ids for i in items], [i.teacher_positions for i in items]
    with counted(MODEL) as counts:
        frozen_states(MODEL, [*rows, *rows], [*positions, *positions], batch_tokens=0)
    assert counts["passes"] == 6
    once = len({row[:n] for row in rows for n in range(1, len(row) + 1)})  # the nodes of their tree
    again = sum(len(row) - positions[n][0] for n, row in enumerate(rows))  # a row that was there: its states anew
    assert counts["tokens"] == once + again
    with counted(MODEL) as apart:
        frozen_states(MODEL, rows, positions, share=False, batch_tokens=0)
    assert apart["tokens"] == sum(map(len, rows)) > once


def test_rows_are_computed_side_by_side_within_a_bound() -> None:
    """Eight rollouts of a group, two sites in each: the prompt once, then the first sites, then the second ones."""
    prompt = list(range(10, 60))
    rows, positions = [], []
    for number in range(8):
        before = [*prompt, *[60 + number] * (30 + number)]
        rows += [[*before, 2, 3, 4, 5], [*before, 6, 7, 8, 9, 2, 3]]  # two hints behind the same history
        positions += [[len(before) + 1, len(before) + 2], [len(before) + 3, len(before) + 4]]
    expected = plain(MODEL, rows, positions)
    with counted(MODEL) as counts:
        torch.testing.assert_close(frozen_states(MODEL, rows, positions), expected, rtol=1e-9, atol=1e-9)
    assert counts["passes"] == 3
    assert counts["tokens"] <= 50 + 8 * (37 + 4) + 8 * 6, "padding is all that is computed beside each token once"
    largest = []
    hook = backbone(MODEL).register_forward_hook(lambda _m, _a, output: largest.append(output[0].shape[:2].numel()))
    torch.testing.assert_close(frozen_states(MODEL, rows, positions, batch_tokens=200), expected, rtol=1e-9, atol=1e-9)
    hook.remove()
    assert max(largest) <= 200 and len(largest) >= 4
    uneven = [[5] * 90, *[[n] * n for n in (10, 11, 12)]]
    with counted(MODEL) as counts:
        frozen_states(MODEL, uneven, [[n - 1] for n in map(len, uneven)])
    assert counts["passes"] == 2 and counts["tokens"] <= 90 + 3 * 12, "short rows are not padded to a long one"


@pytest.mark.parametrize(
    ("kind", "options", "shares"),
    [
        ("qwen3", {}, True),
        ("gpt2", {}, True),
        ("granite", {}, True),
        ("mistral", {}, False),
        ("mistral", {"sliding_window": None}, True),
        ("gemma2", {}, False),
        ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
    ],
)
def test_beginnings_are_shared_only_where_that_is_exact(kind: str, options: dict[str, Any], shares: bool) -> None:
    assert shares_prefixes(toy(kind, **options)) is shares


def test_virtual_tokens_are_a_cache_themselves() -> None:
    model = get_peft_model(toy("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert not shares_prefixes(model)


def test_frozen_states_have_no_gradient_no_dropout_and_leave_every_mode_as_it_was() -> None:
    model = toy("qwen3", attention_dropout=0.5).train()
    backbone(model).layers[1].eval()
    modes = [module.training for module in model.modules()]
    assert "model.layers.0.self_attn" in active_dropout(model)
    assert "model.layers.1.self_attn" not in active_dropout(model)
    rows, positions = [(5, 6, 7, 8)], [(1, 3)]
    one, two = (frozen_states(model, rows, positions) for _ in range(2))
    assert not one.requires_grad
    assert torch.equal(one, two)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(RuntimeError, match="inside"), evaluating(model):
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == modes
    assert active_dropout(model.eval()) == []


def test_rows_and_positions_that_do_not_fit_are_refused_and_none_are_no_pass() -> None:
    with pytest.raises(ValueError, match="2 rows, 1 lists"):
        frozen_states(MODEL, [(1,), (2,)], [(0,)])
    with pytest.raises(ValueError, match="row 0 has 2 tokens"):
        frozen_states(MODEL, [(1, 2)], [(2,)])
    with pytest.raises(ValueError, match="no rows"):
        trained_states(MODEL, [], [])
    with counted(MODEL) as counts:
        assert frozen_states(MODEL, [], []).shape == (0, 16)
        assert frozen_states(MODEL, [(3, 4)], [()]).shape == (0, 16)
    assert counts["passes"] == 0


def test_trained_states_are_the_plain_ones_in_one_pass_with_gradient() -> None:
    rows, positions = [(5, 6, 7, 8), (9, 3), (5, 6, 2)], [(1, 3), (), (2, 0)]
    with counted(MODEL) as counts:
        states = trained_states(MODEL, rows, positions)
    assert counts["passes"] == 1
    torch.testing.assert_close(states.detach(), plain(MODEL, rows, positions))
    states.sum().backward()
    assert MODEL.model.embed_tokens.weight.grad.abs().sum() > 0
    MODEL.zero_grad()


def test_an_idle_rank_runs_a_pass_of_zeros() -> None:
    model = toy("qwen3")
    with counted(model) as counts:
        idle_loss(model).backward()
    assert counts["passes"] == 1
    gradients = [p.grad for p in model.model.parameters()]
    assert all(g is not None and g.abs().sum() == 0 for g in gradients)


WIDTH, LENGTH = 10, 32


def padded() -> tuple[dict[str, Tensor], Any]:
    """A batch of two rollouts as GRPO forwards it: prompts padded on the left, completions on the right."""
    whole = rollout()
    row = [0] * (WIDTH - len(whole.prompt_ids)) + list(whole.prompt_ids + whole.completion_ids)
    mask = [0] * (WIDTH - len(whole.prompt_ids)) + [1] * (len(row) - WIDTH + len(whole.prompt_ids))
    row, mask = (side + [0] * (LENGTH - len(side)) for side in (row, mask))
    other = [1] * LENGTH
    return {"input_ids": torch.tensor([other, row]), "attention_mask": torch.tensor([other, mask])}, whole


@pytest.mark.parametrize("checkpointing", [None, True, False])
@pytest.mark.parametrize("peft", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_the_students_states_come_from_the_pass_there_is(checkpointing: bool | None, peft: bool, fused: bool) -> None:
    model = toy("qwen3").float()
    if fused:
        add_fused_lm_head(model)
    if peft:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.enable_input_require_grads()
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
        model.train()
    batch, whole = padded()
    item = splice(whole, 1, HINT, header_ids=HEADER)
    columns = torch.tensor([WIDTH - len(whole.prompt_ids) + p for p in item.student_positions])
    rows = torch.ones_like(columns)
    options = {"labels": batch["input_ids"], "fused_lm_head": True} if fused else {}
    with counted(model) as counts, capture_hidden(model, rows, columns) as captured:
        with torch.no_grad():
            model(**batch, **options)  # a reference's pass is not the student's
        output = model(**batch, **options)
    assert counts["passes"] == 2
    hidden = captured.hidden()
    ids = whole.prompt_ids + whole.completion_ids
    expected = plain(model.eval(), [ids], [item.student_positions])
    torch.testing.assert_close(hidden.detach(), expected, rtol=1e-4, atol=1e-4)
    assert output is not None
    model.train(checkpointing is not None)
    teacher = frozen_states(model, [item.teacher_ids], [item.teacher_positions])
    head = output_head(model)
    loss, _ = distil(hidden, teacher, head.weight, head.bias, transform=head.transform)
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(float(p.grad.abs().sum()) for p in trained if p.grad is not None) > 0.0
    # the same loss by a pass of its own
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    states = trained_states(model, [ids], [item.student_positions])
    distil(states, teacher, *_head(model))[0].backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-5)


def _head(model: Any) -> tuple[Tensor, Tensor | None]:
    head = output_head(model)
    return head.weight, head.bias


def test_a_batch_in_parts_is_put_together_in_the_order_asked_for() -> None:
    batch, _ = padded()
    rows, columns = torch.tensor([1, 0, 1]), torch.tensor([12, 3, 9])
    with capture_hidden(MODEL, rows, columns) as whole:
        MODEL(**batch)
    with capture_hidden(MODEL, rows, columns) as parts:
        for n in range(2):
            MODEL(**{key: value[n : n + 1] for key, value in batch.items()})
    torch.testing.assert_close(parts.hidden(), whole.hidden())


def test_a_pass_that_was_not_made_is_said() -> None:
    with capture_hidden(MODEL, torch.tensor([1]), torch.tensor([0])) as captured:
        MODEL(input_ids=torch.tensor([[3, 4]]))
    with pytest.raises(NothingCaptured, match="1 rows passed"):
        captured.hidden()
    with capture_hidden(MODEL, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)) as idle:
        MODEL(input_ids=torch.tensor([[3, 4]]))
    assert idle.hidden().shape == (0, 16)
    assert idle.hidden().requires_grad


def test_without_a_hint_the_teacher_is_the_student() -> None:
    whole = rollout()
    item = splice(whole, 2, (), header_ids=HEADER)
    model = toy("qwen3").train()
    student = trained_states(model, [whole.prompt_ids + whole.completion_ids], [item.student_positions])
    teacher = frozen_states(model, [item.teacher_ids], [item.teacher_positions])
    loss, _ = distil(student, teacher, *_head(model), divergence=Divergence(0.0))
    loss.backward()
    assert abs(loss.item()) < 1e-6
    assert max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None) < 1e-6


def test_a_pairs_log_probabilities_are_those_of_its_actions_tokens_alone() -> None:
    pairs = [DpoPair((5, 6, 7), (8, 9), (3,)), DpoPair((2, 2), (4,), (4, 4, 1))]
    batch = pair_rows(pairs)
    with counted(MODEL) as counts:
        hidden = frozen_states(MODEL, batch.rows, batch.positions, batch_tokens=0)
    assert counts["tokens"] == (3 + 4) + (4 + 3)  # each context once, its last token once more
    logprobs = action_logprobs(hidden, torch.tensor(batch.target_ids), *_head(MODEL))
    sums = segment_sums(logprobs, torch.tensor(batch.lengths))
    for number, (context, action) in enumerate(
        [(p.context_ids, p.chosen_ids) for p in pairs] + [(p.context_ids, p.rejected_ids) for p in pairs]
    ):
        own = MODEL(input_ids=torch.tensor([context + action])).logits[0].log_softmax(-1)
        expected = sum(own[len(context) - 1 + k, token] for k, token in enumerate(action))
        torch.testing.assert_close(sums[number], expected)

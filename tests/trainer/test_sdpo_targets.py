"""Which tokens of a failing turn channel 2 compares: the whole turn, or its tool calls only."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import call
from test_action_tokens import RED, THINKING, speaker
from test_trl_channels import NO_SITE, TEXTS, made, scripts
from test_trl_sampled import Compared
from torch.nn.functional import log_softmax

from errata_server.process import ServerProcess
from errata_trainer import Rollout, Turn
from errata_trainer.assembly.action_tokens import ActionTokens
from errata_trainer.assembly.collator import IGNORED, collate_columns, collate_sdpo
from errata_trainer.assembly.distillation import ITEMS, Distillation
from errata_trainer.assembly.layouts import PROMPT_LENGTHS
from errata_trainer.channels.forward import frozen_states
from errata_trainer.channels.sampled import top_k_divergence, top_k_lists
from errata_trainer.channels.sdpo import Divergence, generalized_jsd_loss, sampled_token_loss, sdpo_loss
from errata_trainer.channels.splicing import splice
from errata_trainer.recipes.trl import ChannelSettings
from errata_trainer.tiny import END, tiny_tokenizer

sys.path.insert(0, str(Path(__file__).parent / "channels"))
from three_turns import HEADER, HINT, rollout
from toy_models import toy

BLUE = RED.replace("red", "blue")
QWEN_3 = ("qwen3_training.jinja", "qwen3_8.jinja")
GREEN = call("read", path="green")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(TEXTS)


def calls_of(template: str, turn: str) -> list[str]:
    tokenizer = speaker(template)
    ids = tokenizer.encode(turn, add_special_tokens=False)
    spans = ActionTokens(tokenizer, [tokenizer.eos_token_id]).call_spans(ids)
    return [tokenizer.decode(ids[span.start : span.stop]) for span in spans]


@pytest.mark.parametrize("template", QWEN_3)
@pytest.mark.parametrize("prose", ["", "I read it.\n"], ids=["", "prose"])
def test_reasoning_prose_and_the_end_of_the_turn_are_outside_of_the_calls(template: str, prose: str) -> None:
    tokenizer = speaker(template)
    opened = tokenizer.apply_chat_template(
        [{"role": "user", "content": "go"}], add_generation_prompt=True, tokenize=False
    ).endswith("<think>\n")
    own = ("" if opened else "<think>\n") + "maybe <tool_call> the red one\n</think>\n\n" + prose
    assert calls_of(template, own + RED + END) == [RED]
    assert calls_of(template, own + RED + " maybe the red one " + BLUE + "\nmaybe" + END) == [RED, BLUE]


@pytest.mark.parametrize("template", [one for one in THINKING if one not in QWEN_3])
def test_calls_in_xml_are_found(template: str) -> None:
    xml = "<tool_call>\n<function=read>\n<parameter=path>\nred\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(template, "maybe\n</think>\n\nI read. " + xml + "\n" + xml + END) == [xml, xml]


def test_a_malformed_call_reaches_to_the_end_of_its_turn() -> None:
    cut = RED[: RED.index("arguments")]
    assert calls_of("qwen3_training.jinja", "maybe " + cut + END) == [cut + END]
    xml = "<tool_call>\n<parameter=path>"  # only the constant part of the opening
    assert calls_of("qwen3_5_think.jinja", "</think>\n\nmaybe " + xml + END) == [xml + END]


@pytest.mark.parametrize("turn", ["<think>\nmaybe " + RED, "I give up" + END, ""])
def test_a_turn_without_a_call_has_no_targets(turn: str) -> None:
    assert calls_of("qwen3_training.jinja", turn) == []


def test_the_first_call_begins_where_channel_3_has_it() -> None:
    tokenizer = speaker("qwen3_training.jinja")
    tokens = ActionTokens(tokenizer, [tokenizer.eos_token_id])
    for turn in (RED + END, "maybe\n\n" + RED + BLUE + END, "<think>\nmaybe\n</think>\n\n" + BLUE + END):
        ids = tokenizer.encode(turn, add_special_tokens=False)
        own = tokens.own(ids, call=True)
        assert own is not None and tokens.call_spans(ids)[0].start == own.start


def test_every_token_is_in_a_call_or_not_whatever_the_tokenizer_merges() -> None:
    texts = [
        ">\n<tool_call>",
        'maybe<tool_call>{"name"',
        "é<tool_call>",
        "</tool_call>maybe",
        "</tool_call><tool_call>",
    ]
    tokenizer = tiny_tokenizer([*texts * 9, RED])
    turn = "maybeé" + RED + BLUE + "maybe" + RED + "é" + END
    ids = tokenizer.encode(turn, add_special_tokens=False)
    inside = [n for span in ActionTokens(tokenizer, [tokenizer.eos_token_id]).call_spans(ids) for n in span]
    assert inside == sorted(set(inside))
    at, reached = 0, []
    calls = [(turn.index(RED), turn.index(BLUE) + len(BLUE)), (turn.rindex(RED), turn.rindex(RED) + len(RED))]
    for n in range(len(ids)):
        stop = len(tokenizer.decode(ids[: n + 1]))
        if any(at < end and stop > start for start, end in calls):
            reached.append(n)
        at = stop
    assert inside == reached


def test_targets_are_a_part_of_the_turn_and_the_rows_are_whole() -> None:
    whole = splice(rollout(), 1, HINT, header_ids=HEADER)
    part = splice(rollout(), 1, HINT, header_ids=HEADER, targets=[range(1, 3)])
    assert part == replace(
        whole,
        student_positions=whole.student_positions[1:3],
        teacher_positions=whole.teacher_positions[1:3],
        target_ids=(21, 22),
    )
    assert splice(rollout(), 1, HINT, header_ids=HEADER, targets=[range(2, 4), range(2), range(1, 3)]) == whole
    for targets in ([], [range(0)], [range(-1, 2)], [range(3, 5)]):
        with pytest.raises(ValueError, match="no targets, or some outside of it"):
            splice(rollout(), 1, HINT, header_ids=HEADER, targets=targets)


FORMS: dict[str, tuple[Divergence, Any]] = {
    "dense": (Divergence(), "distribution"),
    "top-k": (Divergence(top_k=5), "distribution"),
    "tail": (Divergence(top_k=5, support="student", tail=True), "distribution"),
    "sampled": (Divergence(), "sampled"),
}


@pytest.mark.parametrize("form", FORMS)
def test_positions_outside_of_the_targets_get_no_gradient(form: str) -> None:
    whole, model = rollout(), toy("qwen3").train()
    divergence, kind = FORMS[form]
    items = tuple(
        splice(whole, turn, HINT, header_ids=HEADER, targets=targets)
        for turn, targets in ((0, [range(1, 2)]), (1, [range(1), range(2, 3)]))
    )
    prompt, completion = torch.tensor([[0, 0, *whole.prompt_ids]]), torch.tensor([list(whole.completion_ids)])
    ids = torch.cat((prompt, completion), 1)
    inputs = {"prompt_ids": prompt, ITEMS: [items], PROMPT_LENGTHS: [len(whole.prompt_ids)]}
    states: list[torch.Tensor] = []

    def keep(module: Any, given: Any, output: Any) -> None:
        output.last_hidden_state.retain_grad()
        states.append(output.last_hidden_state)

    hook = model.model.register_forward_hook(keep)
    channel = Distillation(divergence, "live", form=kind)
    with channel.capturing(model, inputs) as captured:
        model(input_ids=ids, attention_mask=(ids != 0).long())
    hook.remove()
    summed, metrics, _ = channel.loss(model, inputs, captured)
    summed.backward()
    assert states[0].grad is not None and float(metrics.tokens) == 3
    touched = states[0].grad[0].abs().sum(-1).nonzero()[:, 0].tolist()
    assert touched == [2 + position for item in items for position in item.student_positions]


def flat() -> tuple[Rollout, Any, Any]:
    whole = Rollout((5, *HEADER), (31, 32, 33, 34, 35), (1,) * 5, (Turn(0, 0, 5),))
    return whole, *(
        splice(whole, 0, HINT, header_ids=HEADER, targets=targets) for targets in (None, [range(1, 2), range(3, 5)])
    )


def test_exported_columns_hold_the_targets_only() -> None:
    whole, turn, part = flat()
    batch = collate_columns([whole], [[part]], pad_id=0, teacher_logprobs=[[[-1.0, -2.0, -3.0]]])
    assert batch["input_ids"][batch["sdpo_error_mask"]].tolist() == [32, 34, 35]
    assert batch["sdpo_teacher_logprobs"][batch["sdpo_error_mask"]].tolist() == [-1.0, -2.0, -3.0]
    assert float(batch["sdpo_weights"].sum()) == 3.0
    labels = collate_sdpo([whole], [[part]], pad_id=0)
    complete = collate_sdpo([whole], [[turn]], pad_id=0)
    assert [row[row != IGNORED].tolist() for row in labels["sdpo_loss_mask"]] == [[32, 34, 35]]
    for name in complete:
        if name != "sdpo_loss_mask":
            assert torch.equal(labels[name], complete[name])
    agree = labels["sdpo_loss_mask"] == complete["sdpo_loss_mask"]
    assert agree[labels["sdpo_loss_mask"] != IGNORED].all()


def test_losses_of_exported_rows_reach_the_targets_only() -> None:
    whole, _, part = flat()
    batch = collate_sdpo([whole], [[part]], pad_id=0)
    mask = batch["sdpo_loss_mask"] != IGNORED
    torch.manual_seed(0)
    shape = (*mask.shape, 12)
    teacher = torch.randn(shape)
    targets = torch.randint(0, 12, mask.shape)
    served = [None, *({n: float(p) for n, p in enumerate(row)} for row in log_softmax(teacher[0], -1))]
    ids, logprobs = top_k_lists(served, range(mask.shape[1]), k=4)
    losses = {
        "dense": lambda logits: generalized_jsd_loss(logits, teacher, mask),
        "top-k": lambda logits: generalized_jsd_loss(logits, teacher, mask, top_k=3),
        "tail": lambda logits: sdpo_loss(logits, teacher, mask, divergence=Divergence(top_k=3, tail=True)),
        "sampled": lambda logits: sampled_token_loss(logits, teacher, targets, mask),
        "lists": lambda logits: top_k_divergence(logits[mask], ids[mask[0]], logprobs[mask[0]], tail=True).sum(),
    }
    for name, loss in losses.items():
        logits = torch.randn(shape, requires_grad=True)
        loss(logits).backward()
        assert logits.grad is not None
        assert torch.equal(logits.grad.abs().sum(-1) > 0, mask), name


@pytest.mark.parametrize(
    "options",
    [{}, {"sdpo_form": "sampled"}, {"is_clip": 1.02}],
    ids=["dense", "sampled", "weighted"],
)
def test_a_real_batch_distils_its_calls_only(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    prose = ["word is red " + GREEN + " I am done", call("submit", word="owl"), "done"]
    settings = ChannelSettings(sdpo_targets="calls", divergence_guard=None, **options)
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(prose, NO_SITE), Compared, alpha_sdpo=0.7, settings=settings,
        num_iterations=2, max_steps=2, learning_rate=3e-3, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.train()
    for seen in trainer.seen:
        items = [item for row in seen["inputs"]["sdpo_items"] for item in row]
        assert items and {tokenizer.decode(item.target_ids) for item in items} == {GREEN}
        assert float(seen["inputs"]["sdpo_tokens"]) == sum(len(item.target_ids) for item in items)
        assert all("word is red" in tokenizer.decode(item.teacher_ids) for item in items)
        expected = 0.7 * seen["slow"] / float(seen["inputs"]["sdpo_tokens"])
        assert float(seen["loss"] - seen["plain"]) == pytest.approx(expected, rel=2e-4, abs=1e-5)
        assert expected != 0.0


def test_the_check_takes_the_whole_turn_again_where_calls_are_compared(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    from errata_trainer.assembly.counterfactual import CounterfactualCheck

    prose = ["word is red " + GREEN + END, call("submit", word="owl"), "done"]
    trainer = made(
        tokenizer, server.url, tmp_path, scripts([text.removesuffix(END) for text in prose], NO_SITE), alpha_sdpo=0.7,
        settings=ChannelSettings(sdpo_targets="calls"), check=CounterfactualCheck("always"),
    )  # fmt: skip
    contexts: list[Any] = []

    def sample(asked: Any) -> Any:
        contexts.extend(asked)
        return [[("read", {"path": "red"})] for _ in asked]

    trainer._sample = sample
    trainer.train()
    assert contexts
    for context in contexts:
        text = tokenizer.decode(context)
        assert text.endswith("<|im_start|>assistant\n") and "word is red" not in text.split("Hint")[-1]


def test_a_tokenizer_that_does_not_say_where_calls_are_is_refused(server: ServerProcess, tmp_path: Path) -> None:
    bare = tiny_tokenizer(TEXTS)
    fields = {name: value for name, value in bare.response_template["fields"].items() if name != "tool_calls"}
    bare.response_template = {**bare.response_template, "fields": fields}
    with pytest.raises(ValueError, match="sdpo_targets='calls' cannot be used"):
        made(bare, server.url, tmp_path, scripts(NO_SITE), settings=ChannelSettings(sdpo_targets="calls"))
    with pytest.raises(ValueError, match="no response_template"):
        ActionTokens(bare, [bare.eos_token_id]).call_spans([1, 2])


def test_states_of_parts_are_those_of_the_whole_turn() -> None:
    """The teacher's pass has the same rows; only fewer positions are read."""
    model = toy("qwen3")
    whole, turn, part = flat()
    every = frozen_states(model, [turn.teacher_ids], [turn.teacher_positions])
    some = frozen_states(model, [part.teacher_ids], [part.teacher_positions])
    torch.testing.assert_close(some, every[[1, 3, 4]])
    assert whole.completion_ids[1:2] + whole.completion_ids[3:] == part.target_ids

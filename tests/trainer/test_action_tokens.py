"""A pair of channel 3 compares actions; the student's own reasoning and prose are the context of both."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import trl
from torch.nn.functional import log_softmax
from trl.chat_template_utils import add_response_schema

from errata_trainer.assembly.action_tokens import ActionTokens
from errata_trainer.assembly.preferences import BatchPairs, Preferences
from errata_trainer.assembly.teacher_pairs import TeacherPairs, _Asked
from errata_trainer.launch import of_this_process
from errata_trainer.teachers import Action, Ask, Ballot, KeyedAction, Pair, ToolCall, Vote, message_of
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer

BLUE = Action((ToolCall("read", {"path": "blue"}),))
RED = '<tool_call>\n{"name": "read", "arguments": {"path": "red"}}\n</tool_call>'
THINKING = ["qwen3_training.jinja", "qwen3_5_think.jinja", "qwen3_6.jinja", "qwen3_8.jinja", "nemotron_3_nano.jinja"]


def speaker(template: str) -> Any:
    tokenizer = tiny_tokenizer(["<think>\n\n</think>\n\n", RED, RED.replace("red", "blue"), "maybe the red one"])
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / template).read_text()
    try:
        return add_response_schema(tokenizer)
    except ValueError:  # a training template is known by the one it was made from
        text = (Path(trl.__file__).parent / "chat_templates" / template.replace("_training", "")).read_text()
        trained, tokenizer.chat_template = tokenizer.chat_template, text
        tokenizer = add_response_schema(tokenizer)
        tokenizer.chat_template = trained
        return tokenizer


def ballot(chosen: Action = BLUE) -> Ballot:
    key = KeyedAction("blue", chosen)
    return Ballot(ask=Ask(student=None), vote=Vote((Pair(key, None),), "consensus", 2, 2), actions={"a": key, "b": key})


def pair_of(tokenizer: Any, turn: str, tmp_path: Path, chosen: Action = BLUE) -> Any:
    pairs = TeacherPairs(None, tmp_path / "pairs.jsonl")  # type: ignore[arg-type] # nobody is asked
    pairs.use(tokenizer, [tokenizer.eos_token_id], "test")
    header = tokenizer.apply_chat_template(
        [{"role": "user", "content": "go"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    made = pairs._pairs(ballot(chosen), _Asked(tuple(header), tuple(tokenizer.encode(turn))))
    pairs.close()
    return made, pairs.counts, len(header)


@pytest.mark.parametrize("template", THINKING)
@pytest.mark.parametrize("prose", ["", "I read it.\n"], ids=["", "prose"])
def test_own_reasoning_and_prose_are_the_context_of_both(template: str, prose: str, tmp_path: Path) -> None:
    tokenizer = speaker(template)
    opened = tokenizer.apply_chat_template(
        [{"role": "user", "content": "go"}], add_generation_prompt=True, tokenize=False
    ).endswith("<think>\n")
    own = ("" if opened else "<think>\n") + "maybe <tool_call> the red one\n</think>\n\n" + prose
    (pair,), _, header = pair_of(tokenizer, own + RED + END, tmp_path)
    assert tokenizer.decode(pair.context_ids[header:] + pair.rejected_ids) == own + RED + END
    for action, path in ((pair.rejected_ids, "red"), (pair.chosen_ids, "blue")):
        text = tokenizer.decode(pair.context_ids[header:] + action)
        assert text.startswith(own + "<tool_call>") and text.endswith(END) and path in text[len(own) :]
        assert "think" not in tokenizer.decode(action) and "I read" not in tokenizer.decode(action)


def test_a_turn_that_was_cut_off_in_its_reasoning_has_no_action(tmp_path: Path) -> None:
    made, counts, _ = pair_of(speaker("qwen3_training.jinja"), "<think>\nmaybe the red", tmp_path)
    assert made == [] and counts["no_action"] == 1


def test_an_answer_without_a_call_is_compared_behind_the_reasoning(tmp_path: Path) -> None:
    tokenizer = speaker("qwen3_training.jinja")
    own = "<think>\nmaybe\n</think>\n\n"
    (pair,), _, header = pair_of(tokenizer, own + "I give up" + END, tmp_path)
    assert tokenizer.decode(pair.context_ids[header:]).startswith("<think>\nmaybe\n</think>")
    assert tokenizer.decode(pair.context_ids[header:] + pair.chosen_ids).startswith(own + "<tool_call>")
    (pair,), _, header = pair_of(tokenizer, own + "Let me. " + RED + END, tmp_path, Action(text="It is done."))
    assert tokenizer.decode(pair.context_ids[header:] + pair.chosen_ids) == own + "It is done." + END


def test_a_template_that_renders_no_call_is_refused_at_construction(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer([RED])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="channel 3 cannot use this student"):
        TeacherPairs(None, tmp_path / "p.jsonl").use(tokenizer, [tokenizer.eos_token_id], "x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="does not render"):
        ActionTokens(tokenizer, [tokenizer.eos_token_id]).other(message_of(BLUE))


def logprob(model: Any, context: Any, action: Any) -> torch.Tensor:
    ids = torch.tensor([[*context, *action]])
    found = log_softmax(model(ids).logits[0, len(context) - 1 : -1].float(), -1)
    return found.gather(1, torch.tensor(action)[:, None]).sum()


Taught = tuple[Any, Any, Any, int]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    """A model that reasons first, then takes either call; its tokenizer, the pair and the length of its prompt."""
    tokenizer = speaker("qwen3_training.jinja")
    own = "<think>\n" + "maybe the red one " * 10 + "\n</think>\n\n"
    (pair,), _, header = pair_of(tokenizer, own + RED + END, tmp_path_factory.mktemp("taught"))
    model = tiny_model(tokenizer).train()
    prompt, reasoning = pair.context_ids[:header], pair.context_ids[header:]
    steps = 200
    teaching = torch.optim.Adam(model.parameters(), lr=2e-3)
    decay = torch.optim.lr_scheduler.LinearLR(teaching, 1.0, 0.01, steps)
    for _ in range(steps):
        loss = -logprob(model, prompt, reasoning + pair.rejected_ids)
        loss = (loss - 0.4 * logprob(model, prompt, reasoning + pair.chosen_ids)) / len(prompt + reasoning)
        teaching.zero_grad()
        loss.backward()
        teaching.step()
        decay.step()
    return model, tokenizer, pair, header


@pytest.mark.parametrize("rate", [1e-4, 1e-5])
def test_sixty_steps_on_one_pair_keep_the_own_reasoning_and_teach_the_call(
    taught: Taught, tmp_path: Path, rate: float
) -> None:
    model, tokenizer, pair, header = taught
    model = copy.deepcopy(model)
    prompt, reasoning = pair.context_ids[:header], pair.context_ids[header:]
    # The calls are the same up to the path: there it is decided which is made.
    same = next(n for n, (a, b) in enumerate(zip(pair.chosen_ids, pair.rejected_ids, strict=False)) if a != b)
    to_path = pair.context_ids + pair.chosen_ids[:same]

    def judged() -> dict[str, float]:
        with torch.no_grad():
            return {
                "reasoning": float(logprob(model, prompt, reasoning)),
                "call": float(logprob(model, pair.context_ids, pair.chosen_ids)),
                "path": float(logprob(model, to_path, pair.chosen_ids[same : same + 1])),
            }

    nll = TeacherPairs(None, tmp_path / "none.jsonl").nll  # type: ignore[arg-type] # nobody is asked
    channel = Preferences(0.1, nll=nll)  # as the recipe makes it, with all defaults
    (pair,) = channel.referred(model, [pair], "itself", adapter=False)
    before = judged()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)  # as GRPOConfig
    for step in range(60):
        summed, _ = channel.loss(model, BatchPairs([pair], {}), pad_id=tokenizer.pad_token_id)
        if step == 0:
            assert float(summed.detach()) == pytest.approx(math.log(2.0), abs=1e-4), "the policy is its reference"
        optimizer.zero_grad()
        summed.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    after = judged()
    assert abs(after["reasoning"] - before["reasoning"]) < 0.5
    assert after["call"] > before["call"], (before, after)
    assert after["path"] > before["path"], (before, after)


def test_the_warning_about_pairs_that_are_not_loaded_gives_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_tokenizer(["a"])
    pairs = TeacherPairs(None, tmp_path / "pairs.jsonl")  # type: ignore[arg-type]
    pairs.use(tokenizer, [tokenizer.eos_token_id], "x")
    pairs.load_files(tmp_path)
    assert "has no errata_pairs.jsonl" in caplog.text and "not open" not in caplog.text
    pairs.save_files(tmp_path)
    pairs.close()
    caplog.clear()
    pairs.load_files(tmp_path)
    assert "the buffer is not open" in caplog.text and "has no" not in caplog.text


def test_each_process_has_a_buffer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_this_process(tmp_path / "pairs.jsonl") == tmp_path / "pairs.jsonl"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    assert of_this_process(tmp_path / "pairs.jsonl") == tmp_path / "pairs.rank3.jsonl"
    tokenizer = tiny_tokenizer(["a"])
    made = []
    for rank in ("3", "4"):
        monkeypatch.setenv("RANK", rank)
        pairs = TeacherPairs(None, tmp_path / "pairs.jsonl")  # type: ignore[arg-type]
        pairs.use(tokenizer, [tokenizer.eos_token_id], "x")
        made.append(pairs)  # both are open: neither waits for the other's lock
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == ["pairs.rank3.jsonl", "pairs.rank4.jsonl"]
    for pairs in made:
        pairs.close()

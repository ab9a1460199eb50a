"""A hint's tokens stand between a conversation and its generation prompt, and change nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from errata_trainer.hints import HintRenderer, neutral

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>"]
SPECIAL += ["<|end_header_id|>", "<|eot_id|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
NAMES = (
    "qwen2_5", "qwen2_5_training", "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_5_think",
    "qwen3_5_nothink", "qwen3_6", "llama3_1", "llama3_2",
)  # fmt: skip
CALL = {"type": "function", "function": {"name": "run", "arguments": {"command": "ls"}}}
HINT = "Hint: look first.\n\nThen `act`."


def tokenizer(template: str) -> Any:
    """Return a byte-level tokenizer with the special tokens of the templates and every two bytes merged it can."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ċ", "Ċ"), ("Ġ", "a"), ("e", "r"), ("i", "n"), (">", "Ċ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|begin_of_text|>"
    )
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.add_tokens(TAGS)
    made.chat_template = template
    return made


@pytest.fixture(scope="module", params=NAMES)
def published(request: pytest.FixtureRequest) -> Any:
    return tokenizer((TEMPLATES / f"{request.param}.jinja").read_text())


def ids_of(made: Any, messages: list[dict[str, Any]]) -> list[int]:
    return list(made.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("after", ["tool", "user"])
def test_a_spliced_hint_is_what_the_template_renders(published: Any, after: Any) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "system", "content": "You act."},
        {"role": "user", "content": "List the files."},
    ]
    if after == "tool":
        for result in ("a.py\n", "no such file\n\n"):
            conversation += [
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "name": "run", "content": result},
            ]
    renderer = HintRenderer(published)
    seen = ids_of(published, conversation)
    header = list(renderer.header_ids)
    assert seen[-len(header) :] == header
    spliced = seen[: -len(header)] + list(renderer.hint_ids(HINT, after=after)) + header
    rendered = ids_of(published, [*conversation, {"role": "user", "content": HINT}])
    # A template that shows the thinking of turns behind the last user message only renders those before anew: then
    # the splice is right to keep what the student saw, and only what follows the last result can be compared.
    tail = len(spliced) if "think" not in published.chat_template else len(renderer.hint_ids(HINT)) + len(header) + 8
    assert spliced[-tail:] == rendered[-tail:]


REFUSED = {
    "cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "gemma", "gemma3", "gemma4",
    "gemma4_v3", "gemma4_v4", "gemma4_v5", "idefics3", "llava_next", "phi3", "phi3_5", "smolvlm",
}  # fmt: skip


def test_each_template_that_trl_ships_takes_a_hint_or_is_refused_with_the_reason() -> None:
    taken = set()
    for file in sorted(TEMPLATES.glob("*.jinja")):
        if file.stem.endswith("_training"):
            continue
        made = tokenizer(file.read_text())
        try:
            renderer = HintRenderer(made)
        except ValueError as error:
            assert "this chat template" in str(error)
            continue
        assert "Look." in made.decode(renderer.hint_ids("Look."))
        taken.add(file.stem)
    assert len(taken) >= 20
    assert not taken & REFUSED  # roles must alternate, no tool results, or a generation prompt of another kind


def test_the_header_is_the_generation_prompt_with_the_trainers_arguments() -> None:
    made = tokenizer((TEMPLATES / "qwen3.jinja").read_text())
    assert made.decode(HintRenderer(made).header_ids) == "<|im_start|>assistant\n"
    quiet = HintRenderer(made, enable_thinking=False)
    assert made.decode(quiet.header_ids) == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert quiet.hint_ids("a") == HintRenderer(made).hint_ids("a")
    assert made.decode(quiet.hint_ids("a")) == "<|im_start|>user\na<|im_end|>\n"


def test_another_template_than_the_tokenizers_is_taken() -> None:
    made = tokenizer("{{ raise_exception('not this one') }}")
    qwen = (TEMPLATES / "qwen2_5.jinja").read_text()
    assert HintRenderer(made, chat_template=qwen).header_ids == HintRenderer(tokenizer(qwen)).header_ids


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*SPECIAL, *TAGS, "<|", "im_end", "|>", "<", ">"]), st.text(max_size=9))))
def test_no_text_makes_a_special_token(pieces: list[str]) -> None:
    made = tokenizer((TEMPLATES / "qwen3.jinja").read_text())
    renderer = HintRenderer(made)
    text = "Hint" + "".join(pieces)
    for shown in (text, neutral(text, 200, lines=True)):
        ids = renderer.hint_ids(shown)
        special = [one for one in ids if made.convert_ids_to_tokens(one) in (*SPECIAL, *TAGS)]
        assert made.convert_ids_to_tokens(special) == ["<|im_start|>", "<|im_end|>"]


def test_an_empty_hint_is_refused() -> None:
    with pytest.raises(ValueError, match="leave it out"):
        HintRenderer(tokenizer((TEMPLATES / "qwen3.jinja").read_text())).hint_ids(" \n")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{% if m.role == 'user' and not loop.first %}{{ raise_exception('roles must"
            " alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            "roles must alternate",
        ),
        (
            "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}{% if add_generation_prompt and"
            " messages[-1].role == 'user' %}<|im_start|>assistant\n{% elif add_generation_prompt %} {% endif %}",
            "generation prompt is",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "no generation prompt"),
        (
            "{% for m in messages %}{{ m.content }}{% if not loop.last %}+{% else %}-{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}>{% endif %}",
            "renders a tool message differently",
        ),
        (
            "{% for m in messages %}{{ m.role }}e{{ m.content }}e{% endfor %}"
            "{% if add_generation_prompt %}r:{% endif %}",
            "no token boundary",
        ),
    ],
)
def test_a_template_in_which_no_hint_fits_is_refused_with_the_reason(template: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HintRenderer(tokenizer(template))

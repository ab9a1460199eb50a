"""A tiny policy of about 100,000 parameters for demonstrations, tests and ablations; nothing is downloaded.

Its tokenizer is trained on given texts, its chat template has what TRL requires (tool calls, stable prefixes, an end of
turn), and its model is a Qwen3 with random weights, so it can do nothing before it is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

__all__ = ["CHAT_TEMPLATE", "END", "PAD", "RESPONSE_TEMPLATE", "START", "tiny_model", "tiny_tokenizer"]

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|pad|>"

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ (tool.function if tool.function is defined else tool).name }} {% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content %}{{- message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- set f = call.function if call.function is defined else call %}
{{- '<tool_call>{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How TRL reads a turn back, on transformers >= 5.13."""

SCAFFOLD = (
    '<|im_start|>assistant\n<tool_call>{"name": "run", "arguments": {"command": "a"}}</tool_call><|im_end|>\n',
    "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>tool\n<|im_end|>\n",
)


def tiny_tokenizer(texts: Iterable[str], *, vocab_size: int = 1024) -> Any:
    """Return a byte-level BPE tokenizer trained on ``texts``. It can encode any text.

    Args:
        texts: Samples of what the policy will read and write. Text like them takes few tokens.
        vocab_size: Maximum number of tokens. The 256 bytes and the special tokens are always included.

    Returns:
        A `PreTrainedTokenizerFast` with chat template and response template.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [*SCAFFOLD, *texts],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, START, END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            min_frequency=1,
            show_progress=False,
        ),
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, padding_side="left")
    made.chat_template = CHAT_TEMPLATE
    made.response_template = RESPONSE_TEMPLATE
    return made


def tiny_model(tokenizer: Any, *, seed: int = 0, hidden: int = 64, layers: int = 2, positions: int = 4096) -> Any:
    """Return an untrained policy.

    Args:
        tokenizer: Tokenizer whose vocabulary size, end token and pad token the model takes.
        seed: Seed of the random weights.
        hidden: Hidden size; a multiple of 16.
        layers: Number of layers.
        positions: Most positions of a sequence.

    Returns:
        A `Qwen3ForCausalLM` in float32, in evaluation mode.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()

"""Models of other families, with random weights, small enough to run in float64."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 100
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

KINDS: dict[str, Any] = {
    "qwen3": lambda **o: Qwen3ForCausalLM(Qwen3Config(**SIZES | o)),
    "qwen3 tied": lambda **o: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"tie_word_embeddings": True} | o)),
    "gemma2": lambda **o: Gemma2ForCausalLM(
        Gemma2Config(**SIZES | {"final_logit_softcapping": 0.5, "sliding_window": 4} | o)
    ),
    "granite": lambda **o: GraniteForCausalLM(GraniteConfig(**SIZES | {"logits_scaling": 3.0} | o)),
    "cohere": lambda **o: CohereForCausalLM(CohereConfig(**SIZES | {"logit_scale": 0.3} | o)),
    "mistral": lambda **o: MistralForCausalLM(MistralConfig(**SIZES | {"sliding_window": 4} | o)),
    "gpt2": lambda **o: GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64) if not o else None
    ),
}


def toy(kind: str, **options: Any) -> Any:
    """Return a model in float64 and evaluation mode; its logits differ clearly between tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = KINDS[kind](**options).double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(6.0 if parameter.dim() == 2 else 1.0)
        return model

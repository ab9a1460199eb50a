"""The tiny model that VeRL's engine trains in tests, and what it says of tokens, slowly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from errata_trainer.tiny import tiny_model, tiny_tokenizer

TEXTS = ("Not in der.",)


def student() -> Any:
    """Return the model that the worker loads, with weights that are large enough for its answers to differ."""
    return moved(tiny_model(tiny_tokenizer(TEXTS)), 0.3, 0)


def student_path(directory: Path) -> Path:
    """Return a directory after `student` and its tokenizer were written to it."""
    tiny_tokenizer(TEXTS).save_pretrained(directory)
    student().save_pretrained(directory)
    return directory


def moved(model: Any, by: float, seed: int) -> Any:
    """Return a model after a move of its weights in a direction of their own."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for n, weight in enumerate(made.parameters()):
            weight.add_(torch.sin(torch.arange(weight.numel()) * 1.7 + n + seed).view_as(weight), alpha=by)
    return made


def with_weights(weights: dict[str, torch.Tensor]) -> Any:
    """Return a model with these weights."""
    model = student()
    model.load_state_dict(weights, strict=False)
    return model


def logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0].double().log_softmax(-1)
    return found


def action_logprob(model: Any, context: Sequence[int], action: Sequence[int]) -> torch.Tensor:
    states = logprobs(model, [*context, *action])[len(context) - 1 : -1]
    return states.gather(1, torch.tensor(action)[:, None]).sum()

"""Teaches a tiny policy the form of conversations, and caches it by a hash of everything that it was made from."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from errata_trainer.tiny import END, START, tiny_model, tiny_tokenizer

from .boxes import BOXES, CLOSING, KEYS, Boxes, lessons

VOCABULARY = 640
BATCH = 40
LEARNING_RATE = 3e-3
HEADER = f"{START}assistant\n"
_IGNORED = -100


Conversation = Sequence[tuple[str, bool]]
"""Pieces of text, each with True if the student wrote it: only these are learnt."""


def conversations(family: Boxes, seed: int) -> Iterator[Conversation]:
    """Yield the family's lessons as text."""
    for lesson in lessons(family, seed):
        context = opening(lesson.messages)
        call = json.dumps({"name": "run", "arguments": {"command": lesson.command}})
        yield [
            (context + HEADER, False),
            (f"<tool_call>{call}</tool_call>{END}", True),
            (f"\n{START}tool\n{lesson.result}{END}\n{HEADER}", False),
            (f"{CLOSING}{END}", True),
        ]


def opening(messages: Iterable[Mapping[str, str]]) -> str:
    """Return the text before the student's first turn."""
    context = f"{START}system\nrun {END}\n"
    for message in messages:
        context += f"{START}{message['role']}\n{message['content']}{END}\n"
    return context


def tokenizer_of(family: Boxes) -> Any:
    """Return the family's tokenizer."""
    return tokenizer_for(conversations(family, 0), (*KEYS, *BOXES))


def tokenizer_for(stream: Iterator[Conversation], words: Iterable[str]) -> Any:
    """Return a tokenizer for conversations, in which each of the words is one token."""
    texts = ["".join(text for text, _ in one) for one in islice(stream, 400)]
    spaced = [f" {word}" for word in words]
    return tiny_tokenizer([*texts, *(f"{word} " * 40 for word in spaced)], vocab_size=VOCABULARY)


def taught(
    stream: Callable[[], Iterator[Conversation]],
    tokenizer: Any,
    directory: Path,
    *,
    steps: int,
    seed: int = 0,
    batch: int = BATCH,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Return the directory of a policy that was trained on the conversations.

    Args:
        stream: Starts the endless conversations.
        tokenizer: Tokenizer of the policy.
        directory: Directory for policies; one that exists already is not trained again.
        steps: Training steps.
        seed: Seed of the weights.
        batch: Conversations of a step.
        say: Called with each line of progress.
    """
    texts = ["".join(text for text, _ in one) for one in islice(stream(), 200)]
    made_of = [
        *texts, json.dumps(tokenizer.get_vocab(), sort_keys=True), inspect.getsource(tiny_model),
        torch.__version__, repr((steps, seed, batch, LEARNING_RATE)),
    ]  # fmt: skip
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:16]
    kept = directory / f"policy-{name}"
    if (kept / "config.json").exists():
        say(f"warm-up: kept from before, {kept}")
        return kept
    model = tiny_model(tokenizer, seed=seed, positions=1024).train()
    with torch.no_grad():  # with Qwen3's own small initial weights, two layers take thousands of steps to learn to copy
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.mul_(3.0 if "embed" in name else 5.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    lessons_of = stream()
    for step in range(steps):
        ids, labels, mask = _batch(tokenizer, list(islice(lessons_of, batch)))
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            say(f"warm-up: step {step + 1}/{steps}, loss {float(loss.detach()):.3f}")
    part = directory / f"{kept.name}.part"
    model.eval().save_pretrained(part)
    part.rename(kept)
    return kept


def _batch(tokenizer: Any, chosen: Sequence[Conversation]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids, labels and mask, each ``[B, T]`` int64, padded on the right."""
    rows, labels = [], []
    for conversation in chosen:
        row: list[int] = []
        label: list[int] = []
        for text, learnt in conversation:
            ids = tokenizer.encode(text, add_special_tokens=False)
            row += ids
            label += ids if learnt else [_IGNORED] * len(ids)
        rows.append(row)
        labels.append(label)
    width = max(map(len, rows))
    padded = [row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]
    return (
        torch.tensor(padded),
        torch.tensor([label + [_IGNORED] * (width - len(label)) for label in labels]),
        torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
    )

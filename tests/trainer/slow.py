"""The channels once more, slowly: whole forward passes, no cache, no chunks, Python loops, none of their code."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch


def _logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    was = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    model.train(was)
    return torch.log_softmax(logits, -1)


def _row_ids(inputs: Any, row: int) -> list[int]:
    prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
    return [*prompt, *inputs["completion_ids"][row][inputs["completion_mask"][row].bool()].tolist()]


def slow_sdpo(
    model: Any, inputs: Any, tokenizer: Any, *, jsd_beta: float, clip: float, teacher: Any | None = None
) -> float:
    """Return the sum of a micro-batch's divergences, token by token and id by id. Without ``teacher`` the model is its
    own."""
    teaching = model if teacher is None else teacher
    total = 0.0
    for row, items in enumerate(inputs["sdpo_items"]):
        student = _logprobs(model, _row_ids(inputs, row)) if items else None
        ids = _row_ids(inputs, row)
        for item in items:
            hinted = _logprobs(teaching, list(item.teacher_ids))
            begin = len(item.teacher_ids) - len(item.target_ids)
            # Where the student said it: after as many assistant headers as the item's turn counts.
            header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
            starts = [i + len(header) for i in range(len(ids)) if ids[i : i + len(header)] == header]
            at = starts[item.turn]
            assert student is not None
            for n in range(len(item.target_ids)):
                assert ids[at + n] == item.target_ids[n] == item.teacher_ids[begin + n]
                s, t = student[at + n - 1], hinted[begin + n - 1]
                for logp, logq in zip(s.tolist(), t.tolist(), strict=True):
                    p, q = math.exp(logp), math.exp(logq)
                    m = math.log((1 - jsd_beta) * p + jsd_beta * q)
                    total += min(clip, jsd_beta * q * (logq - m) + (1 - jsd_beta) * p * (logp - m))
    return total


def slow_dpo(model: Any, inputs: Any, *, beta_dpo: float, reference: Any | None = None) -> float:
    """Return the weighted sum of pair losses; by default the reference is the base below an adapter, or the policy."""
    whose = model if reference is None else reference
    total = 0.0
    for items in inputs["dpo_pairs"]:
        for pair in items:
            ratios = []
            for action in (pair.chosen_ids, pair.rejected_ids):
                ids = [*pair.context_ids, *action]
                policy = _logprobs(model, ids)
                with whose.disable_adapter() if hasattr(whose, "disable_adapter") else contextlib.nullcontext():
                    frozen = _logprobs(whose, ids)
                ratio = 0.0
                for n, id in enumerate(action):
                    where = len(pair.context_ids) + n - 1
                    ratio += float(policy[where, id] - frozen[where, id])
                ratios.append(ratio)
            total += pair.weight * -math.log(1 / (1 + math.exp(-beta_dpo * (ratios[0] - ratios[1]))))
    return total

"""TEST ONLY: a rollout server that samples from the model, in batches of the requests that wait, on a CPU.

``VERL_USE_EXTERNAL_MODULES=tests.verl.sampling_plugin`` loads it with all of `cpu_plugin`, and
``rollout.name=sampling`` chooses it. Its draws depend on the seed (``rollout.seed``), the prompt and how often the
prompt was asked before, not on what else is in the batch.
"""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from .cpu_plugin import ScriptedAdapter, ScriptedReplica, ScriptedServer

GATHER_S = 0.02
"""Time from a first request to the batch, in which others come."""
BATCHES = "batches.jsonl"
"""File beside the model: rows, tokens and seconds of each batch."""


@dataclass(slots=True)
class Turn:
    """A turn that is sampled.

    Args:
        prompt: Tokens before it.
        draws: A number in [0, 1) for each token that it may have.
        temperature: Temperature of sampling; 0 is greedy.
        ends: Tokens after which it ends.

    Attributes:
        ids: Tokens that were sampled so far.
        logprobs: Log-probability of each of ``ids`` at the temperature.
    """

    prompt: Sequence[int]
    draws: Sequence[float]
    temperature: float
    ends: frozenset[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether no token is to follow."""
        return len(self.ids) == len(self.draws) or not self.ends.isdisjoint(self.ids[-1:])


@torch.inference_mode()
def sample(model: Any, turns: Sequence[Turn]) -> None:
    """Sample turns to their ends, all in one batch with a cache; prompts are padded on the left.

    Args:
        model: The policy.
        turns: The turns, none of them begun.
    """
    width = max(len(turn.prompt) for turn in turns)
    ids = torch.tensor([[0] * (width - len(turn.prompt)) + list(turn.prompt) for turn in turns])
    mask = torch.tensor([[0] * (width - len(turn.prompt)) + [1] * len(turn.prompt) for turn in turns])
    temperatures = torch.tensor([max(turn.temperature, 1e-6) for turn in turns])[:, None]
    cache = DynamicCache()
    while not all(turn.is_whole for turn in turns):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits[:, -1]
        logprobs = (logits.float() / temperatures).log_softmax(-1)
        draws = torch.tensor([[0.0 if turn.is_whole else turn.draws[len(turn.ids)]] for turn in turns])
        ids = torch.searchsorted(logprobs.exp().cumsum(-1), draws, right=True).clamp(max=logprobs.shape[1] - 1)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        for turn, (token,), (logprob,) in zip(turns, ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True):
            if not turn.is_whole:
                turn.ids.append(token)
                turn.logprobs.append(logprob)


class SamplingServer(ScriptedServer):
    """A server whose turns are sampled, those that are asked for at the same time in one batch."""

    def __init__(self, path: str, rank: int = 0, seed: int = 0) -> None:
        super().__init__(path, rank, seed)
        self._times: Counter[tuple[int, ...]] = Counter()
        self._waiting: list[tuple[Turn, asyncio.Future[None]]] = []
        self._log = Path(path) / BATCHES

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        if sampling_params.get("prompt_logprobs") is not None:
            return self.scored(prompt_ids)
        turn = self._turn(prompt_ids, sampling_params)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_later(GATHER_S, self._play)
        self._waiting.append((turn, loop.create_future()))
        await self._waiting[-1][1]
        return TokenOutput(
            token_ids=turn.ids,
            log_probs=turn.logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": self.steps},
        )

    def _turn(self, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Turn:
        for name, none in (("top_p", 1.0), ("top_k", -1)):
            if sampling_params.get(name, none) != none:
                raise ValueError(f"{name} is {sampling_params[name]}: this server samples from all tokens")
        prompt = tuple(prompt_ids)
        self._times[prompt] += 1
        seed = zlib.crc32(repr((self.seed, self._times[prompt], prompt)).encode())
        draws = torch.rand(sampling_params["max_tokens"], generator=torch.Generator().manual_seed(seed)).tolist()
        ends = {self.tokenizer.eos_token_id, *sampling_params.get("stop_token_ids", ())}
        return Turn(prompt, draws, float(sampling_params["temperature"]), frozenset(ends))

    def _play(self) -> None:
        """Sample what waits. What is asked for meanwhile is in the next batch."""
        waiting, self._waiting = self._waiting, []
        began = time.monotonic()
        turns = [turn for turn, _ in waiting]
        sample(self.model, turns)
        batch = {"rows": len(turns), "tokens": sum(len(turn.ids) for turn in turns), "s": time.monotonic() - began}
        with self._log.open("a") as log:
            log.write(json.dumps(batch) + "\n")
        for _, sampled in waiting:
            sampled.set_result(None)


class SamplingReplica(ScriptedReplica):
    server = SamplingServer


RolloutReplicaRegistry.register("sampling", lambda: SamplingReplica)
rollout_base._ROLLOUT_REGISTRY["sampling", "async"] = f"{ScriptedAdapter.__module__}.{ScriptedAdapter.__name__}"

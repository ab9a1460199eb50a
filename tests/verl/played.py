"""Rollouts of the agent loop with a scripted generator, without VeRL's processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from errata_trainer.recipes.verl import ErrataAgentLoop
from errata_trainer.tiny import END, tiny_tokenizer

PROMPT = [{"role": "user", "content": "Find the word.\n"}]
TOKENIZER = tiny_tokenizer(["One of red, green, blue holds a word. Submit it."])


def step(**arguments: Any) -> str:
    """Return a turn that acts on the shelf, which a server that nobody knows offers as one tool."""
    return "<tool_call>" + json.dumps({"name": "step", "arguments": arguments}) + "</tool_call>"


class Generator:
    """In the place of VeRL's client of rollout servers.

    Args:
        says: From the number of the turn to what is said; the end of the turn is added.
        encode: How it is encoded; sampled tokens need not be those that a tokenizer makes of their text.
    """

    def __init__(self, says: Callable[[int], str], encode: Callable[[str], list[int]] | None = None) -> None:
        self._says = says
        self._encode = encode or (lambda text: TOKENIZER.encode(text, add_special_tokens=False))
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []
        self.said: list[list[int]] = []
        self.stop_reason = "completed"

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        turn = len(self.asked)
        self.asked.append((request_id, prompt_ids, sampling_params))
        ids = self._encode(self._says(turn) + END)[: sampling_params.get("max_tokens")]
        self.said.append(ids)
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.25 - turn] * len(ids),
            stop_reason=self.stop_reason,
            extra_fields={"global_steps": 7 + turn, "min_global_steps": 7 + turn, "max_global_steps": 7 + turn},
        )


def agent_loop(url: str, generator: Generator, *, prompt: int = 512, response: int = 512, **options: Any) -> Any:
    config = OmegaConf.create(
        {
            "errata": {"url": url, "env": "shelf", **options},
            "actor_rollout_ref": {
                "rollout": {"prompt_length": prompt, "response_length": response, "multi_turn": {"format": "hermes"}}
            },
            "data": {},
        }
    )
    return ErrataAgentLoop(
        trainer_config=DictConfigWrap(config),
        server_manager=generator,
        tokenizer=TOKENIZER,
        processor=None,
        dataset_cls=RLHFDataset,
        data_config=DictConfigWrap(config.data),
        hf_model_type="qwen3",
    )


def play(url: str, generator: Generator, task: dict[str, Any] | None = None, **options: Any) -> AgentLoopOutput:
    async def run() -> AgentLoopOutput:
        row = {"raw_prompt": PROMPT, "task": json.dumps(task or {}), "uid": "u", "session_id": 0}
        return await agent_loop(url, generator, **options).run({"temperature": 1.0}, **row)

    return asyncio.run(run())

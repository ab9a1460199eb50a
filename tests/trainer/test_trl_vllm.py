"""vLLM as TRL has it, in colocate mode, with a stand-in that keeps to the interface of TRL's generation class."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from scripted import Scripted, call, config
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from errata_server.process import ServerProcess
from errata_trainer import DpoPair
from errata_trainer.assembly.counterfactual import CounterfactualCheck
from errata_trainer.assembly.pair_source import PairSource
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.trl import ChannelSettings, ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer
from tests.environments.shelf import SPEC

pytestmark = pytest.mark.training

SCRIPT = [
    [call("read", path="red"), call("read", path="green"), call("submit", word="owl"), "done"],
    [call("submit", word="owl"), "done"],
]


class Speaker(Scripted):
    def __init__(self, tokenizer: Any) -> None:
        self.processing_class = tokenizer
        self.script = lambda row, turn: SCRIPT[row % 2][turn]


class StandIn:
    """Takes what `VLLMGeneration` takes, and says what a script says; some log-probabilities are unknown."""

    made: list[StandIn] = []  # noqa: RUF012 # one list for all

    def __init__(self, **given: Any) -> None:
        inspect.signature(VLLMGeneration.__init__).bind(self, **given)
        self.tokenizer, self.longest = given["processing_class"], given["max_model_length"]
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=1000)))
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )
        self.speaker = Speaker(self.tokenizer)
        self.sampling = False
        self.synced = 0
        self.asked: list[list[list[int]]] = []
        StandIn.made.append(self)

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        assert images is None and all(isinstance(token, int) for prompt in prompts for token in prompt)
        self.asked.append(prompts)
        if self.sampling:
            ids = [self.tokenizer.encode(call("read", path="red") + END) for _ in prompts]
        else:
            ids, _ = self.speaker._generate_single_turn(prompts)
        logprobs: list[list[list[float | None]]] = [[[-0.5] for _ in row] for row in ids]
        logprobs[0][0] = [None]  # what TRL makes of a NaN of vLLM
        return prompts, ids, logprobs, [[[token] for token in row] for row in ids]


class Trainer(ThreeChannelGRPOTrainer):  # type: ignore[misc]
    def _sample(self, contexts: Any) -> Any:
        self.vllm_generation.sampling = True
        try:
            return super()._sample(contexts)
        finally:
            self.vllm_generation.sampling = False

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.inputs = inputs
        return super().compute_loss(model, inputs, *args, **kwargs)


class Pairs(PairSource):
    needs_logprobs = True  # which only vLLM gives

    def use(self, tokenizer: Any, end_ids: Any, reference: str, **template: Any) -> None:
        self.chosen = tuple(tokenizer.encode(call("read", path="red") + END))

    def observe(self, rollouts: Any, runners: Any, transcripts: Any) -> None:
        self.rollouts = list(rollouts)

    def sample(self, count: int, referred: Any) -> list[DpoPair]:
        found = []
        for rollout in self.rollouts:
            for turn in rollout.turns[:2]:
                own = rollout.completion_ids[turn.start : turn.stop]
                if own != self.chosen:
                    context = rollout.prompt_ids + rollout.completion_ids[: turn.start]
                    found.append(DpoPair(context, self.chosen, own))
        return referred(found[:count])


def made(server: ServerProcess, path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", StandIn)
    tokenizer = tiny_tokenizer([call("read", path="green"), "the word is owl no file"])
    own = {name: changes.pop(name) for name in ("settings", "check", "pairs") if name in changes}
    rows = [{"prompt": [{"role": "user", "content": "Find it. "}], "place": "red", "word": "owl"}] * 4
    return Trainer(
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        args=config(path, use_vllm=True, max_steps=2, **{"vllm_mode": "colocate", **changes}),
        train_dataset=Dataset.from_list(rows),
        environment_factory=environment_factory(server.url, of_spec(SPEC)),
        alpha_sdpo=1.0,
        beta_replay=0.5,
        **own,
    )


def test_a_step_with_sites_check_and_pairs_runs_on_vllms_interface(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs, check = Pairs(), CounterfactualCheck("always")
    trainer = made(server, tmp_path, monkeypatch, pairs=pairs, check=check)
    trainer.train()
    engine = trainer.vllm_generation
    assert engine.synced == 2, "the weights are given to vLLM once for each step"
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2
    for log in logs:
        assert log["sdpo/kept"] == 2.0 and log["dpo/pairs"] > 0.0 and log["counterfactual/accepted"] == 1.0
        total = log["loss/grpo"] + log["loss/sdpo_kl"] + 0.5 * log["loss/trace_replay_dpo"]
        assert log["loss"] == pytest.approx(total, abs=1e-4) and math.isfinite(log["loss"])
    hinted = [prompts for prompts in engine.asked if len(prompts) == 2 and len(prompts[0]) > 60]
    assert hinted, "the student takes its failing turns again, behind contexts of exact tokens"
    # A log-probability that vLLM does not know leaves the rollout without any; the others have theirs.
    known = [rollout.logprobs is not None for rollout in pairs.rollouts]
    assert known.count(False) == 1 and known.count(True) == 3
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_no_context_is_longer_than_vllm_takes(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(server, tmp_path, monkeypatch, check=CounterfactualCheck("always"))
    engine = trainer.vllm_generation
    engine.llm.llm_engine.model_config.max_model_len = 50
    assert trainer._sample([[5] * 20, [5] * 50]) == [[("read", {"path": "red"})], None]
    assert max(map(len, engine.asked[-1])) < 50


def test_server_mode_with_several_processes_is_refused_with_the_reason(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(server, tmp_path, monkeypatch, vllm_mode="server", check=CounterfactualCheck("always"))  # one is fine
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda self: 2))
    with pytest.raises(ValueError, match="mixes up the answers of several processes"):
        made(server, tmp_path, monkeypatch, vllm_mode="server", check=CounterfactualCheck("always"))
    made(server, tmp_path, monkeypatch, check=CounterfactualCheck("always"))
    made(server, tmp_path, monkeypatch, vllm_mode="server", settings=ChannelSettings())

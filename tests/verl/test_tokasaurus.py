"""A Tokasaurus server as a rollout engine of VeRL 0.9.1: registry, contract of a replica, translated settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import TokenOutput, get_rollout_replica_class

from errata_protocol.errors import InvalidRequest, ServiceError
from errata_trainer.recipes.cartridge import cartridge_model, cartridge_of, write_cartridge
from errata_trainer.recipes.cartridge.replica import ServerAdapter, TokasaurusReplica, TokasaurusServer, translated
from tests.recipes.example_modules import example

from .cpu_run import Cluster

Tokasaurus: Any = example("tokasaurus_contract").Tokasaurus

DOCUMENT = list(range(2, 34))


def model() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = Qwen3Config(vocab_size=64, num_key_value_heads=1, head_dim=8, eos_token_id=1, pad_token_id=0, **sizes)
        return Qwen3ForCausalLM(config).float().eval()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Tokasaurus]:
    with Tokasaurus(model(), tmp_path) as made:
        yield made


def replica(url: Any, rank: int = 0, **custom: Any) -> TokasaurusReplica:
    config = RolloutConfig(name="tokasaurus", response_length=2, custom={"url": url, **custom})
    return TokasaurusReplica(rank, config, SimpleNamespace(path=""), gpus_per_node=1)


def test_verl_finds_the_engine_by_its_name() -> None:
    assert get_rollout_replica_class("tokasaurus") is TokasaurusReplica
    assert get_rollout_class("tokasaurus") is ServerAdapter


async def test_a_completion_has_tokens_and_their_logprobs(server: Tokasaurus, tmp_path: Path) -> None:
    write_cartridge(tmp_path, "one", cartridge_of(cartridge_model(model(), DOCUMENT, tokens=16)))
    asked = {"temperature": 0.0, "max_tokens": 4, "logprobs": True, "top_p": 1.0, "top_k": -1, "ignore_eos": True}
    plain, engine = TokasaurusServer(server.url), TokasaurusServer(server.url, "one")
    without = await plain.generate([5, 9, 17], asked, "request-1")
    found = await engine.generate([5, 9, 17], asked, "request-2")
    assert isinstance(found, TokenOutput) and found.stop_reason == "completed"
    assert found.log_probs is not None and len(found.token_ids) == len(found.log_probs) == 4
    assert found.log_probs != without.log_probs
    await plain.use_cartridge("one")
    assert await plain.generate([5, 9, 17], asked) == found
    assert [len(one.cartridges or []) for one in server.asked] == [0, 1, 1]


async def test_a_replica_launches_an_actor_with_all_that_verl_calls(cluster: Cluster, server: Tokasaurus) -> None:
    made = replica([server.url])
    await made.launch_servers()
    assert made.server_address == server.url and made.servers == [made.server_handle]
    answer = await made.server_handle.generate.remote(
        prompt_ids=[5, 9], sampling_params={"ignore_eos": True}, request_id="r"
    )
    assert len(answer.token_ids) == 2
    for call in ("wake_up", "sleep", "abort_all_requests", "resume_generation", "clear_kv_cache"):
        await getattr(made, call)()
    for call in ("release_kv_cache", "resume_kv_cache", "start_profile", "stop_profile"):
        await getattr(made, call)()
    ray.kill(made.server_handle)


async def test_a_replica_without_a_server_is_refused(server: Tokasaurus) -> None:
    for wrong in (replica(None), replica(server.url, rank=1)):
        with pytest.raises(InvalidRequest, match="has no Tokasaurus server: give one URL for each replica"):
            await wrong.launch_servers()


async def test_failures_are_errors_and_no_tokens(server: Tokasaurus) -> None:
    with pytest.raises(ServiceError, match="no answer from Tokasaurus"):
        TokasaurusServer("http://127.0.0.1:9")
    engine = TokasaurusServer(server.url, "unknown")
    with pytest.raises(InvalidRequest, match="does not know the cartridge"):
        await engine.generate([5], {"max_tokens": 1})
    with pytest.raises(InvalidRequest, match="no images"):
        await engine.generate([5], {"max_tokens": 1}, image_data=[1])
    server.status = 503
    with pytest.raises(ServiceError, match="status 503"):
        await TokasaurusServer(server.url).generate([5], {"max_tokens": 1})


def test_settings_are_translated_or_refused() -> None:
    assert translated({"max_new_tokens": 7, "temperature": 0.5}) == {
        "max_tokens": 7,
        "temperature": 0.5,
        "ignore_eos": False,
    }
    assert translated({"temperature": 0}, longest=5)["max_tokens"] == 5
    assert translated({"max_tokens": 9}, longest=5)["max_tokens"] == 5
    assert translated({"max_tokens": 3}, longest=5)["max_tokens"] == 3
    for wrong, words in (
        ({"max_tokens": 1, "top_p": 0.9}, "no top_p: set it to 1.0"),
        ({"max_tokens": 1, "top_k": 50}, "no top_k: set it to -1"),
        ({"max_tokens": 1, "repetition_penalty": 1.1}, "no repetition_penalty"),
        ({"max_tokens": 1, "stop_token_ids": [3]}, "no setting stop_token_ids"),
        ({"max_tokens": 1, "prompt_logprobs": 0}, "no setting prompt_logprobs"),
        ({"max_tokens": 1, "n": 2}, "one completion"),
        ({}, "needs max_tokens"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            translated(wrong)


async def test_weights_are_taken_and_left() -> None:
    adapter = ServerAdapter.__new__(ServerAdapter)
    seen = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("a", "b"):
            seen.append(name)
            yield name, torch.zeros(1)

    await adapter.update_weights(weights())
    await adapter.resume(["weights"])
    await adapter.release()
    assert seen == ["a", "b"]

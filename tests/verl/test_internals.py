"""Names of VeRL that our recipe uses and VeRL does not document: each is where it is looked for.

A failure after an upgrade names the module of ours to adapt.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopMetrics,
    AgentLoopOutput,
)
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.core_algos import agg_loss
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer
from verl.utils import model as model_module
from verl.utils import tensordict_utils as tensordict_module
from verl.utils.tokenizer.continuous_token import MergeResult
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.config import FSDPEngineConfig, HFModelConfig
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import TokenOutput

RECIPE = "errata_trainer.recipes.verl"
AGENT_LOOP = f"{RECIPE}.agent_loop"
LOSS, ACTOR = f"{RECIPE}.loss", f"{RECIPE}.actor"
WORKER = AgentLoopWorkerTQ.__ray_metadata__.modified_class
BUFFERS = (ReplayBuffer, ReplayBufferAsync)


@pytest.mark.parametrize(
    ("where", "names", "module"),
    [
        (
            AgentLoopBase,
            "ct_build_initial_tokens ct_merge_assistant_token ct_merge_context_msg _cap_text_prompt_length",
            "agent_loop",
        ),
        (ToolParser, "get_tool_parser extract_tool_calls stop_token_ids", "tool_calls"),
        (MergeResult, "token_ids removed_prefix_token_count", "agent_loop"),
        (TokenOutput, "token_ids log_probs stop_reason extra_fields", "agent_loop"),
        (AgentLoopMetrics, "generate_sequences tool_calls", "agent_loop"),
        (
            AgentLoopOutput,
            "prompt_ids response_ids response_mask response_logprobs reward_score num_turns metrics extra_fields",
            "agent_loop",
        ),
        (
            PPOTrainer,
            "_init_resource_pool_mgr _load_checkpoint _save_checkpoint on_init_end _build_replay_buffer "
            "_add_batch_to_generate _compute_advantage _update_actor step _consume_sync_metrics",
            "trainer",
        ),
        (TaskRunnerV1.__ray_metadata__.modified_class, "run", "task_runner"),
        (WORKER, "_run_agent_loop _run_prompt generate_sequences", "workers"),
        (AgentLoopManagerTQ, "_init_agent_loop_workers generate_sequences", "workers"),
        *(
            (of, "sample _wait_for_next_poll _sync_metadata_from_transfer_queue _clear_groups", "sampling")
            for of in BUFFERS
        ),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_an_internal_is_where_it_was(where: type, names: str, module: str) -> None:
    known = {*dir(where), *getattr(where, "__annotations__", {})}
    for name in names.split():
        assert name in known, f"{where.__name__} has no {name}: {RECIPE}.{module} needs it"


def test_rollout_classes_are_registered_by_mode() -> None:
    assert rollout_base._ROLLOUT_REGISTRY["vllm", "async"].endswith("ServerAdapter")


def test_an_agent_loop_has_the_attributes_that_ours_reads() -> None:
    made = inspect.getsource(AgentLoopBase.__init__)
    for name in ("config", "rollout_config", "server_manager", "tokenizer", "loop"):
        assert f"self.{name} = " in made, f"AgentLoopBase sets no {name}: {AGENT_LOOP} reads it"


def test_the_prompts_own_cap_is_called_by_the_method_that_builds_it() -> None:
    """Ours takes its place; under another name a prompt that is too long would be cut again."""
    assert "self._cap_text_prompt_length(" in inspect.getsource(AgentLoopBase.ct_build_initial_tokens)


def test_a_trainer_has_the_attributes_that_ours_reads() -> None:
    assert {"sync", "colocate_async", "separate_async"} <= set(TRAINER_REGISTRY)
    made = inspect.getsource(PPOTrainer)
    for name in (
        "actor_rollout_wg",
        "replay_buffer",
        "role_worker_mapping",
        "llm_server_manager",
        "agent_loop_manager",
    ):
        assert f"self.{name}" in made, f"PPOTrainer has no {name}: {RECIPE}.trainer reads it"


@pytest.mark.parametrize(
    ("where", "names", "ours"),
    [
        (
            FSDPEngineWithLMHead,
            "forward_backward_batch forward_step optimizer_step eval_mode get_data_parallel_size "
            "get_data_parallel_group",
            LOSS,
        ),
        (tensordict_module, "get get_non_tensor_data", LOSS),
        (ActorRolloutRefWorker, "actor_worker_cls init_model", ACTOR),
        (TrainingWorker, "train_mini_batch train_batch set_loss_fn reset", ACTOR),
        (
            FSDPEngineConfig,
            "strategy ulysses_sequence_parallel_size use_fused_kernels offload_policy model_dtype",
            ACTOR,
        ),
        (
            HFModelConfig,
            "hf_config local_path trust_remote_code tokenizer lora_rank use_fused_kernels enable_activation_offload",
            ACTOR,
        ),
        (model_module, "get_hf_auto_model_class", ACTOR),
        (PrecisionType, "to_dtype", ACTOR),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_an_internal_of_the_actor_is_where_it_was(where: Any, names: str, ours: str) -> None:
    known = {*dir(where), *getattr(where, "__annotations__", {}), *getattr(where, "__dataclass_fields__", {})}
    for name in names.split():
        assert name in known, f"{where.__name__} has no {name}: {ours} needs it"


def test_a_trainer_apart_from_its_rollout_servers_has_workers_of_its_own() -> None:
    made = inspect.getsource(TRAINER_REGISTRY["separate_async"])
    assert "self.standalone_server_manager: LLMServerManager = " in made, f"{RECIPE}.trainer scores there"
    for role in ("Actor", "ActorRollout", "ActorRolloutRef"):
        assert f"self.role_worker_mapping[Role.{role}] = ray.remote(DetachActorWorker)" in made
    assert issubclass(DetachActorWorker, ActorRolloutRefWorker), f"{ACTOR} puts the losses before it"


def test_an_engine_calls_the_methods_that_ours_wraps() -> None:
    """They are wrapped on the instance, so the engine has to look them up there."""
    trained = inspect.getsource(BaseEngine.train_batch)
    assert "self.forward_backward_batch(" in trained and "self.optimizer_step()" in trained
    assert "self.forward_step(micro_batch, loss_function=" in inspect.getsource(FSDPEngine.forward_backward_batch)
    step = inspect.getsource(FSDPEngineWithLMHead.forward_step)
    assert step.index("self.module(") < step.index("loss_function(\n"), "the states are captured before the loss"
    for name in ("forward_backward_batch", "forward_step"):
        taken = [*inspect.signature(getattr(FSDPEngineWithLMHead, name)).parameters]
        assert taken[2:] == ["loss_function", "forward_only"], f"FSDPEngine.{name} takes {taken}: {LOSS} hands them on"


def test_an_engine_has_the_attributes_that_ours_reads() -> None:
    assert "self.module = module" in inspect.getsource(FSDPEngine)
    assert "self._autocast_dtype = param_dtype" in inspect.getsource(FSDPEngine._build_fsdp_module)
    made = inspect.getsource(TrainingWorker.__init__)
    for name in ("engine", "engine_config", "model_config"):
        assert f"self.{name}" in made, f"TrainingWorker sets no {name}: {ACTOR} reads it"
    assert "self.distillation_enabled = " in inspect.getsource(ActorRolloutRefWorker.__init__)


def test_an_engine_adds_micro_batches_up_and_averages_ranks() -> None:
    """`compose` counts on it."""
    passes = inspect.getsource(FSDPEngine.forward_backward_batch)
    assert "loss.backward()" in passes and "loss /" not in passes
    assert "dp_size" in inspect.getsource(agg_loss)


def test_a_worker_is_begun_as_ours_begins_one_in_its_place() -> None:
    begun = inspect.getsource(AgentLoopManager._init_agent_loop_workers)
    given = "self.config,self.llm_client,self.teacher_client,self.reward_loop_worker_handles,"
    assert f".remote({given})" in "".join(begun.split()), f"{RECIPE}.workers gives a new worker other arguments"
    for part in (
        'node["Alive"] and node["Resources"].get("CPU", 0) > 0',
        "node_ids[i % len(node_ids)]",
        'name=f"agent_loop_worker_{i}"',
        "soft=True",
        "self.agent_loop_workers_class.options(",
        "self.agent_loop_workers.append(",
    ):
        assert part in begun, f"VeRL begins a worker without {part!r}: {RECIPE}.workers begins one with it"


def test_prompts_are_sent_as_ours_are() -> None:
    sent = inspect.getsource(AgentLoopManagerTQ.generate_sequences)
    assert "prompts.chunk(len(self.agent_loop_workers))" in sent and "strict=False" in sent
    played = inspect.getsource(WORKER._run_prompt)
    assert 'prompt.pop("__rollout_n__", config.n if not trajectory["validate"] else config.val_kwargs.n)' in played
    assert '"train" if not trajectory["validate"] else "val"' in played
    assert "self._run_agent_loop(" in played and "trajectory=trajectory" in played


def test_a_prompt_fails_by_its_tag_and_a_rollout_has_one_when_it_is_whole() -> None:
    """A tag that is put is added to those that a key has: `is_prompt` stays."""
    assert 'async_kv_put(key=uid, partition_id=partition_id, tag={"status": "failure"})' in inspect.getsource(
        WORKER._run_prompt
    )
    put = inspect.getsource(WORKER._agent_loop_postprocess)
    assert '"status": "success"' in put and 'f"{uid}_{session_id}_{i}"' in put


def test_a_buffer_calls_the_methods_that_ours_take_the_place_of() -> None:
    made = inspect.getsource(ReplayBuffer.__init__)
    for name in ("partitions", "pending_keys", "running_keys", "finished_keys", "failure_keys"):
        assert f"self.{name}: " in made, f"ReplayBuffer sets no {name}: {RECIPE}.sampling reads it"
    for loop in (ReplayBuffer.sample, ReplayBufferAsync.wait_for_sampleable):
        for called in ("_wait_for_next_poll(partition_id, last_debug_time)", "_sync_metadata_from_transfer_queue()"):
            assert f"self.{called}" in inspect.getsource(loop), f"{RECIPE}.sampling needs the call of {called}"
    assert "raise RuntimeError(message)" in inspect.getsource(ReplayBuffer.sample)


def test_a_dead_actor_has_an_error_of_its_own() -> None:
    assert issubclass(ActorDiedError, RayActorError) and issubclass(ActorUnavailableError, RayActorError)
    assert not issubclass(ActorDiedError, ActorUnavailableError)

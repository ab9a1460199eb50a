"""TEST ONLY: lets VeRL 0.9.1's own V1 trainer run on a machine without a GPU, with a generator that follows a script.

``VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_plugin`` and ``VERL_PLATFORM=cpu`` load it into each of VeRL's processes. It
uses VeRL's registries, and changes two things beside them (CHANGED). What it says nothing about: vLLM, SGLang, several
GPUs, speed.

    platform   "cpu": device cpu, gloo; the Ray resource GPU is a logical one
    engine     VeRL's FSDPEngineWithLMHead, registered for the device cpu
    rollout    "scripted": an actor that says what `scripts.said` says, with the model's own log-probabilities
    weights    "file": from trainer to rollout servers that are apart from it
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import types
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

from .scripts import ORPHAN, said


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: a CPU has no such thing."""


DEVICE = types.ModuleType("cpu_device")
DEVICE.__dict__.update(
    dict.fromkeys(
        (
            "empty_cache",
            "ipc_collect",
            "synchronize",
            "set_device",
            "manual_seed",
            "manual_seed_all",
            "reset_peak_memory_stats",
            "current_stream",
        ),
        _nothing,
    ),
    is_available=lambda: True,
    current_device=lambda: torch.device("cpu"),
    device_count=lambda: 1,
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    mem_get_info=lambda *_: (1 << 33, 1 << 34),
    get_device_name=lambda *_: "cpu",
    Event=torch.Event,
    Stream=torch.Stream,
    device=lambda *_: contextlib.nullcontext(),
    is_bf16_supported=lambda: True,
)
"""What VeRL calls on its device's module, and torch.cpu does not have."""


@platform_manager.PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name, vendor_name, device_module = "cpu", "cpu", DEVICE

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def get_device_capability(self, *_):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, _):
        return contextlib.nullcontext()

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    cudart = empty_cache = set_device = synchronize = manual_seed = manual_seed_all = _nothing
    profiler_start = profiler_stop = set_allocator_settings = _nothing


_init_process_group = torch.distributed.init_process_group


def _with_gloo(*arguments: Any, **named: Any) -> None:
    _init_process_group(*arguments, **{**named, "backend": "gloo"})


torch.distributed.init_process_group = _with_gloo  # CHANGED: VeRL asks for "cpu:gloo,cpu:gloo", a duplicate

# These ask for the platform when they are imported.
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry  # noqa: E402
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.rollout import base as rollout_base  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: E402
from verl.workers.rollout.utils import ensure_async_iterator  # noqa: E402


def kill_workers() -> None:
    """Kill the agent loop workers, whose rollouts are played."""
    import ray

    for name in ray.util.list_named_actors():
        if name.startswith("agent_loop_worker"):
            ray.kill(ray.get_actor(name))


class ScriptedServer:
    """What VeRL calls on a rollout server, over one transformers model. Its weights come by `load`.

    Args:
        path: Directory of the model.
        rank: Number of the server among those of the run.
        seed: Seed of what is drawn; a script draws nothing.
    """

    def __init__(self, path: str, rank: int = 0, seed: int = 0) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.rank, self.seed, self.steps = rank, seed, -1
        self.asked: dict[str, int] = {}
        self.killed = False

    async def load(self, weights: dict[str, torch.Tensor], steps: int) -> None:
        own = self.model.state_dict()
        missing = [name for name in own if name not in weights and not name.endswith("lm_head.weight")]
        assert not missing, missing
        self.model.load_state_dict({name: w.float() for name, w in weights.items() if name in own}, strict=False)
        self.steps = steps

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> TokenOutput:
        if sampling_params.get("prompt_logprobs") is not None:
            return self.scored(prompt_ids)
        text = self.tokenizer.decode(prompt_ids)
        number = await self.numbered(text)
        if ORPHAN in text and not self.killed:
            self.killed = True
            kill_workers()
        answer = said(text, number % 2)
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        ids = ids[: sampling_params["max_tokens"]]
        logprobs = self.logprobs([*prompt_ids, *ids])[len(prompt_ids) - 1 :]
        fields = {"global_steps": self.steps}
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=fields)

    async def numbered(self, text: str) -> int:
        """Return how often a text was asked before, on any server."""
        if self.rank:
            import ray

            return await ray.get_actor("scripted_server_0").numbered.remote(text)  # type: ignore[no-any-return]
        self.asked[text] = self.asked.get(text, -1) + 1
        return self.asked[text]

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token but the first."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([ids])).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def scored(self, ids: list[int]) -> TokenOutput:
        """Return the log-probabilities of a prompt as vLLM's and SGLang's servers do: of the token after each, and a
        dummy for the last one."""
        fields = {
            "global_steps": self.steps,
            "prompt_logprobs": [*([one] for one in self.logprobs(ids)), [0.0]],
            "prompt_ids": [*([one] for one in ids[1:]), [0]],
        }
        end = self.tokenizer.eos_token_id
        return TokenOutput(token_ids=[end], log_probs=None, stop_reason="completed", extra_fields=fields)

    async def nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no cache and no second model in this memory."""

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = nothing


class ScriptedReplica(RolloutReplica):
    server = ScriptedServer

    async def launch_servers(self) -> None:
        import ray

        name = f"scripted_server_{self.replica_rank}"
        path = self.model_config["path"] if isinstance(self.model_config, dict) else self.model_config.path
        server = ray.remote(self.server).options(name=name)
        self._server_handle = server.remote(path, self.replica_rank, self.config.seed)
        self.servers, self._server_address = [self._server_handle], name


class ScriptedAdapter(rollout_base.BaseRollout):
    """Runs in the training worker, or beside a server that is apart from it, and hands weights to the server."""

    is_leader_rank = True

    def __init__(self, *args: Any, replica_rank: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replica_rank = replica_rank

    async def resume(self, tags: Any) -> None:
        """Do nothing: nothing was released."""

    async def release(self) -> None:
        """Do nothing."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        import ray

        held = {name: _whole(one) async for name, one in ensure_async_iterator(weights)}
        await ray.get_actor(f"scripted_server_{self.replica_rank}").load.remote(held, global_steps)


def _whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().cpu().clone()


@CheckpointEngineRegistry.register("file")
class FileEngine(CheckpointEngine):
    """Moves weights from trainer to rollout servers by a file."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.path = Path()

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        path = str(Path(tempfile.gettempdir()) / f"weights-{uuid4().hex}")
        return {"path": [path] * actors}, {"path": [path] * rollouts}

    def init_process_group(self, path: str) -> None:
        self.path = Path(path)

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        part = self.path.with_suffix(".part")
        torch.save({name: _whole(one) for name, one in weights}, part)
        part.rename(self.path)

    async def receive_weights(self, global_steps: int | None = None) -> Any:
        while not self.path.exists():  # noqa: ASYNC110 # another process makes it
            await asyncio.sleep(0.05)
        for named in torch.load(self.path).items():
            yield named

    def finalize(self) -> None:
        self.path.unlink(missing_ok=True)


RolloutReplicaRegistry.register("scripted", lambda: ScriptedReplica)
rollout_base._ROLLOUT_REGISTRY["scripted", "async"] = f"{__name__}.ScriptedAdapter"  # CHANGED: it has no register()
if "cpu" not in EngineRegistry._engines["language_model"]["fsdp2"]:
    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)

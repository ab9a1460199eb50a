"""TEST ONLY: lets VeRL 0.9.1's own V1 trainer run on a machine without a GPU, with a generator that follows a script.

``VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_plugin`` and ``VERL_PLATFORM=cpu`` load it into each of VeRL's processes. It
uses VeRL's registries, and changes two things beside them (CHANGED). What it says nothing about: vLLM, SGLang, several
GPUs, speed.

    platform   "cpu": device cpu, gloo; the Ray resource GPU is a logical one
    engine     VeRL's FSDPEngineWithLMHead, registered for the device cpu
    rollout    "scripted": an actor that says what `said` says, with the model's own log-probabilities
"""

from __future__ import annotations

import contextlib
import json
import re
import types
from typing import Any

import torch
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

LOST = "nekorb"
"""End of the name of a shelf's place, ``broken`` backwards, whose first rollout breaks the machine."""


def said(text: str, rollout: int) -> str:
    """Return what a student says next.

    Args:
        text: The conversation so far.
        rollout: Number of the rollout among those with this prompt, in the order of their first turns; of later turns
            the text shows which it was.
    """
    opening, *turns = text.split("<|im_start|>assistant\n")
    place = re.findall(r"Not in (\w+)", opening)[-1]
    if place.endswith(LOST):
        return _step(tool="read", path="broken") if rollout == 0 else _step(tool="submit", word="owl")
    if len(turns) == 1:
        return _step(tool="read", path=f"nowhere-{rollout}")
    if len(turns) == 2:
        return _step(tool="read", path=place[::-1])
    return _step(tool="submit", word="owl" if "nowhere-0" in turns[0] else "elk")


def _step(**arguments: str) -> str:
    return "<tool_call>" + json.dumps({"name": "step", "arguments": arguments}) + "</tool_call>"


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
from verl.workers.engine import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402
from verl.workers.rollout import base as rollout_base  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput  # noqa: E402


class ScriptedServer:
    """What VeRL calls on a rollout server, over one transformers model. Its weights come by `load`."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.steps = -1
        self.asked: dict[str, int] = {}

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
        self.asked[text] = self.asked.get(text, -1) + 1
        answer = said(text, self.asked[text] % 2)
        ids = [*self.tokenizer.encode(answer, add_special_tokens=False), self.tokenizer.eos_token_id]
        ids = ids[: sampling_params["max_tokens"]]
        logprobs = self.logprobs([*prompt_ids, *ids])[len(prompt_ids) - 1 :]
        fields = {"global_steps": self.steps}
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=fields)

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token but the first."""
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):  # as VeRL's engine
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
    async def launch_servers(self) -> None:
        import ray

        name = f"scripted_server_{self.replica_rank}"
        path = self.model_config["path"] if isinstance(self.model_config, dict) else self.model_config.path
        self._server_handle = ray.remote(ScriptedServer).options(name=name, max_concurrency=8).remote(path)
        self.servers, self._server_address = [self._server_handle], name


class ScriptedAdapter(rollout_base.BaseRollout):
    """Runs in the training worker, and hands its weights to the server."""

    async def resume(self, tags: Any) -> None:
        """Do nothing: nothing was released."""

    async def release(self) -> None:
        """Do nothing."""

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        import ray

        held = {
            name: (one.full_tensor() if hasattr(one, "full_tensor") else one).detach().cpu().clone()
            for name, one in weights
        }
        await ray.get_actor("scripted_server_0").load.remote(held, global_steps)


RolloutReplicaRegistry.register("scripted", lambda: ScriptedReplica)
rollout_base._ROLLOUT_REGISTRY["scripted", "async"] = f"{__name__}.ScriptedAdapter"  # CHANGED: it has no register()
if "cpu" not in EngineRegistry._engines["language_model"]["fsdp2"]:
    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cpu")(FSDPEngineWithLMHead)

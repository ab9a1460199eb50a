"""Combinations of models, options and channels that TRL's trainer cannot do; each message names what to use instead."""

from __future__ import annotations

from typing import Any

from ...assembly.teacher_weights import has_adapter


def refuse_models_without_states(student: Any, *, compiled: bool) -> None:
    """Raise ValueError for a model whose hidden states cannot be captured.

    Args:
        student: The student, unwrapped.
        compiled: Whether the trainer compiles it.

    Raises:
        ValueError: The model is compiled, or spread over several devices.
    """
    if compiled:
        raise ValueError(
            "channels 2 and 3 take the student's states by a hook, which a compiled model does not call: "
            "torch_compile=False, or both weights 0"
        )
    base = student.get_base_model() if has_adapter(student) else student
    devices = sorted({str(device) for device in (getattr(base, "hf_device_map", None) or {}).values()})
    if len(devices) > 1:
        raise ValueError(
            f"the model is spread over the devices {', '.join(devices)}, as TRL does in one process that sees "
            "several: start it with accelerate launch, or show it one (CUDA_VISIBLE_DEVICES=0)"
        )


def refuse_second_adapter(model: Any, uses_vllm: bool) -> None:
    """Raise ValueError if TRL would send a second adapter's copies of modules to vLLM.

    TRL leaves out the copies of the adapter ``default`` only.

    Args:
        model: The student, unwrapped.
        uses_vllm: Whether vLLM generates.

    Raises:
        ValueError: vLLM generates, and the student's adapter has ``modules_to_save``.
    """
    if uses_vllm and has_adapter(model) and model.peft_config[model.active_adapter].modules_to_save:
        raise ValueError(
            "the teachers 'ema' and 'initial' add an adapter, and TRL would send its copies of modules_to_save to "
            "vLLM as weights: use teacher='live' or 'base', or a LoraConfig without modules_to_save"
        )


def refuse_sharded_copy(accelerator: Any, setting: str, instead: str) -> None:
    """Raise ValueError if a setting needs a copy of the weights and their shards cannot be copied.

    Args:
        accelerator: The trainer's accelerator.
        setting: Setting that keeps the copy.
        instead: Setting to use instead.

    Raises:
        ValueError: The weights are in shards of ZeRO-3 or of the first FSDP, whose parameters are not the model's own.
    """
    deepspeed, fsdp = accelerator.state.deepspeed_plugin, getattr(accelerator.state, "fsdp_plugin", None)
    if deepspeed is not None and deepspeed.zero_stage == 3:
        kind = "ZeRO-3"
    elif fsdp is not None and fsdp.fsdp_version == 1:
        kind = "FSDP 1"
    else:
        return
    raise ValueError(f"{setting} keeps a copy of the weights, and {kind} has them in shards: use {instead}")

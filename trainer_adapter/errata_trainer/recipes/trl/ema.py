"""Teachers with weights of their own: an exponential moving average of the student, or a copy of it as training
began."""

from __future__ import annotations

import copy
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from trl.trainer.utils import use_adapter

log = logging.getLogger("errata.trainer")

ADAPTER = "errata_teacher"

FILE = "errata_teacher.pt"
"""The teacher's weights in a checkpoint."""


def _save(args: Any, state: Any, weights: dict[str, torch.Tensor]) -> None:
    """Write the teacher's weights into the checkpoint that was just saved; they are the same on all ranks."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    if args.should_save and folder.is_dir():
        torch.save(weights, folder / FILE)


def _saved(checkpoint: str | None) -> dict[str, torch.Tensor] | None:
    """Return the teacher's weights from the checkpoint to resume from; None if there are none."""
    if checkpoint is None:
        return None
    if not (Path(checkpoint) / FILE).is_file():
        log.warning("%s has no %s: the teacher begins as the student is now", checkpoint, FILE)
        return None
    weights: dict[str, torch.Tensor] = torch.load(Path(checkpoint) / FILE, map_location="cpu", weights_only=True)
    return weights


class TeacherCopy(TrainerCallback):  # type: ignore[misc]
    """Callback that keeps a copy of the model and updates it towards the student after each optimizer step.

    Args:
        model: The student, unwrapped; it is copied as it is now.
        rate: Share of the student in each move, in [0, 1]; 0 stays where it began.
        accelerator: The trainer's.

    Attributes:
        model: The teacher.
    """

    def __init__(self, model: Any, rate: float, accelerator: Any) -> None:
        self.model = frozen_copy(model)
        self.rate, self.accelerator = rate, accelerator
        self.checkpoint: str | None = None
        self._wide: dict[str, torch.Tensor] = {}

    def teaching(self) -> AbstractContextManager[None]:
        """Return a context in which `model` runs in the student's precision."""
        context: AbstractContextManager[None] = self.accelerator.autocast()
        return context

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the teacher from the checkpoint; without one, copy the student, which may have been loaded since."""
        self.model.to(self.accelerator.device)  # the student may have been moved since it was copied (DeepSpeed)
        saved = _saved(self.checkpoint)
        if saved is not None:
            self.model.load_state_dict(saved)
        else:
            with torch.no_grad():
                self._move(self.accelerator.unwrap_model(kwargs["model"]), 1.0)
        # A small step of a half-precision weight is rounded away: the average is kept in float32 beside it.
        halves = {name: weight for name, weight in self.model.named_parameters() if self.rate and _is_half(weight)}
        self._wide = {
            name: (weight if saved is None else saved[name].to(weight.device)).detach().float().clone()
            for name, weight in halves.items()
        }

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the teacher's weights in the checkpoint."""
        _save(args, state, {**self.model.state_dict(), **self._wide})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the teacher. Weights of a sharded student (DTensor) are gathered, unless the copy is sharded, too."""
        if self.rate:
            with torch.no_grad():
                self._move(self.accelerator.unwrap_model(kwargs["model"]), self.rate)

    def _move(self, student: Any, rate: float) -> None:
        for (name, target), source in zip(self.model.named_parameters(), student.parameters(), strict=True):
            own = source.detach()
            if hasattr(own, "full_tensor") and not hasattr(target, "full_tensor"):
                own = own.full_tensor()
            average = self._wide.get(name, target.data)
            average.mul_(1.0 - rate).add_(own.to(average.dtype), alpha=rate)
            if average is not target.data:
                target.data.copy_(average)


class TeacherAdapter(TrainerCallback):  # type: ignore[misc]
    """Callback that keeps a second adapter on the student's base model and updates it towards the student's adapter.

    It starts as a copy of the student's adapter. TRL's own callback starts from an adapter of zeros, which is the base
    model: with both LoRA factors averaged, their product would lag quadratically.

    Args:
        model: The student with its adapter, unwrapped.
        rate: Share of the student in each move, in [0, 1]; 0 stays where it began.
        accelerator: The trainer's.

    Attributes:
        model: The student; it teaches with its other adapter.
        shadow_weights: The teacher's, by name, in float32: a small step of a half-precision weight is rounded away.
    """

    def __init__(self, model: Any, rate: float, accelerator: Any) -> None:
        self.model, self.rate, self.accelerator = model, rate, accelerator
        self.checkpoint: str | None = None
        self.shadow_weights: dict[str, torch.Tensor] = {}
        own = self._own_name = model.active_adapter
        model.add_adapter(ADAPTER, model.peft_config[own])
        model.set_adapter(own)
        self._begin()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Load the teacher from the checkpoint; without one, copy the student, which may have been loaded since."""
        self._begin(_saved(self.checkpoint))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the teacher's weights in the checkpoint."""
        _save(args, state, self.shadow_weights)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Update the teacher's adapter."""
        if not self.rate:
            return
        with torch.no_grad():
            for name, weight in self._own().items():
                self.shadow_weights[name].mul_(1.0 - self.rate).add_(weight, alpha=self.rate)
        self._apply()

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the weights of the student's adapter, with names that do not contain the adapter's name."""
        from peft import get_peft_model_state_dict

        # With "auto", the default, embedding layers are looked for on the Hub.
        found: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.model, adapter_name=self._own_name, save_embedding_layers=False
        )
        return found

    def _begin(self, saved: dict[str, torch.Tensor] | None = None) -> None:
        own = self._own()
        self.shadow_weights = {
            name: (weight if saved is None else saved[name].to(weight.device)).detach().float().clone()
            for name, weight in own.items()
        }
        self._apply()

    def _apply(self) -> None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, self.shadow_weights, adapter_name=ADAPTER)

    def teaching(self) -> AbstractContextManager[None]:
        """Return a context in which `model` runs with the teacher's adapter."""
        context: AbstractContextManager[None] = use_adapter(self.model, ADAPTER)
        return context


def teacher_of(model: Any, rate: float, accelerator: Any) -> TeacherCopy | TeacherAdapter:
    """Return the callback that keeps the teacher of an unwrapped student."""
    return (TeacherAdapter if has_adapter(model) else TeacherCopy)(model, rate, accelerator)


def _is_half(weight: torch.Tensor) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16)


def refuse_second_adapter(model: Any, uses_vllm: bool) -> None:
    """Raise ValueError if TRL would send a second adapter's copies of modules to vLLM.

    TRL leaves out the copies of the adapter ``default`` only.

    Args:
        model: The student, unwrapped.
        uses_vllm: vLLM generates.

    Raises:
        ValueError: vLLM generates, and the student's adapter has ``modules_to_save``.
    """
    if uses_vllm and has_adapter(model) and model.peft_config[model.active_adapter].modules_to_save:
        raise ValueError(
            "the teachers 'ema' and 'initial' add an adapter, and TRL would send its copies of modules_to_save to "
            "vLLM as weights: use teacher='live' or 'base', or a LoraConfig without modules_to_save"
        )


def has_adapter(model: Any) -> bool:
    """Return whether an unwrapped model has a PEFT adapter."""
    return hasattr(model, "disable_adapter")


def frozen_copy(model: Any) -> Any:
    """Return a copy of an unwrapped model in evaluation mode, without gradients."""
    made = copy.deepcopy(model).eval().requires_grad_(False)
    vars(made).pop("forward", None)  # TRL's fused head is patched onto the instance, and is the original's still
    return made


def refuse_sharded_copy(accelerator: Any, setting: str, instead: str) -> None:
    """Raise ValueError if a setting needs a copy of the weights and their shards cannot be copied.

    Args:
        accelerator: The trainer's.
        setting: What keeps the copy.
        instead: What to use.

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

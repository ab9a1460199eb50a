"""A teacher that follows the student slowly: an exponential moving average of its weights, kept by a callback."""

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
    """Write the teacher into the checkpoint that was just saved; all ranks have the same one."""
    folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
    if args.should_save and folder.is_dir():
        torch.save(weights, folder / FILE)


def _saved(checkpoint: str | None) -> dict[str, torch.Tensor] | None:
    """Return the teacher's weights of the checkpoint that training goes on from; None where there are none."""
    if checkpoint is None:
        return None
    if not (Path(checkpoint) / FILE).is_file():
        log.warning("%s has no %s: the ema teacher begins as the student is now", checkpoint, FILE)
        return None
    weights: dict[str, torch.Tensor] = torch.load(Path(checkpoint) / FILE, map_location="cpu", weights_only=True)
    return weights


class FollowingModel(TrainerCallback):  # type: ignore[misc]
    """Moves a copy of the model towards it after each optimizer step.

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

    def teaching(self) -> AbstractContextManager[None]:
        """Let `model` be the teacher for a block, in the student's precision."""
        context: AbstractContextManager[None] = self.accelerator.autocast()
        return context

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin where the checkpoint's teacher was; without, where the student is, which may have been loaded since."""
        saved = _saved(self.checkpoint)
        if saved is not None:
            self.model.load_state_dict(saved)
        else:
            with torch.no_grad():
                self._move(self.accelerator.unwrap_model(kwargs["model"]), 1.0)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the teacher beside the student."""
        _save(args, state, self.model.state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move. Of a student in shards (DTensor) all ranks gather each weight, unless the copy is in shards, too."""
        if self.rate:
            with torch.no_grad():
                self._move(self.accelerator.unwrap_model(kwargs["model"]), self.rate)

    def _move(self, student: Any, rate: float) -> None:
        for target, source in zip(self.model.parameters(), student.parameters(), strict=True):
            own = source.detach()
            if hasattr(own, "full_tensor") and not hasattr(target, "full_tensor"):
                own = own.full_tensor()
            target.data.mul_(1.0 - rate).add_(own.to(target.dtype), alpha=rate)


class FollowingAdapter(TrainerCallback):  # type: ignore[misc]
    """Keeps a second adapter on the student's base, and moves it towards the student's after each optimizer step.

    It starts as the student is. An adapter of zeros, as TRL's own callback begins with, is the base model: with both
    factors of a LoRA averaged, their product would lag by the square.

    Args:
        model: The student with its adapter, unwrapped.
        rate: Share of the student in each move, in [0, 1]; 0 stays where it began.
        accelerator: The trainer's.

    Attributes:
        model: The student; it teaches with its other adapter.
        shadow_weights: The teacher's, by name.
    """

    def __init__(self, model: Any, rate: float, accelerator: Any) -> None:
        self.model, self.rate, self.accelerator = model, rate, accelerator
        self.checkpoint: str | None = None
        self.shadow_weights: dict[str, torch.Tensor] = {}
        own = model.active_adapter
        model.add_adapter(ADAPTER, model.peft_config[own])
        model.set_adapter(own)
        self._begin()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin where the checkpoint's teacher was; without, where the student is, which may have been loaded since."""
        self._begin(_saved(self.checkpoint))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the teacher beside the student."""
        _save(args, state, self.shadow_weights)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move."""
        if not self.rate:
            return
        with torch.no_grad():
            for name, weight in self._own().items():
                self.shadow_weights[name].mul_(1.0 - self.rate).add_(weight, alpha=self.rate)
        self._apply()

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the weights of the student's adapter, by names without the adapter's."""
        from peft import get_peft_model_state_dict

        found: dict[str, torch.Tensor] = get_peft_model_state_dict(self.model)
        return found

    def _begin(self, saved: dict[str, torch.Tensor] | None = None) -> None:
        own = self._own()
        self.shadow_weights = {
            name: (weight if saved is None else saved[name].to(weight)).detach().clone() for name, weight in own.items()
        }
        self._apply()

    def _apply(self) -> None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, self.shadow_weights, adapter_name=ADAPTER)

    def teaching(self) -> AbstractContextManager[None]:
        """Let `model` be the teacher for a block, by its other adapter."""
        context: AbstractContextManager[None] = use_adapter(self.model, ADAPTER)
        return context


def following(model: Any, rate: float, accelerator: Any) -> FollowingModel | FollowingAdapter:
    """Return the callback that keeps a teacher of an unwrapped student."""
    return (FollowingAdapter if has_adapter(model) else FollowingModel)(model, rate, accelerator)


def has_adapter(model: Any) -> bool:
    """Say whether an unwrapped model has an adapter (PEFT) on a base that stays as it is."""
    return hasattr(model, "disable_adapter")


def frozen_copy(model: Any) -> Any:
    """Return a copy of an unwrapped model that is not trained."""
    made = copy.deepcopy(model).eval().requires_grad_(False)
    vars(made).pop("forward", None)  # TRL's fused head is patched onto the instance, and is the original's still
    return made


def refuse_sharded_copy(accelerator: Any, setting: str, instead: str) -> None:
    """Refuse a setting that keeps a copy of the weights where their shards cannot be copied.

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

"""A teacher that follows the student slowly: an exponential moving average of its weights, kept by TRL's callbacks."""

from __future__ import annotations

import copy
import logging
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from trl.experimental.sdpo.teacher_sync import PEFTAdapterEMACallback
from trl.trainer.callbacks import SyncRefModelCallback
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


class FollowingModel(SyncRefModelCallback):  # type: ignore[misc]
    """Moves a copy of the model towards it after each optimizer step.

    Args:
        model: The student, unwrapped; it is copied as it is now.
        rate: Share of the student in each move, in (0, 1].
        accelerator: The trainer's.
    """

    def __init__(self, model: Any, rate: float, accelerator: Any) -> None:
        super().__init__(ref_model=frozen_copy(model), accelerator=accelerator)
        self.rate = rate
        self.checkpoint: str | None = None

    @property
    def model(self) -> Any:
        """The teacher."""
        return self.ref_model

    def teaching(self) -> AbstractContextManager[None]:
        """Let `model` be the teacher for a block, in the student's precision."""
        context: AbstractContextManager[None] = self.accelerator.autocast()
        return context

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin where the checkpoint's teacher was; without, where the student is, which may have been loaded since."""
        saved = _saved(self.checkpoint)
        if saved is not None:
            self.ref_model.load_state_dict(saved)
        else:
            self.sync_target_model(self.accelerator.unwrap_model(kwargs["model"]), self.ref_model, 1.0)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the teacher beside the student."""
        _save(args, state, self.ref_model.state_dict())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move."""
        self.sync_target_model(self.accelerator.unwrap_model(kwargs["model"]), self.ref_model, self.rate)


class FollowingAdapter(PEFTAdapterEMACallback):  # type: ignore[misc]
    """Keeps a second adapter on the student's base, and moves it towards the student's after each optimizer step.

    TRL's own starts from an adapter of zeros, which is the base model: with both factors of a LoRA averaged, their
    product would lag by the square. This one starts as the student is.

    Args:
        model: The student with its adapter, unwrapped.
        rate: Share of the student in each move, in (0, 1].
        accelerator: The trainer's.
    """

    def __init__(self, model: Any, rate: float, accelerator: Any) -> None:
        super().__init__(model, teacher_adapter_name=ADAPTER, update_rate=rate, accelerator=accelerator)
        self.checkpoint: str | None = None
        self._initialize_teacher_adapter()

    def _initialize_teacher_adapter(self) -> None:
        if self._initialized:
            return
        super()._initialize_teacher_adapter()
        self._begin()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin where the checkpoint's teacher was; without, where the student is, which may have been loaded since."""
        self._begin(_saved(self.checkpoint))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the teacher beside the student."""
        _save(args, state, self.shadow_weights)

    def _begin(self, saved: dict[str, torch.Tensor] | None = None) -> None:
        from peft import set_peft_model_state_dict

        own = self._get_student_state_dict()
        self.shadow_weights = {
            name: (weight if saved is None else saved[name].to(weight)).clone() for name, weight in own.items()
        }
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

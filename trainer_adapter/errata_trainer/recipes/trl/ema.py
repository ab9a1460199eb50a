"""A teacher that follows the student slowly: an exponential moving average of its weights, kept by TRL's callbacks."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from trl.experimental.sdpo.teacher_sync import PEFTAdapterEMACallback
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import use_adapter

ADAPTER = "errata_teacher"


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

    @property
    def model(self) -> Any:
        """The teacher."""
        return self.ref_model

    def teaching(self) -> AbstractContextManager[None]:
        """Let `model` be the teacher for a block."""
        return nullcontext()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin where the student is: a checkpoint may have been loaded into it since."""
        self.sync_target_model(self.accelerator.unwrap_model(kwargs["model"]), self.ref_model, 1.0)

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
        self._initialize_teacher_adapter()

    def _initialize_teacher_adapter(self) -> None:
        if self._initialized:
            return
        super()._initialize_teacher_adapter()
        self._begin()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin where the student is: a checkpoint may have been loaded into it since."""
        self._begin()

    def _begin(self) -> None:
        from peft import set_peft_model_state_dict

        self.shadow_weights = {name: weight.clone() for name, weight in self._get_student_state_dict().items()}
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

"""Teachers with weights of their own: an exponential moving average of the student, or a copy of it as training
began."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ..channels.forward import in_shards

log = logging.getLogger("errata.trainer")

ADAPTER = "errata_teacher"

FILE = "errata_teacher.pt"
"""The teacher's weights in a checkpoint."""

Copied = Callable[[Any], Any]
"""Returns a model of an unwrapped student's shape that shares no weights with it: `frozen_copy`, or a function that
loads the model again."""


def frozen_copy(model: Any) -> Any:
    """Return a deep copy of an unwrapped model in evaluation mode, without gradients.

    Raises:
        ValueError: The model is in shards (`fully_shard`), which cannot be copied.
    """
    if in_shards(model):
        raise ValueError(
            "a student in shards cannot be copied: give channels_for copied=, a function that loads the model again, "
            "or use teacher='live' and dpo_reference='when_asked'"
        )
    made = copy.deepcopy(model).eval().requires_grad_(False)
    vars(made).pop("forward", None)  # TRL's fused head is patched onto the instance, and is the original's still
    return made


def frozen(model: Any, copied: Copied = frozen_copy) -> Any:
    """Return a copy of an unwrapped model in evaluation mode, without gradients.

    Args:
        model: Model to copy.
        copied: Way to copy it.

    Raises:
        ValueError: The model cannot be copied so, or the copy has other parameters than the model.
    """
    made = copied(model).eval().requires_grad_(False)
    shapes, own = ([tuple(weight.shape) for weight in one.parameters()] for one in (made, model))
    if shapes != own:
        raise ValueError(
            "copied= returned a model with parameters of other shapes than the student's, or in another order"
        )
    return made


class TeacherCopy:
    """A copy of the model that is updated towards the student after each optimizer step.

    Args:
        model: The student, unwrapped; it is copied as it is now.
        rate: Share of the student in each update, in [0, 1]; with 0 the teacher stays where it began.
        precision: Returns the context in which the teacher runs, e.g. the trainer's ``autocast``.
        copied: Way to copy the student. The copy's weights do not matter, as `begin` sets them.

    Raises:
        ValueError: The student cannot be copied so, or the copy is in shards, of which `save` would write one.

    Attributes:
        model: The teacher.
    """

    def __init__(
        self,
        model: Any,
        rate: float,
        precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
        *,
        copied: Copied = frozen_copy,
    ) -> None:
        self.model = frozen(model, copied)
        if in_shards(self.model):
            raise ValueError("the teacher's copy of the student is in shards: copied= has to return a whole model")
        self.rate, self.teaching = rate, precision
        self._wide: dict[str, torch.Tensor] = {}

    def begin(self, student: Any, device: torch.device, checkpoint: Path | None = None) -> None:
        """Begin training: load the teacher from a checkpoint, or copy the student, which may have been loaded since.

        Args:
            student: The student, unwrapped.
            device: Device of the student, which may have been moved since it was copied (DeepSpeed).
            checkpoint: Directory of the checkpoint that training goes on from; None at the beginning.
        """
        self.model.to(device)
        saved = _saved(checkpoint)
        if saved is not None:
            self.model.load_state_dict(saved)
        else:
            with torch.no_grad():
                self._move(student, 1.0)
        # A small step of a half-precision weight is rounded away: the average is kept in float32 beside it.
        halves = {name: weight for name, weight in self.model.named_parameters() if self.rate and _is_half(weight)}
        self._wide = {
            name: (weight if saved is None else saved[name].to(weight.device)).detach().float().clone()
            for name, weight in halves.items()
        }

    def update(self, student: Any) -> None:
        """Follow the student by one step. Weights in shards (DTensor) are gathered, unless the copy is sharded, too."""
        if self.rate:
            with torch.no_grad():
                self._move(student, self.rate)

    def save(self, directory: Path) -> None:
        """Write the teacher's weights into a checkpoint's directory; they are the same on all ranks."""
        torch.save({**self.model.state_dict(), **self._wide}, directory / FILE)

    def _move(self, student: Any, rate: float) -> None:
        for (name, target), source in zip(self.model.named_parameters(), student.parameters(), strict=True):
            own = source.detach()
            if hasattr(own, "full_tensor") and not hasattr(target, "full_tensor"):
                own = own.full_tensor()
            average = self._wide.get(name, target.data)
            average.mul_(1.0 - rate).add_(own.to(average.dtype), alpha=rate)
            if average is not target.data:
                target.data.copy_(average)


class TeacherAdapter:
    """A second adapter on the student's base model that is updated towards the student's adapter.

    It starts as a copy of the student's adapter. TRL's own callback starts from an adapter of zeros, which is the base
    model: with both LoRA factors averaged, their product would lag quadratically.

    Args:
        model: The student with its adapter, unwrapped.
        rate: Share of the student in each update, in [0, 1]; with 0 the teacher stays where it began.

    Attributes:
        model: The student; it teaches with its other adapter.
        shadow_weights: The teacher's weights by name, in float32: a small step of a half-precision weight is rounded
            away.
    """

    def __init__(self, model: Any, rate: float) -> None:
        self.model, self.rate = model, rate
        self.shadow_weights: dict[str, torch.Tensor] = {}
        own = self._own_name = model.active_adapter
        model.add_adapter(ADAPTER, model.peft_config[own])
        model.set_adapter(own)
        self._begin(None)

    def begin(self, student: Any, device: torch.device, checkpoint: Path | None = None) -> None:
        """Begin training: load the teacher from a checkpoint, or copy the student's adapter. See `TeacherCopy`."""
        self._begin(_saved(checkpoint))

    def update(self, student: Any) -> None:
        """Follow the student's adapter by one step."""
        if not self.rate:
            return
        with torch.no_grad():
            for name, weight in self._own().items():
                self.shadow_weights[name].mul_(1.0 - self.rate).add_(weight, alpha=self.rate)
        self._apply()

    def save(self, directory: Path) -> None:
        """Write the teacher's weights into a checkpoint's directory; they are the same on all ranks."""
        torch.save(self.shadow_weights, directory / FILE)

    @contextmanager
    def teaching(self) -> Iterator[None]:
        """Return a context in which `model` runs with the teacher's adapter."""
        self.model.set_adapter(ADAPTER)
        try:
            yield
        finally:
            self.model.set_adapter(self._own_name)

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the weights of the student's adapter, with names that do not contain the adapter's name."""
        from peft import get_peft_model_state_dict

        # With "auto", the default, embedding layers are looked for on the Hub.
        found: dict[str, torch.Tensor] = get_peft_model_state_dict(
            self.model, adapter_name=self._own_name, save_embedding_layers=False
        )
        return found

    def _begin(self, saved: dict[str, torch.Tensor] | None) -> None:
        own = self._own()
        self.shadow_weights = {
            name: (weight if saved is None else saved[name].to(weight.device)).detach().float().clone()
            for name, weight in own.items()
        }
        self._apply()

    def _apply(self) -> None:
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, self.shadow_weights, adapter_name=ADAPTER)


TeacherWeights = TeacherCopy | TeacherAdapter


def teacher_of(
    model: Any,
    rate: float,
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    copied: Copied = frozen_copy,
) -> TeacherWeights:
    """Return a teacher with weights of its own for an unwrapped student: an adapter if the student has one."""
    return TeacherAdapter(model, rate) if has_adapter(model) else TeacherCopy(model, rate, precision, copied=copied)


def has_adapter(model: Any) -> bool:
    """Return whether an unwrapped model has a PEFT adapter."""
    return hasattr(model, "disable_adapter")


def _saved(checkpoint: Path | None) -> dict[str, torch.Tensor] | None:
    """Return the teacher's weights from the checkpoint that training goes on from; None if there are none."""
    if checkpoint is None:
        return None
    if not (checkpoint / FILE).is_file():
        log.warning("%s has no %s: the teacher begins as the student is now", checkpoint, FILE)
        return None
    weights: dict[str, torch.Tensor] = torch.load(checkpoint / FILE, map_location="cpu", weights_only=True)
    return weights


def _is_half(weight: torch.Tensor) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16)

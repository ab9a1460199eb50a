"""Has the channels begin, follow the student and be saved when TRL's trainer does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ...assembly.channel_set import ChannelSet


class ChannelCallback(TrainerCallback):  # type: ignore[misc]
    """Passes the trainer's events to the channels.

    Args:
        channels: The channels.
        accelerator: The trainer's accelerator.
        begun: Function called with the optimizer step at which training begins.

    Attributes:
        checkpoint: Directory of the checkpoint from which training resumes; None at the beginning.
    """

    def __init__(self, channels: ChannelSet, accelerator: Any, begun: Callable[[int], None]) -> None:
        self._channels, self._accelerator, self._begun = channels, accelerator, begun
        self.checkpoint: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the channels, or restore them from the checkpoint."""
        self._begun(state.global_step)
        student = self._accelerator.unwrap_model(kwargs["model"])
        checkpoint = Path(self.checkpoint) if self.checkpoint is not None else None
        self._channels.begin(student, self._accelerator.device, checkpoint)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the teacher follow the student."""
        self._channels.update(self._accelerator.unwrap_model(kwargs["model"]))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the channels beside the model."""
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._channels.save(checkpoint, weights=args.should_save)

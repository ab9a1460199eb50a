"""The state of the channels is saved with each checkpoint, beside the model, and restored from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from ...assembly.teacher_pairs import of_this_process

log = logging.getLogger("errata.trainer")

FILE = "errata_state.json"
"""In a checkpoint: the channels' state in this process; with several processes ``errata_state.rank3.json``."""


class Stateful(Protocol):
    """A part of the channels that is saved with checkpoints and continues from them.

    A part with more than JSON should hold also has ``save_files(directory)`` and ``load_files(directory)``: they are
    called with the checkpoint's directory, before ``state_dict`` and after ``load_state_dict``.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON can hold it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        ...


class ChannelState(TrainerCallback):  # type: ignore[misc]
    """Saves the state of the channels' parts with each checkpoint, and restores it where training resumes.

    Args:
        parts: By name; those that are not `Stateful` are left out.
        before_save: Called before the state is read.
        begun: Called with the optimizer step at which training begins.

    Attributes:
        checkpoint: From which training resumes; None at the beginning.
    """

    def __init__(
        self, parts: Mapping[str, Any], *, before_save: Callable[[], None], begun: Callable[[int], None]
    ) -> None:
        self.parts: dict[str, Stateful] = {
            name: part
            for name, part in parts.items()
            if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        }
        self.before_save, self.begun = before_save, begun
        self.checkpoint: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state; a part that the checkpoint does not have starts from the beginning."""
        self.begun(state.global_step)
        if self.checkpoint is None:
            return
        path = of_this_process(Path(self.checkpoint) / FILE)
        if not path.is_file():
            log.warning("%s has no %s: the channels start from the beginning", self.checkpoint, path.name)
            return
        saved = json.loads(path.read_text())
        for name, part in self.parts.items():
            if name in saved:
                part.load_state_dict(saved[name])
                if hasattr(part, "load_files"):
                    part.load_files(path.parent)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the state beside the model; each process has its own file."""
        self.before_save()
        path = of_this_process(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        for part in self.parts.values():
            if hasattr(part, "save_files"):
                part.save_files(path.parent)
        path.write_text(json.dumps({name: part.state_dict() for name, part in self.parts.items()}))

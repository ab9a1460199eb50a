"""What the channels remember goes into checkpoints, beside the model, and comes back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback

from ...teacher_pairs import of_this_process

log = logging.getLogger("errata.trainer")

FILE = "errata_state.json"
"""In a checkpoint: what the channels of this process remember; with several processes ``errata_state.rank3.json``."""


class Remembers(Protocol):
    """A part of the channels that goes on after a restart as if there had been none."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers, as JSON can hold it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember that."""
        ...


class ChannelState(TrainerCallback):  # type: ignore[misc]
    """Saves what the parts of the channels remember with each checkpoint, and restores it where training resumes.

    Args:
        parts: By name; those without `Remembers` are left out.
        before_save: Called before the state is read.
        begun: Called with the optimizer step at which training begins.

    Attributes:
        checkpoint: From which training resumes; None at the beginning.
    """

    def __init__(
        self, parts: Mapping[str, Any], *, before_save: Callable[[], None], begun: Callable[[int], None]
    ) -> None:
        self.parts: dict[str, Remembers] = {
            name: part
            for name, part in parts.items()
            if hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
        }
        self.before_save, self.begun = before_save, begun
        self.checkpoint: str | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore; a part that the checkpoint does not know begins anew."""
        self.begun(state.global_step)
        if self.checkpoint is None:
            return
        path = of_this_process(Path(self.checkpoint) / FILE)
        if not path.is_file():
            log.warning("%s has no %s: the channels remember nothing of the run", self.checkpoint, path.name)
            return
        saved = json.loads(path.read_text())
        for name, part in self.parts.items():
            if name in saved:
                part.load_state_dict(saved[name])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save beside the model; each process its own."""
        self.before_save()
        path = of_this_process(Path(args.output_dir) / f"checkpoint-{state.global_step}" / FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({name: part.state_dict() for name, part in self.parts.items()}))

"""The state of the channels in a checkpoint, beside the model."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..launch import of_this_process

log = logging.getLogger("errata.trainer")

FILE = "errata_state.json"
"""In a checkpoint: the channels' state in this process; with several processes ``errata_state.rank3.json``."""


@runtime_checkable
class Stateful(Protocol):
    """A part of the channels that is saved with checkpoints and continues from them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON can hold it."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        ...


@runtime_checkable
class WithFiles(Protocol):
    """A `Stateful` part with more than JSON should hold."""

    def save_files(self, directory: Path) -> None:
        """Write files into a checkpoint's directory; called before ``state_dict``."""
        ...

    def load_files(self, directory: Path) -> None:
        """Read them; called after ``load_state_dict``."""
        ...


class ChannelState:
    """Saves the state of the channels' parts with each checkpoint, and restores it where training resumes.

    Args:
        parts: The parts by name; those that are not `Stateful` are left out.

    Attributes:
        parts: The parts that are saved, by name.
    """

    def __init__(self, parts: Mapping[str, object]) -> None:
        self.parts = {name: part for name, part in parts.items() if isinstance(part, Stateful)}

    def restore(self, checkpoint: Path) -> None:
        """Restore the state from a checkpoint's directory; a part that it does not have starts from the beginning."""
        path = of_this_process(checkpoint / FILE)
        if not path.is_file():
            log.warning("%s has no %s: the channels start from the beginning", checkpoint, path.name)
            return
        saved = json.loads(path.read_text(encoding="utf-8"))
        for name, part in self.parts.items():
            if name in saved:
                part.load_state_dict(saved[name])
                if isinstance(part, WithFiles):
                    part.load_files(checkpoint)

    def save(self, checkpoint: Path) -> None:
        """Save the state in a checkpoint's directory; each process has a file of its own."""
        checkpoint.mkdir(parents=True, exist_ok=True)
        for part in self.parts.values():
            if isinstance(part, WithFiles):
                part.save_files(checkpoint)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        of_this_process(checkpoint / FILE).write_text(json.dumps(state), encoding="utf-8")

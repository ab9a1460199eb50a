"""`LayerRecords`: what the backend knows of its committed images, one JSON file each."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from errata_protocol.errors import SandboxFailed

from ..spec import WORKSPACE
from .tree_map import Entries

_NAME = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One committed image.

    Args:
        id: Its id in the engine, without ``sha256:``.
        base: Id of the base image.
        parent: The sandbox's snapshot before it, empty for the first one.
        workdir: The work directory of sandboxes on it.
        digest: Merged digest over ``entries``.
        depth: Layers above the base image.
        entries: What differs from the base image.
    """

    id: str
    base: str
    parent: str = ""
    workdir: str = WORKSPACE
    digest: str = ""
    depth: int = 1
    entries: Entries = field(default_factory=dict)


class LayerRecords:
    """Records below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def start(self) -> None:
        """Make the directory."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxFailed(f"the directory of layer records could not be made: {error}") from error

    def write(self, record: LayerRecord) -> None:
        """Keep a record."""
        path = self._directory / f"{record.id}.json"
        new = path.with_suffix(".new")
        try:
            new.write_text(json.dumps(asdict(record)))  # names that are not UTF-8 are escaped surrogates
            new.replace(path)
        except OSError as error:
            raise SandboxFailed(f"the record of a layer could not be written: {error}") from error

    def read(self, name: str) -> LayerRecord | None:
        """Return a record, None if there is none."""
        if not _NAME.fullmatch(name):
            return None
        try:
            return LayerRecord(**json.loads((self._directory / f"{name}.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise SandboxFailed(f"the record of layer {name[:12]} cannot be read: {error}") from error

    def remove(self, name: str) -> None:
        """Forget a layer."""
        (self._directory / f"{name}.json").unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the layers that have a record."""
        return [path.stem for path in self._directory.glob("*.json") if _NAME.fullmatch(path.stem)]

"""`LayerRecords`: metadata of the committed images, in one JSON file each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from errata_protocol.errors import SandboxFailed
from errata_protocol.names import DIGEST_ID

from ..spec import WORKSPACE
from .tree_map import Entries


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One committed image.

    Args:
        id: Id of the image, without ``sha256:``.
        base: Id of the base image.
        parent: Id of the sandbox's previous snapshot; empty for the first one.
        workdir: The work directory of sandboxes that continue from it.
        digest: Merged digest: a hash of ``entries``.
        depth: Number of layers on top of the base image, this one included.
        entries: Differences from the base image.
    """

    id: str
    base: str
    parent: str = ""
    workdir: str = WORKSPACE
    digest: str = ""
    depth: int = 1
    entries: Entries = field(default_factory=dict)


class LayerRecords:
    """The records in one directory. Methods block; all but `names` and `remove` raise SandboxFailed on I/O errors."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def start(self) -> None:
        """Make the directory if it is missing."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxFailed(f"the directory of layer records could not be made: {error}") from error

    def write(self, record: LayerRecord) -> None:
        """Store a record, replacing one of the same id."""
        path = self._directory / f"{record.id}.json"
        new = path.with_suffix(".new")
        try:
            new.write_text(json.dumps(asdict(record)))  # names that are not UTF-8 are escaped surrogates
            new.replace(path)
        except OSError as error:
            raise SandboxFailed(f"the record of a layer could not be written: {error}") from error

    def read(self, name: str) -> LayerRecord | None:
        """Return the record of a layer; None if there is none or the name cannot be a layer's."""
        if not DIGEST_ID.matches(name):
            return None
        try:
            return LayerRecord(**json.loads((self._directory / f"{name}.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise SandboxFailed(f"the record of layer {name[:12]} cannot be read: {error}") from error

    def remove(self, name: str) -> None:
        """Delete the record of a layer, if there is one."""
        (self._directory / f"{name}.json").unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Return the ids of all layers that have a record."""
        return [path.stem for path in self._directory.glob("*.json") if DIGEST_ID.matches(path.stem)]

"""Keeps a store within its disk limit: what was not used for the longest time is dropped first."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errata_protocol.errors import InvalidRequest
from errata_protocol.names import BASE_ID
from errata_server.sandbox.base_trees.derived import remove_base
from errata_server.sandbox.base_trees.tree import base_directories, read_record

from .store import Store

LIMIT_VARIABLE = "ERRATA_SWE_DISK_LIMIT_GIB"
DEFAULT_LIMIT_GIB = 64.0


@dataclass(frozen=True, slots=True)
class Usage:
    """Disk usage of a store, bytes.

    Args:
        packages: Files of the package index.
        archives: Work trees.
        bases: Base trees, without what they share with the tree that they were made from.
    """

    packages: int
    archives: int
    bases: int

    @property
    def total(self) -> int:
        """The sum of all three."""
        return self.packages + self.archives + self.bases


def disk_limit(gib: float | None = None) -> int:
    """Return the limit in bytes: the one given, else the configured one.

    Raises:
        InvalidRequest: The limit is no number above 0.
    """
    if gib is None:
        text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_GIB)
        try:
            gib = float(text)
        except ValueError:
            raise InvalidRequest(f"{LIMIT_VARIABLE} is {text!r}: it has to be a number of GiB") from None
    if not 0 < gib < 2**30:
        raise InvalidRequest(f"a disk limit of {gib} GiB: it has to be above 0")
    return int(gib * 1024**3)


def usage(store: Store) -> Usage:
    """Return what a store takes."""
    archives = sum(_size(path) for path in (store.directory / "objects").glob("*"))
    packages = sum(_size(path) for path in store.packages.glob("*"))
    return Usage(packages, archives, sum(_base_sizes(store).values()))


def trim(store: Store, limit: int, keep: Collection[str] = ()) -> list[str]:
    """Drop what was not used for the longest time until a store is within a limit; return a line for each.

    First go downloaded packages, then builds with what only they use. A base tree that a running server has in use
    stays.

    Args:
        store: The store.
        limit: Limit of the store's size, in bytes.
        keep: Keys of builds that stay.
    """
    lines: list[str] = []
    total = usage(store).total
    if total <= limit:
        return lines
    for path in sorted(store.packages.glob("[0-9a-f]*"), key=lambda path: path.stat().st_mtime):
        if total <= limit:
            return lines
        total -= _size(path)
        shutil.rmtree(path)
        lines.append(f"dropped the package {path.name[:12]}")
    for build in list(store.builds()):
        if usage(store).total <= limit:
            return lines
        if build.key in keep:
            continue
        store.forget(build)
        lines.append(f"dropped {build.instance_id}, which was not used for the longest time")
        _sweep(store)
    return lines


def _sweep(store: Store) -> None:
    """Delete archives and base trees that no build names."""
    builds = list(store.builds())
    named = {sha for build in builds for sha in (build.tree, build.system)}
    for path in (store.directory / "objects").glob("*"):
        if path.name not in named:
            shutil.rmtree(path)
    needed = {build.base for build in builds}
    sizes = _base_sizes(store)
    # A tree that others are made from goes after them: making them again would begin with it.
    origins = {identity: str((_record(identity) or {}).get("from", "")) for identity in sizes}
    for _ in range(3):
        for identity in sorted(sizes):
            is_origin = any(origins[other] == identity for other in origins if other != identity)
            if identity not in needed and identity in origins and not is_origin and remove_base(identity):
                del origins[identity]
                store.forget_base(identity)


def _base_sizes(store: Store) -> Mapping[str, int]:
    """Return the size of each base tree of a store, in bytes, by the tree's id.

    A size does not include what the tree shares with the tree that it was made from. Trees without a readable entry in
    the store's ``bases``, and trees that do not exist on this machine, are left out.

    Raises:
        SandboxUnavailable: The ``base.json`` of a tree cannot be read.
    """
    found = {}
    for path in sorted((store.directory / "bases").glob("*.json")):
        try:
            identity = str(json.loads(path.read_text("utf-8"))["id"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        record = _record(identity)
        if record is not None:
            found[identity] = int(record.get("added_bytes", 0))
    return found


def _record(identity: str) -> Mapping[str, Any] | None:
    return read_record(base_directories()[0] / identity) if BASE_ID.matches(identity) else None


def _size(path: Path) -> int:
    paths = path.rglob("*") if path.is_dir() else [path]
    return sum(one.lstat().st_size for one in paths if one.is_file())

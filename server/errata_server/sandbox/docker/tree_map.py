"""`TreeMap`: the differences of a container from its base image, entry by entry, and their digest.

The engine lists the changed paths, whose attributes and contents are read from tar archives, at a cost proportional to
the changes.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import queue
import tarfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .broker import Broker, BrokerRefused, StopReading

GONE = "gone"
_MANY = 16
"""A directory with more changed entries than this is read as a whole."""
_NOISE = ("__pycache__", ".pytest_cache")
_MODIFIED, _ADDED, _DELETED = 0, 1, 2

Entries = dict[str, str]
"""Hash of each entry by absolute path, or `GONE` for a removed one."""


class TreeMap:
    """Reads the differences of containers from their base image.

    Args:
        broker: The broker.
        base_container: Returns an unchanged container of the base image.
        base: Cache of what was read of the base image; shared by all sandboxes on it.
    """

    def __init__(self, broker: Broker, base_container: Callable[[], Awaitable[str]], base: dict[str, Entries]) -> None:
        self._broker = broker
        self._base_container = base_container
        self._base = base

    async def read(self, container: str, before: Mapping[str, str]) -> Entries:
        """Return all differences of a container from the base image.

        Args:
            container: The container.
            before: The differences of the image that the container was made from.

        Raises:
            BrokerRefused: The engine failed, or one file is larger than what the broker copies (``too_large``).
        """
        answer = await self._broker.call("inspect", container=container, changes=True, timeout_s=330.0)
        changes = dict(answer["changes"])
        found = dict(before)
        whole: set[str] = set()
        tops: dict[str, int] = {}
        for path in sorted(changes):
            parent = path.rpartition("/")[0]
            if "\ufffd" in path:  # the engine's list cannot represent names that are not UTF-8
                while "\ufffd" in parent:
                    parent = parent.rpartition("/")[0]
                whole.add(parent or "/")
            elif changes[path] == _MODIFIED or changes.get(parent) != _ADDED:
                tops[parent] = tops.get(parent, 0) + 1
        whole |= {path for path, count in tops.items() if count > _MANY and path}
        done: set[str] = set()
        for path in sorted(changes):
            if "\ufffd" in path or _below(path, done):
                continue
            kind = changes[path]
            if path in whole or kind in (_DELETED, _ADDED):
                is_new = kind == _ADDED and path not in whole and path not in before
                try:
                    await self._replace(container, path, found, before, is_new=is_new)
                    done.add(path)
                except BrokerRefused as error:
                    hidden = any("\ufffd" in below and _below(below, {path}) for below in changes)
                    if error.why != "too_large" or hidden:
                        raise
                    # More than the broker copies at once: the changes below it follow one by one.
                    if kind == _DELETED:
                        found[path] = GONE
                    else:
                        await self._modified(container, path, found)
            else:
                await self._modified(container, path, found)
        return found

    async def base_has(self, path: str) -> bool:
        """Return whether the base image has an entry at a path."""
        return await self._of_base(path, one=True) is not None

    async def _replace(
        self, container: str, path: str, found: Entries, before: Mapping[str, str], *, is_new: bool = False
    ) -> None:
        """Read the tree at ``path`` again, and replace its part of ``found`` by the differences from the base image."""
        current = await self._tree(container, path)
        base = {} if is_new and not before else await self._of_base(path)
        prefix = path.rstrip("/") + "/"
        for known in [known for known in found if known == path or known.startswith(prefix)]:
            del found[known]
        found.update((at, entry) for at, entry in current.items() if base.get(at) != entry)
        found.update((at, GONE) for at in base if at not in current)

    async def _modified(self, container: str, path: str, found: Entries) -> None:
        """Update the difference of one entry, without those below it."""
        entry = await self._one(container, path)
        base = await self._of_base(path, one=True)
        if entry is None or entry == base:
            found.pop(path, None)
        else:
            found[path] = entry

    async def _of_base(self, path: str, *, one: bool = False) -> Any:
        """Return what the base image has at ``path``: the hash of one entry, or all entries; cached."""
        key = ("one:" if one else "all:") + path
        if key not in self._base:
            container = await self._base_container()
            if one:
                entry = await self._one(container, path)
                self._base[key] = {path: entry} if entry is not None else {}
            else:
                self._base[key] = await self._tree(container, path)
        return self._base[key].get(path) if one else self._base[key]

    async def _one(self, container: str, path: str) -> str | None:
        """Return the hash of one entry, of a directory without its entries; None if it does not exist."""
        reader = _Reader(path, first_directory_only=True)
        await self._fetch(container, path, reader)
        return reader.entries.get(path)

    async def _tree(self, container: str, path: str) -> Entries:
        """Return the entries at and below ``path``."""
        reader = _Reader(path)
        await self._fetch(container, path, reader)
        return reader.entries

    async def _fetch(self, container: str, path: str, reader: _Reader) -> None:
        """Feed the archive of a path to ``reader``; an empty one if the path does not exist."""
        refused: BrokerRefused | None = None
        try:
            await self._broker.copy_out(container, path, reader.take)
        except BrokerRefused as error:
            refused = error
        finally:
            await asyncio.to_thread(reader.end)
        if reader.has_first_directory:  # it needs no more, however large the directory is
            return
        if refused is not None and refused.why != "unknown":
            raise refused
        if reader.trouble is not None:
            raise BrokerRefused("engine_failed", f"the archive of {path} cannot be read: {reader.trouble}")


class _Reader(io.RawIOBase):
    """Hashes the members of a tar archive while it is received, in its own thread.

    Args:
        path: The path that the archive is of.
        first_directory_only: Stop after the first member if that is a directory.
    """

    def __init__(self, path: str, *, first_directory_only: bool = False) -> None:
        self.entries: Entries = {}
        self.trouble: Exception | None = None
        self._path = path
        self._only_first = first_directory_only
        self._pieces: queue.Queue[bytes] = queue.Queue()
        self._rest = b""
        self.has_first_directory = False
        self._enough = self._ended = self._began = False
        self._thread = threading.Thread(target=self._read_all, daemon=True)
        self._thread.start()

    def take(self, _stream: str, data: bytes) -> None:
        """Add the next bytes of the archive; raises `StopReading` once no more are needed."""
        if self._enough:
            raise StopReading
        self._pieces.put(data)

    def end(self) -> None:
        """Mark the end of the archive and wait until all of it is hashed."""
        self._pieces.put(b"")
        self._thread.join()

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        if not self._rest and not self._ended:
            self._rest = self._pieces.get()
            self._ended = not self._rest
            self._began = self._began or not self._ended
        size = min(len(into), len(self._rest))
        into[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size

    def _read_all(self) -> None:
        try:
            self._members()
        except tarfile.ReadError as error:
            self.trouble = error if self._began else None  # an empty archive: the path does not exist
        except Exception as error:
            self.trouble = error
        self._enough = True

    def _members(self) -> None:
        """Hash every member of the archive."""
        parent = self._path.rstrip("/").rpartition("/")[0]
        with tarfile.open(
            fileobj=io.BufferedReader(self), mode="r|", encoding="utf-8", errors="surrogateescape"
        ) as archive:
            for member in archive:
                name = member.name.rstrip("/")
                # Members' names begin with the last part of the path; those of the root directory have no such part.
                at = f"{parent}/{name}" if self._path != "/" else "/" + name.removeprefix("./").lstrip("/")
                self.entries[at.rstrip("/") or "/"] = self._entry(archive, member, parent)
                if self._only_first and member.isdir():
                    self.has_first_directory = True
                    return

    def _entry(self, archive: tarfile.TarFile, member: tarfile.TarInfo, parent: str) -> str:
        """Return the hash of a member: type, mode, owner, and content, target or device numbers."""
        if member.islnk():  # a hard link
            target = f"{parent}/{member.linkname}" if self._path != "/" else "/" + member.linkname.lstrip("/")
            return self.entries.get(target, "link:" + member.linkname)
        parts: list[Any] = [member.type.decode(), member.mode & 0o7777, member.uid, member.gid]
        if member.isreg():
            content = hashlib.sha256()
            data = archive.extractfile(member)
            while data is not None and (piece := data.read(1 << 20)):
                content.update(piece)
            parts += [member.size, content.hexdigest()]
        elif member.issym():
            parts.append(member.linkname)
        else:
            parts += [member.devmajor, member.devminor]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def digest(entries: Mapping[str, str]) -> str:
    """Return ``sha256:<hex>`` over entries, without caches that embed times."""
    counted = sorted((path, entry) for path, entry in entries.items() if not _is_noise(path))
    return "sha256:" + hashlib.sha256(json.dumps(counted).encode()).hexdigest()


def _is_noise(path: str) -> bool:
    return path.endswith((".pyc", "/.git/index")) or any(part in _NOISE for part in path.split("/"))


def _below(path: str, done: set[str]) -> bool:
    """Return whether a path is in a set or below one of its paths."""
    while path:
        if path in done:
            return True
        path = path.rpartition("/")[0]
    return "/" in done

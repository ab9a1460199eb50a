"""`LayerStore`: frozen layers on disk. Each has the changes of a step and names its parent.

    layers/<id>/d        the changed files, as overlayfs left them
    layers/<id>/meta     parent, base tree, digests, counts (JSON)
    layers/<id>/tree     the changes as a packed `Node`
    layers/<id>/f        in some: all files up to this layer, merged in one directory (hard links)
    layers/<id>/ftree    with ``f``: its packed `Node`

A layer is made in another directory and appears complete, by a rename; it never changes afterwards. The ``f``
directories keep chains short, because the kernel limits the number of layers: mounting and merging start at the newest
one.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from errata_protocol.errors import SandboxFailed
from errata_protocol.names import LAYER

from ..base_trees.tree import BaseTree
from ..files import as_owner
from ..files.overlay_form import ROOT_FORM, OverlayForm
from ..files.trees import ROOT, Node, fold, own_entries, pack, scan, scan_packed, tree_digest, unpack
from ..files.walk import Usage, remove_tree
from ..spec import WORKSPACE
from .flatten import flatten

MAX_CHAIN = 48
"""Length of a chain of layers at which the next layer gets an ``f`` directory."""
_CACHED_ENTRIES = 400_000
"""Directory entries that the cached trees may have in total, without those that they share; some 250 bytes each."""
_TREE_ENTRIES = 6
"""Memory of a cached tree apart from its entries, in entries."""
_CACHED_METAS = 20_000


@dataclass(frozen=True, slots=True)
class LayerMeta:
    """The metadata of a layer.

    Args:
        id: Its name.
        parent: Id of the layer below; empty for a layer directly on the base tree.
        base: Id of the base tree.
        base_name: The base tree's name.
        digest: Chained digest: a hash of the parent's chained digest and ``merged``; the parent's own if ``merged`` is
            equal to the parent's.
        merged: Digest of the whole tree at this layer.
        chain: Number of layers from this one down to the next ``f`` directory or the base tree, both ends included.
        entries: Entries in ``d``.
        size_bytes: Bytes in ``d``.
        workdir: The sandbox's work directory.
        writable: Directories and files, besides the base tree's, that the agent owns, relative to the root. Used in
            rootless mode only.
    """

    id: str
    parent: str
    base: str
    base_name: str
    digest: str
    merged: str
    chain: int
    entries: int
    size_bytes: int
    workdir: str = WORKSPACE
    writable: tuple[str, ...] = ()


class LayerStore:
    """The layers of one data directory. Methods block and can be called from any thread.

    Args:
        root: Directory of the layers.
        trash: Directory on the same file system for trees that are being made or deleted.
        sync: A layer is on stable storage when `freeze` returns.
        form: On-disk form of the layers.
    """

    def __init__(self, root: Path, trash: Path, *, sync: bool = False, form: OverlayForm = ROOT_FORM) -> None:
        self.root = root
        self.trash = trash
        self._form = form
        self._sync = sync
        self._metas: OrderedDict[str, LayerMeta] = OrderedDict()
        self._trees: OrderedDict[str, tuple[Node, int]] = OrderedDict()
        self._cached_entries = 0
        self._lock = threading.Lock()

    def meta(self, name: str) -> LayerMeta:
        """Return the metadata of a layer, cached.

        Raises:
            SandboxFailed: There is no such layer, or its metadata cannot be read.
        """
        found = self._metas.get(name)
        if found is not None:
            return found
        try:
            # The name comes from a journal row; it must not be a path.
            if not LAYER.matches(name):
                raise FileNotFoundError(name)
            record = json.loads((self.root / name / "meta").read_bytes())
            found = LayerMeta(**record | {"writable": tuple(record.get("writable", ()))})
        except (OSError, ValueError, TypeError) as error:
            raise SandboxFailed(f"layer {name} is not there: it was collected or belongs to another server") from error
        self._remember(found)
        return found

    def _remember(self, meta: LayerMeta) -> None:
        """Add metadata to the cache, which drops the oldest when it is full."""
        with self._lock:
            self._metas[meta.id] = meta
            while len(self._metas) > _CACHED_METAS:
                self._metas.popitem(last=False)

    def lowers(self, name: str) -> list[str]:
        """Return the directories to mount for a layer, newest first, relative to `root`, without the base tree.

        Raises:
            SandboxFailed: A layer of the chain does not exist.
        """
        found: list[str] = []
        while name:
            meta = self.meta(name)
            if meta.chain == 1 and (self.root / name / "f").is_dir():
                found.append(f"{name}/f")
                break
            found.append(f"{name}/d")
            name = meta.parent
        return found

    def tree(self, name: str) -> Node:
        """Return the merged changes of a layer and all below it; the empty tree for no layer ("").

        Raises:
            SandboxFailed: A layer of the chain does not exist.
            OSError: A layer cannot be read.
        """
        chain: list[str] = []
        tree = ROOT
        while name:
            with self._lock:
                cached = self._trees.get(name)
                if cached is not None:
                    self._trees.move_to_end(name)
            if cached is not None:
                tree = cached[0]
                break
            meta = self.meta(name)
            if meta.chain == 1 and (self.root / name / "ftree").exists():
                tree = unpack((self.root / name / "ftree").read_bytes())
                self._keep_tree(name, tree, tree)
                break
            chain.append(name)
            name = meta.parent
        for layer in reversed(chain):
            changes = unpack((self.root / layer / "tree").read_bytes())
            tree = fold(tree, changes)
            self._keep_tree(layer, tree, changes)
        return tree

    def _keep_tree(self, name: str, tree: Node, changes: Node) -> None:
        """Add a layer's tree to the cache, and drop the least recently used trees while it is too large.

        Args:
            name: The layer.
            tree: Its whole tree.
            changes: What it changes in its parent's tree. Entries that are shared with the parent's tree do not count
                towards the size of the cache.
        """
        size = own_entries(tree, changes) + _TREE_ENTRIES
        with self._lock:
            self._drop_tree(name)
            self._trees[name] = tree, size
            self._cached_entries += size
            while self._cached_entries > _CACHED_ENTRIES and len(self._trees) > 1:
                self._drop_tree(next(iter(self._trees)))

    def release(self, name: str, used: Collection[str]) -> None:
        """Remove a layer and those below it, down to one of ``used``, from the caches; the files stay.

        Called when a sandbox is destroyed. A later access reads the layers from disk again.
        """
        with self._lock:
            while name and name not in used:
                self._drop_tree(name)
                meta = self._metas.pop(name, None)
                if meta is None:
                    return
                name = meta.parent

    def _drop_tree(self, name: str) -> None:
        """Remove a tree from the cache. The caller holds the lock."""
        found = self._trees.pop(name, None)
        if found is not None:
            self._cached_entries -= found[1]

    def merged_digest(self, parent: str, upper: Path | None, base: BaseTree) -> str:
        """Return the digest of the tree at layer ``parent`` with the changes in ``upper``, if given.

        Raises:
            SandboxFailed: A layer does not exist.
            OSError: Files cannot be read.
        """
        if upper is None and parent:
            return self.meta(parent).merged
        tree = self.tree(parent)
        return self._digest(tree if upper is None else fold(tree, self._scan(upper)), base)

    def _scan(self, upper: Path) -> Node:
        if self._form.owner is None:
            return scan(upper, self._form)
        return unpack(as_owner.call(scan_packed, upper, self._form))

    def _digest(self, tree: Node, base: BaseTree) -> str:
        return tree_digest(tree, base.root, base.id, self._form)

    def freeze(
        self,
        upper: Path,
        parent: str,
        base: BaseTree,
        usage: Usage,
        *,
        workdir: str = WORKSPACE,
        writable: tuple[str, ...] = (),
    ) -> LayerMeta:
        """Make a layer from an upper directory, which is moved into it.

        Args:
            upper: The upper directory, which is not mounted.
            parent: Id of the layer below; empty for the base tree.
            base: The base tree.
            usage: Size of ``upper``.
            workdir: See `LayerMeta`.
            writable: See `LayerMeta`.

        Raises:
            SandboxFailed: A layer of the chain does not exist.
            OSError: A file system operation failed. ``upper`` stays where it was, unless only the final rename or the
                sync failed.
        """
        changes = self._scan(upper)
        tree = fold(self.tree(parent), changes)
        merged = self._digest(tree, base)
        below = self.meta(parent) if parent else None
        before, chained = (below.merged, below.digest) if below else (self._digest(ROOT, base), base.id)
        if merged != before or below is None:
            chained = "sha256:" + hashlib.sha256(f"{chained}\n{merged}".encode()).hexdigest()
        chain = below.chain + 1 if below else 1
        name = secrets.token_hex(8)
        meta = LayerMeta(
            id=name,
            parent=parent,
            base=base.id,
            base_name=base.name,
            digest=chained,
            merged=merged,
            chain=1 if chain > MAX_CHAIN else chain,
            entries=usage.entries,
            size_bytes=usage.size_bytes,
            workdir=workdir,
            writable=writable,
        )
        made = self.trash / f"new-{name}"
        made.mkdir()
        try:
            (made / "tree").write_bytes(pack(changes))
            (made / "meta").write_text(json.dumps(asdict(meta)))
            if meta.chain == 1 and parent:
                (made / "ftree").write_bytes(pack(tree))
                lowers = [self.root / lower for lower in reversed(self.lowers(parent))]
                arguments = ([*lowers, upper], made / "f", made / "shared", base.root, self._form)
                if self._form.owner is None:
                    flatten(*arguments)
                else:  # it makes directories whose modes deny their owner access, and writes into them
                    as_owner.call_in_namespace(flatten, *arguments)
            upper.rename(made / "d")
        except BaseException:
            as_owner.call(remove_tree, made)
            raise
        made.rename(self.root / name)
        if self._sync:
            _sync_file_system(self.root)
        self._remember(meta)
        self._keep_tree(name, tree, changes)
        return meta

    def names(self) -> set[str]:
        """Return the names of all layers on disk."""
        return {path.name for path in self.root.iterdir()}

    def delete(self, candidates: set[str], keep: Iterable[str]) -> tuple[int, int]:
        """Delete those of the candidates that are neither in ``keep`` nor an ancestor of a layer in ``keep``.

        Args:
            candidates: Names of layers; those that do not exist are skipped.
            keep: Names of layers to keep; those that do not exist are skipped.

        Returns:
            Number of deleted layers and the disk space that they used, in bytes.
        """
        kept: set[str] = set()
        for name in keep:
            while name and name not in kept:
                kept.add(name)
                try:
                    name = self.meta(name).parent
                except SandboxFailed:
                    break
        count = size = 0
        for name in candidates - kept:
            trash = self.trash / f"{name}-{secrets.token_hex(4)}"
            try:
                # Renamed first, so that a crash during the deletion leaves no incomplete layer.
                (self.root / name).rename(trash)
            except FileNotFoundError:
                continue
            with self._lock:
                self._metas.pop(name, None)
                self._drop_tree(name)
            count += 1
            size += as_owner.call(remove_tree, trash).size_bytes
        return count, size


def _sync_file_system(path: Path) -> None:
    """Write all data of the file system of ``path`` to stable storage, with one syncfs(2) for any number of files."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed", str(path))
    finally:
        os.close(fd)

"""`LayerStore`: frozen layers on disk: what each step changed, chained to its parent.

    layers/<id>/d        the changed files, as the overlay left them
    layers/<id>/meta     parent, base, digests, counts (JSON)
    layers/<id>/tree     the changes as a packed `Node`
    layers/<id>/f        in some: all files up to here in one directory (hard links), with its own packed tree ``ftree``

A layer is written once, by renames that put it there whole. Chains are kept short for the kernel by ``f`` directories,
which are only ever added: mounting and folding start at the newest one and no layer changes.
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

from ..base_trees.tree import BaseTree
from ..files import as_owner
from ..files.overlay_form import ROOT_FORM, OverlayForm
from ..files.trees import ROOT, Node, fold, own_entries, pack, scan, scan_packed, tree_digest, unpack
from ..files.walk import Usage, remove_tree
from ..spec import WORKSPACE
from .flatten import flatten

MAX_CHAIN = 48
"""Layers mounted above an ``f`` directory before the next one is made."""
_CACHED_ENTRIES = 400_000
"""Entries of directories that cached trees hold beyond what they share: some 250 bytes each."""
_TREE_ENTRIES = 6
"""What a cached tree takes beside its entries, counted in these."""
_CACHED_METAS = 20_000


@dataclass(frozen=True, slots=True)
class LayerMeta:
    """What is known of a layer without reading it.

    Args:
        id: Its name.
        parent: The layer below, empty on the base tree.
        base: Id of the base tree.
        base_name: The base tree's name.
        digest: Chained digest: over the parent's and, when anything that counts changed, the merged one.
        merged: Digest of the whole tree at this layer.
        chain: Layers from here down to the next ``f`` directory or the base, this one included.
        entries: Entries in ``d``.
        size_bytes: Bytes in ``d``.
        workdir: The sandbox's work directory.
        writable: Places that the agent owns besides the base tree's, relative to the root. Only rootless mode asks.
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
    """The layers of one data directory. Methods block; callers choose the thread.

    Args:
        root: Directory of the layers.
        trash: Directory on the same file system where deleted trees wait.
        sync: A layer is on stable storage when `freeze` returns.
        form: How overlays leave their layers.
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
        """Return what is known of layer ``name``.

        Raises:
            SandboxFailed: There is no such layer.
        """
        found = self._metas.get(name)
        if found is not None:
            return found
        try:
            # The name comes from a journal row; it must not be a path.
            if not name.isalnum():
                raise FileNotFoundError(name)
            record = json.loads((self.root / name / "meta").read_bytes())
            found = LayerMeta(**record | {"writable": tuple(record.get("writable", ()))})
        except (OSError, ValueError, TypeError) as error:
            raise SandboxFailed(f"layer {name} is not there: it was collected or belongs to another server") from error
        self._remember(found)
        return found

    def _remember(self, meta: LayerMeta) -> None:
        with self._lock:
            self._metas[meta.id] = meta
            while len(self._metas) > _CACHED_METAS:
                self._metas.popitem(last=False)

    def lowers(self, name: str) -> list[str]:
        """Return the directories to mount for layer ``name``, newest first, relative to `root`, without the base."""
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
        """Return what all layers up to ``name`` change, folded."""
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
        for above in reversed(chain):
            changes = unpack((self.root / above / "tree").read_bytes())
            tree = fold(tree, changes)
            self._keep_tree(above, tree, changes)
        return tree

    def _keep_tree(self, name: str, tree: Node, changes: Node) -> None:
        size = own_entries(tree, changes) + _TREE_ENTRIES
        with self._lock:
            self._drop_tree(name)
            self._trees[name] = tree, size
            self._cached_entries += size
            while self._cached_entries > _CACHED_ENTRIES and len(self._trees) > 1:
                self._drop_tree(next(iter(self._trees)))

    def release(self, name: str, used: Collection[str]) -> None:
        """Forget what is known of layer ``name`` and of those below it, down to one of ``used``; the files stay.

        Called when a sandbox is over: whoever comes back to its layers reads them again.
        """
        with self._lock:
            while name and name not in used:
                self._drop_tree(name)
                meta = self._metas.pop(name, None)
                if meta is None:
                    return
                name = meta.parent

    def _drop_tree(self, name: str) -> None:
        """Forget a tree. The lock is held."""
        found = self._trees.pop(name, None)
        if found is not None:
            self._cached_entries -= found[1]

    def merged_digest(self, parent: str, upper: Path | None, base: BaseTree) -> str:
        """Return the digest of the tree at layer ``parent`` with ``upper`` over it."""
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
        """Make a layer of ``upper``, which is moved away, on top of ``parent``.

        Args:
            upper: What changed.
            parent: The layer below, empty on the base tree.
            base: The base tree.
            usage: What ``upper`` holds.
            workdir: See `LayerMeta`.
            writable: See `LayerMeta`.

        Raises:
            OSError: The disk of the layers is full or broken; ``upper`` is where it was.
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
                else:  # it makes directories of modes that keep their owner out, and goes on in them
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
        """Delete the layers of ``candidates`` that are neither in ``keep`` nor below one that is.

        Args:
            candidates: Names of layers.
            keep: Names of layers to keep; unknown ones are passed over.

        Returns:
            Count and bytes of what was deleted.
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
            gone = self.trash / f"{name}-{secrets.token_hex(4)}"
            try:
                # Out of sight at once, so that a crash while deleting leaves no half layer.
                (self.root / name).rename(gone)
            except FileNotFoundError:
                continue
            with self._lock:
                self._metas.pop(name, None)
                self._drop_tree(name)
            count += 1
            size += as_owner.call(remove_tree, gone).size_bytes
        return count, size


def _sync_file_system(path: Path) -> None:
    """Bring everything on the file system of ``path`` to stable storage: one call for any number of files."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
            raise OSError(ctypes.get_errno(), "syncfs failed", str(path))
    finally:
        os.close(fd)

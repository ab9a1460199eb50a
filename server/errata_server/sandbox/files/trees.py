"""File trees in memory: reads the changes of a layer, merges layers, and computes a Merkle digest of the result.

A `Node` is immutable and shared: merging a layer over a thousand others copies only the directories that it changes.
Each node keeps its digest, so the digest after a step costs only what the step changed.

The digest of a merged tree covers the differences from the base tree, so equal trees have equal digests whatever the
steps: an entry equal to the base tree's does not count, nor does the way in which something was removed. For an entry,
its path, type, mode, owner and content or symlink target count; times, inode numbers, link counts and the names in
`NOISE` do not.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .overlay_form import ROOT_FORM, OverlayForm
from .walk import Visit, walk

NOISE = frozenset({"__pycache__", ".pytest_cache"})
"""Names of caches that embed times. They are kept as files but do not count in digests; nor do ``*.pyc``, nor
``index`` in ``.git`` (a cache of lstat results)."""

_EMPTY: Mapping[str, Node] = MappingProxyType({})
_ROW = struct.Struct(">IBBH32s")
_KINDS = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l", stat.S_IFIFO: b"p", stat.S_IFSOCK: b"s"}
_ZEROS = bytes(1 << 16)
"""A block of zeros. The digest of a file depends on the size of blocks if it has such a block."""
_RUN = struct.Struct(">QQ")
_GONE = b"w"
_SAME = b""
_PATH_MAX = 4096


@dataclass(slots=True, eq=False)
class Node:
    """One entry of a layer or of several merged layers.

    Args:
        kind: ``f`` file, ``d`` directory, ``l`` symlink, ``p`` FIFO, ``s`` socket, ``x`` other, or ``w`` for a whiteout
            (a removed entry).
        mark: Hash of the entry itself: kind, mode, owner and content or target.
        opaque: It is a directory that hides the same directory of lower layers.
        children: Entries of a directory by name.
        digest: Digest relative to the base tree; None until it is computed, b"" if equal to the base tree's entry.
    """

    kind: bytes
    mark: bytes = b""
    opaque: bool = False
    children: Mapping[str, Node] = field(default_factory=lambda: _EMPTY)
    digest: bytes | None = None


ROOT = Node(b"d")


def is_noise(name: str, parent: str) -> bool:
    """Return whether an entry is left out of digests.

    Args:
        name: Its name.
        parent: Name of its directory.
    """
    return name in NOISE or name.endswith(".pyc") or (name == "index" and parent == ".git")


def _mark(name: str, info: os.stat_result, dir_fd: int, form: OverlayForm) -> tuple[bytes, bytes]:
    """Return kind and hash of an entry; see `Node`. Opens regular files only, because opening a FIFO would block."""
    file_type = stat.S_IFMT(info.st_mode)
    if file_type == stat.S_IFCHR and info.st_rdev == 0:
        return _GONE, b""
    kind = _KINDS.get(file_type, b"x")
    uid, gid = (info.st_uid, info.st_gid) if form.owner is None else (form.owner, form.owner)
    digest = hashlib.sha256(b"%s %o %d %d\0" % (kind, info.st_mode & 0o7777, uid, gid))
    if kind == b"l":
        digest.update(os.fsencode(os.readlink(name, dir_fd=dir_fd)))
    elif kind == b"f" and info.st_size:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOATIME, dir_fd=dir_fd)
        try:
            zeros = _hash_content(fd, info.st_size, digest.update)
        finally:
            os.close(fd)
        if zeros:
            digest = hashlib.sha256(digest.digest() + zeros)
    return kind, digest.digest()


def _hash_content(fd: int, size: int, update: Callable[[bytes], None]) -> bytes:
    """Hash the blocks of a file that are not all zeros, and return where the others are.

    The holes of a sparse file are not read: they take no disk space, so a command can make terabytes of them in no
    time. Zeros that were written give the same result as a hole.

    Args:
        fd: The file.
        size: Its size.
        update: Called with each block that is not all zeros.

    Returns:
        Start and end of each run of blocks of zeros; empty without one.
    """
    runs: list[bytes] = []
    at = hashed = 0  # what lies between `hashed` and `at` are zeros
    while at < size and (block := os.pread(fd, len(_ZEROS), at)):
        if _ZEROS.startswith(block):
            at = _next_data(fd, at + len(block), size)
            continue
        if hashed < at:
            runs.append(_RUN.pack(hashed, at))
        update(block)
        at = hashed = at + len(block)
    if hashed < size:
        runs.append(_RUN.pack(hashed, size))
    return b"".join(runs)


def _next_data(fd: int, at: int, size: int) -> int:
    """Return the start of the first block from ``at`` on that is not wholly in a hole; ``size`` if there is none."""
    try:
        data = os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        raise
    return data - data % len(_ZEROS)


def is_opaque(visit: Visit, form: OverlayForm) -> bool:
    """Return whether a directory of a layer hides the same directory of lower layers."""
    fd = os.open(visit.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=visit.dir_fd)
    try:
        return os.getxattr(fd, form.opaque) in (b"y", b"x")
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        os.close(fd)


def scan(upper: Path, form: OverlayForm = ROOT_FORM) -> Node:
    """Return the changes in an upper directory of an overlay as a tree, without the entries that `is_noise` names.

    Args:
        upper: The upper directory, which is not mounted.
        form: Its on-disk form.

    Raises:
        OSError: It cannot be read.
    """
    open_dirs: list[tuple[str, dict[str, Node]]] = [("", {})]
    seen: dict[int, tuple[bytes, bytes]] = {}  # by inode: a file with many hard links is read once
    hidden = 0  # depth of the noise directory the walk is in
    for visit in walk(upper):
        if hidden and visit.depth > hidden:
            continue
        del open_dirs[visit.depth :]
        parent, children = open_dirs[-1]
        hidden = visit.depth if is_noise(visit.name, parent) else 0
        if hidden:
            continue
        inode = visit.info.st_ino if visit.info.st_nlink > 1 and not visit.is_dir else 0
        kind, mark = seen.get(inode) or _mark(visit.name, visit.info, visit.dir_fd, form)
        if inode:
            seen[inode] = kind, mark
        below: dict[str, Node] = {}
        opaque = kind == b"d" and is_opaque(visit, form)
        children[visit.name] = Node(kind, mark, opaque, below if kind == b"d" else _EMPTY)
        if kind == b"d":
            open_dirs.append((visit.name, below))
    return Node(b"d", children=open_dirs[0][1])


def scan_packed(upper: Path, form: OverlayForm) -> bytes:
    """Return ``pack(scan(upper, form))``, which another process can send back."""
    return pack(scan(upper, form))


def fold(below: Node, layer: Node) -> Node:
    """Return ``layer`` merged over ``below``; neither is changed. Not recursive: trees may be thousands deep."""
    plan: list[tuple[Node, Node | None, int, str, bool]] = [(layer, below, -1, "", layer.opaque)]
    at = 0
    while at < len(plan):
        over, under, _, _, opaque = plan[at]
        if over.kind == b"d":
            merged = under if under is not None and under.kind == b"d" and not opaque else None
            for name, child in over.children.items():
                found = None if merged is None else merged.children.get(name)
                # A directory in place of a file or whiteout hides what the base tree has at that path.
                hides = child.opaque or (found is not None and found.kind != b"d")
                plan.append((child, found, at, name, hides))
        at += 1
    built: list[dict[str, Node]] = [{} for _ in plan]
    result = below
    for index in range(len(plan) - 1, -1, -1):
        over, under, parent, name, opaque = plan[index]
        node = over
        if over.kind == b"d":
            keep = under is not None and under.kind == b"d" and not opaque
            children = dict(under.children) | built[index] if keep and under is not None else built[index]
            node = Node(b"d", over.mark, opaque or (keep and under is not None and under.opaque), children)
        if parent < 0:
            result = node
        else:
            built[parent][name] = node
    return result


def own_entries(tree: Node, layer: Node) -> int:
    """Return how many directory entries ``tree`` does not share: those of the directories that ``layer`` changed.

    Args:
        tree: ``layer`` merged over another tree.
        layer: The changes.
    """
    count = 0
    todo = [(tree, layer)]
    while todo:
        node, over = todo.pop()
        count += 1 + len(node.children)
        todo.extend((node.children[name], child) for name, child in over.children.items() if child.kind == b"d")
    return count


def tree_digest(root: Node, base: Path, base_id: str, form: OverlayForm = ROOT_FORM) -> str:
    """Return ``sha256:<hex>`` of a merged tree relative to the base tree, and store the digests of its nodes in them.

    Args:
        root: The changes of all layers together.
        base: Root directory of the base tree.
        base_id: Id of the base tree, which is part of the digest.
        form: On-disk form of the layers.

    Raises:
        OSError: The base tree cannot be read.
    """
    base_fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # name, node, index of the parent, opaque (its own or inherited), whether the base has the parent directory
        plan: list[tuple[str, Node, int, bool, bool]] = [("", root, -1, root.opaque, True)]
        dirs = [b"."]
        at = 0
        while at < len(plan):
            _, node, _, opaque, above = plan[at]
            if node.digest is None and node.kind == b"d":
                # Checked level by level: following a symlink of the base tree could lead to files of the host.
                here = above and _is_directory(dirs[at], base_fd)
                for child_name, child in node.children.items():
                    plan.append((child_name, child, at, opaque or child.opaque, here))
                    # The base tree has no longer paths, and building them for a deep tree would take quadratic time.
                    deep = len(dirs[at]) >= _PATH_MAX
                    dirs.append(dirs[at] if deep else dirs[at] + b"/" + os.fsencode(child_name))
            at += 1
        for index in range(len(plan) - 1, -1, -1):
            name, node, parent, opaque, above = plan[index]
            if node.digest is None:
                there = base_fd if above else None
                node.digest = _node_digest(node, dirs[index], name, opaque, there, form, is_root=parent < 0)
    finally:
        os.close(base_fd)
    return "sha256:" + hashlib.sha256(base_id.encode() + b"\0" + (root.digest or b"")).hexdigest()


def _is_directory(path: bytes, base_fd: int) -> bool:
    """Return whether the base tree has a directory at a path; False for a symlink."""
    if len(path) >= _PATH_MAX:
        return False
    try:
        return stat.S_ISDIR(os.stat(path, dir_fd=base_fd, follow_symlinks=False).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _node_digest(
    node: Node, path: bytes, name: str, opaque: bool, base_fd: int | None, form: OverlayForm, *, is_root: bool
) -> bytes:
    """Return the digest of a node whose children have theirs; b"" if the base tree has the same entry.

    ``base_fd`` is None if the base tree does not have the parent directory.
    """
    theirs: tuple[bytes, bytes] | None = None
    names: list[str] = []
    if base_fd is not None and len(path) < _PATH_MAX:
        try:
            info = os.stat(path, dir_fd=base_fd, follow_symlinks=False)
            if node.kind == _GONE:
                return _GONE
            theirs = (b"d", b"") if is_root else _mark(os.fsdecode(path), info, base_fd, form)
            if theirs[0] == b"d" and node.kind == b"d" and opaque:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=base_fd)
                try:
                    names = os.listdir(fd)  # noqa: PTH208 - a descriptor, not a path
                finally:
                    os.close(fd)
        except (FileNotFoundError, NotADirectoryError):
            if node.kind == _GONE:
                return _SAME
    elif node.kind == _GONE:
        return _SAME
    own = _SAME if theirs == (node.kind, node.mark) else node.kind + node.mark
    parts = {child_name: child.digest or _SAME for child_name, child in node.children.items()}
    # Entries that an opaque directory hides count like entries with whiteouts.
    parts.update((hidden, _GONE) for hidden in names if hidden not in parts and not is_noise(hidden, name))
    rows = sorted((os.fsencode(child_name), digest) for child_name, digest in parts.items() if digest)
    if not own and not rows:
        return _SAME
    total = hashlib.sha256(own)
    for child_name, digest in rows:
        total.update(b"\0" + child_name + b"\0" + hashlib.sha256(digest).digest())
    return total.digest()


def pack(root: Node) -> bytes:
    """Serialize a tree for `unpack`."""
    rows: list[bytes] = []
    todo = [("", root, 0)]
    while todo:
        name, node, depth = todo.pop()
        raw = os.fsencode(name)
        rows.append(_ROW.pack(depth, node.kind[0], node.opaque, len(raw), node.mark) + raw)
        todo.extend((child_name, child, depth + 1) for child_name, child in node.children.items())
    return b"".join(rows)


def unpack(data: bytes) -> Node:
    """Return the tree that `pack` serialized."""
    open_dirs: list[dict[str, Node]] = []
    at, root = 0, ROOT
    while at < len(data):
        depth, kind, opaque, length, mark = _ROW.unpack_from(data, at)
        at += _ROW.size
        name = os.fsdecode(data[at : at + length])
        at += length
        children: dict[str, Node] = {}
        node = Node(bytes([kind]), mark if depth and kind != _GONE[0] else b"", bool(opaque), children)
        del open_dirs[depth:]
        if depth:
            open_dirs[-1][name] = node
        else:
            root = node
        open_dirs.append(children)
    return root

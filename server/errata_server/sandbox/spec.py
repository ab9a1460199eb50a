"""`SandboxSpec`: the work directory, variables and files of a sandbox before the agent's first command.

This module checks everything that needs no machine. `Backend.open` refuses what depends on the base tree, such as a
path that leads through a regular file or into another file system.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

WORKSPACE = "/workspace"
"""The default work directory."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of the first command; `SandboxSpec.env` may extend it."""
MAX_ENV_BYTES = 16 * 1024
"""Limit on all names and values of `SandboxSpec.env`: they become part of the shell state, which is limited too."""

Owner = Literal["agent", "root"]

_KERNEL = ("/proc", "/sys", "/dev")
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/boot", "/run")
_SHARED = ("/", "/usr", "/usr/src", "/var", "/var/lib", "/home")
"""Directories with files of other owners: they cannot be a work directory. A directory below them can, unless it is in
`_SYSTEM` or /usr."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PATH_MAX = 4096


class SpecRefused(ValueError):
    """A `SandboxSpec` is invalid or does not fit the base tree; the message names the field and what to change."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory to make, with its parents. An existing directory keeps its content.

    Args:
        path: Absolute path.
        mode: Permission bits; None for 0o755 if it is new, else unchanged.
        owner: Its owner; None for root if it is new, else unchanged.
    """

    path: str
    mode: int | None = None
    owner: Owner | None = None


@dataclass(frozen=True, slots=True)
class File:
    """A regular file to make, with its parents. An existing file or symlink is replaced; a symlink is not followed.

    Args:
        path: Absolute path.
        content: The content.
        mode: Permission bits.
        owner: Its owner.
    """

    path: str
    content: bytes
    mode: int = 0o644
    owner: Owner = "root"


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symlink to make, with its parents; root owns it. An existing file or symlink is replaced.

    Args:
        path: Absolute path.
        target: The path that it points to, inside the sandbox; it need not exist.
    """

    path: str
    target: str


Entry = Directory | File | Symlink


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """The initial state of a sandbox. Sandboxes that are restored or forked from it have the same work directory.

    Args:
        workdir: Working directory of the first command. It is made if it is missing, with its parents, which root owns.
            The agent becomes the owner of the directory itself, not of what the base tree has in it.
        env: Variables that are exported to the first command; they override the backend's own. Commands with
            ``clean=True`` do not have them.
        entries: Files, directories and symlinks, made in this order after the work directory. Paths may lead through
            symlinks of the base tree (``/bin/x`` is ``/usr/bin/x``). They do not count towards the session's limits.
        mtime_s: Modification time of everything that is made, in seconds since 1970; None for the current time.
        empty: Whether the sandbox goes without what the base tree has in the work directory.

    Raises:
        SpecRefused: A path, name or value is invalid.
    """

    workdir: str = WORKSPACE
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    entries: tuple[Entry, ...] = ()
    mtime_s: int | None = None
    empty: bool = False

    def __post_init__(self) -> None:
        check_workdir(self.workdir)
        for name, value in self.env.items():
            if not _NAME.match(name):
                raise SpecRefused(f"env: {name!r} is not a variable name: use letters, digits and _, no digit first")
            if "\0" in value:
                raise SpecRefused(f"env: the value of {name} contains a NUL byte")
        size = sum(len(_bytes(text)) for pair in self.env.items() for text in pair)
        if size > MAX_ENV_BYTES:
            raise SpecRefused(f"env: {size} bytes of variables, at most {MAX_ENV_BYTES}: put large values into a file")
        for entry in self.entries:
            _check_entry(entry)

    @property
    def makes_files(self) -> bool:
        """Whether anything has to be made on disk, rather than using the base tree unchanged."""
        return self.workdir != WORKSPACE or bool(self.entries) or self.empty


def check_workdir(path: str) -> None:
    """Check that a path can be a work directory.

    Raises:
        SpecRefused: It is not absolute and normalized, or it is a system directory: as its owner the agent could
            replace programs that verifiers run.
    """
    _check_path(path, "work directory")
    below_usr_src = path.startswith("/usr/src/")
    owned = next((root for root in (*_SYSTEM, "/usr") if _is_within(path, root)), None)
    if path in _SHARED or (owned is not None and not below_usr_src):
        raise SpecRefused(
            f"work directory {path}: {owned or path} belongs to the system: choose one of its own, such as /app, "
            "/testbed, /home/agent/x or /usr/src/x"
        )


def _check_entry(entry: Entry) -> None:
    """Raise SpecRefused for an invalid path, link target, mode or owner."""
    _check_path(entry.path, "entry")
    if entry.path == "/":
        raise SpecRefused("entry /: the root directory stays as it is")
    if isinstance(entry, Symlink):
        if not entry.target or "\0" in entry.target or len(_bytes(entry.target)) >= _PATH_MAX:
            raise SpecRefused(f"entry {entry.path}: a link's target is 1 to {_PATH_MAX - 1} bytes without NUL")
        return
    if entry.mode is not None and not 0 <= entry.mode <= 0o1777:
        # Set-uid and set-gid bits have no effect in a sandbox (no_new_privs, nosuid): better refused than ignored.
        raise SpecRefused(f"entry {entry.path}: mode {entry.mode:#o} is not within 0o1777")
    if entry.owner not in ("agent", "root", *((None,) if isinstance(entry, Directory) else ())):
        raise SpecRefused(f"entry {entry.path}: owner {entry.owner!r} is neither 'agent' nor 'root'")


def _check_path(path: str, what: str) -> None:
    """Raise SpecRefused for a path that is not absolute and normalized, too long, or in /proc, /sys or /dev."""
    if not path.startswith("/"):
        raise SpecRefused(f"{what} {path!r}: give an absolute path")
    if "\0" in path or ".." in path.split("/"):
        raise SpecRefused(f"{what} {path!r}: give it without '..' and NUL")
    if posixpath.normpath(path) != path or path.startswith("//"):
        raise SpecRefused(f"{what} {path!r}: write {posixpath.normpath(path.replace('//', '/'))!r}")
    if len(_bytes(path)) >= _PATH_MAX or any(len(_bytes(part)) > 255 for part in path.split("/")):
        raise SpecRefused(f"{what} {path[:80]!r}...: too long for the kernel (255 bytes a name, 4095 a path)")
    inside = next((root for root in _KERNEL if _is_within(path, root)), None)
    if inside is not None:
        raise SpecRefused(f"{what} {path}: {inside} belongs to the kernel")


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _bytes(text: str) -> bytes:
    """Encode text as UTF-8, restoring undecodable bytes; raise SpecRefused for other surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SpecRefused(f"{text[:80]!r} cannot be encoded as UTF-8: {error.reason}") from None

"""`SandboxSpec`: what stands in a sandbox before the agent's first command: work directory, variables, files.

Everything is checked here without a machine; what only the base tree can tell (a path that leads through a file, a
directory on a mount of its own) is refused by `Backend.open`.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

WORKSPACE = "/workspace"
"""The work directory of a sandbox that names no other."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of the first command, for whoever puts a directory before or behind it."""
MAX_ENV_BYTES = 16 * 1024
"""Names and values of `SandboxSpec.env` together: they are part of the shell state, which has a bound of its own."""

Owner = Literal["agent", "root"]

_KERNEL = ("/proc", "/sys", "/dev")
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/boot", "/run")
_SHARED = ("/", "/usr", "/usr/src", "/var", "/var/lib", "/home")
"""Others live below these, so they cannot be a work directory; a directory below may, but for `_SYSTEM` and /usr."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_PATH_MAX = 4096


class SpecRefused(ValueError):
    """A `SandboxSpec` that no sandbox can start with; the message names the field and what to change."""


@dataclass(frozen=True, slots=True)
class Directory:
    """A directory to make, with its parents. One that is there keeps what is in it.

    Args:
        path: Absolute.
        mode: Permission bits; None: 0o755 for a new one, unchanged for one that is there.
        owner: Who owns it; None: root owns a new one, one that is there keeps its owner.
    """

    path: str
    mode: int | None = None
    owner: Owner | None = None


@dataclass(frozen=True, slots=True)
class File:
    """A regular file to make, with its parents. A file or link that is there is replaced, never written through.

    Args:
        path: Absolute.
        content: Its bytes.
        mode: Permission bits.
        owner: Who owns it.
    """

    path: str
    content: bytes
    mode: int = 0o644
    owner: Owner = "root"


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symbolic link to make, with its parents; it belongs to root. A file or link that is there is replaced.

    Args:
        path: Absolute.
        target: Where it points, as seen inside the sandbox; it need not exist.
    """

    path: str
    target: str


Entry = Directory | File | Symlink


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """How a sandbox starts. Every sandbox that is restored or forked from it has the same work directory.

    Args:
        workdir: Where the first command runs. It exists and belongs to the agent, whatever the base tree has there;
            what the base tree has below it keeps its owners. Parents that are missing are made and belong to root.
        env: Variables that the first command finds exported, besides and over the backend's own. A command with
            ``clean=True`` does not see them.
        entries: Files, directories and links, made in this order, after the work directory. Paths may lead through
            links of the base tree (``/bin/x`` is ``/usr/bin/x``). They do not count against the session's limits.
        mtime_s: Modification time of all that is made, seconds since 1970; None: now.

    Raises:
        SpecRefused: A path, name or value that cannot be.
    """

    workdir: str = WORKSPACE
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    entries: tuple[Entry, ...] = ()
    mtime_s: int | None = None

    def __post_init__(self) -> None:
        check_workdir(self.workdir)
        for name, value in self.env.items():
            if not _NAME.match(name):
                raise SpecRefused(f"env: {name!r} is no name of a variable: letters, digits and _, no digit first")
            if "\0" in value:
                raise SpecRefused(f"env: the value of {name} contains a NUL byte")
        size = sum(len(_bytes(text)) for pair in self.env.items() for text in pair)
        if size > MAX_ENV_BYTES:
            raise SpecRefused(f"env: {size} bytes of variables, at most {MAX_ENV_BYTES}: put large values into a file")
        for entry in self.entries:
            _check_entry(entry)

    @property
    def makes_files(self) -> bool:
        """Something has to be made on disk: it is not the base tree as it stands."""
        return self.workdir != WORKSPACE or bool(self.entries)


def check_workdir(path: str) -> None:
    """Refuse a path that cannot be a work directory.

    Raises:
        SpecRefused: It is not absolute and normalized, or it is the system's: a directory of the agent's there would
            give it the programs that verifiers run.
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
    _check_path(entry.path, "entry")
    if entry.path == "/":
        raise SpecRefused("entry /: the root directory stays as it is")
    if isinstance(entry, Symlink):
        if not entry.target or "\0" in entry.target or len(_bytes(entry.target)) >= _PATH_MAX:
            raise SpecRefused(f"entry {entry.path}: a link's target is 1 to {_PATH_MAX - 1} bytes without NUL")
        return
    if entry.mode is not None and not 0 <= entry.mode <= 0o1777:
        # Set-uid and set-gid have no effect in a sandbox (no_new_privs, nosuid), so they would only mislead.
        raise SpecRefused(f"entry {entry.path}: mode {entry.mode:#o} is not within 0o1777")
    if entry.owner not in ("agent", "root", *((None,) if isinstance(entry, Directory) else ())):
        raise SpecRefused(f"entry {entry.path}: owner {entry.owner!r} is neither 'agent' nor 'root'")


def _check_path(path: str, what: str) -> None:
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
        raise SpecRefused(f"{what} {path}: {inside} is the kernel's")


def _is_within(path: str, root: str) -> bool:
    return path == root or path.startswith(root + "/")


def _bytes(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise SpecRefused(f"{text[:80]!r} has no bytes: {error.reason}") from None

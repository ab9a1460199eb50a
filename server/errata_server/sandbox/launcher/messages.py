"""Types of what the server sends to the launcher and to a runner's child, and of the launcher's slots.

All of it is sent with `marshal` over sequential-packet sockets between two programs of the same version. The launcher
imports this module for type checking only: `typing` is too large for a process that is forked for every command.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

Slot = tuple[str, int, list[int], int | None]
"""Name; descriptors of the network namespace, of the ``cgroup.procs`` files and of the user namespace (None if
commands share a host uid)."""

PlanRow = tuple[Literal["d", "f", "l", "x"], bytes, Any, Any, Any]
"""One entry to make before the first command: ``(kind, path, mode, owner, payload)``.

Kind is ``d`` for a directory, ``f`` for a file, ``l`` for a symlink, ``x`` to remove what is there with all below it.
``mode`` and ``owner`` (a uid) are None where an existing directory keeps its own, and always set for a file.
``payload`` is the mode of a new directory, the size of a file's content in bytes, or a link's target.
"""


class LauncherConfig(TypedDict):
    """The first message to the launcher.

    Keys:
        server: Pid of the server; the launcher ends when that process does.
        data: The backend's directory.
        home: The directory of the layers, to which paths in mount options are relative.
        stage: An empty directory to mount on.
        cgroups: One directory per cgroup hierarchy, below which slots get a cgroup each.
        own_cgroups: ``cgroup.procs`` files that the launcher moves itself into.
        overlay: Mount options of every overlay, joined by commas.
        rootless: The server does not run as root.
        uid: The agent's uid and gid inside a sandbox.
        hidden: Directories of base trees, relative to their root, that are empty in sandboxes unless a request mounts
            something on them.
        first_uid: First of the host uids of commands; None in rootless mode.
        seccomp: BPF program of the system call filter.
    """

    server: int
    data: str
    home: str
    stage: str
    cgroups: list[str]
    own_cgroups: list[str]
    overlay: str
    rootless: bool
    uid: int
    hidden: list[str]
    first_uid: int | None
    seccomp: bytes


class _Request(TypedDict):
    """What every request to a runner's child has.

    Keys:
        lower: Paths of the layers for ``lowerdir=``, joined by colons; empty without layers.
        base: Path of the base tree for ``lowerdir=``.
        base_root: Absolute path of the base tree.
        upper: Path for ``upperdir=``.
        work: Path for ``workdir=``.
        mapped: The base tree can be mounted id-mapped.
        mounts: Read-only bind mounts: path on the host, path in the sandbox.
        writable: Directories and files below the root that stay writable in rootless mode.
        rlimits: Resource limits: number, (soft, hard).
        own_processes: RLIMIT_NPROC (soft, hard), where the command has a uid or user namespace of its own.
    """

    lower: str
    base: str
    base_root: str
    upper: str
    work: str
    mapped: bool
    mounts: list[tuple[str, str]]
    writable: tuple[str, ...]
    rlimits: list[tuple[int, tuple[int, int]]]
    own_processes: tuple[int, int]


class RunRequest(_Request):
    """Execute bash. Comes with descriptors of stdin, stdout, stderr and, unless ``clean``, the shell's state."""

    do: Literal["run"]
    cwd: bytes
    argv: list[bytes]
    env: dict[bytes, bytes]


class ReadRequest(_Request):
    """Copy at most ``max_bytes`` of a file to the descriptor that comes with the request."""

    do: Literal["read"]
    path: bytes
    max_bytes: int


class WriteRequest(_Request):
    """Replace a file's content by that of the descriptor that comes with the request."""

    do: Literal["write"]
    path: bytes
    mode: int | None


class PrepareRequest(_Request):
    """Make the entries of a plan.

    The descriptor that comes with the request holds the plan, a marshalled list of `PlanRow` (``plan_bytes`` bytes),
    then the contents of its files.
    """

    do: Literal["prepare"]
    plan_bytes: int
    parent_mode: int
    changes_owners: bool
    mtime_s: int | None


Request = RunRequest | ReadRequest | WriteRequest | PrepareRequest

"""The sandbox seam: run commands and keep files of one session apart from the host and from every other session.

A backend holds many sandboxes. Between two commands a sandbox owns no process and no mount: it is a directory (or
nothing at all until it is first used), so an idle session costs disk only and survives a crash of the server.

Files are kept as a read-only *base tree* plus a chain of frozen *layers*. `Sandbox.snapshot` freezes what changed
since the last one as a new layer, in O(what changed), and returns the same layer when nothing did. `restore` starts
another sandbox from a snapshot in O(1): that is also what fork is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from errata_protocol.environment import SnapshotRef

from .spec import WORKSPACE as WORKSPACE
from .spec import SandboxSpec

Verdict = Literal["ok", "worse", "missing"]

LimitHit = Literal["memory", "pids", "file_size", "disk", "inodes", "cpu", "output"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one sandbox. A backend says in `BackendInfo.enforces` which of them it can hold here.

    Args:
        memory_bytes: Memory of all processes of one command together.
        pids: Processes and threads of one command.
        file_size_bytes: Largest single file.
        disk_bytes: What a session may add to its layers since its last snapshot.
        inodes: Files and directories a session may add since its last snapshot.
        cpu_s: CPU seconds of one command.
        keep_bytes: How much of each of stdout and stderr is kept: head and tail, with a mark between.
        output_bytes: Output after which the command is killed with ``limit_hit="output"``. Far above what any
            honest command prints: output is always drained, and past 16 MiB it is drained slowly.
        open_files: RLIMIT_NOFILE.
    """

    memory_bytes: int = 512 * 1024**2
    pids: int = 128
    file_size_bytes: int = 64 * 1024**2
    disk_bytes: int = 256 * 1024**2
    inodes: int = 50_000
    cpu_s: int = 600
    keep_bytes: int = 32 * 1024
    output_bytes: int = 4 * 1024**3
    open_files: int = 1024


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What one command did.

    Args:
        exit_code: The shell's exit status (128+n for signal n); None when the command was killed at its timeout.
        stdout: Kept output, decoded as UTF-8; undecodable bytes as ``\\xNN`` (backslashreplace), so always valid JSON.
        stderr: Likewise.
        duration_s: Wall time.
        timed_out: It was killed at ``timeout_s``.
        limit_hit: Which limit ended or broke it, None if none did.
        killed_background: Command names of processes that were still alive when the command ended, and were killed.
        stdout_bytes: All that was written, kept or not.
        stderr_bytes: Likewise.
        truncated: Something of stdout or stderr was not kept.
        shell_saved: The next command continues with this one's shell state. False when it left none (``exec``, a kill,
            a timeout) or one above 32 KiB: then the next one starts from the state before this command.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    duration_s: float = 0.0
    timed_out: bool = False
    limit_hit: LimitHit | None = None
    killed_background: tuple[str, ...] = ()
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False
    shell_saved: bool = True


@dataclass(frozen=True, slots=True)
class SandboxSnapshot:
    """A sandbox at one moment.

    Args:
        ref: The newest frozen layer (``kind="layer"``), or the base tree (``kind="base"``) when no file changed.
        shell: Saved shell state (cwd, exported variables, functions, options, umask), opaque, at most 32 KiB. It is
            small and belongs into `errata_protocol.environment.Snapshot.state`; the files belong into ``ref``.
    """

    ref: SnapshotRef
    shell: bytes = b""


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What `Backend.collect` removed: layers, sandbox directories, bytes."""

    layers: int = 0
    sandboxes: int = 0
    size_bytes: int = 0


class PathRefused(ValueError):
    """A path given to read_file or write_file that names no regular file the agent itself could use.

    The message is in the words of the shell (``No such file or directory``, ``Permission denied``, ``Is a
    directory``), because it becomes the agent's observation.

    Args:
        path: As given.
        reason: errno name, e.g. ``ENOENT``.
        message: The shell's words.
    """

    def __init__(self, path: str, reason: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.reason = reason
        self.message = message


class Sandbox(ABC):
    """One session's shell and files. Calls on one sandbox are made one after the other.

    Every method raises `errata_protocol.errors.SandboxFailed` when the machinery breaks; a command that fails is a
    `CommandResult`.
    """

    id: str

    @property
    @abstractmethod
    def workdir(self) -> str:
        """The work directory: `SandboxSpec.workdir` of the `Backend.open` that this sandbox comes from."""

    @property
    @abstractmethod
    def cwd(self) -> str:
        """The shell's current directory, after the last command; undecodable bytes as ``\\xNN``."""

    @abstractmethod
    async def run(
        self,
        command: str,
        *,
        timeout_s: float = 30.0,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        clean: bool = False,
        mounts: Mapping[str, Path] | None = None,
    ) -> CommandResult:
        """Run ``command`` in bash and wait for it; whatever it leaves running is killed and reported.

        Args:
            command: Shell text. The saved state of the last command (cwd, exported variables, functions, options,
                umask) is restored first and saved afterwards; ``exec``, a kill of the shell or a timeout keep the
                previous state.
            timeout_s: Wall time after which every process of the command is killed (``timed_out``).
            stdin: Bytes on standard input; None gives an empty one.
            env: Further variables for this command only.
            clean: No saved shell state is restored or saved; PATH and HOME come from the backend, cwd is ``/``.
                For verifiers.
            mounts: Read-only binds of host directories, by path inside, for this command only. For verifiers.
        """

    @abstractmethod
    async def read_file(self, path: str, *, max_bytes: int = 1024**2) -> bytes:
        """Return at most ``max_bytes`` of a regular file, opened inside the sandbox as its user.

        Args:
            path: Absolute, or relative to the shell's saved cwd. A symlink cannot lead out of the sandbox.

        Raises:
            PathRefused: The file does not exist, is not regular, or its user may not read it.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Create or replace a regular file inside the sandbox as its user, parent directories included.

        Raises:
            PathRefused: The user of the sandbox may not write there, or the path is not a regular file.
        """

    @abstractmethod
    async def snapshot(self) -> SandboxSnapshot:
        """Freeze what changed since the last snapshot and name it. O(changes); the sandbox goes on undisturbed."""

    @abstractmethod
    async def merged_digest(self) -> str:
        """Return ``sha256:<hex>`` over all files above the base tree, equal for equal trees however they came about."""

    @abstractmethod
    async def destroy(self) -> None:
        """End every process and drop what no snapshot names. Idempotent; a destroyed sandbox refuses further calls."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a backend can do on this machine.

    Args:
        name: ``namespace``, ``fake``, ``docker``.
        enforces: Names of `Limits` fields it holds.
        notes: One line for each thing it cannot do here, with the way to get it.
        mode: ``root`` or ``rootless``; empty where there is but one.
        cgroups: Version of the cgroups that hold memory and pids, 2 or 1; 0 where there are none to use.
    """

    name: str
    enforces: frozenset[str] = field(default_factory=frozenset)
    notes: tuple[str, ...] = ()
    mode: str = ""
    cgroups: int = 0


class Backend(ABC):
    """Makes sandboxes and owns their layers on disk. One per server process and data directory."""

    @abstractmethod
    async def start(self) -> BackendInfo:
        """Check the machine, kill what a dead owner left running, and get ready. Idempotent.

        Raises:
            errata_protocol.errors.SandboxUnavailable: A privilege or tool is missing: one line that names it and says
                how to get it. There is no unsandboxed fallback.
        """

    @property
    def running(self) -> int:
        """Commands that run now; 0 where nothing outlives a call."""
        return 0

    @property
    def trouble(self) -> str | None:
        """Why no command can be run now, for ``/ready``; None when all is well."""
        return None

    @abstractmethod
    async def open(
        self, *, base: str = "default", limits: Limits | None = None, spec: SandboxSpec | None = None
    ) -> Sandbox:
        """Return a new sandbox on a base tree.

        Costs O(1), and nothing is on disk before the first command, unless ``spec`` has files or another work
        directory: these are made now, in O(what it makes), and frozen as the sandbox's first layer.

        Args:
            base: Name of the base tree.
            limits: Of this sandbox; None for the backend's.
            spec: What stands in it before the first command; None: the base tree and `WORKSPACE`.

        Raises:
            SpecRefused: The base tree has something else where ``spec`` wants an entry.
            errata_protocol.errors.SandboxFailed: The machinery broke.
        """

    @abstractmethod
    async def restore(self, snapshot: SandboxSnapshot, *, limits: Limits | None = None) -> Sandbox:
        """Return a new sandbox that continues from ``snapshot``, which stays as it is. O(1): this is also fork.

        It has the work directory of the sandbox that the snapshot is of. Without ``SandboxSnapshot.shell`` it starts
        there, with the backend's own variables.

        Raises:
            errata_protocol.errors.SandboxFailed: A layer or the base tree that the snapshot names is not there.
        """

    @abstractmethod
    async def collect(self, keep: Iterable[SnapshotRef]) -> CollectReport:
        """Delete every layer that neither ``keep`` (with its ancestors) nor a live sandbox or its snapshots need.

        At start, before any sandbox is open, this also removes the directories of the dead owner's sandboxes.
        """

    @abstractmethod
    async def close(self) -> None:
        """Kill what runs, destroy open sandboxes' writable parts and release the machine. Idempotent."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``errata doctor``.

    Args:
        name: What was tried.
        verdict: ``ok``; ``worse``: it works and costs something; ``missing``: ``errata serve terminal`` would not work.
        says: What was found.
        costs: What is lost, empty when nothing is.
        fix: The command or step that changes it, empty when there is nothing to change.
        of_sandboxes: Only environments that run commands in sandboxes need it.
    """

    name: str
    verdict: Verdict
    says: str
    costs: str = ""
    fix: str = ""
    of_sandboxes: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a backend works, as the operator chose.

    Args:
        directory: For the backend's files; it may not exist yet.
        bases: Base trees the operator named, by name.
        reserve_bytes: Space to keep free on the disk of ``directory``, at least.
    """

    directory: Path
    bases: Mapping[str, Path] = field(default_factory=dict)
    reserve_bytes: int = 0

    def nearest(self) -> Path:
        """Return the directory, or the nearest one above it that exists."""
        here = self.directory.absolute()
        return next(path for path in (here, *here.parents) if path.is_dir())


class BackendType(ABC):
    """One kind of backend, as an entry point of the group ``errata.sandboxes`` names it.

    To add one, subclass this in a package of its own and name the class in an entry point; `registry` finds it, and the
    setting ``sandbox`` chooses it.

    Attributes:
        unfit_file_systems: Kinds of file systems, as the mount table names them, on which its directory cannot lie,
            each with the reason.
        descriptors: File descriptors of the server that all its commands together may take.
        snapshots_each_step: A snapshot costs little enough to be taken after each step. Where it does not, sessions of
            environments that run commands come back by re-execution if they are declared deterministic, else not.
    """

    unfit_file_systems: Mapping[str, str] = MappingProxyType({})
    descriptors: int = 0
    snapshots_each_step: bool = True

    @abstractmethod
    def create(self, place: Place) -> Backend:
        """Return a backend that works in a place; nothing is touched before `Backend.start`."""

    def checks(self, place: Place, *, usable: bool) -> Iterator[Finding]:
        """Yield what this kind of backend finds on this machine, for ``errata doctor``; each may take seconds.

        Args:
            place: Where it would work; nothing may be left there.
            usable: Files can be made there; else nothing that needs any is tried.
        """
        yield from ()

    def size_bytes(self, directory: Path) -> int:
        """Return the disk space of what a backend keeps in ``directory``, for ``errata journal size``."""
        total = 0
        for path in directory.rglob("*"):
            try:
                if path.is_file() and not path.is_symlink():
                    total += path.stat().st_blocks * 512
            except OSError:  # a running server deleted it, or it is a sandbox's own
                continue
        return total

"""The sandbox interface: runs a session's commands and keeps its files, isolated from the host and other sessions.

A backend holds many sandboxes. Between two commands a sandbox owns no process and no mount: it is a directory (or
nothing at all until it is first used), so an idle session costs disk only and survives a crash of the server.

Files are kept as a read-only *base tree* plus a chain of frozen *layers*. `Sandbox.snapshot` freezes the changes since
the last snapshot as a new layer, at a cost proportional to the changes, and returns the same layer if there are none.
`Backend.restore` starts another sandbox from a snapshot in constant time; a fork is such a restore.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from errata_os.division import Division, own_division
from errata_protocol.environment import SnapshotRef

from .spec import WORKSPACE as WORKSPACE
from .spec import SandboxSpec

Verdict = Literal["ok", "worse", "missing"]

LimitHit = Literal["memory", "pids", "file_size", "disk", "inodes", "cpu", "output"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one sandbox. `BackendInfo.enforces` names those that a backend can enforce on this machine.

    Args:
        memory_bytes: Memory of all processes of one command together.
        pids: Processes and threads of one command.
        file_size_bytes: Largest single file.
        disk_bytes: Space that a session may use for changes since its last snapshot.
        inodes: Files and directories a session may add since its last snapshot.
        cpu_s: CPU seconds of one command.
        keep_bytes: How much of each of stdout and stderr is kept: its beginning and end, with a line between that says
            how much is missing.
        output_bytes: Output after which the command is killed with ``limit_hit="output"``. Much more than ordinary
            commands print: up to this limit all output is read, after 16 MiB at a limited rate.
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
    """The result of one command.

    Args:
        exit_code: The shell's exit status (128+n for signal n); None when the command was killed at its timeout.
        stdout: The kept part of standard output, decoded as UTF-8; undecodable bytes become ``\\xNN``
            (backslashreplace), so it is always valid JSON.
        stderr: The kept part of standard error, decoded in the same way.
        duration_s: Wall time.
        timed_out: The command was killed at ``timeout_s``.
        limit_hit: The limit that ended the command or made it fail; None if none did.
        killed_background: Command names of processes that were still alive when the command ended, and were killed.
        stdout_bytes: Bytes written to standard output, kept or not.
        stderr_bytes: Bytes written to standard error, kept or not.
        truncated: A part of stdout or stderr was not kept.
        shell_saved: The next command continues with this command's shell state. False if it left none (``exec``, a
            kill, a timeout) or more than 32 KiB; then the next command starts from the state before this one.
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
        shell: Saved shell state (cwd, exported variables, functions, options, umask), opaque, at most 32 KiB. Keep it
            in `errata_protocol.environment.Snapshot.state`; ``ref`` names the files.
    """

    ref: SnapshotRef
    shell: bytes = b""


@dataclass(frozen=True, slots=True)
class CollectReport:
    """What `Backend.collect` deleted.

    Args:
        layers: Number of layers.
        sandboxes: Number of directories of sandboxes of earlier processes.
        size_bytes: Disk space that was freed.
    """

    layers: int = 0
    sandboxes: int = 0
    size_bytes: int = 0


class PathRefused(ValueError):
    """A path given to read_file or write_file names no regular file that the agent may read or write.

    The message is worded as by the shell (``No such file or directory``, ``Permission denied``, ``Is a directory``),
    because it becomes the agent's observation.

    Args:
        path: The path as given.
        reason: Name of the errno, e.g. ``ENOENT``.
        message: Text of the errno, as strerror(3) gives it.
    """

    def __init__(self, path: str, reason: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.reason = reason
        self.message = message


class Sandbox(ABC):
    """One session's shell and files. The caller makes one call at a time.

    Every method raises `errata_protocol.errors.SandboxFailed` if the sandbox itself fails or was destroyed. A command
    that fails is not an error: `run` returns its `CommandResult`.
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
        """Run ``command`` in bash and wait until it ends; processes that it leaves running are killed and reported.

        Args:
            command: Shell text. The shell state that the last command saved (cwd, exported variables, functions,
                options, umask) is restored first, and saved again at the end. After ``exec``, a kill of the shell or a
                timeout the previous state stays.
            timeout_s: Wall time after which every process of the command is killed (``timed_out``).
            stdin: Content of standard input; None for an empty one.
            env: Further variables for this command only.
            clean: Neither restore nor save the shell state; PATH and HOME come from the backend, cwd is ``/``. For
                verifiers.
            mounts: Directories of the host by their path in the sandbox, mounted read-only for this command only. For
                verifiers.

        Raises:
            ValueError: A path in ``mounts`` is not absolute or has ``..``, or ``env`` has an invalid variable name.
        """

    @abstractmethod
    async def read_file(self, path: str, *, max_bytes: int = 1024**2) -> bytes:
        """Return the first ``max_bytes`` bytes of a regular file, opened inside the sandbox as the agent's user.

        Args:
            path: Absolute, or relative to the shell's saved cwd. A symlink cannot lead out of the sandbox.
            max_bytes: The most to read; a longer file is cut off without an error.

        Raises:
            PathRefused: The file does not exist, is not regular, or the agent may not read it.
        """

    @abstractmethod
    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        """Create or overwrite a regular file inside the sandbox as the agent's user; make missing parent directories.

        Args:
            path: Absolute, or relative to the shell's saved cwd.
            data: The new content.
            mode: Permission bits to set; None keeps those of an existing file.

        Raises:
            PathRefused: The agent may not write there, the path is not a regular file, or a limit would be exceeded.
        """

    @abstractmethod
    async def snapshot(self) -> SandboxSnapshot:
        """Freeze the changes since the last snapshot as a layer and return its name.

        Costs O(changes). Without changes it returns the last layer again. The sandbox can be used further.
        """

    @abstractmethod
    async def merged_digest(self) -> str:
        """Return ``sha256:<hex>`` over the differences from the base tree; equal trees have equal digests.

        Times, link counts and caches that embed times (``__pycache__`` and the like) do not count.
        """

    @abstractmethod
    async def destroy(self) -> None:
        """Kill every process and delete the changes since the last snapshot.

        Further calls on the sandbox raise `SandboxFailed`, except this one, which then does nothing.
        """


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a backend can do on this machine.

    Args:
        name: ``namespace``, ``fake`` or ``docker``.
        enforces: Names of the `Limits` fields that it enforces.
        notes: One line for each thing that it cannot do on this machine, with what to change.
        mode: ``root`` or ``rootless``; empty if the backend has one mode only.
        cgroups: Version of the cgroups that limit memory and pids, 2 or 1; 0 if none can be used.
    """

    name: str
    enforces: frozenset[str] = field(default_factory=frozenset)
    notes: tuple[str, ...] = ()
    mode: str = ""
    cgroups: int = 0


class Backend(ABC):
    """Makes sandboxes and owns their layers on disk. There is one per server process and data directory."""

    @abstractmethod
    async def start(self) -> BackendInfo:
        """Check the machine, end what a server that was killed left running, and get ready. Idempotent.

        Raises:
            errata_protocol.errors.SandboxUnavailable: A privilege or tool is missing. The message, one line, names it
                and says how to get it. There is no fallback without a sandbox.
        """

    @property
    def running(self) -> int:
        """Number of commands that are running now; 0 for a backend without processes."""
        return 0

    @property
    def trouble(self) -> str | None:
        """The reason why no command can be run now, for ``/ready``; None if commands can be run."""
        return None

    @abstractmethod
    async def open(
        self, *, base: str = "default", limits: Limits | None = None, spec: SandboxSpec | None = None
    ) -> Sandbox:
        """Return a new sandbox on a base tree.

        Takes constant time and writes nothing to disk before the first command, unless ``spec`` has files or another
        work directory than `WORKSPACE`: these are made now and frozen as the sandbox's first layer.

        Args:
            base: Name of the base tree.
            limits: Limits of this sandbox; None for the backend's.
            spec: Work directory, variables and files before the first command; None for the base tree and `WORKSPACE`.

        Raises:
            SpecRefused: The base tree has something at the path of an entry of ``spec`` that the entry cannot replace.
            errata_protocol.errors.SandboxUnavailable: There is no such base tree, or `start` failed.
            errata_protocol.errors.SandboxFailed: The sandbox could not be made.
        """

    @abstractmethod
    async def restore(self, snapshot: SandboxSnapshot, *, limits: Limits | None = None) -> Sandbox:
        """Return a new sandbox with the files and shell state of ``snapshot``, in constant time; forks are made by it.

        The snapshot does not change. The new sandbox has the work directory of the one that was snapshotted. If
        ``snapshot.shell`` is empty it starts in that directory with the backend's own variables.

        Raises:
            errata_protocol.errors.SandboxFailed: A layer or the base tree of the snapshot does not exist, or its shell
                state cannot be read.
        """

    @abstractmethod
    async def collect(self, keep: Iterable[SnapshotRef]) -> CollectReport:
        """Delete every layer that is not needed by ``keep`` or by an open sandbox, directly or as an ancestor.

        Also delete what sandboxes of an earlier process, which was killed, left behind.

        Args:
            keep: Snapshots whose layers stay.
        """

    @abstractmethod
    async def close(self) -> None:
        """Destroy all open sandboxes, end helper processes and release locks and cgroups. Idempotent."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check of ``errata doctor``.

    Args:
        name: What was checked.
        verdict: ``ok``; ``worse``: it works with a disadvantage; ``missing``: ``errata serve terminal`` would not work.
        says: What was found.
        costs: The disadvantage; empty if there is none.
        fix: The command or step that changes it; empty if there is nothing to change.
        of_sandboxes: Only environments that run commands in sandboxes need it.
    """

    name: str
    verdict: Verdict
    says: str
    costs: str = ""
    fix: str = ""
    of_sandboxes: bool = False


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """The operator's choices for a backend.

    Args:
        directory: Directory for the backend's files; it need not exist.
        bases: Directories of base trees that the operator named, by name.
        reserve_bytes: Least space to keep free on the file system of ``directory``.
        division: Which part of what the machine has is this process's.
    """

    directory: Path
    bases: Mapping[str, Path] = field(default_factory=dict)
    reserve_bytes: int = 0
    division: Division = field(default_factory=own_division)

    def nearest(self) -> Path:
        """Return ``directory`` if it exists, else its nearest ancestor that does."""
        absolute = self.directory.absolute()
        return next(path for path in (absolute, *absolute.parents) if path.is_dir())


class BackendType(ABC):
    """A kind of backend, named by an entry point of the group ``errata.sandboxes``.

    To add a backend, subclass this in a package of your own and name the class in an entry point. `registry` finds it,
    and the setting ``sandbox`` selects it by the entry point's name.

    Attributes:
        unfit_file_systems: Types of file systems, as in the mount table, that cannot hold the backend's directory, each
            with the reason.
        descriptors: Most file descriptors of the server that all its commands together use.
        snapshots_each_step: A snapshot is cheap enough to be taken after each step. If False, sessions of environments
            that run commands are recovered by re-execution if they are declared deterministic, and otherwise not.
        shared: Several processes, each with a directory of its own, can use it beside each other.
    """

    unfit_file_systems: Mapping[str, str] = MappingProxyType({})
    descriptors: int = 0
    snapshots_each_step: bool = True
    shared: bool = True

    @abstractmethod
    def create(self, config: BackendConfig) -> Backend:
        """Return a backend; nothing is written before `Backend.start`."""

    def checks(self, config: BackendConfig, *, usable: bool) -> Iterator[Finding]:
        """Yield the results of this backend's checks of the machine, for ``errata doctor``; each may take seconds.

        Args:
            config: The operator's choices; no file may be left in its directory.
            usable: Files can be written in the directory. If False, checks that need files are not made.
        """
        yield from ()

    def size_bytes(self, directory: Path) -> int:
        """Return the disk space that a backend's files in ``directory`` use, for ``errata journal size``."""
        total = 0
        for path in directory.rglob("*"):
            try:
                if path.is_file() and not path.is_symlink():
                    total += path.stat().st_blocks * 512
            except OSError:  # a running server deleted it, or its modes do not allow to look at it
                continue
        return total

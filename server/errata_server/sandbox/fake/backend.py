"""`FakeBackend`: deterministic sandboxes in memory, with injected faults for tests.

It behaves as `base` demands (chained layers, restore in constant time, merged digests, saved shell state) and runs
commands with `shell`. A `FakeDisk` outlives its backend: a second backend on it stands for a restarted server.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import SandboxFailed, SandboxUnavailable

from ..base import (
    Backend,
    BackendInfo,
    CollectReport,
    CommandResult,
    Limits,
    PathRefused,
    Sandbox,
    SandboxSnapshot,
)
from ..output import BoundedOutput
from ..spec import WORKSPACE, Directory, File, SandboxSpec, SpecRefused
from .shell import FakeShell, Files, TimedOut

FakeFiles = Mapping[str, bytes | None]

_BASE_FILES: FakeFiles = MappingProxyType(
    {"/": None, "/tmp": None, "/etc": None, WORKSPACE: None, "/home": None, "/home/agent": None}
)
_ENV = MappingProxyType({"HOME": "/home/agent", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TZ": "UTC"})
_NOISE = ("__pycache__", ".pytest_cache")


@dataclass(frozen=True, slots=True)
class FakeLayer:
    """One frozen layer: all files of the sandbox, not only the changes; contents are shared, so this costs little.

    Args:
        base: Name of the base tree.
        parent: Name of the layer below; empty for the base tree.
        files: All files by absolute path; None for a directory.
        digest: Chained digest.
        workdir: The work directory.
    """

    base: str
    parent: str
    files: FakeFiles
    digest: str
    workdir: str = WORKSPACE


@dataclass(slots=True)
class FakeDisk:
    """What survives a crash of the server: base trees and layers.

    Args:
        bases: Base trees by name: content by absolute path, None for a directory.
        layers: Layers by name.
        made: Number of layers made so far, for their names.
    """

    bases: dict[str, FakeFiles] = field(default_factory=lambda: {"default": _BASE_FILES})
    layers: dict[str, FakeLayer] = field(default_factory=dict)
    made: int = 0


@dataclass(slots=True)
class FakeFaults:
    """Faults to inject. A counter is decremented with each call that it makes fail.

    Args:
        runs: Number of the next calls of `Sandbox.run` that raise SandboxFailed.
        snapshots: Number of the next calls of `Sandbox.snapshot` that raise SandboxFailed, as with a full disk.
        restores: Number of the next calls of `Backend.restore` that raise SandboxFailed.
        unavailable: While not empty, `Backend.start` raises SandboxUnavailable with this text.
        before_run: Awaited before each command; a test can delay a command or raise here.
    """

    runs: int = 0
    snapshots: int = 0
    restores: int = 0
    unavailable: str = ""
    before_run: Callable[[FakeSandbox, str], Awaitable[None]] | None = None

    def spend(self, counter: str) -> None:
        """Decrement the counter of this name and raise SandboxFailed if it was above 0."""
        left = getattr(self, counter)
        if left > 0:
            setattr(self, counter, left - 1)
            raise SandboxFailed(f"injected fault in {counter}")


def is_noise(path: str) -> bool:
    """Return whether a file is left out of digests, as caches are that embed times."""
    return path.endswith(".pyc") or any(part in _NOISE for part in path.split("/"))


def _entries(files: FakeFiles, base: FakeFiles) -> dict[str, str]:
    """Return the differences from ``base`` by path: the content's hash, ``dir`` or ``gone``; without noise."""
    changed = {
        path: "dir" if content is None else hashlib.sha256(content).hexdigest()
        for path, content in files.items()
        if not is_noise(path) and not (path in base and base[path] == content)
    }
    changed.update((path, "gone") for path in base if path not in files)
    return changed


def _digest(*parts: object) -> str:
    return "sha256:" + hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class FakeSandbox(Sandbox):
    """See `Sandbox`. ``commands`` is the list of commands that were run."""

    def __init__(self, backend: FakeBackend, name: str, base: str, limits: Limits) -> None:
        self.id = name
        self.commands: list[str] = []
        self._backend = backend
        self._base = base
        self._limits = limits
        self._layer = ""
        self._workdir = WORKSPACE
        self._shell: dict[str, object] = {}
        self._files: Files = dict(backend.disk.bases[base])
        self._destroyed = False

    def _check(self) -> None:
        if self._destroyed or self._backend.closed:
            raise SandboxFailed(f"sandbox {self.id} is destroyed: open or restore another")

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def cwd(self) -> str:
        """The shell's current directory."""
        return str(self._shell.get("cwd", self._workdir))

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
        self._check()
        self.commands.append(command)
        if self._backend.faults.before_run is not None:
            await self._backend.faults.before_run(self, command)
            self._check()
        self._backend.faults.spend("runs")
        saved = {} if clean else self._shell
        exported = dict(saved.get("env", {**_ENV, "PWD": self._workdir}))  # type: ignore[call-overload]
        files = self._files if mounts is None else self._files | _host_files(mounts)
        cwd = "/" if clean else self.cwd
        shell = FakeShell(
            files,
            cwd,
            exported | dict(env or {}),
            timeout_s,
            stdin or b"",
            dict(saved.get("variables", {})),  # type: ignore[call-overload]
        )
        if files.get(cwd, b"") is not None:
            shell.cwd = "/"
        try:
            exit_code: int | None = shell.run(command)
        except TimedOut:
            exit_code = None
        if mounts is not None:
            inside = tuple(f"{at.rstrip('/')}/" for at in mounts)
            self._files = {p: c for p, c in files.items() if p not in mounts and not p.startswith(inside)}
        if not clean and exit_code is not None:
            for name in env or {}:
                shell.env.pop(name, None)
                if name in exported:
                    shell.env[name] = exported[name]
            self._shell = {"cwd": shell.cwd, "env": shell.env, "variables": {}}
        return self._result(shell, exit_code, timeout_s)

    def _result(self, shell: FakeShell, exit_code: int | None, timeout_s: float) -> CommandResult:
        """Return the result of a command that a shell has run; ``exit_code`` is None after a timeout."""
        streams = []
        for data in (shell.stdout, shell.stderr):
            stream = BoundedOutput(self._limits.keep_bytes)
            stream.feed(bytes(data))
            streams.append(stream)
        out, err = streams
        flooded = out.total + err.total > self._limits.output_bytes
        return CommandResult(
            exit_code=137 if flooded else exit_code,
            stdout=out.text(),
            stderr=err.text(),
            duration_s=min(shell.clock_s, timeout_s),
            timed_out=exit_code is None,
            limit_hit="output" if flooded else None,
            stdout_bytes=out.total,
            stderr_bytes=err.total,
            truncated=out.truncated or err.truncated,
        )

    async def read_file(self, path: str, *, max_bytes: int = 1024**2) -> bytes:
        self._check()
        full = self._full(path)
        content = self._files.get(full)
        if content is None:
            raise _refused(path, "EISDIR" if full in self._files else self._missing(full))
        return content[:max_bytes]

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        self._check()
        full = self._full(path)
        if self._files.get(full, b"") is None:
            raise _refused(path, "EISDIR")
        if self._missing(full) == "ENOTDIR":
            raise _refused(path, "ENOTDIR")
        if len(data) > self._limits.file_size_bytes:
            raise _refused(path, "EFBIG")
        FakeShell(self._files, self.cwd, {}, 0.0).make_parents(full)
        self._files[full] = data

    def _full(self, path: str) -> str:
        if not path or "\0" in path:
            raise _refused(path, "EINVAL" if path else "ENOENT")
        return posixpath.normpath(posixpath.join(self.cwd, path))

    def _missing(self, full: str) -> str:
        """Return the errno name for a path that does not exist: ENOTDIR if it leads through a file, else ENOENT."""
        parent = posixpath.dirname(full)
        while parent not in self._files:
            parent = posixpath.dirname(parent)
        return "ENOENT" if self._files[parent] is None else "ENOTDIR"

    async def snapshot(self) -> SandboxSnapshot:
        self._check()
        self._backend.faults.spend("snapshots")
        disk = self._backend.disk
        base = disk.bases[self._base]
        before: FakeFiles = disk.layers[self._layer].files if self._layer else base
        if before != self._files:
            self._freeze()
        shell = json.dumps(self._shell, sort_keys=True).encode() if self._shell else b""
        return SandboxSnapshot(ref=self._ref(), shell=shell)

    def _freeze(self) -> None:
        """Make a layer of the current files."""
        disk = self._backend.disk
        before = disk.layers[self._layer].files if self._layer else disk.bases[self._base]
        chained = disk.layers[self._layer].digest if self._layer else self._base
        digest = _digest(chained, _entries(self._files, before))
        disk.made += 1
        name = f"layer-{disk.made}"
        files = MappingProxyType(dict(self._files))
        disk.layers[name] = FakeLayer(self._base, self._layer, files, digest, self._workdir)
        self._layer = name

    def prepare(self, spec: SandboxSpec) -> None:
        """Make the files of ``spec``, without owners, modes and times; called by `FakeBackend.open`.

        Raises:
            SpecRefused: ``spec`` has a symlink, or the base tree has something else at the path of an entry.
        """
        self._workdir = spec.workdir
        if spec.empty:
            below = f"{spec.workdir}/"
            for path in [path for path in self._files if path == spec.workdir or path.startswith(below)]:
                del self._files[path]
        for entry in (Directory(spec.workdir), *spec.entries):
            if not isinstance(entry, Directory | File):
                raise SpecRefused(f"entry {entry.path}: the fake sandbox has no links")
            is_directory = self._files.get(entry.path, b"") is None
            is_file = entry.path in self._files and not is_directory
            if self._missing(entry.path) == "ENOTDIR" or (isinstance(entry, Directory) and is_file):
                raise SpecRefused(f"entry {entry.path}: {_MESSAGES['ENOTDIR']}")
            if isinstance(entry, File) and is_directory:
                raise SpecRefused(f"entry {entry.path}: {_MESSAGES['EISDIR']}")
            FakeShell(self._files, "/", {}, 0.0).make_parents(entry.path)
            self._files[entry.path] = entry.content if isinstance(entry, File) else None
        if spec.makes_files:
            self._freeze()
        if spec.env:
            self._shell = {"cwd": spec.workdir, "env": {**_ENV, "PWD": spec.workdir, **spec.env}, "variables": {}}

    def _ref(self) -> SnapshotRef:
        if self._layer:
            return SnapshotRef("layer", self._layer, self._backend.disk.layers[self._layer].digest)
        return SnapshotRef("base", self._base)

    async def merged_digest(self) -> str:
        self._check()
        return _digest(self._base, _entries(self._files, self._backend.disk.bases[self._base]))

    async def destroy(self) -> None:
        self._destroyed = True
        self._backend.live.pop(self.id, None)

    def resume(self, snapshot: SandboxSnapshot) -> None:
        """Take over the files and shell state of a snapshot; called by `FakeBackend.restore`."""
        if snapshot.ref.kind == "layer":
            self._layer = snapshot.ref.id
            self._files = dict(self._backend.disk.layers[self._layer].files)
            self._workdir = self._backend.disk.layers[self._layer].workdir
        self._shell = json.loads(snapshot.shell) if snapshot.shell else {}

    @property
    def layer(self) -> str:
        """Name of the newest layer; empty if there is none."""
        return self._layer


class FakeBackend(Backend):
    """See `Backend`.

    Args:
        disk: The disk of an earlier backend; None for a new one.
        limits: Limits of sandboxes that are opened without limits.
    """

    def __init__(self, disk: FakeDisk | None = None, *, limits: Limits | None = None) -> None:
        self.disk = FakeDisk() if disk is None else disk
        self.faults = FakeFaults()
        self.live: dict[str, FakeSandbox] = {}
        self.closed = False
        self._limits = limits or Limits()
        self._opened = 0

    async def start(self) -> BackendInfo:
        if self.faults.unavailable:
            raise SandboxUnavailable(self.faults.unavailable)
        self.closed = False
        return BackendInfo("fake", frozenset({"keep_bytes", "output_bytes"}), ("no command really runs",))

    async def open(
        self, *, base: str = "default", limits: Limits | None = None, spec: SandboxSpec | None = None
    ) -> Sandbox:
        await self.start()
        if base not in self.disk.bases:
            raise SandboxUnavailable(f"base tree {base} is not there: the fake has {', '.join(self.disk.bases)}")
        made = self._new(base, limits)
        if spec is not None:
            try:
                made.prepare(spec)
            except SpecRefused:
                await made.destroy()
                raise
        return made

    def _new(self, base: str, limits: Limits | None) -> FakeSandbox:
        self._opened += 1
        made = FakeSandbox(self, f"fake-{self._opened}", base, limits or self._limits)
        self.live[made.id] = made
        return made

    async def restore(self, snapshot: SandboxSnapshot, *, limits: Limits | None = None) -> Sandbox:
        await self.start()
        self.faults.spend("restores")
        ref = snapshot.ref
        found = ref.id in (self.disk.layers if ref.kind == "layer" else self.disk.bases)
        if not found:
            raise SandboxFailed(f"{ref.kind} {ref.id} is not there: it was collected or belongs to another server")
        made = self._new(self.disk.layers[ref.id].base if ref.kind == "layer" else ref.id, limits)
        made.resume(snapshot)
        return made

    async def collect(self, keep: Iterable[SnapshotRef]) -> CollectReport:
        wanted = [ref.id for ref in keep if ref.kind == "layer"] + [s.layer for s in self.live.values()]
        kept: set[str] = set()
        for name in wanted:
            while name in self.disk.layers and name not in kept:
                kept.add(name)
                name = self.disk.layers[name].parent
        gone = [name for name in self.disk.layers if name not in kept]
        size = sum(len(c) for name in gone for c in self.disk.layers.pop(name).files.values() if c)
        return CollectReport(layers=len(gone), size_bytes=size)

    async def close(self) -> None:
        self.closed = True
        self.live.clear()


def _host_files(mounts: Mapping[str, Path]) -> Files:
    """Read the files of host directories, by path in the sandbox."""
    found: Files = {}
    for at, source in mounts.items():
        found[at] = source.read_bytes() if source.is_file() else None
        for child in sorted(source.rglob("*")):
            inside = f"{at.rstrip('/')}/{child.relative_to(source)}"
            found[inside] = child.read_bytes() if child.is_file() else None
    return found


_MESSAGES = {
    "ENOENT": "No such file or directory",
    "EISDIR": "Is a directory",
    "ENOTDIR": "Not a directory",
    "EFBIG": "File too large",
    "EINVAL": "Invalid argument",
}


def _refused(path: str, reason: str) -> PathRefused:
    return PathRefused(path, reason, _MESSAGES[reason])

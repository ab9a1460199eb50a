"""`NamespaceSandbox`: one sandbox: a base tree, a chain of layers, a writable directory, a shell state."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import resource
import time
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Protocol

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import SandboxFailed

from ...descriptors import explained
from .. import shell_state
from ..base import CommandResult, LimitHit, Limits, PathRefused, Sandbox, SandboxSnapshot
from ..base_trees.tree import BaseTree
from ..files import as_owner
from ..files.walk import Usage, usage
from ..host.cgroups import Cgroups, Counters
from ..host.descriptors import append_only, close_all, memory_file
from ..host.privileges import Mode, may_raise_limits
from ..layers.store import LayerStore
from ..output import BoundedOutput
from ..shell_state import ShellState
from ..spec import DEFAULT_PATH, WORKSPACE, SandboxSpec, SpecRefused, check_workdir
from . import start_files
from .disk_watch import DiskWatch, Growth, over
from .exchange import Ending, Exchange, Watch
from .free_space import FreeSpace
from .runner_pool import Runner, Runners

MAX_COMMAND_BYTES = 131_071
"""The kernel's bound on one argument (MAX_ARG_STRLEN, without its NUL)."""
_INLINE_ENTRIES = 64
_INLINE_BYTES = 1024**2
_COUNTED = 40
"""Counting goes on to so many times a limit: a command that cleans up must be told from one that goes on."""
_FILE_TIMEOUT_S = 60.0
_PREPARE_TIMEOUT_S = 600.0
_CORE_BYTES = int(resource.getrlimit(resource.RLIMIT_CORE)[1] != 0)
"""1 byte means no core, also for a handler that core_pattern names, which 0 would feed; 0 where 1 is out of reach."""

_STACK_BYTES = 8 * 1024**2
_SIGXCPU_STATUS, _SIGXFSZ_STATUS, _KILLED_STATUS = 152, 153, 137


class Host(Protocol):
    """What a sandbox needs of the backend that made it.

    Attributes:
        live: Sandboxes that are not destroyed, by id.
        live_dir: Directory of their writable directories.
        store: The layers.
        runners: Prepared processes.
        cgroups: Of the runners; None before the first one.
        counting: Threads that count what a sandbox holds.
        growth: What all sandboxes are known to have added to the disk.
        space: The disk's free space.
        reserve_bytes: Space to keep free.
        mode: Whether the server is root.
    """

    live: dict[str, NamespaceSandbox]
    live_dir: Path
    store: LayerStore
    runners: Runners
    cgroups: Cgroups | None
    counting: Executor
    growth: Growth
    space: FreeSpace
    reserve_bytes: int
    mode: Mode

    def link_base(self, base: BaseTree) -> str:
        """Return the short name of a base tree below the layers directory."""
        ...

    def is_mapped(self, base: BaseTree) -> bool:
        """Return whether commands on ``base`` have a host uid of their own."""
        ...

    def check_room(self, more_bytes: int = 0) -> None:
        """Raise `SandboxFailed` where the disk is full."""
        ...

    def no_room(self) -> SandboxFailed:
        """Return the error that says what is free."""
        ...

    def remove(self, tree: Path) -> Usage:
        """Delete a tree and return what it held."""
        ...


class NamespaceSandbox(Sandbox):
    """See `Sandbox`; made by `backend.NamespaceBackend`."""

    def __init__(
        self,
        backend: Host,
        name: str,
        base: BaseTree,
        layer: str,
        shell: ShellState,
        limits: Limits,
    ) -> None:
        self.id = name
        self.layer = layer
        self._workdir = WORKSPACE
        self._writable: tuple[str, ...] = ()
        if layer:
            meta = backend.store.meta(layer)
            self._workdir, self._writable = meta.workdir, meta.writable
        self._backend = backend
        self.base = base
        self._shell = shell
        self._limits = limits
        self._directory: Path | None = None
        self._usage = Usage()
        self._last: Runner | None = None
        self._destroyed = False

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def cwd(self) -> str:
        return self._shell.cwd.decode("utf-8", "backslashreplace")

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
        text = _encode(command)
        if b"\0" in text:
            return _refused_command(126, "a command cannot contain a NUL byte")
        if len(text) > MAX_COMMAND_BYTES:
            return _refused_command(126, "Argument list too long")
        for inside in mounts or {}:
            if not inside.startswith("/") or ".." in inside.split("/"):
                raise ValueError(f"mount point {inside!r} must be absolute and without '..'")
        startup = b"" if clean else shell_state.startup(self._shell, text, env or {})
        order = {
            "do": "run",
            "argv": [b"/bin/bash", b"-c", text],
            "env": self._environment(clean, env or {}),
            "cwd": b"/" if clean else self._shell.cwd,
            "mounts": [(str(source.absolute()), inside) for inside, source in (mounts or {}).items()],
        }
        started = time.monotonic()
        runner, before = await self._prepare()
        out, err = BoundedOutput(self._limits.keep_bytes), BoundedOutput(self._limits.keep_bytes)
        new_shell = None
        with contextlib.ExitStack() as fds:
            fds.callback(runner.close)
            give: list[int] = []
            fds.callback(close_all, give)
            streams, state_fd = {}, -1
            try:
                watch = self._disk_watch(runner)
                fds.callback(lambda: watch.end(self._usage))
                give.append(memory_file(stdin) if stdin else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
                for stream in (out, err):
                    read_end, write_end = os.pipe()
                    fds.callback(os.close, read_end)
                    give.append(write_end)
                    os.set_blocking(read_end, False)
                    streams[read_end] = stream
                if startup:
                    state_fd = os.memfd_create("shell")
                    fds.callback(os.close, state_fd)
                    os.write(state_fd, startup)
                    give.append(append_only(state_fd))
            except OSError as error:
                raise SandboxFailed(f"the pipes of a command could not be made: {explained(error)}") from error
            ending = await self._exchange(runner, order, give, streams, timeout_s, watch=watch.run)
            if state_fd >= 0 and ending.killed is None:
                new_shell = shell_state.saved(os.pread(state_fd, shell_state.MAX_STATE_BYTES + 64, len(startup)))
            if new_shell is not None:
                self._shell = new_shell
            limit_hit = await self._limit_hit(ending, runner, before, err)
        timed_out = ending.killed == "timeout"
        exit_code: int | None = ending.status if ending.status >= 0 else 128 - ending.status
        if ending.killed is not None:
            exit_code = None if timed_out else _KILLED_STATUS
        return CommandResult(
            exit_code=exit_code,
            stdout=out.text(),
            stderr=err.text(),
            duration_s=time.monotonic() - started,
            timed_out=timed_out,
            limit_hit=limit_hit,
            killed_background=ending.background if ending.killed is None else (),
            stdout_bytes=out.total,
            stderr_bytes=err.total,
            truncated=out.truncated or err.truncated,
            shell_saved=new_shell is not None,
        )

    def _environment(self, clean: bool, env: Mapping[str, str]) -> dict[bytes, bytes]:
        if not clean and not self._shell.pristine:
            found: Mapping[str, str] = {}  # all of it comes from the saved state, also what the agent removed
        else:
            found = self._defaults()
        encoded = {os.fsencode(name): os.fsencode(value) for name, value in found.items()}
        encoded[b"PWD"] = b"/" if clean else self._shell.cwd
        if clean:
            encoded.update((_encode(name), _encode(value)) for name, value in env.items())
        else:
            encoded[b"BASH_ENV"] = b"/proc/self/fd/%d" % shell_state.STATE_FD
        return encoded

    def _defaults(self) -> Mapping[str, str]:
        """Return the variables of a first command."""
        return {
            "PATH": DEFAULT_PATH,
            "HOME": "/home/agent" if (self.base.root / "home/agent").is_dir() else self._workdir,
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "TERM": "dumb",
            "PYTHONHASHSEED": "0",
        }

    async def prepare(self, spec: SandboxSpec) -> None:
        """Make what ``spec`` wants, and freeze it as the first layer; called by `NamespaceBackend.open`.

        The child of a runner makes it, in the sandbox's own root and with the power over owners that commands do not
        have: so links lead where they lead inside, and overlayfs copies what it has to.

        Raises:
            SpecRefused: The base tree has something else there.
            SandboxFailed: The machinery broke.
        """
        self._workdir = spec.workdir
        self._shell = ShellState.starting(spec.workdir, spec.env, self._defaults())
        if not spec.makes_files:
            return
        order, content = start_files.order_of(spec, rootless=self._backend.mode == "rootless")
        self._backend.check_room(len(content))
        data = memory_file(content)
        try:
            runner, _ = await self._prepare()
            ending = await self._exchange(runner, order, [os.dup(data)], {}, _PREPARE_TIMEOUT_S)
        finally:
            os.close(data)
        if ending.answer is None:
            raise SandboxFailed(f"the start of a sandbox could not be made: the helper ended with {ending.status}")
        if ending.answer[0] == "refused":
            self._backend.check_room()
            raise SpecRefused(f"entry {os.fsdecode(ending.answer[1])}: {ending.answer[2]}")
        check_workdir(os.fsdecode(ending.answer[1]))  # as the base tree's links have it
        self._writable = tuple(os.fsdecode(path) for path in ending.answer[2])
        await self._recount()
        await self._freeze()

    async def _prepare(self) -> tuple[Runner, Counters]:
        """Get everything ready that a request needs: room, a writable directory, a runner with our limits."""
        try:
            return await self._prepare_on(await self._backend.runners.take())
        except _RunnerEnded:  # its launcher did; nothing was run on it
            return await self._prepare_on(await self._backend.runners.take())

    async def _prepare_on(self, runner: Runner) -> tuple[Runner, Counters]:
        backend = self._backend
        try:
            self._check()  # it may have been destroyed while it waited for its turn
            if self._last is not None:
                # An overlay's writable directory may not be in two mounts at once; and a mount holds deleted files.
                await backend.runners.gone(self._last)
            backend.check_room()
            self._make_directory()
            assert backend.cgroups is not None
            if not backend.cgroups.has(runner.slot, self._limits):
                await asyncio.to_thread(backend.cgroups.apply, runner.slot, self._limits)
            before = backend.cgroups.counters(runner.slot)
        except OSError as error:
            ended = not runner.alive
            runner.close()
            if ended:
                raise _RunnerEnded("no sandbox process: the launcher ended") from error
            raise SandboxFailed(f"the limits of a command could not be set: {explained(error)}") from error
        except BaseException:
            runner.close()
            raise
        return runner, before

    def _make_directory(self) -> None:
        try:
            if self._directory is None:
                directory = self._backend.live_dir / self.id
                directory.mkdir(mode=0o700)
                (directory / "w").mkdir(mode=0o700)
                (directory / "u").mkdir(mode=0o755)
                self._directory = directory
            elif not (self._directory / "u").is_dir():
                (self._directory / "u").mkdir(mode=0o755)
            # The umask of the server must not decide whether the agent may enter its own root.
            (self._directory / "u").chmod(0o755)
        except OSError as error:
            raise SandboxFailed(f"the sandbox's directory could not be made: {error}") from error

    async def _exchange(
        self,
        runner: Runner,
        order: dict[str, Any],
        give: list[int],
        streams: Mapping[int, BoundedOutput],
        timeout_s: float,
        *,
        watch: Watch | None = None,
    ) -> Ending:
        backend, limits = self._backend, self._limits
        assert backend.cgroups is not None
        # Beside a cgroup it is the second bound, and must not be met first: the cgroup counts what it refused.
        processes = limits.pids + (16 if backend.cgroups.version else 0)
        here = f"../live/{backend.live_dir.name}/{self.id}"
        order |= {
            "lower": ":".join(backend.store.lowers(self.layer)),
            "base": backend.link_base(self.base),
            "base_root": str(self.base.root),
            "mapped": backend.is_mapped(self.base),
            "own_processes": (processes, processes),
            "upper": f"{here}/u",
            "work": f"{here}/w",
            "writable": (*self.base.writable, *self._writable),
            "rlimits": [
                _rlimit(resource.RLIMIT_FSIZE, limits.file_size_bytes, limits.file_size_bytes),
                _rlimit(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 2),
                _rlimit(resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
                _rlimit(resource.RLIMIT_STACK, _STACK_BYTES, resource.RLIM_INFINITY),
                _rlimit(resource.RLIMIT_CORE, _CORE_BYTES, _CORE_BYTES),
            ],
        }
        order.setdefault("mounts", [])
        self._last = runner
        try:
            return await Exchange(runner, timeout_s=timeout_s, output_bytes=limits.output_bytes).run(
                order,
                give,
                streams,
                after_send=lambda: close_all(give),
                kill=lambda: backend.runners.kill(runner),
                watch=watch,
            )
        finally:
            runner.close()

    def _disk_watch(self, runner: Runner) -> DiskWatch:
        backend = self._backend
        return DiskWatch(
            self._upper,
            self._limits,
            self._usage,
            backend.reserve_bytes,
            runner.pid,
            backend.counting,
            backend.growth,
            backend.space,
        )

    def _count(self) -> Usage:
        most = _COUNTED * self._limits.disk_bytes
        return as_owner.call(usage, self._upper, max_entries=_COUNTED * self._limits.inodes, max_bytes=most)

    def _count_few(self) -> Usage | None:
        """Count up to some entries at once; None where a mode keeps the server's user out (rootless mode only)."""
        try:
            few, most = _INLINE_ENTRIES, _COUNTED * self._limits.disk_bytes
            return usage(self._upper, max_entries=few, max_bytes=most, max_whiteouts=few)
        except PermissionError:
            return None

    @property
    def _upper(self) -> Path:
        assert self._directory is not None
        return self._directory / "u"

    async def _limit_hit(self, ending: Ending, runner: Runner, before: Counters, err: BoundedOutput) -> LimitHit | None:
        """Tell which limit ended or broke the command; counts what it wrote on the way."""
        backend = self._backend
        assert backend.cgroups is not None
        after = backend.cgroups.counters(runner.slot)
        try:
            used = self._count_few()
            if used is None or max(used.entries, used.whiteouts) > _INLINE_ENTRIES:
                used = await asyncio.to_thread(self._count)
        except OSError as error:
            raise SandboxFailed(f"what the command wrote could not be counted: {error}") from error
        beyond, self._usage = over(used, self._limits, self._usage), used
        if ending.killed is not None and ending.killed not in ("timeout", "full"):
            return ending.killed
        if ending.killed == "full" and beyond is None:
            raise backend.no_room()
        if beyond is None:
            # Whatever failed in there may have failed because our disk is full; that is not the agent's error.
            backend.check_room()
        if after.oom_kills > before.oom_kills:
            return "memory"
        if beyond is not None:
            return beyond
        if ending.status in (_SIGXFSZ_STATUS, 128 - _SIGXFSZ_STATUS) or (
            ending.status != 0 and "File too large" in err.text()
        ):
            return "file_size"
        cpu_signals = (_SIGXCPU_STATUS, 128 - _SIGXCPU_STATUS)
        if ending.status in cpu_signals or (ending.status == _KILLED_STATUS and ending.cpu_s >= self._limits.cpu_s):
            return "cpu"
        if not backend.cgroups.version:
            # Nothing counts what the rlimit refused, so the words of bash and of the C library have to do.
            return "pids" if "Resource temporarily unavailable" in err.text() else None
        return "pids" if after.pids_refused > before.pids_refused else None

    async def read_file(self, path: str, *, max_bytes: int = 1024**2) -> bytes:
        data = os.memfd_create("read")
        try:
            await self._file_request(path, {"do": "read", "max_bytes": max_bytes}, data)
            return os.pread(data, max_bytes, 0)
        finally:
            os.close(data)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        self._check()
        if len(data) > self._limits.file_size_bytes:
            raise _refused(path, errno.EFBIG)
        if self._usage.size_bytes + len(data) > self._limits.disk_bytes or self._usage.entries >= self._limits.inodes:
            raise _refused(path, errno.EDQUOT)
        self._backend.check_room(len(data))
        content = memory_file(data)
        try:
            await self._file_request(path, {"do": "write", "mode": mode}, content)
        finally:
            os.close(content)
        await self._recount()

    async def _recount(self) -> None:
        """Count what the server itself had written."""
        before, self._usage = self._usage, await asyncio.to_thread(self._count)
        self._backend.growth.add(self._usage.allocated_bytes - before.allocated_bytes)

    async def _file_request(self, path: str, order: dict[str, Any], data: int) -> None:
        self._check()
        raw = _encode(path)
        if not raw or b"\0" in raw:
            raise _refused(path, errno.EINVAL if raw else errno.ENOENT)
        if len(raw) >= 4096:  # PATH_MAX; the request would not fit into the runner's socket either
            raise _refused(path[:200] + "...", errno.ENAMETOOLONG)
        runner, _ = await self._prepare()
        order["path"] = raw if raw.startswith(b"/") else self._shell.cwd.rstrip(b"/") + b"/" + raw
        ending = await self._exchange(runner, order, [os.dup(data)], {}, _FILE_TIMEOUT_S)
        if ending.answer is None:
            raise SandboxFailed(f"no answer about {path!r}: the helper ended with {ending.status}")
        if ending.answer[0] == "refused":
            self._backend.check_room()
            raise _refused(path, ending.answer[1])

    async def snapshot(self) -> SandboxSnapshot:
        self._check()
        if self._changed():
            await self._freeze()
        return SandboxSnapshot(self._ref(), self._shell.pack())

    async def _freeze(self) -> None:
        freeze = functools.partial(
            self._backend.store.freeze,
            *(self._upper, self.layer, self.base, self._usage),
            workdir=self._workdir,
            writable=self._writable,
        )
        small = self._usage.entries + self._usage.whiteouts <= _INLINE_ENTRIES
        small = small and self._usage.size_bytes <= _INLINE_BYTES
        try:
            # A thread costs more than freezing a few small files.
            meta = freeze() if small else await asyncio.to_thread(freeze)
        except OSError as error:
            raise SandboxFailed(f"a layer could not be written: {explained(error)}") from error
        self.layer = meta.id
        self._usage = Usage()

    def _changed(self) -> bool:
        if self._directory is None:
            return False
        try:
            with os.scandir(self._upper) as entries:
                return next(entries, None) is not None
        except FileNotFoundError:
            return False

    def _ref(self) -> SnapshotRef:
        if self.layer:
            return SnapshotRef("layer", self.layer, self._backend.store.meta(self.layer).digest)
        return SnapshotRef("base", self.base.id)

    async def merged_digest(self) -> str:
        self._check()
        upper = self._upper if self._changed() else None
        try:
            return await asyncio.to_thread(self._backend.store.merged_digest, self.layer, upper, self.base)
        except OSError as error:
            raise SandboxFailed(f"the files could not be read: {error}") from error

    async def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        self._backend.live.pop(self.id, None)
        self._backend.store.release(self.layer, {sandbox.layer for sandbox in list(self._backend.live.values())})
        if self._last is not None:
            self._last.stop()
            await self._backend.runners.gone(self._last)
        if self._directory is not None:
            await asyncio.to_thread(self._backend.remove, self._directory)

    def _check(self) -> None:
        if self._destroyed:
            raise SandboxFailed(f"sandbox {self.id} is destroyed: open or restore another")


class _RunnerEnded(SandboxFailed):
    """A runner ended before its command was sent, and its cgroup with it."""


def _rlimit(name: int, soft: int, hard: int) -> tuple[int, tuple[int, int]]:
    """Return one resource limit; without CAP_SYS_RESOURCE nobody can go beyond its own."""
    most = resource.getrlimit(name)[1]
    if may_raise_limits() or most == resource.RLIM_INFINITY:
        return name, (soft, hard)
    within = [most if value == resource.RLIM_INFINITY else min(value, most) for value in (soft, hard)]
    return name, (within[0], within[1])


def _encode(text: str) -> bytes:
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _refused_command(status: int, message: str) -> CommandResult:
    text = f"/bin/bash: {message}\n"
    return CommandResult(exit_code=status, stdout="", stderr=text, stderr_bytes=len(text), shell_saved=False)


def _refused(path: str, number: int) -> PathRefused:
    # EXDEV: the path leads to a mount of its own (/proc, /dev), where no file of the agent is.
    number = errno.EACCES if number == errno.EXDEV else number
    message = "Not a regular file" if number == errno.EINVAL else os.strerror(number)
    return PathRefused(path, errno.errorcode.get(number, str(number)), message)

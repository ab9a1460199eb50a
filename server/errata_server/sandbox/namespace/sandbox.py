"""`NamespaceSandbox`: one sandbox, made of a base tree, a chain of layers, a writable directory and a shell state."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import resource
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from errata_os.descriptors import explained
from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import SandboxFailed

from .. import shell_state
from ..base import CommandResult, LimitHit, Limits, PathRefused, Sandbox, SandboxSnapshot
from ..base_trees.tree import BaseTree
from ..files import as_owner
from ..files.walk import Usage, usage
from ..host.cgroups import Cgroups, Counters
from ..host.descriptors import INLINE_BYTES, append_only, close_all, large_memory_file
from ..host.privileges import Mode, may_raise_limits
from ..layers.store import LayerStore
from ..output import BoundedOutput, texts
from ..shell_state import ShellState
from ..spec import DEFAULT_PATH, WORKSPACE, SandboxSpec, SpecRefused, check_workdir
from . import start_files
from .disk_watch import DiskWatch, Growth, exceeded_limit
from .exchange import Ending, Exchange, Watch
from .free_space import FreeSpace
from .runner_pool import Runner, RunnerPool

MAX_COMMAND_BYTES = 131_071
"""The kernel's limit on the size of one argument (MAX_ARG_STRLEN, without its NUL)."""
_INLINE_ENTRIES = 64
_INLINE_BYTES = 1024**2
"""Up to so much is counted and frozen in the event loop, because a thread would cost more."""
_COUNTED = 40
"""Counting stops at so many times a limit; beyond the limit too, it has to show whether a command is cleaning up."""
_FILE_TIMEOUT_S = 60.0
_PREPARE_TIMEOUT_S = 600.0
_CORE_BYTES = int(resource.getrlimit(resource.RLIMIT_CORE)[1] != 0)
"""With a limit of 1 byte no core is written, also not to a program in core_pattern, which a limit of 0 does not stop; 0
if this process may not set 1."""

_STACK_BYTES = 8 * 1024**2
_SIGXCPU_STATUS, _SIGXFSZ_STATUS, _KILLED_STATUS = 152, 153, 137


class BackendServices(Protocol):
    """The part of `NamespaceBackend` that a sandbox uses.

    Attributes:
        live: Sandboxes that are not destroyed, by id.
        live_dir: Parent of their writable directories.
        store: The layers.
        runners: The pool of runners.
        cgroups: Cgroups of the runners; None before the launcher starts.
        count_executor: Threads for counting what sandboxes use.
        growth: What all sandboxes are known to have added to the disk.
        space: Watches the free space of the disk.
        reserve_bytes: Space to keep free.
        mode: The sandbox mode.
    """

    live: dict[str, NamespaceSandbox]
    live_dir: Path
    store: LayerStore
    runners: RunnerPool
    cgroups: Cgroups | None
    count_executor: ThreadPoolExecutor
    growth: Growth
    space: FreeSpace
    reserve_bytes: int
    mode: Mode

    def link_base(self, base: BaseTree) -> str:
        """Return a short path of a base tree, relative to the layers directory."""
        ...

    def is_mapped(self, base: BaseTree) -> bool:
        """Return whether commands on ``base`` each run under a different host uid."""
        ...

    def check_free_space(self, more_bytes: int = 0) -> None:
        """Raise `SandboxFailed` if less than the reserve would be free after ``more_bytes`` are written."""
        ...

    def disk_full_error(self) -> SandboxFailed:
        """Return an error that says how much space is free."""
        ...

    def remove(self, tree: Path) -> Usage:
        """Delete a tree and return its size."""
        ...


class NamespaceSandbox(Sandbox):
    """See `Sandbox`; made by `backend.NamespaceBackend`.

    Args:
        backend: What it uses of the backend.
        name: Its id.
        base: Its base tree.
        layer: Id of the layer that it continues from; empty for the base tree.
        shell: The shell state of its first command.
        limits: Its limits.
    """

    def __init__(
        self,
        backend: BackendServices,
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
        request = {
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
                give.append(
                    await large_memory_file(stdin) if stdin else os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
                )
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
            ending = await self._exchange(runner, request, give, streams, timeout_s, watch=watch.run)
            if state_fd >= 0 and ending.killed is None:
                new_shell = shell_state.saved(os.pread(state_fd, shell_state.MAX_STATE_BYTES + 64, len(startup)))
            if new_shell is not None:
                self._shell = new_shell
            limit_hit = await self._limit_hit(ending, runner, before, err)
        timed_out = ending.killed == "timeout"
        exit_code: int | None = ending.status if ending.status >= 0 else 128 - ending.status
        if ending.killed is not None:
            exit_code = None if timed_out else _KILLED_STATUS
        stdout, stderr = await texts(out, err)
        return CommandResult(
            exit_code=exit_code,
            stdout=stdout,
            stderr=stderr,
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
        """Return the environment variables of bash; those of the saved shell state are set by its startup text."""
        if not clean and not self._shell.pristine:
            found: Mapping[str, str] = {}  # the saved state sets all variables; the agent may have unset some
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
        """Return the variables of the first command."""
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
        """Apply ``spec`` to a new sandbox; called by `NamespaceBackend.open`.

        This sets the working directory and environment of commands, makes the files and freezes them as the first
        layer. A spec without files makes no layer.

        A runner's child makes them with the sandbox's root as its own, so that symlinks resolve as in the sandbox and
        overlayfs copies files up as needed. It may change owners, which commands may not.

        Raises:
            SpecRefused: The base tree has something else at the path of an entry.
            SandboxFailed: The files could not be made.
        """
        self._workdir = spec.workdir
        self._shell = ShellState.starting(spec.workdir, spec.env, self._defaults())
        if not spec.makes_files:
            return
        rootless = self._backend.mode == "rootless"
        request, content = await asyncio.to_thread(start_files.request_for, spec, rootless=rootless)
        self._backend.check_free_space(len(content))
        data = await large_memory_file(content)
        try:
            runner, _ = await self._prepare()
            ending = await self._exchange(runner, request, [os.dup(data)], {}, _PREPARE_TIMEOUT_S)
        finally:
            os.close(data)
        if ending.answer is None:
            raise SandboxFailed(f"the initial files of a sandbox could not be made: helper ended with {ending.status}")
        if ending.answer[0] == "refused":
            self._backend.check_free_space()
            raise SpecRefused(f"entry {os.fsdecode(ending.answer[1])}: {ending.answer[2]}")
        check_workdir(os.fsdecode(ending.answer[1]))  # again, with the symlinks of the base tree resolved
        self._writable = tuple(os.fsdecode(path) for path in ending.answer[2])
        await self._recount()
        await self._freeze()

    async def _prepare(self) -> tuple[Runner, Counters]:
        """Return a runner with this sandbox's limits, and the counters of its cgroup, ready for a request.

        Waits for the last command's runner to end, checks the free space and makes the writable directory.

        Raises:
            SandboxFailed: The sandbox was destroyed, the disk is full, or no runner can be made.
        """
        try:
            return await self._prepare_on(await self._backend.runners.take())
        except _RunnerEnded:  # because the launcher ended; the runner has not got the command yet
            return await self._prepare_on(await self._backend.runners.take())

    async def _prepare_on(self, runner: Runner) -> tuple[Runner, Counters]:
        """Do what `_prepare` does with this runner; closes it if that fails."""
        backend = self._backend
        try:
            self._check()  # it may have been destroyed while it waited for the runner
            if self._last is not None:
                # An upper directory may not be in two mounts at once, and a mount keeps deleted files on the disk.
                await backend.runners.wait_until_gone(self._last)
            backend.check_free_space()
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
        """Make the upper and work directories if they are missing."""
        try:
            if self._directory is None:
                directory = self._backend.live_dir / self.id
                directory.mkdir(mode=0o700)
                (directory / "w").mkdir(mode=0o700)
                (directory / "u").mkdir(mode=0o755)
                self._directory = directory
            elif not (self._directory / "u").is_dir():
                (self._directory / "u").mkdir(mode=0o755)
            # The agent has to be able to enter its root whatever the umask of the server is.
            (self._directory / "u").chmod(0o755)
        except OSError as error:
            raise SandboxFailed(f"the sandbox's directory could not be made: {error}") from error

    async def _exchange(
        self,
        runner: Runner,
        request: dict[str, Any],
        give: list[int],
        streams: Mapping[int, BoundedOutput],
        timeout_s: float,
        *,
        watch: Watch | None = None,
    ) -> Ending:
        """Complete a request with the mounts and limits of this sandbox, and run it; closes the runner.

        Args:
            runner: The runner.
            request: The request without what `launcher.messages` has for all requests.
            give: Descriptors to send, which are closed once they were sent.
            streams: See `Exchange.run`.
            timeout_s: See `Exchange`.
            watch: See `Exchange.run`.
        """
        backend, limits = self._backend, self._limits
        assert backend.cgroups is not None
        # With a cgroup, RLIMIT_NPROC is higher: the limit of the cgroup has to be reached first, because it is counted.
        processes = limits.pids + (16 if backend.cgroups.version else 0)
        directory = f"../live/{backend.live_dir.name}/{self.id}"
        request |= {
            "lower": ":".join(backend.store.lowers(self.layer)),
            "base": backend.link_base(self.base),
            "base_root": str(self.base.root),
            "mapped": backend.is_mapped(self.base),
            "own_processes": (processes, processes),
            "upper": f"{directory}/u",
            "work": f"{directory}/w",
            "writable": (*self.base.writable, *self._writable),
            "rlimits": [
                _rlimit(resource.RLIMIT_FSIZE, limits.file_size_bytes, limits.file_size_bytes),
                _rlimit(resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 2),
                _rlimit(resource.RLIMIT_NOFILE, limits.open_files, limits.open_files),
                _rlimit(resource.RLIMIT_STACK, _STACK_BYTES, resource.RLIM_INFINITY),
                _rlimit(resource.RLIMIT_CORE, _CORE_BYTES, _CORE_BYTES),
            ],
        }
        request.setdefault("mounts", [])
        self._last = runner
        try:
            return await Exchange(runner, timeout_s=timeout_s, output_bytes=limits.output_bytes).run(
                request,
                give,
                streams,
                after_send=lambda: close_all(give),
                kill=lambda: backend.runners.kill(runner),
                watch=watch,
            )
        finally:
            runner.close()

    def _disk_watch(self, runner: Runner) -> DiskWatch:
        """Return a watch for the command of a runner, which counts as running from now on."""
        backend = self._backend
        return DiskWatch(
            self._upper,
            self._limits,
            self._usage,
            backend.reserve_bytes,
            runner.pid,
            backend.count_executor,
            backend.growth,
            backend.space,
            lambda: runner.has_taken_request,
        )

    def _count(self) -> Usage:
        most = _COUNTED * self._limits.disk_bytes
        return as_owner.call(usage, self._upper, max_entries=_COUNTED * self._limits.inodes, max_bytes=most)

    def _count_few(self) -> Usage | None:
        """Count the writable directory in this thread, up to a few entries.

        Returns:
            The usage, of a part only if it has more entries; None if a mode denies the server's user access (in
            rootless mode).
        """
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
        """Return the limit that ended the command or made it fail, None if there is none; updates the usage.

        Raises:
            SandboxFailed: The server's own disk is full, so that the command may have failed because of it.
        """
        backend = self._backend
        assert backend.cgroups is not None
        after = backend.cgroups.counters(runner.slot)
        try:
            used = self._count_few()
            if used is None or max(used.entries, used.whiteouts) > _INLINE_ENTRIES:
                used = await asyncio.to_thread(self._count)
        except OSError as error:
            raise SandboxFailed(f"what the command wrote could not be counted: {error}") from error
        exceeded, self._usage = exceeded_limit(used, self._limits, self._usage), used
        killed = ending.killed
        if killed is not None and killed != "timeout" and killed != "full":
            return killed
        if killed == "full" and exceeded is None:
            raise backend.disk_full_error()
        if exceeded is None:
            # The command may have failed because the server's disk is full, which is not an error of the agent.
            backend.check_free_space()
        if after.oom_kills > before.oom_kills:
            return "memory"
        if exceeded is not None:
            return exceeded
        if ending.status in (_SIGXFSZ_STATUS, 128 - _SIGXFSZ_STATUS) or (
            ending.status != 0 and err.holds(b"File too large")
        ):
            return "file_size"
        cpu_signals = (_SIGXCPU_STATUS, 128 - _SIGXCPU_STATUS)
        if ending.status in cpu_signals or (ending.status == _KILLED_STATUS and ending.cpu_s >= self._limits.cpu_s):
            return "cpu"
        if not backend.cgroups.version:
            # The kernel does not count forks that RLIMIT_NPROC refused: the text of the error has to do.
            return "pids" if err.holds(b"Resource temporarily unavailable") else None
        return "pids" if after.pids_refused > before.pids_refused else None

    async def read_file(self, path: str, *, max_bytes: int = 1024**2) -> bytes:
        data = os.memfd_create("read")
        try:
            await self._file_request(path, {"do": "read", "max_bytes": max_bytes}, data)
            # In a thread if it is much; the descriptor is closed there, because that goes on where this is cancelled.
            size = min(max_bytes, os.fstat(data).st_size)
            if size > INLINE_BYTES:
                data, large = -1, data
                return await asyncio.to_thread(_read_and_close, large, size)
            return os.pread(data, size, 0)
        finally:
            if data >= 0:
                os.close(data)

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        self._check()
        if len(data) > self._limits.file_size_bytes:
            raise _refused(path, errno.EFBIG)
        if self._usage.size_bytes + len(data) > self._limits.disk_bytes or self._usage.entries >= self._limits.inodes:
            raise _refused(path, errno.EDQUOT)
        self._backend.check_free_space(len(data))
        content = await large_memory_file(data)
        try:
            await self._file_request(path, {"do": "write", "mode": mode}, content)
        finally:
            os.close(content)
        await self._recount()

    async def _recount(self) -> None:
        """Update the usage after the server wrote files in the sandbox."""
        before, self._usage = self._usage, await asyncio.to_thread(self._count)
        self._backend.growth.add(self._usage.allocated_bytes - before.allocated_bytes)

    async def _file_request(self, path: str, request: dict[str, Any], data: int) -> None:
        """Run a request for one file; raise `PathRefused` if the child refused it."""
        self._check()
        raw = _encode(path)
        if not raw or b"\0" in raw:
            raise _refused(path, errno.EINVAL if raw else errno.ENOENT)
        if len(raw) >= 4096:  # PATH_MAX; the request would not fit into the runner's socket either
            raise _refused(path[:200] + "...", errno.ENAMETOOLONG)
        runner, _ = await self._prepare()
        request["path"] = raw if raw.startswith(b"/") else self._shell.cwd.rstrip(b"/") + b"/" + raw
        ending = await self._exchange(runner, request, [os.dup(data)], {}, _FILE_TIMEOUT_S)
        if ending.answer is None:
            raise SandboxFailed(f"no answer about {path!r}: the helper process ended with status {ending.status}")
        if ending.answer[0] == "refused":
            self._backend.check_free_space()
            raise _refused(path, ending.answer[1])

    async def snapshot(self) -> SandboxSnapshot:
        self._check()
        if self._changed():
            await self._freeze()
        return SandboxSnapshot(self._ref(), self._shell.pack())

    async def _freeze(self) -> None:
        """Make a layer of the writable directory, in this thread if it is small."""
        freeze = functools.partial(
            self._backend.store.freeze,
            *(self._upper, self.layer, self.base, self._usage),
            workdir=self._workdir,
            writable=self._writable,
        )
        small = self._usage.entries + self._usage.whiteouts <= _INLINE_ENTRIES
        small = small and self._usage.size_bytes <= _INLINE_BYTES
        try:
            # For a few small files a thread would cost more than the work.
            meta = freeze() if small else await asyncio.to_thread(freeze)
        except OSError as error:
            raise SandboxFailed(f"a layer could not be written: {explained(error)}") from error
        self.layer = meta.id
        self._usage = Usage()

    def _changed(self) -> bool:
        """Return whether the writable directory has any entry."""
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
            await self._backend.runners.wait_until_gone(self._last)
        if self._directory is not None:
            await asyncio.to_thread(self._backend.remove, self._directory)

    def _check(self) -> None:
        if self._destroyed:
            raise SandboxFailed(f"sandbox {self.id} is destroyed: open or restore another")


class _RunnerEnded(SandboxFailed):
    """A runner ended before it got its command, and its cgroup is gone too."""


def _read_and_close(data: int, size: int) -> bytes:
    try:
        return os.pread(data, size, 0)
    finally:
        os.close(data)


def _rlimit(name: int, soft: int, hard: int) -> tuple[int, tuple[int, int]]:
    """Return a resource limit for setrlimit(2), lowered to this process's hard limit if it may not raise that."""
    most = resource.getrlimit(name)[1]
    if may_raise_limits() or most == resource.RLIM_INFINITY:
        return name, (soft, hard)
    within = [most if value == resource.RLIM_INFINITY else min(value, most) for value in (soft, hard)]
    return name, (within[0], within[1])


def _encode(text: str) -> bytes:
    """Encode text as UTF-8; surrogates that stand for no byte are encoded as such."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def _refused_command(status: int, message: str) -> CommandResult:
    text = f"/bin/bash: {message}\n"
    return CommandResult(exit_code=status, stdout="", stderr=text, stderr_bytes=len(text), shell_saved=False)


def _refused(path: str, number: int) -> PathRefused:
    # EXDEV: the path leads to another mount (/proc, /dev), which has no files of the agent.
    number = errno.EACCES if number == errno.EXDEV else number
    message = "Not a regular file" if number == errno.EINVAL else os.strerror(number)
    return PathRefused(path, errno.errorcode.get(number, str(number)), message)

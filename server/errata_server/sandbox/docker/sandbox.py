"""`DockerSandbox`: one sandbox, made of a container, the image that it was made from, and a shell state."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import posixpath
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import SandboxFailed, SandboxUnavailable

from .. import shell_state
from ..base import CommandResult, LimitHit, Limits, PathRefused, Sandbox, SandboxSnapshot
from ..output import BoundedOutput, texts
from ..shell_state import ShellState
from ..spec import DEFAULT_PATH, SandboxSpec
from . import program, start_archive, tree_map
from .broker import Broker, BrokerRefused
from .containers import ContainerPool, Kind
from .layer_records import LayerRecord, LayerRecords
from .tree_map import Entries, TreeMap

MAX_COMMAND_BYTES = 131_071
"""The kernel's limit on the size of one argument (MAX_ARG_STRLEN, without its NUL)."""
_FILE_TIMEOUT_S = 60.0
_COUNT_S = 0.5
"""Time between two counts of what a running command has written."""
_REFUSED_STATUS, _KILLED_STATUS, _SIGXCPU_STATUS, _SIGXFSZ_STATUS = 9, 137, 152, 153
_NUMBERS = {os.strerror(number): number for number in errno.errorcode}
_MOUNT_BYTES = 1024**3


class BackendServices(Protocol):
    """The part of `DockerBackend` that a sandbox uses.

    Attributes:
        live: Sandboxes that are not destroyed, by id.
        broker: The broker.
        containers: Makes and removes containers.
        records: Records of the layers.
        limits: Limits of sandboxes that are opened without limits.
        running_now: Number of commands that are running.
    """

    live: dict[str, DockerSandbox]
    broker: Broker
    containers: ContainerPool
    records: LayerRecords
    limits: Limits
    running_now: int

    def tree_map(self, base: str) -> TreeMap:
        """Return a reader of differences from a base image."""
        ...

    async def home(self, base: str, workdir: str) -> str:
        """Return the home directory of the agent on a base image."""
        ...


class DockerSandbox(Sandbox):
    """See `Sandbox`; made by `backend.DockerBackend`.

    Args:
        host: What it uses of the backend.
        name: Its id.
        base: Id of the base image, ``sha256:...``.
        record: The layer that it continues from; None for the base image.
        shell: The shell state of its first command.
        workdir: The work directory.
        home: The agent's home directory.
        limits: Its limits.
    """

    def __init__(
        self,
        host: BackendServices,
        name: str,
        *,
        base: str,
        record: LayerRecord | None,
        shell: ShellState,
        workdir: str,
        home: str,
        limits: Limits,
    ) -> None:
        self.id = name
        self.base = base
        self.image = record
        """The layer from which its container is made."""
        self.layer = record
        """The newest snapshot."""
        self.container: str | None = None
        self._host = host
        self._shell = shell
        self._workdir = workdir
        self._home = home
        self._limits = limits
        self._entries: Entries | None = record.entries if record else {}
        self._makes_layer = self._destroyed = False
        self._size = self._size_before = 0
        self._oom_kills = self._pids_refused = 0
        self._pending: asyncio.Future[tuple[str, int | None]] | None = None

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
        text = program.encoded(command)
        if b"\0" in text:
            return _refused_command("a command cannot contain a NUL byte")
        if len(text) > MAX_COMMAND_BYTES:
            return _refused_command("Argument list too long")
        for inside in mounts or {}:
            if not inside.startswith("/") or ".." in inside.split("/"):
                raise ValueError(f"mount point {inside!r} must be absolute and without '..'")
        startup = b"" if clean else shell_state.startup(self._shell, text, env or {})
        mark = program.nonce()
        program_input = program.run(
            text,
            startup=startup,
            environment=self._environment(clean, env or {}),
            cwd=b"/" if clean else self._shell.cwd,
            limits=self._limits,
            mark=mark,
            stdin=stdin,
        )
        self._host.running_now += 1
        try:
            copied = await self._copy_in(mounts) if mounts else ()
            try:
                return await self._command(program_input, mark, timeout_s, saves=bool(startup))
            finally:
                if copied:
                    await self._remove(copied)
        finally:
            self._host.running_now -= 1

    async def _command(self, program_input: bytes, mark: bytes, timeout_s: float, *, saves: bool) -> CommandResult:
        """Run a prepared command and evaluate its end, its report and its limits.

        Args:
            program_input: Standard input of the program; see `program.run`.
            mark: Beginning of the program's report.
            timeout_s: Wall time after which it is killed.
            saves: The command saves its shell state.
        """
        limits = self._limits
        out, err, end = BoundedOutput(limits.keep_bytes), BoundedOutput(limits.keep_bytes), bytearray()

        def sink(stream: str, data: bytes) -> None:
            if stream == "stdout":
                out.feed(data)
                return
            end.extend(data)  # the report is at the end of it
            if len(end) > 2 * program.REPORT_BYTES:
                err.feed(bytes(end[: -program.REPORT_BYTES]))
                del end[: -program.REPORT_BYTES]

        started = time.monotonic()
        stop = asyncio.Event()
        budget = limits.output_bytes + program.REPORT_BYTES
        watch = asyncio.ensure_future(self._watch(stop))
        try:
            ended, status = await self._exec(program_input, sink, timeout_s=timeout_s, output_bytes=budget, stop=stop)
        finally:
            watch.cancel()
        own, report = program.parse_report(bytes(end), mark)
        err.feed(own)
        duration_s = time.monotonic() - started
        killed: LimitHit | None = None
        oom_kills, pids_refused = self._oom_kills, self._pids_refused
        if ended == "exit":
            counted = report or await self._clean_up()
            if counted is not None:
                oom_kills, pids_refused = counted.oom_kills, counted.pids_refused
        else:
            killed = {"output": "output", "stopped": "disk"}.get(ended)  # type: ignore[assignment]
        limit_hit = killed
        beyond = await self._count()
        if limit_hit is None and ended != "timeout":
            if oom_kills > self._oom_kills:
                limit_hit = "memory"
            elif beyond:
                limit_hit = "disk"
            elif status == _SIGXFSZ_STATUS or (status != 0 and err.holds(b"File too large")):
                limit_hit = "file_size"
            elif status == _SIGXCPU_STATUS or (status == _KILLED_STATUS and duration_s >= limits.cpu_s):
                limit_hit = "cpu"
            elif pids_refused > self._pids_refused:
                limit_hit = "pids"
        self._oom_kills, self._pids_refused = (oom_kills, pids_refused) if ended == "exit" else (0, 0)
        new_shell = shell_state.saved(report.state) if report is not None and saves and ended == "exit" else None
        if new_shell is not None:
            self._shell = new_shell
        exit_code = None if ended == "timeout" else _KILLED_STATUS if ended != "exit" else status
        stdout, stderr = await texts(out, err)
        return CommandResult(
            exit_code=exit_code,
            stdout=stdout,
            stderr=stderr,
            duration_s=duration_s,
            timed_out=ended == "timeout",
            limit_hit=limit_hit,
            killed_background=report.left if report is not None and ended == "exit" else (),
            stdout_bytes=out.total,
            stderr_bytes=err.total,
            truncated=out.truncated or err.truncated,
            shell_saved=new_shell is not None,
        )

    def _environment(self, clean: bool, env: Mapping[str, str]) -> dict[bytes, bytes]:
        """Return all environment variables of a command."""
        found: Mapping[str, str] = self.defaults() if clean or self._shell.pristine else {}
        encoded = {program.encoded(name): program.encoded(value) for name, value in found.items()}
        encoded[b"PWD"] = b"/" if clean else self._shell.cwd
        if clean:
            encoded.update((program.encoded(name), program.encoded(value)) for name, value in env.items())
        else:
            name, value = program.STATE_VARIABLE
            encoded[name] = value
        return encoded

    def defaults(self) -> Mapping[str, str]:
        """Return the variables of the first command."""
        return {
            "PATH": DEFAULT_PATH,
            "HOME": self._home,
            "USER": "agent",
            "LOGNAME": "agent",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            "TERM": "dumb",
            "PYTHONHASHSEED": "0",
        }

    # The container

    async def _own_container(self) -> str:
        """Return this sandbox's container, taking one at the first call; waits for a cancelled command to end."""
        if self._pending is not None:  # a command whose call was cancelled is still being killed
            pending, self._pending = self._pending, None
            await asyncio.wait([pending])
        self._check()
        if self.container is None:
            image = f"sha256:{self.image.id}" if self.image else self.base
            kind = Kind.of(image, self._limits)
            usual = self.image is None and kind == Kind.of(image, self._host.limits)
            made = await self._host.containers.take(kind, refill=usual)
            if self._destroyed:
                self._host.containers.remove(made)
            self._check()
            self.container = made
        return self.container

    async def _exec(
        self,
        program_input: bytes,
        sink: object,
        *,
        timeout_s: float,
        output_bytes: int,
        root: bool = False,
        stop: asyncio.Event | None = None,
    ) -> tuple[str, int | None]:
        """Run `program.ARGV` in the container, starting it first if it is not running.

        If this call is cancelled the program is killed, and the next use of the container waits for its end.

        Returns:
            Why it ended and its exit status; see `Broker.exec`.
        """
        container = await self._own_container()
        stop = stop or asyncio.Event()
        self._entries = None

        async def once() -> tuple[str, int | None]:
            return await self._host.broker.exec(
                container,
                program.ARGV,
                program_input,
                sink,  # type: ignore[arg-type]
                timeout_s=timeout_s,
                output_bytes=output_bytes,
                root=root,
                stop=stop,
            )

        async def start_and_run() -> tuple[str, int | None]:
            try:
                return await once()
            except BrokerRefused as error:
                if error.why != "not_running":
                    raise
            # The agent stopped the container, or the engine was restarted; the files are still there.
            await self._host.broker.call("start", container=container)
            self._oom_kills = self._pids_refused = 0
            return await once()

        task = asyncio.ensure_future(start_and_run())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            stop.set()
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._pending = task
            raise

    async def _clean_up(self) -> program.Report | None:
        """Kill the processes of a command that killed the program that runs it; return the program's report, if any."""
        mark, end = program.nonce(), bytearray()
        program_input = program.clean_up(mark)
        ended, _ = await self._exec(
            program_input, lambda _, data: end.extend(data), timeout_s=10.0, output_bytes=1024**2
        )
        report = program.parse_report(bytes(end), mark)[1]
        if ended == "exit" and report is None:
            await self._host.broker.call("restart", container=await self._own_container())
        return report

    async def _watch(self, stop: asyncio.Event) -> None:
        """Set ``stop`` once the command has written more than its disk limit."""
        while True:
            await asyncio.sleep(_COUNT_S)
            if self.container is None:
                continue
            try:
                answer = await self._host.broker.call("inspect", container=self.container, size=True)
            except (BrokerRefused, SandboxUnavailable):
                continue  # only the count after the command has to succeed
            now = answer["size_bytes"] - self._size_before
            if now > self._limits.disk_bytes and now > self._size:
                stop.set()
                return

    async def _count(self) -> bool:
        """Count what was written since the last snapshot; return whether the command exceeded the disk limit."""
        answer = await self._host.broker.call("inspect", container=await self._own_container(), size=True)
        now = answer["size_bytes"] - self._size_before
        beyond = now > self._limits.disk_bytes and now > self._size
        self._size = now
        return bool(beyond)

    # Mounts and files

    async def _copy_in(self, mounts: Mapping[str, Path]) -> tuple[str, ...]:
        """Copy directories of the host into the container, owned by root; return the paths to remove afterwards."""
        container = await self._own_container()
        await self._ensure_running(container)
        missing = await self._first_missing(list(mounts))
        archive = await asyncio.to_thread(_archive_of, mounts)
        await self._host.broker.copy_in(container, archive)
        return missing

    async def _ensure_running(self, container: str) -> None:
        """Start the container if it does not run."""
        answer = await self._host.broker.call("inspect", container=container)
        if not answer["running"]:
            await self._host.broker.call("start", container=container)
            self._oom_kills = self._pids_refused = 0

    async def _first_missing(self, paths: list[str]) -> tuple[str, ...]:
        """Return the paths to remove so that nothing is left of ``paths``, which are about to be created.

        For each path this is its topmost ancestor that does not exist yet, or the path itself if its parent exists.
        Each is returned once.

        Args:
            paths: Absolute paths in the container.

        Raises:
            SandboxFailed: A path exists already, even as a dangling symlink.
        """
        wanted: list[str] = []
        for path in paths:
            part = posixpath.normpath(path)
            while part != "/":
                wanted.append(part)
                part = posixpath.dirname(part)
        words = b" ".join(program.quoted(program.encoded(path)) for path in wanted)
        text = b"for p in " + words + b"; do [[ -e $p || -L $p ]] || printf '%s\\0' \"$p\"; done"
        found = bytearray()
        program_input = b"%d\n" % len(text) + text
        await self._exec(
            program_input,
            lambda _, data: found.extend(data),
            timeout_s=_FILE_TIMEOUT_S,
            output_bytes=1024**2,
            root=True,
        )
        missing = {os.fsdecode(path) for path in bytes(found).split(b"\0") if path}
        tops = []
        for path in paths:
            at = posixpath.normpath(path)
            if at not in missing:
                raise SandboxFailed(
                    f"{path} exists in the sandbox, and a container cannot have it replaced for one command"
                )
            while posixpath.dirname(at) in missing:
                at = posixpath.dirname(at)
            tops.append(at)
        return tuple(dict.fromkeys(tops))

    async def _remove(self, paths: tuple[str, ...]) -> None:
        """Delete files and directories of the container as root (``rm -rf``: a missing path is no error).

        Raises:
            SandboxFailed: One could not be deleted, or the time was up.
        """
        text = b"rm -rf -- " + b" ".join(program.quoted(program.encoded(path)) for path in paths)
        program_input = b"%d\n" % len(text) + text
        output = bytearray()
        ended, status = await self._exec(
            program_input,
            lambda _, data: output.extend(data),
            timeout_s=_FILE_TIMEOUT_S,
            output_bytes=1024**2,
            root=True,
        )
        if (ended, status) != ("exit", 0):
            why = bytes(output[:300]).decode("utf-8", "replace")
            raise SandboxFailed(f"{paths[0]} of a sandbox could not be removed: {why or ended}")

    async def read_file(self, path: str, *, max_bytes: int = 1024**2) -> bytes:
        found = bytearray()
        await self._file_request(path, lambda full: program.read(full, max_bytes), found, max_bytes + 65536)
        return bytes(found[:max_bytes])

    async def write_file(self, path: str, data: bytes, *, mode: int | None = None) -> None:
        self._check()
        if len(data) > self._limits.file_size_bytes:
            raise _refused(path, errno.EFBIG)
        if self._size + len(data) > self._limits.disk_bytes:
            raise _refused(path, errno.EDQUOT)
        await self._file_request(path, lambda full: program.write(full, data, mode), bytearray(), 65536)
        await self._count()

    async def _file_request(self, path: str, make: object, found: bytearray, output_bytes: int) -> None:
        """Run a program that reads or writes a file.

        Args:
            path: The path as the caller gave it.
            make: Returns the program's input for the absolute path.
            found: Gets its standard output.
            output_bytes: Most output.

        Raises:
            PathRefused: The program refused the path.
        """
        self._check()
        raw = program.encoded(path)
        if not raw or b"\0" in raw:
            raise _refused(path, errno.EINVAL if raw else errno.ENOENT)
        if len(raw) >= 4096:
            raise _refused(path[:200] + "...", errno.ENAMETOOLONG)
        full = raw if raw.startswith(b"/") else self._shell.cwd.rstrip(b"/") + b"/" + raw
        errors = bytearray()

        def sink(stream: str, data: bytes) -> None:
            (found if stream == "stdout" else errors).extend(data)

        program_input = make(full)  # type: ignore[operator]
        ended, status = await self._exec(program_input, sink, timeout_s=_FILE_TIMEOUT_S, output_bytes=output_bytes)
        if (ended, status) == ("exit", 0):
            return
        words = errors.decode("utf-8", "backslashreplace").strip()
        if (ended, status) == ("exit", _REFUSED_STATUS):
            number = getattr(errno, words, None) or _NUMBERS.get(words)
            if number is not None:
                raise _refused(path, number)
        raise SandboxFailed(f"no answer about {path!r}: the program {ended} with {status}: {words[-300:]}")

    # Snapshots

    async def prepare(self, spec: SandboxSpec) -> None:
        """Make the files of ``spec``; called by `DockerBackend.open`.

        Raises:
            SpecRefused: The image has something else at the path of an entry.
            SandboxFailed: The files could not be made.
        """
        self._workdir = spec.workdir
        self._home = await self._host.home(self.base, spec.workdir)
        self._shell = ShellState.starting(spec.workdir, spec.env, self.defaults())
        if not spec.makes_files:
            return
        if spec.empty:
            await self._remove((spec.workdir,))
        paths, question = start_archive.probe(spec)
        answer = bytearray()
        await self._exec(
            question, lambda _, data: answer.extend(data), timeout_s=_FILE_TIMEOUT_S, output_bytes=2**24, root=True
        )
        archive = await asyncio.to_thread(start_archive.archive, spec, paths, bytes(answer))
        await self._host.broker.copy_in(await self._own_container(), archive)
        await self._recount()
        self._makes_layer = True

    async def _recount(self) -> None:
        """Take the present size of the container as the base for the disk limit."""
        answer = await self._host.broker.call("inspect", container=await self._own_container(), size=True)
        self._size_before, self._size = answer["size_bytes"], 0

    async def _changed(self) -> Entries:
        """Return the differences from the base image, reading them if a command ran since the last time."""
        if self._entries is None:
            container = await self._own_container()
            before = self.image.entries if self.image else {}
            self._entries = await self._host.tree_map(self.base).read(container, before)
        return self._entries

    async def snapshot(self) -> SandboxSnapshot:
        self._check()
        entries = await self._changed()
        if self._makes_layer or entries != (self.layer.entries if self.layer else {}):
            await self._commit(entries)
        return SandboxSnapshot(self._ref(), self._shell.pack())

    async def _commit(self, entries: Entries) -> None:
        """Commit the container as a new layer with these differences from the base image."""
        container = await self._own_container()
        facts = {"base": self.base, "workdir": self._workdir}
        answer = await self._host.broker.call("commit", container=container, facts=facts, timeout_s=330.0)
        record = LayerRecord(
            id=str(answer["image"]).removeprefix("sha256:"),
            base=self.base,
            parent=self.layer.id if self.layer else "",
            workdir=self._workdir,
            digest=tree_map.digest(entries),
            depth=self.layer.depth + 1 if self.layer else 1,
            entries=entries,
        )
        await asyncio.to_thread(self._host.records.write, record)
        self.layer, self._makes_layer = record, False
        await self._recount()

    def _ref(self) -> SnapshotRef:
        if self.layer is not None:
            return SnapshotRef("layer", self.layer.id, self.layer.digest)
        return SnapshotRef("base", self.base.removeprefix("sha256:"))

    async def merged_digest(self) -> str:
        self._check()
        return tree_map.digest(await self._changed())

    async def destroy(self) -> None:
        if self._destroyed:
            return
        self._destroyed = True
        self._host.live.pop(self.id, None)
        if self.container is not None:
            self._host.containers.remove(self.container)

    def _check(self) -> None:
        if self._destroyed:
            raise SandboxFailed(f"sandbox {self.id} is destroyed: open or restore another")


def _archive_of(mounts: Mapping[str, Path]) -> bytes:
    """Return a tar archive of directories of the host, owned by root, with files, directories and symlinks only.

    Raises:
        SandboxFailed: A directory cannot be read or is larger than 1 GiB.
    """
    written = io.BytesIO()

    def clean(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isdir() or member.isreg() or member.issym()):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode &= 0o777
        return member

    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT, dereference=False) as out:
        for inside, source in mounts.items():
            try:
                out.add(source, arcname=posixpath.normpath(inside).lstrip("/"), filter=clean)
            except OSError as error:
                raise SandboxFailed(f"{source} cannot be copied into a container: {error}") from error
            if written.tell() > _MOUNT_BYTES:
                raise SandboxFailed(f"{source} is larger than {_MOUNT_BYTES} bytes")
    return written.getvalue()


def _refused_command(message: str) -> CommandResult:
    text = f"/bin/bash: {message}\n"
    return CommandResult(exit_code=126, stdout="", stderr=text, stderr_bytes=len(text), shell_saved=False)


def _refused(path: str, number: int) -> PathRefused:
    message = "Not a regular file" if number == errno.EINVAL else os.strerror(number)
    return PathRefused(path, errno.errorcode.get(number, str(number)), message)

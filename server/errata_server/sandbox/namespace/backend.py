"""`NamespaceBackend`: sandboxes made of Linux namespaces and overlayfs, without a daemon. An idle sandbox
has no process.

`NamespaceBackend` owns the data directory, the layers and the launcher; `sandbox` has the part of one session;
`exchange`, `runner_pool` and the launcher run a command.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from errata_os import descriptors
from errata_os.division import ALONE, Division
from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import SandboxFailed, SandboxUnavailable

from ..base import Backend, BackendInfo, CollectReport, Limits, Sandbox, SandboxSnapshot
from ..base_trees.recipe import VERIFIER_DIRECTORY
from ..base_trees.tree import AGENT_UID, BaseTree, check_owner, find_base
from ..files import as_owner
from ..files.overlay_form import ROOT_FORM, rootless_form
from ..files.walk import Usage, remove_tree
from ..host import seccomp
from ..host.cgroups import Cgroups, find
from ..host.privileges import Mode, check_privileges, mode_of, why_refused
from ..launcher.kernel import clone_id_mapped
from ..launcher.messages import LauncherConfig
from ..layers.store import LayerStore
from ..shell_state import ShellState
from ..spec import WORKSPACE, SandboxSpec
from .disk_watch import DiskSpace, Growth
from .free_space import FreeSpace
from .runner_pool import RunnerPool
from .sandbox import NamespaceSandbox

log = logging.getLogger("errata.sandbox")

_OVERLAY_OPTIONS = "redirect_dir=nofollow,metacopy=off,index=off,volatile"
"""All given explicitly, because defaults differ between distributions. Without ``volatile`` the unmount after a command
would sync the whole file system of the data directory; `LayerStore.freeze` syncs when asked to."""

RUNNING_DESCRIPTORS = 6
"""File descriptors of a running command: two sockets, two pipes, the shell's state and one in reserve."""
COMMANDS_AT_ONCE = 400
"""Default for the number of commands at one time."""
LEAST_AT_ONCE = 8
"""This many commands run at one time, however low the limit of open files is."""

RESERVE_BYTES = 256 * 1024**2
"""Disk space that is kept free for the journal and the server's other files."""

_FIRST_UID = 0x7000_0001
_UID_BLOCKS = 0xFFE
"""Host uids of commands: higher than every range that systemd and container engines use. A hash of the data directory's
path selects one block of 65,536 uids; several processes of one server have those from the first one's on. Two servers
with the same block would share resource limits, nothing else."""


class NamespaceBackend(Backend):
    """See `Backend`.

    Args:
        data_dir: Directory of layers and writable directories; made if missing. One process at a time can use it.
        bases: Directories of base trees that the operator named, by name.
        limits: Limits of sandboxes that are opened without limits.
        sync: Layers are on stable storage when `NamespaceSandbox.snapshot` returns.
        spare: Number of runners kept ready, so that a command need not wait for one.
        max_running: Most commands at one time; further ones wait.
        reserve_bytes: Space to keep free on the disk of ``data_dir``, at most 5 % of the disk. With less free space no
            command starts, and a running one that grows is killed and raises `SandboxFailed`.
        division: Which part of the commands and of their CPU is this process's.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        bases: Mapping[str, Path] = MappingProxyType({}),
        limits: Limits | None = None,
        sync: bool = False,
        spare: int = 4,
        max_running: int = COMMANDS_AT_ONCE,
        reserve_bytes: int = RESERVE_BYTES,
        division: Division = ALONE,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self._division = division
        max_running, spare = division.share(max_running, LEAST_AT_ONCE), division.share(spare)
        self.limits = limits or Limits()
        self.mode = mode_of(os.geteuid())
        self._form = ROOT_FORM if self.mode == "root" else rootless_form(AGENT_UID)
        self.store = LayerStore(self.data_dir / "layers", self.data_dir / "trash", sync=sync, form=self._form)
        self.live_dir = self.data_dir / "live" / secrets.token_hex(6)
        self.live: dict[str, NamespaceSandbox] = {}
        share = descriptors.budget(descriptors.limit(), max_running * RUNNING_DESCRIPTORS).commands
        self._bound = min(max_running, max(LEAST_AT_ONCE, share // RUNNING_DESCRIPTORS))
        self._wanted_bound = max_running
        self.runners = RunnerPool(self._launch_config, spare=spare, bound=self._bound, started=self._record_launcher)
        self.cgroups: Cgroups | None = None
        self._bases = bases
        self._trees: dict[str, BaseTree] = {}
        self._preparing = threading.Lock()
        self._lock_fd = -1
        self._info: BackendInfo | None = None
        self._mapped: dict[str, bool] = {}
        self._linked: dict[str, Path] = {}
        self.reserve_bytes = reserve_bytes
        self.count_executor = ThreadPoolExecutor(2, "errata-count")
        self.growth = Growth()
        self.space = FreeSpace(self.data_dir)
        self._orphans = 0

    @property
    def running(self) -> int:
        return self.runners.in_use

    @property
    def trouble(self) -> str | None:
        return self.runners.trouble

    async def start(self) -> BackendInfo:
        if self._info is None:
            check_privileges()
            try:
                await asyncio.to_thread(self._prepare)
                self._info = await self._probe()
            except SandboxFailed as error:
                await self.close()
                raise SandboxUnavailable(_explain(str(error), self.data_dir, self.mode)) from error
            except BaseException:
                await self.close()
                raise
        return self._info

    def _prepare(self) -> None:
        """Lock and make the data directory, end what an earlier server left, and move its leftovers to the trash."""
        with self._preparing:
            if self._lock_fd >= 0:
                return
            self.base(self._default_base())
            self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._kill_old_launcher()
            for name in ("layers", "live", "trash", "bases", "stage"):
                (self.data_dir / name).mkdir(mode=0o700, exist_ok=True)
            for old in (self.data_dir / "live").iterdir():
                self._orphans += sum(1 for _ in old.iterdir())
                old.rename(self.data_dir / "trash" / f"{old.name}-{secrets.token_hex(4)}")
            for unfinished in (self.data_dir / "trash").glob("new-*"):
                unfinished.rename(self.data_dir / "trash" / f"dead-{secrets.token_hex(8)}")
            self.live_dir.mkdir(mode=0o700)

    def _take_lock(self) -> None:
        """Lock the data directory, or raise SandboxUnavailable if another process has it."""
        fd = os.open(self.data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise SandboxUnavailable(
                f"another server uses the sandboxes in {self.data_dir}: stop it or choose another data directory"
            ) from error
        self._lock_fd = fd

    def _kill_old_launcher(self) -> None:
        """Kill the launcher of an earlier server, if it still runs; its runners end with it.

        Raises:
            SandboxUnavailable: It does not end within 10 s.
        """
        try:
            pid, started = (int(field) for field in (self.data_dir / "launcher").read_text().split())
        except (FileNotFoundError, ValueError):
            return  # none was started, or the server was killed while it wrote the file
        deadline = time.monotonic() + 10.0
        while _start_time(pid) == started:
            if time.monotonic() > deadline:
                raise SandboxUnavailable(
                    f"process {pid}, the launcher of an earlier server, does not end within 10 s of SIGKILL and may "
                    f"use sandboxes in {self.data_dir}: wait until its disk answers, or choose another data directory"
                )
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _record_launcher(self, pid: int) -> None:
        (self.data_dir / "launcher").write_text(f"{pid} {_start_time(pid)}")

    def _launch_config(self) -> LauncherConfig:
        """Find the cgroups and return the configuration of a new launcher."""
        digest = hashlib.sha256(os.fsencode(self.data_dir))
        self.cgroups = find(f"errata-{digest.hexdigest()[:12]}", self._division)
        return {
            "server": os.getpid(),
            "data": str(self.data_dir),
            "home": str(self.data_dir / "layers"),
            "stage": str(self.data_dir / "stage"),
            "cgroups": self.cgroups.roots,
            "own_cgroups": self.cgroups.launcher_procs,
            "overlay": ",".join((_OVERLAY_OPTIONS, *self._form.options)),
            "rootless": self.mode == "rootless",
            "uid": AGENT_UID,
            "hidden": [VERIFIER_DIRECTORY],
            "first_uid": self._first_uid() if self.mode == "root" else None,
            "seccomp": seccomp.program(),
        }

    def _first_uid(self) -> int:
        first = self._division.first
        named = self.data_dir if first is None else first / self.data_dir.name
        block = int.from_bytes(hashlib.sha256(os.fsencode(named)).digest()[-4:]) + self._division.number
        return _FIRST_UID + block % _UID_BLOCKS * 65_536

    async def _probe(self) -> BackendInfo:
        """Run a trial command and return what this backend can do; only a command shows whether everything works.

        Raises:
            SandboxFailed: The command failed.
        """
        probe = self._new(self.base(self._default_base()), "", ShellState(), Limits())
        try:
            result = await probe.run("cd /workspace && printf ok > .errata-probe && rm .errata-probe", timeout_s=30.0)
        finally:
            await probe.destroy()
        if result.exit_code != 0:
            raise SandboxFailed(f"a trial command failed: {result.stderr.strip() or result.exit_code}")
        assert self.cgroups is not None
        enforced = {"file_size_bytes", "disk_bytes", "inodes", "cpu_s", "keep_bytes", "output_bytes", "open_files"}
        if self.cgroups.version:
            enforced |= {"memory_bytes", "pids"}
        notes = []
        if not self.cgroups.version:
            has_pids = self.mode == "rootless" or self.is_mapped(probe.base)
            notes.append(f"{'memory is' if has_pids else 'memory and pids are'} not limited, {self.cgroups.note}")
        if self.mode == "rootless" or self.is_mapped(probe.base):
            enforced.add("pids")  # by RLIMIT_NPROC: each command has a uid or a user namespace to itself
        else:
            notes.append(
                "all commands run under one uid of the host and share its inotify instances and pipe buffers: "
                f"{self.runners.shared_uid or 'the base tree cannot be mounted id-mapped'}. Use Linux >= 5.19, with "
                "the data directory and the base tree on ext4, xfs, btrfs or tmpfs"
            )
        if self._bound < self._wanted_bound:
            notes.append(
                f"{self._bound} commands at once instead of {self._wanted_bound}, further ones wait: "
                "raise the limit of open files (ulimit -n)"
            )
        return BackendInfo("namespace", frozenset(enforced), tuple(notes), self.mode, self.cgroups.version)

    def _default_base(self) -> str:
        return "default" if "default" in self._bases or not self._bases else next(iter(self._bases))

    def base(self, name: str) -> BaseTree:
        """Return a base tree by name or id, cached because a tree never changes.

        Raises:
            SandboxUnavailable: There is none of that name, or rootless mode cannot use it.
        """
        found = self._trees.get(name)
        if found is None:
            found = find_base(name, self._bases)
            if self.mode == "rootless":
                check_owner(found)
            self._trees[name] = self._trees[found.id] = found
        return found

    def link_base(self, base: BaseTree) -> str:
        """Make a symlink to a base tree, unless it was made before; return its path relative to the layers directory,
        short for mount options."""
        if self._linked.get(base.id) == base.root:  # a busy disk must not hold up the event loop
            return f"../bases/{base.id}"
        link = self.data_dir / "bases" / base.id
        try:
            if link.readlink() != base.root:
                link.unlink()
        except FileNotFoundError:
            pass
        with contextlib.suppress(FileExistsError):
            link.symlink_to(base.root)
        self._linked[base.id] = base.root
        return f"../bases/{base.id}"

    def is_mapped(self, base: BaseTree) -> bool:
        """Return whether commands on ``base`` each run under a different host uid, which id-mapped mounts need.

        Tried once for each base tree. False before the launcher has started.
        """
        if self.runners.userns < 0:
            return False
        if base.id not in self._mapped:
            try:
                os.close(clone_id_mapped(base.root, self.runners.userns))
                self._mapped[base.id] = True
            except OSError as error:
                log.warning("commands on base tree %s share one uid of the host: %s", base.name, error)
                self._mapped[base.id] = False
        return self._mapped[base.id]

    def check_free_space(self, more_bytes: int = 0) -> None:
        """Check that the reserve is free, so that a full disk of the server never looks like an error of the agent.

        Args:
            more_bytes: Bytes that are about to be written.

        Raises:
            SandboxFailed: Less than the reserve would be free.
        """
        space = DiskSpace.of(self.data_dir, self.reserve_bytes)
        if space.full or space.free_bytes - more_bytes < space.reserve_bytes:
            raise self.disk_full_error()

    def disk_full_error(self) -> SandboxFailed:
        """Return an error that says how much space is free."""
        space = DiskSpace.of(self.data_dir, self.reserve_bytes)
        return SandboxFailed(f"the disk of {self.data_dir} is full: {space}: free space, then repeat")

    def _new(self, base: BaseTree, layer: str, shell: ShellState, limits: Limits | None) -> NamespaceSandbox:
        """Return a new sandbox and add it to the open ones."""
        made = NamespaceSandbox(self, secrets.token_hex(8), base, layer, shell, limits or self.limits)
        self.live[made.id] = made
        return made

    async def open(
        self, *, base: str = "default", limits: Limits | None = None, spec: SandboxSpec | None = None
    ) -> Sandbox:
        await self.start()
        made = self._new(self.base(base), "", ShellState(), limits)
        if spec is not None:
            try:
                await made.prepare(spec)
            except BaseException:
                await made.destroy()
                raise
        return made

    async def restore(self, snapshot: SandboxSnapshot, *, limits: Limits | None = None) -> Sandbox:
        await self.start()
        ref = snapshot.ref
        layer = ref.id if ref.kind == "layer" else ""
        meta = self.store.meta(layer) if layer else None
        base_id = meta.base if meta else ref.id
        try:
            shell = ShellState.unpack(snapshot.shell, meta.workdir if meta else WORKSPACE)
        except ValueError as error:
            raise SandboxFailed("the saved shell state was not written by this backend") from error
        try:
            base = self.base(base_id)
        except SandboxUnavailable as error:
            raise SandboxFailed(f"base tree {base_id} of the snapshot is not there: {error}") from error
        return self._new(base, layer, shell, limits)

    async def collect(self, keep: Iterable[SnapshotRef]) -> CollectReport:
        """See `Backend.collect`. ``keep`` may be lazy: it is read after the layers of the open sandboxes, so a snapshot
        that is committed in between is in one of the two."""
        await self.start()
        candidates = await asyncio.to_thread(self.store.names)
        pinned = {sandbox.layer for sandbox in list(self.live.values())}
        named = [ref.id for ref in keep if ref.kind == "layer"]
        layers, size = await asyncio.to_thread(self.store.delete, candidates, [*pinned, *named])
        self.growth.add(-size)
        size += await asyncio.to_thread(self._empty_trash)
        orphans, self._orphans = self._orphans, 0
        return CollectReport(layers=layers, sandboxes=orphans, size_bytes=size)

    def _empty_trash(self) -> int:
        # A layer that is being made is in the trash directory too, named `new-...`.
        old = [path for path in (self.data_dir / "trash").iterdir() if not path.name.startswith("new-")]
        return sum(self.remove(path).size_bytes for path in old)

    def remove(self, tree: Path) -> Usage:
        """Delete a tree, also where modes deny its owner access, and return its size."""
        if self.mode == "rootless":
            # overlayfs makes them with mode 000; changed here, so that a deletion rarely needs a helper process.
            with contextlib.suppress(OSError):
                for name in ("w/work", "w/work/incompat", "w/work/incompat/volatile"):
                    (tree / name).chmod(0o700)
        removed = as_owner.call(remove_tree, tree)
        self.growth.add(-removed.size_bytes)
        return removed

    async def close(self) -> None:
        for sandbox in list(self.live.values()):
            await sandbox.destroy()
        await asyncio.to_thread(self._release)

    def _release(self) -> None:
        """End the launcher, remove cgroups and this process's directory, and unlock the data directory."""
        with self._preparing:
            self.runners.close()
            if self.cgroups is not None:
                self.cgroups.remove()
            if self._lock_fd >= 0:
                self.remove(self.live_dir)
                os.close(self._lock_fd)
            self._lock_fd = -1
            self._info = None


def _start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it has ended. With the pid it is unique."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


def _explain(failure: str, data_dir: Path, mode: Mode) -> str:
    """Return a message, one line, that says why sandboxes do not work here and what to change.

    Args:
        failure: The error of the launcher or of the trial command.
        data_dir: The backend's directory.
        mode: The sandbox mode.
    """
    failure = " ".join(failure.split())
    refused = "Operation not permitted" in failure or "Permission denied" in failure
    if mode == "rootless" and ("user namespace" in failure or (refused and "mount" in failure)):
        return f"the kernel refuses user namespaces or operations in them ({failure}): {why_refused()}"
    if "mount overlay" in failure:
        return (
            f"overlayfs does not work in {data_dir} ({failure}): put the data directory on ext4, xfs or tmpfs (not on "
            "another overlay, such as a container's own file system), with the kernel's overlay module loaded"
        )
    if "unshare" in failure or "setns" in failure:
        return f"the kernel refuses namespaces ({failure}): run outside of a container or with --privileged"
    if "/bin/bash" in failure or "pivot_root" in failure or "mount on" in failure or WORKSPACE in failure:
        needs = f"/bin/bash, /proc, /dev and a {WORKSPACE} owned by uid {AGENT_UID}"
        return f"the base tree does not work ({failure}): it needs {needs}"
    return f"the namespace sandbox does not work here: {failure}"

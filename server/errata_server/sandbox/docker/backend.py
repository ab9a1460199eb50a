"""`DockerBackend`: sandboxes as containers of an engine to which only the broker has access."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from errata_os.division import ALONE, Division
from errata_protocol.environment import SnapshotRef
from errata_protocol.errors import SandboxFailed, SandboxUnavailable
from errata_protocol.names import DIGEST_ID

from ..base import Backend, BackendInfo, CollectReport, Limits, Sandbox, SandboxSnapshot
from ..base_trees.recipe import VERIFIER_DIRECTORY
from ..shell_state import ShellState
from ..spec import WORKSPACE, SandboxSpec
from .broker import WAIT_S, Broker, BrokerRefused
from .containers import ContainerPool, Kind
from .layer_records import LayerRecord, LayerRecords
from .program import DEFAULT_HOME
from .sandbox import DockerSandbox
from .tree_map import Entries, TreeMap

log = logging.getLogger("errata.sandbox")

SPARE = 2
_HEARTBEAT_S = 10.0
_NOTES = (
    "a snapshot is a commit of the container (some 0.1 s): take one for grading and forks, not for each step",
    "inodes are not limited, and disk is counted twice a second: an engine on ext4 has no quotas",
    "mounts of a verifier are copies that exist during one command",
    "system calls are filtered by the engine's own profile",
)


class DockerBackend(Backend):
    """See `Backend`.

    Args:
        directory: Directory for the records of layers.
        broker: The broker's socket for this server.
        limits: Limits of sandboxes that are opened without limits.
        spare: Number of started containers to keep ready.
        wait_s: How long a request waits for a broker that is restarted or busy, in seconds.
        division: Which of the processes that use the broker's socket is this one.
    """

    def __init__(
        self,
        directory: Path,
        broker: Path,
        *,
        limits: Limits | None = None,
        spare: int = SPARE,
        wait_s: float = WAIT_S,
        division: Division = ALONE,
    ) -> None:
        self.live: dict[str, DockerSandbox] = {}
        self.broker = Broker(broker, wait_s)
        self._division = division
        self.containers = ContainerPool(self.broker, division.share(spare), division.number)
        self.records = LayerRecords(directory / "layers")
        self.limits = limits or Limits()
        self.running_now = 0
        self._images: dict[str, str] = {}
        self._base_containers: dict[str, asyncio.Task[str]] = {}
        self._trees: dict[str, dict[str, Entries]] = {}
        self._info: BackendInfo | None = None
        self._starting = asyncio.Lock()
        self._health_check: asyncio.Task[None] | None = None

    async def start(self) -> BackendInfo:
        async with self._starting:
            if self._info is not None:
                return self._info
            try:
                found = await self.broker.call("ping", timeout_s=15.0, wait_s=0.0)
                listed = await self.broker.call("list")
            except BrokerRefused as error:
                raise SandboxUnavailable(error.message) from error
            self.records.start()
            self.containers.start()
            for row in listed["containers"]:  # left by an earlier process: the owner's socket is this server's alone
                if self._is_left_over(_part(row)):
                    self.containers.remove(row["container"])
            self._health_check = asyncio.ensure_future(self._keep_checking())
            enforces = {"memory_bytes", "pids", "file_size_bytes", "disk_bytes", "cpu_s", "open_files"}
            self._info = BackendInfo(
                "docker",
                frozenset(enforces | {"keep_bytes", "output_bytes"}),
                (f"engine {found['engine']}", *_NOTES),
            )
            return self._info

    def _is_left_over(self, part: int) -> bool:
        """Return whether a container that is there before this process has made one is to be removed by it."""
        number, of = self._division.number, self._division.of
        return part == number or (number == 0 and part >= of)  # of a process that the server does not have any more

    async def _keep_checking(self) -> None:
        """Ping the broker every 10 s."""
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            with contextlib.suppress(SandboxFailed, SandboxUnavailable):
                await self.broker.call("ping", timeout_s=15.0, wait_s=0.0)  # updates `trouble`

    @property
    def running(self) -> int:
        return self.running_now

    @property
    def trouble(self) -> str | None:
        return self.broker.trouble

    async def open(
        self, *, base: str = "default", limits: Limits | None = None, spec: SandboxSpec | None = None
    ) -> Sandbox:
        await self.start()
        image = await self._image(base)
        home = await self.home(image, WORKSPACE)
        shell = ShellState()
        made = self._new(image, None, shell, WORKSPACE, home, limits)
        if spec is not None:
            try:
                await made.prepare(spec)
            except BaseException:
                await made.destroy()
                raise
        return made

    def _new(
        self,
        base: str,
        record: LayerRecord | None,
        shell: ShellState,
        workdir: str,
        home: str,
        limits: Limits | None,
    ) -> DockerSandbox:
        name = uuid.uuid4().hex[:16]
        made = DockerSandbox(
            self,
            name,
            base=base,
            record=record,
            shell=shell,
            workdir=workdir,
            home=home,
            limits=limits or self.limits,
        )
        self.live[name] = made
        return made

    async def restore(self, snapshot: SandboxSnapshot, *, limits: Limits | None = None) -> Sandbox:
        await self.start()
        ref = snapshot.ref
        record: LayerRecord | None = None
        if ref.kind == "layer":
            record = await asyncio.to_thread(self.records.read, ref.id)
            if record is None:
                raise SandboxFailed(f"layer {ref.id[:12]} is not there: it was collected or belongs to another server")
            base, workdir = record.base, record.workdir
        else:
            if not DIGEST_ID.matches(ref.id):
                raise SandboxFailed(f"base {ref.id!r} is not an image: it belongs to another backend")
            base, workdir = f"sha256:{ref.id}", WORKSPACE
        await self._base_container(base)
        try:
            shell = ShellState.unpack(snapshot.shell, workdir)
        except ValueError as error:
            raise SandboxFailed(f"the shell state of a snapshot cannot be read: {error}") from error
        return self._new(base, record, shell, workdir, await self.home(base, workdir), limits)

    # Images

    async def _image(self, base: str) -> str:
        """Return the id of the image of a base, asking the engine once for each base.

        Raises:
            SandboxUnavailable: There is no such image, or the broker does not allow it.
        """
        if base not in self._images:
            name = base if "/" in base or ":" in base else f"errata/base:{base}"
            if DIGEST_ID.matches(base):  # an id that a snapshot of kind "base" has
                name = f"sha256:{base}"
            try:
                container, image = await self.containers.create_of(Kind.of(name, self.limits))
            except BrokerRefused as error:
                if error.why in ("image_missing", "image_refused", "invalid"):
                    raise SandboxUnavailable(error.message) from error
                raise
            if image in self._base_containers:
                self.containers.remove(container)
            else:
                self._base_containers[image] = asyncio.ensure_future(_value(container))
            self._images[base] = image
            if await self.tree_map(image).base_has(f"/{VERIFIER_DIRECTORY}"):
                log.warning(
                    "image %s was made by an older version of Errata: its sessions see /%s, which is for gradings: "
                    "make it anew (`errata image import` or `build`) before agents use it",
                    name,
                    VERIFIER_DIRECTORY,
                )
        return self._images[base]

    async def _base_container(self, image: str) -> str:
        """Return a container of an image that is never started, from which the image's files are read."""
        if image not in self._base_containers:
            self._base_containers[image] = asyncio.ensure_future(self.containers.create(Kind.of(image, self.limits)))
        try:
            return await asyncio.shield(self._base_containers[image])
        except (SandboxFailed, SandboxUnavailable):  # the next one tries again
            self._base_containers.pop(image, None)
            raise

    def tree_map(self, base: str) -> TreeMap:
        """Return a reader of differences from a base image; what it has read of the image is shared."""
        return TreeMap(self.broker, lambda: self._base_container(base), self._trees.setdefault(base, {}))

    async def home(self, base: str, workdir: str) -> str:
        """Return the agent's home directory: ``/home/agent`` if the base image has it, else ``workdir``.

        Args:
            base: Id of the base image.
            workdir: The work directory.

        Raises:
            BrokerRefused: The image's files could not be read.
        """
        return DEFAULT_HOME if await self.tree_map(base).base_has(DEFAULT_HOME) else workdir

    # Layers

    async def collect(self, keep: Iterable[SnapshotRef]) -> CollectReport:
        await self.start()
        await self.containers.wait_removed()
        listed = (await self.broker.call("list"))["layers"]
        own = (row for row in listed if _part(row) == self._division.number)  # others are named by other journals
        layers = {str(row["image"]).removeprefix("sha256:"): row for row in own}
        records = {name: await asyncio.to_thread(self.records.read, name) for name in self.records.names()}
        wanted = [layer.id for box in list(self.live.values()) for layer in (box.image, box.layer) if layer is not None]
        wanted += [ref.id for ref in keep if ref.kind == "layer"]
        kept: set[str] = set()
        for name in wanted:
            while name and name not in kept:
                kept.add(name)
                record = records.get(name)
                name = record.parent if record is not None else ""
        deleted = size = 0
        depth = {name: record.depth for name, record in records.items() if record is not None}
        left = sorted({*layers, *records} - kept, key=lambda name: -depth.get(name, 0))
        while left:
            # A layer without a record may be another one's parent, and a container of a layer may not be removed yet.
            again = [name for name in left if name in layers and not await self._removed(name)]
            for name in left:
                if name not in again:
                    await asyncio.to_thread(self.records.remove, name)
                    deleted += 1
                    size += int(layers.get(name, {}).get("size_bytes", 0))
            if len(again) == len(left):
                log.info("%d layers are still in use, and stay until the next collection", len(left))
                break
            left = again
        return CollectReport(layers=deleted, size_bytes=size)

    async def _removed(self, layer: str) -> bool:
        """Remove a layer's image; return False if it is still in use."""
        try:
            await self.broker.call("remove_image", image=f"sha256:{layer}", timeout_s=330.0)
        except BrokerRefused as error:
            if error.why not in ("unknown", "conflict"):
                raise
            return error.why == "unknown"
        return True

    async def close(self) -> None:
        if self._health_check is not None:
            self._health_check.cancel()
            await asyncio.gather(self._health_check, return_exceptions=True)
            self._health_check = None
        for box in list(self.live.values()):
            await box.destroy()
        for task in self._base_containers.values():
            with contextlib.suppress(SandboxFailed, SandboxUnavailable):
                self.containers.remove(await task)
        self._base_containers.clear()
        self._images.clear()
        await self.containers.close()
        self._info = None


def _part(row: Mapping[str, Any]) -> int:
    """Return the number of the process whose a container or layer is; a broker of an older version does not tell it."""
    return int(row.get("part", 0))


async def _value(value: str) -> str:
    return value

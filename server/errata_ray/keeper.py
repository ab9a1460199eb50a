"""`ShardKeeper`: the actor that has one shard: it starts the server process, again where it ends, and reports it."""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
import traceback
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ray

from errata_os.restarts import Backoff
from errata_server.runtime.lease import LeaseWriter, now_ns
from errata_server.runtime.leases import Wait

from . import directories
from .members import Claim, Record, Report
from .process import Load, ShardProcess

log = logging.getLogger("errata.ray")

REPORT_S = 1.0
"""Time between two reports, seconds."""

ASK_S = 10.0
"""Longest wait for the registry, seconds. It may be starting again."""

IDLE_S = 5.0
"""A shard that drains ends once it has had no session for so long, seconds."""

STOP_S = 60.0
"""How long a process may take to end, seconds; then it is killed."""

WATCH_S = 20.0
"""Longest wait for a change of the members, seconds."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What every keeper of a fleet does.

    Args:
        environments: Targets of ``errata serve``.
        options: Further options of it.
        data_dir: Directory of the fleet; see `directories.home`. None for the default of the node.
        is_shared: Whether all nodes see the same directory.
        lease_s: Length of a lease, seconds.
        token: Tokens that clients need; None for none.
        name: Name of the fleet.
    """

    environments: tuple[str, ...]
    options: tuple[str, ...]
    data_dir: Path | None
    is_shared: bool
    lease_s: float
    token: str | None
    name: str


class ShardKeeper:
    """Keeps the process of one shard. Each life of the actor, also on another node, begins by claiming a directory.

    Args:
        plan: What all keepers of the fleet do.
        slot: Number of this keeper.
        registry: Handle of the fleet's registry.
    """

    def __init__(self, plan: Plan, slot: int, registry: Any) -> None:
        self._plan, self._slot, self._registry = plan, slot, registry
        self._node: str = ray.get_runtime_context().get_node_id()
        self._address: str = ray.util.get_node_ip_address()
        self._life = uuid.uuid4().hex
        self._home = directories.home(plan.data_dir or directories.default(plan.name), self._node)
        self._own = Path(tempfile.mkdtemp(prefix="errata-keeper-"))
        self._known: list[Record] = []
        self._shard: str | None = None
        self._url: str | None = None
        self._problem = ""
        self._draining = False
        self._epoch = 0
        self._lease: LeaseWriter | None = None
        self._load: Load | None = None
        self._steps_s: float | None = None
        self._looked = float("-inf")
        self._process: ShardProcess | None = None
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._for_ever, args=(step,), name=f"errata-{step.__name__}", daemon=True)
            for step in (self._keep, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def ping(self) -> str:
        """Return the id of the node."""
        return self._node

    def end(self) -> None:
        """End the process and return then; the actor keeps nothing any more."""
        self._ending.set()
        self._threads[0].join(STOP_S + 2 * ASK_S)

    # The threads

    def _for_ever(self, step: Any) -> None:
        while not self._ending.is_set():
            try:
                step()
            except (
                Exception
            ) as error:  # a registry or disk that does not answer now; the shard is never given up for it
                self._problem = f"{type(error).__name__}: {error}"[:500]
                log.warning("the keeper of shard %s goes on after: %s", self._shard, traceback.format_exc())
                self._ending.wait(REPORT_S)
        if step == self._keep:
            self._stop()

    def _ask(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self._registry, method).remote(*arguments), timeout=ASK_S)

    def _watch(self) -> None:
        """Have the server know the members."""
        version, records = ray.get(self._registry.watch.remote(None, 0.0), timeout=ASK_S)
        while not self._ending.is_set():
            self._known = records
            if entries := [{"shard": one.shard, "url": one.url, "state": one.state} for one in records]:
                new = self._own / "members.new"
                new.write_text(json.dumps({"members": entries}), encoding="utf-8")
                new.replace(self._own / "members.json")
            version, records = ray.get(self._registry.watch.remote(version, WATCH_S), timeout=WATCH_S + ASK_S)

    def _keep(self) -> None:
        """Serve one shard, until it is this keeper's no more."""
        shard = self._claim()
        if shard is None:
            return
        self._shard, self._url, self._epoch = shard, None, 0
        backoff, idle_since, due = Backoff(), time.monotonic(), time.monotonic()
        try:
            while not self._ending.wait(REPORT_S / 4 if self._url is None else REPORT_S):
                wanted = self._report()
                if wanted == "end":
                    return
                self._draining = wanted == "drain"
                process, now = self._process, time.monotonic()
                if process is not None and (status := process.status()) is not None:
                    pause = backoff.pause_s(now - process.started)
                    self._problem = f"it ended with status {status}: {process.last_words()}"[:500]
                    self._process, due = None, now + pause
                elif process is not None and process.url is not None:
                    self._problem = ""
                    self._measure(process)
                    if self._load is None or self._load.sessions or not self._draining:
                        idle_since = now
                    if self._draining and now - idle_since >= IDLE_S:
                        self._stop()
                elif process is None and not self._draining and now >= due:
                    self._start(shard)
                if self._epoch and not self._renew(shard):
                    self._stop()  # another has it, or the registry is new: the next round takes the lease again
                    self._epoch = 0
        finally:
            self._stop()

    # Parts of it

    def _claim(self) -> str | None:
        claim: Claim = self._ask("claim", self._slot, self._life, self._node, directories.found(self._home))
        if claim.wait:
            self._problem = claim.wait
            self._ending.wait(REPORT_S)
            return None
        return claim.shard or directories.make(self._home)

    def _report(self) -> str:
        process = self._process
        is_up = process is not None and process.url is not None and process.status() is None
        if is_up and process is not None:
            self._url = process.url
        load = self._load if is_up else None
        report = Report(
            life=self._life,
            node=self._node,
            shard=self._shard,
            url=self._url,
            is_up=is_up,
            epoch=self._epoch,
            sessions=load.sessions if load else None,
            steps_s=self._steps_s if load else None,
            lag_s=load.lag_s if load else None,
            problem=self._problem,
            is_draining=self._draining,
        )
        try:
            answer: str = self._ask("report", self._slot, report, self._known)
        except (ray.exceptions.RayError, TimeoutError) as error:
            log.info("the registry does not answer now, and the server goes on: %s", error)
            return "drain" if self._draining else "serve"
        return answer

    def _start(self, shard: str) -> None:
        options: list[str] = []
        if self._plan.is_shared:
            if not self._take(shard):
                return
            options = ["--lease", str(self._own / "lease")]
        options += ["--members", f"file://{self._own / 'members.json'}"]
        self._process = ShardProcess(
            [
                *self._plan.environments,
                *("--host", self._address, "--port", "0", "--data-dir", str(self._home / shard)),
                *options,
                *self._plan.options,
                *([] if self._plan.token else ["--insecure"]),  # `errata fleet up` has refused what may not be
            ],
            {"ERRATA_TOKEN": self._plan.token} if self._plan.token else {},
            self._plan.token,
        )
        self._load, self._steps_s = None, None

    def _measure(self, process: ShardProcess) -> None:
        try:
            load = process.load()
        except httpx.HTTPError as error:
            self._load, self._problem = None, f"it does not answer: {type(error).__name__}: {error}"[:500]
            return
        now = time.monotonic()
        if self._load is not None and now > self._looked:
            self._steps_s = max(0.0, (load.steps - self._load.steps) / (now - self._looked))
        self._load, self._looked = load, now

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.stop(STOP_S)
        if self._epoch and self._shard is not None:
            try:
                self._ask("release", self._shard, self._life, self._epoch)
            except (ray.exceptions.RayError, TimeoutError):
                pass  # it ends by itself
            self._epoch = 0

    # The lease of a shared directory

    def _take(self, shard: str) -> bool:
        asked = now_ns()
        answer = self._ask("take", shard, self._life, directories.epoch(self._home, shard))
        if isinstance(answer, Wait):
            self._problem = f"the lease of shard {shard} may be another's for {answer.seconds:.1f} s more"
            return False
        if self._lease is None:
            self._lease = LeaseWriter(self._own / "lease")
        self._lease.grant(answer.epoch, asked + int(answer.lease_s * 1e9))
        self._epoch = answer.epoch
        return True

    def _renew(self, shard: str) -> bool:
        asked = now_ns()
        try:
            is_ours: bool = self._ask("renew", shard, self._life, self._epoch)
        except (ray.exceptions.RayError, TimeoutError):
            return True  # the lease runs out by itself, and the server acknowledges nothing then
        if is_ours and self._lease is not None:
            self._lease.grant(self._epoch, asked + int(self._plan.lease_s * 1e9))
        return is_ours


def keeper_name(fleet: str, slot: int) -> str:
    """Return the name of a keeper's actor.

    Args:
        fleet: Name of the fleet.
        slot: Number of the keeper.
    """
    return f"{fleet}-{slot}"

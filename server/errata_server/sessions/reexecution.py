"""Re-execution: continues a deterministic environment by running its journaled requests again (PROTOCOL C2, D11, E2).

A fresh instance gets the requests of the current episode again, from its reset on, in the order they were committed,
and each answer is compared with the journaled one by its semantic digest. An episode that was forked begins with its
ancestors' requests. If the answers differ, another fresh instance gets the requests of the session's earlier episodes
first, because a reset may, for example, take the next item of a data set. The journal is never rewritten: the bytes of
state(t) stay those that were sent. `drawn` prepares for this: it adds a seed and an episode id to a reset before it
runs for the first time.

Deliveries are run again, and requests for which the environment raised, because they may have changed it. Requests
after which the server closed the instance (deadline, invalid output) are not, because the session was restored to the
state before them; nor is a request that was not committed when the server died.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import uuid
from typing import Any

from msgspec.structs import replace
from pydantic_core import to_json

from errata_protocol import error_info
from errata_protocol.differences import Cause, Difference, differences, normalised, summary
from errata_protocol.errors import EnvironmentFailed, EnvironmentOutputInvalid, ErrataError, StepTimeout, UnknownEpisode
from errata_protocol.json_path import every_item, written
from errata_protocol.payload import semantic_sha256, without_fields

from ..concurrency.procedures import run
from ..concurrency.slots import Share
from ..environments.host import EnvHost
from ..ids import name_of
from ..journal.base import DeliveryRow
from ..runtime.lineage import Lineage, Stretch, lineage
from ..runtime.rows import Admitted
from ..runtime.runtime import Runtime
from ..workers import WORKERS
from .decoding import Decoder
from .execution import Executed, Execution
from .session import Request

log = logging.getLogger("errata.recovery")

PROGRESS_S = 10.0
"""Interval in seconds at which a long re-execution logs its progress."""

INLINE_BYTES = 256 * 1024
"""Size of two answers up to which they are compared on the event loop."""

_VOLATILE = (Cause.TIME, Cause.ADDRESS, Cause.IDENTIFIER)
"""Causes of differences for which a field may be declared volatile: they do not show the environment's state."""


class NotRepeatable(Exception):
    """Re-execution did not restore the journaled state; the message says where and why.

    Attributes:
        differs: ``eid``, ``t`` and ``path`` of the first difference; empty if no answers were compared.
    """

    def __init__(self, message: str, **differs: str | int | None) -> None:
        super().__init__(message)
        self.differs = differs


def drawn(host: EnvHost, request: Request, session_seed: int, eid: str, *, first: bool) -> Request:
    """Return a reset with an explicit ``seed`` and ``episode_id``, so that running it again gives the same result.

    An argument is added only if the environment is restored by re-execution, its reset has a parameter of that name,
    and the client gave no value. Otherwise most environments take ``episode_id`` from `uuid.uuid4`.

    Args:
        host: The instance.
        request: The request as the door passed it.
        session_seed: Random seed of the session, and the seed of its first reset.
        eid: The episode that the reset begins. The seeds of later resets are derived from it, because a client that
            gives none expects a different episode each time.
        first: Whether it is the session's first episode.
    """
    if request.kind != "reset" or not host.recovery.repeats_requests:
        return request
    chosen = hashlib.sha256(f"{session_seed} {eid}".encode()).digest()
    values: dict[str, int | str] = {
        "seed": session_seed if first else int.from_bytes(chosen[:4]) >> 1,
        "episode_id": str(uuid.UUID(bytes=chosen[4:20], version=4)),
    }
    parameters = host.reset_parameters
    open_ = {k: v for k, v in values.items() if request.reset.get(k) is None and _is_named(parameters.get(k))}
    if not open_:
        return request
    data = {**request.reset, **open_}
    if open_.keys() & request.reset.keys():  # the client gave null, which is replaced
        return replace(request, reset=data, data=to_json(data))
    # Appended, so that `as_received` can remove it again.
    head = request.data.rstrip()[:-1]
    return replace(request, reset=data, data=head + (b"," if request.reset else b"") + to_json(open_)[1:])


def as_received(run: bytes, sha: bytes) -> bytes | None:
    """Return the data of a reset as it was received: without what `drawn` added.

    Args:
        run: The data of the reset as it was run.
        sha: sha256 of the data as received.

    Returns:
        The data; None if the client gave null for an argument that the server then chose: its place is not known.
    """
    if hashlib.sha256(run).digest() == sha:
        return run
    data = json.loads(run)
    for names in ("seed", "episode_id"), ("seed",), ("episode_id",):
        added = to_json({name: data.get(name) for name in names})
        received = run.removesuffix(added[1:]).removesuffix(b",") + b"}"
        if hashlib.sha256(received).digest() == sha:
            return received
    return None


def _is_named(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.kind in (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )


class Reexecution:
    """Runs the journaled requests of one environment's sessions again.

    Args:
        runtime: Journal and deadline.
        execution: Runs a request on an instance.
        decoder: Decodes journaled requests.
    """

    def __init__(self, runtime: Runtime, execution: Execution, decoder: Decoder) -> None:
        self._runtime = runtime
        self._execution = execution
        self._decoder = decoder

    async def run(self, host: EnvHost, eid: str, t: int, *, whole_session: bool = False) -> None:
        """Bring a fresh instance to delivery ``t`` of episode ``eid``.

        Args:
            host: A new instance on which nothing was called.
            eid: Current episode of the session.
            t: Its last committed delivery.
            whole_session: Whether to begin with the session's earlier episodes.

        Raises:
            NotRepeatable: An answer differs from the journaled one, or the journal lacks a request.
            StepTimeout: A request took longer than the deadline, which it had not the first time.
            ErrataError: The infrastructure failed, or a worker that has some of the requests does not answer; a retry
                may succeed.
        """
        stretches = await self._stretches(eid, t, whole_session)
        progress = _Progress(eid, sum(stretch.t + (stretch.fork_name is None) for stretch in stretches))
        for stretch in stretches:
            await self._stretch(host, stretch, progress)
        progress.done()

    async def earlier_episodes(self, eid: str, t: int) -> int:
        """Return the number of earlier episodes that `run` adds with ``whole_session``."""
        try:
            return len(await self._stretches(eid, t, whole_session=True)) - len(await self._stretches(eid, t, False))
        except NotRepeatable:
            return 0

    async def _stretches(self, eid: str, t: int, whole_session: bool) -> list[Stretch]:
        """Return what to run again, in its order."""
        found: list[Stretch] = []
        place: tuple[str, int] | None = (eid, t)
        while place is not None:
            try:
                part = await self._lineage(*place, whole_session)
            except UnknownEpisode as error:
                raise NotRepeatable(f"episode {place[0]}, whose requests lead there, was deleted") from error
            found += part.stretches
            place = part.origin
        return [*reversed(found[1:]), replace(found[0], with_errors=True)]

    async def _lineage(self, eid: str, t: int, whole_session: bool) -> Lineage:
        """Return a part of the lineage, from the worker that has the episode.

        Raises:
            UnknownEpisode: The episode was deleted.
            Misdirected: The episode is of a data directory that this server does not serve.
            JournalUnavailable: The worker does not answer.
        """
        fleet, store = self._runtime.fleet, self._runtime.store
        if fleet is not None and fleet.elsewhere.has(eid):
            return await fleet.elsewhere.lineage(eid, t, whole_session)
        try:
            return await store.read(lambda journal: lineage(journal, eid, t, whole_session))
        except UnknownEpisode:
            store.check_shard(eid)
            raise

    async def _recorded(self, eid: str, t: int) -> list[DeliveryRow]:
        fleet = self._runtime.fleet
        if fleet is not None and fleet.elsewhere.has(eid):
            return await fleet.elsewhere.recorded(eid, t)
        return await self._runtime.store.recorded(eid, t)

    async def _stretch(self, host: EnvHost, stretch: Stretch, progress: _Progress) -> None:
        for t in range(stretch.t + 1):
            rows = await self._recorded(stretch.eid, t)
            if not rows and t == 0 and stretch.t > 0:
                continue  # the episode began without a reset
            if not rows:
                raise NotRepeatable(f"delivery t={t} of episode {stretch.eid} was deleted")
            delivery, *errors = rows
            if delivery.kind == "fork":
                await host.forked(stretch.fork_name or stretch.eid)
            else:
                await self._again(host, delivery, t)
                progress.ran()
            if t < stretch.t or stretch.with_errors:
                for error in errors:
                    if error.status == EnvironmentFailed.code and error.kind in ("reset", "step", "mcp"):
                        await self._again(host, error, t + 1)
                        progress.ran()

    async def _again(self, host: EnvHost, row: DeliveryRow, t: int) -> None:
        where = f"delivery t={t} of episode {row.eid}" if row.t is not None else f"the error before t={t} of {row.eid}"
        try:
            request = self._decoder.recorded(row)
        except (ValueError, ErrataError) as error:
            raise NotRepeatable(f"the request of {where} cannot be read any more: {error}", t=t, eid=row.eid) from error
        admitted = Admitted(row.eid, t, row.sid, row.id, row.kind, row.request, row.created, row.request_sha)
        try:
            now: Executed | ErrataError = await run(self._execution.run(host, admitted, request))
        except StepTimeout as error:
            raise StepTimeout(
                f"the session could not be brought back: running {where} again took longer than the deadline, "
                "which it did not the first time; nothing was run of this request: send it again"
            ) from error
        except (EnvironmentFailed, EnvironmentOutputInvalid) as error:
            now = error
        found = await self._found_differences(row, now, host.share)
        if found:
            path = found[0].where
            raise NotRepeatable(
                f"its requests were run again and {where} differs: {summary(found)}; {self._advice(row, found)}",
                eid=row.eid,
                t=t,
                path=path,
            )

    async def _found_differences(self, row: DeliveryRow, now: Executed | ErrataError, share: Share) -> list[Difference]:
        """Compare two answers, large ones in a worker process."""
        if isinstance(now, ErrataError):
            return _differences(row, now)
        if row.t is not None and row.payload == now.row.payload:
            return []
        if len(row.payload) + len(now.row.payload) <= INLINE_BYTES:
            return _differences(row, now.row)
        return await WORKERS.call("an answer of the episode", _differences, row, now.row, share=share)

    def _advice(self, row: DeliveryRow, found: list[Difference]) -> str:
        """Describe the apparent causes of the differences, and what to do about them."""
        causes = [difference.cause for difference in found]
        said = []
        recorded = self._runtime.hash_seeds.another(row.created)
        if recorded is not None and Cause.ORDER in causes:
            said.append(
                "it was recorded under another hash seed, on which the order of sets depends: "
                + (
                    f"serve with PYTHONHASHSEED={recorded.seed}"
                    if recorded.seed is not None
                    else "that server had none, so the order cannot be had again; `errata serve` keeps one from now on"
                )
            )
        elif recorded is not None:
            said.append("it was recorded under another hash seed (PYTHONHASHSEED), on which the order of sets depends")
        elif Cause.ORDER in causes:
            said.append("the same items stand in another order, under the same hash seed")
        excepted = [d for d, cause in zip(found, causes, strict=True) if cause in _VOLATILE]
        if excepted:
            paths = dict.fromkeys(written(every_item(difference.path)) for difference in excepted)
            what = " and ".join(dict.fromkeys(str(d.cause) for d in excepted))
            said.append(
                f"{what} can be excepted: `errata serve --volatile '{','.join(paths)}'`, or the observation class's "
                "VOLATILE_FIELDS"
            )
        if len(excepted) < len(found):
            said.append("`errata probe` says what this environment needs")
        return "; ".join(said)


def _differences(row: DeliveryRow, now: DeliveryRow | ErrataError) -> list[Difference]:
    """Compare a journaled answer with the re-executed one, using the current volatile fields.

    Equal semantic digests are equal answers; payload bytes are compared where there is no RFC 8785 form. Otherwise
    both are normalised first: addresses and the order of printed sets do not count (`errata_protocol.differences`).
    """
    if isinstance(now, ErrataError) or row.t is None:
        was = json.loads(row.payload) if row.t is None else {"code": None, "message": None}
        is_now = now.to_wire() if isinstance(now, ErrataError) else {"code": None, "message": None}
        return differences(*(normalised({"code": e.get("code"), "message": e.get("message")}) for e in (was, is_now)))
    volatile, semantic = now.volatile or (), now.semantic()
    if semantic is not None and row.semantic() == semantic:
        return []
    recorded = semantic_sha256(row.payload, volatile)
    if recorded is not None and recorded == semantic:
        return []  # a field was declared volatile since then
    if recorded is None and row.payload == now.payload:
        return []
    try:
        before, after = (without_fields(json.loads(p), volatile) for p in (row.payload, now.payload))
        found = differences(normalised(before), normalised(after))
        if found or normalised(before) == normalised(after):
            return [one for one in found if not _said_by_markers(one, after)]
    except RecursionError:
        pass
    return [Difference((), row.payload.decode(errors="replace"), now.payload.decode(errors="replace"))]


def _said_by_markers(difference: Difference, now: Any) -> bool:
    """Return whether a difference lies in an ``error_info`` that was made of markers, which are compared themselves:
    servers of before it had none, and fields of markers may be volatile."""
    path = difference.path[difference.path[:1] == ("observation",) :]
    if path[:2] != ("metadata", error_info.KEY):
        return False
    metadata = now.get("metadata")
    return isinstance(metadata, dict) and metadata.get("error_kind") is not None


class _Progress:
    """Logs the progress and the duration of a re-execution."""

    def __init__(self, eid: str, deliveries: int) -> None:
        self._name = name_of(eid)
        self._deliveries = deliveries
        self._ran = 0
        self._began = self._said = asyncio.get_running_loop().time()

    def ran(self) -> None:
        self._ran += 1
        now = asyncio.get_running_loop().time()
        if now - self._said >= PROGRESS_S:
            self._said = now
            log.info(
                "episode %s: ran %d requests again, for %d deliveries, %.0f s",
                self._name,
                self._ran,
                self._deliveries,
                now - self._began,
            )

    def done(self) -> None:
        took = asyncio.get_running_loop().time() - self._began
        log.info("episode %s: back after running %d requests again, %.2f s", self._name, self._ran, took)

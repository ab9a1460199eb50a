"""Exports episodes from the journal as a bundle (JSON lines), one delivery in memory at a time (docs/export.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib.metadata import version

from errata_protocol.bundle import (
    BundledReward,
    BundleHeader,
    BundleWriter,
    DeliveryRecord,
    EpisodeRecord,
    FailureRecord,
    Line,
    request_fields,
)
from errata_protocol.errors import JournalUnavailable, UnknownEpisode

from ..clock import Clock
from ..ids import name_of
from ..journal.base import DeliveryRow, EpisodeRow
from ..runtime.rows import wire_digest
from ..runtime.store import Store
from .summaries import session_status

INLINE_CHARACTERS = 256 * 1024
"""Length of a payload up to which its record is made and its line encoded on the event loop."""


async def bundle(
    store: Store, clock: Clock, eids: Sequence[str], principal: str | None, *, ancestors: bool = True
) -> AsyncIterator[bytes]:
    """Yield the lines of a bundle of episodes; a running episode is exported up to its last commit.

    Args:
        store: The journal.
        clock: Source of the bundle's creation time.
        eids: Ids of the episodes; duplicates are ignored.
        principal: Owner of the episodes.
        ancestors: Whether to include the episodes that they were forked from, recursively.

    Raises:
        UnknownEpisode: An episode does not exist or has another owner; raised before the first line.
        JournalUnavailable: An episode was deleted during the export; the bundle then lacks its end line.
    """
    chosen = await _with_ancestors(store, eids, principal, ancestors)
    writer = BundleWriter()
    header = BundleHeader(created=clock.time(), server=version("openenv-errata"), episodes=tuple(dict.fromkeys(eids)))
    described = [await describe(store, row) for row in chosen]
    yield writer.line(header)
    for record in described:
        yield writer.line(record)
    for record in described:
        async for line in contents(store, record):
            large = isinstance(line, DeliveryRecord | FailureRecord) and len(line.payload) > INLINE_CHARACTERS
            yield await asyncio.to_thread(writer.line, line) if large else writer.line(line)
    yield writer.end()


async def describe(store: Store, row: EpisodeRow) -> EpisodeRecord:
    """Return the record of an episode; `contents` yields as many deliveries and rewards as the record counts."""
    turns = await store.turns(row.eid)
    rewards = await store.rewards(row.eid)
    session = await store.session(row.sid)
    stats = await store.read(lambda journal: journal.episode_stats(row.eid))
    return EpisodeRecord(
        eid=row.eid,
        episode_id=row.episode_id,
        environment=row.environment,
        session=name_of(row.sid),
        created=row.created,
        origin=row.origin,
        agent_text_version=row.agent_text_version,
        recovery=session.recovery if session is not None else None,
        task=stats.task if stats is not None else None,
        status=session_status(session),
        group=row.label_group,
        step=row.label_step,
        run=row.label_run,
        deliveries=len(turns),
        rewards=len(rewards),
    )


async def contents(store: Store, record: EpisodeRecord) -> AsyncIterator[Line]:
    """Yield an episode's deliveries with the errors recorded between them, then its late rewards.

    Raises:
        JournalUnavailable: A delivery that the record counts was deleted.
    """
    eid = record.eid
    t, given = 0, 0
    while given < record.deliveries:
        rows = await store.recorded(eid, t)
        if rows:
            given += 1
            yield await _made(rows[0], delivery_record)
            for error in rows[1:]:
                if error.status != "ok":  # replies to forks and closes are left out too
                    yield await _made(error, partial(_failure, after_t=t))
        elif t > 0:  # an episode that began without a reset has no t=0
            raise JournalUnavailable(f"t={t} of episode {eid} is not in the journal: it was deleted, or is damaged")
        t += 1
    for reward in (await store.rewards(eid))[: record.rewards]:
        yield BundledReward(
            eid=eid,
            t=reward.t,
            value=reward.value,
            source=reward.source,
            reward_id=reward.reward_id,
            created=reward.created,
        )


async def _made(row: DeliveryRow, make: Callable[[DeliveryRow], Line]) -> Line:
    """Make the record of a row: in a thread if the row is large, because its payload is decoded and encoded."""
    large = len(row.payload) + len(row.request) > INLINE_CHARACTERS
    return await asyncio.to_thread(make, row) if large else make(row)


def delivery_record(row: DeliveryRow) -> DeliveryRecord:
    """Return the bundle record of a journaled delivery."""
    assert row.t is not None
    return DeliveryRecord(
        eid=row.eid,
        t=row.t,
        kind=row.wire_kind,
        id=row.id,
        **request_fields(row.request),
        request_sha256=row.request_sha.hex(),
        payload=row.payload.decode(),
        digest=wire_digest(row.digest),
        semantic_digest=wire_digest(semantic) if (semantic := row.semantic()) is not None else None,
        reward=row.reward,
        done=row.done,
        error_kind=row.error_kind,
        hint_template_key=row.hint_template_key,
        created=row.created,
    )


def _failure(row: DeliveryRow, after_t: int) -> FailureRecord:
    return FailureRecord(
        eid=row.eid,
        after_t=after_t,
        kind=row.wire_kind,
        code=row.status,
        id=row.id,
        **request_fields(row.request),
        request_sha256=row.request_sha.hex(),
        payload=row.payload.decode(),
        digest=wire_digest(row.digest),
        created=row.created,
    )


async def _with_ancestors(
    store: Store, eids: Sequence[str], principal: str | None, ancestors: bool
) -> list[EpisodeRow]:
    """Return the episodes, parents before their forks; an ancestor that was deleted is left out."""
    rows: dict[str, EpisodeRow] = {}
    for eid in eids:
        lineage = [await store.owned_episode(eid, principal)]
        while ancestors and (origin := lineage[-1].origin_eid) is not None and origin not in rows:
            try:
                lineage.append(await store.owned_episode(origin, principal))
            except UnknownEpisode:
                break
        for row in reversed(lineage):
            rows.setdefault(row.eid, row)
    if not ancestors:  # ``eids`` may be in any order
        return sorted(rows.values(), key=lambda row: row.created)
    return list(rows.values())

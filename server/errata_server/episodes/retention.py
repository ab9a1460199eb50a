"""Deletes old episodes by age and total size: `plan` chooses them, `apply` deletes them, `Retention` does both on a
timer.

Whole closed episodes are deleted, the oldest first. An episode is kept while it is current in an open session, or while
it has a fork that is kept: without its parent a fork could not be restored by re-execution. A chosen episode may be
forked before it is deleted, so the journal checks for forks again at each deletion.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from ..journal.base import HeldEpisode
from ..runtime.runtime import Runtime
from ..runtime.store import Store
from .rollouts import all_held

log = logging.getLogger("errata.retention")

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The episodes to delete.

    Args:
        delete: Episodes to delete, forks before their parents.
        kept: Number of episodes kept.
        kept_bytes: Size of the kept episodes.
        held_back: Number of episodes kept only because of an open session or a kept fork.
    """

    delete: tuple[HeldEpisode, ...]
    kept: int
    kept_bytes: int
    held_back: int

    @property
    def bytes(self) -> int:
        """Size of the episodes to delete."""
        return sum(held.size_bytes for held in self.delete)


class Retention:
    """Deletes episodes past the retention limits of a data directory, at most hourly for all its environments.

    Args:
        runtime: Journal, settings, clock, and the time of the last deletion.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def when_due(self) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that deletes old episodes; None without limits, or within an hour of the last deletion."""
        runtime, settings = self._runtime, self._runtime.settings
        if settings.retention_days is None and settings.retention_max_bytes is None:
            return None
        now = runtime.clock.time()
        return self._run(now) if runtime.retention_clock.due(now) else None

    async def _run(self, now: float) -> None:
        store, settings = self._runtime.store, self._runtime.settings
        try:
            chosen = await plan(
                store, now=now, keep_days=settings.retention_days, max_bytes=settings.retention_max_bytes
            )
            await apply(store, self._runtime.collect, chosen.delete)
        except Exception:  # no caller awaits this, and it is tried again later
            log.exception("old episodes could not be deleted")


async def plan(
    store: Store,
    *,
    now: float,
    keep_days: float | None = None,
    max_bytes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Plan:
    """Choose the episodes to delete; deletes nothing.

    Args:
        store: The journal.
        now: Current time, seconds since the epoch.
        keep_days: Episodes without a request for longer than this may be deleted; None for no such limit.
        max_bytes: The oldest episodes are chosen until the others fit in this size; None for no such limit.
        progress: Called with the number of episodes read so far.
    """
    held: dict[str, HeldEpisode] = {}
    newest: dict[str, str] = {}
    async for one in all_held(store):
        held[one.row.eid] = one
        newest[one.row.sid] = one.row.eid
        progress(len(held))
    # Read last: otherwise a session opened while the episodes were read would be missed, and its episode deleted.
    open_sids = [row.sid for row in await store.open_sessions()]
    current = frozenset(newest[sid] for sid in open_sids if sid in newest)
    oldest = now - keep_days * DAY_S if keep_days is not None else None
    return _choose(held, current, oldest, max_bytes)


def _choose(held: dict[str, HeldEpisode], current: frozenset[str], oldest: float | None, max_bytes: int | None) -> Plan:
    children: dict[str, int] = {}
    for one in held.values():
        if one.row.origin_eid is not None:
            children[one.row.origin_eid] = children.get(one.row.origin_eid, 0) + 1
    left = sum(one.size_bytes for one in held.values())
    gone: dict[str, HeldEpisode] = {}
    waiting: set[str] = set()  # kept so far because a fork of theirs is kept

    def may_go(one: HeldEpisode) -> bool:
        too_old = oldest is not None and one.last < oldest
        return too_old or (max_bytes is not None and left > max_bytes)

    for one in held.values():
        if not may_go(one):
            continue
        following: HeldEpisode | None = one
        while following is not None:
            eid = following.row.eid
            if eid in current or children.get(eid, 0):
                waiting.add(eid)
                break
            gone[eid] = following
            waiting.discard(eid)
            left -= following.size_bytes
            parent = held.get(following.row.origin_eid or "")
            following = None
            if parent is not None:
                children[parent.row.eid] -= 1
                if parent.row.eid in waiting and may_go(parent):
                    following = parent
    return Plan(tuple(gone.values()), len(held) - len(gone), left, len(waiting))


async def apply(
    store: Store,
    collect: Callable[[], Awaitable[object]],
    chosen: Sequence[HeldEpisode],
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Delete episodes of any owner, and the sandbox layers that only they refer to; return the number deleted.

    An episode that was forked since it was chosen is kept.

    Args:
        store: The journal.
        collect: Deletes sandbox layers that no row refers to.
        chosen: Episodes to delete, as chosen by `plan`.
        progress: Called with the number of episodes processed so far.

    Raises:
        JournalUnavailable: The journal cannot be written.
    """
    deleted = 0
    for number, held in enumerate(chosen, start=1):
        deleted += await store.delete_episode(held.row.eid, unless_forked=True) > 0
        progress(number)
    if chosen:
        await collect()
        given_back = await store.compact()
        log.info("deleted %d episodes that are kept no longer, and %d bytes of the journal", deleted, given_back)
    return deleted

"""`Retention`: deletes old episodes by age and total size: `plan` chooses, `apply` deletes.

Whole closed episodes go, the oldest first. Never one that an open session stands on, and never one that a kept fork
comes from: its lineage would have a hole, and where forks are brought back by re-execution they could not be. One that
was chosen may be forked before it goes, so the journal looks for forks again as each goes.
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
    """What would go.

    Args:
        delete: Episodes, forks before their parents.
        kept: How many stay.
        kept_bytes: What these hold.
        held_back: How many would go but for an open session or a kept fork.
    """

    delete: tuple[HeldEpisode, ...]
    kept: int
    kept_bytes: int
    held_back: int

    @property
    def bytes(self) -> int:
        """What goes holds."""
        return sum(held.size_bytes for held in self.delete)


class Retention:
    """Deletes what the settings of a data directory keep no longer, at most once an hour for all its environments.

    Args:
        runtime: Journal, settings, clock, and the time of the last deletion.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def when_due(self) -> Coroutine[Any, Any, None] | None:
        """Return the work of deleting what is kept no longer; None within an hour of the last time."""
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
        except Exception:  # nobody waits for it, and it comes again
            log.exception("old episodes could not be deleted")


async def plan(
    store: Store,
    *,
    now: float,
    keep_days: float | None = None,
    max_bytes: int | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Plan:
    """Choose what goes; changes nothing.

    Args:
        store: The journal.
        now: Seconds since the epoch.
        keep_days: Whatever had no request for longer may go; None for no such bound.
        max_bytes: The oldest go until the rest holds no more; None for no such bound.
        progress: Called with the number of episodes looked at.
    """
    held: dict[str, HeldEpisode] = {}
    newest: dict[str, str] = {}
    async for one in all_held(store):
        held[one.row.eid] = one
        newest[one.row.sid] = one.row.eid
        progress(len(held))
    # Read last: one that was opened while the episodes were read would be taken for none, and lose the one it is in.
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
    waiting: set[str] = set()  # would have gone, but for a fork that was there still

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
    """Delete episodes, whoever owns them, and the sandbox layers that only they named; return how many went.

    One that was forked since it was chosen stays.

    Args:
        store: The journal.
        collect: Deletes the sandbox layers that no row names any more.
        chosen: What goes, as `plan` chose.
        progress: Called with the number of episodes done.

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

"""`Leases`: who may write a data directory that several boxes see, and until when. Pure: the caller gives the clock.

One registry grants. A holder has until ``lease_s`` after it *asked*, by its own clock; the registry gives the shard to
another holder only ``lease_s * (1 + drift)`` after it *answered*, by its own. So no two holders believe at one moment
that they have a shard, as long as the rates of the two clocks differ by less than ``drift``. Each change of the holder
has a higher epoch, by which the files tell owners apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grant:
    """A shard is the caller's.

    Args:
        epoch: Number of this ownership; it is higher than that of any owner before.
        lease_s: Seconds from the moment at which the caller asked, during which it may write.
    """

    epoch: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """A shard may still be another's.

    Args:
        seconds: Time after which asking again is worth it.
    """

    seconds: float


@dataclass(slots=True)
class _Held:
    holder: str | None
    epoch: int
    free_at: float


class Leases:
    """The leases of one registry.

    A new registry does not know what the one before it granted, so it gives nothing to a new holder until every lease
    of that one has run out.

    Args:
        lease_s: Length of a lease, in seconds.
        drift: Share by which the rates of two boxes' clocks may differ, for example 0.02.
        clock: Returns seconds of a monotonic clock of the registry's box.
        after: Number that no earlier registry's epochs exceed, such as the seconds since 1970 when this one starts.
        held: Holder and epoch of each shard that the registry before this one granted last, if that was kept durably
            before each answer. These holders renew at once; without it they have to take their shards again.
    """

    def __init__(
        self,
        *,
        lease_s: float,
        drift: float,
        clock: Callable[[], float],
        after: int = 0,
        held: Mapping[str, tuple[str, int]] | None = None,
    ) -> None:
        self._lease_s = lease_s
        self._keep_s = lease_s * (1 + drift)
        self._clock = clock
        self._after = after
        self._quiet_until = clock() + self._keep_s
        self._shards = {
            shard: _Held(holder, epoch, self._quiet_until) for shard, (holder, epoch) in (held or {}).items()
        }

    def take(self, shard: str, holder: str, at_least: int = 0) -> Grant | Wait:
        """Give a shard to ``holder``, if nobody else can still have it. Asked again, the holder keeps its epoch.

        Args:
            shard: Name of the shard.
            holder: Name of one life of a keeper on one box; its next life, or one on another box, has another name.
            at_least: Highest epoch that the shard's directory shows; that of the grant is above it.
        """
        now = self._clock()
        known = self._shards.get(shard)
        if known is not None and known.holder == holder and known.epoch > at_least:
            known.free_at = now + self._keep_s
            return Grant(known.epoch, self._lease_s)
        free_at = known.free_at if known is not None else self._quiet_until
        if now < free_at and (known is None or known.holder != holder):
            return Wait(free_at - now)
        epoch = max(self._after, at_least, known.epoch if known is not None else 0) + 1
        self._shards[shard] = _Held(holder, epoch, now + self._keep_s)
        return Grant(epoch, self._lease_s)

    def renew(self, shard: str, holder: str, epoch: int) -> bool:
        """Extend a lease from now on; return False if the shard is not this holder's in this epoch.

        A lease that has run out is extended too, if nobody else has taken the shard.
        """
        known = self._shards.get(shard)
        if known is None or known.holder != holder or known.epoch != epoch:
            return False
        known.free_at = self._clock() + self._keep_s
        return True

    def release(self, shard: str, holder: str, epoch: int) -> None:
        """Give a shard back, whose server has ended: the next holder need not wait. Another's is left alone."""
        known = self._shards.get(shard)
        if known is not None and known.holder == holder and known.epoch == epoch:
            known.holder, known.free_at = None, self._clock()

    def held(self) -> dict[str, tuple[str, int]]:
        """Return the holder and epoch of each shard that has one, to be kept for the next registry."""
        return {shard: (one.holder, one.epoch) for shard, one in self._shards.items() if one.holder is not None}

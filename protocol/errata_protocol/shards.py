"""Shards: which data directory an id names, and where new groups of sessions are placed (PROTOCOL F5).

A shard is a data directory, its lock and the one process that has it. An id of a named directory begins with its name,
so whose it is follows from the id alone: nothing is looked up, and another shard moves no id.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping

from .errors import InvalidRequest, Misdirected, SessionLost, UnknownEpisode
from .fleet import FleetMember
from .names import SHARD

_NAMED = re.compile(r"(?:ep_)?sh-([a-z0-9]{12})-[A-Za-z0-9_-]{21,}", re.ASCII)
_UNIT = 1 << 53


def named(shard: str | None, rest: str) -> str:
    """Return a session id or sid that names a shard.

    Args:
        shard: Name of the shard; None for a directory without a name, whose ids are ``rest`` alone.
        rest: What is random in the id: at least 122 bits, in 21 or more characters of ``A-Z a-z 0-9 _ -``.

    Raises:
        InvalidName: ``shard`` is no name of a shard.
    """
    return rest if shard is None else f"sh-{SHARD.check(shard)}-{rest}"


def shard_of(id: str) -> str | None:
    """Return the shard that a session id, a sid or an eid names.

    Returns:
        The name; None where the id names none. Such an id belongs to the first shard of a fleet.
    """
    found = _NAMED.fullmatch(id)
    return found[1] if found is not None else None


def check_shard(own: str | None, *ids: str, member: Callable[[str], FleetMember | None] | None = None) -> None:
    """Refuse ids that name another shard.

    Args:
        own: Name of the shard that was asked; None for a directory without a name.
        ids: Session ids, sids and eids of the request.
        member: Returns the member that has a shard, None where it is not known; None where no other member is known.

    Raises:
        Misdirected: One of them names another shard.
        SessionLost: One is of a session whose member is lost.
        UnknownEpisode: One is of an episode whose member is lost.
    """
    for id in ids:
        shard = shard_of(id)
        if shard is None or shard == own:
            continue
        found = member(shard) if member is not None else None
        if found is None:
            raise Misdirected(shard)
        if found.state != "lost":
            raise Misdirected(shard, found.url)
        if id.startswith("ep_"):
            raise UnknownEpisode(id)
        raise SessionLost(f"the member {shard}, which has the session, is lost: open another session")


class Placement:
    """Places new groups of sessions on shards by weighted rendezvous hashing: no table, no state, the same everywhere.

    A shard more takes its share of new groups from each of the others, and no group moves between those. Only new
    groups are placed: an id that exists is where `shard_of` says, whatever the shards are now.

    Args:
        weights: Share of new groups that each shard gets, relative to the others, by its name; 0 for one that is to get
            none, such as one that drains.

    Raises:
        InvalidName: A name is no name of a shard.
        InvalidRequest: A weight is negative or not finite, or none is positive.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()):
            raise InvalidRequest(f"weights of shards are finite and not negative, unlike {dict(weights)}")
        self._weights = {SHARD.check(shard): weight for shard, weight in weights.items() if weight > 0}
        if not self._weights:
            raise InvalidRequest("no shard has a positive weight: give one that is to get new groups")

    def place(self, group: str, *, fork_of: str | None = None) -> str:
        """Return the shard of a new group of sessions.

        Args:
            group: Name of the group. All its members are placed alike.
            fork_of: Id of the session or episode that the group is forked from; None for none. A fork is where its
                parent is.
        """
        parent = shard_of(fork_of) if fork_of is not None else None
        if parent is not None:
            return parent
        # Weighted rendezvous hashing: the highest -weight / ln(u) wins, with u
        # uniform in (0, 1). A weight is then the share of groups, exactly in the mean.
        return max(self._weights, key=lambda shard: (-self._weights[shard] / math.log(_uniform(shard, group)), shard))


def _uniform(shard: str, group: str) -> float:
    """Return a number in (0, 1) that depends on both names and nothing else."""
    digest = hashlib.sha256(f"{shard}\0{group}".encode("utf-8", "surrogatepass")).digest()
    return ((int.from_bytes(digest[:8]) >> 11) + 0.5) / _UNIT

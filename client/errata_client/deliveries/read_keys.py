"""`ReadKeys`: the read keys of the episodes that clients of this process played (PROTOCOL F2).

A server without tokens shows an episode outside of its session to who has the session's read key. The clients know
those of their sessions; whatever else reads an episode in the same process, such as `errata_client.Episodes`, finds it
here.
"""

from __future__ import annotations

from collections import OrderedDict

KEPT = 65_536
"""Episodes whose keys are kept; the oldest is dropped first."""


class ReadKeys:
    """Read keys by episode.

    Args:
        kept: Most episodes.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._keys: OrderedDict[str, str] = OrderedDict()

    def add(self, eid: str, key: str) -> None:
        """Keep the key of an episode."""
        self._keys[eid] = key
        self._keys.move_to_end(eid)
        if len(self._keys) > self._kept:
            self._keys.popitem(last=False)

    def get(self, eid: str) -> str | None:
        """Return the key of an episode; None where it is not known here."""
        return self._keys.get(eid)


READ_KEYS = ReadKeys()
"""Those of this process."""

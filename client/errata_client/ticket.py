"""What continues a multiplexed session in another process."""

from __future__ import annotations

from typing import Any, TypedDict

from errata_protocol.errors import InvalidRequest
from errata_protocol.mux.envelope import is_sid


class Ticket(TypedDict):
    """What another process needs to continue a session. Whoever has it can: keep it as secret as a token."""

    version: int
    sid: str
    key: str
    last: int
    last_seq: int


def read_ticket(ticket: Any) -> Ticket:
    """Return a ticket as `ErrataClient.ticket` made it.

    Raises:
        InvalidRequest: It is none, or one of a later version.
    """
    match ticket:
        case {"version": 1, "sid": str(sid), "key": str(key), "last": int(last), "last_seq": int(seq)} if (
            is_sid(sid) and is_sid(key) and last >= 0 and seq >= 0
        ):
            return Ticket(version=1, sid=sid, key=key, last=last, last_seq=seq)
    raise InvalidRequest("this is no ticket of this version: give what client.ticket() returned")

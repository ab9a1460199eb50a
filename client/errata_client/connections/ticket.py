"""Tickets: with one, another process continues a multiplexed session."""

from __future__ import annotations

from typing import Any, TypedDict

from errata_protocol.errors import InvalidRequest
from errata_protocol.mux.envelope import is_sid


class Ticket(TypedDict):
    """What another process needs to continue a session. It gives access to the session: keep it secret.

    Args:
        version: 1.
        sid: Session id.
        key: The session's secret.
        last: Id of the last reply that was received.
        last_seq: Number of the last push that was received.
    """

    version: int
    sid: str
    key: str
    last: int
    last_seq: int


def read_ticket(ticket: Any) -> Ticket:
    """Check a value that `ErrataClient.ticket` returned, e.g. after JSON, and return it as a `Ticket`.

    Raises:
        InvalidRequest: It is no ticket, or a ticket of another version.
    """
    match ticket:
        case {"version": 1, "sid": str(sid), "key": str(key), "last": int(last), "last_seq": int(seq)} if (
            is_sid(sid) and is_sid(key) and last >= 0 and seq >= 0
        ):
            return Ticket(version=1, sid=sid, key=key, last=last, last_seq=seq)
    raise InvalidRequest("this is no ticket of this version: give what client.ticket() returned")

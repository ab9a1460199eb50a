"""`capabilities_data`: encodes the reply to a capability probe, the same at every door (PROTOCOL A1). What an
environment offers is set in `errata_server.app.server`."""

from __future__ import annotations

from typing import Any

from errata_protocol.capabilities import Capabilities, SessionPosition
from errata_protocol.environment import Recovery

from ..runtime.ownership import read_key_of
from ..sessions.session import Session

ATTACHED: dict[str, int] = {"delivery": 1, "request_id": 1}
"""Extensions of a plain socket that is attached to a session by its id."""


def capabilities_data(
    offered: Capabilities,
    session: Session | None = None,
    *,
    with_key: bool = False,
    attached: bool = False,
    first: int | None = None,
) -> dict[str, Any]:
    """Return the ``data`` of a capabilities reply.

    Args:
        offered: What the environment offers.
        session: The session of a plain socket: adds its position, and replaces the environment's recovery class by the
            session's. None over HTTP, and on a multiplexed socket, where the reply to ``open`` has that class.
        with_key: Add the session's read key, where it has no principal.
        attached: Whether the socket is attached to the session by its id, and replies of it can be read again.
        first: First delivery of the current episode that such a socket can read; None where there is none.
    """
    if session is None:
        return offered.model_dump(mode="json", exclude={"session"})
    position = SessionPosition(session_id=session.sid if session.resumable else None, eid=session.eid, t=session.t)
    if with_key and session.row.principal is None:
        position.read_key = read_key_of(session.row)
    update: dict[str, Any] = {"session": position, "recovery": Recovery(session.row.recovery)}
    if attached:
        position.first = first
        update["extensions"] = offered.extensions | ATTACHED
    own = offered.model_copy(update=update)
    return own.model_dump(mode="json")

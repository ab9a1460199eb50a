"""`capabilities_data`: encodes the reply to a capability probe, the same at every door (PROTOCOL A1). What an
environment offers is set in `errata_server.app.server`."""

from __future__ import annotations

from typing import Any

from errata_protocol.capabilities import Capabilities, SessionPosition
from errata_protocol.environment import Recovery

from ..runtime.ownership import read_key_of
from ..sessions.session import Session


def capabilities_data(
    offered: Capabilities, session: Session | None = None, *, with_key: bool = False
) -> dict[str, Any]:
    """Return the ``data`` of a capabilities reply.

    Args:
        offered: What the environment offers.
        session: The session of a plain socket: adds its position, and replaces the environment's recovery class by the
            session's. None over HTTP, and on a multiplexed socket, where the reply to ``open`` has that class.
        with_key: Add the session's read key, where it has no principal.
    """
    if session is None:
        return offered.model_dump(mode="json", exclude={"session"})
    position = SessionPosition(session_id=session.sid if session.resumable else None, eid=session.eid, t=session.t)
    if with_key and session.row.principal is None:
        position.read_key = read_key_of(session.row)
    own = offered.model_copy(update={"session": position, "recovery": Recovery(session.row.recovery)})
    return own.model_dump(mode="json")

"""`Door`: the interface of a client to its session on a server; `PlainDoor` and `MuxDoor` implement it."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from errata_protocol.capabilities import Capabilities
from errata_protocol.labels import Labels
from errata_protocol.replay import ForkReply, Kind, StateAt

from ..connections.mux_session import MuxSession
from ..connections.sharing import Lease
from ..deliveries.late_rewards import Reward
from .http_door import HttpDoor


class PendingRequest(Protocol):
    """A request that was sent and has no outcome yet."""

    def cancel(self) -> None:
        """Cancel the request as far as that is still possible; its callback is not called any more."""


class Door(Protocol):
    """A client's session on a server: over a plain socket or over a multiplexed connection."""

    @property
    def capabilities(self) -> Capabilities | None:
        """What the server can do; None where that is not known, or the server is a vanilla one."""

    async def connect(self) -> None:
        """Open the session or attach to it again, and set the log to its position.

        Raises:
            ConnectionError: The server cannot be reached.
            ErrataError: The server refused.
        """

    async def reattach(self) -> None:
        """Attach to the session again, and wait until every request has an outcome.

        Raises:
            NotSupported: The session ended with its socket.
        """

    async def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one of OpenEnv's messages and return its reply.

        Raises:
            ErrataError: The server answered with an error, or the session is over.
            TimeoutError: No reply within ``timeout_s``.
            ConnectionError: The server cannot be reached.
        """

    def begin(self, kind: Kind, data: dict[str, Any], done: Callable[[Any], None]) -> PendingRequest | None:
        """Send a request; return None where that would have to wait, so that `ask` has to be used.

        Args:
            kind: reset, step or mcp.
            data: Its ``data``.
            done: Called once, with the decoded ``data`` of the reply or with the exception.
        """

    async def state_at(self, t: int, eid: str | None) -> StateAt:
        """Return a delivery that the server has, verified by its digest; ``eid`` None is the running episode."""

    async def fork(
        self, t: int, eid: str | None, target: str, child: ChildDoors, labels: Labels | None = None
    ) -> ForkReply:
        """Fork an episode on the server and give the new session to one of the doors of ``child``.

        Args:
            t: Delivery of the episode that is the child's t=0.
            eid: Episode as the caller named it; None is the running one.
            target: The same episode, always by its key.
            child: The doors of the new session's client.
            labels: All labels of the new session and its episode; None gives them the parent's.
        """

    async def rewards(self, eid: str) -> list[Reward]:
        """Return the late rewards of an episode."""


class Attachable(Protocol):
    """A door that can attach to a given-out session."""

    def attach_to(self, session_id: str, *, ends_at_close: bool) -> None:
        """Use a given-out session from the next `Door.connect` on.

        Args:
            session_id: The session.
            ends_at_close: End it on the server when the client is closed.
        """


class Sharing(Protocol):
    """A door that can use another client's connection."""

    def share(self, lease: Lease) -> MuxSession:
        """Use a connection from now on, and return a new session on it that is not open yet."""

    async def leave(self, *, end: bool | None = None) -> None:
        """Leave the session and release the connection; see `MuxDoor.leave`."""


@dataclass(frozen=True, slots=True)
class ChildDoors:
    """The doors of the client of a fork; the new session goes to one of them."""

    plain: Attachable
    mux: Sharing


async def fork_over_http(
    http: HttpDoor, eid: str, t: int, child: ChildDoors, labels: Labels | None, *, durable: bool
) -> ForkReply:
    """Fork an episode over HTTP and give the new session, a given-out one, to the plain door of ``child``."""
    reply = await http.fork(eid, t, str(uuid.uuid4()), labels)
    child.plain.attach_to(reply.session_id, ends_at_close=not durable)
    return reply

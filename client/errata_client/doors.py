"""`Door`: what a client needs of its way to the server. `PlainDoor` and `MuxDoor` are the two there are."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from errata_protocol.capabilities import Capabilities
from errata_protocol.replay import ForkReply, Kind, StateAt

from .http_door import HttpDoor
from .late_rewards import Reward
from .mux_session import MuxSession
from .sharing import Lease


class Begun(Protocol):
    """A request that was sent and has no reply yet."""

    def ask_back(self) -> None:
        """Withdraw it: nobody waits for its reply any more."""


class Door(Protocol):
    """One client's session on a server, however it is reached."""

    @property
    def capabilities(self) -> Capabilities | None:
        """What the server can do; None where that is not known, or the server is a vanilla one."""

    async def connect(self) -> None:
        """Open the session, or attach to it again, and learn where it stands.

        Raises:
            ConnectionError: The server cannot be reached.
            ErrataError: The server refused.
        """

    async def reattach(self) -> None:
        """Attach to the session again, and return when no request is without outcome.

        Raises:
            NotSupported: The session ended with its socket.
        """

    async def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one of OpenEnv's messages and return its reply.

        Raises:
            ErrataError: The server's error, or why the session is over.
            TimeoutError: No reply in time.
            ConnectionError: The server cannot be reached.
        """

    def begin(self, kind: Kind, data: dict[str, Any], done: Callable[[Any], None]) -> Begun | None:
        """Send a request without waiting for its reply; None where that is not possible now: use `ask`."""

    async def state_at(self, t: int, eid: str | None) -> StateAt:
        """Read a delivery from the server, verified; ``eid`` None is the running episode."""

    async def fork(self, t: int, eid: str | None, target: str, child: ChildDoors) -> ForkReply:
        """Fork an episode on the server and give the new session to one of the doors of ``child``.

        Args:
            t: Delivery the child stands at.
            eid: Episode as the caller named it; None is the running one.
            target: Its key.
            child: ChildDoors of the client of the new session.
        """

    async def rewards(self, eid: str) -> list[Reward]:
        """Read the late rewards of an episode."""


class Attachable(Protocol):
    """A door to a given-out session."""

    def attach_to(self, session_id: str, *, ends_at_close: bool) -> None:
        """Use a given-out session from the next connect on."""


class Sharing(Protocol):
    """A door to a session on a shared connection."""

    def share(self, lease: Lease) -> MuxSession:
        """Return a new session on a connection, which this door uses from now on."""

    async def leave(self, *, end: bool | None = None) -> None:
        """Leave the session and the connection."""


@dataclass(frozen=True, slots=True)
class ChildDoors:
    """The doors of a fork's client; the fork gives the new session to one of them."""

    plain: Attachable
    mux: Sharing


async def fork_over_http(http: HttpDoor, eid: str, t: int, child: ChildDoors, *, durable: bool) -> ForkReply:
    """Fork any episode of the journal; the child is a given-out session at its plain door."""
    reply = await http.fork(eid, t, str(uuid.uuid4()))
    child.plain.attach_to(reply.session_id, ends_at_close=not durable)
    return reply

"""`Reader`: which episodes a request or a socket may read, change or fork (PROTOCOL F2).

With tokens that is those of its principal. Without tokens, an eid is only a name: it needs the server's own user on
this machine, a session's read key, or the session itself.
"""

from __future__ import annotations

import functools

from starlette.requests import HTTPConnection

from errata_protocol.errors import Unauthorized, UnknownEpisode

from ..runtime.store import Store
from .auth import PROXY_HEADERS, is_loopback
from .local_peer import is_own_user


class Reader:
    """Who asks for episodes.

    Args:
        store: The journal.
        connection: The request or the handshake; the guard has checked it.
    """

    def __init__(self, store: Store, connection: HTTPConnection) -> None:
        self._store = store
        self.connection = connection
        self.principal: str | None = connection.scope.get("state", {}).get("principal")

    def identify(self) -> None:
        """Find out now who is at the other end of the connection, and not when it may be lost."""
        _ = self._reads_all

    async def check(self, *eids: str, sid: str | None = None) -> None:
        """Refuse episodes that this reader may not read.

        The reads that follow check the principal; this finds out what a reader without one may read.

        Args:
            eids: The episodes.
            sid: The journal's id of the session on whose socket they were asked for; None over HTTP.

        Raises:
            Misdirected: One of them names another data directory.
            UnknownEpisode: One of them is not this reader's, or does not exist: both get the same answer, after the
                same reads.
        """
        self._store.check_shard(*eids)
        if self._reads_all:
            return
        for eid in eids:
            if not await self._store.opens(eid, self._read_key, sid):
                raise UnknownEpisode(eid)

    @property
    def key(self) -> str | None:
        """The read key that has to open an episode; None where the reader reads all of its principal's."""
        return None if self._reads_all else self._read_key

    async def known(self, eids: list[str]) -> list[str]:
        """Return those of ``eids`` that `check` does not refuse as unknown.

        Raises:
            Misdirected: One of them names another data directory.
        """
        self._store.check_shard(*eids)
        if self._reads_all:
            return eids
        return [eid for eid in eids if await self._store.opens(eid, self._read_key, None)]

    @property
    def may_list(self) -> bool:
        """Whether all of the principal's episodes are this reader's."""
        return self._reads_all

    def check_list(self) -> None:
        """Refuse a list of episodes to a reader that may read only those that it has a key for.

        Raises:
            Unauthorized: It may not list.
        """
        if not self._reads_all:
            raise Unauthorized(
                "this server has no token, so it lists episodes only to its own user on its own machine: set "
                "ERRATA_TOKEN for it, or read one episode with its read_key as the bearer token"
            )

    @functools.cached_property
    def _read_key(self) -> str:
        scheme, _, sent = self.connection.headers.get("authorization", "").partition(" ")
        return sent.strip() if scheme.lower() == "bearer" else ""

    @functools.cached_property
    def _reads_all(self) -> bool:
        if self.principal is not None:
            return True
        scope = self.connection.scope
        peer, here = scope.get("client"), scope.get("server")
        if not PROXY_HEADERS.isdisjoint(self.connection.headers.keys()):
            return False  # the peer is a proxy; whom it speaks for is not known
        if not peer or not peer[0] or peer[0] == "testclient":
            return True  # no network between: in this process, or a Unix socket, whose file has permissions
        if not here or not here[1] or not is_loopback(peer[0]):
            return False
        return is_own_user((peer[0], peer[1]), (here[0], here[1]))

"""Opens sockets to a server, classifies failures as transient or final, and computes the wait before the next
attempt."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from openenv.core.env_client import _is_localhost_ws_url
from openenv.core.utils import convert_to_ws_url
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.typing import Subprotocol

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.exception_text import text_of
from errata_protocol.fleet import PARAMETER
from errata_protocol.printable import printable

from ..fleet import Endpoint

_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes of proxies whose server restarts, and of servers that ask the client to try again."""
REASON_CHARACTERS = 1000
"""Most characters shown of what a server wrote in its refusal of a handshake."""
_TOKEN_HINT = ': give the server\'s token as headers={"Authorization": "Bearer TOKEN"}'


class ConnectRefused(ConnectionError):
    """Connecting failed, and would fail again: wrong token, no such route, no such protocol."""


def is_list(address: str) -> bool:
    """Return whether an address is that of a list of members, such as ``file:///PATH``, and not that of a server."""
    scheme, separator, _ = address.partition("://")
    return bool(separator) and scheme not in ("http", "https", "ws", "wss")


def ws_url_of(base_url: str) -> str:
    """Return the ``.../ws`` URL of a server's base URL, as `EnvClient` makes it; of a list with the same behind it."""
    if is_list(base_url):
        return f"{base_url.rstrip('/')}/ws"
    url: str = convert_to_ws_url(base_url)
    return f"{url}/ws"


@dataclass(frozen=True, slots=True)
class Dial:
    """The address of a server and the parameters of its sockets. Clients with equal ones may share a connection.

    Args:
        ws_url: The server's ``.../ws`` URL, or another address of a fleet with ``/ws`` behind it.
        headers: Sent with the handshake.
        connect_timeout_s: Timeout of one handshake, seconds.
        ping_interval_s: Seconds between pings; None sends none.
        ping_timeout_s: Seconds until a ping without answer means that the socket is lost.
        max_size: Largest incoming message, bytes.
        shard: Name of the server's member that is to get the sockets; None leaves that to the server.
        member_url: The ``.../ws`` URL that the member has now; None for ``ws_url``. A member may come back elsewhere,
            so clients share a connection whatever it is.
    """

    ws_url: str
    headers: tuple[tuple[str, str], ...] = ()
    connect_timeout_s: float = 10.0
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 20.0
    max_size: int = 100 * 1024 * 1024
    shard: str | None = None
    member_url: str | None = field(default=None, compare=False)

    @staticmethod
    def header_items(headers: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
        """Return headers as a sorted, hashable tuple."""
        return tuple(sorted((headers or {}).items()))

    @property
    def address(self) -> str:
        """The server's base URL, or the other address of a fleet."""
        return self.ws_url.removesuffix("/ws")

    @property
    def is_of_server(self) -> bool:
        """Whether the address is that of a server, which a socket can be opened at, and not that of a list."""
        return not is_list(self.ws_url)

    @property
    def url(self) -> str:
        """URL of a socket."""
        url = self.member_url or self.ws_url
        return url if self.shard is None else f"{url}?{PARAMETER}={self.shard}"

    def at(self, member: Endpoint) -> Dial:
        """Return how sockets of a member are opened."""
        url = ws_url_of(member.url)
        return replace(self, shard=member.shard, member_url=None if url == self.ws_url else url)

    async def open(self, *, compression: str | None = None) -> ClientConnection:
        """Open a socket and offer the multiplexed protocol on it; ``.subprotocol`` says whether the server speaks it.

        A handshake that the server cuts off is begun once more, since it has done nothing: one of several workers may
        end in that moment, and another takes the next connection.

        Args:
            compression: ``"deflate"`` where the socket may be used as a plain one, as OpenEnv's client offers it.

        Raises:
            ConnectRefused: Connecting failed and would fail again.
            ConnectionError: The server cannot be reached now.
        """
        try:
            try:
                return await self._handshake(compression)
            except (ConnectionResetError, BrokenPipeError, InvalidMessage) as error:
                if not _is_transient(error):
                    raise
                return await self._handshake(compression)
        except Exception as error:
            text = f"Failed to connect to {self.member_url or self.ws_url}: {text_of(error)}{refusal_reason(error)}"
            if not isinstance(error, OSError | InvalidHandshake):
                raise ConnectRefused(text) from error  # e.g. an invalid URL, or an event loop that is closing
            raise (ConnectionError if _is_transient(error) else ConnectRefused)(text) from error

    async def _handshake(self, compression: str | None) -> ClientConnection:
        local: dict[str, Any] = {"proxy": None} if _is_localhost_ws_url(self.url) else {}
        return await ws_connect(
            self.url,
            subprotocols=[Subprotocol(PROTOCOL_NAME)],
            compression=compression,
            open_timeout=self.connect_timeout_s,
            ping_interval=self.ping_interval_s,
            ping_timeout=self.ping_timeout_s,
            close_timeout=1.0,  # a half-open socket never answers, and its sessions wait for the next socket
            max_size=self.max_size,
            additional_headers=self.headers,
            **local,
        )


def refusal_reason(error: BaseException | None) -> str:
    """Return what a server wrote in its refusal of a handshake, to follow the text of the exception; "" if nothing."""
    if not isinstance(error, InvalidStatus):
        return ""
    body = error.response.body or b""
    try:
        stated = json.loads(body)
    except (ValueError, RecursionError):
        stated = body.decode(errors="replace")
    if isinstance(stated, dict):
        stated = stated.get("message") or stated.get("detail")
    reason = f": {printable(stated.strip(), REASON_CHARACTERS)}" if isinstance(stated, str) and stated.strip() else ""
    return reason + (_TOKEN_HINT if error.response.status_code == 401 else "")


def _is_transient(error: Exception) -> bool:
    if isinstance(error, InvalidStatus):
        return error.response.status_code in _TRANSIENT_STATUS
    return isinstance(error, OSError) or (isinstance(error, InvalidMessage) and isinstance(error.__cause__, EOFError))


_CHANCE = random.Random()
"""Not the global generator, so that reconnecting does not change the random numbers of a seeded training."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts to connect: random up to a bound that doubles, so that clients do not connect all at once.

    Args:
        first_s: Bound of the wait after the first failed attempt.
        most_s: Largest bound.
        give_up_s: Time without a socket, or with sockets that the server closes at once, after which waiting requests
            fail with ConnectionError.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    give_up_s: float = 120.0

    def delay(self, failures: int) -> float:
        """Return the wait, seconds, after ``failures`` failed attempts in a row; 0 for none."""
        bound = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return _CHANCE.uniform(0.0, bound) if failures else 0.0

"""How a socket of a server is opened, which failures pass by themselves, and how long to wait before another try."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openenv.core.env_client import _is_localhost_ws_url
from openenv.core.utils import convert_to_ws_url
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as ws_connect
from websockets.exceptions import InvalidHandshake, InvalidMessage, InvalidStatus
from websockets.typing import Subprotocol

from errata_protocol.capabilities import PROTOCOL_NAME

_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Of a proxy whose server restarts, or that asks for patience."""
TOKEN_HINT = ': give the server\'s token as headers={"Authorization": "Bearer TOKEN"}'


class ConnectRefused(ConnectionError):
    """The server answered, and trying again changes nothing: wrong token, no such route, no such protocol."""


def ws_url_of(base_url: str) -> str:
    """Return the ``.../ws`` URL of a server's base URL, as `EnvClient` makes it."""
    url: str = convert_to_ws_url(base_url)
    return f"{url}/ws"


@dataclass(frozen=True, slots=True)
class Dial:
    """Where a server is and how its sockets are opened. Equal ones may share a socket.

    Args:
        ws_url: The server's ``.../ws`` URL.
        headers: Sent with the handshake.
        connect_timeout_s: For one handshake.
        ping_interval_s: Seconds between pings; None sends none.
        ping_timeout_s: Seconds until a ping without answer means that the socket is lost.
        max_size: Largest message taken, bytes.
    """

    ws_url: str
    headers: tuple[tuple[str, str], ...] = ()
    connect_timeout_s: float = 10.0
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float | None = 20.0
    max_size: int = 100 * 1024 * 1024

    @staticmethod
    def header_items(headers: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
        """Return headers as a hashable value."""
        return tuple(sorted((headers or {}).items()))

    async def open(self, *, compression: str | None = None) -> ClientConnection:
        """Open a socket and offer the multiplexed protocol on it; ``.subprotocol`` says whether the server speaks it.

        Args:
            compression: ``"deflate"`` where the socket may end up a plain one, as OpenEnv's client offers it.

        Raises:
            ConnectRefused: The server does not want this client, now or later.
            ConnectionError: The server cannot be reached now.
        """
        local: dict[str, Any] = {"proxy": None} if _is_localhost_ws_url(self.ws_url) else {}
        try:
            return await ws_connect(
                self.ws_url,
                subprotocols=[Subprotocol(PROTOCOL_NAME)],
                compression=compression,
                open_timeout=self.connect_timeout_s,
                ping_interval=self.ping_interval_s,
                ping_timeout=self.ping_timeout_s,
                close_timeout=1.0,  # a half-open socket answers no farewell, and its sessions wait for the next one
                max_size=self.max_size,
                additional_headers=self.headers,
                **local,
            )
        except Exception as error:
            text = f"Failed to connect to {self.ws_url}: {error or type(error).__name__}"
            if isinstance(error, InvalidStatus) and error.response.status_code == 401:
                text += TOKEN_HINT
            if not isinstance(error, OSError | InvalidHandshake):
                raise ConnectRefused(text) from error  # a URL that is none, a loop that closes
            raise (ConnectionError if _passes(error) else ConnectRefused)(text) from error


def _passes(error: Exception) -> bool:
    if isinstance(error, InvalidStatus):
        return error.response.status_code in _PASSING_STATUS
    return isinstance(error, OSError) or (isinstance(error, InvalidMessage) and isinstance(error.__cause__, EOFError))


_CHANCE = random.Random()
"""Not the module's own generator: how often a client reconnects must not change what a seeded training draws."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts to connect: random up to a bound that doubles, so that clients do not all come at once.

    Args:
        first_s: Bound of the wait before the second attempt; the first is made at once.
        most_s: Largest bound.
        give_up_s: Time without a socket after which waiting requests fail with ConnectionError.
    """

    first_s: float = 0.1
    most_s: float = 5.0
    give_up_s: float = 120.0

    def delay(self, failures: int) -> float:
        """Return the wait in seconds after so many attempts that failed in a row."""
        bound = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 30))
        return _CHANCE.uniform(0.0, bound) if failures else 0.0

"""A TCP proxy that does what networks do: reset, fall silent, delay, tear a frame, let single bytes through."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from enum import Enum, auto

CHUNK = 1 << 16
DRIPPED = 512
"""Bytes of a chunk that a slow drip lets through one after the other, each in a segment of its own."""


class Weather(Enum):
    """What becomes of the bytes of a connection."""

    FAIR = auto()
    SILENT = auto()
    """Half-open: both sides stay connected and nothing arrives, not even that the other one has left."""
    LATE = auto()
    DRIPPING = auto()
    TORN = auto()
    """The next chunk arrives in part, and then a reset: a frame that was cut in its middle."""


class _Link:
    """One connection through the proxy."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.sides = (near, far)
        self.weather = Weather.FAIR
        self.late_s = 0.0
        self.over = asyncio.Event()

    def reset(self) -> None:
        """Drop both sides with a TCP reset: no farewell, and what is under way is lost."""
        for side in self.sides:
            sock = side.get_extra_info("socket")
            if sock is not None and not side.is_closing():
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            side.transport.abort()
        self.over.set()


class FaultyProxy:
    """Forwards connections on a port of its own to a server that may change its address.

    Args:
        chance: Draws which links are hit and where a chunk is torn.

    Attributes:
        upstream: Port of the server on 127.0.0.1; None while there is none, and connections are refused.
        done: How often each fault was done to a link.
    """

    def __init__(self, chance: random.Random) -> None:
        self.upstream: int | None = None
        self.done: Counter[str] = Counter()
        self._chance = chance
        self._links: set[_Link] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen; return the base URL for clients."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, backlog=1024)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """End every connection and listen no more."""
        assert self._server is not None
        self._server.close()
        for link in list(self._links):
            link.reset()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    @property
    def links(self) -> int:
        """Connections now."""
        return len(self._links)

    def cut(self, share: float) -> None:
        """Reset a share of the connections."""
        for link in self._some(share):
            self.done["reset"] += 1
            link.reset()

    def set(self, weather: Weather, share: float = 1.0, late_s: float = 0.0) -> None:
        """Have a share of the connections meet ``weather`` from now on.

        Args:
            weather: What becomes of their bytes.
            share: Of the connections there are, at least one.
            late_s: How long each chunk is held back when it is LATE.
        """
        for link in self._some(share):
            if link.weather is not Weather.SILENT:  # only a reset ends that
                link.weather, link.late_s = weather, late_s
                if weather is not Weather.FAIR:
                    self.done[weather.name.lower()] += 1

    def calm(self) -> None:
        """End all faults; half-open connections are reset, as a middlebox does that forgot them."""
        for link in list(self._links):
            if link.weather is Weather.SILENT:
                link.reset()
            link.weather = Weather.FAIR

    def _some(self, share: float) -> Iterator[_Link]:
        links = sorted(self._links, key=id)
        count = min(len(links), max(1, round(len(links) * share)))
        yield from self._chance.sample(links, count)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.upstream is None:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            writer.transport.abort()
            return
        link = _Link(writer, far_writer)
        self._links.add(link)
        pumps = [
            asyncio.create_task(self._pump(link, reader, far_writer)),
            asyncio.create_task(self._pump(link, far_reader, writer)),
        ]
        self._pumps.update(pumps)
        left = [len(pumps)]
        for pump in pumps:
            pump.add_done_callback(self._pumped(link, left))

    def _pumped(self, link: _Link, left: list[int]) -> Callable[[asyncio.Task[None]], None]:
        def done(pump: asyncio.Task[None]) -> None:
            self._pumps.discard(pump)
            left[0] -= 1
            if not left[0]:
                self._links.discard(link)
            if not pump.cancelled() and (error := pump.exception()) is not None:
                asyncio.get_running_loop().call_exception_handler({"message": "proxy", "exception": error})

        return done

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction until its sender ends, which the other side hears of unless the link is silent."""
        try:
            while data := await reader.read(CHUNK):
                match link.weather:
                    case Weather.SILENT:
                        continue
                    case Weather.LATE:
                        await asyncio.sleep(link.late_s)
                    case Weather.DRIPPING:
                        head, data = data[:DRIPPED], data[DRIPPED:]
                        for at in range(len(head)):
                            writer.write(head[at : at + 1])
                            await writer.drain()
                    case Weather.TORN:
                        writer.write(data[: self._chance.randrange(len(data))])
                        await writer.drain()
                        await asyncio.sleep(0)
                        link.reset()
                        return
                if link.weather is Weather.SILENT:  # since it was read
                    continue
                writer.write(data)
                await writer.drain()
        except OSError:
            pass  # a side is gone
        if link.weather is Weather.SILENT:
            await link.over.wait()  # until then the other side hears nothing of it
        writer.close()

"""Reads over HTTP: one connection, one request at a time."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from .latencies import spread_ms


class HttpLoad:
    """One HTTP/1.1 connection that is kept open.

    Args:
        port: The server's.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def read_states(self, episodes: int, deliveries: int, reads: int, seed: int) -> dict[str, float]:
        """Read states chosen uniformly at random, and check that each names its episode and t.

        Args:
            episodes: Episodes ``ep_000000000000`` and so on.
            deliveries: Of each.
            reads: How many.
            seed: Of the choice.
        """
        chosen = random.Random(seed)
        took = []
        for _ in range(reads):
            eid, t = f"ep_{chosen.randrange(episodes):012d}", chosen.randrange(deliveries)
            began = time.perf_counter()
            head, body = await self._get(f"/episodes/{eid}/states/{t}")
            took.append(time.perf_counter() - began)
            if f"x-errata-t: {t}\r\n" not in head.lower() + "\r\n" or not body.startswith(f'{{"eid":"{eid}"'.encode()):
                raise RuntimeError(f"state {t} of {eid} was answered {body[:200]!r}")
        return spread_ms(took)

    async def metric(self, name: str) -> dict[str, float]:
        """Return the sum of a metric over its labels, as ``value``."""
        _, body = await self._get("/metrics")
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in body.decode().splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        ]
        if not values:
            raise RuntimeError(f"/metrics has no {name}")
        return {"value": sum(values)}

    def abandon(self) -> None:
        """Close the connection after a failure: the rest of a response may still arrive."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _get(self, path: str) -> tuple[str, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        fields: dict[str, Any] = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n"))
        }
        body = await reader.readexactly(int(fields["content-length"]))
        if not head.startswith("HTTP/1.1 200"):
            raise RuntimeError(f"GET {path} was answered {head.splitlines()[0]}: {body[:300]!r}")
        return head, body

"""`RaySource`: the members of a fleet on Ray, ``ray://NAME``, for clients in a process that can reach the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import distribution
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from errata_client.fleet import Endpoint
from errata_protocol.errors import InvalidRequest
from errata_protocol.exception_text import text_of
from errata_protocol.install_hint import DISTRIBUTION, install_hint

if TYPE_CHECKING:
    from .members import Record

try:
    import ray
except ImportError as missing:
    came_from = distribution(DISTRIBUTION).read_text("direct_url.json")
    raise InvalidRequest(f"Ray is not installed: {install_hint('fleet', came_from)}") from missing

from . import cluster

ANSWER_S = 15.0
"""How long an answer may take beyond the wait that was asked for, seconds."""


class RaySource:
    """The members that the registry of a fleet lists.

    Args:
        address: Name of the fleet, ``ray://NAME``. The cluster is the one that the process is connected to, else that
            of ``RAY_ADDRESS``, else the one on this machine.
        headers: Ignored: Ray has a token of its own.

    Raises:
        InvalidRequest: The address has more than a name.
    """

    def __init__(self, address: str, headers: Mapping[str, str] | None) -> None:
        parts = urlsplit(address)
        if not parts.netloc or parts.path not in ("", "/") or parts.query or parts.fragment:
            raise InvalidRequest("a fleet on Ray is named by ray://NAME; RAY_ADDRESS names the cluster")
        self._name = parts.netloc

    async def read(self, after: str | None, wait_s: float) -> tuple[str, list[Endpoint]]:
        """See `errata_client.fleet.Source.read`.

        Raises:
            ConnectionError: The registry does not answer.
            InvalidRequest: There is no cluster, or no such fleet.
        """
        registry = await asyncio.to_thread(self._registry)
        found: tuple[str, list[Record]]
        try:
            async with asyncio.timeout(wait_s + ANSWER_S):
                found = await registry.watch.remote(after, wait_s if after is not None else 0.0)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ConnectionError(
                f"the registry of the fleet {self._name} does not answer: {text_of(error)[:300]}"
            ) from error
        version, records = found
        return version, [Endpoint(one.shard, one.url, one.state) for one in records]

    def _registry(self) -> Any:
        cluster.connect("auto")
        return cluster.registry_of(self._name)

    async def aclose(self) -> None:
        """See `errata_client.fleet.Source.aclose`; the process stays connected to the cluster."""

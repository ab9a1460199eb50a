"""`EngineClient`: the docker SDK's client with addresses that are built in one place and bounded lists."""

from __future__ import annotations

import json
from typing import Any

import docker

from .names import segment
from .schema import Refused

LIST_BYTES = 16 * 1024**2
"""Largest list that is read of the engine: of changed paths, containers or images."""


class EngineClient(docker.APIClient):  # type: ignore[misc]  # the SDK has no types
    """The SDK's client, for the broker and ``errata image``.

    The SDK leaves ``/`` and ``:`` of a name as they are, and ``requests`` resolves ``..``: with it, the name
    ``errata/../X`` asks for X, and ``x/../../containers/json`` for another part of the engine.
    """

    def _url(self, pathfmt: str, *args: str, **kwargs: Any) -> str:
        """Return an address of the engine: a format of the SDK's with one encoded segment for each name."""
        url: str = super()._url(pathfmt.format(*map(segment, args)), **kwargs)
        return url

    def read_list(self, pathfmt: str, *args: str, **query: Any) -> list[dict[str, Any]]:
        """Return a list that the engine answers with, reading at most `LIST_BYTES`.

        Args:
            pathfmt: Path with ``{0}`` for the first name.
            args: Names in the path.
            query: Parameters of the query.

        Raises:
            Refused: ``too_large``: the list is larger.
            docker.errors.APIError: The engine refused it.
        """
        with self.get(self._url(pathfmt, *args), params=query, stream=True, timeout=self.timeout) as answer:
            self._raise_for_status(answer)
            read = bytearray()
            for chunk in answer.iter_content(1 << 16):
                read += chunk
                if len(read) > LIST_BYTES:
                    raise Refused(
                        "too_large", f"the engine lists more than {LIST_BYTES} bytes: delete files or layers first"
                    )
        found: list[dict[str, Any]] = json.loads(read) or []
        return found

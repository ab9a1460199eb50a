"""Requests that a play makes: read from a file, from an episode, or kept as they were generated."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from errata_protocol.bundle import DeliveryRecord, FailureRecord, parse_line
from errata_protocol.errors import InvalidRequest

Kind = Literal["reset", "step", "mcp"]
_KINDS: tuple[Kind, ...] = ("reset", "step", "mcp")


@dataclass(frozen=True, slots=True)
class Request:
    """One request to an environment.

    Args:
        kind: ``reset``, ``step``, or ``mcp`` for a tools/call.
        data: Arguments of the reset, the action, or the parameters of the call.
    """

    kind: Kind
    data: dict[str, Any]


def recorded(file: Path) -> list[Request]:
    """Read requests from a file with one JSON object a line.

    A line is an action, or ``{"reset": {...}}``, ``{"step": {...}}`` or ``{"mcp": {"name": ..., "arguments": {...}}}``.

    Raises:
        InvalidRequest: A line is none of these, or the file holds none.
        OSError: It cannot be read.
    """
    found = [
        _line(line, f"{file}, line {number}")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.strip()
    ]
    if not found:
        raise InvalidRequest(f"{file} holds no actions: give one JSON object a line")
    return found


def _line(line: str, where: str) -> Request:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} is no JSON object: an action is one, and so is {{'reset': {{...}}}}")
    for kind in _KINDS:
        if set(value) == {kind} and isinstance(value[kind], dict):
            return Request(kind, value[kind])
    return Request("step", value)


def of_bundle(lines: Iterable[bytes]) -> list[Request]:
    """Return the requests of a bundle's episodes, in their order, those that failed too.

    Raises:
        InvalidRequest: It holds none.
    """
    found: list[Request] = []
    for line in lines:
        record = parse_line(line)
        if not isinstance(record, DeliveryRecord | FailureRecord) or record.kind not in ("reset", "step", "mcp"):
            continue
        data = json.loads(record.request_bytes)
        found.append(Request("mcp", data.get("params") or {}) if record.kind == "mcp" else Request(record.kind, data))
    if not found:
        raise InvalidRequest("the episode has no requests that could be made again")
    return found


def with_reset(requests: Sequence[Request], seed: int) -> list[Request]:
    """Return requests that begin with a reset, and whose resets have a seed and an id, as a server draws them."""
    if requests[0].kind != "reset":
        requests = [Request("reset", {}), *requests]
    return [
        Request("reset", {"seed": seed + number, "episode_id": f"probe-{number}", **request.data})
        if request.kind == "reset"
        else request
        for number, request in enumerate(requests)
    ]

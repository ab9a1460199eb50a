"""Requests of a play, read from a file or from a bundle of an episode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from errata_os.input_files import read_file
from errata_protocol.bounded_json import decode
from errata_protocol.bundle import DeliveryRecord, FailureRecord, parse_line
from errata_protocol.errors import InvalidRequest

Kind = Literal["reset", "step", "mcp"]
_MAX_BYTES = 64 * 1024**2
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
    """Read requests from a file with one JSON object on each line.

    A line is an action, or ``{"reset": {...}}``, ``{"step": {...}}`` or ``{"mcp": {"name": ..., "arguments": {...}}}``.
    Empty lines are skipped.

    Raises:
        InvalidRequest: A line is not a JSON object, or the file has no request.
        OSError: The file cannot be read.
    """
    try:
        text = read_file(file, _MAX_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{file} is not UTF-8: {error}") from error
    found = [_line(line, f"{file}, line {number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not found:
        raise InvalidRequest(f"{file} holds no actions: give one JSON object a line")
    return found


def _line(line: str, where: str) -> Request:
    try:
        value = decode(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} is not a JSON object, as an action or {{'reset': {{...}}}} is")
    for kind in _KINDS:
        if set(value) == {kind} and isinstance(value[kind], dict):
            return Request(kind, value[kind])
    return Request("step", value)


def of_bundle(lines: Iterable[bytes]) -> list[Request]:
    """Return the resets, steps and MCP calls of a bundle's episodes in order, including those that failed.

    Raises:
        InvalidRequest: There are none, or a line or a request cannot be read.
    """
    found: list[Request] = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_line(line)
        except ValueError as error:
            raise InvalidRequest(f"line {number} of the bundle cannot be read: {error}") from error
        if not isinstance(record, DeliveryRecord | FailureRecord) or record.kind not in ("reset", "step", "mcp"):
            continue
        try:
            data = decode(record.request_bytes)
        except ValueError as error:
            raise InvalidRequest(f"a request of the episode is not JSON: {error}") from error
        if record.kind == "mcp" and isinstance(data, dict):
            data = data.get("params") or {}
        if not isinstance(data, dict):
            raise InvalidRequest(f"a request of the episode is not a JSON object: {type(data).__name__}")
        found.append(Request(record.kind, data))
    if not found:
        raise InvalidRequest("the episode has no requests that can be played again")
    return found


def with_reset(requests: Sequence[Request], seed: int) -> list[Request]:
    """Put a reset first if there is none, and give resets a seed and an episode id where they have none."""
    if requests[0].kind != "reset":
        requests = [Request("reset", {}), *requests]
    return [
        Request("reset", {"seed": seed + number, "episode_id": f"probe-{number}", **request.data})
        if request.kind == "reset"
        else request
        for number, request in enumerate(requests)
    ]

"""The environment's record of a rollout's tool calls, from the client that made them or from rows of a journal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from errata_protocol.rollouts import ErrorMarker, Turn, marker_of


@dataclass(frozen=True, slots=True)
class Delivery:
    """One tool call that reached the environment.

    Attributes:
        t: Delivery index; None for a call that was refused there and delivered nothing.
        name: Name of the tool.
        arguments: Arguments that the environment was given; None if unknown.
        text: Exact text that the tool returned to the student; None if unknown.
        marker: Error marker of the delivery; None if nothing went wrong or it is unknown.
        eid: Key of the episode; None if there is only one.
        code: Error code of a refused call, a row of `errata_protocol.CODES`; None for a delivery.
    """

    t: int | None
    name: str
    arguments: Mapping[str, Any] | None = field(default_factory=dict)
    text: str | None = None
    marker: ErrorMarker | None = None
    eid: str | None = None
    code: str | None = None


def deliveries_of(turns: Iterable[Turn | Mapping[str, Any]]) -> list[Delivery]:
    """Return the tool calls of an episode's rows, as ``errata journal export --by turn`` writes them.

    Resets are left out. Requests that failed come behind the delivery after which they were made. ``text`` is
    ``agent_text_t``: export with ``--agent-text`` where calls repeat themselves.

    Args:
        turns: Rows of the episode in order of t, as `errata_protocol.rollouts.Turn` or decoded.

    Raises:
        pydantic.ValidationError: A row is none.
    """
    found = []
    for row in turns:
        turn = row if isinstance(row, Turn) else Turn.model_validate(row)
        eid = getattr(turn, "eid", None) if isinstance(row, Turn) else row.get("eid")
        if turn.kind != "reset":
            name, arguments = call_of(_decoded(turn.action_t))
            marker = turn.error_marker_t
            if marker is None and turn.state_t is not None:
                marker = marker_of(_decoded(turn.state_t))
            found.append(Delivery(turn.t, name, arguments, turn.agent_text_t, marker, eid))
        for failed in turn.errors_t:
            if failed.kind != "reset":
                name, arguments = call_of(_decoded(failed.action))
                found.append(Delivery(None, name, arguments, eid=eid, code=failed.code))
    return found


def call_of(request: Any) -> tuple[str, dict[str, Any] | None]:
    """Return the tool name and arguments of a ``step`` or ``tools/call`` request.

    The call is in ``action`` or ``params``, or is the request itself. Its ``tool``, ``tool_name`` or ``name`` is the
    tool; its ``arguments`` are the arguments, or else its other fields without ``metadata`` and ``type``. Arguments
    that are null are left out.

    Args:
        request: The decoded request.

    Returns:
        Name and arguments. The name is ``""`` if the call names no tool; its fields without ``metadata`` are the
        arguments then. ``("", None)`` if the request is not a mapping.
    """
    if not isinstance(request, Mapping):
        return "", None
    body: Mapping[str, Any] = request
    for wrapper in ("params", "action"):
        inner = body.get(wrapper)
        if isinstance(inner, Mapping):
            body = inner
    for key in ("tool", "tool_name", "name"):
        if isinstance(body.get(key), str):
            given = body.get("arguments")
            if not isinstance(given, Mapping):
                given = {name: value for name, value in body.items() if name not in (key, "metadata", "type")}
            return body[key], {name: value for name, value in given.items() if value is not None}
    return "", {name: value for name, value in body.items() if value is not None and name != "metadata"}


def _decoded(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:  # a request that was refused need not be JSON
        return None

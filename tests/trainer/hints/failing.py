"""Failing turns for tests of hints."""

from __future__ import annotations

from typing import Any

from errata_protocol.markers import HINT_TEMPLATE_KEYS, ErrorKind, ErrorSite
from errata_protocol.rollouts import ErrorMarker
from errata_trainer import Call, Rollout, Turn
from errata_trainer.hints import FailedTurn

TOOLS: list[dict[str, Any]] = [
    {
        "name": "run",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "timeout_s": {"type": "number"}},
            "required": ["command"],
        },
    },
    {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}},
]


def marker_for(kind: str, severity: str = "error", **site: Any) -> ErrorMarker:
    key = HINT_TEMPLATE_KEYS[ErrorKind(kind)] if kind in tuple(ErrorKind) else None
    return ErrorMarker(
        error_kind=kind,
        hint_template_key=key,
        severity=severity,
        error_site=ErrorSite.model_validate(site) if site else None,
    )


def failing(
    marker: ErrorMarker | None,
    name: str = "run",
    arguments: dict[str, Any] | None = None,
    *,
    t: int | None = 1,
    environment: str | None = None,
    observation: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
    reward: float | None = None,
) -> FailedTurn:
    call = Call(name, {"command": "cat a.txt"} if arguments is None else arguments, t, marker)
    turn = Turn(0, 0, 2, (call,))
    rollout = Rollout((1, 2), (3, 4), (1, 1), (turn,), eid="e", environment=environment, reward=reward, task=task or {})
    return FailedTurn(rollout, turn, call, observation or {}, TOOLS)

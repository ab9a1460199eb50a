"""The neutral record of a rollout."""

from __future__ import annotations

from errata_protocol.rollouts import ErrorMarker
from errata_trainer import Call, Turn

WARNING = Call("run", {"command": "a"}, 1, ErrorMarker(error_kind="output_truncated", severity="warning"))
ERROR = Call("run", {"command": "b"}, 2, ErrorMarker(error_kind="path_not_found", severity="error"))
FINE = Call("run", {"command": "c"}, 3)


def test_a_turn_fails_by_its_first_error_and_never_by_a_warning() -> None:
    assert Turn(0, 0, 9, (WARNING, FINE)).failed is None
    assert Turn(0, 0, 9, (WARNING, FINE, ERROR)).failed is ERROR

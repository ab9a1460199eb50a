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


def test_unknown_logprobs_of_sampled_tokens_leave_the_rollout_without() -> None:
    from errata_trainer import build_rollout

    messages = [{"role": "assistant", "content": "a"}]
    for unknown in (None, float("nan")):
        rollout = build_rollout([1], [2, 3], [1, 1], messages, logprobs=[-0.5, unknown])
        assert rollout.logprobs is None
        rollout = build_rollout([1], [2, 3], [1, 0], messages, logprobs=[-0.5, unknown])
        assert rollout.logprobs == (-0.5, 0.0), "it was not sampled"

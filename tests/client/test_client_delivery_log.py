"""`errata_client.deliveries.delivery_log`: the history of what was received answers like a server would."""

from __future__ import annotations

import pytest

from errata_client.deliveries.delivery_log import DeliveryLog
from errata_client.wire.frames import FrameInvalid
from errata_protocol.errors import InvalidRequest, NoReset, StateOutOfRange, UnknownEpisode
from errata_protocol.payload import digest
from errata_protocol.replay import Kind, StateAt


def state(eid: str, t: int, kind: Kind = "step") -> StateAt:
    payload = f'{{"{eid}":{t}}}'.encode()
    return StateAt(eid, t, kind, payload, digest(payload), "history")


def test_lookup_answers_the_running_episode_and_earlier_ones() -> None:
    log = DeliveryLog()
    for s in [state("a", 0, "reset"), state("a", 1), state("b", 0, "reset")]:
        log.note(s)
    assert (log.eid, log.t) == ("b", 0)
    assert log.lookup(0) == state("b", 0, "reset")
    assert log.lookup(1, "a") == state("a", 1)


def test_lookup_refuses_what_it_never_received() -> None:
    log = DeliveryLog()
    with pytest.raises(NoReset):
        log.lookup(0)
    log.note(state("a", 0, "reset"))
    for t in (1, -1, 10**30):
        with pytest.raises(StateOutOfRange) as caught:
            log.lookup(t)
        assert caught.value.details == {"eid": "a", "t": t, "deliveries": 1}
    with pytest.raises(UnknownEpisode):
        log.lookup(0, "z")
    with pytest.raises(InvalidRequest):
        log.lookup(True)


def test_an_episode_that_began_with_a_tool_call_has_no_reset() -> None:
    log = DeliveryLog()
    log.note(state("a", 1, "mcp"))
    with pytest.raises(NoReset):
        log.lookup(0)
    assert not log.is_complete("a")


def test_t_only_goes_forward_within_an_episode() -> None:
    log = DeliveryLog()
    log.note(state("a", 0, "reset"))
    log.note(state("a", 2))
    for t in (1, 2):
        with pytest.raises(FrameInvalid):
            log.note(state("a", t))
    with pytest.raises(FrameInvalid):
        log.note(state("b", 1, "reset"))
    assert (log.eid, log.t, log.is_complete("a")) == ("a", 2, False)


def test_only_the_newest_episodes_are_kept() -> None:
    log = DeliveryLog(kept_episodes=2)
    for eid in "abc":
        log.note(state(eid, 0, "reset"))
    assert log.get("a", 0) is None
    assert [log.lookup(0, eid).eid for eid in "bc"] == ["b", "c"]

"""The record of an episode in another process: what it keeps, and what it refuses to read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from errata_protocol.errors import SessionLost
from errata_protocol.rollouts import ErrorMarker
from errata_trainer.episodes.record import LOST, OVER, EpisodeRecord
from errata_trainer.episodes.tools import of_spec
from tests.environments.shelf import SPEC

SHELF = of_spec(SPEC)
MARKER = ErrorMarker(error_kind="path_not_found", hint_template_key="fs.missing", severity="error")


def result(text: str, reward: float | None = None, done: bool = False, marker: ErrorMarker | None = None) -> Any:
    observation: dict[str, Any] = {"text": text}
    if marker is not None:
        observation |= marker.model_dump(exclude_none=True)
    return SimpleNamespace(observation=observation, reward=reward, done=done, metadata=None)


def played() -> EpisodeRecord:
    record = EpisodeRecord(SHELF)
    record.begin({"place": "red"})
    record.opened("e-1", result("go"))
    record.received("read", {"path": "red"}, result("the word is owl", 0.25), 1)
    record.received("read", {"path": "green"}, result("no file green", marker=MARKER), 2)
    record.refuse("read", {"file": float("nan")}, "read() has no argument 'file'")
    record.received("submit", {"word": "owl"}, result("right", float("inf"), True), 3)
    record.unanswered("read", {}, connected=True)
    record.finished = True
    return record


def carried(record: EpisodeRecord) -> EpisodeRecord:
    text = json.dumps(record.to_json(), allow_nan=False)
    return EpisodeRecord.from_json(json.loads(text), SHELF)


def test_a_record_comes_back_with_the_observations_of_the_reset_and_of_failures() -> None:
    record = played()
    copy = carried(record)
    assert (copy.eid, copy.opening, copy.task) == ("e-1", {"text": "go"}, {"place": "red"})
    assert (copy.done, copy.finished, copy.lost) == (True, True, None)
    assert copy.reward() == record.reward() == float("inf")
    assert [call.observation for call in copy.played] == [{}, record.played[1].observation, {}, {}, {}]
    assert [call.marker for call in copy.played] == [call.marker for call in record.played]
    assert copy.played[1].marker is not None and copy.played[1].observation["text"] == "no file green"
    assert [call.text for call in copy.played][-2:] == ["right", OVER]
    own, theirs = record.deliveries(), copy.deliveries()
    assert theirs[:2] == own[:2] and theirs[3:] == own[3:]
    assert theirs[2].arguments == {"file": "NaN"}, "JSON has no such number"


def test_an_error_that_a_server_tells_in_openenvs_form_is_a_marker_and_no_text_of_the_student() -> None:
    info = {"kind": "path_not_found", "sites": [{"action_field": "path", "action_span": [0, 5]}]}
    record = EpisodeRecord(SHELF)
    record.opened("e-1", result("go"))
    for metadata in ({"error_info": info}, {"error_info": "text"}):
        answer = SimpleNamespace(observation={"text": "none"}, reward=None, done=False, metadata=metadata)
        assert record.received("read", {"path": "green"}, answer, 1) == record.environment.agent_text({"text": "none"})
    told, not_told = (call.marker for call in carried(record).played)
    assert told is not None and told.error_site is not None and not_told is None
    assert (told.error_kind, told.hint_template_key, told.severity) == ("path_not_found", "fs.missing", "error")
    assert told.error_site.action_span == (0, 5)


def test_a_lost_record_comes_back_as_lost() -> None:
    record = EpisodeRecord(SHELF)
    record.begin({})
    record.opened("e-1", result("go"))
    assert record.failed("read", {}, SessionLost("gone")) == LOST
    copy = carried(record)
    assert copy == record
    assert (copy.lost, copy.lost_code, copy.reward()) == ("SessionLost: gone", "SESSION_LOST", None)
    record.begin({})
    assert (record.lost, record.lost_code, record.reward()) == (None, None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"environment": "terminal"}, "of the environment 'terminal', not 'shelf'"),
        ({"eid": 3}, "eid is 3: it has to be a text or null"),
        ({"played": None}, "played is None: it has to be a list"),
        ({"played": [{}]}, "cannot be made of this row: 'tool'"),
        ({"played": [{"tool": "read", "arguments": []}]}, "arguments is "),
        ({"done": 1}, "done is 1: it has to be true or false"),
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EpisodeRecord.from_json({**played().to_json(), **change}, SHELF)
    with pytest.raises(ValueError, match="cannot be made of this row: 'opening'"):
        EpisodeRecord.from_json({"schema_version": 1, "environment": "shelf"}, SHELF)


def test_a_field_that_is_not_known_is_not_read() -> None:
    record = played()
    assert EpisodeRecord.from_json({**record.to_json(), "added": 1}, SHELF).eid == record.eid


def test_an_observation_without_a_json_form_is_named() -> None:
    record = EpisodeRecord(SHELF)
    record.begin({"place": {1, 2}})
    with pytest.raises(TypeError, match=r"task\.place is a set"):
        record.to_json()

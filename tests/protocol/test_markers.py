"""Markers on observations (PROTOCOL B)."""

from __future__ import annotations

import pytest
from openenv.core.env_server.types import Observation
from pydantic import BaseModel, ValidationError

from errata_protocol.markers import (
    HINT_TEMPLATE_KEYS,
    NOTHING_WRONG,
    Detection,
    ErrorKind,
    ErrorMarkers,
    ErrorSite,
)


class Marked(ErrorMarkers, Observation):
    text: str = ""


SITE = ErrorSite(action_field="command", action_span=(4, 8), source="message")
FOUND = Detection.of(ErrorKind.PATH_NOT_FOUND, SITE, ErrorSite(file="x.py", line=3))


def test_there_are_sixteen_kinds_and_each_has_one_hint_key() -> None:
    assert len(ErrorKind) == 16
    assert set(HINT_TEMPLATE_KEYS) == set(ErrorKind)
    assert len(set(HINT_TEMPLATE_KEYS.values())) == 16


def test_a_detection_is_declared_and_mirrored_in_metadata() -> None:
    marked = Marked(text="x", metadata={"kept": 1}).with_detection(FOUND)
    assert marked.error_kind == "path_not_found" and marked.hint_template_key == "fs.missing"
    assert marked.error_site == SITE and marked.error_sites == list(FOUND.error_sites)
    assert marked.metadata["error_kind"] == "path_not_found" and marked.metadata["kept"] == 1
    assert marked.metadata["error_site"]["action_span"] == [4, 8]
    assert Marked.model_validate_json(marked.model_dump_json()) == marked


def test_a_turn_without_error_has_default_fields_and_untouched_metadata() -> None:
    plain = Marked(text="x", metadata={"kept": 1})
    assert plain.with_detection(NOTHING_WRONG) == plain


def test_marking_again_replaces_the_mirror() -> None:
    marked = Marked().with_detection(FOUND).with_detection(NOTHING_WRONG)
    assert marked.error_kind is None and marked.error_site is None and marked.metadata == {}


def test_the_server_stamps_t_once_so_that_a_fork_keeps_its_parents() -> None:
    stamped = Marked().with_detection(FOUND).with_site_t(3)
    assert stamped.error_site is not None and stamped.error_site.t == 3
    assert [s.t for s in stamped.error_sites] == [3, 3]
    assert stamped.metadata["error_site"]["t"] == 3
    assert stamped.with_site_t(9) == stamped
    unmarked = Marked(text="x")
    assert unmarked.with_site_t(3) is unmarked


def test_the_mixin_works_without_metadata() -> None:
    class Bare(ErrorMarkers, BaseModel):
        pass

    assert Bare().with_detection(FOUND).error_kind == "path_not_found"


@pytest.mark.parametrize("wrong", [{"line": 0}, {"t": -1}, {"column": 0}, {"nope": 1}])
def test_a_site_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        ErrorSite(**wrong)  # type: ignore[arg-type]


def test_truncated_output_is_always_a_warning() -> None:
    assert Detection.of(ErrorKind.OUTPUT_TRUNCATED).severity == "warning"
    assert Marked(error_kind="output_truncated").severity == "warning"
    assert Marked(error_kind="output_truncated", severity="error").severity == "warning"


def test_severity_is_null_exactly_where_there_is_no_kind() -> None:
    assert (Marked().severity, NOTHING_WRONG.severity) == (None, None)
    assert Marked().with_detection(NOTHING_WRONG).model_dump()["severity"] is None
    assert Marked(error_kind="timeout").severity == Detection(error_kind=ErrorKind.TIMEOUT).severity == "error"
    assert Marked(error_kind="timeout", severity="warning").severity == "warning"
    marked = Marked().with_detection(FOUND)
    assert marked.with_detection(NOTHING_WRONG).severity is None


def test_a_payload_of_version_1_is_read_as_version_2() -> None:
    sent = {"error_kind": None, "hint_template_key": None, "error_site": None, "error_sites": [], "severity": "error"}
    assert Marked.model_validate(sent).severity is None
    assert Marked.model_validate(sent) == Marked()

"""Error information in metadata, in the form that is proposed to OpenEnv (PROTOCOL B5)."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import Observation

from errata_protocol.environment import default_agent_text
from errata_protocol.error_info import KEY, MAX_MESSAGE, MAX_SITES, ErrorInfo
from errata_protocol.markers import NOTHING_WRONG, Detection, ErrorKind, ErrorMarkers, ErrorSite
from errata_protocol.rollouts import marker_of


class Marked(ErrorMarkers, Observation):
    text: str = ""


SITE = ErrorSite(t=3, action_field="command", action_span=(4, 8), column=2, source="message", message="cat: x: no")
FOUND = Detection.of(ErrorKind.PATH_NOT_FOUND, SITE, ErrorSite(file="x.py", line=3))
TOLD = {
    "kind": "path_not_found",
    "message": "cat: x: no",
    "sites": [{"action_field": "command", "action_span": [4, 8]}, {"file": "x.py", "line": 3}],
}
OTHER_WORDS = {"invalid_arguments": "invalid_args", "policy_violation": "permission_denied"}


def told_by(*sites: ErrorSite, **metadata: Any) -> Any:
    found = Detection.of(ErrorKind.RUNTIME_ERROR, *sites)
    return Marked(metadata=metadata).with_detection(found).metadata.get(KEY)


# -- what is written ---------------------------------------------------------------------------------------------------


def test_an_error_is_told_beside_the_markers() -> None:
    marked = Marked(metadata={"kept": 1}).with_detection(FOUND)
    assert marked.metadata[KEY] == TOLD
    assert set(marked.metadata) == {"kept", "error_kind", "hint_template_key", "error_site", KEY}
    assert marked.with_site_t(7).metadata[KEY] == TOLD


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_a_kind_is_a_word_of_the_table_where_one_fits(kind: ErrorKind) -> None:
    told = Marked().with_detection(Detection.of(kind)).metadata.get(KEY)
    if kind is ErrorKind.OUTPUT_TRUNCATED:
        assert told is None, "nothing failed"
    else:
        assert told == {"kind": OTHER_WORDS.get(kind.value, kind.value)}


def test_what_is_not_certain_is_not_told() -> None:
    unsure = Marked().with_detection(Detection.of(ErrorKind.TIMEOUT, SITE, severity="warning"))
    assert unsure.error_kind == "timeout" and KEY not in unsure.metadata
    assert KEY not in Marked(text="x").with_detection(NOTHING_WRONG).metadata


def test_fields_that_an_environment_sets_itself_are_told_when_the_server_stamps_them() -> None:
    marked = Marked(error_kind="of its own", error_site=SITE).with_site_t(3)
    assert marked.metadata[KEY] == {**TOLD, "kind": "of its own", "sites": TOLD["sites"][:1]}


def test_an_observation_without_an_error_keeps_its_bytes() -> None:
    for metadata in ({}, {"kept": 1}, {KEY: {"kind": "its own"}}, {KEY: None}):
        plain = Marked(text="x", metadata=dict(metadata))
        assert plain.with_site_t(3).model_dump_json() == plain.model_dump_json()
        assert plain.with_detection(NOTHING_WRONG).model_dump_json() == plain.model_dump_json()


def test_no_place_is_told_that_is_none() -> None:
    only_said = ErrorSite(t=1, column=3, source="message", message="boom")
    inline = ErrorSite(file="<string>", line=2, action_field="command", action_span=(0, 9))
    assert told_by(only_said, inline) == {
        "kind": "runtime_error",
        "message": "boom",
        "sites": [{"action_field": "command", "action_span": [0, 9]}],
    }
    assert told_by(ErrorSite(test_id="a::b")) == {"kind": "runtime_error", "sites": [{"test_id": "a::b"}]}


def test_what_is_too_long_is_cut() -> None:
    told = told_by(*(ErrorSite(file="a.py", line=n, message="\u00e9" * 400) for n in range(1, 40)))
    assert len(told["message"]) == MAX_MESSAGE and told["message"].endswith("\u00e9\u2026")
    assert [site["line"] for site in told["sites"]] == list(range(1, MAX_SITES + 1))


def test_an_empty_kind_is_none() -> None:
    assert ErrorInfo.read({KEY: {"kind": ""}}) is None
    assert KEY not in Marked(error_kind="", error_site=SITE).with_site_t(3).metadata


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_a_site_that_was_never_validated_does_not_fail_the_step() -> None:
    odd = SITE.model_copy(update={"file": 7})
    marked = Marked(error_kind="timeout", error_site=SITE).model_copy(update={"error_site": odd}).with_site_t(1)
    assert marked.metadata[KEY] == {**TOLD, "kind": "timeout", "sites": TOLD["sites"][:1]}


@pytest.mark.parametrize("own", [{"kind": "its own"}, {"kind": "runtime_error", "sites": []}, "text", 0])
def test_what_an_environment_wrote_itself_stays(own: Any) -> None:
    assert told_by(SITE, **{KEY: own}) == own
    marked = Marked(metadata={KEY: own}).with_detection(FOUND).with_site_t(3).with_detection(NOTHING_WRONG)
    assert marked.metadata == {KEY: own}


def test_marking_again_replaces_what_was_told() -> None:
    marked = Marked().with_detection(FOUND)
    assert marked.with_detection(Detection.of(ErrorKind.TIMEOUT)).metadata[KEY] == {"kind": "timeout"}
    assert marked.with_site_t(4).with_detection(NOTHING_WRONG).metadata == {}


def test_an_agent_reads_the_same_with_and_without() -> None:
    marked = Marked(text="x").with_detection(FOUND)
    without = marked.model_copy(update={"metadata": {k: v for k, v in marked.metadata.items() if k != KEY}})
    assert KEY in marked.metadata and default_agent_text(marked) == default_agent_text(without)
    assert default_agent_text(marked.model_dump(mode="json")) == default_agent_text(without.model_dump(mode="json"))


# -- what is read ------------------------------------------------------------------------------------------------------


def payload(info: Any, *, within: bool = True, beside: bool = False) -> dict[str, Any]:
    metadata = {"kept": 1, KEY: info}
    observation = {"stderr": "", **({"metadata": metadata} if within else {})}
    return {"observation": observation, "reward": 0.0, "done": False, **({"metadata": metadata} if beside else {})}


@pytest.mark.parametrize(
    ("info", "kind", "hint", "site"),
    [
        (TOLD, "path_not_found", "fs.missing", {"action_field": "command", "action_span": (4, 8)}),
        ({"kind": "invalid_args"}, "invalid_arguments", "args.invalid", None),
        ({"kind": "permission_denied"}, "permission_denied", "fs.permission", None),
        ({"kind": "timeout", "message": "30 s"}, "timeout", "exec.timeout", {"source": "message", "message": "30 s"}),
        ({"kind": "illegal move", "later": 1}, "illegal move", None, None),
        ({"kind": "x", "sites": [{"test_id": "a::b", "column": 7}]}, "x", None, {"test_id": "a::b"}),
        ({"kind": "x", "sites": [{"file": "a", "line": 0, "action_span": [5, 2]}]}, "x", None, {"file": "a"}),
        ({"kind": "x", "sites": [{}, {"later": 1}, 1, {"line": "here"}, {"line": 4}]}, "x", None, {"line": 4}),
        ({"kind": "x", "message": 7, "sites": {"line": 4}}, "x", None, None),
        ({"kind": "\udc80" + "x" * 2000, "message": ""}, "?" + "x" * 999, None, None),
        ({"kind": "x", "sites": [{"file": "caf\udce9.py"}]}, "x", None, {"file": "caf?.py"}),
        *(
            ({"kind": "x", "sites": [{"action_span": span, "line": line, "file": "a" * 1001}]}, "x", None, None)
            for span, line in (([1], True), ([True, 2], 2.0), ([0, 2**70], 2**70), ("12", "1"), ([-1, 2], -1))
        ),
    ],
)
def test_error_information_is_read_as_a_marker(
    info: dict[str, Any], kind: str, hint: str | None, site: dict[str, Any] | None
) -> None:
    for answer in (payload(info), payload(info, within=False, beside=True), payload(info, beside=True)):
        marker = marker_of(answer)
        assert marker is not None
        assert (marker.error_kind, marker.hint_template_key, marker.severity) == (kind, hint, "error")
        message = {"message": info["message"]} if site and "message" in info else {}
        assert marker.error_site == (None if site is None else ErrorSite(**{**site, **message}))


@pytest.mark.parametrize(
    "info",
    [
        None,
        "text",
        7,
        [],
        {},
        {"kind": None},
        {"kind": 3},
        {"message": "boom", "sites": TOLD["sites"]},
        [TOLD],
    ],
)
def test_without_a_kind_there_is_no_error_information(info: Any) -> None:
    assert marker_of(payload(info, beside=True)) is None
    marked = Marked(error_kind="timeout", metadata={KEY: info}).with_site_t(1)
    assert marked.metadata[KEY] == info and marker_of({"observation": marked.model_dump()}).error_kind == "timeout"  # type: ignore[union-attr]


def test_markers_are_believed_before_error_information() -> None:
    metadata = {"error_kind": "policy_violation", "severity": "error", KEY: {"kind": "permission_denied"}}
    marker = marker_of({"observation": {"metadata": metadata}})
    assert marker is not None and marker.error_kind == "policy_violation"


def test_a_clients_result_is_read_as_a_payload_is() -> None:
    observation = Observation(metadata={KEY: TOLD})
    typed = StepResult(observation=observation, reward=0.0, done=False)
    mapping = StepResult(observation={}, reward=0.0, done=False, metadata={KEY: TOLD})
    markers = [marker_of(one) for one in (typed, mapping, payload(TOLD))]
    assert markers[0] is not None and markers[0] == markers[1] == markers[2]
    marked = Marked().with_detection(FOUND)
    marker = marker_of(StepResult(observation=marked, reward=0.0, done=False))
    assert marker is not None and (marker.error_site, marker.severity) == (SITE, "error")
    assert marker_of(StepResult(observation=Marked(), reward=0.0, done=False)) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\udc80"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
SITES = st.dictionaries(st.sampled_from(("action_field", "action_span", "file", "line", "test_id")), JSON)
INFOS = JSON | st.fixed_dictionaries(
    {"kind": st.text() | JSON}, optional={"message": JSON, "sites": JSON | st.lists(SITES)}
)


@given(INFOS)
def test_reading_raises_nothing_and_changes_nothing(info: Any) -> None:
    answer = payload(info, beside=True)
    before = copy.deepcopy(answer)
    marker = marker_of(answer)
    assert repr(answer) == repr(before)
    read = ErrorInfo.read({KEY: info})
    assert (marker is None) == (read is None)
    if read is not None:
        assert len(read.message) <= MAX_MESSAGE and len(read.sites) <= MAX_SITES
        json.dumps(read.to_json()).encode()


@given(JSON)
def test_metadata_of_any_form_is_read(metadata: Any) -> None:
    assert ErrorInfo.read(metadata) is None or isinstance(metadata, dict)
    marker_of({"observation": {"metadata": metadata}, "metadata": metadata})

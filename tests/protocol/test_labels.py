"""Labels of episodes: their form, their header, and their place in an envelope."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import UNSET

from errata_protocol.errors import InvalidRequest
from errata_protocol.labels import MAX_HEADER, MAX_LABEL, NO_LABELS, Labels, labels_of
from errata_protocol.mux.client_session import ENVELOPE_BYTES, ClientRequest
from errata_protocol.mux.envelope import Malformed, read_frame

SID = "Zq3vK8s0T1u5Wb7Yc9Xd2A"


def envelope(**fields: Any) -> str:
    return json.dumps({"sid": SID, "id": 1, "type": "reset", **fields})


@pytest.mark.parametrize(
    "wrong",
    [
        {"group": ""},
        {"group": "x" * (MAX_LABEL + 1)},
        {"run": "a\nb"},
        {"run": "\x9b2J"},
        {"run": 1},
        {"step": -1},
        {"step": 2**53},
        {"step": True},
        {"step": 1.0},
        {"step": "1"},
        {"epoch": 1},
    ],
)
def test_what_is_no_label_is_refused_wherever_it_comes(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="labels"):
        labels_of(wrong)
    (found,) = read_frame(envelope(labels=wrong))
    assert isinstance(found, Malformed) and (found.sid, found.id) == (SID, 1)
    with pytest.raises((ValueError, TypeError)):
        Labels(**wrong)


def test_half_of_a_surrogate_pair_is_no_label() -> None:
    with pytest.raises(ValueError, match="control"):
        Labels(run="\ud800")
    (found,) = read_frame(envelope(labels={"run": "?"}).replace("?", "\\ud800"))
    assert isinstance(found, Malformed)


@pytest.mark.parametrize("text", ['"labels":null', '"labels":[]', '"labels":{"run":"a","run":"b"}'])
def test_an_envelope_has_labels_once_as_an_object(text: str) -> None:
    (found,) = read_frame(envelope()[:-1] + f",{text}}}")
    assert isinstance(found, Malformed)


def test_a_colon_in_a_label_hides_no_key_that_stands_twice() -> None:
    (found,) = read_frame(envelope(labels={"run": "a:b"}, data={"a": ":"}))
    assert not isinstance(found, Malformed) and found[0].labels == Labels(run="a:b")
    hidden = envelope(labels={"run": "?"}).replace("?", "\\u003a")[:-1]
    (found,) = read_frame(hidden + ',"data":{},"data":{"n":2}}')
    assert isinstance(found, Malformed)


def test_each_label_replaces_the_one_of_its_name() -> None:
    of_session = Labels(run="r", step=1)
    assert of_session.updated(Labels(step=2, group="g")) == Labels(run="r", step=2, group="g")
    assert of_session.updated(NO_LABELS) == of_session == NO_LABELS.updated(of_session)
    assert bool(Labels(step=0)) and not NO_LABELS
    assert labels_of({"run": None}) == NO_LABELS


@pytest.mark.parametrize("labels", [None, NO_LABELS, Labels(run="r")], ids=["absent", "none", "one"])
def test_a_fork_says_whether_it_has_labels_of_its_own(labels: Labels | None) -> None:
    request = ClientRequest("fork", b"{}", None, None)
    request.labels = labels
    (found,) = read_frame(request.envelope(SID, 1))
    assert not isinstance(found, Malformed) and found[0].labels == (UNSET if labels is None else labels)


def test_the_longest_labels_fit_into_a_header_and_into_what_an_envelope_may_add() -> None:
    for character in ("é", "\U0001f600", '"', "\\", ":"):
        labels = Labels(group=character * MAX_LABEL, run=character * MAX_LABEL, step=2**53 - 1)
        assert labels.header().isascii() and len(labels.header()) <= MAX_HEADER
        assert labels_of(json.loads(labels.header())) == labels
        request = ClientRequest("reset", b"{}", (2**53 - 1, "e" * 128), 2**53 - 1)
        request.labels = labels
        text = request.envelope("s" * 128, 2**53 - 1)
        assert len(text) - len(request.data) <= ENVELOPE_BYTES
        (found,) = read_frame(text)
        assert not isinstance(found, Malformed) and found[0].labels == labels

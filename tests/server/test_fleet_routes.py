"""Whose a request is, by its target alone (`errata_server.fleet.routes`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.shards import named
from errata_server.fleet.routes import ANYWHERE, FIRST, Merged, Of, Refused, Sole, of_head, of_id, of_request
from errata_server.ids import Ids

NAMES = ("aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc")


def ids_of(name: str) -> Ids:
    made = Ids()
    made.shard = name
    return made


SHARDS = [ids_of(name) for name in NAMES]
UNNAMED_SID, UNNAMED_EID = "5d6dbcf0-3a52-4b6c-8a2f-0d3bb0d5a3a1", "ep_AAAAAAAAAAAAAAAAAAAAAAAA"


def episode_of(name: str) -> str:
    return "ep_" + named(name, "A" * 24)


SID, EID = named(NAMES[2], UNNAMED_SID), episode_of(NAMES[1])


@given(st.integers(min_value=0, max_value=len(NAMES) - 1))
def test_ids_of_a_shard_name_it(shard: int) -> None:
    assert of_id(SHARDS[shard].session(), NAMES) == shard
    assert of_id(SHARDS[shard].episode(), NAMES) == shard


@pytest.mark.parametrize("unnamed", [UNNAMED_SID, UNNAMED_EID, "sh-short-x", ""])
def test_ids_without_a_name_are_the_first_shards(unnamed: str) -> None:
    assert of_id(unnamed, NAMES) == FIRST


def test_a_name_that_no_shard_has_is_nobodys() -> None:
    assert of_id(ids_of("zzzzzzzzzzzz").session(), NAMES) is None


@pytest.mark.parametrize(
    ("method", "path", "query", "route"),
    [
        ("GET", "/ws", f"session_id={SID}", Of(2)),
        ("GET", "/Count/ws", f"a=b&session_id={SID}", Of(2)),
        ("GET", "/ws", f"session_id={UNNAMED_SID}", Of(0)),
        ("GET", "/ws", "", ANYWHERE),
        ("GET", "/ws", f"shard={NAMES[1]}", Of(1)),
        ("GET", "/Count/ws", f"shard={NAMES[1]}", Of(1)),
        ("GET", "/ws", f"shard={NAMES[1]}&session_id={SID}", Of(2)),
        ("GET", "/ws", "shard=zzzzzzzzzzzz", ANYWHERE),
        ("GET", "/episodes", f"shard={NAMES[1]}", Merged("episodes")),
        ("GET", "/fleet", "wait=5", ANYWHERE),
        ("GET", f"/episodes/{EID}", "", Of(1)),
        ("GET", f"/Count/episodes/{EID}/states/3", "", Of(1)),
        ("POST", f"/episodes/{EID}/rewards", "", Of(1)),
        ("DELETE", f"/episodes/{UNNAMED_EID}", "", Of(0)),
        ("GET", f"/episodes/{EID}/bundle", f"also={episode_of(NAMES[1])}", Of(1)),
        ("GET", f"/episodes/{EID}/bundle", f"also={episode_of(NAMES[2])}", Refused),
        ("GET", "/episodes", "limit=3", Merged("episodes")),
        ("GET", "/Count/episodes", "", Merged("episodes")),
        ("GET", "/episodes/aggregates", "", Merged("aggregates")),
        ("GET", "/episodes/events", "", Merged("events")),
        ("GET", "/episodes/events", f"eid={EID}", Of(1)),
        ("POST", "/episodes/delete", "", Merged("delete")),
        ("GET", "/metrics", "", Merged("metrics")),
        ("GET", "/Count/ready", "", Merged("ready")),
        ("POST", "/viewer/login", "", ANYWHERE),
        ("GET", "/viewer/", "", ANYWHERE),
        ("POST", "/reset", "", ANYWHERE),
        ("GET", "/capabilities", "", ANYWHERE),
        ("GET", f"/episodes/{episode_of('zzzzzzzzzzzz')}", "", ANYWHERE),
    ],
)
def test_a_target_tells_who_answers(method: str, path: str, query: str, route: object) -> None:
    found = of_request(method, path, query, NAMES)
    assert isinstance(found, route) if isinstance(route, type) else found == route


@pytest.mark.parametrize(
    ("path", "query", "route"),
    [
        ("/maze/ws", "", Of(1)),
        ("/maze/ws", f"shard={NAMES[2]}", Of(1)),
        ("/maze/ws", f"session_id={SID}", Of(2)),
        ("/maze/mcp", "", Of(1)),
        ("/maze/reset", "", Of(1)),
        ("/maze/harness", "", Of(1)),
        ("/maze/schema", "", ANYWHERE),
        ("/maze/capabilities", "", ANYWHERE),
        (f"/maze/episodes/{episode_of(NAMES[2])}", "", Of(2)),
        ("/maze/episodes", "", Merged("episodes")),
        ("/Count/ws", "", ANYWHERE),
        ("/Count/ws", f"shard={NAMES[2]}", Of(2)),
        ("/ws", "", ANYWHERE),
        ("/maze/maze/ws", "", ANYWHERE),
    ],
)
def test_an_environment_with_one_instance_is_at_one_worker(path: str, query: str, route: object) -> None:
    sole = Sole(frozenset({"/maze"}), 1)
    assert of_request("GET", path, query, NAMES, sole) == route


def test_an_environment_with_one_instance_may_be_at_the_root() -> None:
    sole = Sole(frozenset({"/maze", ""}), 1)
    for path in ("/ws", "/maze/ws", "/mcp", "/step"):
        assert of_request("POST", path, "", NAMES, sole) == Of(1)
    assert of_request("GET", "/other/ws", "", NAMES, sole) == ANYWHERE == of_request("GET", "/schema", "", NAMES, sole)
    assert of_head(b"GET /ws HTTP/1.1\r\n", NAMES, sole) == 1


@pytest.mark.parametrize(
    "path", ["/web", "/web/", "/maze/web/step", "/web/gradio_api/queue/data", "/ws/ui", "/maze/ws/ui"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_pages_are_at_one_worker_whatever_they_name(method: str, path: str) -> None:
    sole = Sole(frozenset(), 1)
    assert of_request(method, path, f"session_id={SID}", NAMES, sole) == Of(1)
    assert of_head(f"{method} {path}?x=1 HTTP/1.1\r\n".encode(), NAMES, sole) == 1
    for other in ("/website", "/maze/webs/x", "/ws", "/", "/maze"):
        assert of_request(method, other, "", NAMES, sole) == ANYWHERE


@pytest.mark.parametrize(
    ("head", "shard"),
    [
        (f"GET /ws?session_id={SID} HTTP/1.1\r\nHost: x\r\n", 2),
        (f"GET /episodes/{EID}/turns HTTP/1.1\r\n", 1),
        (f"GET /%65pisodes/{EID} HTTP/1.0\r\n", 1),
        ("GET /ws HTTP/1.1\r\n", None),
        (f"GET /ws?session_id={SID}", None),  # no line: the HTTP server refuses it
        ("\x16\x03\x01\x02\x00\n", None),
        ("GET  HTTP/1.1\r\n", None),
    ],
)
def test_the_first_line_of_a_connection_tells_its_worker(head: str, shard: int | None) -> None:
    assert of_head(head.encode("latin-1"), NAMES) == shard


@given(st.binary(max_size=300))
def test_any_bytes_have_an_answer(head: bytes) -> None:
    assert of_head(head, NAMES) in (None, 0, 1, 2)

"""docs/metrics.md and what a scrape reads are the same, and what an operator is told is counted."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client import REGISTRY, Counter
from prometheus_client.parser import text_string_to_metric_families as families

from errata_protocol.errors import CapacityReached
from errata_server.app import create_fastapi_app
from errata_server.fleet.member import Member
from errata_server.runtime.runtime import Runtime
from errata_server.serve.connections import Connections
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation, PinnedEnvironment
from .test_members import planned

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented() -> dict[str, tuple[str, set[str]]]:
    """Kind and labels by name, as docs/metrics.md has them."""
    found = {}
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("| `errata_"):
            name, kind, labels, _ = (cell.strip() for cell in line.strip("|").split("|"))
            found[name.strip("`")] = (kind, set(re.findall(r"`(\w+)`", labels)))
    return found


def samples(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Values of a series by the values of its labels, in the labels' order in the text."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_every_metric_is_documented_with_its_labels_and_every_documented_one_is_there() -> None:
    metrics = Runtime(Settings()).metrics
    Connections().show(metrics)  # as errata serve does
    Member(planned(None, ("a" * 12,), Path()), 0).show(metrics)  # and with --workers
    metrics.watch("e", lambda: 1, lambda: 0)
    metrics.opened("e")
    metrics.ended("e", "closed")
    metrics.refused("e", "principal")
    metrics.evicted("e", "lost")
    metrics.reexecuted("e", "ok")
    metrics.rewarded("e", "posted")
    metrics.marked("e", "timeout")
    metrics.request("e", "step", "ok", 0.1)
    exposed = {}
    for family in families(metrics.text().decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        exposed[name] = (family.type, {label for sample in family.samples for label in sample.labels} - {"le"})
    assert exposed == documented()


def test_a_scrape_says_no_creation_times_and_other_registries_keep_theirs() -> None:
    metrics = Runtime(Settings()).metrics
    metrics.opened("e")
    assert "_created" not in metrics.text().decode()
    foreign = Counter("errata_test_foreign", "Somebody else's.", registry=None)
    assert any(sample.name.endswith("_created") for family in foreign.collect() for sample in family.samples)
    assert REGISTRY.get_sample_value("errata_ready") is None


def test_the_journals_transactions_are_counted_with_their_size_and_time(tmp_path: Path) -> None:
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=2, data_dir=tmp_path
    )
    with TestClient(app) as client, connect(client) as socket:
        began = time.monotonic()
        socket.ask("reset", {})
        socket.ask("step", {"n": 1})
        text = client.get("/metrics").text
        whole_s = time.monotonic() - began
    (commits,) = samples(text, "errata_journal_group_commits_sum").values()
    (groups,) = samples(text, "errata_journal_group_commits_count").values()
    (timed,) = samples(text, "errata_journal_commit_seconds_count").values()
    (seconds,) = samples(text, "errata_journal_commit_seconds_sum").values()
    assert (commits, groups, timed) == (2, 2, 2)
    assert 0 < seconds <= whole_s, "one after the other, within what the requests took"
    assert samples(text, "errata_ready") == {(): 1}
    assert samples(text, "errata_journal_failing") == {(): 0}


def test_the_journals_size_and_the_disk_are_shown(tmp_path: Path) -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, max_concurrent_envs=1, data_dir=tmp_path)
    with TestClient(app) as client, connect(client) as socket:
        sizes = []
        for length in (1, 200_000):
            socket.ask("reset", {"episode_id": "e" * length})
            (size,) = samples(text := client.get("/metrics").text, "errata_journal_bytes").values()
            sizes.append(size)
        held = sum(path.stat().st_size for path in (tmp_path / "journal").iterdir())
    assert sizes[1] - sizes[0] >= 200_000 and sizes[1] <= held
    assert samples(text, "errata_disk_free_bytes")[()] > 0


def test_a_read_that_finds_damage_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def app() -> FastAPI:
        return create_fastapi_app(
            CountEnvironment, CountAction, CountObservation, max_concurrent_envs=1, data_dir=tmp_path
        )

    with TestClient(app()) as client, connect(client) as socket:
        eid = socket.ask("reset", {})["eid"]
        socket.ask("step", {"n": 1})
    (segment,) = (tmp_path / "journal").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[content.rindex(b"reward") + 1] ^= 1
    segment.write_bytes(content)
    with TestClient(app()) as client:
        assert client.get(f"/episodes/{eid}/states/1").status_code == 503
        text = client.get("/metrics").text
    assert samples(text, "errata_journal_damaged_reads_total") == {(): 1}
    assert any("a read found damage" in message and "journal verify" in message for message in caplog.messages)


def test_marked_turns_are_counted_by_kinds_of_the_protocol() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=1)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        for do in ("mark", "", "mark", "own"):
            socket.ask("step", {"n": 1, "do": do})
        text = client.get("/metrics").text
    assert samples(text, "errata_marked_turns_total") == {("count", "nonzero_exit"): 2, ("count", "other"): 1}


def test_refusals_evictions_and_threads_are_counted() -> None:
    app = create_fastapi_app(PinnedEnvironment, CountAction, CountObservation, env_name="pinned", max_concurrent_envs=1)
    with TestClient(app) as client:
        with connect(client) as socket:
            socket.ask("reset", {})
            during = client.get("/metrics").text
            with client.websocket_connect("/ws") as refused:
                assert refused.receive_json()["data"]["code"] == CapacityReached.code
        text = client.get("/metrics").text
    assert samples(during, "errata_threads_pinned") == {(): 1}
    assert samples(text, "errata_sessions_refused_total") == {("pinned", "environment"): 1}
    assert samples(text, "errata_calls_hanging") == {(): 0}


def test_a_detached_session_that_makes_room_is_counted() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=1)
    create = {"jsonrpc": "2.0", "method": "openenv/session/create", "params": {}, "id": 1}
    with TestClient(app) as client:
        sid = client.post("/mcp", json=create).json()["result"]["session_id"]
        with connect(client, f"/ws?session_id={sid}") as socket:
            socket.ask("reset", {})
        with connect(client) as socket:
            assert socket.ask("reset", {})["t"] == 0
            text = client.get("/metrics").text
    assert samples(text, "errata_sessions_evicted_total") == {("count", "hibernated"): 1}


@pytest.mark.parametrize(("do", "outcome"), [("raise", "EXECUTION_ERROR"), ("break", "SANDBOX_FAILED")])
def test_an_outcome_is_an_error_code(do: str, outcome: str) -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, env_name="count", max_concurrent_envs=1)
    with TestClient(app) as client, connect(client) as socket:
        socket.ask("reset", {})
        socket.ask("step", {"n": 1, "do": do})
        text = client.get("/metrics").text
    assert samples(text, "errata_request_seconds_count")[("count", "step", outcome)] == 1

"""Episode bundles: exact, complete, verified, and served as the live server served them (docs/export.md)."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from errata_client import ErrataClient
from errata_protocol.bundle import (
    BundleEnd,
    BundleHeader,
    BundleWriter,
    DeliveryRecord,
    EpisodeRecord,
    FailureRecord,
    parse_line,
    read_bundle,
    request_fields,
)
from errata_protocol.bundle_check import EpisodeCheck, Problem, Verification, verify_bundle
from errata_protocol.errors import ErrataError, InvalidRequest, JournalUnavailable, NoReset, UnknownEpisode
from errata_server.app import create_fastapi_app
from errata_server.cli import commands
from errata_server.cli.source import Source
from errata_server.episodes.bundles import bundle
from errata_server.journal import MemoryJournal, ReadOnlyJournal
from errata_server.runtime.runtime import Runtime
from errata_server.serve.bundle_server import Archive, archive_app
from errata_server.settings import Settings
from tests.hangs import HANGS_S

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation
from .journal_rows import delivery, episode, session
from .local_server import LocalServer

COUNT = "tests.server.environments:CountEnvironment"


def made(tmp_path: Path) -> tuple[str, str]:
    """Journal an episode (marked, with an error and a late reward) and a fork of it; return their eids."""
    app = create_fastapi_app(
        CountEnvironment,
        CountAction,
        CountObservation,
        env_name="count",
        max_concurrent_envs=8,
        settings=Settings(data_dir=tmp_path),
    )
    with TestClient(app) as client, connect(client) as socket:
        eid: str = socket.ask("reset", {"episode_id": "mine"})["eid"]
        socket.ask("step", {"n": 2, "do": "é\n\u2028\x00 😀"})
        assert socket.ask("step", {"do": "raise"})["type"] == "error"
        socket.ask("step", {"do": "mark"})
        fork = client.post(f"/episodes/{eid}/fork", json={"t": 1, "request_id": "f"}).json()
        with connect(client, f"/ws?session_id={fork['session_id']}") as child:
            child.ask("step", {"n": 5, "do": "done"})
        reward = {"t": 1, "value": 0.5, "source": "me", "reward_id": "r"}
        assert client.post(f"/episodes/{eid}/rewards", json=reward).status_code == 200
    return eid, str(fork["eid"])


def run(*arguments: str) -> Any:
    answer = CliRunner().invoke(commands.cli, [*arguments, "--json"])
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return json.loads(answer.stdout)


def test_a_bundle_holds_exact_payloads_requests_errors_and_rewards_of_a_fork_and_its_parent(tmp_path: Path) -> None:
    eid, child = made(tmp_path / "data")
    file = tmp_path / "b.jsonl"
    told = run("episode", "export", child, "-o", str(file), "--data-dir", str(tmp_path / "data"))
    assert (told["episodes"], told["deliveries"], told["errors"], told["rewards"]) == (2, 5, 1, 1)
    records = [record for _, _, record in read_bundle(file.open("rb"))]
    header, *episodes = records[:3]
    assert header.episodes == (child,) and [e.eid for e in episodes] == [eid, child]
    assert episodes[1].origin.model_dump() == {"eid": eid, "t": 1} and episodes[0].episode_id == "mine"
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, data_dir=tmp_path / "data")
    with TestClient(app) as live:
        for record in records:
            if isinstance(record, DeliveryRecord):
                state = live.get(f"/episodes/{record.eid}/states/{record.t}")
                assert record.payload_bytes == state.content and f'"{record.digest}"' == state.headers["etag"]
    steps = [r for r in records if isinstance(r, DeliveryRecord) and r.kind == "step"]
    assert json.loads(steps[0].request_bytes) == {"n": 2, "do": "é\n\u2028\x00 😀"}
    assert steps[1].error_kind == "nonzero_exit" and steps[2].done
    (failure,) = (r for r in records if isinstance(r, FailureRecord))
    assert (failure.code, failure.after_t, json.loads(failure.payload)["message"]) == ("EXECUTION_ERROR", 1, "boom")
    assert run("episode", "verify", str(file))["ok"]
    text = file.read_text()
    assert "principal" not in text and not list(tmp_path.glob("*.part"))


def test_a_bundle_through_a_proxy_that_compresses_is_written_plain() -> None:
    text = BundleWriter().line(BundleHeader(created=0.0, server="x", episodes=("ep_1",))) + b'{"type": "end"}\n' * 100

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = gzip.compress(text)
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        thread = threading.Thread(target=proxy.handle_request)
        thread.start()
        parts: list[bytes] = []
        with Source(None, f"http://127.0.0.1:{proxy.server_port}") as source:
            source.bundle(["ep_1"], parts.append, ancestors=False)
        thread.join(60)
    assert b"".join(parts) == text


def test_a_bundle_over_http_is_the_same_and_several_episodes_share_one(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path / "data") as server:
        eids = []
        for _ in range(2):
            with ErrataClient(server.url).sync() as client:
                client.reset()
                client.step({"n": 1})
                eids.append(str(client.eid))
        where = {"http": ("--url", server.url), "disk": ("--data-dir", str(tmp_path / "data"))}
        files = {}
        for name, option in where.items():
            file = tmp_path / name
            run("episode", "export", *eids, "-o", str(file), *option)
            files[name] = file.read_bytes().splitlines()[1:-1]
        assert files["http"] == files["disk"] and len(files["disk"]) == 2 + 4
        with pytest.raises(UnknownEpisode):
            run("episode", "export", eids[0], "ep_none", "-o", str(tmp_path / "none"), "--url", server.url)
        assert not list(tmp_path.glob("none*"))


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, str, str]:
    eid, child = made(tmp_path / "data")
    file = tmp_path / "b.jsonl"
    run("episode", "export", child, "-o", str(file), "--data-dir", str(tmp_path / "data"))
    return file, eid, child


def sealed(lines: list[bytes]) -> list[bytes]:
    """Close lines with an end that fits them, so that only the change itself can be found."""
    body = b"".join(lines)
    end = BundleEnd(records=len(lines), sha256=hashlib.sha256(body).hexdigest())
    return [*lines, end.model_dump_json().encode() + b"\n"]


def change(line: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(line), **fields}).encode() + b"\n"


def at(lines: list[bytes], **fields: Any) -> int:
    return next(n for n, x in enumerate(lines) if fields.items() <= json.loads(x).items())


Damage = Callable[[list[bytes], str, str], None]


def _payload(lines: list[bytes], eid: str, child: str) -> None:
    n = at(lines, record="delivery", eid=eid, t=1)
    lines[n] = change(lines[n], payload=json.loads(lines[n])["payload"].replace("3", "4") + " ")


def _gap(lines: list[bytes], eid: str, child: str) -> None:
    del lines[at(lines, record="delivery", eid=eid, t=1)]


def _lineage(lines: list[bytes], eid: str, child: str) -> None:
    n = at(lines, record="episode", eid=child)
    lines[n] = change(lines[n], origin={"eid": eid, "t": 0})


def _reward(lines: list[bytes], eid: str, child: str) -> None:
    n = at(lines, record="reward")
    lines[n] = change(lines[n], t=99)


def _lost_reward(lines: list[bytes], eid: str, child: str) -> None:
    del lines[at(lines, record="reward")]


def _twice(lines: list[bytes], eid: str, child: str) -> None:
    lines.insert(2, lines[1])


def _orphan(lines: list[bytes], eid: str, child: str) -> None:
    del lines[1]


def _garbage(lines: list[bytes], eid: str, child: str) -> None:
    lines[4] = lines[4][: len(lines[4]) // 2] + b"\n"


def _misplaced(lines: list[bytes], eid: str, child: str) -> None:
    n = at(lines, record="error")
    lines[n] = change(lines[n], after_t=0)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (_payload, "payload of t=1 does not match its digest"),
        (_gap, "t=2 follows t=0"),
        (_lineage, "from which it was forked"),
        (_reward, "a reward is of t=99"),
        (_lost_reward, "0 late rewards of 1"),
        (_twice, "it stands there twice"),
        (_orphan, "of an episode that is not there"),
        (_garbage, "cannot be read"),
        (_misplaced, "an error stands after t=0"),
    ],
)
def test_damage_is_found_and_named(exported: tuple[Path, str, str], damage: Damage, what: str) -> None:
    file, eid, child = exported
    lines = file.read_bytes().splitlines(keepends=True)[:-1]
    damage(lines, eid, child)
    found = verify_bundle(iter(sealed(lines)))
    assert not found.ok and any(what in problem.what for problem in found.problems), found.problems


def test_a_line_that_was_changed_lost_or_cut_off_shows_at_the_end(exported: tuple[Path, str, str]) -> None:
    file, *_ = exported
    lines = file.read_bytes().splitlines(keepends=True)
    n = at(lines, record="delivery", t=1)
    told = {
        "a line before it was changed": [*lines[:n], change(lines[n], request="{}"), *lines[n + 1 :]],
        "cut off": lines[:-1],
        "behind the end": [*lines, lines[1]],
    }
    for what, damaged in told.items():
        assert any(what in p.what for p in verify_bundle(iter(damaged)).problems), what
    file.write_bytes(b"".join(lines[:-1]))
    answer = CliRunner().invoke(commands.cli, ["episode", "verify", str(file)])
    assert answer.exit_code == 1 and "cut off" in answer.stdout
    with pytest.raises(InvalidRequest, match="cut off"):
        Archive([file])


def test_unknown_records_and_fields_are_read_over_and_another_version_is_not(exported: tuple[Path, str, str]) -> None:
    file, *_ = exported
    lines = file.read_bytes().splitlines(keepends=True)[:-1]
    later = [lines[0], b'{"record":"weather","rain":1}\n', *(change(line, added=[1]) for line in lines[1:])]
    assert verify_bundle(iter(sealed(later))).ok
    file.write_bytes(b"".join(sealed(later)))
    assert len(Archive([file])) == 2
    with pytest.raises(InvalidRequest, match="version 2"):
        verify_bundle(iter(sealed([change(lines[0], version=2), *lines[1:]])))
    for text in (b"", b"PK\x03\x04", b"{}\n", b'{"record":"episode"}\n'):
        with pytest.raises(InvalidRequest, match="no episode bundle"):
            verify_bundle(iter(text.splitlines(keepends=True)))


def test_a_fork_without_its_parent_is_noted_and_verifies(exported: tuple[Path, str, str], tmp_path: Path) -> None:
    _, eid, child = exported
    file = tmp_path / "alone.jsonl"
    where = ("--data-dir", str(tmp_path / "data"))
    told = run("episode", "export", child, "--no-ancestors", "-o", str(file), *where)
    assert told["episodes"] == 1 and eid in told["notes"][0]
    both = run("episode", "export", child, eid, "--no-ancestors", "-o", str(file), *where)
    assert both["episodes"] == 2 and both["notes"] == []


def test_requests_that_are_no_text_keep_their_bytes() -> None:
    raw = b"\xff\x00{"
    assert request_fields(raw) == {"request_base64": base64.b64encode(raw).decode()}
    record = parse_line(
        json.dumps(
            {
                "record": "error", "eid": "e", "kind": "step", "after_t": 0, "code": "X", "payload": "{}",
                "created": 1.0, "digest": "sha256:" + "0" * 64, **request_fields(raw),
            }
        ).encode()
    )  # fmt: skip
    assert isinstance(record, FailureRecord) and record.request_bytes == raw


async def test_an_episode_that_began_with_a_tools_call_has_no_t_0() -> None:
    journal = MemoryJournal()
    await journal.commit(session(), episode("e"), *(delivery("e", t, kind="mcp") for t in (1, 2)))
    runtime = Runtime(Settings(), journal=journal)
    lines = [line async for line in bundle(runtime.store, runtime.clock, ["e", "e"], None)]
    found = verify_bundle(iter(lines))
    assert found == Verification(episodes=1, deliveries=2)


@pytest.mark.parametrize("mux", [True, False])
def test_an_episode_that_began_with_a_step_verifies_and_is_exported(tmp_path: Path, mux: bool) -> None:
    data, file = tmp_path / "data", tmp_path / "b.jsonl"
    with LocalServer(COUNT, data) as server, ErrataClient(server.url, mux=mux).sync() as client:
        client.step({"n": 2})
        client.step({"n": 3})
        eid = str(client.eid)
        with pytest.raises(NoReset, match="began without a reset"):
            client.state_at(0)
        child = client.fork(2)
        child.step({"n": 1})
        assert [state.t for state in child.history()] == [1, 0, 1]
        assert run("journal", "verify", "--data-dir", str(data))["problems"] == []
        told = run("episode", "export", eid, str(child.eid), "-o", str(file), "--data-dir", str(data))
        assert (told["episodes"], told["deliveries"]) == (2, 4) and run("episode", "verify", str(file))["ok"]
    with TestClient(archive_app(Archive([file]), Settings())) as offline:
        answer = offline.get(f"/episodes/{eid}/states/0").json()
        assert answer["code"] == "NO_RESET" and "began without a reset" in answer["message"]


def test_what_is_wrong_only_while_a_server_writes_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path)
    lasting, passing = (Problem(eid=eid, what="a gap") for eid in ("ep_1", "ep_2"))
    passes = [[lasting, passing], [lasting], [passing], []]

    async def verified(source: Source) -> Verification:
        problems = passes.pop(0)
        return Verification(ok=not problems, problems=problems)

    monkeypatch.setattr("errata_server.cli.journal._verified", verified)
    command = ["journal", "verify", "--json", "--data-dir", str(tmp_path)]
    first, second = (CliRunner().invoke(commands.cli, command) for _ in range(2))
    assert first.exit_code == 1 and [one["eid"] for one in json.loads(first.stdout)["problems"]] == ["ep_1"]
    assert second.exit_code == 0 and json.loads(second.stdout)["ok"]


def test_a_fork_and_a_reset_begin_with_t_0(exported: tuple[Path, str, str]) -> None:
    file, eid, child = exported
    records = [record for _, _, record in read_bundle(file.open("rb"))]
    described = {record.eid: record for record in records if isinstance(record, EpisodeRecord)}
    first = {record.eid: record for record in reversed(records) if isinstance(record, DeliveryRecord) and record.t == 0}
    step = next(record for record in records if isinstance(record, DeliveryRecord) and record.kind == "step")
    for begun, record in ((eid, first[eid].model_copy(update={"t": 1})), (child, step.model_copy(update={"t": 1}))):
        check = EpisodeCheck()
        check.take(described[begun])
        check.take(record.model_copy(update={"eid": begun}))
        assert "it begins with t=1" in [problem.what for problem in check.done().problems]


def test_an_archive_answers_as_the_live_server_did(exported: tuple[Path, str, str], tmp_path: Path) -> None:
    file, eid, child = exported
    app = create_fastapi_app(
        CountEnvironment, CountAction, CountObservation, env_name="count", data_dir=tmp_path / "data"
    )
    paths = [
        *("/episodes", "/episodes?limit=1", "/episodes?error_kind=nonzero_exit", "/episodes?environment=none"),
        *("/episodes?sort=created&order=asc", "/episodes?sort=deliveries", "/episodes?sort=last", "/episodes?order=x"),
        *("/episodes/aggregates", "/episodes/aggregates?bucket_s=1", "/episodes/aggregates?error_kind=nonzero_exit"),
        *("/episodes?text=EP_", "/episodes?status=closed", "/episodes?reward_min=1", "/episodes?created_before=1"),
        *("/episodes?episode_id=mine", "/episodes?limit=0", "/episodes?cursor=x", "/episodes/none"),
    ]
    for one in (eid, child):
        paths += [
            f"/episodes/{one}",
            f"/episodes/{one}/rewards",
            *(f"/episodes/{one}/states/{t}" for t in (0, 1, 2, "x")),
        ]
    with TestClient(app) as live, TestClient(archive_app(Archive([file]), Settings())) as offline:
        for path in paths:
            was, now = live.get(path), offline.get(path)
            same = [(r.status_code, r.headers.get("etag"), r.headers.get("x-errata-kind")) for r in (was, now)]
            assert same[0] == same[1], path
            if path == "/episodes?limit=1":  # cursors are the answerer's own
                assert was.json()["episodes"] == now.json()["episodes"] and now.json()["next"] is not None
            else:
                assert was.content == now.content, path
        second = offline.get("/episodes", params={"limit": 1, "cursor": offline.get(paths[1]).json()["next"]}).json()
        assert [e["eid"] for e in second["episodes"]] == [eid] and second["next"] is None
        changes = (("POST", "/rewards"), ("DELETE", ""), ("POST", "/fork"))
        assert {offline.request(method, f"/episodes/{eid}{path}").status_code for method, path in changes} <= {404, 405}


def test_a_file_that_changed_under_an_archive_is_said(exported: tuple[Path, str, str]) -> None:
    file, eid, _ = exported
    with TestClient(archive_app(Archive([file]), Settings())) as offline:
        file.write_bytes(file.read_bytes().replace(b'\\"n\\":2', b'\\"n\\":9'))
        answers = [offline.get(f"/episodes/{eid}/states/{t}") for t in range(3)]
    assert "JOURNAL_UNAVAILABLE" in {a.json().get("code") for a in answers}


def test_the_command_serves_a_bundle_that_our_tools_read(exported: tuple[Path, str, str]) -> None:
    file, eid, _ = exported
    command = [sys.executable, "-m", "errata_server.cli", "episode", "serve", str(file), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        url = next(line for line in process.stderr if " at http" in line).partition(" at ")[2].split(",")[0].strip()
        url = url.split()[0]
        try:
            assert httpx.get(f"{url}/episodes/{eid}/states/1").status_code == 200
            shown = CliRunner().invoke(commands.cli, ["replay", eid, "1", "--url", url])
            assert json.loads(shown.stdout)["observation"]["n"] == 2
            assert "count" in json.dumps(run("episodes", "--url", url))
        finally:
            process.terminate()
        assert process.wait(HANGS_S) == 0


def test_a_public_bind_of_an_archive_needs_a_token(exported: tuple[Path, str, str]) -> None:
    error = CliRunner().invoke(commands.cli, ["episode", "serve", str(exported[0]), "--host", "0.0.0.0"]).exception
    assert isinstance(error, ErrataError) and "ERRATA_TOKEN" in error.message


def test_a_damaged_journal_is_not_exported_in_silence(tmp_path: Path) -> None:
    eid, _ = made(tmp_path / "data")
    segment = tmp_path / "data" / "journal" / "00000001.log"
    journal = ReadOnlyJournal(segment.parent)
    row = journal.delivery(eid, 1)
    journal.close()
    assert row is not None
    segment.write_bytes(segment.read_bytes().replace(row.payload, row.payload[:-1] + b" "))
    with pytest.raises(JournalUnavailable, match="damaged"):
        run("episode", "export", eid, "-o", str(tmp_path / "x"), "--data-dir", str(tmp_path / "data"))
    assert not (tmp_path / "x").exists()

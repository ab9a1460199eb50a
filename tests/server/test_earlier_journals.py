"""Journals that earlier commits wrote (tests/golden/journal) are read, and their sessions go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from errata_protocol.shards import shard_of
from errata_server.app import create_fastapi_app
from errata_server.cli import commands
from errata_server.journal import salvage
from errata_server.runtime import shard_name

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation

GOLDEN = Path(__file__).parents[1] / "golden" / "journal"
COMMITS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@pytest.fixture(params=[(commit, index) for commit in COMMITS for index in ("with its index", "without an index")])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of a data directory, and what its own server answered."""
    commit, index = request.param
    shutil.copytree(GOLDEN / commit / "journal", tmp_path / "journal")
    if (GOLDEN / commit / "shard").exists():
        shutil.copy(GOLDEN / commit / "shard", tmp_path / "shard")
    if index == "without an index":
        (tmp_path / "journal" / "index.db").unlink()
    return tmp_path, json.loads((GOLDEN / commit / "expected.json").read_text())["episodes"]


def serve(data_dir: Path) -> TestClient:
    names: dict[str, Any] = {"env_name": "CountEnvironment", "max_concurrent_envs": 8, "data_dir": data_dir}
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, **names)
    return TestClient(app)


def test_there_are_some() -> None:
    assert {"a977b2d", "c33eefc", "8702b04", "a977b2d-named", "8702b04-named", "first-named"} <= set(COMMITS)


@pytest.mark.parametrize("commit", [commit for commit in COMMITS if commit.endswith("-named")])
def test_an_earlier_server_in_a_named_directory(commit: str) -> None:
    """One of before names ignored it, and today's goes on with what it left (PROTOCOL F5)."""
    told = json.loads((GOLDEN / commit / "expected.json").read_text())["episodes"]
    name = (GOLDEN / commit / "shard").read_text().strip()
    assert len(told) == 3 and {shard_of(eid) for eid in told} == {name if commit == "first-named" else None}


def test_a_repaired_copy_is_the_same(kept: tuple[Path, dict[str, Any]]) -> None:
    """Damage in the header costs no row, and segments that a repair wrote are served as their server answered."""
    data_dir, episodes = kept
    path = data_dir / "journal" / "00000001.log"
    data = bytearray(path.read_bytes())
    data[9] ^= 1
    path.write_bytes(data)
    report = salvage(data_dir / "journal")
    assert report.is_damaged and report.sessions == ()
    with serve(data_dir) as client:
        for eid, told in episodes.items():
            for t, payload in told["states"].items():
                assert client.get(f"/episodes/{eid}/states/{t}").text == payload


def test_every_answer_is_the_same_byte_for_byte(kept: tuple[Path, dict[str, Any]]) -> None:
    data_dir, episodes = kept
    with serve(data_dir) as client:
        listed = client.get("/episodes").json()["episodes"]
        assert {episode["eid"] for episode in listed} == set(episodes)
        for eid, told in episodes.items():
            detail = client.get(f"/episodes/{eid}").json()
            assert {name: detail[name] for name in told["detail"]} == told["detail"]
            assert client.get(f"/episodes/{eid}/rewards").json() == told["rewards"]
            for t, payload in told["states"].items():
                assert client.get(f"/episodes/{eid}/states/{t}").text == payload
            assert client.get(f"/episodes/{eid}/states/{len(told['states'])}").status_code == 404


def test_a_fork_of_each_goes_on_from_its_last_turn(kept: tuple[Path, dict[str, Any]]) -> None:
    data_dir, episodes = kept
    with serve(data_dir) as client:
        for eid, told in episodes.items():
            last = max(map(int, told["states"]))
            n = json.loads(told["states"][str(last)])["observation"]["n"]
            child = client.post(f"/episodes/{eid}/fork", json={"t": last, "request_id": "again"}).json()
            with connect(client, f"/ws?session_id={child['session_id']}") as socket:
                assert socket.ask("step", {"n": 5})["data"]["observation"]["n"] == n + 5


def test_the_command_finds_nothing_wrong(kept: tuple[Path, dict[str, Any]]) -> None:
    data_dir, episodes = kept
    answer = CliRunner().invoke(commands.cli, ["journal", "verify", "--json", "--data-dir", str(data_dir)])
    told = json.loads(answer.stdout)
    assert answer.exit_code == 0
    assert (told["episodes"], told["problems"]) == (len(episodes), [])


def test_a_fork_names_the_directory_that_has_got_a_name(kept: tuple[Path, dict[str, Any]]) -> None:
    data_dir, episodes = kept
    name = shard_name.shard_name(data_dir)
    with serve(data_dir) as client:
        for eid in episodes:
            child = client.post(f"/episodes/{eid}/fork", json={"t": 1, "request_id": "named"}).json()
            assert shard_of(child["eid"]) == shard_of(child["session_id"]) == name

"""``errata fleet drain --server``: a server of one process ends once its sessions have."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result
from websockets.sync.client import connect

from errata_server.cli import commands
from errata_server.process import ServerProcess
from errata_server.runtime.data_lock import announce_url, draining_owner, lock


def drain(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(commands.cli, ["fleet", "drain", "--server", "--data-dir", str(directory), *options])


def test_a_server_of_one_process_drains_and_ends_after_its_last_session(tmp_path: Path) -> None:
    server = ServerProcess("tests.server.environments:CountEnvironment", tmp_path, env={"ERRATA_HEALTH_PORT": "0"})
    with server:
        found = re.search(r"probes are answered on port (\d+)", "".join(server.log))
        assert found is not None
        probes = f"http://127.0.0.1:{found[1]}"
        with connect(server.url.replace("http", "ws") + "/ws") as session:
            session.send('{"type":"reset","data":{}}')
            assert json.loads(session.recv())["type"] == "observation"
            assert httpx.get(f"{probes}/ready").status_code == 200
            version = httpx.get(f"{server.url}/fleet").json()["version"]

            assert drain(tmp_path, "--most", "0").exit_code == 0
            waiting = httpx.get(f"{server.url}/fleet", params={"after": version, "wait": 30}, timeout=60).json()
            assert [one["state"] for one in waiting["members"]] == ["draining"]
            ready = httpx.get(f"{probes}/ready")
            assert ready.status_code == 503 and "it drains" in ready.text
            assert httpx.get(f"{probes}/health").status_code == 200, "a pod that drains is not killed"

            again = drain(tmp_path, "--most", "0.1")
            assert again.exit_code == 1 and "sessions are left after 0.1 s" in again.stderr
            with connect(server.url.replace("http", "ws") + "/ws") as late:  # through a balancer that has not noticed
                late.send('{"type":"reset","data":{}}')
                assert json.loads(late.recv())["type"] == "observation"
            session.send('{"type":"step","data":{}}')
            assert json.loads(session.recv())["type"] == "observation"
        ended = drain(tmp_path)
        assert ended.exit_code == 0 and "has ended" in ended.stdout, ended.output
        assert server.process.wait(60) == 0
        assert "drained: no session is left" in "".join(server.log)
    nobody = drain(tmp_path)
    assert "no errata serve of one process runs here" in str(nobody.exception)


def test_only_the_process_that_holds_the_directory_and_drains_gets_the_signal(tmp_path: Path) -> None:
    assert draining_owner(tmp_path) is None, "no server has been here"
    held = lock(tmp_path)
    announce_url(tmp_path, "http://127.0.0.1:1", drains=False)
    assert draining_owner(tmp_path) is None, "a worker ends by the signal"
    announce_url(tmp_path, "http://127.0.0.1:1", drains=True)
    owner = draining_owner(tmp_path)
    assert owner is not None
    os.close(owner)
    os.close(held)
    assert draining_owner(tmp_path) is None, "the process id is of a process that does not hold the directory"
    (tmp_path / "server.json").write_text('{"pid": "1", "drains": true}')
    assert draining_owner(tmp_path) is None


@pytest.mark.parametrize(
    "words", [["--server", "aaaaaaaaaaaa"], ["--server", "--json"], [], ["aaaaaaaaaaaa", "--most", "3"]]
)
def test_a_drain_names_a_worker_or_the_server(words: list[str], tmp_path: Path) -> None:
    refused = CliRunner().invoke(commands.cli, ["fleet", "drain", "--data-dir", str(tmp_path), *words])
    assert refused.exit_code == 2

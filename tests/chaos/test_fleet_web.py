"""OpenEnv's web interface on a server of several workers: its pages have one session, which is at one worker."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from errata_server.process import ServerProcess
from errata_server.runtime.shard_dirs import shards
from tests.server.worker_processes import worker_of

from .test_fleet import GIVE_UP_S, TARGET, Fleet, errata, until

pytestmark = pytest.mark.chaos

WORKERS = 3
OPTIONS = ("--web", "--no-fsync")
START_S = 240.0


def started(data_dir: Path, *options: str) -> ServerProcess:
    return ServerProcess(TARGET, data_dir, *OPTIONS, *options, start_s=START_S)


def asked(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send a request on a connection of its own, which any worker accepts; return the status and the answer."""
    answer = httpx.request(method, f"{url}{path}", json=body, timeout=GIVE_UP_S)
    return answer.status_code, answer.json()


def step(url: str) -> int:
    status, answer = asked(url, "POST", "/web/step", {"action": {"n": 1}})
    assert status == 200, answer
    return int(answer["observation"]["n"])


def reset_by_button(url: str) -> str:
    """Press the button "Reset" of the page as Gradio's own script does, and return what the page then shows."""
    pages = f"{url}/web"
    page = asked(pages, "GET", "/config")[1]
    resets = {part["id"] for part in page["components"] if part["props"].get("value") == "Reset"}
    ((number, inputs),) = [
        (number, each["inputs"])
        for number, each in enumerate(page["dependencies"])
        if any(target in resets and event == "click" for target, event in each["targets"])
    ]
    given = {"data": [None] * len(inputs), "fn_index": number, "session_hash": f"h{time.monotonic_ns()}"}
    assert asked(pages, "POST", "/gradio_api/queue/join?", given)[0] == 200
    query = {"session_hash": given["session_hash"]}
    with httpx.stream("GET", f"{pages}/gradio_api/queue/data", params=query, timeout=GIVE_UP_S) as events:
        for line in events.iter_lines():
            if line.startswith("data:") and (said := json.loads(line[5:]))["msg"] == "process_completed":
                assert said["success"], said
                return json.dumps(said["output"]["data"])
    raise AssertionError("the page was not answered")


def after_a_restart(url: str) -> list[tuple[int, Any]]:
    """Return what is answered to a page that was open while its server, or its worker, was killed."""
    requests = [("GET", "state", None), ("POST", "step", {"action": {"n": 1}}), ("POST", "reset", {})]
    requests += [("POST", "step", {"action": {"n": 1}}), ("GET", "state", None)]
    return [asked(url, method, f"/web/{path}", body) for method, path, body in requests]


def test_the_pages_are_those_of_one_process_whichever_worker_accepts(tmp_path: Path) -> None:
    with started(tmp_path / "one") as first:
        asked(first.url, "POST", "/web/reset", {})
        assert step(first.url) == 1
        first.kill()
    with started(tmp_path / "one") as again:
        expected = after_a_restart(again.url)
        shown = reset_by_button(again.url)

    directory = tmp_path / "several"
    with started(directory, "--workers", str(WORKERS)) as server:
        fleet, url = Fleet(server), server.url
        fleet.wait_for_all()
        assert "Reset" in httpx.get(f"{url}/", follow_redirects=True, timeout=GIVE_UP_S).text
        with connect(f"{fleet.ws}/ui", open_timeout=GIVE_UP_S) as updates:
            updates.recv(timeout=GIVE_UP_S)
            assert asked(url, "POST", "/CountEnvironment/web/reset", {})[0] == 200
            updates.recv(timeout=GIVE_UP_S)
            for n in range(1, 25):
                assert step(url) == n
                state = json.loads(updates.recv(timeout=GIVE_UP_S))["episode_state"]
                assert (state["step_count"], state["current_observation"]["n"]) == (n, n)
            kept = [httpx.Client(base_url=url, timeout=GIVE_UP_S) for _ in range(24)]
            for client in kept:
                assert client.get("/schema").status_code == 200, "no page: the connection is any worker's"
            for n, client in enumerate(kept, 25):
                answer = client.post("/web/step", json={"action": {"n": 1}})
                assert answer.json()["observation"]["n"] == n == client.get("/web/state").json()["step_count"]
            assert reset_by_button(url) == shown and step(url) == 1
            assert len(fleet.episodes()) == 2, "nothing was reset at another worker"

            killed = worker_of(shards(directory, WORKERS)[0])
            os.kill(killed, signal.SIGKILL)
            with pytest.raises(ConnectionClosed):
                while True:
                    updates.recv(timeout=GIVE_UP_S)
        until(lambda: killed not in fleet.pids)
        assert after_a_restart(url) == expected
        assert reset_by_button(url) == shown
        for client in kept:
            assert client.post("/web/reset", json={}).status_code == 200
            client.close()


def test_the_pages_go_to_the_next_worker_while_theirs_drains(tmp_path: Path) -> None:
    with started(tmp_path, "--workers", str(WORKERS)) as server:
        Fleet(server).wait_for_all()
        asked(server.url, "POST", "/web/reset", {})
        assert step(server.url) == 1
        with connect(f"{Fleet(server).ws}/ui", open_timeout=GIVE_UP_S) as updates:
            shard = (tmp_path / "shard").read_text().strip()
            drain = errata("fleet", "drain", shard, "--data-dir", str(tmp_path))
            with pytest.raises(ConnectionClosed):
                while True:
                    updates.recv(timeout=GIVE_UP_S)
        assert asked(server.url, "POST", "/web/reset", {})[0] == 200
        assert [step(server.url) for _ in range(12)] == list(range(1, 13))
        output, complaint = drain.communicate(timeout=GIVE_UP_S)
        assert f"{shard} is drained" in output, complaint
        assert step(server.url) == 13

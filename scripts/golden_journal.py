"""Write a journal for tests/golden/journal, with the Errata that PYTHONPATH names.

    git archive COMMIT | tar -x -C CHECKOUT
    cd CHECKOUT && PYTHONPATH=server:protocol:client:. python scripts/golden_journal.py COMMIT DIRECTORY [FROM]

DIRECTORY gets the files that the server left behind when it was stopped, and what its HTTP API answered before: an
episode with a marked turn, a late reward and a fork at t=1, the fork, and an episode whose last request failed. With
FROM, a directory that an earlier call wrote, or one with a file `shard` alone, the server goes on in a copy of that.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from errata_server.app import create_fastapi_app
from tests.server.conftest import connect
from tests.server.environments import CountAction, CountEnvironment, CountObservation


def main(commit: str, directory: Path, begun: Path | None = None) -> None:
    """Write it."""
    with tempfile.TemporaryDirectory() as scratch:
        data_dir = Path(scratch)
        if begun is not None:
            shutil.copytree(begun, data_dir, dirs_exist_ok=True)
        names: dict[str, Any] = {"env_name": "CountEnvironment", "max_concurrent_envs": 8, "data_dir": data_dir}
        app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, **names)
        with TestClient(app) as client:
            with connect(client) as socket:
                eid = socket.ask("reset")["eid"]
                for action in ({"n": 1}, {"n": 1, "do": "mark"}, {"n": 2}):
                    socket.ask("step", action)
            rewards = {"rewards": [{"t": 2, "value": 0.5, "source": "judge", "reward_id": "r1"}]}
            posted = client.post(f"/episodes/{eid}/rewards", json=rewards["rewards"][0])
            posted.raise_for_status()
            child = client.post(f"/episodes/{eid}/fork", json={"t": 1, "request_id": "f1"}).json()
            with connect(client, f"/ws?session_id={child['session_id']}") as socket:
                socket.ask("step", {"n": 40})
            with connect(client) as socket:
                socket.ask("reset")
                socket.ask("step", {"n": 7})
                socket.ask("step", {"n": 1, "do": "raise"})
            episodes = {}
            for listed in client.get("/episodes").json()["episodes"]:
                of = f"/episodes/{listed['eid']}"
                detail = client.get(of).json()
                episodes[listed["eid"]] = {
                    "detail": detail,
                    "states": {str(turn["t"]): client.get(f"{of}/states/{turn['t']}").text for turn in detail["turns"]},
                    "rewards": client.get(f"{of}/rewards").json(),
                }
        if (data_dir / "shard").exists():
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(data_dir / "shard", directory / "shard")
        shutil.copytree(data_dir / "journal", directory / "journal", ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    expected = {"commit": commit, "episodes": episodes}
    (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))

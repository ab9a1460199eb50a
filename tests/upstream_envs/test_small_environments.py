"""Verdicts of ``errata probe`` on environments made for it; each is five servers, too dear for ``make test``."""

from __future__ import annotations

import json
import re
from pathlib import Path

from errata_server.cli.probe import IMPOSSIBLE
from tests.server.test_probe import REPEATABLE, probed


def test_a_hash_order_needs_nothing_but_deterministic() -> None:
    found = probed(f"{REPEATABLE}:UndeclaredOrderEnvironment")
    assert (found["served"], found["recovery"], found["outcome"]) == ("none", "reexecute", "verified")
    assert found["options"] == ["--deterministic"]
    (differs,) = found["differs"]
    assert (differs["path"], differs["cause"]) == ("$.observation.text", "hash order")


def test_one_that_is_declared_deterministic_and_is_not_gets_no_class_but_the_lines_for_snapshots() -> None:
    found = probed(f"{REPEATABLE}:LiarEnvironment", status=IMPOSSIBLE)
    assert (found["served"], found["recovery"], found["outcome"]) == ("reexecute", "none", "impossible")
    assert found["options"] == []
    assert re.match(r'request 6: \$\.observation\.text from character \d+ on was "noise', found["why"][0])
    text = "\n".join(found["snapshot_lines"])
    assert "def snapshot(self) -> Snapshot" in text and '"_dice"' in text and "LiarEnvironment" in text
    assert "cannot be pickled: _db" in text


def test_snapshots_are_verified_too() -> None:
    found = probed("tests.server.environments:CountEnvironment")
    assert (found["served"], found["recovery"], found["outcome"]) == ("snapshot", "snapshot", "verified")


def test_what_only_state_shows_is_told_and_is_no_delivery() -> None:
    found = probed(f"{REPEATABLE}:StateLiarEnvironment")
    assert (found["recovery"], found["differs"]) == ("reexecute", [])
    assert [one["path"] for one in found["state_differs"]] == ["$.secret"]


def test_a_reset_that_goes_on_where_the_last_episode_ended_is_no_hindrance(tmp_path: Path) -> None:
    found = probed(f"{REPEATABLE}:IteratorEnvironment")
    assert (found["outcome"], found["options"]) == ("verified", ["--deterministic"])
    file = tmp_path / "actions.jsonl"
    lines = [{"reset": {"item": 7}}, {"n": 1}, {"reset": {"item": 8}}, *({"n": n} for n in range(5))]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = probed(f"{REPEATABLE}:IteratorEnvironment", "--actions", str(file))
    assert (found["requests"], found["outcome"], found["options"]) == (8, "verified", ["--deterministic"])


def test_the_requests_of_an_episode_are_played(tmp_path: Path) -> None:
    from fastapi.testclient import TestClient

    from errata_server.settings import Settings
    from tests.server.conftest import connect
    from tests.server.repeatable import DiceEnvironment
    from tests.server.test_reexecute import served

    app = served(DiceEnvironment, settings=Settings(data_dir=tmp_path))
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {"seed": 5})["eid"]
        for n in (1, 2, 3):
            socket.ask("step", {"n": n})
    found = probed(f"{REPEATABLE}:DiceEnvironment", "--episode", eid, "--data-dir", str(tmp_path))
    assert (found["requests"], found["outcome"], found["served"]) == (4, "verified", "reexecute")


def test_an_mcp_environment_is_played_by_its_tools() -> None:
    found = probed("tests.interop.specs:ECHO", "--steps", "9")
    assert (found["served"], found["recovery"], found["options"]) == ("none", "reexecute", ["--deterministic"])

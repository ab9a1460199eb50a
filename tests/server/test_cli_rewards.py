"""``errata episodes rewards`` and ``reward``: on a directory, and through the server that holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from errata_client import ErrataClient
from errata_protocol.errors import Conflict, InvalidRequest, StateOutOfRange
from errata_server.cli import commands

from .local_server import LocalServer

COUNT = "tests.server.environments:CountEnvironment"


def run(*arguments: str) -> Any:
    answer = CliRunner().invoke(commands.cli, ["episodes", *arguments, "--json"])
    if answer.exception is not None:
        raise answer.exception
    return json.loads(answer.output)


def test_rewards_are_added_and_listed_with_and_without_a_running_server(tmp_path: Path) -> None:
    where = ("--data-dir", str(tmp_path))
    with LocalServer(COUNT, tmp_path) as server:
        with ErrataClient(server.url).sync() as client:
            client.reset()
            client.step({"n": 1})
            eid = client.eid
        assert eid is not None
        first = run("reward", eid, "1", "-0.5", "--source", "me", "--id", "a", *where)
        assert first == {"t": 1, "value": -0.5, "source": "me", "reward_id": "a"}
        assert run("rewards", eid, *where) == [first] == run("rewards", eid, "--url", server.url)
    second = run("reward", eid, "0", "1e3", "--source", "me", *where)
    assert run("rewards", eid, *where) == [first, second]
    assert run("reward", eid, "1", "-0.5", "--source", "me", "--id", "a", *where) == first
    with pytest.raises(Conflict):
        run("reward", eid, "1", "7", "--source", "me", "--id", "a", *where)
    with pytest.raises(StateOutOfRange):
        run("reward", eid, "2", "7", "--source", "me", *where)
    with pytest.raises(InvalidRequest, match="finite"):
        run("reward", eid, "1", "nan", "--source", "me", *where)
    shown = CliRunner().invoke(commands.cli, ["episodes", "rewards", eid, *where]).output
    assert "-0.5" in shown and "1000" in shown

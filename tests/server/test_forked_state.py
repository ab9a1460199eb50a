"""State of a fork counts from the fork, also where the environment does not know that it is one (R-015-22)."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from errata_server.environments.forked_state import ForkedState
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountEnvironment
from .repeatable import DiceEnvironment
from .test_reexecute import asleep, fork, served


class SavedEnvironment(CountEnvironment):
    """Snapshots, and no ``forked``."""

    forked = None  # type: ignore[assignment]


def place(state: dict[str, Any]) -> tuple[Any, Any]:
    return state["data"]["episode_id"], state["data"]["step_count"]


@pytest.mark.parametrize("env", [DiceEnvironment, SavedEnvironment])
def test_a_fork_has_a_name_and_count_of_its_own(env: Any, tmp_path: Path) -> None:
    app = served(env, settings=Settings(detach_ttl_s=0.0, data_dir=tmp_path))
    with TestClient(app) as client:
        with connect(client) as parent:
            eid = parent.ask("reset", {"episode_id": "mine"})["eid"]
            for _ in range(3):
                parent.ask("step", {"n": 1})
            child = fork(client, eid, 2)
            grandchild = fork(client, eid, 3, "g")
            assert place(parent.ask("state")) == ("mine", 3)
        names: dict[str, str] = {}
        for t in (0, 1):  # the second time it is brought back from its own last delivery
            with connect(client, f"/ws?session_id={child['session_id']}") as socket:
                name, count = place(socket.ask("state"))
                assert names.setdefault(child["eid"], name) == name and count == t
                assert socket.ask("step", {"n": 1})["t"] == t + 1
                assert place(socket.ask("state")) == (name, t + 1)
            asleep(app)
        assert name not in (child["eid"], child["read_key"], eid, "mine") and uuid.UUID(name)
        assert client.get(f"/episodes/{child['eid']}").json()["episode_id"] == name
        with connect(client, f"/ws?session_id={grandchild['session_id']}") as socket:
            socket.ask("reset", {"injected_state": {"episode_id": child["eid"], "t": 1}})
            assert place(socket.ask("state"))[1] == 0
            socket.ask("reset", {"episode_id": "other"})
            assert place(socket.ask("state")) == ("other", 0)


def test_a_state_that_is_not_the_parents_is_kept() -> None:
    found = ForkedState.of({"episode_id": "a", "step_count": 5}, "ep_child", 2)
    assert found.applied({"episode_id": "a", "step_count": 6, "more": 1}) == {
        "episode_id": "ep_child",
        "step_count": 3,
        "more": 1,
    }
    for own in ({"episode_id": "b", "step_count": 6}, {"episode_id": "a", "step_count": 2}, {"episode_id": "a"}, {}):
        assert found.applied(own) == own

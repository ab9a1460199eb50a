"""docs/client.md's typed client on an environment of OpenEnv's repository, as its authors wrote it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from openenv.core.client_types import StepResult

from errata_client import EnvPool, ErrataClient
from errata_server.process import ServerProcess
from tests.openenv_source import ENVIRONMENTS, needs_openenv_source

pytestmark = needs_openenv_source


@pytest.fixture
def connect4(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, as if it were installed."""
    monkeypatch.syspath_prepend(str(ENVIRONMENTS))
    yield importlib.import_module("connect4_env")
    for name in [name for name in sys.modules if name.partition(".")[0] == "connect4_env"]:
        del sys.modules[name]


async def test_connect4s_client_and_ours_are_a_typed_client_with_fork(connect4: Any, tmp_path: Path) -> None:
    class Connect4(ErrataClient, connect4.Connect4Env):  # type: ignore[misc]
        pass

    models = importlib.import_module("connect4_env.models")
    with ServerProcess(str(ENVIRONMENTS / "connect4_env"), tmp_path, "--deterministic") as server:
        async with Connect4(server.url) as client:
            await client.reset()
            first = await client.step(connect4.Connect4Action(column=3))
            assert isinstance(first, StepResult) and isinstance(first.observation, connect4.Connect4Observation)
            second = await client.step(connect4.Connect4Action(column=3))
            assert isinstance(await client.state(), models.Connect4State)
            again = await client.reset(injected_state={"episode_id": client.eid, "t": 1})
            assert again.observation.board == first.observation.board
            once_more = await client.step(connect4.Connect4Action(column=3))
            assert once_more.observation.board == second.observation.board
        async with EnvPool(server.url, 1, client_cls=Connect4) as pool:
            (result,) = await pool.reset_batch([{}])
            assert isinstance(result.observation, connect4.Connect4Observation)

"""Environments that work on what an agent sent: in worker processes, while other sessions go on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.errors import InvalidRequest
from errata_server import current_session
from errata_server.app import create_fastapi_app
from errata_server.environments.worker_calls import call_in_worker
from errata_server.settings import Settings
from errata_server.workers import Budget

from . import worker_functions as functions
from .conftest import simulated
from .mux_trainer import Trainer


class WorkAction(Action):
    wait_for: str = ""
    compute: bool = False


class WorkObservation(Observation):
    share: list[str] = []  # noqa: RUF012 - pydantic copies it


class WorkEnvironment(Environment[WorkAction, WorkObservation, State]):
    """Waits in a worker process for a file, or computes there past its budget."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> WorkObservation:
        return WorkObservation()

    async def step_async(self, action: WorkAction, timeout_s: float | None = None, **_: Any) -> WorkObservation:
        if action.wait_for:
            await call_in_worker("the action", functions.wait_for, action.wait_for)
        if action.compute:
            await call_in_worker("the action", functions.compute_for_ever, budget=Budget(cpu_s=0.5))
        return WorkObservation(share=list(current_session().share))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> WorkObservation:
        raise NotImplementedError

    def step(self, action: WorkAction, timeout_s: float | None = None, **_: Any) -> WorkObservation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


async def joined() -> Trainer:
    app = create_fastapi_app(
        WorkEnvironment, WorkAction, WorkObservation, max_concurrent_envs=8, runtime=simulated(Settings())
    )
    trainer = Trainer(app, chance=random.Random(1))
    await trainer.join()
    return trainer


async def test_other_sessions_step_while_one_waits_for_its_worker(tmp_path: Path) -> None:
    trainer = await joined()
    heavy, other = await trainer.open(), await trainer.open()
    for session in (heavy, other):
        await trainer.ask(session, "reset")
    waiting = trainer.ask_later(heavy, "step", {"wait_for": str(tmp_path / "go")})
    for t in range(1, 21):
        assert (await trainer.ask(other, "step")).t == t
    assert not waiting.done()
    (tmp_path / "go").touch()
    assert (await waiting).t == 1
    await trainer.cut()


async def test_what_exceeds_its_budget_is_an_error_of_its_step_and_the_session_goes_on() -> None:
    trainer = await joined()
    session = await trainer.open()
    await trainer.ask(session, "reset")
    with pytest.raises(InvalidRequest, match=r"the action is too large: it takes more than 0.5 s of CPU time"):
        await trainer.ask(session, "step", {"compute": True})
    assert (await trainer.ask(session, "step")).t == 1
    await trainer.cut()


async def test_sessions_of_one_principal_have_shares_of_their_own() -> None:
    trainer = await joined()
    shares = []
    for _ in range(2):
        session = await trainer.open()
        await trainer.ask(session, "reset")
        reply = await trainer.ask(session, "step")
        shares.append(tuple(json.loads(reply.payload)["observation"]["share"]))
    (principal, first), (same, second) = shares
    assert principal == same == "" and first != second
    await trainer.cut()

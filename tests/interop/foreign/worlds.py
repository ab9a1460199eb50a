"""Environments that stock OpenEnv of both generations serves, and ours: nothing here knows of Errata."""

from __future__ import annotations

import sqlite3
from typing import Any

from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action, Observation, State


class LedgerAction(Action):
    """Book an amount."""

    amount: int
    note: str = ""


class LedgerObservation(Observation):
    """The booking and what there is now."""

    balance: int = 0
    note: str = ""
    entries: int = 0


class LedgerState(State):
    """The last note beside OpenEnv's fields."""

    last_note: str = ""


class LedgerEnvironment(Environment[LedgerAction, LedgerObservation, LedgerState]):
    """Sync; its sqlite3 connection belongs to the thread that made it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._db = sqlite3.connect(":memory:")
        self._db.execute("create table entry (amount integer, note text)")
        self._state = LedgerState(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> LedgerObservation:
        self._db.execute("delete from entry")
        self._state = LedgerState(episode_id=episode_id or "unnamed", step_count=0)
        if kwargs.get("opening"):
            self._db.execute("insert into entry values (?, 'opening')", (kwargs["opening"],))
        return self._observe("opened", reward=0.0)

    def step(self, action: LedgerAction, timeout_s: float | None = None, **kwargs: Any) -> LedgerObservation:
        if action.note == "refuse":
            raise ValueError("the bank refuses")
        self._db.execute("insert into entry values (?, ?)", (action.amount, action.note))
        self._state.step_count += 1
        self._state.last_note = action.note
        return self._observe(action.note, reward=action.amount / 4, done=action.note == "close")

    def _observe(self, note: str, **result: Any) -> LedgerObservation:
        entries, balance = self._db.execute("select count(*), coalesce(sum(amount), 0) from entry").fetchone()
        return LedgerObservation(balance=balance, note=note, entries=entries, metadata={"bank": "north"}, **result)

    @property
    def state(self) -> LedgerState:
        return self._state  # without the connection: stock OpenEnv reads it on its event loop's thread


class CounterAction(Action):
    """Add ``n``."""

    n: int


class CounterObservation(Observation):
    """The sum so far."""

    total: int = 0


class CounterEnvironment(Environment[CounterAction, CounterObservation, State]):
    """Async."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=None, step_count=0)
        self._total = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CounterObservation:
        raise NotImplementedError("async only")

    def step(self, action: CounterAction, timeout_s: float | None = None, **kwargs: Any) -> CounterObservation:
        raise NotImplementedError("async only")

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
    ) -> CounterObservation:
        self._total = seed or 0
        self._state = State(episode_id=episode_id or "unnamed", step_count=0)
        return CounterObservation(total=self._total, reward=0.0)

    async def step_async(
        self, action: CounterAction, timeout_s: float | None = None, **kwargs: Any
    ) -> CounterObservation:
        self._total += action.n
        self._state.step_count += 1
        return CounterObservation(total=self._total, reward=1.0, done=self._total >= 100)

    @property
    def state(self) -> State:
        return self._state


class EchoEnvironment(MCPEnvironment):
    """Tools of an MCP server, as upstream's echo_env has them, and one that fails."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("echo")
        calls: list[str] = []

        @server.tool
        def echo_message(message: str) -> str:
            """Echo back the message."""
            calls.append(message)
            return message

        @server.tool
        def echo_with_length(message: str) -> dict[str, Any]:
            """Echo back the message, its length and how many were echoed before it."""
            calls.append(message)
            return {"message": message, "length": len(message), "before": len(calls) - 1}

        @server.tool
        def fail(reason: str) -> str:
            """Fail."""
            raise ValueError(reason)

        super().__init__(server)
        self._calls = calls
        self._state = State(episode_id="unnamed", step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._calls.clear()
        self._state = State(episode_id=episode_id or "unnamed", step_count=0)
        return Observation(done=False, reward=0.0, metadata={"status": "ready"})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(done=False, reward=0.0, metadata={"error": f"no tool call: {type(action).__name__}"})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        return super().step(action, timeout_s=timeout_s, **kwargs)

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        return await super().step_async(action, timeout_s=timeout_s, **kwargs)

    @property
    def state(self) -> State:
        return self._state

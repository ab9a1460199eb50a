"""Synchronous, and tied to the thread of its ``__init__`` by a sqlite3 connection."""

import sqlite3

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class LedgerAction(Action):
    amount: int


class LedgerObservation(Observation):
    balance: int = 0


class LedgerState(State):
    entries: int = 0


class LedgerEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._db = sqlite3.connect(":memory:")
        self._db.execute("create table entries(amount integer)")
        self._episode_id = None

    def reset(self, seed=None, episode_id=None, **kwargs) -> LedgerObservation:
        self._db.execute("delete from entries")
        self._episode_id = episode_id or "ledger"
        return LedgerObservation()

    def step(self, action: LedgerAction, timeout_s=None, **kwargs) -> LedgerObservation:
        self._db.execute("insert into entries values (?)", (action.amount,))
        balance = self._db.execute("select sum(amount) from entries").fetchone()[0]
        return LedgerObservation(balance=balance, reward=float(balance), done=balance >= 100)

    @property
    def state(self) -> LedgerState:
        count = self._db.execute("select count(*) from entries").fetchone()[0]
        return LedgerState(episode_id=self._episode_id, step_count=count, entries=count)

    def close(self):
        self._db.close()

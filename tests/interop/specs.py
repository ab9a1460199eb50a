"""The foreign environments as ``errata serve`` takes them."""

from __future__ import annotations

from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

from errata_protocol.environment import EnvironmentSpec

from .foreign import worlds

_WORLDS = "tests.interop.foreign.worlds"

LEDGER = EnvironmentSpec(
    name="ledger",
    factory=f"{_WORLDS}:LedgerEnvironment",
    action_cls=worlds.LedgerAction,
    observation_cls=worlds.LedgerObservation,
    state_cls=f"{_WORLDS}:LedgerState",
)
COUNTER = EnvironmentSpec(
    name="counter",
    factory=f"{_WORLDS}:CounterEnvironment",
    action_cls=worlds.CounterAction,
    observation_cls=worlds.CounterObservation,
)
ECHO = EnvironmentSpec(
    name="echo",
    factory=f"{_WORLDS}:EchoEnvironment",
    action_cls=CallToolAction,
    observation_cls=CallToolObservation,
)

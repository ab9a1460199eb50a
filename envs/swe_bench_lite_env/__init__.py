"""SWE-bench Lite for agents: real repositories with a bug, a sandboxed shell, the benchmark's own grading rules.

Names are loaded on first use, so that importing the package costs nothing and pulls in neither the server nor OpenEnv.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .agent_text import AGENT_TEXT_VERSION, agent_text  # now: the function must shadow the module of its name

if TYPE_CHECKING:
    from .client import SweBenchLiteEnv
    from .models import SweAction, SweObservation, SweState
    from .spec import SPEC

__all__ = [
    "AGENT_TEXT_VERSION",
    "SPEC",
    "SweAction",
    "SweBenchLiteEnv",
    "SweObservation",
    "SweState",
    "agent_text",
]

_HOME = {
    "SPEC": "spec",
    "SweAction": "models",
    "SweBenchLiteEnv": "client",
    "SweObservation": "models",
    "SweState": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value

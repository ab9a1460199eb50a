"""SWE-bench Lite for agents: real repositories with a bug, a sandboxed shell, the benchmark's own grading rules.

Names are loaded on first use, so that importing the package costs nothing and pulls in neither the server nor OpenEnv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from errata_environment.published.lazy_names import lazy_names

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

__getattr__ = lazy_names(
    __name__,
    {
        "SPEC": "spec",
        "SweAction": "models",
        "SweBenchLiteEnv": "client",
        "SweObservation": "models",
        "SweState": "models",
    },
)

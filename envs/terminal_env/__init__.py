"""A sandboxed terminal for agents: real shells, tasks with verifiers, error-site markers.

Names are loaded on first use, so that importing the package costs nothing and pulls in neither the server nor OpenEnv.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from errata_environment.published.lazy_names import lazy_names

from .agent_text import AGENT_TEXT_VERSION, agent_text  # now: the function must shadow the module of its name

if TYPE_CHECKING:
    from .client import TerminalEnv
    from .models import TerminalAction, TerminalObservation, TerminalState
    from .spec import SPEC

__all__ = [
    "AGENT_TEXT_VERSION",
    "SPEC",
    "TerminalAction",
    "TerminalEnv",
    "TerminalObservation",
    "TerminalState",
    "agent_text",
]

__getattr__ = lazy_names(
    __name__,
    {
        "SPEC": "spec",
        "TerminalAction": "models",
        "TerminalEnv": "client",
        "TerminalObservation": "models",
        "TerminalState": "models",
    },
)

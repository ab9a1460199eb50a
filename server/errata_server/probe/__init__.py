"""Finds out which recovery class an environment can have, by playing it several times in fresh servers.

This is ``errata probe``; a running server uses nothing of it. Answers are compared with `errata_protocol.differences`,
as they are when a session is recovered.
"""

from ..app import openenv_import  # noqa: F401 # before any other module imports OpenEnv
from .probe import Plan, probe
from .verdict import Outcome, Verdict

__all__ = ["Outcome", "Plan", "Verdict", "probe"]

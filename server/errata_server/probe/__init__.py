"""Finds out which recovery class an environment can have: plays it several times in fresh servers and compares.

``errata probe`` is its command. What may differ between two answers is decided in `errata_protocol.differences`, as for
sessions that are brought back; nothing here is used by a running server.
"""

from .probe import Plan, probe
from .verdict import Outcome, Verdict

__all__ = ["Outcome", "Plan", "Verdict", "probe"]

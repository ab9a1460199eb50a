"""The corpus of `errata_redteam` on the bundled instance pagelist-1."""

from __future__ import annotations

from errata_redteam import Attempt
from errata_redteam.instances import on, values_of

from ..sessions import NAME, instance

PACKAGE = "src/pagelist/__init__.py"
VALUES = values_of(instance(), "pytest", frozenset({"src/pagelist"}))
ATTEMPTS, HONEST = on(NAME, VALUES)


def attempt(name: str) -> Attempt:
    """Return an attempt by name."""
    return next(one for one in ATTEMPTS if one.name == name)

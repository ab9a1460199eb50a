"""``errata swe validate``: `prepare` has it."""

from .prepare import validate_main as main

__all__ = ["main"]

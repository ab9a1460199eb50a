"""``errata swe validate``: runs `prepare.validate_main`."""

from .prepare import validate_main as main

__all__ = ["main"]

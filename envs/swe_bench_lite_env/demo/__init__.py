"""``errata demo swe``: a scripted agent repairs an instance, bundled or of the operator's, in half a minute."""

from __future__ import annotations

from .cli import main

__all__ = ["main"]

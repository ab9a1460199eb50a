"""``errata demo``: the main job on real input, offline, in about a minute."""

from __future__ import annotations

from .cli import main

__all__ = ["main"]

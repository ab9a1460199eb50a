"""``errata demo``: plays scripted episodes in real sandboxes, offline, in about a minute."""

from __future__ import annotations

from .cli import main

__all__ = ["main"]

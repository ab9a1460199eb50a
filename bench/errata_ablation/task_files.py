"""The text of ``task.toml`` of all generated tasks."""

from __future__ import annotations

TASK_TOML = """\
version = "1.0"

[metadata]
difficulty = "easy"
category = "controlled"

[verifier]
timeout_sec = 20.0

[errata]
deterministic = true
"""
"""``task.toml`` of a task that a verifier grades in a second."""

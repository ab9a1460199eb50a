"""Converts a `SandboxSpec` into the request that a runner's child carries out (`launcher/runner_start.py`)."""

from __future__ import annotations

import marshal
import os
from typing import Any

from ..base_trees.agent_modes import agent_mode
from ..base_trees.recipe import AGENT_UID
from ..spec import Directory, File, Owner, SandboxSpec

_DIRECTORY_MODE = 0o755


def request_for(spec: SandboxSpec, *, rootless: bool) -> tuple[dict[str, Any], bytes]:
    """Return the request that makes the files of ``spec``, and the content of the descriptor to send with it.

    See `launcher.messages.PrepareRequest`.

    Args:
        spec: What to make.
        rootless: The agent owns all files. Those meant for root get the mode of `agent_modes.agent_mode`, which gives
            the agent no more than their bits for others.
    """
    rows: list[tuple[str, bytes, int | None, int | None, int | bytes]] = []
    contents: list[bytes] = []
    if spec.empty:
        rows.append(("x", os.fsencode(spec.workdir), None, None, 0))
    for entry in (Directory(spec.workdir, owner="agent"), *spec.entries):
        path = os.fsencode(entry.path)
        if isinstance(entry, Directory):
            mode = None if entry.mode is None else _mode(entry.mode, entry.owner, rootless)
            new_mode = _DIRECTORY_MODE if entry.mode is None else entry.mode
            owner = None if entry.owner is None else _uid(entry.owner)
            rows.append(("d", path, mode, owner, _mode(new_mode, entry.owner, rootless)))
        elif isinstance(entry, File):
            rows.append(("f", path, _mode(entry.mode, entry.owner, rootless), _uid(entry.owner), len(entry.content)))
            contents.append(entry.content)
        else:
            rows.append(("l", path, None, 0, os.fsencode(entry.target)))
    plan = marshal.dumps(rows)
    request = {
        "do": "prepare",
        "plan_bytes": len(plan),
        "parent_mode": _mode(_DIRECTORY_MODE, "root", rootless),
        "changes_owners": not rootless,
        "mtime_s": spec.mtime_s,
    }
    return request, b"".join((plan, *contents))


def _uid(owner: Owner) -> int:
    return AGENT_UID if owner == "agent" else 0


def _mode(mode: int, owner: Owner | None, rootless: bool) -> int:
    return agent_mode(mode, 0, 0) if rootless and owner != "agent" else mode

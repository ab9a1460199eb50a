"""Hardening profiles: lists of programs that are blocked in a session. Gradings block none.

A start holds nothing of the fix under any profile (`prepare`). A profile takes programs away besides: on each of their
places on PATH stands a stub, mounted read-only for the commands of ``run`` alone, so that neither the files of the
session nor those that are graded know of it. The stub writes why to the standard error of the whole command, wherever
the call's own goes, and ends with `STATUS`; by that message, and never by the text of the command, a turn is marked.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary

from errata_protocol.errors import EnvironmentFailed
from errata_protocol.markers import Detection, ErrorKind, ErrorSite
from errata_server.sandbox.base import Backend, Sandbox
from errata_server.sandbox.spec import DEFAULT_PATH

from .prepare.store import Prepared

BYTECODE_READERS = ("decompyle3", "pycdas", "pycdc", "uncompyle2", "uncompyle6", "unpyc3", "unpyc37")
PROFILES: Mapping[str, tuple[str, ...]] = {
    "off": (),
    "default": BYTECODE_READERS,
    "strict": (*BYTECODE_READERS, "find", "unzip"),
}
"""What each profile takes away, by program name, where PATH has it."""
BLOCKED_HINT = "policy.blocked"
"""Hint key of a turn that called one."""
STATUS = 126
"""Exit status of a call: a shell's for a program that it may not run."""

_REASON = "is blocked by the policy of this environment"
_STUB = f"""#!/bin/sh
at=$$ top=$$
while [ "$at" -gt 1 ]; do
    top=$at at=0
    while read -r key value; do
        if [ "$key" = PPid: ]; then at=$value; break; fi
    done <"/proc/$top/status"
done
message="${{0##*/}}: {_REASON}: use git ls-files, git grep or ls -R, or the tools for files"
{{ echo "$message" >>"/proc/$top/fd/2"; }} 2>/dev/null || echo "$message" >&2
exit {STATUS}
"""
_MESSAGE = re.compile(rf"^([\w.+-]+): {_REASON}:", re.MULTILINE)
_SHARED_PROGRAMS = ("busybox", "toybox", "coreutils")
_WHERE = 'for name in {names}; do type -aP "$name" | while read -r place; do readlink -f -- "$place"; done; done; true'

_known: WeakKeyDictionary[Backend, dict[tuple[str, str, str], tuple[str, ...]]] = WeakKeyDictionary()


async def blocked_places(backend: Backend, sandbox: Sandbox, prepared: Prepared, profile: str) -> tuple[str, ...]:
    """Return the paths inside the sandbox, without links, of the programs that ``profile`` blocks.

    Args:
        backend: Backend of ``sandbox``; answers are cached for each backend and prepared instance.
        sandbox: Sandbox of a session at its start.
        prepared: Prepared instance that the session started from.
        profile: Name of a profile, one of `PROFILES`.

    Raises:
        EnvironmentFailed: One of them is part of a program that has others in it.
        SandboxFailed: The sandbox broke.
    """
    path = f"{prepared.env.get('PATH', DEFAULT_PATH)}:{DEFAULT_PATH}"
    known = _known.setdefault(backend, {})
    key = (prepared.digest, path, profile)
    if key not in known and PROFILES[profile]:
        names = " ".join(map(shlex.quote, PROFILES[profile]))
        result = await sandbox.run(_WHERE.format(names=names), clean=True, env={"PATH": path})
        places = tuple(sorted(set(result.stdout.splitlines())))
        for place in places:
            if posixpath.basename(place) in _SHARED_PROGRAMS:
                raise EnvironmentFailed(
                    f"profile {profile}: a program that it blocks is part of {place}, of which others are part too, in "
                    f"the base tree of {prepared.instance.instance_id}: prepare it on another base tree, or choose "
                    "another ERRATA_SWE_PROFILE"
                )
        known[key] = places
    return known.get(key, ())


def stubs(places: tuple[str, ...], directory: Path) -> dict[str, Path]:
    """Return what to mount where.

    Args:
        places: Paths of the blocked programs, as `blocked_places` returns them.
        directory: Directory for the stub, on a file system that allows programs.
    """
    if not places:
        return {}
    stub = directory / f"blocked-{hashlib.sha256(_STUB.encode()).hexdigest()[:12]}"
    if not stub.exists():
        directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_STUB)
        Path(temporary).chmod(0o755)
        Path(temporary).replace(stub)
    return dict.fromkeys(places, stub)


def violation(command: str, stdout: str, stderr: str) -> Detection | None:
    """Return the marker of a command in which a stub was called; None where none was."""
    found = _MESSAGE.search(stderr) or _MESSAGE.search(stdout)
    if found is None:
        return None
    name = found[1]
    word = re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", command)
    site = ErrorSite(
        action_field="command" if word else None,
        action_span=word.span() if word else None,
        source="action" if word else "message",
        message=f"{name}: {_REASON}",
    )
    return Detection.of(ErrorKind.POLICY_VIOLATION, site, hint_template_key=BLOCKED_HINT)

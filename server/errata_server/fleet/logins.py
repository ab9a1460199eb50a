"""`StoredLogins`: the viewer's logins of all workers, as files, because any worker may get the next request."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from errata_protocol.errors import JournalUnavailable

from ..doors.viewer_login import LOGIN_S, MAX_LOGINS, MAX_WRONG, Logins, Visitor

_ID = re.compile(r"[0-9a-f]{32}\.[0-9a-f]{16}\.[A-Za-z0-9_-]{43}")
"""A principal's folder, when the login began, and what nobody can guess."""


def empty(directory: Path) -> None:
    """Forget the logins of a server that ran before; make the directory, which its owner alone can read.

    Raises:
        JournalUnavailable: The directory cannot be used.
    """
    try:
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise JournalUnavailable(f"cannot use {directory} for logins: {error.strerror}") from error


class StoredLogins(Logins):
    """Logins as files of a directory that all workers use: whose each random id is, by the id's hash.

    Each principal has a folder, so that a login looks at its own principal's alone.

    Args:
        directory: The directory.
        workers: Number of workers; each refuses an address after its part of `MAX_WRONG`.
        now: Clock that is the same in all processes, seconds.
    """

    def __init__(self, directory: Path, workers: int, now: Callable[[], float] = time.time) -> None:
        super().__init__(now, max(1, MAX_WRONG // workers))
        self._directory = directory

    def begin(self, principal: str) -> str:
        """Return a new id for a principal.

        Raises:
            JournalUnavailable: It cannot be stored.
        """
        owner = hashlib.sha256(principal.encode()).hexdigest()[:32]
        made = f"{owner}.{time.time_ns():016x}.{secrets.token_urlsafe(32)}"
        place, folder = self._place(made), self._directory / owner
        written = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            known = sorted(folder.iterdir())  # the oldest first
            for one in known[: max(0, len(known) - MAX_LOGINS + 1)]:
                one.unlink(missing_ok=True)
            written.write_text(json.dumps([principal, self._now() + LOGIN_S]))
            written.replace(place)
        except OSError as error:
            raise JournalUnavailable(f"cannot store a login: {error.strerror}") from error
        return made

    def principal(self, sent: str) -> str | None:
        """Return whose an id is; None for one that is unknown or has ended."""
        if _ID.fullmatch(sent) is None:
            return None
        try:
            principal, until = json.loads(self._place(sent).read_text())
        except FileNotFoundError:
            return None
        if until <= self._now():
            self.end(sent)
            return None
        return str(principal)

    def end(self, sent: str) -> None:
        """Forget an id."""
        if _ID.fullmatch(sent) is not None:
            self._place(sent).unlink(missing_ok=True)

    def _place(self, made: str) -> Path:
        owner, began, _ = made.split(".")
        return self._directory / owner / f"{began}-{hashlib.sha256(made.encode()).hexdigest()}"


class SharedLogins:
    """ASGI middleware that gives each request the logins of all workers; it stands before the guard.

    Args:
        app: The application with the guard.
        logins: The logins.
    """

    def __init__(self, app: ASGIApp, *, logins: Logins) -> None:
        self._app = app
        self._logins = logins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope.setdefault("state", {}).setdefault("errata_visitor", Visitor(self._logins, scope))
        await self._app(scope, receive, send)

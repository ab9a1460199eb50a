"""Log output as JSON or as text, in which ids are replaced by their hashes (PROTOCOL F2)."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from .ids import name_of

_WEB_SERVERS = ("uvicorn.access", "uvicorn.error", "uvicorn.asgi", "websockets.server")

_IDS = re.compile(
    r"(?P<before>[?&][\w.-]{1,40}=|/episodes/)(?P<id>[^#/&?\s\"'][^/&?\s\"']*)"
    r"|\bep_[\w-]{20,}"
    r"|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
)
_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""Characters that JSON leaves as they are and a terminal or a reader does not see: text of others is logged."""
_BEARER = re.compile(r"(bearer\s+)[^\s'\"]+", re.IGNORECASE)


def redact(text: str) -> str:
    """Replace every id in ``text`` with ``#`` and its hash, and every bearer token with ``...``.

    Ids are UUIDs, episode ids, all values of a query string, and the path segment after ``/episodes/``.
    """
    return _BEARER.sub(r"\1...", _IDS.sub(_named, text))


def _named(found: re.Match[str]) -> str:
    return f"{found['before'] or ''}#{name_of(found['id'] or found[0])}"


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time, level, logger, message, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = record.exc_text or self.formatException(record.exc_info)
        return _UNPRINTABLE.sub(lambda found: json.dumps(found[0])[1:-1], json.dumps(line, ensure_ascii=False))


class NoIds(logging.Filter):
    """Redacts ids in records, and drops debug records of uvicorn and websockets, which quote parts of frames."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG and record.name.startswith(("uvicorn", "websockets")):
            return False
        if isinstance(record.args, tuple) and record.args and record.name == "uvicorn.access":
            record.args = tuple(
                redact(arg) if isinstance(arg, str) else arg for arg in record.args
            )  # uvicorn's formatter needs the arguments
        elif not hasattr(record, "color_message"):  # that is an attribute of uvicorn's start messages
            try:
                record.msg, record.args = redact(record.getMessage()), None
            except Exception:  # the arguments do not fit the format: the handler reports it
                record.args = None
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = redact(record.exc_text or _PLAIN.formatException(record.exc_info))
        return True


_PLAIN = logging.Formatter()


class _NoSockets(logging.Filter):
    """Drops uvicorn's record for each WebSocket, as a server may have thousands; metrics count them."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "WebSocket %s" not in str(record.msg)


def hide_ids() -> None:
    """Add `NoIds` to the loggers of uvicorn and websockets; it stays when they are configured later."""
    for name in _WEB_SERVERS:
        logger = logging.getLogger(name)
        if not any(isinstance(there, NoIds) for there in logger.filters):
            logger.addFilter(NoIds())


@contextmanager
def level_of(name: str, level: int) -> Iterator[None]:
    """Have a logger take records from a level on; afterwards its level is as before. Decorates functions, too.

    Args:
        name: Name of the logger.
        level: Lowest level that it takes.
    """
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def configure(*, as_json: bool, level: str = "info") -> None:
    """Send all logs to standard error, with ids redacted.

    Args:
        as_json: Write JSON lines instead of text.
        level: Lowest level that is logged.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonLines() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    handler.addFilter(NoIds())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.error").filters.insert(0, _NoSockets())
    logging.getLogger("uvicorn.access").disabled = True
    if level != "debug":  # its four lines at each start repeat what our own say
        logging.getLogger("uvicorn.error").setLevel("WARNING")
    logging.getLogger("httpx").setLevel(logging.WARNING)

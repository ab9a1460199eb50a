"""Log output as JSON or as text, in which ids are replaced by their hashes (PROTOCOL F2)."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO, cast

from .ids import name_of

_WEB_SERVERS = ("uvicorn.access", "uvicorn.error", "uvicorn.asgi", "websockets.server")

_IDS = re.compile(
    r"(?P<before>[?&][\w.-]{1,40}=|/episodes/)(?P<id>[^#/&?\s\"'][^/&?\s\"']*)"
    r"|\bep_[\w-]{20,}"
    r"|\b(?:sh-[a-z0-9]{12}-)?[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
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


LINE_CHARACTERS = 16_384
"""Longest line of a stream that is one record; what follows is the next one."""


class LoggedLines:
    """A text stream that logs each line that is written to it.

    Code of environments and libraries prints, and a log of JSON lines is read by programs.

    Args:
        logger: Logger of the lines.
        stream: The stream that it stands for; ``buffer``, ``fileno()`` and such are its own.
        level: Level at which the lines are logged.
    """

    def __init__(self, logger: logging.Logger, stream: TextIO, level: int = logging.INFO) -> None:
        self.stream = stream
        self._logger = logger
        self._level = level
        self._begun = ""
        self._lock = threading.Lock()
        self._this_thread = threading.local()

    def write(self, text: str) -> int:
        """Log the lines that ``text`` completes, and return its length."""
        if getattr(self._this_thread, "logs", False):  # the handler itself failed, and prints why
            return self.stream.write(text)
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if len(self._begun) >= LINE_CHARACTERS:
                lines, self._begun = [*lines, self._begun], ""
        self._log(lines)  # without the lock: a thread whose handler fails holds that one's lock and writes here
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def close_line(self) -> None:
        """Log what was written of a line that has no end yet."""
        with self._lock:
            begun, self._begun = self._begun, ""
        self._log([begun])

    def _log(self, lines: list[str]) -> None:
        self._this_thread.logs = True
        try:
            for line in lines:
                for start in range(0, len(line.rstrip()), LINE_CHARACTERS):
                    self._logger.log(self._level, "%s", line[start : start + LINE_CHARACTERS].rstrip())
        finally:
            self._this_thread.logs = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def say(*lines: str, example: str = "") -> None:
    """Tell whoever started the server something: a record for each line if logs are JSON, else ``errata: LINE``.

    Args:
        lines: The lines.
        example: Program text to print after them; a log of JSON lines goes without it.
    """
    if _logs_json():
        for line in lines:
            logging.getLogger("errata.server").info("%s", line)
    else:
        print("".join(f"errata: {line}\n" for line in lines) + example, end="", file=sys.stderr, flush=True)


def fail(message: str) -> None:
    """Say why the process ends: as a record of level error if logs are JSON, else as ``errata: MESSAGE``."""
    if _logs_json():
        logging.getLogger("errata.server").error("%s", message)
    else:
        print(f"errata: {message}", file=sys.stderr)


def _logs_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def _log_thread(ended: threading.ExceptHookArgs) -> None:
    name = ended.thread.name if ended.thread is not None else "?"
    error = ended.exc_value or ended.exc_type()
    logging.getLogger("errata.threads").error("thread %s ends", name, exc_info=error)


@contextmanager
def printed_lines_logged() -> Iterator[None]:
    """Inside the block standard output and error are `LoggedLines`, and exceptions that end a thread are records.

    With JSON logs every line is a JSON object then, whoever prints it; only what writes to the descriptors themselves,
    as a child process does, is not.
    """
    streams, hook = (sys.stdout, sys.stderr), threading.excepthook
    output = LoggedLines(logging.getLogger("errata.stdout"), sys.stdout)
    errors = LoggedLines(logging.getLogger("errata.stderr"), sys.stderr, logging.WARNING)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, errors)
    threading.excepthook = _log_thread
    try:
        yield
    finally:
        (sys.stdout, sys.stderr), threading.excepthook = streams, hook
        output.close_line()
        errors.close_line()


def configure(*, as_json: bool, level: str = "info") -> None:
    """Send all logs to standard error, with ids redacted.

    Warnings of Python are logged too.

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
    logging.captureWarnings(True)

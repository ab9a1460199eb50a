"""Runs code in an interpreter that has no disk, clock, network, process, thread or randomness, and says what it tried.

A program, not a test: ``python sealed_interpreter.py PROTOCOL_DIRECTORY MODULE...`` with the code on standard input. It
imports the modules, then runs the code; each forbidden attempt raises and is printed. What the interpreter and the
allowed libraries do for themselves happens before the seal.
"""

import _thread
import datetime
import os
import random
import sys
import time

directory, modules, code = sys.argv[1], sys.argv[2:], sys.stdin.read()
sys.dont_write_bytecode = True
sys.path.insert(0, directory)

# The libraries the protocol stands on, and the parts of the standard library that import more when first used.
import json  # noqa: E402, F401
import uuid  # noqa: E402, F401
from pathlib import Path  # noqa: E402, F401

import msgspec  # noqa: E402
import pydantic  # noqa: E402
import rfc8785  # noqa: E402


class Warm(pydantic.BaseModel):
    """The first model of a process makes Pydantic look for its plugins on disk."""

    values: dict[str, list[int]] | None = None


Warm.model_validate_json(Warm(values={}).model_dump_json())
Warm.model_json_schema()
msgspec.json.decode(msgspec.json.encode([1, "a"]))
rfc8785.dumps({"b": 1, "a": 1.5})  # loads the codec it sorts keys by

attempts: list[str] = []
phase = "import"
FORBIDDEN = (
    *("open", "os.", "pathlib.", "glob.", "shutil.", "tempfile.", "fcntl.", "sqlite3.", "mmap.", "ctypes.", "pty."),
    *("socket.", "ssl.", "urllib.", "http.", "ftplib.", "smtplib.", "subprocess.", "_posixsubprocess", "signal."),
    *("_thread.", "time."),
)


class Forbidden(BaseException):
    """Not an Exception, so that no handler of the code under test can hide it."""


def refuse(what: str) -> None:
    """Note the attempt and raise."""
    attempts.append(f"{phase}: {what}")
    raise Forbidden(what)


def is_import(event: str, arguments: tuple[object, ...]) -> bool:
    """Say whether this is the import system finding or reading source or bytecode."""
    if phase != "import":
        return False
    frame = sys._getframe(2)
    while frame is not None and "importlib" not in frame.f_code.co_filename:
        if frame.f_code.co_filename.startswith(directory):
            return False  # the protocol's own code stands between the import system and the call
        frame = frame.f_back
    if event == "open":
        return str(arguments[0]).endswith((".py", ".pyc", ".so")) and arguments[1] in ("r", "rb", None)
    return event in ("os.listdir", "os.scandir")


def audit(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse every audited event that reaches outside of the process."""
    if phase != "over" and event.startswith(FORBIDDEN) and not is_import(event, arguments):
        refuse(f"{event} {arguments!r:.200}")


def forbid(owner: object, name: str) -> None:
    """Replace a function that raises no audit event."""

    def refused(*arguments: object, **named: object) -> None:
        refuse(f"{getattr(owner, '__name__', owner)}.{name}")

    setattr(owner, name, refused)


class SealedDatetime(datetime.datetime):
    """`datetime` without the clock."""

    @classmethod
    def now(cls, tz: object = None) -> None:
        """Refuse."""
        refuse("datetime.now")

    @classmethod
    def utcnow(cls) -> None:
        """Refuse."""
        refuse("datetime.utcnow")

    @classmethod
    def today(cls) -> None:
        """Refuse."""
        refuse("datetime.today")


for name in dir(time):
    if callable(getattr(time, name)) and name != "struct_time":
        forbid(time, name)
for name in random.__all__:
    if callable(getattr(random, name)):
        forbid(random, name)
for name in ("urandom", "getrandom", "stat", "lstat", "getpid", "times", "cpu_count", "getloadavg"):
    forbid(os, name)
forbid(_thread, "start_new_thread")
for module in list(sys.modules.values()):  # names that `from ... import` bound before the seal
    if getattr(module, "_start_new_thread", None) is not None:
        forbid(module, "_start_new_thread")
    if getattr(module, "_urandom", None) is not None:
        forbid(module, "_urandom")
datetime.datetime = SealedDatetime  # type: ignore[misc]
sys.addaudithook(audit)

try:
    for module_name in modules:
        __import__(module_name)
    phase = "use"
    exec(compile(code, "<use>", "exec"), {"__name__": "use"})
except Forbidden:
    pass
finally:
    phase = "over"
for attempt in attempts:
    print(attempt)
sys.exit(3 if attempts else 0)

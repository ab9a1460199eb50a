"""What tests call in worker processes: a module of its own, which a process imports in no time."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from typing import Any

from errata_protocol.errors import StateOutOfRange


def length(text: str) -> int:
    return len(text)


def process() -> int:
    return os.getpid()


def compute_for_ever() -> None:
    while True:
        pass


def take_memory(mib: int) -> int:
    return len(bytearray(mib * 1024**2))


def nest(depth: int) -> int:
    return nest(depth - 1) if depth else 0


def crash() -> None:
    ctypes.string_at(0)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def many_bytes(count: int) -> bytes:
    return bytes(count)


def refuse_at_length(length: int, called: str) -> None:
    with open(called, "a", encoding="ascii") as file:  # noqa: PTH123
        file.write("called\n")
    raise ValueError("x" * length)


def refuse(message: str) -> None:
    raise ValueError(message)


def sleep_after_touching(path: str) -> None:
    with open(path, "w", encoding="ascii"):  # noqa: PTH123
        pass
    time.sleep(3600)


def niceness() -> int:
    return os.nice(0)


def wait_for(path: str) -> str:
    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.01)
    return path


class Counted:
    """Counts how often it is pickled."""

    pickles = 0

    def __getstate__(self) -> dict[str, int]:
        self.pickles += 1
        return {"pickles": self.pickles}


def counting_pickles() -> Counted:
    return Counted()


def a_lambda() -> Any:
    return lambda: None


def refuse_state() -> None:
    raise StateOutOfRange("e", 9, 5)


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("no")


class Unmakeable(Exception):
    def __init__(self, why: str, *, needed: int) -> None:
        super().__init__(why)


def refuse_unpicklable() -> None:
    raise Unpicklable("why")


def refuse_unmakeable() -> None:
    raise Unmakeable("why", needed=1)

"""What tests call in worker processes: a module of its own, which a process imports in no time."""

from __future__ import annotations

import ctypes
import os
import signal
import time


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


def refuse(message: str) -> None:
    raise ValueError(message)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def niceness() -> int:
    return os.nice(0)


def wait_for(path: str) -> str:
    while not os.path.exists(path):  # noqa: PTH110
        time.sleep(0.01)
    return path

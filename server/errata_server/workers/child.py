"""The program of a worker process: calls one function after the other, each within the budget of its request.

Started by its path, so that it imports nothing of this package; only the modules of the functions are imported.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import resource
import sys
import traceback
from multiprocessing.connection import Connection

NICE = 5
"""Added to the nice value: the event loop of the server comes first."""


def main() -> None:
    """Answer requests on the descriptor that the command line names, until its other end is closed."""
    connection = Connection(int(sys.argv[1]))
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.path[:] = pickle.loads(connection.recv_bytes())
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        connection.send_bytes(answer(request))
        del request


def answer(request: bytes) -> bytes:
    """Carry out a request; return what happened and the memory that this process holds, pickled."""
    happened: tuple[str, object]
    try:
        cpu_s, memory_bytes, answer_bytes, module, name, arguments = pickle.loads(request)
        del request
        limit(cpu_s, memory_bytes)
        value: object = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        happened = ("returned", value(*arguments))  # type: ignore[operator]
        if len(pickle.dumps(happened)) > answer_bytes:
            happened = ("exceeded", "size")
    except MemoryError:
        happened = ("exceeded", "memory")
    except RecursionError:
        happened = ("exceeded", "depth")
    except Exception as error:
        happened = ("raised", portable(error))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return pickle.dumps((*happened, resident_bytes()))


def resident_bytes() -> int:
    """Return this process's memory now. (The ``ru_maxrss`` of getrusage begins with that of the parent.)"""
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - no pathlib here
        return int(file.read().split()[1]) * resource.getpagesize()


def limit(cpu_s: float, memory_bytes: int) -> None:
    """Let the kernel end this process after ``cpu_s`` more seconds of CPU, and refuse memory over ``memory_bytes``."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, resource.RLIM_INFINITY))


def portable(error: Exception) -> Exception:
    """Return the exception, or one with its text where it cannot be pickled, with its traceback as a note."""
    try:
        same: Exception = pickle.loads(pickle.dumps(error))
    except Exception:
        same = RuntimeError(f"{type(error).__name__}: {error}")
    same.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    return same


if __name__ == "__main__":
    main()

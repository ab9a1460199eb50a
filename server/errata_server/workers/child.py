"""The program of a worker process: calls one function after the other, each within the budget of its request.

Started by its path, so that it imports nothing of this package; only the modules of the functions are imported.
"""

from __future__ import annotations

import importlib
import io
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
        connection.send_bytes(b"%d" % resident_bytes())


def answer(request: bytes) -> bytes:
    """Carry out a request; return what happened, pickled.

    Args:
        request: Three pickled objects, one after the other: the budget, the module and the name of the function, and
            its arguments.
    """
    parts = io.BytesIO(request)
    del request
    cpu_s, memory_bytes, answer_bytes = pickle.load(parts)
    happened, exceeded = b"", ""
    try:
        limit(cpu_s, memory_bytes)
        happened = outcome(parts)
        if len(happened) > answer_bytes:
            exceeded = "size"
    except MemoryError:
        exceeded = "memory"
    except RecursionError:
        exceeded = "depth"
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return pickle.dumps(("exceeded", exceeded)) if exceeded else happened


def outcome(parts: io.BytesIO) -> bytes:
    """Call the function that a request names; return its result or its exception, pickled.

    Raises:
        MemoryError: The budget's memory is used up.
        RecursionError: It recurses too deeply.
    """
    try:
        module, name = pickle.load(parts)
        value: object = importlib.import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
        return pickle.dumps(("returned", value(*pickle.load(parts))))  # type: ignore[operator]
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        return raised(error)


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


def raised(error: Exception) -> bytes:
    """Return an exception, or one with its text where it cannot be pickled, and a note of where it came from, pickled.

    The note is beside the exception, because some classes lose it when they are pickled.
    """
    note = "in a worker process:\n" + "".join(traceback.format_exception(error))
    try:
        happened = pickle.dumps(("raised", (error, note)))
        pickle.loads(happened)  # some can be pickled, and not made again
    except (MemoryError, RecursionError):
        raise
    except Exception:
        return pickle.dumps(("raised", (RuntimeError(f"{type(error).__name__}: {error}"), note)))
    return happened


if __name__ == "__main__":
    main()

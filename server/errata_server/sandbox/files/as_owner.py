"""Calls functions on files whose modes refuse their owner (``chmod 000``), from a helper process in a user namespace.

In rootless mode the agent's files belong to the server's user, who is refused what their modes refuse. In a user
namespace of its own a process of that user is not. The call is then made there, by another interpreter: a process with
threads cannot enter one. That costs some 60 ms, and only for who needs it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ..launcher import PROGRAMS

P = ParamSpec("P")
R = TypeVar("R")

_PROGRAM = """
import importlib, pickle, sys, types
path, package, here, programs, function, payload = pickle.load(sys.stdin.buffer)
sys.path[:] = path
# The package itself would import the whole server.
sys.modules[package] = types.ModuleType(package)
sys.modules[package].__path__ = [here]
sys.path.insert(0, programs)
import user_namespace
user_namespace.become_root()
module = importlib.import_module(function[0])
arguments, keywords = pickle.loads(payload)
try:
    outcome = True, getattr(module, function[1])(*arguments, **keywords)
except OSError as error:
    outcome = False, (error.errno, error.strerror, error.filename)
sys.stdout.buffer.write(pickle.dumps(outcome))
"""


def call(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``function(*args)``; where a mode of a file of ours stands in the way, call it where it does not.

    Args:
        function: A function of a module here; it may be called twice.
        args: Its arguments, which can be pickled, as its result.

    Raises:
        OSError: What the function raised.
    """
    try:
        return function(*args, **kwargs)
    except PermissionError:
        if os.geteuid() == 0:
            raise
    return call_in_namespace(function, *args, **kwargs)


def call_in_namespace(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return ``function(*args)``, called in a user namespace.

    Raises:
        OSError: What the function raised, or no user namespace can be had.
    """
    package, here = __name__.partition(".")[0], str(Path(__file__).parents[2])
    name = (function.__module__, function.__name__)
    order = pickle.dumps((sys.path, package, here, str(PROGRAMS), name, pickle.dumps((args, kwargs))))
    result = subprocess.run([sys.executable, "-I", "-S", "-c", _PROGRAM], input=order, capture_output=True, check=False)
    if result.returncode != 0:
        last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"files that their modes close could not be opened in a user namespace: {last}")
    is_done, outcome = pickle.loads(result.stdout)
    if not is_done:
        raise OSError(*outcome)
    found: Any = outcome
    return found  # type: ignore[no-any-return]

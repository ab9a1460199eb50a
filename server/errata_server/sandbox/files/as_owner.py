"""Calls functions on files whose modes deny their owner access (``chmod 000``), in a helper process.

In rootless mode the agent's files belong to the server's user, whom their modes may deny access. A process that is root
of a user namespace has CAP_DAC_OVERRIDE over files of that user. A process with threads cannot enter one, so the call
is made by another interpreter, which costs some 60 ms.
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
    """Call a function, and once more in a user namespace if it raises PermissionError and this process is not root.

    Args:
        function: A module-level function of `errata_server`. The first call may have done a part of the work.
        args: Positional arguments; they and the result can be pickled.
        kwargs: Keyword arguments.

    Raises:
        OSError: The function raised it, or no user namespace can be made.
    """
    try:
        return function(*args, **kwargs)
    except PermissionError:
        if os.geteuid() == 0:
            raise
    return call_in_namespace(function, *args, **kwargs)


def call_in_namespace(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function in a helper process that is root of a user namespace; see `call`.

    Raises:
        OSError: The function raised it, or no user namespace can be made.
    """
    package, here = __name__.partition(".")[0], str(Path(__file__).parents[2])
    name = (function.__module__, function.__name__)
    request = pickle.dumps((sys.path, package, here, str(PROGRAMS), name, pickle.dumps((args, kwargs))))
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _PROGRAM], input=request, capture_output=True, check=False
    )
    if result.returncode != 0:
        last = result.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise OSError(f"files whose modes deny access could not be opened in a user namespace: {last}")
    is_done, outcome = pickle.loads(result.stdout)
    if not is_done:
        raise OSError(*outcome)
    found: Any = outcome
    return found  # type: ignore[no-any-return]

"""Loaded at the start of every Python that ``test.sh`` runs: redirects pytest, pip, uv and venv, and changes the module
path of test runners and of scripts of the tests.

``python3 -m pytest`` becomes the verifiers' runner, ``programs/run_pytest.py``; ``-m pip`` and ``-m venv`` become those
of ``programs/tools.py``. Scripts of the tests find the verifiers' packages, and report what they miss. Other runners
put the current directory, the agent's, first on the module path: a ``json.py`` there would take over the runner and its
verdict. In these, the system's modules come first. Programs of the agent are not runners and find theirs as ever.
"""

import os
import sys
from importlib.machinery import PathFinder

RUNNERS = {"unittest", "doctest"}
PYTEST = {"pytest", "py.test"}
# A directory in PYTHONPATH may be the agent's also below /usr: a work directory in /usr/src, a link.
NAMED = [os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(":") if place]
SYSTEM = [place for place in sys.path if place.startswith("/usr/") and os.path.abspath(place) not in NAMED]
TOOLS = {"pip": "pip", "uv": "uv", "venv": "venv", "virtualenv": "venv", "ensurepip": "ensurepip"}
PROGRAMS = "/verifier/programs"
PACKAGES = os.environ.get("ERRATA_VERIFIER_PACKAGES", "/usr/lib/errata-verifier")


class SystemFirst:
    """Finds top-level modules in the system's directories before those of any other directory."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the system's module of that name, or None to let the others look."""
        return PathFinder.find_spec(name, SYSTEM, target) if path is None else None


def started(arguments):
    """Return (module, script, where its arguments begin) of a command line of Python."""
    for index, argument in enumerate(arguments):
        if argument.startswith("-m"):
            name = argument[2:] or "".join(arguments[index + 1 : index + 2])
            return name, "", index + (1 if argument[2:] else 2)
        if argument == "-" or argument.startswith("-c") or not argument.startswith("-"):
            return "", argument, index + 1
    return "", "-", len(arguments)


def explain(kind, error, trace):
    """Print an exception that ends a script of the tests; report what the script did not find."""
    sys.__excepthook__(kind, error, trace)
    sys.path.insert(0, PROGRAMS)
    from lacks import missing, report

    found = missing(error)
    if found is not None:
        report(*found)


name, script, after = started(sys.orig_argv[1:])
rest = sys.orig_argv[1 + after :]
if name in PYTEST and os.path.exists(PROGRAMS):
    os.execv("/usr/bin/python3", ["python3", "-I", f"{PROGRAMS}/run_pytest.py", "--as-module", *rest])
elif name in TOOLS and os.path.exists(PROGRAMS):
    os.execv("/usr/bin/python3", ["python3", "-I", "-S", f"{PROGRAMS}/tools.py", TOOLS[name], *rest])
elif name in RUNNERS:
    sys.meta_path.insert(0, SystemFirst)
elif script.startswith(("/tests/", "-")):
    sys.path.append(PACKAGES)
    sys.excepthook = explain

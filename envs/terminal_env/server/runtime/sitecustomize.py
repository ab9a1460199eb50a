"""Loaded at the start of every Python that ``test.sh`` runs; it acts in test runners only.

``python3 -m pytest`` puts the current directory, the agent's, first on the module path: a ``pytest.py`` or ``json.py``
there would take over the runner and with it the verdict. In a runner, the system's modules come first. Programs of the
agent are not runners and find their modules as ever.
"""

import sys
from importlib.machinery import PathFinder

RUNNERS = {"pytest", "py.test", "unittest", "doctest"}
SYSTEM = [place for place in sys.path if place.startswith("/usr/")]


class SystemFirst:
    """Finds top-level modules in the system's directories before any other place is asked."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the system's module of that name, or None to let the others look."""
        return PathFinder.find_spec(name, SYSTEM, target) if path is None else None


def runs_tests(arguments):
    """Tell whether this Python was started with ``-m`` and the name of a test runner."""
    for index, argument in enumerate(arguments):
        if argument.startswith("-m"):
            return (argument[2:] or "".join(arguments[index + 1 : index + 2])) in RUNNERS
    return False


if runs_tests(sys.orig_argv[1:]):
    sys.meta_path.insert(0, SystemFirst)

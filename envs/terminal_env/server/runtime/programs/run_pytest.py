"""Runs pytest for ``test.sh`` with the verifiers' own packages, and reports failures that are not the agent's.

It stands for ``pytest``, ``uvx pytest``, ``uv run pytest`` and ``python3 -m pytest``. Modules of the verifiers'
packages and of the system come first, so that a ``pytest.py`` or ``json.py`` of the agent cannot take over the runner.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
PACKAGES = os.environ.pop("ERRATA_VERIFIER_PACKAGES", "/usr/lib/errata-verifier")
EARLY = [PACKAGES, *(place for place in sys.path if place.startswith("/usr/"))]

from importlib.machinery import PathFinder  # noqa: E402

from lacks import missing, of_the_tests, report  # noqa: E402

USAGE_ERROR, INTERNAL_ERROR, NO_TESTS = 4, 3, 5


class SystemFirst:
    """Finds top-level modules of the verifier and the system before those of any other directory."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the module of that name in `EARLY`, or None to let the others look."""
        return PathFinder.find_spec(name, EARLY, target) if path is None else None


class Watch:
    """A plugin that reports what the tests needed and the machine did not have.

    ``kind`` is the kind of report for a run in which pytest did not take its arguments, found no tests or did not know
    a fixture: ``tool`` if that can only be due to the arguments and files of the tests, ``runner`` if it may be the
    agent's doing, which a run on the untouched start then decides, and None if the reason was reported.
    """

    def __init__(self):
        self.kind = "runner"

    def pytest_load_initial_conftests(self, early_config):
        """Look at the configuration file that pytest found, and at a ``conftest.py`` that cannot be loaded."""
        try:
            result = yield
        except Exception as error:
            if self.look(error):
                self.kind = None
            raise
        settings = early_config.inipath
        if settings is None or of_the_tests(settings):
            self.kind = "tool"
        return result

    def pytest_keyboard_interrupt(self):
        """Note that something ended the run with an exit status of its own choice: ``pytest.exit``."""
        self.kind = "runner"

    def pytest_exception_interact(self, node, call):
        """Look at the exception of a test, or of a module that could not be collected."""
        error = call.excinfo.value
        if type(error).__name__ != "FixtureLookupError":
            self.look(error)
        elif of_the_tests(node.path):
            name = error.argname or "?"
            # A copy in the project may take its fixtures from a conftest.py of the agent, and the agent's settings may
            # leave out conftest.py or a plugin.
            kind = self.kind if os.path.normpath(node.path).startswith("/tests/") else None
            report(kind or "runner", f"fixture {name}", f"no fixture {name!r}: a plugin of pytest is missing")

    @staticmethod
    def look(error):
        """Report what the tests missed, if ``error`` is due to that; return whether it is."""
        if type(error).__name__ in ("CollectError", "ConftestImportFailure"):
            error = error.__cause__ or error
        found = missing(error)
        if found is not None:
            report(*found)
        return found is not None


def of_the_agent(arguments):
    """Return whether pytest is to run tests outside of /tests; finding none is then the agent's fault."""
    places = [word.partition("::")[0] for word in arguments if not word.startswith("-")]
    tests = [word for word in places if word.endswith(".py") or os.path.isdir(word) or "/" in word]
    outside = [word for word in tests if not os.path.abspath(word).startswith(("/tests", "/logs"))]
    return bool(outside) or (not tests and not os.getcwd().startswith("/tests"))


def main(arguments):
    if not os.path.isdir(PACKAGES):
        report("tool", "pytest", f"pytest: the base tree has no {PACKAGES}: run `errata base build`")
        return 127
    sys.meta_path.insert(0, SystemFirst)
    sys.dont_write_bytecode = True
    try:
        import pytest
    except ImportError as error:
        report("tool", "pytest", f"pytest cannot start: {error}")
        return 127
    pytest.hookimpl(wrapper=True)(Watch.pytest_load_initial_conftests)
    watch = Watch()
    try:
        code = int(pytest.main(arguments, plugins=[watch]))
    except Exception as error:  # whatever a plugin raises: it is the runner's failure
        report("runner", "pytest", f"pytest ended with {type(error).__name__}: {error}")
        raise
    if code in (USAGE_ERROR, NO_TESTS) and watch.kind is not None and not of_the_agent(arguments):
        what = "does not take its arguments, or cannot load a file" if code == USAGE_ERROR else "found no tests"
        report(watch.kind, "pytest", f"pytest {what}: pytest {' '.join(arguments)}")
    elif code == INTERNAL_ERROR:
        report("runner", "pytest", "pytest ended with an internal error")
    return code


if __name__ == "__main__":
    as_module = sys.argv[1:2] == ["--as-module"]
    arguments = sys.argv[2 if as_module else 1 :]
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]
    # Isolated mode leaves out what Python would add: the directory of `-m`, and PYTHONPATH behind our own.
    own = "/site"
    extra = [place for place in os.environ.get("PYTHONPATH", "").split(":") if place and place != own]
    sys.path[:0] = [*([os.getcwd()] if as_module else []), *extra, PACKAGES]  # plugins are looked for there, too
    sys.argv = ["pytest", *arguments]
    sys.exit(main(arguments))

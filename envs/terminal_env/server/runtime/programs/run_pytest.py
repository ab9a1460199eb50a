"""Runs pytest for ``test.sh`` with the verifiers' own packages, and reports failures that are not the agent's.

It stands for ``pytest``, ``uvx pytest``, ``uv run pytest`` and ``python3 -m pytest``. Modules of the verifiers'
packages and of the system come first, so that a ``pytest.py`` or ``json.py`` of the agent cannot take over the runner.
"""

import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
PACKAGES = os.environ.pop("ERRATA_VERIFIER_PACKAGES", "/usr/lib/errata-verifier")
EARLY = [PACKAGES, *(place for place in sys.path if place.startswith("/usr/"))]

from importlib.machinery import PathFinder  # noqa: E402

from lacks import report  # noqa: E402

USAGE_ERROR, INTERNAL_ERROR, NO_TESTS = 4, 3, 5


class SystemFirst:
    """Finds top-level modules of the verifier and the system before those of any other directory."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the module of that name in `EARLY`, or None to let the others look."""
        return PathFinder.find_spec(name, EARLY, target) if path is None else None


class Watch:
    """A plugin that reports what the tests needed and the machine did not have."""

    def pytest_collectreport(self, report):
        """Look at a module that could not be collected."""
        if report.failed:
            missing = re.findall(r"ModuleNotFoundError: No module named '([^']+)'", str(report.longrepr))
            for name in missing[-1:]:
                self.module(name)

    def pytest_exception_interact(self, call, report):
        """Look at the exception of a test."""
        error = call.excinfo.value if call.excinfo is not None else None
        if isinstance(error, ModuleNotFoundError) and error.name and self.raised_in_tests(call.excinfo):
            self.module(error.name)
        elif isinstance(error, FileNotFoundError) and isinstance(error.filename, str) and "/" not in error.filename:
            frames = [entry.frame.code.name for entry in call.excinfo.traceback]
            if frames and frames[-1] == "_execute_child":
                self.command(error.filename)
        elif type(error).__name__ == "FixtureLookupError":
            name = error.argname or "?"
            report_to("tool", f"fixture {name}", f"no fixture {name!r}: a plugin of pytest is missing")

    @staticmethod
    def raised_in_tests(excinfo):
        """Return whether the import is in a test rather than in a module of the agent."""
        paths = [str(entry.path) for entry in excinfo.traceback if not str(entry.path).startswith(("/usr/", "<"))]
        return bool(paths) and paths[-1].startswith("/tests/")

    @staticmethod
    def module(name):
        """Report a Python module that a test could not import."""
        report_to("module", name.partition(".")[0], f"no Python module {name!r}")

    @staticmethod
    def command(name):
        """Report a program that a test could not start."""
        report_to("command", name, f"no program {name!r}")


report_to = report


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
    try:
        code = int(pytest.main(arguments, plugins=[Watch()]))
    except Exception as error:  # whatever a plugin raises: it is the runner's failure
        report("runner", "pytest", f"pytest ended with {type(error).__name__}: {error}")
        raise
    if code in (USAGE_ERROR, NO_TESTS) and not of_the_agent(arguments):
        what = "does not take its arguments, or cannot load a file" if code == USAGE_ERROR else "found no tests"
        report("tool", "pytest", f"pytest {what}: pytest {' '.join(arguments)}")
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

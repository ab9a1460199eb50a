"""What the test patch of an instance names: its files, the tests that the benchmark runs, and the command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

from ..dataset import Instance

_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_DIFF = re.compile(r"diff --git a/.* b/(.*)")

TEST_COMMANDS = MappingProxyType(
    {
        "astropy/astropy": "pytest -rA",
        "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
        "matplotlib/matplotlib": "pytest -rA",
        "mwaskom/seaborn": "pytest --no-header -rA",
        "pallets/flask": "pytest -rA",
        "psf/requests": "pytest -rA",
        "pydata/xarray": "pytest -rA",
        "pylint-dev/pylint": "pytest -rA",
        "pytest-dev/pytest": "pytest -rA",
        "scikit-learn/scikit-learn": "pytest -rA",
        "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
        "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
    }
)
"""The command that the benchmark (swebench 4.1.0) puts before the directives, by repository."""

_TEST_COMMANDS_OF_VERSION = {
    ("django/django", "1.9"): "./tests/runtests.py --verbosity 2",
    **{
        ("astropy/astropy", version): "pytest -rA -vv -o console_output_style=classic --tb=no"
        for version in ("0.1", "0.2", "0.3", "0.4", "1.1", "1.2", "1.3")
    },
}


@dataclass(frozen=True, slots=True)
class PatchedFile:
    """One file of a unified diff.

    Args:
        before: Path before the patch; None for a new file.
        after: Path after it; None for a deleted file.
    """

    before: str | None
    after: str | None

    @property
    def path(self) -> str:
        """Path after the patch, or before it for a deleted file."""
        return self.after or self.before or ""


def directives(test_patch: str, repo: str = "") -> list[str]:
    """Return what the benchmark hands to the test runner: the files of the test patch that hold no data.

    Args:
        test_patch: Unified diff of git.
        repo: ``owner/name``. For django files become modules: ``tests/a/tests.py`` is ``a.tests``.
    """
    found = [path for path in _DIFF.findall(test_patch) if not path.endswith(_NO_TESTS)]
    if repo != "django/django":
        return found
    return [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in found]


def default_command(instance: Instance) -> str:
    """Return the command that the benchmark runs for an instance; ``pytest -rA`` for a repository unknown to it."""
    command = _TEST_COMMANDS_OF_VERSION.get((instance.repo, instance.version))
    command = command or TEST_COMMANDS.get(instance.repo, "pytest -rA")
    return " ".join([command, *directives(instance.test_patch, instance.repo)])


def patched_files(patch: str) -> list[PatchedFile]:
    """Return the files of a unified diff in their order.

    The text of a hunk is never taken for a header. Lines that belong to no diff are skipped.

    Args:
        patch: Output of ``git diff``, or of ``diff -u`` with ``a/`` and ``b/``.
    """
    return list(_files(patch.split("\n")))


def modified_files(test_patch: str) -> list[str]:
    """Return the files that exist before the patch. The benchmark restores these from the base commit."""
    return [file.before for file in patched_files(test_patch) if file.before is not None]


def test_files(test_patch: str) -> list[str]:
    """Return every path that the patch writes, removes or renames: none of these may be the agent's when tests run."""
    paths = [path for file in patched_files(test_patch) for path in (file.before, file.after) if path is not None]
    return list(dict.fromkeys(paths))


test_files.__test__ = False  # type: ignore[attr-defined] # its name begins like a test's

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_GIT = re.compile(r'diff --git ("(?:[^"\\]|\\.)*"|\S.*) ("(?:[^"\\]|\\.)*"|b/.*)$')


def _files(lines: list[str]) -> Iterator[PatchedFile]:
    before: str | None = None
    after: str | None = None
    in_file = in_header = False
    old = new = 0  # lines of the hunk that are still to come
    for line in lines:
        if old > 0 or new > 0:
            if not line.startswith("\\"):
                old -= not line.startswith("+")
                new -= not line.startswith("-")
            continue
        hunk = _HUNK.match(line)
        if hunk:
            old, new, in_header = int(hunk[1] or 1), int(hunk[2] or 1), False
        elif line.startswith("diff --git "):
            if in_file:
                yield PatchedFile(before, after)
            before, after = _git_paths(line)
            in_file = in_header = True
        elif line.startswith("--- "):
            if in_file and not in_header:  # a diff without git's headers
                yield PatchedFile(before, after)
            before, in_file, in_header = _path(line[4:]), True, True
        elif not in_header:
            continue
        elif line.startswith("+++ "):
            after = _path(line[4:])
        elif line.startswith("new file mode"):
            before = None
        elif line.startswith("deleted file mode"):
            after = None
        elif line.startswith(("rename from ", "copy from ")):
            before = _unquoted(line.split(" from ", 1)[1])
        elif line.startswith(("rename to ", "copy to ")):
            after = _unquoted(line.split(" to ", 1)[1])
    if in_file:
        yield PatchedFile(before, after)


def _git_paths(line: str) -> tuple[str | None, str | None]:
    """Return both paths of ``diff --git a/x b/x``; the two are equal but for renames, which say so later."""
    rest = line[len("diff --git ") :].rstrip("\r")
    middle = len(rest) // 2
    if len(rest) % 2 and rest[middle] == " " and rest[2:middle] == rest[middle + 3 :]:
        return _path(rest[:middle]), _path(rest[middle + 1 :])
    found = _GIT.match(line.rstrip("\r"))
    return (_path(found[1]), _path(found[2])) if found else (None, None)


def _path(text: str) -> str | None:
    """Return a path of a header without its ``a/`` or ``b/``; None for ``/dev/null``."""
    text = _unquoted(text.split("\t", 1)[0].rstrip("\r"))
    if text == "/dev/null":
        return None
    return text[2:] if text.startswith(("a/", "b/")) else text


def _unquoted(text: str) -> str:
    """Undo git's quoting of a path: ``"b/caf\\303\\251"``."""
    text = text.rstrip("\r")
    if len(text) < 2 or not (text.startswith('"') and text.endswith('"')):
        return text
    raw = re.sub(rb"\\([0-7]{3}|.)", _escape, text[1:-1].encode("utf-8", "surrogateescape"))
    return raw.decode("utf-8", "surrogateescape")


def _escape(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if len(code) == 3:
        return bytes([int(code, 8) & 0xFF])
    named = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
    return named.get(code, code)

"""Reads the logs of test runners: log in, status by test out, as the parsers of swebench 5.0.2 and 4.1.0 do.

A log is written by code that is under test, so that the parsers take time linear in its length: where swebench has an
expression that tries again from every position of a long line, the same match is found here by searching for its ends.
What the parsers return is theirs in every case, also where that is odd; a status may be any word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from errata_protocol.errors import InvalidRequest

PASSED, FAILED, ERROR, SKIPPED, XFAIL = "PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL"
STATUSES = (FAILED, PASSED, SKIPPED, ERROR, XFAIL)

RULES: Mapping[int, str] = MappingProxyType({5: "5.0.2", 4: "4.1.0"})
"""Version of swebench by the number that callers give."""

LogParser = Callable[[str], dict[str, str]]
"""Log in, status by test out, in the order in which the tests first occur."""


class LogUnreadable(ValueError):
    """The benchmark's parser stops with an exception on this log; the run counts as not evaluated."""


def pytest(log: str) -> dict[str, str]:
    """Read the short summary of ``pytest -rA``: a line ``STATUS id``."""
    return _summary(log)


def pytest_4(log: str) -> dict[str, str]:
    """As `pytest`, with the count of ``SKIPPED [1] file:line`` taken for a test (swebench 4)."""
    return _summary(log, counts_are_tests=True)


def pytest_options(log: str) -> dict[str, str]:
    """As `pytest`; of a parameter that is an absolute path the last part is kept."""
    return _summary(log, rename=_last_part_of_path)


def pytest_options_4(log: str) -> dict[str, str]:
    """As `pytest_options`, with counts taken for tests (swebench 4)."""
    return _summary(log, rename=_last_part_of_path, counts_are_tests=True)


def matplotlib(log: str) -> dict[str, str]:
    """As `pytest`, with members of ``MouseButton`` as the numbers that older versions print."""
    return _summary(_mouse_buttons(log))


def matplotlib_4(log: str) -> dict[str, str]:
    """As `matplotlib`, with counts taken for tests (swebench 4)."""
    return _summary(_mouse_buttons(log), counts_are_tests=True)


def pytest_v2(log: str) -> dict[str, str]:
    """Read ``STATUS id`` or ``id STATUS`` a line, without colours; an id may hold spaces."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        line = _COLOUR.sub("", line).translate(_CONTROLS)
        if line.startswith(STATUSES):
            if line.startswith(FAILED):
                line = line.split(" - ", 1)[0]  # the message after the id
            words = line.split()
            if len(words) >= 2 and not _is_count(words):
                found[" ".join(words[1:])] = words[0]
        elif line.endswith(STATUSES):
            words = line.split()
            if len(words) >= 2:
                found[" ".join(words[:-1])] = words[-1]
    return found


def pytest_v2_4(log: str) -> dict[str, str]:
    """As `pytest_v2`, with ids cut at a space (swebench 4)."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        line = _COLOUR.sub("", line).translate(_CONTROLS)
        if line.startswith(STATUSES):
            if line.startswith(FAILED):
                line = line.replace(" - ", " ")
            words = line.split()
            if len(words) >= 2:
                found[words[1]] = words[0]
        elif line.endswith(STATUSES):
            words = line.split()
            if len(words) >= 2:
                found[words[0]] = words[1]
    return found


def pytest_whole_ids(log: str) -> dict[str, str]:
    """As `pytest`, with ids that may hold spaces. An id ends before the first ``" - "`` outside its brackets."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        words = line.split(None, 2)
        if not line.startswith(STATUSES) or len(words) < 2 or _is_count(words):
            continue
        parts, depth, end = line.split(None, 1)[1].rstrip().split(" - "), 0, 0
        while end < len(parts) and (not end or depth):
            depth += parts[end].count("[") - parts[end].count("]")
            end += 1
        found[" - ".join(parts[:end])] = words[0]
    return found


def seaborn(log: str) -> dict[str, str]:
    """Read ``FAILED id``, ``PASSED id`` and ``id PASSED ...``; other states are not recorded."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) >= 2:
            _seaborn_line(line, words, found)
    return found


def seaborn_4(log: str) -> dict[str, str]:
    """As `seaborn`, but a status without a test id is an error (swebench 4).

    Raises:
        LogUnreadable: A line starts with ``FAILED`` or ``PASSED`` and has no second word.
    """
    found: dict[str, str] = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2 and (line.startswith((FAILED, PASSED)) or f" {PASSED} " in line):
            raise LogUnreadable(f"a line is {line[:40]!r} and nothing else")
        if len(words) >= 2:
            _seaborn_line(line, words, found)
    return found


def django(log: str) -> dict[str, str]:
    """Read unittest's verbose output, ``name ... state`` a line, with output of the tests in between.

    Raises:
        LogUnreadable: A line is ``FAIL:`` or ``ERROR:`` and nothing else.
    """
    found: dict[str, str] = {}
    running: str | None = None
    for line in log.split("\n"):
        line = line.strip()
        if _DJANGO_VERSION_TEST in line:
            found[_DJANGO_VERSION_TEST] = PASSED
        if " ... " in line:
            running = line.split(" ... ", 1)[0]
        for suffix in (" ... ok", " ... OK", " ...  OK"):
            if line.endswith(suffix):
                if line.startswith(_DJANGO_7188):
                    line = line.split("...", 1)[-1].strip()
                found[line.rsplit(suffix, 1)[0]] = PASSED
                break
        if " ... skipped" in line:
            found[line.split(" ... skipped", 1)[0]] = SKIPPED
        for suffix, heading, status in ((" ... FAIL", "FAIL:", FAILED), (" ... ERROR", "ERROR:", ERROR)):
            if line.endswith(suffix):
                found[line.split(suffix, 1)[0]] = status
            if line.startswith(heading):
                words = line.split(None, 2)
                if len(words) < 2:
                    raise LogUnreadable(f"a line is {heading!r} and nothing else")
                found[words[1]] = status
        if line.startswith("ok") and running is not None:
            found[running] = PASSED  # the test printed something between its name and its state
    for names in (_interrupted_by_silenced_checks(log), _interrupted_by_server_error(log)):
        for name in names:
            found[name] = PASSED
    for match in _INTERRUPTED_BY_CHECK.finditer(log):
        found[match[1]] = PASSED
    return found


def sympy(log: str) -> dict[str, str]:
    """Read sympy's own runner: ``test_name ok``, and headings of failures, ``_____ file.py:test _____``."""
    found: dict[str, str] = {}
    for line in log.split("\n"):
        # The longest match of `(_*) (.*)\.py:(.*) (_*)`: from the first space to the last one, cut at the last ".py:".
        first, last = line.find(" "), line.rfind(" ")
        cut = line.rfind(".py:", first + 1, last) if first < last else -1
        if cut >= 0:
            found[f"{line[first + 1 : cut]}.py:{line[cut + 4 : last]}"] = FAILED
    for line in log.split("\n"):
        line = line.strip()
        if line.startswith("test_"):
            for suffix, status in ((" E", ERROR), (" F", FAILED), (" ok", PASSED)):
                if line.endswith(suffix):
                    found[line.split(None, 1)[0]] = status
    return found


def parser_name(repo: str, log_parser: str = "", runner: str = "pytest") -> str:
    """Return the name of the parser for an instance, as swebench's registry has it.

    Args:
        repo: Repository, ``owner/name``.
        log_parser: Parser that the row itself names, which comes first; empty if it names none.
        runner: Test runner that the recipe names, for a repository that the benchmark does not know.
    """
    return log_parser or PARSER_OF_REPO.get(repo) or _PARSER_OF_RUNNER.get(runner, WHOLE_IDS)


def parse_log(log: str, name: str, rules: int = 5) -> dict[str, str]:
    """Return the status of every test that a log names.

    Args:
        log: Text of the log, with ``\\n`` at the ends of lines.
        name: Name of the parser; see `parser_name`.
        rules: Version of the benchmark's rules, 5 or 4; see `RULES`.

    Raises:
        LogUnreadable: The benchmark's parser stops with an exception here.
        InvalidRequest: There is no parser of that name.
    """
    if rules not in RULES:
        raise InvalidRequest(f"rules {rules!r}: there are {', '.join(map(str, RULES))}")
    parsers = (_PARSERS_5 if rules == 5 else _PARSERS_4).get(_SAME_AS.get(name, name))
    if parsers is None:
        raise InvalidRequest(f"no log parser {name!r}: there are {', '.join(sorted({*_PARSERS_5, *_SAME_AS}))}")
    return parsers(log)


PARSER_OF_REPO: Mapping[str, str] = MappingProxyType(
    {
        "astropy/astropy": "parse_log_astropy",
        "django/django": "parse_log_django",
        "marshmallow-code/marshmallow": "parse_log_marshmallow",
        "matplotlib/matplotlib": "parse_log_matplotlib",
        "mwaskom/seaborn": "parse_log_seaborn",
        "pallets/flask": "parse_log_flask",
        "psf/requests": "parse_log_requests",
        "pvlib/pvlib-python": "parse_log_pvlib",
        "pydata/xarray": "parse_log_xarray",
        "pydicom/pydicom": "parse_log_pydicom",
        "pylint-dev/astroid": "parse_log_astroid",
        "pylint-dev/pylint": "parse_log_pylint",
        "pytest-dev/pytest": "parse_log_pytest",
        "pyvista/pyvista": "parse_log_pyvista",
        "scikit-learn/scikit-learn": "parse_log_scikit",
        "sphinx-doc/sphinx": "parse_log_sphinx",
        "sqlfluff/sqlfluff": "parse_log_sqlfluff",
        "sympy/sympy": "parse_log_sympy",
    }
)
"""Name of the parser by repository: the twelve of Lite and the other Python ones of the benchmark."""

WHOLE_IDS = "errata_pytest"
"""The parser for pytest in repositories that the benchmark does not know; swebench has none of this name."""
_PARSER_OF_RUNNER = {"pytest": WHOLE_IDS, "django": "parse_log_django", "sympy": "parse_log_sympy"}
_PARSERS_5: dict[str, LogParser] = {
    WHOLE_IDS: pytest_whole_ids,
    "parse_log_pytest": pytest,
    "parse_log_pytest_options": pytest_options,
    "parse_log_pytest_v2": pytest_v2,
    "parse_log_django": django,
    "parse_log_seaborn": seaborn,
    "parse_log_sympy": sympy,
    "parse_log_matplotlib": matplotlib,
}
_PARSERS_4: dict[str, LogParser] = {
    WHOLE_IDS: pytest_whole_ids,
    "parse_log_pytest": pytest_4,
    "parse_log_pytest_options": pytest_options_4,
    "parse_log_pytest_v2": pytest_v2_4,
    "parse_log_django": django,
    "parse_log_seaborn": seaborn_4,
    "parse_log_sympy": sympy,
    "parse_log_matplotlib": matplotlib_4,
}
_SAME_AS = {
    **dict.fromkeys(
        (f"parse_log_{name}" for name in ["astroid", "flask", "marshmallow", "pvlib", "pyvista", "sqlfluff", "xarray"]),
        "parse_log_pytest",
    ),
    **dict.fromkeys((f"parse_log_{name}" for name in ["pydicom", "requests", "pylint"]), "parse_log_pytest_options"),
    **dict.fromkeys((f"parse_log_{name}" for name in ["astropy", "scikit", "sphinx"]), "parse_log_pytest_v2"),
}

_COLOUR = re.compile(r"\[(\d+)m")
_CONTROLS = dict.fromkeys(range(1, 32))
_COUNT = re.compile(r"\[\d+\]")
_DJANGO_VERSION_TEST = "--version is equivalent to version"
_DJANGO_7188 = "Applying sites.0002_alter_domain_unique...test_no_migrations"
_INTERRUPTED_BY_CHECK = re.compile(
    r"^(.*?)\s\.\.\.\sSystem check identified no issues \(0 silenced\)\nok$", re.MULTILINE
)
_SILENCED_HEAD = re.compile(r"^(.*?)\s\.\.\.\sTesting against Django installed in ", re.MULTILINE)
_SILENCED_TAIL = " silenced).\nok"
_SERVER_ERROR_HEAD = re.compile(r"^(.*?)\s\.\.\.\sInternal Server Error: /", re.MULTILINE)
_SERVER_ERROR_HEADS = (
    re.compile(r"(.*?)[^\S\n]\.\.\.[^\S\n]Internal Server Error: /"),
    re.compile(r"(.*)[^\S\n]\.\.\.\nInternal Server Error: /"),
    re.compile(r"(.*)\n\.\.\.\sInternal Server Error: /"),
)


def _summary(log: str, *, rename: Callable[[str], str] | None = None, counts_are_tests: bool = False) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in log.split("\n"):
        if not line.startswith(STATUSES):
            continue
        if line.startswith(FAILED):
            line = line.replace(" - ", " ")
        words = line.split(None, 2)
        if len(words) < 2 or (_is_count(words) and not counts_are_tests):
            continue
        found[rename(words[1]) if rename else words[1]] = words[0]
    return found


def _is_count(words: list[str]) -> bool:
    """Tell the summary ``SKIPPED [2] file:line: reason`` from a test."""
    return words[0] == SKIPPED and _COUNT.fullmatch(words[1]) is not None


def _last_part_of_path(test: str) -> str:
    opens, closes = test.find("["), test.rfind("]")
    if opens < 0 or closes < opens:
        return test
    option = test[opens + 1 : closes]
    if option.startswith("/") and not option.startswith("//") and "*" not in option:
        option = "/" + option.split("/")[-1]
    return f"{test[:opens]}[{option}]"


def _mouse_buttons(log: str) -> str:
    return log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3")


def _seaborn_line(line: str, words: list[str], found: dict[str, str]) -> None:
    if line.startswith(FAILED):
        found[words[1]] = FAILED
    elif f" {PASSED} " in line:
        if words[1] == PASSED:
            found[words[0]] = PASSED
    elif line.startswith(PASSED):
        found[words[1]] = PASSED


def _interrupted_by_silenced_checks(log: str) -> list[str]:
    """Find ``name ... Testing against Django installed in`` up to a line that ends in ``silenced).``, then ``ok``."""
    names = []
    position = 0
    while head := _SILENCED_HEAD.search(log, position):
        tail = log.find(_SILENCED_TAIL, head.end())
        while tail >= 0 and not _line_ends(log, tail + len(_SILENCED_TAIL)):
            tail = log.find(_SILENCED_TAIL, tail + 1)
        if tail < 0:
            break
        names.append(head[1])
        position = tail + len(_SILENCED_TAIL)
    return names


def _interrupted_by_server_error(log: str) -> list[str]:
    """Find ``name ... Internal Server Error: /path/`` with ``ok`` on the next line."""
    names = []
    position = 0
    while first := _SERVER_ERROR_HEAD.search(log, position):
        # Heads of one line share the end of the line, so that the shortest stands for all; two forms go over its end.
        for form in _SERVER_ERROR_HEADS:
            head = form.match(log, first.start())
            end = log.find("\n", head.end()) if head else -1
            whole = head and end > head.end() and log[end - 1] == "/" and log.startswith("\nok", end)
            if head and whole and _line_ends(log, end + 3):
                names.append(head[1])
                position = end + 3
                break
        else:
            following = log.find("\n", first.start())
            if following < 0:
                break
            position = following + 1
    return names


def _line_ends(log: str, position: int) -> bool:
    return log[position : position + 1] in ("", "\n")

"""Parses the reports of pytest, unittest and SymPy: failing tests, their frames, and errors during collection."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from errata_protocol.detect.python_traceback import Frame

_SUMMARY = re.compile(r"^(?:FAILED|ERROR|SUBFAIL(?:ED)?\b.*?(?= \S+\.py::)) (?P<rest>\S.*)$")
_COUNT = r"\d+ (?:subtests )?[a-z]+"
_COUNTS = re.compile(
    rf"^=* ?(?=.*\b\d+ (?:subtests )?(?:failed|errors?)\b){_COUNT}(?:, {_COUNT})*"
    r" in [\d.]+(?:s| seconds)(?: \([\d:]+\))? ?=*$"
)
_VERBOSE = re.compile(r"^(?P<id>\S+::\S.*?) (?P<status>FAILED|ERROR)\b")
_XDIST = re.compile(r"^\[gw\d+\] \[ *\d+%\] (?P<status>FAILED|ERROR) (?P<id>\S+::\S.*)$")
_SECTION = re.compile(r"^_{3,} (?P<name>.+?) _{3,}$")
_HEADING = re.compile(r"^={3,} (?P<name>.+?) ={3,}$")
_PYTEST_FRAME = re.compile(r"^(?P<file>[^\s:][^:\n]{0,400}):(?P<line>\d{1,9})(?::(?: .*)?)?$")
_TB_LINE = re.compile(r"^(?P<file>/[^:\n]{1,400}\.py):(?P<line>\d{1,9}): .*$")
_NATIVE_FRAME = re.compile(r'^(?:E?\s+)File "(?P<file>[^"]{1,800})", line (?P<line>\d{1,9})')
_CAPTURED = re.compile(r"^-{3,} ?(?:Captured|generated)")
_E_EXCEPTION = re.compile(r"^E\s+(?P<type>[A-Za-z_][\w.]{0,200})(?:: ?(?P<text>.*))?$")
_CONFTEST = re.compile(r"^ImportError while loading conftest '(?P<file>[^']+)'")
_UNIT_CASE = re.compile(r"^(?P<status>FAIL|ERROR): (?P<method>\S+)(?: \((?P<where>[\w.<>]+)\))?(?P<sub>.*)$")
_UNIT_END = re.compile(r"^FAILED \((?:failures|errors|skipped|expected|unexpected)")
_SYMPY_END = re.compile(r"^=+ tests finished: .*\b[1-9]\d* (?:failed|exceptions)\b.* =+$")
_SYMPY_FRAME = re.compile(r'^\s*File "(?P<file>[^"]{1,800})", line (?P<line>\d{1,9})')
_UNIT_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
_SYNTAX_NAMES = ("SyntaxError", "IndentationError", "TabError")
_IMPORT_NAMES = ("ImportError", "ModuleNotFoundError")
MAX_TESTS = 50
MAX_DASHES = 8
"""How many dashes of a summary line are tried as the end of its test id."""


@dataclass(frozen=True, slots=True)
class FailedTest:
    """One failing test, or one file that could not be collected.

    Args:
        test_id: Its id as the runner prints it; None if it prints none.
        frames: Outermost first.
        line: The line of output that names it.
        collection: Whether the file failed before any of its tests ran.
        exception: Class name of the exception, if shown.
        text: Message of the exception, if shown.
    """

    test_id: str | None
    frames: tuple[Frame, ...]
    line: str
    collection: bool = False
    exception: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class TestReport:
    """The failures of one run of a Python test runner; runs without failures have no report."""

    __test__ = False  # not a test class, whatever pytest thinks of the name

    runner: str
    failed: tuple[FailedTest, ...]
    lines: frozenset[str]

    @property
    def collection_failure(self) -> FailedTest | None:
        """The first file that could not be collected because it raised an import or syntax error; None if there is
        none."""
        wanted = (*_SYNTAX_NAMES, *_IMPORT_NAMES)
        return next((t for t in self.failed if t.collection and t.exception in wanted), None)


def is_failure_summary(line: str) -> bool:
    """Return whether ``line`` is pytest's last line and counts failures or errors."""
    return len(line) < 300 and _COUNTS.match(line) is not None


def find_report(lines: Sequence[str]) -> TestReport | None:
    """Return the report of the first test run with failures in ``lines``, pytest before other runners; None without
    one."""
    return _find_pytest(lines) or _find_unittest(lines) or _find_sympy(lines)


def _find_pytest(lines: Sequence[str]) -> TestReport | None:
    end = next((i for i in range(len(lines) - 1, -1, -1) if is_failure_summary(lines[i])), None)
    conftest = next((i for i, line in enumerate(lines) if line.startswith("ImportError while loading conftest")), None)
    if end is None and conftest is None:
        return None
    if end is None:
        assert conftest is not None
        return _conftest_report(lines, conftest)
    sections = _sections(lines[:end])
    cut = _cut_section(lines[:end])
    summary: list[tuple[str, str, str]] = []  # status, the rest of the line, line
    verbose: list[tuple[str, str, str]] = []
    listed = False
    headed = any("short test summary info" in line for line in lines[:end])
    for line in lines[:end]:
        heading = _HEADING.match(line) if line.startswith("===") else None
        if heading:
            listed = "short test summary" in heading.group("name")
        match = _SUMMARY.match(line) if line.startswith(("FAILED ", "ERROR ", "SUBFAIL")) else None
        if match and (listed if headed else "::" in line or ".py" in line):
            summary.append((line.split(" ", 1)[0], match.group("rest"), line))
        elif "::" in line and (seen := _XDIST.match(line) or _VERBOSE.match(line)):
            verbose.append((seen.group("status"), seen.group("id"), line))
    named = summary or verbose
    bare = [m for line in lines[:end] if (m := _TB_LINE.match(line))] if not sections else []
    failed: list[FailedTest] = []
    for status, rest, line in named[:MAX_TESTS]:
        test_id = _summary_id(rest, status, sections) if summary else rest
        section = _section_of(test_id, status, sections) or (cut if len(named) == len(sections) + 1 else ())
        if len(bare) == len(named):  # --tb=line prints one line per failure, in the same order
            section = (bare[len(failed)].group(),)
        failed.append(_failed(test_id, line, section, collection=status == "ERROR" and "::" not in test_id))
    if not named:
        for name, body in sections[:MAX_TESTS]:
            failed.append(_failed(None, f"___ {name} ___", body, collection=name.startswith("ERROR collecting")))
    if not failed:
        failed.append(FailedTest(None, (), lines[end]))
    return TestReport("pytest", tuple(failed), frozenset(lines[: end + 1]))


def _conftest_report(lines: Sequence[str], start: int) -> TestReport:
    body = tuple(lines[start:])
    match = _CONFTEST.match(lines[start])
    failed = _failed(None, lines[start], body, collection=True)
    if not failed.frames and match:
        failed = FailedTest(None, (), lines[start], True, failed.exception or "ImportError", failed.text)
    return TestReport("pytest", (failed,), frozenset(body))


def _sections(lines: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return (heading, body) of the failure sections of a pytest report, without captured output."""
    found: list[tuple[str, list[str]]] = []
    reading = False
    for line in lines:
        match = _SECTION.match(line) if line.startswith("___") else None
        if match and "_ _ _" not in line:
            found.append((match.group("name"), []))
            reading = True
        elif (line.startswith("===") and _HEADING.match(line)) or _CAPTURED.match(line):
            reading = False
        elif reading:
            found[-1][1].append(line)
    return [(name, tuple(body)) for name, body in found]


def _cut_section(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the rest of a failure section whose heading was cut off by `tail`, empty if there is none."""
    body: list[str] = []
    for line in lines:
        if line.startswith(("___", "===")) or _CAPTURED.match(line):
            break
        body.append(line)
    return tuple(body) if any(line.startswith("E  ") for line in body) else ()


def _summary_id(rest: str, status: str, sections: list[tuple[str, tuple[str, ...]]]) -> str:
    """Return the test id of a summary line ``ID - REASON``; the parameters in an id may contain " - " themselves.

    Args:
        rest: The line without its status.
        status: FAILED or ERROR.
        sections: The failure sections; one of their headings names the test.

    Returns:
        The id that matches a section, else the shortest one with balanced brackets.
    """
    cuts = [match.start() for match in itertools.islice(re.finditer(" - ", rest), MAX_DASHES)]
    ids = [*(rest[:at] for at in cuts), rest]
    if len(ids) > 2 or (cuts and "[" in ids[0]):
        named = [i for i in ids if _section_of(i, status, sections)]
        closed = [i for i in ids if "[" not in i or i.endswith("]")]
        return (named or closed or ids)[0]
    return ids[0]


def _section_of(test_id: str, status: str, sections: list[tuple[str, tuple[str, ...]]]) -> tuple[str, ...]:
    place, bracket, parameters = test_id.partition("[")
    name = ".".join(place.split("::")[1:]) + bracket + parameters if "::" in place else test_id
    for heading, body in sections:
        if heading == name or heading in (f"ERROR at setup of {name}", f"ERROR at teardown of {name}"):
            return body
        if heading.startswith("ERROR collecting") and heading.endswith(test_id):
            return body
        if heading == f"[doctest] {name}" or (status.startswith("SUBFAIL") and heading.startswith(f"{name} ")):
            return body
    if "::" not in test_id:
        for heading, body in sections:
            if heading.startswith("ERROR collecting") and test_id.endswith(heading.rsplit("/", 1)[-1]):
                return body
    return ()


def _failed(test_id: str | None, line: str, body: tuple[str, ...], *, collection: bool) -> FailedTest:
    frames: list[Frame] = []
    exception = text = ""
    for item in body:
        native = _NATIVE_FRAME.match(item) if 'File "' in item else None
        if native:
            frames.append(Frame(native.group("file"), int(native.group("line"))))
            continue
        if item[:1] not in ("", " ", ">", "E") or (item.startswith("E") and ".py:" in item[:120]):
            match = _PYTEST_FRAME.match(item) or re.match(
                r"^(?P<file>[^\s:][^:\n]{0,400}\.\w+):(?P<line>\d{1,9}): ", item
            )
            if match:
                frames.append(Frame(match.group("file"), int(match.group("line"))))
                continue
        if item.startswith("E ") and (match := _E_EXCEPTION.match(item)):
            exception, text = match.group("type").rsplit(".", 1)[-1], (match.group("text") or "").strip()
    if not exception and " - " in line:
        match = re.match(r"(?P<type>\w+)(?:: (?P<text>.*))?", line.split(" - ", 1)[1])
        if match:
            exception, text = match.group("type"), match.group("text") or ""
    return FailedTest(test_id, tuple(frames), line, collection, exception, text)


def _find_sympy(lines: Sequence[str]) -> TestReport | None:
    """Return the report of SymPy's own runner (`bin/test`, `bin/doctest`), whose sections are like pytest's."""
    end = next(
        (
            i
            for i in range(len(lines) - 1, -1, -1)
            if "tests finished: " in lines[i] and _SYMPY_END.match(lines[i][:300])
        ),
        None,
    )
    if end is None:
        return None
    failed = [_sympy_failed(name, body) for name, body in _sections(lines[:end])[:MAX_TESTS]]
    return TestReport("sympy", tuple(failed or [FailedTest(None, (), lines[end])]), frozenset(lines[: end + 1]))


def _sympy_failed(name: str, body: Sequence[str]) -> FailedTest:
    """Parse one section: a test (``FILE:test``), a doctest (a dotted name), or a file that could not be imported."""
    frames: list[Frame] = []
    exception = text = ""
    for item in body:
        if match := _SYMPY_FRAME.match(item):
            frames.append(Frame(match.group("file"), int(match.group("line"))))
        elif frames and not exception and (raised := _UNIT_EXCEPTION.match(item)):
            exception, text = raised.group("type").rsplit(".", 1)[-1], raised.group("text") or ""
    return FailedTest(name, tuple(frames), f"___ {name} ___", name.endswith(".py"), exception, text)


def _find_unittest(lines: Sequence[str]) -> TestReport | None:
    if not any(_UNIT_END.match(line) for line in lines if line.startswith("FAILED (")):
        return None
    failed: list[FailedTest] = []
    inside: set[str] = set()
    index = 0
    while index < len(lines):
        match = _UNIT_CASE.match(lines[index]) if index and lines[index - 1].startswith("=====") else None
        if not match or len(failed) >= MAX_TESTS:
            index += 1
            continue
        heading = lines[index]
        where, method = match.group("where") or "", match.group("method")
        body: list[str] = []
        index += 1
        while index < len(lines) and not lines[index].startswith(("=====", "Ran ")):
            body.append(lines[index])
            index += 1
        inside.update(body)
        frames: list[Frame] = []
        exception = text = ""
        for item in body:
            native = re.match(r'^\s+File "(?P<file>[^"]{1,800})", line (?P<line>\d{1,9})', item)
            if native:
                frames.append(Frame(native.group("file"), int(native.group("line"))))
            elif item[:1].isalpha() and (raised := _UNIT_EXCEPTION.match(item)):
                exception, text = raised.group("type").rsplit(".", 1)[-1], raised.group("text") or ""
        broken = "_FailedTest" in where
        failed.append(FailedTest(_unit_id(method, where), tuple(frames), heading, broken, exception, text))
    if not failed:
        end = next(line for line in lines if _UNIT_END.match(line))
        failed.append(FailedTest(None, (), end))
    return TestReport("unittest", tuple(failed), frozenset(inside))


def _unit_id(method: str, where: str) -> str:
    """Return ``module.Class.method``, which newer Pythons print; older ones print the class alone."""
    if not where:
        return method
    if where.rsplit(".", 1)[-1] == method:
        return where
    return f"{where}.{method}"

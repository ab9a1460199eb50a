"""Judges the log of a test run as the benchmark does, and writes logs in its format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from errata_protocol.errors import InvalidRequest

from ..dataset import Instance
from .log_parsers import (
    ERROR,
    FAILED,
    PASSED,
    RULES,
    SKIPPED,
    WHOLE_IDS,
    XFAIL,
    LogUnreadable,
    parse_log,
    parser_name,
)

START = ">>>>> Start Test Output"
END = ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"
STOPPED = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
"""Any of these texts in a log makes the run invalid."""

Status = Literal["RESOLVED_FULL", "RESOLVED_PARTIAL", "RESOLVED_NO"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tests of one list, by whether they had the result that the list requires.

    Args:
        success: Tests that did, in the order of the list.
        failure: Tests that did not; one that the log does not name is among them.
    """

    success: tuple[str, ...] = ()
    failure: tuple[str, ...] = ()

    @property
    def fraction(self) -> float:
        """Share of the successes in [0, 1]; 1.0 of an empty list, as in the benchmark."""
        total = len(self.success) + len(self.failure)
        return len(self.success) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class Resolution:
    """The verdict of the benchmark's rules on a log.

    Args:
        instance_id: The instance.
        status: ``RESOLVED_FULL``: every test of both lists; ``RESOLVED_PARTIAL``: some FAIL_TO_PASS and every
            PASS_TO_PASS; ``RESOLVED_NO``: anything else.
        fail_to_pass: Outcome of FAIL_TO_PASS.
        pass_to_pass: Outcome of PASS_TO_PASS.
        statuses: Status by test, as the parser read it.
        invalid: Reason why the run counts as not evaluated, with all its tests as failures; empty for a valid run.
        exit_code: Exit status of the test command, where it is known.
        rules: Version of swebench whose rules these are.
        infra_reason: Signature of a broken environment in the log of an invalid run; rules 5 only. It is advice.
        infra_failure: Whether the signature is one that no patch plausibly causes.
    """

    instance_id: str
    status: Status
    fail_to_pass: Outcome
    pass_to_pass: Outcome
    statuses: Mapping[str, str] = field(repr=False)
    invalid: str = ""
    exit_code: int | None = None
    rules: str = RULES[5]
    infra_reason: str = ""
    infra_failure: bool = False

    @property
    def resolved(self) -> bool:
        """Whether the instance is resolved: `status` is ``RESOLVED_FULL``."""
        return self.status == "RESOLVED_FULL"


def compose_log(output: str, exit_code: int | None, before: str = "") -> str:
    """Return a log as the benchmark's evaluation script leaves it.

    Args:
        output: Output of the test command, standard output and error together.
        exit_code: Exit status of the test command; None if it was killed at its time limit.
        before: Text before the output, on how the patches were applied.
    """
    head = before if not before or before.endswith("\n") else before + "\n"
    body = output if not output or output.endswith("\n") else output + "\n"
    tail = "" if exit_code is None else f"{EXIT_CODE}: {exit_code}\n"
    return f"{head}{START}\n{body}{END}\n{tail}"


def recorded_exit_code(log: str) -> int | None:
    """Return the exit status that a log records, as swebench 5 reads it; None without one.

    Raises:
        LogUnreadable: It has more digits than Python takes for a number.
    """
    found = _EXIT_CODE.search(log)
    if not found:
        return None
    try:
        return int(found[1])
    except ValueError as error:
        raise LogUnreadable(f"an exit code of {len(found[1])} digits") from error


def forged_markers(output: str) -> tuple[str, ...]:
    """Return the benchmark's own markers that a test command printed: no honest test does.

    Args:
        output: Output of the test command, without the markers that `compose_log` adds.
    """
    return tuple(marker for marker in (START, END, EXIT_CODE, *STOPPED) if marker in output)


def statuses_in(instance: Instance, output: str, rules: int, runner: str) -> dict[str, str]:
    """Return the status of each test that the output of a test command names; nothing where the reader stops.

    Args:
        instance: Instance that gives the repository of the tests and, for rules 5, the name of the parser.
        output: Output of the test command.
        rules: Version of the benchmark's rules, 5 or 4.
        runner: Name of the test runner, from the recipe.
    """
    text = output.replace("\r\n", "\n").replace("\r", "\n")
    try:
        return parse_log(text, parser_name(instance.repo, instance.log_parser if rules == 5 else "", runner), rules)
    except LogUnreadable:
        return {}


def judge(
    instance: Instance, log: str, exit_code: int | None = None, rules: int = 5, *, runner: str = "pytest"
) -> Resolution:
    """Return the verdict of the benchmark's rules on the log of a test run.

    Args:
        instance: Instance with the lists of tests, the repository and, for rules 5, the parser and kind of evaluation.
        log: The whole log with the benchmark's markers; see `compose_log`.
        exit_code: Exit status of the test command, where the log does not record it. Rules 4 look at neither.
        rules: Version of the benchmark's rules, 5 (swebench 5.0.2) or 4 (4.1.0).
        runner: Test runner that the recipe names; it chooses the parser for repositories unknown to the benchmark.

    Raises:
        InvalidRequest: There are no such rules, or no such parser.
    """
    if rules not in RULES:
        raise InvalidRequest(f"rules {rules!r}: there are {', '.join(map(str, RULES))}")
    content = log.replace("\r\n", "\n").replace("\r", "\n")  # the benchmark reads a file of text
    name = parser_name(instance.repo, instance.log_parser if rules == 5 else "", runner)
    try:
        recorded = recorded_exit_code(content) if rules == 5 else None
        exit_code = exit_code if recorded is None else recorded
        statuses, invalid = _read(content, name, exit_code, rules)
    except LogUnreadable as error:
        statuses, invalid = {}, f"the benchmark's reader stops with an exception: {error}"
    if invalid:
        reason, broken = classify(content) if rules == 5 else ("", False)
        return Resolution(
            instance_id=instance.instance_id,
            status="RESOLVED_NO",
            fail_to_pass=Outcome(failure=instance.fail_to_pass),
            pass_to_pass=Outcome(failure=instance.pass_to_pass),
            statuses={},
            invalid=invalid,
            exit_code=exit_code,
            rules=RULES[rules],
            infra_reason=reason,
            infra_failure=broken,
        )
    fail_only = rules == 5 and instance.eval_type == "fail_only"
    cut = rules == 5 or name == WHOLE_IDS
    outcomes = []
    for tests, pass_to_pass in ((instance.fail_to_pass, False), (instance.pass_to_pass, True)):
        success: list[str] = []
        failure: list[str] = []
        for test in tests:
            key = logged_name(test, statuses, cut)
            done = _failed_not(test, statuses) if fail_only else _passed(statuses.get(key or ""), pass_to_pass, rules)
            if done is not None:
                (success if done else failure).append(test)
        outcomes.append(Outcome(tuple(success), tuple(failure)))
    return Resolution(
        instance_id=instance.instance_id,
        status=_status(*outcomes),
        fail_to_pass=outcomes[0],
        pass_to_pass=outcomes[1],
        statuses=statuses,
        exit_code=exit_code,
        rules=RULES[rules],
    )


def classify(log: str) -> tuple[str, bool]:
    """Search a log for the signature of a broken environment (swebench 5).

    Returns:
        (name of the signature, whether a patch is unlikely to cause it); ``("", False)`` for a log without one.
    """
    for reason, broken, pattern in _SIGNATURES:
        if pattern.search(log):
            return reason, broken
    return "", False


_EXIT_CODE = re.compile(rf"{re.escape(EXIT_CODE)}:\s*(-?\d+)")
_PASSING = (PASSED, XFAIL)
_RAN = re.compile(
    r"Executed [1-9]\d* of \d+"
    r"|TOTAL: [1-9]\d* (?:SUCCESS|FAILED)"
    r"|Tests:\s+[1-9]"
    r"|Test Suites:\s+(?:\d+ \w+, )*[1-9]\d* total"
    r"|^# tests [1-9]"
    r"|': ok$",
    re.MULTILINE,
)
_RAN_COUNT = re.compile(r"(?<!\d)(\d++)(?: passing| specs?, \d+ failures?)")
"""Apart from the others, because a search for it from every digit of a long number would take quadratic time."""

_SIGNATURES = tuple(
    (reason, broken, re.compile(pattern, re.MULTILINE))
    for reason, broken, pattern in (
        ("browser_launch_failed", True, r"Failed to launch|Failed to connect to the bus"),
        ("display_unavailable", True, r"cannot open display|Missing X server|unable to open X display"),
        ("out_of_memory", True, r"Cannot allocate memory|OutOfMemoryError|^Killed$"),
        ("container_unavailable", True, r"Error response from daemon|Cannot connect to the Docker daemon"),
        ("network_unreachable", True, r"Could not resolve host|Temporary failure in name resolution"),
        ("missing_module", False, r"Cannot find module|MODULE_NOT_FOUND|ModuleNotFoundError"),
        ("no_tests_collected", False, r"no tests ran|collected 0 items"),
        ("tests_timed_out", False, r"Timeout error: \d+ seconds exceeded"),
    )
)


def _read(content: str, name: str, exit_code: int | None, rules: int) -> tuple[dict[str, str], str]:
    """Return the status of every test, and why the run is invalid."""
    for text in STOPPED:
        if text in content:
            return {}, f"the log holds {text!r}"
    if START not in content or END not in content:
        return {}, "the log lacks the markers around the test output: the test command was not reached, or not left"
    statuses = parse_log(content.split(START)[1].split(END)[0], name, rules)
    if not statuses:
        statuses = parse_log(content, name, rules)
    if rules == 5:
        if not statuses and not _ran(content):
            return {}, "the log names no test and does not show that any ran"
        failed = any(status in (FAILED, ERROR) for status in statuses.values())
        if exit_code not in (None, 0) and statuses and not failed:
            return {}, f"the test command ended with {exit_code}, and the log names no test that failed"
    return statuses, ""


def _ran(content: str) -> bool:
    if _RAN.search(content):
        return True
    return any(set(found[1]) & set("123456789") for found in _RAN_COUNT.finditer(content))


def logged_name(test: str, statuses: Mapping[str, str], cut: bool) -> str | None:
    """Return the name under which the log has a test; None where it has none.

    Args:
        test: Id of the test, as the instance lists it.
        statuses: Status of each test in the log.
        cut: Whether an id may be cut off inside its parameter. Such a one stands for the tests of the log that begin
            with it, if all of them passed or none did; the first of them is returned.
    """
    if test in statuses:
        return test
    if cut and test.count("[") > test.count("]"):
        begins = [name for name in statuses if name.startswith(test)]
        if begins and len({statuses[name] in _PASSING for name in begins}) == 1:
            return begins[0]
    return None


def _passed(status: str | None, pass_to_pass: bool, rules: int) -> bool | None:
    """Return whether the benchmark counts a test as passed; None if it does not count the test at all.

    ``PASSED`` and ``XFAIL`` are passed; ``FAILED``, ``ERROR`` and a test that the log does not name are failed. A
    skipped test is passed in PASS_TO_PASS and failed in FAIL_TO_PASS under ``rules`` 5, and not counted under 4. A test
    with any other status is not counted.

    Args:
        status: Status of the test in the log; None where the log does not name it.
        pass_to_pass: The test is of PASS_TO_PASS; else of FAIL_TO_PASS.
        rules: 5 or 4.
    """
    if status in _PASSING:
        return True
    if status == SKIPPED and rules == 5:
        return pass_to_pass  # a test that is skipped is no regression, and no repair
    return False if status in (None, FAILED, ERROR) else None


def _failed_not(test: str, statuses: Mapping[str, str]) -> bool:
    return statuses.get(test) != FAILED


def _status(fail_to_pass: Outcome, pass_to_pass: Outcome) -> Status:
    if pass_to_pass.fraction == 1:
        if fail_to_pass.fraction == 1:
            return "RESOLVED_FULL"
        if fail_to_pass.fraction > 0:
            return "RESOLVED_PARTIAL"
    return "RESOLVED_NO"

"""Reports of test runners other than pytest, unittest and SymPy: the first failing test, and its part of the report.

A line of code is looked for in that part alone: the rest of the report belongs to other tests, some of which passed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from errata_protocol.detect.jvm_runners import JVM_RUNNERS
from errata_protocol.detect.runner import Runner, above, below, until

_GO_LOG = re.compile(r"^=== (?:RUN|CONT|NAME|PAUSE) +(?P<id>\S+)")
_GO_VERDICT = re.compile(r"^\s*--- (?P<verdict>[A-Z]+): (?P<id>\S+)")
GO_NOT_BUILT = re.compile(r"^FAIL\t\S+ \[build failed\]$")
_GO_PACKAGE = re.compile(r"^(?:ok  |FAIL|\?   )\t")


def _go_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the log of a test and of its failed subtests, these first: they are why it failed.

    A log stands below the verdict; with ``-v`` it stands before it, below ``=== RUN`` and the like. If the test
    panicked, the frames of its goroutine come before all logs.
    """
    start = next((i + 1 for i in range(first - 1, -1, -1) if _GO_PACKAGE.match(lines[i])), 0)
    package = until(lines[start:], first - start, _GO_PACKAGE)
    package = (*lines[start:first], *package)
    verdicts = [m for line in package if (m := _GO_VERDICT.match(line)) and m["verdict"] == "FAIL"]
    subtests = {m["id"] for m in verdicts if m["id"].startswith(f"{test['id']}/")}
    logs: dict[str, list[str]] = {}
    name = ""
    frames: Sequence[str] = ()
    panicked = False
    for index, line in enumerate(package):
        if panicked and line.startswith("goroutine "):  # the stacks stand at the end
            frames = _go_frames(logs.get(name, ()), package[index:])
            break
        panicked = panicked or line.startswith("panic: ")
        if heading := _GO_LOG.match(line) or _GO_VERDICT.match(line):
            name, panicked = heading["id"], False
        elif name in subtests or name == test["id"]:
            logs.setdefault(name, []).append(line)
    own = logs.pop(test["id"], [])
    deepest_first = sorted(logs, key=lambda each: -each.count("/"))
    return [*frames, *(line for each in deepest_first for line in logs[each]), *own]


_GO_FRAME = re.compile(r"^\t(?P<file>/\S+\.go):\d+(?: \+0x[0-9a-f]+)?$")
_GO_STARTS_TESTS = "testing/testing.go"


def _go_frames(log: Sequence[str], stacks: Sequence[str]) -> Sequence[str]:
    """Return the frames of the test that panicked, innermost first, without those of Go and of modules.

    Empty if the panic is not the test's: only one that the test's own goroutine met is ``[recovered]``.

    Args:
        log: The lines from the test's verdict to the first stack.
        stacks: The lines from there on; the first stack is that of the goroutine that panicked.
    """
    if not any("[recovered" in line for line in log):
        return ()
    end = next((i for i, line in enumerate(stacks) if not line), len(stacks))
    frames = [(match["file"], line) for line in stacks[:end] if (match := _GO_FRAME.match(line))]
    root = next((f.removesuffix(_GO_STARTS_TESTS) for f, _ in frames if f.endswith(f"/{_GO_STARTS_TESTS}")), None)
    foreign = ("/pkg/mod/", "/vendor/", *([root] if root else []))
    return [line for file, line in frames if not any(part in file for part in foreign)]


_RUST_PANIC = re.compile(r"panicked at (?:'.*', )?(?P<file>[^\s:]+\.rs):(?P<line>\d+)")
_CARGO_NAME = re.compile(r"^test (?P<name>.+) \.\.\. FAILED")
_CARGO_END = re.compile(r"^---- .* ----$|^failures:$")


def _cargo_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return what a test printed; without such a section the line in which its thread panicked."""
    name = _CARGO_NAME.match(lines[first])
    names = {test["id"], name["name"] if name else test["id"]}
    headings = {f"---- {each} {stream} ----" for each in names for stream in ("stdout", "stderr")}
    at = next((i for i in range(first, len(lines)) if lines[i] in headings), None)
    if at is not None:
        return until(lines, at + 1, _CARGO_END)
    return [line for line in lines if line.startswith(f"thread '{test['id']}' ")]


_JEST_END = re.compile(r"^\s*● |^(?:FAIL|PASS) |^Test Suites: ")
_JEST_FILE_END = re.compile(r"^(?:FAIL|PASS) |^Test Suites: ")


def _jest_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the report of a test, or of a file that failed as a whole."""
    return until(lines, first + 1, _JEST_END if "id" in test.groupdict() else _JEST_FILE_END)


_VITEST_FAILED = re.compile(r"^\s*FAIL +\S")
_VITEST_END = re.compile(r"^\s*FAIL +\S|^⎯+\[\d+/\d+\]⎯|^\s*(?:Test Files|Tests) +\d")


def _vitest_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the report of a failure; the tests that failed with the same one are listed together above it."""
    del test
    if not _VITEST_FAILED.match(lines[first]):
        return ()
    start = next((i for i in range(first, len(lines)) if not _VITEST_FAILED.match(lines[i])), len(lines))
    return until(lines, start, _VITEST_END)


_MOCHA_FAILED = re.compile(r"^\s+\d+ failing$")
_MOCHA_TEST = re.compile(r"^\s+(?P<number>\d+)\) ")


def _mocha_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the details of a failure, which has the same number there as in the list of tests."""
    del test
    at = next((i for i, line in enumerate(lines) if _MOCHA_FAILED.match(line)), len(lines))
    listed = _MOCHA_TEST.match(lines[first])
    for index in range(max(at, first), len(lines)):
        detailed = _MOCHA_TEST.match(lines[index])
        if detailed and listed and detailed["number"] == listed["number"]:
            return until(lines, index + 1, _MOCHA_TEST)
    return ()


_NODE_END = re.compile(r"^\s*(?:not )?ok \d|^\s*[✖✔▶] |^test at ")


def _node_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the details of a failure: below `failing tests:` where the reporter has that list."""
    at = next((i for i, line in enumerate(lines) if line == "✖ failing tests:"), None)
    if at is not None and first < at:
        named = (i for i in range(at + 1, len(lines)) if (m := _NODE_TEST.match(lines[i])) and m["id"] == test["id"])
        first = next(named, len(lines))
    return until(lines, first + 1, _NODE_END)


_RSPEC_NUMBER = re.compile(r"^  \d+\) ")
_RSPEC_END = re.compile(r"^  \d+\) |^Finished in |^Failed examples:")


def _rspec_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the details of a failure, which stand above and have the description of the test's line."""
    del test
    description = lines[first].partition(" # ")[2]
    for index, line in enumerate(lines[:first]):
        number = _RSPEC_NUMBER.match(line)
        if number and description and line[number.end() :] == description:
            return until(lines, index + 1, _RSPEC_END)
    return ()


def _prove_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the diagnostics in which a test file names itself; they stand before the summary, or on another stream."""
    del first
    return [line for line in lines if line.startswith("#") and f" at {test['id']} line " in line]


_EXUNIT_END = re.compile(r"^ +\d+\) \S|^Finished in ")


def _exunit_part(lines: Sequence[str], first: int, test: re.Match[str]) -> Sequence[str]:
    """Return the details of a failure, first the frames: below the test's name stands where it begins."""
    del test
    part = until(lines, first + 1, _EXUNIT_END)
    frames = next((i for i, line in enumerate(part) if line.strip() == "stacktrace:"), len(part))
    return [*part[frames:], *part]


_NODE_FILE = r"(?P<file>/[^():\s]+|[^():\s]+\.\w+):(?P<line>\d+):\d+"
_NODE_FRAME = re.compile(rf"^\s+at (?:.*\()?(?:file://)?{_NODE_FILE}\)?$")
_NODE_TEST = re.compile(r"^\s*(?:not ok \d+ - |✖ (?!failing tests:$))(?P<id>.*?)(?: \([\d.]+ms\))?$")
_TAP_FRAME = re.compile(r"^# +(?:at|in test file|\(in test file) (?P<file>\S+?),? line (?P<line>\d+)")

RUNNERS = (
    Runner(
        "go test",
        re.compile(r"^(?:--- FAIL: |FAIL\t)"),
        (re.compile(r"^\s*--- FAIL: (?P<id>\S+)"),),
        re.compile(r"^(?:\s+(?=\S+:\d+:(?: |$))|\t(?=/\S+:\d+(?: \+0x\w+)?$))(?P<file>[\w./-]+\.go):(?P<line>\d+)"),
        _go_part,
        not_run=GO_NOT_BUILT,
    ),
    Runner(
        "cargo test",
        re.compile(r"^test result: FAILED\."),
        (
            re.compile(r"^test (?P<id>\S+)(?: - .*)? \.\.\. FAILED"),
            re.compile(r"^(?P<id>\S+)(?: - .*)? --- FAILED"),  # with -q, as the next two
            re.compile(r"^---- (?P<id>\S+)(?: - .*)? std(?:out|err) ----$"),
            re.compile(r"^    (?P<id>[\w:]+)$"),
        ),
        _RUST_PANIC,
        _cargo_part,
    ),
    Runner(
        "cargo nextest",
        re.compile(r"^\s*Summary \[[^\]]*\] .*\b[1-9]\d* failed"),
        (re.compile(r"^\s*(?:TRY \d+ )?FAIL \[[^\]]*\] (?:\([^()]*\) )?(?P<id>\S.*)"),),
        _RUST_PANIC,
        below(r"^\s+(?:PASS|FAIL|SLOW|Summary) \["),
    ),
    Runner(
        "jest",
        re.compile(r"^(?:Test Suites|Tests): +\d+ failed"),
        (
            re.compile(r"^ +● (?!Console$|Test suite failed to run$|Cannot log after tests are done)(?P<id>.*\S)"),
            re.compile(r"^\s*FAIL +(?:\S+ )?(?P<file>[^\s:]+\.\w+)(?: \([\d.]+ m?s\))?$"),
        ),
        re.compile(rf"^\s+at (?:.*\()?{_NODE_FILE}\)?$"),
        _jest_part,
    ),
    Runner(
        "vitest",
        re.compile(r"^\s*(?:Test Files|Tests) +\d+ failed"),
        (
            re.compile(r"^\s*FAIL +(?P<id>\S.* > .*\S)"),
            re.compile(r"^\s*FAIL +(?P<file>\S+\.\w+) \[ "),
            re.compile(r"^\s+(?:×|❯(?= \S.* > )) (?P<id>.*?\S)(?: \d+ms)?$"),
        ),
        re.compile(rf"^ +❯ (?:\S+ )?{_NODE_FILE}$"),
        _vitest_part,
    ),
    Runner(
        "mocha",
        _MOCHA_FAILED,
        (
            re.compile(r"^ {4,}\d+\) (?P<id>.*\S)"),
            re.compile(r"^  \d+\) (?P<id>.*\S):$"),
            re.compile(r"^  \d+\) "),  # a suite, where the reporter prints no list of tests
        ),
        _NODE_FRAME,
        _mocha_part,
        whole_file=re.compile(r"^\s+Error: Timeout of \d+ms exceeded\..* \((?P<file>/[^():]+)\)$"),
    ),
    Runner(
        "node --test",
        re.compile(r"^(?:# |ℹ )fail [1-9]"),
        (_NODE_TEST,),
        re.compile(r"(?:^\s+at (?:.*\()?(?:file://)?|location: ')(?P<file>/[^():\s]+):(?P<line>\d+):\d+"),
        _node_part,
    ),
    Runner(
        "deno test",
        re.compile(r"^FAILED \| \d+ passed"),
        (re.compile(r"^(?P<id>\S.*) => \S+:\d+:\d+$"), re.compile(r"^(?P<id>\S.*) \.\.\. FAILED \(")),
        _NODE_FRAME,
        below(r"^\S.* => \S+:\d+:\d+$|^ FAILURES|^FAILED \| "),
    ),
    Runner(
        "bun test",
        re.compile(r"^ +[1-9]\d* fail$"),
        (re.compile(r"^(?:✗|\(fail\)) (?P<id>.*?\S)(?: \[[\d.]+m?s\])?$"),),
        _NODE_FRAME,
        above(r"^(?:[✓✗]|\((?:pass|fail)\)) |^\S+:$"),
    ),
    Runner(
        "jasmine",
        re.compile(r"^\d+ specs?, [1-9]\d* failures?"),
        (re.compile(r"^\d+\) (?P<id>\S.*)"),),
        _NODE_FRAME,
        below(r"^\d+\) |^\d+ specs?, "),
    ),
    Runner(
        "playwright",
        re.compile(r"^ +[1-9]\d* failed$"),
        (re.compile(r"^ +\d+\) (?P<id>\S.*:\d+:\d+ › .*?)(?: ─+)?$"),),
        _NODE_FRAME,
        below(r"^ +\d+\) .*:\d+:\d+ › |^ +\d+ failed$"),
    ),
    Runner(
        "TAP",
        re.compile(r"^not ok \d+"),
        (re.compile(r"^not ok \d+(?!.*# (?:TODO|todo)\b) -? ?(?P<id>.*\S)"),),
        _TAP_FRAME,
        below(r"^\s*(?:not )?ok \d"),
    ),
    Runner(
        "rspec",
        re.compile(r"^\d+ examples?, [1-9]\d* failures?"),
        (re.compile(r"^(?:rspec|crystal spec) '?(?P<id>[^\s']+(?::\d+|\]))"),),
        re.compile(r"^\s+# (?P<file>(?:\./|spec/)\S+?):(?P<line>\d+)(?::|$)"),
        _rspec_part,
    ),
    Runner(
        "test-unit",
        re.compile(r"^\d+ tests, \d+ assertions, (?:[1-9]\d* failures|\d+ failures, [1-9]\d* errors), .*pendings"),
        (re.compile(r"^(?:Failure|Error): (?P<id>test[\w: ]*\([\w:]+\))"),),
        re.compile(r"(?P<file>[\w./-]+\.rb):(?P<line>\d+)"),
        below(r"^=====|^(?:Failure|Error|Omission|Pending|Notification): |^\d+ tests, "),
    ),
    Runner(
        "minitest",
        re.compile(r"^\d+ (?:runs|tests), \d+ assertions, (?:[1-9]\d* failures|\d+ failures, [1-9]\d* errors)"),
        (re.compile(r"^(?P<id>[A-Za-z][^#\[]*#(?:.+?(?= \[[^\]\[]+:\d+\]:|:$)|\w+)|test_\w+\([\w:]+\))"),),
        re.compile(r"\[?(?P<file>[\w./-]+\.rb):(?P<line>\d+)\]?"),
        below(r"^\s*(?:\d+\) )?(?:Failure|Error|Skipped|Omission|Pending):|^\d+ (?:runs|tests), "),
        heading=re.compile(r"^\s*(?:\d+\) )?(?:Failure|Error):$"),
    ),
    Runner(
        "ctest",
        re.compile(r"^\d+% tests passed, [1-9]\d* tests? failed"),
        (re.compile(r"^\s+\d+ - (?P<id>\S.*) \((?!Disabled|Skipped)[^()]*\)(?!.* \()"),),
    ),
    Runner(
        "prove",
        re.compile(r"^Result: FAIL$"),
        (re.compile(r"^(?P<id>\S+\.t)\s+\(Wstat: "),),
        _TAP_FRAME,
        _prove_part,
    ),
    Runner(
        "doctest",
        re.compile(r"^\*\*\*Test Failed\*\*\* "),
        (re.compile(r'^File "[^"]+", line \d+, in (?P<id>\S+)$'),),
        re.compile(r'^File "(?P<file>[^"]+)", line (?P<line>\d+), in '),
        lambda lines, first, test: (lines[first],),
    ),
    *JVM_RUNNERS,
    Runner(
        "phpunit",
        re.compile(r"^Tests: \d+, Assertions: \d+, (?:Failures|Errors): [1-9]"),
        (re.compile(r"^\d+\) (?P<id>\S+::\S+)"),),
        re.compile(r"^(?P<file>/\S+\.php):(?P<line>\d+)$"),
        below(r"^\d+\) |^--$"),
    ),
    Runner(
        "pest",
        re.compile(r"^  Tests: +[1-9]\d* failed"),
        (re.compile(r"^   (?:FAILED|⨯) +(?P<id>\S.*\S)"),),
        re.compile(r"^  at (?P<file>[^\s:]+\.php):(?P<line>\d+)$"),
        below(r"^   FAILED +|^  Tests: "),
    ),
    Runner(
        "googletest",
        re.compile(r"^\[  FAILED  \] \d+ tests?"),
        (re.compile(r"^\[  FAILED  \] (?P<id>\S+\.\S+?)(?: \(\d+ ms\))?$"),),
        re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+): Failure$"),
        above(r"^\[ RUN      \] "),
    ),
    Runner(
        "catch2, doctest.h, boost.test",
        re.compile(
            r"^(?:\[doctest\] )?test cases: .*\b[1-9]\d* failed|^\*\*\* [1-9]\d* failures? (?:is|are) detected in "
        ),
        (
            re.compile(r'^\S+\(\d+\): (?:fatal )?error: in "(?P<id>[^"]+)": '),
            re.compile(r"^\S+:\d+: (?:FAILED|(?:FATAL )?ERROR):"),
        ),
        re.compile(r"^(?P<file>[^\s:(]+)[:(](?P<line>\d+)\)?: "),
        lambda lines, first, test: (lines[first],),
    ),
    Runner(
        "XCTest",
        re.compile(r"^\s*Executed \d+ tests?, with [1-9]\d* failures?"),
        (re.compile(r"^/[^:]+:\d+: error: (?P<id>-\[[^\]]+\]|\S+) : "),),
        re.compile(r"^(?P<file>/[^:]+):(?P<line>\d+): error: "),
        lambda lines, first, test: (lines[first],),
    ),
    Runner(
        "swift testing",
        re.compile(r"^\S Test run with \d+ tests?\b.* failed after "),
        (re.compile(r"^\S Test (?P<id>.+?) recorded an issue"),),
        re.compile(r" at (?P<file>[^\s:]+\.swift):(?P<line>\d+)"),
        lambda lines, first, test: (lines[first],),
    ),
    Runner(
        "dart test",
        re.compile(r"^\d\d:\d\d .*: Some tests failed\.$"),
        (re.compile(r"^\d\d:\d\d [-+~\d ]+: (?P<id>.*\S) \[E\]$"),),
        re.compile(r"^(?:\s+|#\d+ .*\((?:file://)?)(?P<file>[^\s:()]+\.dart)[ :](?P<line>\d+)"),
        below(r"^\d\d:\d\d [-+~\d ]+: "),
    ),
    Runner(
        "ExUnit",
        re.compile(r"^(?:\d+ \w+, )*\d+ tests?, (?:[1-9]\d* failures?(?:,|$)|0 failures, .*\b[1-9]\d* invalid)"),
        (
            re.compile(r"^ +\d+\) (?P<id>\S.* \([\w.]+\))$"),
            re.compile(r"^ +\d+\) (?P<id>[\w.]+): failure on setup_all callback"),
        ),
        re.compile(r"^ +(?P<file>[^\s:()]+\.exs?):(?P<line>\d+)(?::|$)"),
        _exunit_part,
    ),
    Runner(
        "hspec",
        re.compile(r"^\d+ examples?, [1-9]\d* failures?"),
        (re.compile(r"^  \d+\) (?P<id>\S.*)"),),
        re.compile(r"^  (?P<file>\S+\.hs):(?P<line>\d+):\d+:$"),
        above(r"^\s*$"),
        heading=re.compile(r"^  \S+\.hs:\d+:\d+:$"),
    ),
    Runner(
        "bats",
        re.compile(r"^\d+ tests?, [1-9]\d* failures?"),
        (re.compile(r"^ ✗ (?P<id>\S.*)"),),
        re.compile(r"in (?:test )?file (?P<file>[^\s,]+), line (?P<line>\d+)"),
        below(r"^ [✓✗-] "),
    ),
    Runner(
        "clojure.test",
        re.compile(r"^(?:[1-9]\d* failures?, \d+ errors?|0 failures, [1-9]\d* errors?)\."),
        (re.compile(r"^(?:FAIL|ERROR) in \((?P<id>\S+)\) \("),),
        re.compile(r"\((?P<file>[\w./-]+\.clj[cs]?):(?P<line>\d+)\)$"),
        lambda lines, first, test: (lines[first],),
    ),
    Runner(
        "julia",
        re.compile(r"^ERROR: .*Some tests did not pass: "),
        (re.compile(r"^(?:\S+: )?(?:Test Failed|Error During Test) at \S+:\d+$"),),
        re.compile(r" at (?P<file>\S+):(?P<line>\d+)$"),
        lambda lines, first, test: (lines[first],),
    ),
    Runner(
        "busted",
        re.compile(r"^\d+ success(?:es)? / (?:[1-9]\d* failures?|0 failures / [1-9]\d* errors?)\b"),
        (re.compile(r"^(?:Failure|Error) → \S+ @ \d+$"),),
        re.compile(r"^(?P<file>[^\s:]+\.lua):(?P<line>\d+): "),
        below(r"^(?:Failure|Error|Pending) → "),
    ),
    Runner(
        "EUnit",
        re.compile(r"^\d+ tests, [1-9]\d* failures|^  Failed: [1-9]\d*\. "),
        (
            re.compile(r"^ +\d+\) (?P<id>\w+:\w+/\d+)"),
            re.compile(r"^\s*(?P<id>\w+: ?(?:\d+: )?\w+).*\.\.\.\*failed\*$"),
        ),
        re.compile(r"(?:%% |\()(?P<file>[^\s:(),]+\.erl)(?::|, line )(?P<line>\d+)"),
        below(r"^ +\d+\) |^Finished in |\.\.\.\*failed\*$|^====="),
    ),
    Runner(
        "dotnet test",
        re.compile(r"^Failed!  - Failed: +[1-9]|^Test Run Failed\.$"),
        (re.compile(r"^\s+Failed (?P<id>\S.*?) \[(?:< )?\d[\d.,msh ]*\]$"),),
        # Packages name the files of the machine that built them.
        re.compile(r"^\s+at .* in (?!/_/|/home/runner/|/__w/)(?P<file>/[^:]+\.(?:cs|fs|vb)):line (?P<line>\d+)$"),
        below(r"^\s+(?:Failed|Passed|Skipped) \S.* \[|^Failed!  - |^Test Run Failed\.$|^\[xUnit\.net "),
    ),
)

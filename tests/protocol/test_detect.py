"""The detectors by rule: what fires, where the site is, what must not fire, and how long it takes."""

# ruff: noqa: E501  (a table row is one case; wrapped rows cannot be compared by eye)

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from errata_protocol.detect import RULES, detect, output_truncated, path_refused, tool_not_found
from errata_protocol.detect.place import _in_words
from errata_protocol.detect.python_traceback import _HEADLESS_LINES, MAX_TRACEBACKS, _read, find_tracebacks
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import HINT_TEMPLATE_KEYS, NOTHING_WRONG, Detection, ErrorKind
from tests.counted_work import Costs, calls_of, processor_s

ROOT = Path(__file__).resolve().parents[2]
PYTEST_TAIL = """\
=========================== short test summary info ============================
FAILED tests/test_a.py::TestA::test_x[1-2] - assert 1 == 2
1 failed, 3 passed in 0.02s
"""


def find(command: str, exit_code: int | None, stderr: str = "", stdout: str = "", **more: object) -> Detection:
    return detect(command, exit_code, stdout, stderr, cwd="/workspace", **more)  # type: ignore[arg-type]


def spanned(command: str, detection: Detection) -> str | None:
    site = detection.error_site
    return command[slice(*site.action_span)] if site and site.action_span else None


# One row per family: command, exit code, stderr, kind, text of the span
MESSAGES = [
    ("head -c abc f", 1, "head: invalid number of bytes: ‘abc’", "invalid_arguments", "abc"),
    ("ls -la --colour f", 2, "ls: unrecognized option '--colour'", "invalid_arguments", "--colour"),
    ("git switch -c", 129, "error: switch `c' requires a value\nusage: git switch", "invalid_arguments", "git switch -c"),
    ("git status --shrt", 129, "error: unknown option `shrt'\nusage: git status", "invalid_arguments", "--shrt"),
    ("git show abc", 128, "fatal: ambiguous argument 'abc': unknown revision", "invalid_arguments", "abc"),
    ("grep '[a' f", 2, "grep: Unmatched [, [^, [:, [., or [=", "invalid_arguments", "[a"),
    ("rg '(a' f", 2, "regex parse error:\n    (a\n    ^\nerror: unclosed group", "invalid_arguments", "(a"),
    ("x.py --n=q", 2, "usage: x.py [-h]\nx.py: error: argument --n: invalid int value: 'q'", "invalid_arguments", "q"),
    ("flask rnu", 2, "Usage: flask [OPTIONS]\n\nError: No such command 'rnu'.", "invalid_arguments", "rnu"),
    ("flask --app nope run", 2, "Usage: flask run\nTry 'flask run --help' for help.\n\nError: Could not import 'nope'.", "invalid_arguments", "nope"),
    ("git apply no.diff", 128, "error: can't open patch 'no.diff': No such file or directory", "path_not_found", "no.diff"),
    ("git apply -p3 f.diff", 128, "error: unable to find filename in patch at line 1", "patch_failed", "f.diff"),
    ("git am f.diff", 128, "Patch format detection failed.", "patch_failed", "f.diff"),
    ("patch -p1 -i fix.patch -d dir", 2, "patch: **** malformed patch at line 3: x", "patch_failed", "fix.patch"),
    ("patch --input='a b.patch' -d dir", 2, "patch: **** malformed patch at line 3: x", "patch_failed", "a b.patch"),
    ("patch -Nsifix.patch", 2, "patch: **** malformed patch at line 3: x", "patch_failed", "fix.patch"),
    ("patch -d dir a.txt fix.patch", 2, "patch: **** malformed patch at line 3: x", "patch_failed", "fix.patch"),
    ("patch -d dir < fix.patch", 2, "patch: **** malformed patch at line 3: x", "patch_failed", "fix.patch"),
    ("git -C repo apply --directory src -p 2 f.diff", 128, "error: corrupt patch at line 5", "patch_failed", "f.diff"),
    ("git -C repo apply - < f.diff", 128, "error: corrupt patch at line 5", "patch_failed", "f.diff"),
    ("cargo bild", 101, "error: no such command: `bild`", "invalid_arguments", "bild"),
    ("find . -mtime x", 1, "find: invalid argument `x' to `-mtime'", "invalid_arguments", "x"),
    ("pytest t -k", 4, "ERROR: usage: pytest\npytest: error: argument -k: expected one argument", "invalid_arguments", "-k"),
    ("mkdir", 1, "mkdir: missing operand\nTry 'mkdir --help' for more information.", "invalid_arguments", "mkdir"),
    ("mv a no/b", 1, "mv: cannot move 'a' to 'no/b': No such file or directory", "path_not_found", "no/b"),
    ("cat 'a b'", 1, "cat: 'a b': No such file or directory", "path_not_found", "a b"),
    ("cat a\\ b", 1, "cat: 'a b': No such file or directory", "path_not_found", "a\\ b"),
    ("dd if=in of=out", 1, "dd: failed to open 'in': No such file or directory", "path_not_found", "in"),
    ("cat x; cat y", 1, "cat: x: No such file or directory\ncat: y: No such file or directory", "path_not_found", "y"),
    ("cat x y", 1, "cat: x: No such file or directory\ncat: y: No such file or directory", "path_not_found", "x"),
    ("sh x.sh", 2, "sh: 0: cannot open x.sh: No such file", "path_not_found", "x.sh"),
    ("bash x.sh", 127, "bash: x.sh: No such file or directory", "path_not_found", "x.sh"),
    ("git checkout dev", 1, "error: pathspec 'dev' did not match any file(s) known to git", "path_not_found", "dev"),
    ("cp f /usr/bin/", 1, "cp: cannot create regular file '/usr/bin/f': Permission denied", "permission_denied", "/usr/bin/"),
    ("sudo -n rm x", 1, "sudo: a password is required", "permission_denied", None),
    ("env nope", 127, "env: ‘nope’: No such file or directory", "command_not_found", "nope"),
    ("ls | xargs nope -x", 127, "xargs: nope: No such file or directory", "command_not_found", "nope"),
    ("timeout 3 nope", 127, "timeout: failed to run command ‘nope’: No such file or directory", "command_not_found", "nope"),
    ("echo command; nope", 127, "/bin/bash: line 1: nope: command not found", "command_not_found", "nope"),
    ("sh -c 'nope a'", 127, "sh: 1: nope: not found", "command_not_found", "nope"),
    ("./x.sh", 127, "/bin/bash: line 1: ./x.sh: cannot execute: required file not found", "command_not_found", "./x.sh"),
    ("./x.sh", 127, "/usr/bin/env: ‘python3\\r’: No such file or directory", "command_not_found", "./x.sh"),
    ("curl -s http://a.example/x", 6, "curl: (6) Could not resolve host: a.example", "policy_violation", "http://a.example/x"),
    ("curl -s http://a.example/x", 6, "", "policy_violation", "http://a.example/x"),
    ("ssh u@h.example ls", 255, "ssh: Could not resolve hostname h.example: Name or service", "policy_violation", "h.example"),
    ("python3 -m nope", 1, "/usr/bin/python3: No module named nope", "import_error", "nope"),
    ("node x.js", 1, "Error: Cannot find module '/workspace/x.js'", "import_error", "x.js"),
    ("perl -MA::B -e 1", 2, "Can't locate A/B.pm in @INC (you may need): BEGIN failed", "import_error", "A::B"),
    ("sed 's/a/b' f", 1, "sed: -e expression #1, char 5: unterminated `s' command", "syntax_error", "s/a/b"),
    ("perl -ne 'print if /([a-z/' f", 255, "Unmatched [ in regex; marked by <-- HERE in m/([ <-- HERE a-z/ at -e line 1.", "syntax_error", "print if /([a-z/"),
    ("awk '/([a-z/' f", 2, "awk: cmd. line:1: error: Unmatched [, [^, [:, [., or [=: /([a-z/", "syntax_error", "/([a-z/"),
    ("sqlite3 a.db 'SELEC 1;'", 1, 'Error: in prepare, near "SELEC": syntax error (1)', "syntax_error", "SELEC 1;"),
    ("sqlite3 a.db 'SELEC 1;'", 1, 'Parse error near line 1: near "SELEC": syntax error\n  SELEC 1;', "syntax_error", "SELEC 1;"),
    ("echo 'SELEC 1;' | sqlite3 a.db", 1, 'Parse error near line 1: near "SELEC": syntax error', "syntax_error", "SELEC 1;"),
    ("sqlite3 a.db <<E\nselect 1;\n selec 2;\nE", 1, 'Parse error near line 2: near "selec": syntax error', "syntax_error", "selec 2;"),
    ("psql -c 'SELEC 1;'", 1, 'ERROR:  syntax error at or near "SELEC"', "syntax_error", "SELEC 1;"),
    ("kill -0 99; exit 7", 7, "", "nonzero_exit", "kill -0 99; exit 7"),
    ("curl http://127.0.0.1:9/", 7, "curl: (7) Failed to connect to 127.0.0.1 port 9: refused", "nonzero_exit", "curl http://127.0.0.1:9/"),
    ("ulimit -f 1; head -c 9999 /dev/zero > f", 153, "", "resource_limit", "ulimit -f 1; head -c 9999 /dev/zero > f"),
    ("timeout -s KILL 1 sleep 2", 137, "", "timeout", "timeout -s KILL 1 sleep 2"),
    ("make all2", 2, "make: *** No rule to make target 'all2'.  Stop.", "build_error", "all2"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "exit_code", "stderr", "kind", "text"), MESSAGES)
def test_a_message_gives_its_kind_and_the_word_at_fault(
    command: str, exit_code: int, stderr: str, kind: str, text: str | None
) -> None:
    found = find(command, exit_code, stderr)
    assert (found.error_kind, spanned(command, found)) == (kind, text)
    assert found.severity == "error"
    assert found.hint_template_key == HINT_TEMPLATE_KEYS[ErrorKind(kind)]


@pytest.mark.parametrize(
    "command",
    [
        "git -C repo apply <<'E'\nx\nE",
        "patch -p1 -d dir <<'E'\nx\nE",
        "patch a.txt <<'E'\nx\nE",
        "cat x | patch -d dir",
    ],
)
def test_no_word_is_taken_for_the_file_of_a_patch_that_comes_from_standard_input(command: str) -> None:
    found = find(command, 2, "patch: **** malformed patch at line 3: x")
    assert found.error_kind == ErrorKind.PATCH_FAILED
    site = found.error_site
    assert site is not None and site.line == 3 and site.action_span is None


# command, exit code, output (on both streams' usual one), kind, file, line, test id
PLACES = [
    ("gcc a.c", 1, "a.c: In function 'f':\na.c:4:3: error: expected ';'\na.c:9:1: error: x", "build_error", "a.c", 4, None),
    ("cargo build", 101, "error[E0308]: mismatched types\n --> src/main.rs:2:5\n  |\nerror: could not compile `x`", "build_error", "src/main.rs", 2, None),
    ("cd g && go build", 1, "# example.com/g\n./main.go:4:14: undefined: x", "build_error", "main.go", 4, None),
    ("npx tsc", 2, "src/a.ts(3,5): error TS2322: Type 'x'", "build_error", "src/a.ts", 3, None),
    ("dotnet build", 1, "  Determining projects to restore...\n/workspace/Program.cs(5,13): error CS0103: The name 'x' does not exist in the current context [/workspace/app.csproj]\n\nBuild FAILED.\n\n/workspace/Program.cs(5,13): error CS0103: The name 'x' does not exist in the current context [/workspace/app.csproj]\n    0 Warning(s)\n    1 Error(s)", "build_error", "Program.cs", 5, None),
    ("dotnet test", 1, "  app failed with 1 error(s) (0.4s)\n    /workspace/src/Lib.fs(3,9): error FS0039: The value 'y' is not defined.", "build_error", "src/Lib.fs", 3, None),
    ("msbuild a.sln", 1, "src/a.cpp(7): error C2065: 'z': undeclared identifier", "build_error", "src/a.cpp", 7, None),
    ("cmake .", 1, "CMake Error at CMakeLists.txt:3 (find_package):\n  x", "build_error", "CMakeLists.txt", 3, None),
    ("make", 2, "make: *** [Makefile:7: all] Error 1", "build_error", "Makefile", 7, None),
    ("git apply p", 1, "error: patch failed: a/b.txt:12\nerror: a/b.txt: patch does not apply", "patch_failed", "a/b.txt", 12, None),
    ("bash s.sh", 1, "s.sh: line 3: X: unbound variable", "runtime_error", "s.sh", 3, None),
    ("ruby r.rb", 1, "r.rb:3:in `f': undefined local variable `x' (NameError)\n\tfrom r.rb:6:in `<main>'", "runtime_error", "r.rb", 3, None),
    ("go run m.go", 1, "panic: index out of range\n\ngoroutine 1 [running]:\nmain.main()\n\t/workspace/m.go:5 +0x1d\nexit status 2", "runtime_error", "m.go", 5, None),
    ("cargo run", 101, "thread 'main' panicked at src/main.rs:3:5:\noops", "runtime_error", "src/main.rs", 3, None),
    ("java Run", 1, 'Exception in thread "main" java.lang.Foo: x\n\tat java.base/java.util.A.b(A.java:9)\n\tat Run.f(Run.java:2)', "runtime_error", "Run.java", 2, None),
    ("go test ./...", 1, "--- FAIL: TestAdd (0.00s)\n    add_test.go:7: got 3\nFAIL\nFAIL\texample\t0.002s", "test_failure", "add_test.go", 7, "TestAdd"),
    ("cargo test", 101, "test tests::works ... FAILED\n\nthread 'tests::works' panicked at src/lib.rs:9:9:\nx\ntest result: FAILED. 0 passed", "test_failure", "src/lib.rs", 9, "tests::works"),
    ("python3 x.py", 1, "Traceback (most recent call last):\n  File \"/workspace/x.py\", line 3, in <module>\n    open('n')\nFileNotFoundError: [Errno 2] No such file or directory: 'n'", "path_not_found", "x.py", 3, None),
]  # fmt: skip


@pytest.mark.parametrize(("command", "exit_code", "text", "kind", "file", "line", "test_id"), PLACES)
def test_a_report_gives_its_kind_and_place(
    command: str, exit_code: int, text: str, kind: str, file: str, line: int, test_id: str | None
) -> None:
    for found in (find(command, exit_code, stderr=text), find(command, exit_code, stdout=text)):
        site = found.error_site
        assert site is not None
        assert (found.error_kind, site.file, site.line, site.test_id) == (kind, file, line, test_id)


NOTHING = [
    ("grep x f", 1, "", ""),
    ("cat missing | grep x", 1, "cat: missing: No such file or directory", ""),
    ("[ -f x ] && cat x", 1, "", ""),
    ("test -d a && echo yes", 1, "", ""),
    ("for f in *; do grep -q x $f; done", 1, "", ""),
    ("type nope", 1, "/bin/bash: line 1: type: nope: not found", ""),
    ("bash -c 'diff a b'", 1, "", "1c1"),
    ("x=$(grep a f)", 1, "", ""),
    ("! grep -q x f", 1, "", ""),
    ("ls | xargs grep x", 123, "", ""),
    ("git -C d diff --quiet", 1, "", ""),
    ("jq -e .a f", 1, "", "null"),
    ("pytest -q -k none", 5, "", "3 deselected in 0.01s"),
    ("cat app.log | tail", 0, "", "Traceback (most recent call last):\nValueError: x"),
    ("cat report.txt", 0, "", PYTEST_TAIL),
    ("python3 x.py || true", 0, 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nE: x', ""),
]


@pytest.mark.parametrize(("command", "exit_code", "stderr", "stdout"), NOTHING)
def test_answers_and_data_are_no_errors(command: str, exit_code: int, stderr: str, stdout: str) -> None:
    assert find(command, exit_code, stderr, stdout) == NOTHING_WRONG


ERRORS_IN_SPITE_OF_AN_ANSWERING_PROGRAM = [
    ("grep x < f", 1, "/bin/bash: line 1: f: No such file or directory", "path_not_found"),
    ("cd d && grep x f", 1, "/bin/bash: line 1: cd: d: No such file or directory", "path_not_found"),
    ("grep x f", 2, "grep: f: No such file or directory", "path_not_found"),
    ("let 1/0", 1, '/bin/bash: line 1: let: 1/0: division by 0 (error token is "0")', "runtime_error"),
    ("set -u; [[ $A ]]", 1, "/bin/bash: line 1: A: unbound variable", "runtime_error"),
    ("diff a", 2, "diff: missing operand after 'a'", "invalid_arguments"),
    ("cat app.log; exit 3", 3, "", "nonzero_exit"),
]


@pytest.mark.parametrize(("command", "exit_code", "stderr", "kind"), ERRORS_IN_SPITE_OF_AN_ANSWERING_PROGRAM)
def test_an_answering_program_that_could_not_work_is_an_error(
    command: str, exit_code: int, stderr: str, kind: str
) -> None:
    assert find(command, exit_code, stderr, "MemoryError\nNo such file or directory\n").error_kind == kind


def test_a_test_id_keeps_the_dashes_and_colons_of_its_parameters() -> None:
    for name in ("t[x - y]", "t[a::b]", "t[[1] - 2]", "K::t[a - b::c-0]"):
        heading = name.partition("[")[0].replace("::", ".") + name[name.index("[") :]
        body = f"=== FAILURES ===\n___ {heading} ___\n\n>   assert 0\nE   assert 0\n\na.py:3: AssertionError\n"
        text = f"{body}=== short test summary info ===\nFAILED a.py::{name} - assert 0 - 1\n1 failed in 0.02s\n"
        site = find("pytest -q", 1, stdout=text).error_site
        assert site is not None
        assert (site.test_id, site.file, site.line) == (f"a.py::{name}", "a.py", 3)
        bare = find("pytest -q --tb=no", 1, stdout=text.removeprefix(body)).error_site
        assert bare is not None and bare.test_id is not None and bare.test_id.startswith("a.py::")


def test_reports_of_old_pytest_of_xdist_and_of_subtests_are_read() -> None:
    section = "=== FAILURES ===\n___ t{} ___\n\n>   assert 0\nE   assert 0\n\na.py:3: AssertionError\n"
    old = find("pytest | tail", 0, stdout=section.format("") + "=== 1 failed, 2 passed in 0.02 seconds ===\n")
    assert old.error_kind == ErrorKind.TEST_FAILURE
    spread = find(
        "pytest -n2", 1, stdout="[gw1] [ 50%] FAILED a.py::t[a b] \n" + section.format("[a b]") + "1 failed in 1s\n"
    )
    assert spread.error_site is not None and spread.error_site.test_id == "a.py::t[a b]"
    summary = "SUBFAIL a.py::t - [m] (i=1) - AssertionError\n1 failed in 1s\n"
    part = find("pytest", 1, stdout=section.format(" [m] (i=1)") + "=== short test summary info ===\n" + summary)
    assert part.error_site is not None
    assert (part.error_site.test_id, part.error_site.line) == ("a.py::t", 3)


PYTEST_9_SUBTESTS = """\
uuFu.                                                                    [100%]
=================================== FAILURES ===================================
__________________________ test_a [custom msg] (i=1) ___________________________

>               assert i == 0
E               assert 1 == 0

test_s.py:5: AssertionError
____________________________________ test_a ____________________________________
contains 1 failed subtest
___________________________ T.test_u (i=1, j=(1, 2)) ___________________________

>               self.assertEqual(i, 0)
E               AssertionError: 1 != 0

test_s.py:18: AssertionError
=========================== short test summary info ============================
SUBFAILED[custom msg] (i=1) test_s.py::test_a - assert 1 == 0
FAILED test_s.py::test_a - contains 1 failed subtest
SUBFAILED(i=1, j=(1, 2)) test_s.py::T::test_u - AssertionError: 1 != 0
"""


@pytest.mark.parametrize(
    "counts",
    [
        "3 failed, 2 passed, 3 subtests passed in 1.63s",
        "=================== 3 failed, 1 subtests passed in 0.02s ===================",
        "2 subtests failed, 1 passed, 1 subtests skipped, 2 warnings in 61.02s (0:01:01)",
    ],
)
def test_the_report_of_pytest_9_with_subtests_is_a_test_report(counts: str) -> None:
    found = find("pytest -q", 1, stdout=f"{PYTEST_9_SUBTESTS}{counts}\n")
    assert found.error_kind == ErrorKind.TEST_FAILURE
    assert [(s.test_id, s.file, s.line) for s in found.error_sites] == [
        ("test_s.py::test_a", "test_s.py", 5),
        ("test_s.py::test_a", None, None),
        ("test_s.py::T::test_u", "test_s.py", 18),
    ]
    hidden = find("python -m pytest -q | tail -3", 0, stdout=PYTEST_9_SUBTESTS[-130:] + counts)
    assert hidden.error_kind == ErrorKind.TEST_FAILURE


def test_subtests_that_passed_are_no_failure() -> None:
    for counts in ("2 passed, 3 subtests passed in 0.01s", "1 passed, 1 subtests skipped in 0.01s"):
        assert find("pytest -q | tail -3", 0, stdout=counts) == NOTHING_WRONG


def test_the_report_of_sympys_runner_is_a_test_report() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "/workspace/m/tests/test_b.py", line 5, in test_x\n    assert 0\n'
    )
    text = f"m/tests/test_b.py[2] .F [FAIL]\n____ m/tests/test_b.py:test_x ____\n{trace}AssertionError\n\n"
    found = find("./bin/test m/tests", 1, stdout=text + "=== tests finished: 1 passed, 1 failed, in 0.05 seconds ===\n")
    assert found.error_kind == ErrorKind.TEST_FAILURE and found.error_site is not None
    assert (found.error_site.test_id, found.error_site.line) == ("m/tests/test_b.py:test_x", 5)


def test_a_file_that_sympys_runner_cannot_import_is_an_import_error_at_its_line() -> None:
    head = "m/tests/test_b.py[?]   Failed to import   [FAIL]\n\n____ /testbed/m/tests/test_b.py ____\n"
    trace = 'Traceback (most recent call last):\n  File "/testbed/m/tests/test_b.py", line 3, in <module>\n    from m import q\n'
    end = "ImportError: cannot import name 'q'\n\n=== tests finished: 0 passed, 1 exceptions, in 0.00 seconds ===\n"
    found = detect("bin/test m", 1, head + trace + end, "", cwd="/testbed")
    assert found.error_kind == ErrorKind.IMPORT_ERROR and found.error_site is not None
    assert (found.error_site.file, found.error_site.line) == ("m/tests/test_b.py", 3)


def test_a_doctest_of_sympys_runner_is_placed_at_its_example() -> None:
    text = '____ m.f.trailing ____\nFile "/testbed/m/f.py", line 180, in m.f.trailing\nFailed example:\n    f(1)\nExpected:\n    1\nGot:\n    0\n'
    found = detect(
        "bin/doctest m", 1, text + "\n== tests finished: 3 passed, 1 failed, in 0.6 seconds ==\n", "", cwd="/testbed"
    )
    site = found.error_site
    assert site is not None and (site.test_id, site.file, site.line) == ("m.f.trailing", "m/f.py", 180)


def test_a_section_whose_heading_is_cut_off_belongs_to_the_one_test_without_a_section() -> None:
    cut = ">       assert a == 2\nE       assert 1 == 2\n\ntests/test_a.py:7: AssertionError\n"
    found = find("pytest | tail -9", 0, stdout=cut + PYTEST_TAIL)
    assert found.error_site is not None and (found.error_site.file, found.error_site.line) == ("tests/test_a.py", 7)
    more = PYTEST_TAIL.replace("1 failed", "2 failed").replace(
        "FAILED", "FAILED tests/test_b.py::test_y - x\nFAILED", 1
    )
    several = find("pytest | tail -9", 0, stdout=cut + more).error_site
    assert several is not None and several.file is None  # which of the two it belongs to, nobody can say


def test_a_test_that_unittest_does_not_know_is_placed_in_the_action() -> None:
    text = f"E\n{'=' * 70}\nERROR: test_q (unittest.loader._FailedTest)\n{'-' * 70}\nAttributeError: type object 'T' has no attribute 'test_q'\n\n{'-' * 70}\nRan 1 test in 0.000s\n\nFAILED (errors=1)\n"
    action = "./runtests.py app.tests.T.test_q"
    found = find(action, 1, text)
    assert found.error_kind == ErrorKind.TEST_FAILURE and spanned(action, found) == "app.tests.T.test_q"
    assert found.error_site is not None and found.error_site.test_id == "app.tests.T.test_q"


def test_a_message_of_several_lines_keeps_the_place_of_its_traceback() -> None:
    trace = 'Traceback (most recent call last):\n  File "/workspace/a.py", line 2, in <module>\n    load("b")\n'
    text = trace + "lib.LoadError: cannot load 'b'. Possible reasons:\n\n- no such file;\n\nOriginal exception:\n\n"
    found = find("python a.py", 1, text + "ModuleNotFoundError: No module named 'b'\n")
    assert found.error_kind == ErrorKind.IMPORT_ERROR and found.error_site is not None
    assert (found.error_site.file, found.error_site.line) == ("a.py", 2)


def test_an_address_in_inline_code_is_the_site_also_if_a_file_of_the_work_tree_opens_it() -> None:
    code = "python -c \"import requests; requests.get('http://httpbin.org/get')\""
    frames = 'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n  File "/workspace/requests/api.py", line 9, in get\n    return 1\n'
    found = find(
        code, 1, frames + "requests.exceptions.ConnectionError: gaierror(-3, 'Temporary failure in name resolution')\n"
    )
    assert spanned(code, found) == "http://httpbin.org/get"


def test_a_program_read_from_a_file_is_placed_in_that_file() -> None:
    awk = find("awk -f s.awk data", 1, "awk: s.awk:3: }\nawk: s.awk:3: ^ syntax error").error_site
    assert awk is not None and (awk.file, awk.line) == ("s.awk", 3)
    runs = find(
        "awk -f s.awk data", 2, "awk: s.awk:4: (FILENAME=data FNR=1) fatal: division by zero attempted"
    ).error_site
    assert runs is not None and (runs.file, runs.line) == ("s.awk", 4)
    jq = "jq -f q.jq data.json"
    found = find(jq, 3, "jq: error: syntax error, unexpected '}' at <top-level>, line 4:\n}\njq: 1 compile error")
    assert spanned(jq, found) == "q.jq" and found.error_site is not None and found.error_site.line == 4
    sql = "sqlite3 a.db < s.sql"
    found = find(sql, 1, 'Parse error near line 3: near "SELEC": syntax error')
    assert spanned(sql, found) == "s.sql" and found.error_site is not None and found.error_site.line == 3


def test_a_later_answer_does_not_hide_a_failed_test_run() -> None:
    command = "pytest -q 2>&1 | tee log; test ${PIPESTATUS[0]} -eq 0"
    assert find(command, 1, stdout=PYTEST_TAIL).error_kind == ErrorKind.TEST_FAILURE
    assert find(command, 1, stdout="3 passed in 0.02s\n") == NOTHING_WRONG


def test_a_program_called_by_its_path_is_not_the_tool_of_that_name() -> None:
    for command in ("./test", "bin/diff a b", "./grep x", "../which"):
        assert find(command, 1).error_kind == ErrorKind.NONZERO_EXIT
    for command in ("/usr/bin/test -e a", "/bin/grep x f", "diff a b"):
        assert find(command, 1) == NOTHING_WRONG


def test_a_crash_of_pytest_itself_is_placed_in_the_agents_hook() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/usr/lib/python3/dist-packages/pluggy/x.py", line 9, in run',
    ]
    lines += [
        '  File "/workspace/conftest.py", line 4, in pytest_collection_modifyitems',
        "    items.x",
        "AttributeError: x",
    ]
    found = find("pytest", 3, stdout="".join(f"INTERNALERROR> {line}\n" for line in lines))
    assert found.error_kind == ErrorKind.RUNTIME_ERROR and found.error_site is not None
    assert (found.error_site.file, found.error_site.line) == ("conftest.py", 4)


def test_a_file_that_the_action_wrote_is_mapped_into_its_here_document() -> None:
    script = "cat > /tmp/j.sh <<'EOF'\nset -e\n  grpe x\nEOF\nbash /tmp/j.sh"
    found = find(script, 127, "/tmp/j.sh: line 2: grpe: command not found")
    assert spanned(script, found) == "grpe"
    program = "tee a.py <<'EOF'\nx = {}\nprint(x['k'])\nEOF\npython3 a.py"
    trace = "Traceback (most recent call last):\n  File \"/workspace/a.py\", line 2, in <module>\nKeyError: 'k'"
    found = find(program, 1, trace)
    assert spanned(program, found) == "print(x['k'])"
    assert found.error_site is not None and found.error_site.file == "a.py"
    appended = program.replace("tee a.py", "cat >> a.py")
    assert spanned(appended, find(appended, 1, trace)) is None


def test_a_hidden_test_failure_counts_only_when_pytest_ran() -> None:
    found = find("pytest -q | tail -3", 0, stdout=PYTEST_TAIL)
    assert found.error_kind == "test_failure"
    assert found.error_site is not None and found.error_site.test_id == "tests/test_a.py::TestA::test_x[1-2]"
    assert find("./run.sh | tail -3", 0, stdout=PYTEST_TAIL) == NOTHING_WRONG
    assert find("pytest -q; echo done", 0, stdout=PYTEST_TAIL + "done\n") == NOTHING_WRONG


def test_code_in_the_action_is_mapped_to_its_line() -> None:
    command = "cd d\npython3 - <<'EOF'\nimport os\n    \nif os:\n    print(os.x)\nEOF"
    trace = 'Traceback (most recent call last):\n  File "<stdin>", line 4, in <module>\nAttributeError: x'
    found = find(command, 1, trace)
    assert spanned(command, found) == "print(os.x)"
    command = "python3 -c \"é = 1\nraise X('é')\""
    trace = 'Traceback (most recent call last):\n  File "<string>", line 2, in <module>\nNameError: X'
    assert spanned(command, find(command, 1, trace)) == "raise X('é')"


def test_the_last_exception_of_a_chain_counts() -> None:
    trace = (
        'Traceback (most recent call last):\n  File "/workspace/a.py", line 1, in f\nFileNotFoundError: [Errno 2]\n\n'
    )
    trace += "During handling of the above exception, another exception occurred:\n\n"
    trace += 'Traceback (most recent call last):\n  File "/workspace/a.py", line 9, in g\nRuntimeError: no config\n'
    found = find("python3 a.py", 1, trace)
    assert found.error_kind == "runtime_error"
    assert found.error_site is not None and found.error_site.line == 9


HANDLED = """\
ERROR:root:no config, using defaults
Traceback (most recent call last):
  File "/workspace/app.py", line 5, in load
    open("conf.json")
{}
"""
FATAL = """\
Traceback (most recent call last):
  File "/workspace/app.py", line 20, in <module>
    main()
  File "/workspace/app.py", line 15, in main
    check(cfg)
{}
"""


@pytest.mark.parametrize(
    "handled",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: 'conf.json'",
        "PermissionError: [Errno 13] Permission denied: 'conf.json'",
        "OSError: [Errno 28] No space left on device",
        "ModuleNotFoundError: No module named 'yaml'",
    ],
)
@pytest.mark.parametrize("command", ["python3 app.py", "cd /workspace && python3 app.py"])
def test_a_logged_exception_gives_way_to_the_one_that_ended_the_program(command: str, handled: str) -> None:
    found = find(command, 1, HANDLED.format(handled) + FATAL.format("KeyError: 'x'"))
    assert found.error_kind == ErrorKind.RUNTIME_ERROR and found.error_site is not None
    assert (found.error_site.file, found.error_site.line) == ("app.py", 15)
    ignored = "Exception ignored in: <function A.__del__ at 0x7f>\n" + HANDLED.partition("\n")[2].format(handled)
    found = find(command, 1, FATAL.format("KeyError: 'x'") + ignored)
    assert found.error_kind == ErrorKind.RUNTIME_ERROR and found.error_site is not None
    assert found.error_site.line == 15


def test_the_exception_of_a_thread_alone_is_the_error() -> None:
    text = "Exception in thread Thread-1 (run):\n" + FATAL.format("FileNotFoundError: [Errno 2] No such file: 'x'")
    assert find("python3 app.py", 1, text).error_kind == ErrorKind.PATH_NOT_FOUND


@pytest.mark.parametrize(
    "message",
    [
        "ValueError: invalid configuration:\n  - timeout: must be an integer\n  - path: /etc/x.conf does not exist",
        "RuntimeError: compile failed:\nmain.c:3:5: error: expected ';' before 'return'\nbash: foo: command not found",
        "ValueError: x\nwhile reading a.yml: permission denied",  # a note of add_note
    ],
)
@pytest.mark.parametrize(
    "command",
    ["python3 app.py", "cd /workspace && python app.py", "./app.py 2>&1 | tail -20; exit 1", "uv run python app.py"],
)
def test_the_message_of_an_exception_is_no_message_of_a_program(command: str, message: str) -> None:
    text = FATAL.format(message)
    found = find(command, 1, stdout=text) if "2>&1" in command else find(command, 1, text)
    assert found.error_kind == ErrorKind.RUNTIME_ERROR and found.error_site is not None
    assert (found.error_site.file, found.error_site.line) == ("app.py", 15)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("python3 app.py; cat x", FATAL.format("ValueError: a") + "cat: x: No such file or directory"),
        ("python3 a.py; python3 b.py", FATAL.format("ValueError: a") + "b.py: x does not exist"),
        ("python3 app.py", HANDLED.format("ValueError: a") + "app.py: error: /etc/x.conf does not exist"),
    ],
)
def test_what_another_program_says_after_a_traceback_is_a_message(command: str, text: str) -> None:
    assert find(command, 1, text).error_kind == ErrorKind.PATH_NOT_FOUND


LOGGING_ERROR = """\
--- Logging error ---
Traceback (most recent call last):
  File "/usr/lib/python3.12/logging/__init__.py", line 1160, in emit
    msg = self.format(record)
          ^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.12/logging/__init__.py", line 392, in getMessage
    msg = msg % self.args
          ~~~~^~~~~~~~~~~
TypeError: not all arguments converted during string formatting
Call stack:
  File "/workspace/main.py", line 5, in <module>
    logging.warning("cannot open a.yml: permission denied", 3)
Message: 'cannot open a.yml: permission denied'
Arguments: (3,)
"""
CHAINED_LOGGING_ERROR = LOGGING_ERROR.replace(
    "Call stack:",
    "\nDuring handling of the above exception, another exception occurred:\n\n"
    'Traceback (most recent call last):\n  File "/workspace/main.py", line 3, in __str__\n    raise KeyError("k")\n'
    "KeyError: 'k'\nCall stack:",
)
USAGE = "usage: main.py [-h]\nmain.py: error: unrecognized arguments: --x\n"


@pytest.mark.parametrize("logging_error", [LOGGING_ERROR, CHAINED_LOGGING_ERROR])
def test_an_error_of_logging_is_not_what_ended_the_program(logging_error: str) -> None:
    found = find("python main.py --x", 2, logging_error + USAGE)
    assert found.error_kind == ErrorKind.INVALID_ARGUMENTS and found.error_site is not None
    assert found.error_site.action_span == (15, 18)
    found = find("python main.py", 1, logging_error + "cannot open config.yml: No such file or directory\n")
    assert found.error_kind == ErrorKind.PATH_NOT_FOUND
    for text in (logging_error + FATAL, FATAL + logging_error):
        found = find("python main.py", 1, text.format("KeyError: 'x'"))
        assert found.error_kind == ErrorKind.RUNTIME_ERROR and found.error_site is not None
        assert (found.error_site.file, found.error_site.line) == ("app.py", 15)
    assert find("python main.py", 3, logging_error).error_kind == ErrorKind.NONZERO_EXIT


@pytest.mark.parametrize("exit_code", [1, 2])
@pytest.mark.parametrize("usage", [USAGE, USAGE.partition("\n")[2]])
def test_a_usage_after_a_printed_exception_is_the_error(exit_code: int, usage: str) -> None:
    found = find("python main.py --x", exit_code, FATAL.format("ValueError: bad cache:\n  line 3") + usage)
    assert found.error_kind == ErrorKind.INVALID_ARGUMENTS and found.error_site is not None
    assert found.error_site.action_span == (15, 18)


def test_what_a_program_says_after_the_exception_of_a_thread_is_a_message() -> None:
    thread = "Exception in thread Thread-1 (run):\n" + FATAL.format("ValueError: a")
    message = "cannot open config.yml: No such file or directory\n"
    assert find("python main.py", 1, thread + message).error_kind == ErrorKind.PATH_NOT_FOUND
    # An exception that ends a program gives 1.
    assert find("python main.py", 2, FATAL.format("ValueError: a") + message).error_kind == ErrorKind.PATH_NOT_FOUND


def test_the_message_of_an_error_of_node_is_no_message_of_a_program() -> None:
    text = "/workspace/b.js:1\nthrow e;\n^\n\nError: boom\ncat: x: No such file or directory\n"
    text += "    at g (/workspace/b.js:1:27)\n    at node:internal/main/run_main_module:28:49\n\nNode.js v20.20.2\n"
    found = find("node b.js", 1, text)
    assert found.error_kind == ErrorKind.RUNTIME_ERROR and found.error_site is not None
    assert (found.error_site.file, found.error_site.line) == ("b.js", 1)


@pytest.mark.parametrize(
    "warning",
    [
        "/workspace/app.py:3: SyntaxWarning: invalid escape sequence '\\d'\n  x = '\\d'",
        "/usr/lib/python3/dist-packages/pandas/io.py:12: FutureWarning: The argument 'infer' is deprecated.\n  f(x)",
        "sys:1: ResourceWarning: unclosed file: no such file or directory",
    ],
)
def test_a_warning_of_python_is_not_what_failed(warning: str) -> None:
    found = find("python3 app.py", 1, f"{warning}\n" + FATAL.format("ZeroDivisionError: division by zero"))
    assert found.error_kind == ErrorKind.RUNTIME_ERROR and found.error_site is not None
    assert found.error_site.line == 15
    missing = find("python3 app.py", 1, f"{warning}\napp.py: error: x.conf does not exist")
    assert missing.error_kind == ErrorKind.PATH_NOT_FOUND


def test_a_regular_expression_that_does_not_parse_is_told_from_one_that_a_run_made() -> None:
    text = "/workspace/x.js:1\nx\n^\n\nSyntaxError: Invalid regular expression: /[/: Unterminated character class\n"
    parses = "    at wrapSafe (node:internal/modules/cjs/loader:1024:16)\n\nNode.js v20.1.0\n"
    runs = "    at new RegExp (<anonymous>)\n    at Object.<anonymous> (/workspace/x.js:1:1)\n"
    assert find("node x.js", 1, text + parses).error_kind == ErrorKind.SYNTAX_ERROR
    assert find("node x.js", 1, text + runs).error_kind == ErrorKind.RUNTIME_ERROR


@pytest.mark.parametrize("command", ["node app.js; cat notes >&2; exit 1", "node app.js 2>&1; cat notes; exit 1"])
def test_prose_in_perls_form_does_not_replace_the_crash_before_it(command: str) -> None:
    crash = "/workspace/app.js:3\n    a.b\n      ^\n\nTypeError: a is undefined\n    at Object.<anonymous> (/workspace/app.js:3:5)\n\nNode.js v22.1.0\n"
    text = crash + "see the notes at docs/README line 3.\n"
    found = find(command, 1, text) if ">&2" in command else find(command, 1, "", text)
    assert found.error_kind == ErrorKind.RUNTIME_ERROR and found.error_site is not None
    assert (found.error_site.file, found.error_site.line, found.error_site.column) == ("app.js", 3, 5)


def test_a_crash_of_perl_that_the_command_runs_replaces_the_crash_before_it() -> None:
    crash = "x.rb:1:in `<main>': unhandled exception (RuntimeError)\n"
    found = find("ruby x.rb; perl y.pl", 2, crash + "Died at y.pl line 2.\n").error_site
    assert found is not None and (found.file, found.line) == ("y.pl", 2)


def test_frames_of_packages_are_not_the_site() -> None:
    trace = 'Traceback (most recent call last):\n  File "/workspace/p/a.py", line 4, in <module>\n'
    trace += '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n'
    trace += '  File "/workspace/.venv/lib/python3.11/site-packages/x.py", line 1, in y\nValueError: x\n'
    site = find("python3 p/a.py", 1, trace).error_site
    assert site is not None and (site.file, site.line) == ("p/a.py", 4)


IN_ORDER = [
    ("policy_violation", "curl: (6) Could not resolve host: a.example"),
    ("resource_limit", "cp: error writing 'x': No space left on device"),
    ("patch_failed", "error: patch failed: a.txt:1"),
    ("syntax_error", "s.sh: line 3: syntax error: unexpected end of file"),
    ("import_error", "/usr/bin/python3: No module named nope"),
    ("test_failure", "--- FAIL: TestA (0.00s)"),
    ("build_error", "a.c:4:3: error: expected ';'"),
    ("command_not_found", "/bin/bash: line 1: nope: command not found"),
    ("permission_denied", "cat: x: Permission denied"),
    ("path_not_found", "cat: y: No such file or directory"),
    ("invalid_arguments", "ls: unrecognized option '--zz'"),
    ("runtime_error", "s.sh: line 4: X: unbound variable"),
]


def test_the_first_kind_in_order_of_precedence_wins() -> None:
    order = [k.value for k in ErrorKind]
    assert [order.index(kind) for kind, _ in IN_ORDER] == sorted(order.index(kind) for kind, _ in IN_ORDER)
    for index, (kind, _) in enumerate(IN_ORDER):
        text = "\n".join(line for _, line in reversed(IN_ORDER[index:]))
        assert find("./everything.sh", 1, text).error_kind == kind
    everything = "\n".join(line for _, line in IN_ORDER[1:])
    assert find("./everything.sh", None, everything, timed_out=True).error_kind == "timeout"
    assert find("./everything.sh", 137, everything, limit_hit="memory").error_kind == "resource_limit"


def test_rules_stand_in_order_of_precedence_and_leave_two_kinds_to_the_server() -> None:
    order = list(ErrorKind)
    positions = [order.index(r.kind) for r in RULES]
    assert positions == sorted(positions)
    server_side = {ErrorKind.TOOL_NOT_FOUND, ErrorKind.OUTPUT_TRUNCATED}
    assert {r.kind for r in RULES} == set(ErrorKind) - server_side


@pytest.mark.parametrize("limit", ["memory", "pids", "file_size", "disk", "inodes", "cpu", "output"])
def test_each_limit_of_the_server_is_a_resource_limit(limit: str) -> None:
    found = find("make", 1, limit_hit=limit)
    assert (found.error_kind, found.severity, spanned("make", found)) == ("resource_limit", "error", "make")
    assert find("make", 0, limit_hit=limit).severity == "warning"


def test_a_status_below_zero_is_read_as_a_signal() -> None:
    assert find("./a.out", -11).error_kind == "runtime_error"
    assert find("./a.out", -9).error_kind == "resource_limit"


def test_evidence_on_standard_output_alone_is_a_warning() -> None:
    found = find("./run.sh", 1, stdout="cat: x: No such file or directory")
    assert (found.error_kind, found.severity) == ("path_not_found", "warning")
    assert find("cat log; false_tool", 3, stdout="cat: x: No such file or directory").error_kind == "nonzero_exit"


def test_all_sites_are_listed_with_the_failing_one_first_and_bounded() -> None:
    text = "\n".join(f"a.c:{n}:1: error: x" for n in range(1, 100))
    found = find("gcc a.c", 1, text)
    assert found.error_site == found.error_sites[0]
    assert [s.line for s in found.error_sites] == list(range(1, 21))


def test_an_empty_argument_at_fault_has_no_span() -> None:
    site = find("grep -e '' [", 2, "grep: Unmatched [, [^, [:, [., or [=").error_site
    assert site is not None and site.action_span is None


def test_markers_that_only_a_server_can_give() -> None:
    found = tool_not_found("rnu", ["run", "submit"])
    assert found.error_kind == "tool_not_found" and found.hint_template_key == "tool.unknown"
    assert found.error_site is not None
    assert (found.error_site.action_field, found.error_site.action_span) == ("tool", (0, 3))
    assert output_truncated() == Detection.of(ErrorKind.OUTPUT_TRUNCATED, severity="warning")


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("ENOENT", "path_not_found"),
        ("EACCES", "permission_denied"),
        ("EPERM", "permission_denied"),
        ("EROFS", "permission_denied"),
        ("ENOSPC", "resource_limit"),
        ("EDQUOT", "resource_limit"),
        ("EFBIG", "resource_limit"),
        ("EISDIR", "invalid_arguments"),
        ("ENOTDIR", "invalid_arguments"),
        ("ELOOP", "invalid_arguments"),
        ("EINVAL", "invalid_arguments"),
        ("ENAMETOOLONG", "invalid_arguments"),
    ],
)
def test_a_refused_path_is_marked_by_its_reason(reason: str, kind: str) -> None:
    for form in (reason, getattr(errno, reason)):
        found = path_refused("src/é.py", form, "refused")
        assert found.error_kind == kind
        assert found.error_site is not None
        assert (found.error_site.action_field, found.error_site.action_span) == ("path", (0, 8))


@given(st.text(max_size=80), st.one_of(st.none(), st.integers(-64, 255)), st.text(max_size=200), st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_turn_gets_a_valid_and_repeatable_answer(command: str, code: int | None, out: str, err: str) -> None:
    found = detect(command, code, out, err, cwd="/workspace")
    assert found == detect(command, code, out, err, cwd="/workspace")
    for site in found.error_sites:
        if site.action_span is not None:
            assert 0 <= site.action_span[0] < site.action_span[1] <= len(command)


ADVERSARIAL = [
    "a",
    "(",
    "[",
    "((((a",
    "\n",
    "a\n",
    " ",
    ": ",
    "'",
    "`",
    "error: ",
    "a:1:",
    "/",
    "....",
    'File "',
    "\x1b[",
    "\r",
]
ADVERSARIAL += [
    "Traceback (most recent call last):\n",
    '  File "x", line 1, in f\n',
    "a.c:1:1: error: x\n",
    "at x line 1",
    "=",
    "_",
]
ADVERSARIAL += [
    "No such file or directory: ",
    "FAILED a::b - c\n",
    "Could not resolve host ",
    "usage: ",
    "1 failed, ",
    "http://a.b/",
    "FAILED a::b[ - x - ]\n1 failed in 1s\n",
    "= tests finished: 1 failed, ",
    "INTERNALERROR> Traceback (most recent call last):\n",
    "SUBFAILED[a] (b) c\n1 failed in 1s\n",
    "SUBFAILED" + " a.p" * 290 + "\n1 failed in 1s\n",
    "1 subtests failed, ",
    "a:1: ",
    'Call stack:\n  File "a.py", line 1, in f\n',
    'Call stack:\n  File "a.py", line 1, in f\nMessage: 1\n',
    "--- FAIL: T/a\n    a.go:1: x\n",
    "--- FAIL: T/a\npanic: x [recovered]\ngoroutine 1:\n\t/a.go:1\n",
    "50% tests passed, 1 tests failed out of 2\n  1 - a" + " (a)" * 290 + " (\n",
    "Failed!  - Failed: 1\n  Failed a" + " [1 " * 280 + "\n  at  in /a.cs" + " in /a" * 190 + "\n",
    "1 failing\n  1) a:\n Error: Timeout of 1ms exceeded." + " (/a" * 290 + "\n",
    "1 runs, 1 assertions, 1 failures\nFailure:\nA#" + " [a" * 380 + "\n",
    "#1 0.1 a:1:1: error: x\n",
    "[\n",
    "@\t\n",
    "web-1  | " * 100 + "\n",
    "a b:c: [d] " * 90 + "\n",
    "* What went wrong:\n> a\n  b\n",
    "Error: \n" + " at " * 280 + "\n",
    "error • " * 140 + "\n",
    "com.a." * 190 + "(a.java:1)\nTests run: 1, Failures: 1\n",
    "- a *** FAILED ***\n" + "(a.scala " * 120 + "\n*** 1 TEST FAILED ***\n",
    "1 of 2 a b " * 100 + "\n",
    " at " + "/" * 1_000 + "\nTests run: 1, Failures: 1\na.b <<<\n",
    "a > " * 290 + "\n1 tests completed, 1 failed\n",
    "Summary [" + "] " * 580 + "\n1 failed\n",
    "error: could not be parsed: " * 40 + "\n",
    ": The command 'a" * 70 + "\n",
]


def of(piece: str, size_bytes: int) -> Callable[[], Detection]:
    text = piece * (size_bytes // len(piece))
    return lambda: detect("pytest -q; python3 x.py; gcc a.c 2>&1", 1, text, text, cwd="/workspace")


def of_some_lines(piece: str) -> Callable[[], Detection]:
    """Return what reads 1,200 lines, half of what is read at most, or a line of two megabytes."""
    lines = piece.count("\n")
    return of(piece, min(1_200 // lines * len(piece), 2_000_000) if lines else 2_000_000)


ORDINARY = "2024-01-01 12:00:00 INFO module.name: something was done in 12 ms\n"
AN_ORDINARY_LOG = Costs(of_some_lines(ORDINARY))


@pytest.mark.parametrize("piece", ADVERSARIAL)
def test_lines_made_to_be_slow_take_bounded_work(piece: str) -> None:
    work = of_some_lines(piece)
    # 0.45 million calls for an ordinary log, and at most 0.9 for these
    counted_s = processor_s(lambda: calls_of(work, at_most=1_500_000))
    assert not AN_ORDINARY_LOG.exceed(work, times=4, first_s=counted_s)  # each is less than one


@pytest.mark.parametrize("piece", [ORDINARY, "a", "\n", "a.c:1:1: error: x\n"])
def test_ten_megabytes_take_bounded_work(piece: str) -> None:
    # 0.9 million calls for an ordinary log: 2,400 lines are read, twice as many as above
    counted_s = processor_s(lambda: calls_of(of(piece, 10_000_000), at_most=3_000_000))
    assert not AN_ORDINARY_LOG.exceed(of(piece, 10_000_000), times=8, first_s=counted_s)


MANY_CALLS = {
    "a path that no call has": (
        "a b/c;" * 10_000,
        "foo: cannot open 'x/y z{n}': No such file or directory in w/q e/r t/y",
    ),
    "a part of a path": ("a b/cd;" * 9_000, "a: cannot open 'c': No such file or directory in b/c b/{n}"),
    "a parent of each": ("a b/c/d;" * 8_000, "a: cannot open '/x{n}': No such file or directory"),
    "quoted code": ("a 'b/cde x';" * 5_000, "a: cannot open 'b/cd': No such file or directory in {n}"),
    "one long word": ("a " + "b=c:" * 16_000, "a: cannot open 'c:{n}': No such file or directory"),
    "programs": ("foo\n" * 16_000, "bash: line {n}: foo: command not found"),
    "scripts": ("cat > x <<E\nfoo\nE\n" * 3_000, "x.sh: line {n}: foo: command not found"),
    "launchers": ("a;" * 32_000, "xargs: b{n}: No such file or directory"),
    "arguments": ("a -b c;" * 9_000, "a: unknown option 'x{n}' of -y -z"),
}


@pytest.mark.parametrize("name", MANY_CALLS)
def test_many_messages_about_many_calls_take_bounded_work(name: str) -> None:
    command, message = MANY_CALLS[name]
    text = "\n".join(message.format(n=n) for n in range(2_300))

    def calls(error: str, at_most: int | None = None) -> int:
        return calls_of(lambda: detect(command, 1, "", error, cwd="/workspace"), at_most)

    # What messages add to the work of parsing is bounded: at most 16.6 million for these.
    calls(text, at_most=calls("") + 20_000_000)


def test_large_actions_keep_their_sites() -> None:
    lines = [f"rm build/out{n}.o" for n in range(400)]
    text = "".join(f"rm: cannot remove 'build/out{n}.o': No such file or directory\n" for n in range(200, 400))
    command = "\n".join(lines)
    assert spanned(command, find(command, 1, text)) == "build/out399.o"
    command = "foo\n" * 1_000
    text = "".join(f"bash: line {n}: foo: command not found\n" for n in range(1, 1_001))
    found = find(command, 127, text).error_site
    assert found is not None and found.action_span == (3_996, 3_999)


@given(
    st.lists(st.sampled_from(["a", "-", "=", "/", ":", "~", "$", "@", ".", "b", "://", ",", "/workspace"]), max_size=7),
    st.lists(st.sampled_from(["a", "-", "=", "/", ":", "~", "$", "@", ".", "b", "/workspace"]), min_size=1, max_size=5),
)
@settings(max_examples=1_000, deadline=None)
def test_the_index_of_words_leaves_out_no_call_that_a_text_names(word: list[str], text: list[str]) -> None:
    turn = Turn.of("c x; cat '" + "".join(word) + "' y", 1, "", "", cwd="/workspace")
    named = list(turn.words.calls_naming("".join(text)))
    for call in turn.action.invocations:
        assert call in named or _in_words(turn, call, "".join(text)) is None


def test_the_end_of_many_frames_is_found_whatever_stands_before_it() -> None:
    """Long runs of frames without a first line: only those near the end are read as a traceback."""
    pieces = [
        '  File "a.py", line {n}, in f',
        "    x = 1",
        "",
        "ValueError: v{n}",
        "plain words here",
        'File "b.py", line {n}, in g',
    ]
    draw = random.Random(7)
    for _ in range(300):
        weights = [draw.choice((1, 20, 200)), draw.choice((0, 30)), draw.choice((0, 1)), 1, draw.choice((0, 1)), 1]
        lines = [
            piece.format(n=n) for n, piece in enumerate(draw.choices(pieces, weights, k=draw.randrange(1, 250)), 1)
        ]
        slow: list[tuple[int, int]] = []
        index = 0
        while index < len(lines) and len(slow) < MAX_TRACEBACKS:
            if re.match(r'\s*File "', lines[index]):
                found = _read(lines, index - 1, "", _HEADLESS_LINES)
                if found is not None:
                    slow.append((found.first, found.last))
                    index = found.last
            index += 1
        assert [(each.first, each.last) for each in find_tracebacks(lines)] == slow


def test_the_documentation_lists_every_rule() -> None:
    text = (ROOT / "docs" / "detectors.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"`{rule.name}`" in text
        assert rule.fires in text, rule.name
        assert rule.place in text, rule.name


TRACEBACK = (
    "Traceback (most recent call last):\n"
    '  File "/opt/app/tests/run.py", line 3, in <module>\n    main()\n'
    '  File "/opt/app/src/core.py", line 9, in main\n    go(None)\n'
    '  File "/opt/app/.venv/lib/python3.11/site-packages/lib/x.py", line 1, in go\n    raise ValueError(1)\n'
    "ValueError: 1\n"
)


@pytest.mark.parametrize("cwd", ["/opt/app", "/opt/app/tests", "/tmp", None])
def test_files_in_the_work_directory_are_the_agents_and_named_relative_to_it(cwd: str | None) -> None:
    found = detect("python3 /opt/app/tests/run.py", 1, "", TRACEBACK, cwd=cwd, workdir="/opt/app")
    assert [(site.file, site.line) for site in found.error_sites] == [("src/core.py", 9)]
    elsewhere = detect("python3 /opt/app/tests/run.py", 1, "", TRACEBACK, cwd=cwd)
    assert all(site.file != "src/core.py" or cwd == "/opt/app" for site in elsewhere.error_sites)

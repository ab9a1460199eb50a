"""Output behind the prefixes of the tools that pass it on is read as the program printed it."""

# ruff: noqa: E501  (a table row is one case; wrapped rows cannot be compared by eye)

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path

import pytest

from errata_protocol.detect import detect
from errata_protocol.detect.prefixes import FORMS, without_prefixes
from errata_protocol.markers import Detection
from tests.counted_work import calls_of

JEST = """\
FAIL src/a.test.js
  math
    ✕ adds (3 ms)

  ● math › adds

    expect(received).toBe(expected) // Object.is equality

      at Object.toBe (src/a.test.js:9:21)

Test Suites: 1 failed, 1 total
Tests:       1 failed, 1 total
"""
TRACEBACK = """\
starting
Traceback (most recent call last):
  File "/workspace/app.py", line 3, in <module>
    main()
KeyError: 'x'
"""
GCC = (
    "gcc -c src/a.c\nsrc/a.c: In function 'f':\nsrc/a.c:4:3: error: expected ';'\nmake: *** [Makefile:3: a.o] Error 1\n"
)
VITEST = """\
⎯⎯⎯⎯⎯⎯⎯ Failed Tests 1 ⎯⎯⎯⎯⎯⎯⎯

 FAIL  src/store.test.ts > Store > keeps what was put
AssertionError: expected 438 to be 384 // Object.is equality
 ❯ src/store.test.ts:57:41
     55|     expect(read(file)).toContain(id)

 Test Files  1 failed | 32 passed (33)
      Tests  1 failed | 315 passed (316)
"""


def behind(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}".rstrip() + "\n" for line in text.splitlines())


def mixed(*texts: str) -> str:
    """Return the lines of several sources in turns, as tools print them that run in parallel."""
    lines = chain.from_iterable(zip_longest(*(text.splitlines(keepends=True) for text in texts)))
    return "".join(line for line in lines if line is not None)


def find(command: str, stdout: str, stderr: str = "") -> Detection:
    return detect(command, 1, stdout, stderr, cwd="/workspace")


def place(found: Detection) -> tuple[str | None, str | None, int | None]:
    assert found.error_site is not None
    return found.error_kind, found.error_site.file, found.error_site.line


QUIET = "PASS src/b.test.js\n" + "checked\n" * 11
LERNA = "lerna notice cli v8.0.0\nlerna ERR! npm run test exited 1 in 'web'\n"
CI = "2024-01-01T12:00:00.1234567Z "

# command, output, standard error, kind, file, line
PREFIXED = [
    ("docker build .", "", behind("#12 1.5 ", GCC), "build_error", "src/a.c", 4),
    ("docker build .", "", behind("#12 1.5 ", behind("│ ", VITEST)), "test_failure", "src/store.test.ts", 57),
    ("docker compose build", "", mixed(behind("#12 1.5 ", JEST), behind("#9 0.77 ", QUIET)), "test_failure", "src/a.test.js", 9),
    ("docker build .", "", f"------\n > [2/3] RUN make:\n{behind('488.1 ', GCC)}------\n", "build_error", "src/a.c", 4),
    ("docker buildx build .", "", behind(" => => # ", GCC), "build_error", "src/a.c", 4),
    ("pnpm -r test", f"packages/core test$ vitest run\n{behind('│ ', VITEST)}└─ Failed in 8.4s\n", "", "test_failure", "src/store.test.ts", 57),
    ("pnpm -r test", "packages/a test$ jest\npackages/b test$ jest\n" + mixed(behind("packages/a test: ", JEST), behind("packages/b test: ", QUIET)), "", "test_failure", "src/a.test.js", 9),
    ("pnpm -r test 2>&1 | tail -20; exit 1", behind("packages/a test: ", JEST) + " ELIFECYCLE  Test failed.\n", "", "test_failure", "src/a.test.js", 9),
    ("pnpm -r build", "core build$ tsc\ncore build: src/a.ts(3,5): error TS2322: Type 'x'\n", "", "build_error", "src/a.ts", 3),
    ("npx turbo test", "web:test: cache miss, executing 0a1b\nui:test: cache hit, replaying 0b\n" + mixed(behind("web:test: ", JEST), behind("ui:test: ", QUIET)), "", "test_failure", "src/a.test.js", 9),
    ("npx turbo test | tail -20; exit 1", behind("web:test: ", JEST), "", "test_failure", "src/a.test.js", 9),
    ("npx lerna run test --stream", behind("web: ", JEST), LERNA, "test_failure", "src/a.test.js", 9),
    ("npx lerna run test --stream", behind("@acme/web: ", JEST), "", "test_failure", "src/a.test.js", 9),
    ("npx nx run-many -t test", f"\n NX   Running target test for 2 projects:\n\n{behind('web: ', JEST)}", "", "test_failure", "src/a.test.js", 9),
    ("yarn workspaces foreach -A run test", mixed(behind("➤ YN0000: [@acme/web]: ", JEST), behind("➤ YN0000: [@acme/ui]: ", QUIET)), "", "test_failure", "src/a.test.js", 9),
    ("npx concurrently 'npm:test'", mixed(behind("[0] ", JEST), behind("[1] ", QUIET)), "", "test_failure", "src/a.test.js", 9),
    ("npx run-p --print-label test", behind("[test] ", JEST), "", "test_failure", "src/a.test.js", 9),
    ("docker compose up", behind("web-1  | ", TRACEBACK), "", "runtime_error", "app.py", 3),
    ("foreman start", behind("12:00:01 web.1   | ", TRACEBACK), "", "runtime_error", "app.py", 3),
    ("earthly +build", "", behind("              +build | ", GCC), "build_error", "src/a.c", 4),
    ("gh run view 7 --log-failed", behind(f"build\tRun make\t{CI}", GCC), "", "build_error", "src/a.c", 4),
    ("act", "", behind(CI, behind("#12 1.5 ", GCC)), "build_error", "src/a.c", 4),
    ("ant compile", f"Buildfile: /workspace/build.xml\n\ncompile:\n{behind('    [exec] ', GCC)}\nBUILD FAILED\n", "", "build_error", "src/a.c", 4),
    ("nix-build", "", "error: builder for '/nix/store/x.drv' failed with exit code 2;\n       last 4 log lines:\n" + behind("       > ", GCC), "build_error", "src/a.c", 4),
]  # fmt: skip


@pytest.mark.parametrize(("command", "stdout", "stderr", "kind", "file", "line"), PREFIXED)
def test_a_report_behind_a_prefix_has_its_place(
    command: str, stdout: str, stderr: str, kind: str, file: str, line: int
) -> None:
    assert place(find(command, stdout, stderr)) == (kind, file, line)


NO_PREFIXES = {
    "messages of one program": "rm: cannot remove 'a{n}': No such file or directory",
    "verdicts": "[PASS] checks {n}",
    "levels": "[error] something {n}",
    "maven": "[ERROR] something {n}",
    "a compiler": "src/a.c:{n}:3: error: x",
    "code of rustc": "{n} |     releases::Release,",
    "a table": "│ {n} │ a │",
    "rows": "name{n} | 3",
    "indentation": "  line {n}",
    "times": "{n}.25 seconds",
    "make": "make[1]: Entering directory 'd{n}'",
    "a scope once": "@acme/x{n}: built",
}


@pytest.mark.parametrize("line", NO_PREFIXES.values(), ids=NO_PREFIXES)
def test_lines_that_begin_alike_are_no_prefix(line: str) -> None:
    lines = tuple(line.format(n=n) for n in range(40))
    assert without_prefixes(lines, ()) == (lines, ())


def test_lines_without_a_prefix_stay_where_they_are() -> None:
    lines = ["first", "#7 0.1 a", "#8 0.2 b", "#7 0.3 a2", "between", "#8 0.4 b2", "#7 0.5", "last"]
    read = ("first", "a", "a2", "b", "between", "b2", "", "last")
    assert without_prefixes((), lines) == ((), read)


EXAMPLES = [
    "#1 0.1 {}",
    "│ {}",
    "web:test: {}",
    "web-1  | {}",
    "[0] {}",
    "> x\n  {}",
    " > [a\n0.1 {}",
    "@a/b: {}",
    CI + "{}",
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_work_grows_with_the_lines_and_no_faster(example: str) -> None:
    def work(count: int) -> Callable[[], object]:
        lines = tuple(example.format("a: b | c [d] ").split("\n")) * count
        return lambda: without_prefixes(lines, lines)

    assert calls_of(work(800)) < 2.2 * calls_of(work(400))


def test_the_documentation_lists_the_tools_with_prefixes() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "detectors.md").read_text(encoding="utf-8")
    for form in FORMS:
        assert f"| {form.tools} |" in text

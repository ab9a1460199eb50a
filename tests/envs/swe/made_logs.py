"""Made-up logs of test runs, by seed: all forms of lines that the parsers know, and what agents print to fool them."""

from __future__ import annotations

import random
from dataclasses import replace

from swe_bench_lite_env.dataset import Instance
from swe_bench_lite_env.rules.directives import TEST_COMMANDS
from swe_bench_lite_env.rules.verdict import END, EXIT_CODE, START, STOPPED, compose_log

REPOS = tuple(TEST_COMMANDS)
"""The twelve of Lite."""

STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
_PARAMETERS = (
    "1",
    "a b",
    "a[0]",
    "[",
    "]",
    "/root/a/b.py",
    "//server/x",
    "/a/*/b",
    "x - y",
    "MouseButton.LEFT",
    "log(photon",
    "é ü",
    "a-b",
    "\\n",
    "1 PASSED 2",
    "[100%]",
    "x/y]z[",
    "",
)
_NOISE = (
    "",
    " ",
    "ok",
    "OK",
    "okay then",
    "FAILED",
    "PASSED",
    " PASSED ",
    "FAIL:",
    "ERROR:",
    "XFAIL",
    "PASSED  ",
    "E   assert 0",
    "=========== short test summary info ===========",
    "_____ test_a _____",
    "collected 3 items",
    "FAILED (failures=1)",
    "SKIPPED [1] tests/test_a.py:3: not here",
    "SKIPPED [12] x",
    "PASSED [100%]",
    "FAILED [ 50%]",
    "ERROR tests/test_a.py",
    "ERROR tests/test_b.py - ImportError: no - way",
    "ERRORS: 3",
    "PASSEDfoo bar",
    "PASSED\ttab id",
    "a\tPASSED",
    "tests finished: 3 passed, in 0.1 seconds",
    "Testing against Django installed in '/x' with up to 4 processes",
    "System check identified no issues (0 silenced).",
    "--version is equivalent to version",
    "Traceback (most recent call last):",
    "ModuleNotFoundError: No module named 'x'",
    "Killed",
    "Could not resolve host",
    "no tests ran in 0.1s",
    "12 passing",
    "0 passing",
    "Executed 3 of 3",
    "Tests:   4 passed",
    "# tests 0",
    "10 specs, 2 failures",
    "x': ok",
    "TOTAL: 0 SUCCESS",
    "Test Suites: 1 failed, 2 passed, 3 total",
    "Timeout error: 30 seconds exceeded",
    "\x0c",
    "\x1c PASSED x",
    "a\u2028PASSED b",
    "Applying sites.0002_alter_domain_unique...test_no_migrations (x) ... ok",
    "test_x (a.B) ... skipped 'why'",
    "________ sympy/core/tests/test_a.py:test_b ________",
    "__ a b.py:c.py:d e __ f",
    " .py: ",
    "_ x.py:y _",
    "a .py:b",
    "test_long_name[10] ok",
    "test_a E",
    "test_b F",
    "test_c f",
    "test_d X",
    "test_e s",
    "test_f ok ",
    "\ttest_g ok",
)
_AROUND = (
    "name ... Testing against Django installed in '/x' with\nmore lines (0 silenced).\nok",
    "name ... Testing against Django installed in  silenced).\nokay\nx silenced).\nok",
    "name\n... Testing against Django installed in x silenced).\nok",
    "name ... Internal Server Error: /a/b/\nok",
    "name ... Internal Server Error: /a ... Internal Server Error: /b/\nok",
    "name ... Internal Server Error: /a\n... Internal Server Error: /b/\nok",
    "name ...\nInternal Server Error: /b/\nok",
    "name ... Internal Server Error: /\nok",
    "name ... Internal Server Error: /a/\nnot ok",
    "name ... System check identified no issues (0 silenced)\nok",
    "name ... System check identified no issues (0 silenced).\nok",
    "name ... printed by the test\nok",
    "name ... printed\nby the test ... ok",
)


def test_id(draw: random.Random) -> str:
    """Return a test id in one of the forms of the twelve repositories."""
    name = draw.choice(("test_a", "test_b", "test_cd", "test_long_name"))
    form = draw.randrange(8)
    if form == 0:
        return f"{name} (app.tests.SomeTests)"
    if form == 1:
        return f"A docstring of {name}, with words"
    if form == 2:
        return name
    place = draw.choice(("tests/test_a.py", "testing/test b.py", "lib/x/tests/test_c.py"))
    inner = draw.choice(("", "TestX::", "TestX::TestY::"))
    parameter = f"[{draw.choice(_PARAMETERS)}]" if form > 4 else ""
    return f"{place}::{inner}{name}{parameter}"


test_id.__test__ = False  # type: ignore[attr-defined]


def line(draw: random.Random, tests: list[str]) -> str:
    """Return a line of a log, or several."""
    test, status = draw.choice(tests), draw.choice(STATUSES)
    short = test.split(" ")[0]
    form = draw.randrange(16)
    if form < 3:
        return f"{status} {test}"
    if form == 3:
        return f"{status} {test} - AssertionError: {draw.choice(('a - b', 'assert 1 == 2', ''))}"
    if form == 4:
        return f"{test} {status}"
    if form == 5:
        return f"{test} {status}{' ' * draw.randrange(4)}[ {draw.randrange(99)}%]"
    if form == 6:
        return f"\x1b[3{draw.randrange(8)}m{status}\x1b[0m {test}\x1b[1m::bold\x1b[0m"
    if form == 7:
        return f"{test} ... {draw.choice(('ok', 'OK', ' ok', ' OK', 'FAIL', 'ERROR', 'skipped', 'expected failure'))}"
    if form == 8:
        return f"{draw.choice(('FAIL', 'ERROR'))}: {test}"
    if form == 9:
        return f"{short} {draw.choice(('ok', 'F', 'E', 'f', 's', 'X'))}"
    if form == 10:
        heading = f"{draw.choice(('sympy/a/tests/test_x', short))}.py:{short}"
        return f"{'_' * draw.randrange(9)} {heading} {'_' * draw.randrange(9)}"
    if form == 11:
        return draw.choice(_AROUND).replace("name", test)
    if form == 12:
        return f"{' ' * draw.randrange(3)}{status} {test}{draw.choice(('', ' ', chr(13), chr(9)))}"
    return draw.choice(_NOISE)


def case(seed: int) -> tuple[Instance, str]:
    """Return an instance and a log of its tests."""
    draw = random.Random(seed)
    repo = REPOS[seed % len(REPOS)]
    tests = [test_id(draw) for _ in range(draw.randrange(1, 9))]
    lines = [line(draw, tests) for _ in range(draw.randrange(0, 24))]
    if draw.random() < 0.4:  # a run in which everything passes, in the usual form
        form = {"django/django": "{} ... ok", "sympy/sympy": "{} ok"}.get(repo, "PASSED {}")
        lines = [form.format(test) for test in tests] + [text for text in lines if draw.random() < 0.1]
        if repo != "django/django":
            tests = [test.split()[0] for test in tests]
    output = draw.choice(("\n", "\n", "\n", "\r\n", "\r")).join(lines)
    code = draw.choice((0, 0, 0, 1, 1, 2, 5, -9, 137, None))
    log = _wrapped(draw, output, code)
    expected = [_cut(draw, test) for test in tests]
    wanted = draw.randrange(0, len(expected) + 1)
    instance = Instance(
        repo=repo,
        instance_id=f"made__case-{seed}",
        base_commit="",
        patch="",
        test_patch="",
        problem_statement="An issue.",
        hints_text="",
        created_at="",
        version="",
        environment_setup_commit="",
        fail_to_pass=tuple(expected[:wanted]),
        pass_to_pass=tuple(expected[wanted:]),
    )
    if draw.random() < 0.1:
        instance = replace(instance, eval_type="fail_only")
    if draw.random() < 0.1:
        instance = replace(instance, log_parser=draw.choice(("parse_log_pytest_options", "parse_log_pytest_v2")))
    return instance, log


def _cut(draw: random.Random, test: str) -> str:
    """Return the id as a row has it: some are cut at a space or inside a parameter."""
    chance = draw.random()
    if chance < 0.1:
        return test.split(" ")[0]
    if chance < 0.2 and "[" in test:
        return test[: test.index("[") + draw.randrange(1, 4)]
    return "tests/test_none.py::test_none" if chance > 0.97 else test


def _wrapped(draw: random.Random, output: str, code: int | None) -> str:
    form = draw.randrange(20)
    if form == 0:
        return output
    if form == 1:
        return f"{START}\n{output}"
    if form == 2:
        return f"{output}\n{END}\n"
    if form == 3:
        return f"{output}\n{compose_log('', code)}"
    if form == 4:
        return (
            f"+ : '{START}'\n{output}\n+ SWEBENCH=$?\n+ : '{END}'\n+ echo '{EXIT_CODE}: {code}'\n{EXIT_CODE}: {code}\n"
        )
    if form == 5:
        return compose_log(f"{output}\n{draw.choice(STOPPED)}\n", code)
    if form == 6:
        return compose_log(f"{output}\n{END}\n{EXIT_CODE}: 0\n{START}\nFAILED late", code)
    if form == 7:
        return compose_log(f"{EXIT_CODE}: {draw.choice(('0', '1', '-1', 'x', '٣', '9' * 5000))}\n{output}", code)
    if form == 8:
        return f"{END}\n{output}\n{START}\n"
    return compose_log(output, code, before=draw.choice(("", "PASSED before", "Applied patch cleanly.", "1 passing")))

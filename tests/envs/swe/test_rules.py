"""The benchmark's rules by hand-worked cases. ``test_oracle.py`` compares them with the benchmark's own package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from errata_protocol.errors import InvalidRequest
from swe_bench_lite_env.dataset import Dataset, Instance, read_row
from swe_bench_lite_env.rules.directives import (
    TEST_COMMANDS,
    default_command,
    directives,
    modified_files,
    patched_files,
    test_files,
)
from swe_bench_lite_env.rules.log_parsers import WHOLE_IDS, parse_log, parser_name
from swe_bench_lite_env.rules.verdict import (
    END,
    EXIT_CODE,
    START,
    STOPPED,
    compose_log,
    forged_markers,
    judge,
    recorded_exit_code,
)


def instance(fail: list[str], keep: list[str], **values: Any) -> Instance:
    row = {"repo": "pallets/flask", "instance_id": "a__b-1", "problem_statement": "It breaks.", "FAIL_TO_PASS": fail}
    return read_row({**row, "PASS_TO_PASS": keep, **values})


ONE = instance(["t.py::a", "t.py::b"], ["t.py::c", "t.py::d"])


def passed(*tests: str) -> dict[str, str]:
    return dict.fromkeys(tests, "PASSED")


def log(*lines: str, code: int | None = 0) -> str:
    return compose_log("\n".join(lines), code)


def test_all_tests_of_both_lists_resolve() -> None:
    verdict = judge(ONE, log("PASSED t.py::a", "XFAIL t.py::b", "PASSED t.py::c", "PASSED t.py::d"))
    assert verdict.resolved and verdict.status == "RESOLVED_FULL" and not verdict.invalid
    assert verdict.fail_to_pass.success == ("t.py::a", "t.py::b") and verdict.pass_to_pass.fraction == 1.0
    assert (verdict.exit_code, verdict.rules) == (0, "5.0.2")


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["PASSED t.py::a", "FAILED t.py::b - no", "PASSED t.py::c", "PASSED t.py::d"], "RESOLVED_PARTIAL"),
        (["PASSED t.py::a", "PASSED t.py::b", "PASSED t.py::c", "FAILED t.py::d"], "RESOLVED_NO"),
        (["PASSED t.py::a", "PASSED t.py::b", "PASSED t.py::c", "ERROR t.py::d - RuntimeError"], "RESOLVED_NO"),
        (["PASSED t.py::a", "PASSED t.py::c", "PASSED t.py::d"], "RESOLVED_PARTIAL"),
        (["FAILED t.py::a", "FAILED t.py::b", "PASSED t.py::c", "PASSED t.py::d"], "RESOLVED_NO"),
        (["PASSED t.py::a", "PASSED t.py::b", "PASSED t.py::c"], "RESOLVED_NO"),
        (
            ["PASSED t.py::a", "FAILED t.py::a", "PASSED t.py::b", "PASSED t.py::c", "PASSED t.py::d"],
            "RESOLVED_PARTIAL",
        ),
    ],
)
def test_what_falls_short_is_partial_or_no(lines: list[str], status: str) -> None:
    for rules in (5, 4):
        code = int(any(line.startswith(("FAILED", "ERROR")) for line in lines))
        verdict = judge(ONE, log(*lines, code=code), rules=rules)
        assert (verdict.status, verdict.resolved) == (status, False)


def test_the_two_rules_differ_in_skipped_tests() -> None:
    kept = log("PASSED t.py::a", "PASSED t.py::b", "PASSED t.py::c", "SKIPPED t.py::d")
    assert judge(ONE, kept).resolved
    assert judge(ONE, kept, rules=4).resolved  # swebench 4 counts the skipped test in neither way
    assert judge(ONE, kept).pass_to_pass.success == ("t.py::c", "t.py::d")
    assert judge(ONE, kept, rules=4).pass_to_pass.success == ("t.py::c",)
    repaired = log("PASSED t.py::a", "SKIPPED t.py::b", "PASSED t.py::c", "PASSED t.py::d")
    assert judge(ONE, repaired).status == "RESOLVED_PARTIAL"
    assert judge(ONE, repaired, rules=4).status == "RESOLVED_FULL"


def test_the_two_rules_differ_in_ids_that_are_cut_inside_their_parameter() -> None:
    cut = instance(["t.py::a[log(photon"], ["t.py::c"], repo="astropy/astropy")
    passed = log("PASSED t.py::a[log(photon /s)]", "PASSED t.py::a[log(photon /m)]", "PASSED t.py::c")
    assert judge(cut, passed).resolved
    mixed = log("PASSED t.py::a[log(photon /s)]", "FAILED t.py::a[log(photon /m)]", "PASSED t.py::c", code=1)
    assert judge(cut, mixed).status == "RESOLVED_NO"
    assert judge(instance(["t.py::a[log(p"], []), log("PASSED t.py::a[log(photon]"), rules=4).status == "RESOLVED_NO"


def test_the_two_rules_differ_in_a_non_zero_exit_without_a_failing_test() -> None:
    printed = log("PASSED t.py::a", "PASSED t.py::b", "PASSED t.py::c", "PASSED t.py::d", code=1)
    verdict = judge(ONE, printed)
    assert verdict.invalid.startswith("the test command ended with 1") and not verdict.resolved
    assert verdict.fail_to_pass.failure == ONE.fail_to_pass and verdict.pass_to_pass.failure == ONE.pass_to_pass
    assert judge(ONE, printed, rules=4).resolved
    others = log("PASSED t.py::a", "PASSED t.py::b", "PASSED t.py::c", "PASSED t.py::d", "FAILED t.py::e", code=1)
    assert judge(ONE, others).resolved


def test_the_exit_code_of_the_log_comes_before_the_callers() -> None:
    lines = ["PASSED t.py::a", "PASSED t.py::b", "PASSED t.py::c", "PASSED t.py::d"]
    assert judge(ONE, log(*lines, code=None), exit_code=1).invalid
    assert judge(ONE, log(*lines, code=0), exit_code=1).resolved
    assert recorded_exit_code(compose_log("", -9)) == -9
    assert recorded_exit_code("nothing") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("PASSED t.py::a", "lacks the markers"),
        (f"{START}\nPASSED t.py::a", "lacks the markers"),
        (compose_log("", 0), "names no test"),
        (compose_log("collected 0 items", 5), "names no test"),
        *((compose_log(f"PASSED t.py::a\n{stopped}", 0), stopped) for stopped in STOPPED),
    ],
)
def test_a_run_that_shows_nothing_is_invalid(text: str, said: str) -> None:
    verdict = judge(ONE, text)
    assert said in verdict.invalid and verdict.status == "RESOLVED_NO" and not verdict.statuses


def test_signatures_of_a_broken_environment_are_advice() -> None:
    verdict = judge(ONE, compose_log("Cannot allocate memory", 1))
    assert (verdict.infra_reason, verdict.infra_failure) == ("out_of_memory", True)
    verdict = judge(ONE, compose_log("ModuleNotFoundError: No module named 'x'", 1))
    assert (verdict.infra_reason, verdict.infra_failure) == ("missing_module", False)


def test_markers_of_the_benchmark_in_the_output_are_reported() -> None:
    assert forged_markers("PASSED t.py::a\n") == ()
    assert forged_markers(f"{EXIT_CODE}: 0\n{END}") == (END, EXIT_CODE)


def test_results_outside_of_the_markers_count_when_there_are_none_inside() -> None:
    text = f"PASSED t.py::a\nPASSED t.py::b\nPASSED t.py::c\nPASSED t.py::d\n{compose_log('', 0)}"
    assert judge(ONE, text).resolved
    assert not judge(ONE, text.replace(START, f"{START}\nPASSED t.py::a")).resolved


@pytest.mark.parametrize(
    ("repo", "lines", "statuses"),
    [
        ("pallets/flask", "PASSED t.py::a[x y]\nSKIPPED [1] t.py:3: no\nXPASS t.py::b", {"t.py::a[x": "PASSED"}),
        ("pytest-dev/pytest", "PASSED [100%]\nFAILED t.py::a - x - y", {"[100%]": "PASSED", "t.py::a": "FAILED"}),
        ("psf/requests", "PASSED t.py::a[/x/y/z]\nPASSED t.py::a[//x/y]", passed("t.py::a[/z]", "t.py::a[//x/y]")),
        ("pylint-dev/pylint", "FAILED t.py::a[x]y", {"t.py::a[x]": "FAILED"}),
        (
            "sphinx-doc/sphinx",
            "\x1b[32mPASSED\x1b[0m t.py::a[x y]\nt.py::b PASSED",
            passed("t.py::a[x y]", "t.py::b"),
        ),
        ("scikit-learn/scikit-learn", "FAILED t.py::a[x y] - no", {"t.py::a[x y]": "FAILED"}),
        ("mwaskom/seaborn", "PASSED t.py::a\nt.py::b PASSED [ 50%]\nERROR t.py::c", passed("t.py::a", "t.py::b")),
        ("matplotlib/matplotlib", "PASSED t.py::a[MouseButton.LEFT]", {"t.py::a[1]": "PASSED"}),
        (
            "django/django",
            "test_a (m.C) ... ok\ntest_b (m.C)\nA text ... FAIL",
            {**passed("test_a (m.C)"), "A text": "FAILED"},
        ),
        ("django/django", "test_a (m.C) ... printed\nok", {"test_a (m.C)": "PASSED"}),
        (
            "sympy/sympy",
            "test_a ok\ntest_b F\n__ sympy/a.py:test_b __",
            {"sympy/a.py:test_b": "FAILED", "test_b": "FAILED", **passed("test_a")},
        ),
    ],
)
def test_each_repository_has_its_parser(repo: str, lines: str, statuses: dict[str, str]) -> None:
    assert parse_log(lines, parser_name(repo)) == statuses


@pytest.mark.parametrize("rules", [5, 4])
def test_ids_of_a_repository_that_the_benchmark_does_not_know_may_hold_spaces(rules: int) -> None:
    lines = (
        "PASSED t.py::a[x y]",
        "PASSED t.py::a[c - d]",
        "XFAIL t.py::a[e - f] - not yet - really",
        "FAILED t.py::a[g - h] - assert x[1] - 2",
        "ERROR t.py::a[i j] - ValueError: [",
        "XFAIL t.py::b - a reason",
        "SKIPPED [1] t.py:3: no",
    )
    assert parse_log("\n".join(lines), parser_name("own/repo"), rules) == {
        "t.py::a[x y]": "PASSED",
        "t.py::a[c - d]": "PASSED",
        "t.py::a[e - f]": "XFAIL",
        "t.py::a[g - h]": "FAILED",
        "t.py::a[i j]": "ERROR",
        "t.py::b": "XFAIL",
    }
    # Rows whose ids another reader has cut at the space can be graded, too.
    for test in ("t.py::a[x y]", "t.py::a[x", "t.py::a[c - d]", "t.py::a[e - f]", "t.py::b"):
        assert judge(instance([test], [], repo="own/repo"), log(*lines, code=1), rules=rules).resolved, test


def test_an_id_whose_bracket_is_not_closed_is_the_whole_line() -> None:
    line = "FAILED t.py::a[" + " - " * 300_000
    assert list(parse_log(line, WHOLE_IDS)) == [line.removeprefix("FAILED ").rstrip()]


def test_a_row_or_a_recipe_names_the_parser_of_another_repository() -> None:
    assert parser_name("own/repo") == WHOLE_IDS
    assert parser_name("own/repo", runner="sympy") == "parse_log_sympy"
    assert parser_name("own/repo", "parse_log_django", "sympy") == "parse_log_django"
    assert parser_name("django/django", runner="pytest") == "parse_log_django"
    own = instance(["test_a"], [], repo="own/repo")
    assert judge(own, log("test_a ok"), runner="sympy").resolved
    assert judge(replace(own, log_parser="parse_log_sympy"), log("test_a ok")).resolved
    for bad in ({"log_parser": "parse_log_jest"},):
        with pytest.raises(InvalidRequest, match="no log parser 'parse_log_jest': there are"):
            judge(replace(own, **bad), log("x"))
    with pytest.raises(InvalidRequest, match="there are 5, 4"):
        judge(own, log("x"), rules=3)


def test_the_gold_log_of_every_row_resolves_and_an_empty_one_does_not(lite: Dataset) -> None:
    for one in lite:
        tests = [f"PASSED {test}" for test in (*one.fail_to_pass, *one.pass_to_pass)]
        for rules in (5, 4):
            assert judge(one, log(*tests), rules=rules).resolved, one
            before = [f"FAILED {test}" for test in one.fail_to_pass] + tests[len(one.fail_to_pass) :]
            verdict = judge(one, log(*before, code=1), rules=rules)
            assert verdict.status == "RESOLVED_NO" and verdict.pass_to_pass.fraction == 1.0
            assert not judge(one, log(*tests[:-1]), rules=rules).resolved


LONG = 400_000
PLAIN = {"pallets/flask", "psf/requests", "pydata/xarray", "pytest-dev/pytest", "pylint-dev/pylint"}
"""Repositories of two parsers that stand for all of them."""


@pytest.mark.parametrize("repo", ["pallets/flask", "psf/requests", *sorted(set(TEST_COMMANDS) - PLAIN)])
@pytest.mark.parametrize(
    "text",
    [
        " " * LONG,
        "_" * (LONG // 2) + " .py:" * (LONG // 10),
        "PASSED " + "[" * LONG,
        " ... Testing against Django installed in " * (LONG // 40),
        "a ... Testing against Django installed in x\n silenced).\nokay" * (LONG // 60),
        " ... Internal Server Error: /" * (LONG // 30),
        "a ... Internal Server Error: /x/\nno\n" * (LONG // 35),
        "1" * LONG,
        "\n" * LONG,
        "Test Suites: " + "1 a, " * (LONG // 5),
    ],
    ids=lambda text: f"{text[:24]!r}",
)
def test_a_log_made_to_be_slow_is_read_in_linear_time(repo: str, text: str) -> None:
    judge(instance(["a"], ["b"], repo=repo), compose_log(text, 1))  # a search from every position would take hours


PATCH = """diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1,2 +1,3 @@
 a
--- a/not/a/header.py
+++ b/not/a/header.py
+diff --git a/x.py b/y.py
diff --git a/tests/new/test b.py b/tests/new/test b.py
new file mode 100644
--- /dev/null
+++ b/tests/new/test b.py
@@ -0,0 +1 @@
+a
\\ No newline at end of file
diff --git a/tests/old.py b/tests/old.py
deleted file mode 100644
--- a/tests/old.py
+++ /dev/null
@@ -1 +0,0 @@
-a
diff --git a/tests/was.py b/tests/is.py
similarity index 100%
rename from tests/was.py
rename to tests/is.py
diff --git "a/tests/caf\\303\\251.txt" "b/tests/caf\\303\\251.txt"
--- "a/tests/caf\\303\\251.txt"
+++ "b/tests/caf\\303\\251.txt"
@@ -1 +1 @@
-a
+b
diff --git a/tests/image.png b/tests/image.png
new file mode 100644
index 0000000..1111111
Binary files /dev/null and b/tests/image.png differ
"""


def test_every_file_that_a_patch_touches_is_found_and_no_text_of_a_hunk() -> None:
    assert [(file.before, file.after) for file in patched_files(PATCH)] == [
        ("tests/test_a.py", "tests/test_a.py"),
        (None, "tests/new/test b.py"),
        ("tests/old.py", None),
        ("tests/was.py", "tests/is.py"),
        ("tests/café.txt", "tests/café.txt"),
        (None, "tests/image.png"),
    ]
    assert "tests/was.py" in test_files(PATCH) and "tests/is.py" in test_files(PATCH)
    assert modified_files(PATCH) == ["tests/test_a.py", "tests/old.py", "tests/was.py", "tests/café.txt"]
    assert patched_files("") == []


def test_a_diff_without_gits_headers_is_read_too() -> None:
    plain = "--- a/x.py\t2020-01-01\n+++ b/x.py\t2020-01-01\n@@ -1 +1 @@\n-a\n+b\n"
    plain += "--- /dev/null\n+++ b/y.py\n@@ -0,0 +1 @@\n+c\n"
    assert [(file.before, file.after) for file in patched_files(plain)] == [("x.py", "x.py"), (None, "y.py")]


def test_directives_leave_data_out_and_name_modules_for_django(lite: Dataset) -> None:
    flask = lite.find("pallets__flask-4992")
    assert directives(flask.test_patch, flask.repo) == ["tests/test_config.py"]
    assert "tests/static/config.toml" in test_files(flask.test_patch)
    assert default_command(flask) == "pytest -rA tests/test_config.py"
    patch = "diff --git a/tests/admin/test_x.py b/tests/admin/test_x.py\ndiff --git a/tests/a.json b/tests/a.json\n"
    assert directives(patch, "django/django") == ["admin.test_x"]


def test_the_command_of_every_recipe_names_the_directives(lite: Dataset, lite_recipes: Any) -> None:
    for one in lite:
        for directive in directives(one.test_patch, one.repo):
            assert directive in lite_recipes[one.instance_id].test_command

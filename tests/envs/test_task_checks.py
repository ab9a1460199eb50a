"""`errata tasks check` on real sandboxes, and what a server makes of its results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend
from terminal_env import TerminalAction
from terminal_env.server.check.checker import check
from terminal_env.server.check.degenerate import named_paths, programs
from terminal_env.server.check.results import (
    ALLOW_VARIABLE,
    BUNDLED_RESULTS,
    CHECKER_VERSION,
    Result,
    Results,
    base_id,
)
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import BUNDLED, TASKS_VARIABLE, load_tasks, read_task
from tests.hangs import HANGS_S

from . import harbor_style
from .harbor_style import REWARD, STYLES, TOML
from .scripted import write_task

PASSES = {
    "task.toml": TOML,
    "instruction.md": "Write the word right to /app/out.txt.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
    "solution/solve.sh": "echo right > /app/out.txt\n",
    "tests/test.sh": f"grep -qx right /app/out.txt\n{REWARD}",
}


async def checked(backend: Backend, root: Path, **changed: str) -> Result:
    return await check(backend, read_task(write_task(root, {**PASSES, **changed})), times=2)


@pytest.mark.tasks
@pytest.mark.sandbox
@pytest.mark.parametrize("style", STYLES)
async def test_a_sound_task_passes(tmp_path: Path, real: Backend, style: str) -> None:
    result = await check(real, read_task(harbor_style.write(tmp_path / style, STYLES[style])))
    assert result.passed, result.problems
    assert result.scores["solution"] == [1.0] * 3 and result.scores["empty"] == [0.0] * 3
    assert result.broken["the untouched start, no tools"] == ["raised"] * 3
    assert result.broken["the solved task, no runner"] == ["raised"] * 3
    assert not result.holes


@pytest.mark.tasks
@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"solution/solve.sh": "echo wrong > /app/out.txt\n"}, r"scores 0 instead of 1: .*solve.sh ended with 0"),
        ({"solution/solve.sh": "ls /not/there\n"}, r"scores 0 instead of 1: .*ended with 2: ls: cannot access"),
        ({"tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n"}, "doing nothing scores 1"),
        ({"tests/test.sh": f"uvx -w pytest -w torch pytest\n{REWARD}"}, "the solution cannot be graded: .*torch"),
        ({"tests/test.sh": "exit 1\n"}, "the solution cannot be graded: .*no reward file"),
        ({"tests/test.sh": f"[ $(( RANDOM % 2 )) = 0 ]\n{REWARD}", "times": "12"}, "flaky"),
        (
            {"tests/test.sh": "command -v grep > /dev/null || { echo 0 > /logs/verifier/reward.txt; exit; }\n"
             f"grep -qx right /app/out.txt\n{REWARD}"},
            "where the verifier's tools are missing, the solved task scores 0 instead of failing",
        ),
        (
            {"tests/test.sh": "set -e\ngrep -qx right /app/out.txt\necho 1 > /logs/verifier/reward.txt\n"},
            "the untouched start cannot be graded: test.sh ended with 2 and wrote no reward file",
        ),
        (
            {"tests/test.sh": "grep -qx right /app/out.txt && n=10\necho ${n:-0} > /logs/verifier/reward.txt\n"},
            r"the solution cannot be graded: its score 10 is not between 0 and 1: .*max_score = 10",
        ),
        (
            {"tests/test.sh": "n=-1; grep -qx right /app/out.txt && n=1\necho $n > /logs/verifier/reward.txt\n"},
            "the untouched start cannot be graded: its score -1 is not between 0 and 1",
        ),
        (
            {"tests/test.sh": "grep -qx right /app/out.txt && n=1\ngrep -qx done /app/out.txt && n=4\n"
             "echo ${n:-0} > /logs/verifier/reward.txt\n"},
            "after the program 'named files, a line' it cannot be graded: its score 4 is not between 0 and 1",
        ),
        (
            {"tests/test.sh": "grep -qx right /app/out.txt && n=100%\necho ${n:-0} > /logs/verifier/reward.txt\n"},
            "the solution cannot be graded: test.sh ended with 0, and its reward.txt says '100%'",
        ),
        (
            {"solution/solve.sh": "python3 -m http.server 8765 > /dev/null 2>&1 &\n"},
            r"scores 0 instead of 1: .*it left programs running in the background \(python3\), which were killed",
        ),
        (
            {"solution/solve.sh": "setsid sleep 1000 < /dev/null > /dev/null 2>&1 & disown\n"},
            r"left programs running in the background \(sleep\)",
        ),
        (
            {"tests/test.sh": f"echo the word is missing; grep -qx left /app/out.txt\n{REWARD}"},
            "scores 0 instead of 1: test.sh ended with 0: the word is missing",
        ),
        ({"setup.sh": "exit 7\n"}, "setup.sh ended with 7"),
        ({"environment/Dockerfile": "FROM x\nWORKDIR /app\nRUN rm /app/nothing\n"}, "line 3: RUN rm /app/nothing"),
    ],
)  # fmt: skip
async def test_an_unsound_task_fails_and_says_why(
    tmp_path: Path, real: Backend, changed: dict[str, str], problem: str
) -> None:
    times = int(changed.pop("times", "2"))
    task = read_task(write_task(tmp_path / "t", {**PASSES, **changed}))
    result = await check(real, task, times=times)
    assert not result.passed
    assert re.search(problem, "; ".join(result.problems)), result.problems


@pytest.mark.tasks
@pytest.mark.sandbox
async def test_a_verifier_that_needs_no_tool_passes_on_a_broken_machine(tmp_path: Path, real: Backend) -> None:
    """Nothing of it can be missing, so its score is right there too."""
    result = await checked(real, tmp_path / "t", **{"tests/test.sh": f'[ "$(< /app/out.txt)" = right ]\n{REWARD}'})
    assert result.passed, result.problems
    assert result.broken["the solved task, no tools"] == [1.0, 1.0]


@pytest.mark.tasks
@pytest.mark.sandbox
async def test_a_solution_has_its_variables_and_those_of_the_environment(tmp_path: Path, real: Backend) -> None:
    changed = {
        "task.toml": f'mode = "x"\n{TOML}[environment.env]\nWORD = "ri"\n[solution.env]\nEND = "${{NO_SUCH:-ght}}"\n',
        "solution/solve.sh": "echo $WORD$END > /app/out.txt\n",
    }
    result = await checked(real, tmp_path / "t", **changed)
    assert result.passed, result.problems
    assert "task.toml: mode is not used" in result.warnings


@pytest.mark.tasks
@pytest.mark.sandbox
async def test_lines_that_are_not_used_are_warnings_where_the_solution_fails(tmp_path: Path, real: Backend) -> None:
    changed = {"environment/Dockerfile": "FROM x\nWORKDIR /app\nCMD ./serve\n", "solution/solve.sh": "true\n"}
    result = await checked(real, tmp_path / "t", **changed)
    assert any("CMD ./serve is not run" in warning for warning in result.warnings)


@pytest.mark.tasks
@pytest.mark.sandbox
async def test_a_program_that_solves_nothing_and_earns_something_is_a_warning(tmp_path: Path, real: Backend) -> None:
    result = await checked(real, tmp_path / "t", **{"tests/test.sh": f"test -e /app/out.txt\n{REWARD}"})
    assert result.passed and "named files, empty" in result.holes
    assert any("'named files, empty' scores 1" in warning for warning in result.warnings)


@pytest.mark.tasks
@pytest.mark.sandbox
async def test_what_the_solution_did_without_is_no_error_later(
    tmp_path: Path, real: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"tests/test.sh": f"pip install torch; grep -qx right /app/out.txt\n{REWARD}"}
    task = read_task(write_task(tmp_path / "tasks" / "t", {**PASSES, **changed}))
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path / "tasks"))
    environment = TerminalEnvironment()
    await environment.reset_async(task_id="t")
    with pytest.raises(EnvironmentFailed, match="torch"):
        await environment.step_async(TerminalAction(tool="submit"))
    result = await check(real, task, times=1)
    assert result.passed and result.harmless == ("torch",)
    Results().keep(result)
    assert (await environment.step_async(TerminalAction(tool="submit"))).reward == 0.0
    await environment.aclose()


@pytest.mark.tasks
@pytest.mark.sandbox
@pytest.mark.usefixtures("real")
async def test_a_local_task_is_served_after_it_passed_and_not_before(
    tmp_path: Path, real: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOW_VARIABLE)
    root = write_task(tmp_path / "tasks" / "t", PASSES)
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path / "tasks"))
    environment = TerminalEnvironment()
    with pytest.raises(EnvironmentFailed, match=rf"was never checked .* run `errata tasks check {root}`"):
        await environment.reset_async(task_id="t")
    Results().keep(await check(real, read_task(root), times=1))
    assert (await environment.reset_async(task_id="t")).cwd == "/app"
    failed = Result("t", read_task(root).whole_digest, await base_id(real, "default"), problems=("flaky: x",))
    Results().keep(failed)
    with pytest.raises(EnvironmentFailed, match=r"failed its check \(flaky: x\)"):
        await environment.reset_async(task_id="t")
    monkeypatch.setenv(ALLOW_VARIABLE, "true")
    assert (await environment.reset_async(task_id="t")).task_id == "t"
    await environment.aclose()


async def test_a_task_that_says_it_cannot_be_checked_is_served(
    tasks: Path, environment: TerminalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ALLOW_VARIABLE)
    root = write_task(tasks / "open-ended", {"task.toml": "[errata]\nunchecked = true\n"})
    monkeypatch.setenv(TASKS_VARIABLE, str(root))
    assert (await environment.reset_async(task_id="open-ended")).task_id == "open-ended"
    monkeypatch.setenv(TASKS_VARIABLE, str(tasks / "other"))
    with pytest.raises(EnvironmentFailed, match="was never checked"):
        await environment.reset_async(task_id="other")


@pytest.mark.tasks
@pytest.mark.sandbox
@pytest.mark.parametrize(("flag", "passes"), [("", False), ("[errata]\nunchecked = true\n", True)])
async def test_a_task_without_a_solution_has_to_say_so(tmp_path: Path, real: Backend, flag: str, passes: bool) -> None:
    root = write_task(tmp_path / "t", {**PASSES, "task.toml": flag})
    (root / "solution" / "solve.sh").unlink()
    result = await check(real, read_task(root), times=1)
    assert result.passed is passes
    assert "solution" in (result.warnings if passes else result.problems)[0]


def test_a_result_holds_for_one_content_only(tmp_path: Path) -> None:
    root = write_task(tmp_path / "t", PASSES)
    results = Results(tmp_path / "results")
    task = read_task(root)
    kept = Result("t", task.whole_digest, "base-1", warnings=("w",), scores={"empty": [0.0]}, harmless=("x",))
    results.keep(kept)
    assert results.find(task, "base-1") == kept
    assert results.find(task, "base-2") is None
    for name in ("solution/solve.sh", "tests/test.sh", "environment/Dockerfile", "instruction.md", "task.toml"):
        before = (root / name).read_text()
        (root / name).write_text(f"{before}\n\n")
        assert results.find(read_task(root), "base-1") is None, name
        (root / name).write_text(before)
    next((tmp_path / "results").iterdir()).write_text("{")
    assert results.find(read_task(root), "base-1") is None, "an unreadable result counts for nothing"


def errata(*arguments: str, results: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ERRATA_TASK_CHECKS": str(results)}
    command = [sys.executable, "-m", "errata_server.cli", "tasks", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False)


@pytest.mark.tasks
@pytest.mark.sandbox
def test_the_command_prints_results_and_keeps_them(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "good", PASSES)
    write_task(tmp_path / "tasks" / "hole", {**PASSES, "tests/test.sh": f"test -e /app/out.txt\n{REWARD}"})
    arguments = ("check", str(tmp_path / "tasks"))
    first = errata(*arguments, results=tmp_path / "results")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "passed good\n" in first.stdout and "2 of 2 passed" in first.stdout
    again = errata(*arguments, "--json", results=tmp_path / "results")
    records = {record["task"]: record for record in json.loads(again.stdout)}
    assert again.returncode == 0 and records["good"]["scores"]["solution"] == [1.0] * 3
    strict = errata(*arguments, "--strict", results=tmp_path / "results")
    assert strict.returncode == 1 and "FAILED hole (known)" in strict.stdout and "1 of 2 passed" in strict.stdout
    write_task(tmp_path / "tasks" / "image", {**PASSES, "environment/Dockerfile": "FROM x\nRUN apt-get update\n"})
    image = errata(*arguments, results=tmp_path / "results")
    assert image.returncode == 1 and "FAILED task image: it needs an image" in image.stdout


@pytest.mark.parametrize(("arguments", "words"), [((), "name a directory"), (("/nowhere",), "no tasks below /nowhere")])
def test_the_command_says_what_it_needs(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = errata("check", *arguments, results=tmp_path)
    assert done.returncode == 2 and words in done.stderr


def test_the_shipped_results_are_of_the_bundled_tasks_as_they_are() -> None:
    """`errata tasks check --bundled --write` makes them anew."""
    results = {record["task"]: Result.of(record) for record in json.loads(BUNDLED_RESULTS.read_text())}
    tasks = {task.id: task for task in load_tasks().splits[BUNDLED]}
    assert set(results) == set(tasks)
    for name, result in results.items():
        assert (result.digest, result.checker) == (tasks[name].whole_digest, CHECKER_VERSION), name
        assert result.passed and not result.holes and result.scores["solution"] == [1.0] * 3, name
        assert set(programs(tasks[name])) < set(result.scores), name


def test_paths_are_found_in_an_instruction() -> None:
    text = (
        "Read `/app/in.csv` and ./notes.md (see https://x.org/a.txt). Write out/report.json, Makefile or `run`: 1.5 s."
    )
    assert named_paths(text) == ["/app/in.csv", "run", "./notes.md", "out/report.json"]

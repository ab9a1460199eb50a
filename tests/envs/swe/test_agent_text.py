"""What the agent reads of an observation."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from swe_bench_lite_env import SPEC, SweObservation, agent_text
from swe_bench_lite_env.models import TOOL_NAMES
from tests.hangs import HANGS_S

AS_BEFORE = "[directory, variables and functions are as before this command]"


def text(**fields: Any) -> str:
    return agent_text(SweObservation(done=False, reward=0.0, **fields))


def test_at_reset_it_reads_the_issue_and_where_the_repository_is() -> None:
    read = text(tool="reset", problem_statement="It breaks.\n", repo="pallets/flask", cwd="/testbed", turns_left=40)
    assert read.startswith("It breaks.\n\n[The repository pallets/flask is in /testbed.")
    assert "You have 40 turns." in read
    assert "turns" not in text(tool="reset", problem_statement="It breaks.", cwd="/testbed")


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({"tool": "run", "stdout": "a\n", "stderr": "b", "exit_code": 2}, "a\n[stderr]\nb\n[exit 2]"),
        ({"tool": "run", "timed_out": True, "time_limit_s": 30.0}, "[killed: time limit of 30 s]"),
        ({"tool": "run", "exit_code": 0, "shell_saved": False}, f"{AS_BEFORE}\n[exit 0]"),
        (
            {"tool": "run", "exit_code": 0, "killed_background": ["sleep"]},
            "[killed when the command ended: sleep]\n[exit 0]",
        ),
        ({"tool": "read_file", "content": "x", "truncated": True}, "x\n[truncated: part of the text is left out]"),
        ({"tool": "edit"}, "[replaced]"),
        ({"tool": "edit", "turns_left": 3}, "[replaced]\n[turns left: 3]"),
        ({"tool": "apply_patch", "stderr": "patch does not apply"}, "[stderr]\npatch does not apply"),
        ({"tool": "search"}, "[no match]"),
        ({"tool": "write_file", "turns_left": 30}, "[written]"),
        ({"tool": "run", "exit_code": 0, "budget_spent": "turns"}, "[exit 0]\n[the episode is over: no turn is left]"),
        ({"tool": "submit", "turns_left": 2}, "[submitted]"),
    ],
)
def test_later_it_reads_the_output_and_what_that_does_not_say(fields: dict[str, Any], read: str) -> None:
    assert text(**fields) == read
    assert agent_text(SweObservation(done=False, reward=0.0, **fields).model_dump(mode="json")) == read


def test_it_never_shows_a_marker_or_a_reward() -> None:
    marked = {"error_kind": "test_failure", "hint_template_key": "test.failed", "reward": 0.5}
    assert agent_text({"tool": "run", "exit_code": 1, "stdout": "", **marked}) == "[exit 1]"


def test_every_tool_has_a_description_and_arguments_that_an_action_has() -> None:
    assert tuple(tool["name"] for tool in SPEC.tools) == TOOL_NAMES
    for tool in SPEC.tools:
        assert set(tool["parameters"]["required"]) <= set(tool["parameters"]["properties"])
        assert set(tool["parameters"]["properties"]) <= set(SPEC.action_cls.model_fields)
    assert SPEC.closing_tool in TOOL_NAMES and SPEC.sandbox


def test_no_field_that_leaves_the_server_can_hold_what_is_secret() -> None:
    from swe_bench_lite_env import SweState

    fields = {*SweObservation.model_fields, *SweState.model_fields}
    assert not [name for name in fields if "test" in name or ("hint" in name and name != "hint_template_key")]
    assert not fields & {"patch", "test_patch", "fail_to_pass", "pass_to_pass", "base_commit"}


@pytest.mark.parametrize(
    ("code", "free"),
    [
        ("import swe_bench_lite_env", ("openenv", "pydantic", "errata_protocol")),
        (
            "from swe_bench_lite_env import SPEC, SweAction",
            ("errata_server", "swe_bench_lite_env.server", "swe_bench_lite_env.dataset"),
        ),
        (
            "from swe_bench_lite_env.rules import verdict, report, directives",
            ("openenv", "errata_server", "errata_client"),
        ),
    ],
)
def test_importing_a_part_loads_no_other(code: str, free: tuple[str, ...]) -> None:
    check = f"{code}\nimport sys\nprint([name for name in sys.modules if name.startswith({free!r})])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr

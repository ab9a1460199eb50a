"""What rfcs/proposals says that OpenEnv's own environments do; see ``tests/upstream_patches/test_today.py``."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from typing import Any

from ..openenv_source import ENVIRONMENTS, SOURCE, needs_openenv_source
from .conftest import PYTHON

CODING = """
import json, sys
from coding_env.models import CodeAction
from coding_env.server.python_codeact_env import PythonCodeActEnv
env = PythonCodeActEnv()
env.reset()
print(json.dumps(env.step(CodeAction(code=sys.argv[1])).model_dump()))
"""
REPL = """
import json, sys
from repl_env.models import REPLAction
from repl_env.server.repl_environment import REPLEnvironment
env = REPLEnvironment()
env.reset()
print(json.dumps(env.step(REPLAction(code=sys.argv[1])).model_dump()))
"""


def observation(program: str, code: str) -> dict[str, Any]:
    """Return what an environment answers to code, on stock OpenEnv."""
    done = subprocess.run(
        [str(PYTHON), "-c", program, code],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ENVIRONMENTS), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@needs_openenv_source
def test_today_coding_env_tells_an_error_by_its_text() -> None:
    said = observation(CODING, "x = 1 / 0")
    assert said["exit_code"] == 1
    assert said["stderr"].startswith("Traceback")
    assert said["stderr"].rstrip().endswith("at line 'x = 1 / 0' due to: ZeroDivisionError: division by zero")
    loop = observation(CODING, "for i in [1]:\n    x = 2\n    x / 0")["stderr"]
    assert "at line 'for i in [1]:\n    x = 2\n    x / 0' due to: ZeroDivisionError" in loop
    frames = [line for line in said["stderr"].splitlines() if line.startswith("  File ")]
    assert frames
    assert all(str(ENVIRONMENTS) in line or "/smolagents/" in line or "/concurrent/" in line for line in frames)


@needs_openenv_source
def test_today_coding_env_errors_can_be_forged() -> None:
    forged = observation(CODING, 'raise ValueError("\\nCode parsing failed on line 1 due to: SyntaxError: x")')
    assert forged["stderr"].endswith("\nCode parsing failed on line 1 due to: SyntaxError: x\n")


@needs_openenv_source
def test_today_clients_refuse_or_drop_undeclared_fields() -> None:
    program = """
import json
from pydantic import ValidationError
from coding_env.client import CodingEnv
from repl_env.client import REPLEnv
payload = {"observation": {"error_info": {"kind": "k"}, "metadata": {}}, "reward": 0.0, "done": False}
try:
    CodingEnv(base_url="http://127.0.0.1:1")._parse_result(payload)
    refused = ""
except ValidationError as error:
    refused = str(error)
kept = REPLEnv(base_url="http://127.0.0.1:1")._parse_result(payload)
print(json.dumps({"refused": refused, "kept": str(kept)}))
"""
    said = observation(program, "")
    assert "error_info" in said["refused"]
    assert "error_info" not in said["kept"]


@needs_openenv_source
def test_today_reasoning_gym_env_builds_results_without_metadata() -> None:
    program = """
import json
from openenv.core.client_types import StepResult
from reasoning_gym_env.harness import _build_tool_result
from reasoning_gym_env.models import ReasoningGymObservation
seen = StepResult(ReasoningGymObservation(metadata={"hidden": "label"}), reward=1.0)
built = _build_tool_result()("answer", {"answer": "1"}, seen, None)
print(json.dumps({"built": str(built), "reward": built.data["reward"]}))
"""
    said = observation(program, "")
    assert said["reward"] == 1.0
    assert "hidden" not in said["built"]


@needs_openenv_source
def test_today_tbench2_env_runs_commands_and_tests() -> None:
    source = (ENVIRONMENTS / "tbench2_env" / "server" / "tbench2_env_environment.py").read_text()
    assert "self._terminal_toolkit.shell_exec(\n                    command=action.command," in source
    assert "python -m pytest -q {tests_dir} -rA" in source


@needs_openenv_source
def test_today_an_example_dumps_the_observation() -> None:
    source = (SOURCE / "examples" / "agent_world_model" / "example_usage.py").read_text()
    dumped = source.index("tool_response = json.dumps(obs.model_dump(), ensure_ascii=False)")
    assert 0 < source[dumped:].find('"content": f"Tool response:\\n{tool_response}"') < 600


@needs_openenv_source
def test_today_three_clients_take_no_further_arguments() -> None:
    for name in ("dipg_safety_env", "dm_control_env", "unity_env"):
        parsed = ast.parse((ENVIRONMENTS / name / "client.py").read_text())
        (client,) = (
            one
            for one in parsed.body
            if isinstance(one, ast.ClassDef) and any("EnvClient" in ast.unparse(base) for base in one.bases)
        )
        (init,) = (one for one in client.body if isinstance(one, ast.FunctionDef) and one.name == "__init__")
        assert init.args.kwarg is None, name
        assert "recovery_timeout_s" not in {one.arg for one in (*init.args.args, *init.args.kwonlyargs)}, name


@needs_openenv_source
def test_today_an_environment_has_an_mcp_client() -> None:
    parsed = ast.parse((ENVIRONMENTS / "echo_env" / "client.py").read_text())
    (client,) = (one for one in parsed.body if isinstance(one, ast.ClassDef))
    assert [ast.unparse(base) for base in client.bases] == ["MCPToolClient"]


@needs_openenv_source
def test_today_coding_env_puts_into_metadata_what_cost_the_reward() -> None:
    assert observation(CODING, "import os")["metadata"] == {
        "last_code": "import os",
        "safety_violation": "import\\s+os",
    }


@needs_openenv_source
def test_today_repl_env_tells_an_error_by_a_traceback() -> None:
    said = observation(REPL, "x = 1 / 0")
    assert said["result"]["success"] is False
    assert "Traceback (most recent call last)" in said["result"]["exception"]
    assert said["result"]["exception"] == said["result"]["stderr"]


@needs_openenv_source
def test_today_repl_env_makes_prompts_without_metadata() -> None:
    program = """
import json
from repl_env.models import REPLObservation
from repl_env.prompts import format_observations
shown = [format_observations([REPLObservation(metadata=m)]) for m in ({}, {"hidden": "label"})]
print(json.dumps({"same": shown[0] == shown[1], "length": len(shown[0])}))
"""
    said = observation(program, "")
    assert said["same"]
    assert said["length"] > 0

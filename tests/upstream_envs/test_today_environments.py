"""What rfcs/proposals says that OpenEnv's own environments do; see ``tests/upstream_patches/test_today.py``."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from ..openenv_source import ENVIRONMENTS, needs_openenv_source
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
    frames = [line for line in said["stderr"].splitlines() if line.startswith("  File ")]
    assert frames
    assert all(str(ENVIRONMENTS) in line or "/smolagents/" in line or "/concurrent/" in line for line in frames)


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

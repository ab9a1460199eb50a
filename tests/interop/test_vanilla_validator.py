"""`openenv validate` of both generations on the terminal environment: its directory and a running server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.hangs import HANGS_S

from .conftest import DOORS, GENERATIONS, ROOT, foreign_environment, foreign_python, through

pytestmark = pytest.mark.sandbox


def validate(generation: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(foreign_python(generation)).with_name("openenv")), "validate", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=foreign_environment(), capture_output=True, text=True, timeout=HANGS_S, check=False
    )


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("door", DOORS)
def test_a_running_server_passes_all_criteria(ours: dict[str, str], generation: str, door: str) -> None:
    url = through(door, ours, "terminal")
    done = validate(generation, "--json", "--timeout", "30", url)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] is True
    assert [criterion["id"] for criterion in report["criteria"] if not criterion["passed"]] == []
    assert len(report["criteria"]) == 6


@pytest.mark.parametrize(
    ("generation", "arguments"), [("0.3.0", ()), ("0.10.0", ("--level", "static", "--skip-build"))]
)
def test_the_directory_passes(generation: str, arguments: tuple[str, ...]) -> None:
    done = validate(generation, *arguments, "envs/terminal_env")
    assert done.returncode == 0, done.stdout + done.stderr

"""OpenEnv's own validator on the terminal environment: its directory, and a running server of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openenv.cli._validation import get_deployment_modes, validate_multi_mode_deployment
from openenv.validation.graders.runtime.basic import (
    ObservationSchemaGrader,
    RewardWellFormedGrader,
    StateContractGrader,
)
from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
from openenv.validation.runtime.collector import collect_runtime_evidence
from openenv.validation.runtime.contracts import load_runtime_plan

from errata_server.process import ServerProcess
from terminal_env import TerminalAction
from terminal_env.server.tasks import BUNDLED, load_tasks
from tests.hangs import HANGS_S

PACKAGE = Path(__file__).parents[2] / "envs" / "terminal_env"
DOORS = ["root", "mounted"]


def openenv(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the ``openenv`` command in the environment's directory."""
    return subprocess.run(
        [sys.executable, "-m", "openenv.cli", *arguments],
        cwd=PACKAGE,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )


def test_the_directory_passes_the_static_level() -> None:
    done = openenv("validate", "--level", "static", "--skip-build", "--json", ".")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["verdict"] == "pass"
    assert {result["check_id"]: result["status"] for result in report["results"]} == {"static.manifest": "pass"}


def test_the_directory_is_ready_for_every_way_of_deployment() -> None:
    """What `openenv validate` asked for up to 0.4."""
    assert validate_multi_mode_deployment(PACKAGE) == (True, [])
    assert all(get_deployment_modes(PACKAGE).values())


def test_the_manifest_says_what_is_there() -> None:
    manifest = OpenEnvYamlParser().parse(PACKAGE)
    tasks = load_tasks().splits[BUNDLED]
    assert manifest.capabilities.declared_task_count == {BUNDLED: len(tasks)}
    assert (PACKAGE / manifest.capabilities.oracle.location).is_file()
    assert (PACKAGE / manifest.execution.dockerfile).is_file()
    plan = load_runtime_plan(PACKAGE, manifest.execution)
    assert plan.reset.options["task_id"] in {task.id for task in tasks}
    assert [TerminalAction(**action).tool for action in plan.actions][-1] == "submit"


def test_the_application_is_found_from_inside_the_directory() -> None:
    """As ``app: server.app:app`` of openenv.yaml has it."""
    code = "from server.app import app, main; print(app.title, '/ws' in {r.path for r in app.routes})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE, capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "True"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ServerProcess("terminal", tmp_path_factory.mktemp("served")) as server:
        yield server.url


def address(door: str, url: str) -> str:
    return url if door == "root" else f"{url}/terminal"


@pytest.mark.tasks
@pytest.mark.sandbox
@pytest.mark.parametrize("door", DOORS)
def test_a_running_server_passes_every_criterion(door: str, served: str) -> None:
    done = openenv("validate", "--json", "--timeout", "30", address(door, served))
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["passed"] is True and report["mode"] == "simulation"
    assert {criterion["id"]: criterion["passed"] for criterion in report["criteria"]} == dict.fromkeys(
        (
            "openapi_version_available",
            "health_endpoint",
            "metadata_endpoint",
            "schema_endpoint",
            "mcp_endpoint",
            "mode_endpoint_consistency",
        ),
        True,
    )


@pytest.mark.tasks
@pytest.mark.sandbox
@pytest.mark.parametrize("door", DOORS)
def test_a_running_server_keeps_the_contracts_of_the_runtime_level(door: str, served: str) -> None:
    """The graders of `openenv validate --level runtime`, without the container in which it starts the server."""
    manifest = OpenEnvYamlParser().parse(PACKAGE)
    plan = load_runtime_plan(PACKAGE, manifest.execution)
    evidence = collect_runtime_evidence(address(door, served), plan, episode_timeout_s=100.0)
    assert evidence.failure_reason is None
    subject = SimpleNamespace(manifest=manifest, runtime_evidence=evidence)
    for grader in (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader()):
        result = grader.run(subject)
        assert result.status.value == "pass", (grader.check_id, result.evidence)

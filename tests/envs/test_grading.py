"""Submitting on the fake sandbox: scores, failures of the verifier, and what never leaves the server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from errata_protocol.errors import EnvironmentFailed, SandboxFailed
from errata_server.sandbox.base_trees.recipe import VERIFIER_DIRECTORY
from terminal_env import TerminalAction, agent_text
from terminal_env.server import verifier
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import read_task

from .scripted import Script, ScriptedBackend, write_task


def run(command: str) -> TerminalAction:
    return TerminalAction(command=command)


@pytest.mark.usefixtures("tasks")
async def test_submit_gives_the_verifiers_score_and_ends(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    def judge(files: object, request: dict[str, str]) -> dict[str, object]:
        assert isinstance(files, dict) and files["/workspace/out.txt"] == b"half\n"
        checks = [{"name": "hidden_check", "passed": False, "why": "SECRET-WHY"}]
        return {"nonce": request["nonce"], "score": 0.5, "checks": checks}

    backend.script.judge = judge
    await environment.reset_async(task_id="copy")
    await environment.step_async(run("echo half > out.txt"))
    end = await environment.step_async(TerminalAction(tool="submit"))
    assert (end.reward, end.done, end.error_kind) == (0.5, True, None)
    assert "SECRET" not in end.model_dump_json() + environment.state.model_dump_json()
    assert "SECRET" not in agent_text(end) and "0.5" not in agent_text(end)
    assert end.metadata == {}
    assert environment.verdict and environment.verdict.detail == "SECRET-WHY"


@pytest.mark.usefixtures("tasks")
async def test_the_verifier_runs_in_a_fork_without_the_agents_shell(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    await environment.reset_async(task_id="copy")
    await environment.step_async(run("export PATH=/workspace/evil; cd /tmp"))
    mine = backend.script.runs[-1][2]
    await environment.step_async(TerminalAction(tool="submit"))
    command, options, sandbox = backend.script.runs[-1]
    assert command.startswith("exec python3 -I -S /verifier/")
    assert options["clean"] is True and not options.get("env")
    assert sandbox != mine and set(backend.live) == {mine}, "the fork is destroyed"
    seen = (await backend.live[mine].run("echo $PATH")).stdout
    assert seen == "/workspace/evil\n", "the agent's own sandbox is undisturbed"


@pytest.mark.usefixtures("tasks")
async def test_a_state_that_breaks_a_sound_verifier_is_worth_nothing(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    def judge(files: object, request: dict[str, str]) -> dict[str, object] | None:
        assert isinstance(files, dict)
        broken = "/workspace/bomb" in files
        return None if broken else {"nonce": request["nonce"], "score": 0.0, "checks": []}

    backend.script.judge = judge
    await environment.reset_async(task_id="copy")
    await environment.step_async(run("echo boom > bomb"))
    assert (await environment.step_async(TerminalAction(tool="submit"))).reward == 0.0


@pytest.mark.usefixtures("tasks")
async def test_a_verifier_that_breaks_by_itself_gives_no_reward(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    backend.script.judge = lambda files, request: None
    await environment.reset_async(task_id="copy")
    with pytest.raises(EnvironmentFailed, match="verifier of task copy is broken"):
        await environment.step_async(TerminalAction(tool="submit"))
    assert not environment.state.done and environment.state.step_count == 0


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize("score", [float("nan"), float("inf")])
async def test_a_score_that_is_no_number_is_no_verdict(
    backend: ScriptedBackend, environment: TerminalEnvironment, score: float
) -> None:
    backend.script.judge = lambda files, request: {"nonce": request["nonce"], "score": score, "checks": []}
    await environment.reset_async(task_id="copy")
    with pytest.raises(EnvironmentFailed):
        await environment.step_async(TerminalAction(tool="submit"))


@pytest.mark.usefixtures("tasks")
async def test_a_verdict_with_another_nonce_does_not_count(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    backend.script.judge = lambda files, request: {"nonce": "0" * 32, "score": 1.0, "checks": []}
    await environment.reset_async(task_id="copy")
    with pytest.raises(EnvironmentFailed):
        await environment.step_async(TerminalAction(tool="submit"))


@pytest.mark.usefixtures("tasks")
async def test_a_sandbox_that_breaks_while_grading_is_an_exception(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    await environment.reset_async(task_id="copy")
    backend.faults.runs = 1
    with pytest.raises(SandboxFailed):
        await environment.step_async(TerminalAction(tool="submit"))
    assert (await environment.step_async(TerminalAction(tool="submit"))).reward == 1.0, "it can be tried again"


@pytest.mark.parametrize(
    ("trees", "expected"), [(("own", "default"), "own"), (("own",), "own"), (("default",), "default"), ((), "")]
)
async def test_a_grading_takes_the_packages_of_its_tasks_own_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trees: tuple[str, ...], expected: str
) -> None:
    for name in ("own", "default"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "bash").touch()
    for name in trees:
        (tmp_path / name / VERIFIER_DIRECTORY).mkdir(parents=True)
    named = {name: str(tmp_path / name) for name in ("own", *(name for name in trees if name == "default"))}
    monkeypatch.setenv("ERRATA_BASE", json.dumps(named))
    monkeypatch.setattr("errata_server.sandbox.base_trees.tree.base_directories", list)
    root = write_task(tmp_path / "t", {"task.toml": '[errata]\nbase = "own"\n', "tests/test.sh": "true\n"})
    backend = ScriptedBackend(
        Script(lambda files, request: {"nonce": request["nonce"], "score": 1.0, "found": None, "exit_code": 0})
    )
    await verifier.attempt(backend, read_task(root), await (await backend.open()).snapshot())
    mounts = next(options["mounts"] for command, options, _ in backend.script.runs if command == verifier.SCRIPT)
    packages = mounts.get(f"/{VERIFIER_DIRECTORY}")
    assert packages == (tmp_path / expected / VERIFIER_DIRECTORY if expected else None)

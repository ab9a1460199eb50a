"""``errata image``: a task's own Dockerfile becomes an image of the engine, and the task runs on it."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from errata_sandboxd.images import base_of, main
from tests.client.loopback import served

from .conftest import RunningBroker
from .test_served import application, terminal

pytestmark = pytest.mark.containers

DOCKERFILE = """FROM errata/base:default
ARG WORD=plain
RUN mkdir -p /opt/tools && printf '#!/bin/sh\\necho %s tool\\n' "$WORD" > /opt/tools/speak && chmod 755 /opt/tools/speak
RUN if ls /sys/class/net | grep -v lo; then exit 9; fi
WORKDIR /workspace
COPY notes.txt /workspace/notes.txt
"""
TEST = """#!/bin/bash
if [ "$(cat /workspace/answer.txt)" = "built tool" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task whose Dockerfile needs an engine."""
    root = tmp_path / "tasks" / "speaking-tool"
    for name, text in {
        "environment/Dockerfile": DOCKERFILE,
        "environment/notes.txt": "call /opt/tools/speak\n",
        "instruction.md": "Write what `/opt/tools/speak` prints to `/workspace/answer.txt`.\n",
        "task.toml": 'version = "1.0"\n\n[errata]\nbase = "speaking-tool"\nbuilt = true\n',
        "tests/test.sh": TEST,
        "solution/solve.sh": "#!/bin/bash\n/opt/tools/speak > /workspace/answer.txt\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_task_with_a_dockerfile_of_its_own_is_built_and_played(
    engine: str,
    base_image: str,
    api: Any,
    broker: RunningBroker,
    task: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["build", str(task), "--engine", engine, "--build-arg", "WORD=built", "--json"]) == 0
    shown = capsys.readouterr()
    made = json.loads(shown.out)
    assert made["image"] == "errata/base:speaking-tool" and made["id"].startswith("sha256:")
    assert "Step 1/" in shown.err
    try:
        assert main(["list", "--engine", engine]) == 0
        assert "errata/base:speaking-tool" in capsys.readouterr().out
        monkeypatch.setenv("ERRATA_SANDBOXD_SOCKET", str(broker.sockets["two"]))
        monkeypatch.setenv("ERRATA_TERMINAL_TASKS", str(task.parent))
        monkeypatch.setenv("ERRATA_ALLOW_UNCHECKED", "true")
        with served(application(tmp_path / "data")) as url, terminal.TerminalEnv(base_url=url).sync() as client:
            client.reset(task_id="speaking-tool")
            assert client.run("cat notes.txt").observation.stdout == "call /opt/tools/speak\n"
            offline = "import socket; socket.create_connection(('1.1.1.1', 80), 2)"
            assert client.run(f'python3 -c "{offline}"').observation.exit_code != 0
            assert client.run("/opt/tools/speak > answer.txt").observation.exit_code == 0
            end = client.submit()
            assert (end.reward, end.done) == (1.0, True)
            client.reset(task_id="speaking-tool")
            assert client.submit().reward == 0.0
    finally:
        api.remove_image("errata/base:speaking-tool", force=True)


def test_a_line_that_fails_and_an_engine_that_is_away_are_named(
    engine: str, base_image: str, task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (task / "environment" / "Dockerfile").write_text("FROM errata/base:default\nRUN exit 7\n")
    assert main(["build", str(task), "--engine", engine, "-q"]) == 1
    assert "returned a non-zero code: 7" in capsys.readouterr().err
    assert main(["pull", "errata/nothing:here", "--engine", engine, "-q"]) == 1
    assert capsys.readouterr().err.startswith("errata image: ")
    assert main(["list", "--engine", f"unix://{tmp_path}/none"]) == 1
    assert f"unix://{tmp_path}/none" in capsys.readouterr().err
    assert main(["build", str(tmp_path), "--engine", engine]) == 1
    assert "Dockerfile is not there" in capsys.readouterr().err


def test_an_image_becomes_a_root_file_system_and_an_image_again(
    engine: str, base_image: str, api: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "root.tar"
    before = {one["Id"] for one in api.containers(all=True)}
    assert main(["export", "debian:bookworm-slim", "-o", str(archive), "--engine", engine, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == archive.stat().st_size
    with tarfile.open(archive) as found:
        assert "etc/debian_version" in {one.removeprefix("./") for one in found.getnames()}
    # Those of tests before may still be going.
    assert {one["Id"] for one in api.containers(all=True)} <= before
    assert main(["export", "debian:bookworm-slim", "-o", str(archive), "--engine", engine]) == 1
    assert "exists already" in capsys.readouterr().err
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "-C", str(root), "-xf", str(archive)], check=True)
    assert main(["import", str(root), "--name", "exported-again", "--engine", engine, "-q"]) == 0
    api.remove_image("errata/base:exported-again")
    assert main(["import", str(tmp_path), "--engine", engine, "-q"]) == 1
    assert "is not a root file system" in capsys.readouterr().err


def test_a_base_is_that_of_the_task_or_the_directorys_name(task: Path) -> None:
    assert base_of(task) == "speaking-tool"
    (task / "task.toml").write_text('[errata]\nbase = "other"\n')
    assert base_of(task) == "other"
    (task / "task.toml").unlink()
    assert base_of(task) == "speaking-tool"

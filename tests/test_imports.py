"""Imports go one way: protocol <- client, server, environments; trainer adapter <- protocol and client.

The rules are import-linter contracts in ``pyproject.toml``. They run here too, and each is shown to bite.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("protocol", "server", "client", "envs", "trainer_adapter", "bench")


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the rooms below ``root``, whatever is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / room) for room in ROOMS)}
    command = [sys.executable, "-P", "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    return subprocess.run(
        [*command, "--no-cache"], cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "tasks"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_every_room_imports_only_what_it_may() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("protocol/errata_protocol/added.py", "import socket", "The protocol imports no other room"),
        (
            "protocol/errata_protocol/added.py",
            "import errata_server.environments.context",
            "The protocol imports no other room",
        ),
        (
            "client/errata_client/added.py",
            "import errata_server.environments.context",
            "The client imports the protocol",
        ),
        ("server/errata_server/added.py", "import terminal_env.models", "The server names no environment"),
        ("server/errata_server/added.py", "import errata_client", "The server names no environment"),
        ("envs/terminal_env/models.py", "import errata_server.environments.context", "What an environment publishes"),
        ("envs/terminal_env/models.py", "import terminal_env.server", "The published half of an environment"),
        (
            "trainer_adapter/errata_trainer/added.py",
            "import errata_server.environments.context",
            "The trainer adapter imports",
        ),
        ("server/errata_server/added.py", "import errata_bench.cli", "Nothing imports the benchmark"),
        ("bench/errata_bench/mux_load.py", "import errata_protocol.mux", "The benchmark's load and its stock server"),
        ("bench/errata_bench/suite.py", "import errata_client", "The benchmark knows environments and clients"),
    ],
)
def test_a_forbidden_import_is_caught(copy: Path, module: str, line: str, contract: str) -> None:
    with (copy / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout
    broken = [row for row in result.stdout.splitlines() if " BROKEN" in row]
    assert any(contract in row for row in broken), result.stdout


def test_a_new_module_of_an_environment_must_say_on_which_side_it_is(copy: Path) -> None:
    (copy / "envs/terminal_env/added.py").write_text("")
    result = lint(copy)
    assert result.returncode != 0
    assert "terminal_env.added" in result.stdout + result.stderr


def test_the_servers_half_of_an_environment_may_use_the_server(copy: Path) -> None:
    (copy / "envs/terminal_env/server/added.py").write_text("import errata_server.environments.context\n")
    assert lint(copy).returncode == 0


def test_importing_what_an_environment_publishes_loads_no_server() -> None:
    code = (
        "import sys; from terminal_env import SPEC, TerminalAction; SPEC.name\n"
        "server = ('errata_server', 'terminal_env.server')\n"
        "loaded = [name for name in sys.modules if name.startswith(server)]\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr

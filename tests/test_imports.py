"""Imports go one way: protocol <- client, server, environments; trainer adapter <- protocol and client.

The rules are import-linter contracts in ``pyproject.toml``. They run here too, and each is shown to bite.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.hangs import HANGS_S

ROOT = Path(__file__).parents[1]
FOLDERS = ("protocol", "server", "client", "envs", "trainer_adapter", "bench")


def lint(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter over the rooms below ``root``, whatever is installed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(root / folder) for folder in FOLDERS)}
    command = [sys.executable, "-P", "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    return subprocess.run(
        [*command, *(options or ("--no-cache",))],
        cwd=root, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False,
    )  # fmt: skip


@dataclass
class Copy:
    """The rooms in a directory of their own, each file as it is here but for what one test changes."""

    root: Path
    changed: dict[Path, bytes | None] = field(default_factory=dict)

    def write(self, name: str, text: str) -> None:
        """Add a text to a file, which is made if there is none."""
        file = self.root / name
        self.changed.setdefault(file, file.read_bytes() if file.exists() else None)
        file.parent.mkdir(exist_ok=True)
        with file.open("a", encoding="utf-8") as opened:
            opened.write(text)

    def restore(self) -> None:
        """Make each file what it was; one that was written is read again, having another time."""
        for file, text in self.changed.items():
            if text is not None:
                file.write_bytes(text)
            elif file.name == "__init__.py":
                shutil.rmtree(file.parent)
            else:
                file.unlink()
        self.changed.clear()

    def lint(self) -> subprocess.CompletedProcess[str]:
        """Run import-linter, which knows the imports of files that nobody has written since."""
        return lint(self.root, "--cache-dir", str(self.root / "cache"))


@pytest.fixture(scope="module")
def all_rooms(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    root = tmp_path_factory.mktemp("copy")
    for folder in FOLDERS:
        left_out = ("__pycache__", "tasks") if folder == "envs" else ("__pycache__",)
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns(*left_out))
    shutil.copy(ROOT / "pyproject.toml", root)
    return Copy(root)


@pytest.fixture
def copy(all_rooms: Copy) -> Iterator[Copy]:
    yield all_rooms
    all_rooms.restore()


def test_every_room_imports_only_what_it_may() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout
    assert " 0 broken" in result.stdout


FORBIDDEN = [
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
    ("server/errata_server/ids.py", "import terminal_env.models", "The server names no environment"),
    ("server/errata_server/ids.py", "import errata_client", "The server names no environment"),
    ("server/errata_server/ids.py", "import errata_server.log", "Inside the server imports run down"),
    (
        "server/errata_server/journal/tables.py",
        "import errata_server.recovery",
        "Inside the server imports run down",
    ),
    ("server/errata_server/journal/disk.py", "import errata_server.clock", "Inside the server imports run down"),
    ("server/errata_server/sandbox/spec.py", "import errata_server.settings", "Inside the server imports run down"),
    ("server/errata_server/sandbox/spec.py", "import errata_server.journal", "Inside the server imports run down"),
    ("server/errata_os/user_cache.py", "import errata_server.ids", "What is needed of the operating system"),
    ("envs/terminal_env/models.py", "import errata_os.input_files", "What an environment publishes"),
    ("server/errata_server/runtime/rows.py", "import errata_server.episodes.reads", "Inside the server imports"),
    (
        "server/errata_server/episodes/reads.py",
        "from errata_server.sessions import session",
        "Inside the server imports",
    ),
    ("server/errata_server/sessions/session.py", "import errata_server.doors.auth", "Inside the server imports"),
    (
        "server/errata_server/sandbox/files/walk.py",
        "import errata_server.sandbox.layers.store",
        "Inside the sandbox imports run down",
    ),
    ("envs/terminal_env/models.py", "import errata_server.environments.context", "What an environment publishes"),
    ("envs/terminal_env/models.py", "import errata_environment.sandboxed", "What an environment publishes"),
    (
        "server/errata_environment/published/tools.py",
        "import errata_environment.sandboxed",
        "What the kit for environments publishes",
    ),
    ("server/errata_environment/sandboxed.py", "import terminal_env.models", "The kit for environments names no"),
    ("server/errata_server/ids.py", "import errata_environment.sandboxed", "The server names no environment"),
    ("envs/terminal_env/models.py", "import terminal_env.server", "The published half of an environment"),
    (
        "trainer_adapter/errata_trainer/added.py",
        "import errata_server.environments.context",
        "The trainer adapter imports",
    ),
    ("server/errata_server/ids.py", "import errata_bench.cli", "Nothing imports the benchmark"),
    ("bench/errata_bench/mux_load.py", "import errata_protocol.mux", "The benchmark's load and its stock server"),
    ("bench/errata_bench/suite.py", "import errata_client", "The benchmark knows environments and clients"),
]
"""Modules, a forbidden import of each, and the contract that it breaks."""
CIRCLE = ("server/errata_server/sessions/session.py", "from . import sessions")


def module_of(file: str) -> str:
    """Return the name of the module in a file of a room."""
    return ".".join(Path(file.removesuffix("/__init__.py")).with_suffix("").parts[1:])


@pytest.fixture(scope="module")
def broken(all_rooms: Copy) -> dict[str, str]:
    """What import-linter says of each broken contract where all modules have their forbidden imports."""
    try:
        for module, line, *_ in (*FORBIDDEN, CIRCLE):
            all_rooms.write(module, f"\n{line}\n")
        result = all_rooms.lint()
    finally:
        all_rooms.restore()
    assert result.returncode == 1, result.stdout + result.stderr
    parts = re.split(r"^(.+)\n-{10,}\n", result.stdout.partition("Broken contracts")[2], flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def edge(file: str, line: str) -> tuple[str, str]:
    """Return the module of a file, and the one that a line imports."""
    return module_of(file), ".".join(re.findall(r"(?:from|import) (\S+)", line))


@pytest.mark.parametrize(("module", "line", "contract"), FORBIDDEN)
def test_a_forbidden_import_is_caught(broken: dict[str, str], module: str, line: str, contract: str) -> None:
    """It is caught by itself: a chain of imports has it, and none of the others."""
    forbidden = {edge(module, line) for module, line, _ in FORBIDDEN}
    (said,) = [text for name, text in broken.items() if name.startswith(contract)]
    chains = [set(re.findall(r"(\S+) -> (\S+) \(", chain)) for chain in re.split(r"\n(?:\n|(?=-))", said)]
    assert {edge(module, line)} in [chain & forbidden for chain in chains], said


def test_a_circle_of_imports_is_caught(broken: dict[str, str]) -> None:
    said = broken["No import circles"]
    of_sessions = said.partition("No cycles are allowed in errata_server.sessions.\n")[2].partition("No cycles")[0]
    assert "\n- .session -> .sessions (1 import)\n" in of_sessions, said


ADDED = (
    "envs/terminal_env/added.py",
    "server/errata_server/added.py",
    "server/errata_server/sandbox/added/__init__.py",
)
"""New modules, which no contract places."""


def test_a_new_module_must_say_where_it_stands(copy: Copy) -> None:
    for file in ADDED:
        copy.write(file, "")
    result = copy.lint()
    assert result.returncode != 0
    unplaced = re.findall(r"^- (\S+)$", result.stdout, re.M)
    assert sorted(unplaced) == sorted(map(module_of, ADDED)), result.stdout + result.stderr


def test_the_launchers_program_imports_its_own_folder_and_the_standard_library_only() -> None:
    folder = ROOT / "server/errata_server/sandbox/launcher"
    programs = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
    allowed = sys.stdlib_module_names | {file.stem for file in programs}
    for file in programs:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name} is no module of a package when it runs"
                names = [str(node.module)]
            assert {name.partition(".")[0] for name in names} <= allowed, file.name
    assert len(programs) == 9


def test_every_package_of_the_server_and_the_kit_has_a_charter() -> None:
    packages = [
        file.parent
        for part in ("server", "environment")
        for file in (ROOT / f"server/errata_{part}").rglob("__init__.py")
    ]
    assert len(packages) > 20
    for package in packages:
        charter = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8")))
        assert charter and len(charter) > 60, package


def test_the_servers_half_of_an_environment_may_use_the_server(copy: Copy) -> None:
    copy.write("envs/terminal_env/server/added.py", "import errata_server.environments.context\n")
    assert copy.lint().returncode == 0


def test_importing_what_an_environment_publishes_loads_no_server() -> None:
    code = (
        "import sys; from terminal_env import SPEC, TerminalAction; SPEC.name\n"
        "server = ('errata_server', 'terminal_env.server')\n"
        "loaded = [name for name in sys.modules if name.startswith(server)]\n"
        "sys.exit(str(loaded) if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert result.returncode == 0, result.stderr


def test_the_modules_that_a_step_enters_are_those_of_the_design_page() -> None:
    command = [sys.executable, "scripts/step_modules.py", "--check"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_picture_of_the_packages_is_that_of_the_contract() -> None:
    command = [sys.executable, "scripts/rooms_picture.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert result.returncode == 0, result.stdout


def test_the_names_that_others_import_stay() -> None:
    code = (
        "import inspect, errata_server, errata_server.cli, errata_server.app, errata_server.settings\n"
        "import errata_server.process, errata_server.journal, errata_server.sandbox.base, errata_server.simulation\n"
        "assert inspect.isfunction(errata_server.cli.main)\n"
        "for name in errata_server.__all__: getattr(errata_server, name)\n"
        "assert errata_server.app.create_app is errata_server.create_app\n"
        "assert errata_server.app.HTTPEnvServer is errata_server.HTTPEnvServer\n"
        "errata_server.app.create_fastapi_app, errata_server.settings.Settings, errata_server.process.ServerProcess"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert result.returncode == 0, result.stderr
    submodules = {file.stem for file in (ROOT / "server/errata_server").rglob("*.py")}
    assert "main" not in submodules, "it would share an attribute with the function errata_server.cli.main"

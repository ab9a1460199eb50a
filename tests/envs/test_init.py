"""What ``errata init NAME --sandboxed`` writes: an environment outside of the checkout that needs no edit of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from errata_environment.scaffold.cli import main
from tests.hangs import HANGS_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a new environment."""
    where = tmp_path_factory.mktemp("elsewhere")
    assert main(["line_notes_env", "--sandboxed", "--output-dir", str(where)]) == 0
    return where / "line_notes_env"


@pytest.fixture(scope="module")
def installed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that finds the environment as installed, and the packages of this checkout."""
    site = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder)], check=True, timeout=HANGS_S)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *(path for path in sys.path if path)])}


def run(installed: dict[str, str], where: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=where, env=installed, capture_output=True, text=True, timeout=500, check=False
    )


def test_it_appears_among_the_environments(installed: dict[str, str], tmp_path: Path) -> None:
    result = run(installed, tmp_path, "-m", "errata_server.cli", "environments")
    assert result.returncode == 0, result.stderr
    assert "line_notes_env" in result.stdout.split()


@pytest.mark.sandbox
def test_it_passes_its_own_tests(folder: Path, installed: dict[str, str]) -> None:
    result = run(installed, folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 passed" in result.stdout


def test_what_it_publishes_loads_no_server(installed: dict[str, str], tmp_path: Path) -> None:
    code = (
        "import sys; from line_notes_env import SPEC; SPEC.name\n"
        "server = ('errata_server', 'line_notes_env.server')\n"
        "print([name for name in sys.modules if name.startswith(server)])"
    )
    result = run(installed, tmp_path, "-c", code)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_no_word_of_a_template_is_left(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 15
    for path in files:
        for word in ("@NAME@", "@CLASS@", "@DISTRIBUTION@", "@ABOUT@", "@INSTALL@", "@TAG@", "@FILE@", "@CONTEXT@"):
            assert word not in path.read_text("utf-8"), path


def test_its_python_files_pass_the_linter(folder: Path, installed: dict[str, str]) -> None:
    rules = "F,W,B,UP,C4,SIM,RUF,RET,N"  # lengths of lines and the order of imports depend on the name
    result = run(installed, folder, "-m", "ruff", "check", "--no-cache", "--isolated", "--select", rules, ".")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["some_env"], "say --sandboxed"),
        (["Some", "--sandboxed"], "cannot be the name of a package"),
        (["class", "--sandboxed"], "cannot be the name of a package"),
        (["json", "--sandboxed"], "a package json is installed already"),
        (["terminal", "--sandboxed"], "an environment terminal is installed already"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--output-dir", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine_env").mkdir()
    assert main(["mine_env", "--sandboxed", "--output-dir", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
    assert not list((tmp_path / "mine_env").iterdir())


def test_the_bundled_dockerfiles_are_made_of_the_template() -> None:
    result = subprocess.run(
        [sys.executable, "scripts/dockerfiles.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout

"""The distribution holds what it needs: packages, types, tasks, entry points, and pinned development dependencies."""

from __future__ import annotations

import ast
import configparser
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = ("protocol", "server", "client", "envs", "trainer_adapter", "bench")
PACKAGES = (
    "errata_protocol",
    "errata_os",
    "errata_sandboxd",
    "errata_server",
    "errata_client",
    "errata_trainer",
    "terminal_env",
    "swe_bench_lite_env",
    "errata_redteam",
    "errata_bench",
    "errata_ablation",
)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which the build backend is new enough; `make setup` installs one that is."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if Version(importlib.metadata.version("setuptools")) < Version("77"):
        target = tmp_path_factory.mktemp("backend")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), "setuptools>=77"]
        subprocess.run(command, check=True, timeout=120)
        environment["PYTHONPATH"] = str(target)
    return environment


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, backend: dict[str, str]) -> Path:
    """A directory with the sdist, and the wheel that was built from the unpacked sdist."""
    work = tmp_path_factory.mktemp("build")
    source = work / "source"
    source.mkdir()
    for name in listed("--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    out = work / "out"
    out.mkdir()
    call(source, backend, "build_sdist", out)
    (archive,) = out.glob("*.tar.gz")
    (work / "unpacked").mkdir()
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(work / "unpacked")], check=True, timeout=60)
    (unpacked,) = (work / "unpacked").iterdir()
    call(unpacked, backend, "build_wheel", out)
    return out


def listed(*arguments: str) -> list[str]:
    """Return the files git knows, relative to the root."""
    result = subprocess.run(["git", "ls-files", "-z", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in result.stdout.split("\0") if name]


def call(source: Path, environment: dict[str, str], hook: str, out: Path) -> None:
    code = f"import sys; from setuptools import build_meta; build_meta.{hook}(sys.argv[1])"
    result = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def information(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = [entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}")]
    return wheel.read(path).decode()


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_string(information(wheel, "METADATA"))


def test_the_wheel_holds_every_file_of_every_package(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    for source in SOURCES:
        for name in listed("--", source):
            packaged = name.removeprefix(f"{source}/").split("/")[0] in PACKAGES  # bench/ also holds single programs
            if packaged and (ROOT / name).is_file():  # not deleted in the working tree
                assert name.removeprefix(f"{source}/") in names


def test_the_wheel_holds_only_our_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not [name for name in wheel.namelist() if "__pycache__" in name or name.endswith(".pyc")]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_the_bundled_tasks_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    tasks = {path.name for path in (ROOT / "envs/terminal_env/tasks").iterdir() if (path / "task.toml").is_file()}
    packed = {name.split("/")[2] for name in wheel.namelist() if name.startswith("terminal_env/tasks/")}
    assert len(tasks) >= 6
    assert tasks <= packed


def test_entry_points_name_importable_things(wheel: zipfile.ZipFile) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(information(wheel, "entry_points.txt"))
    assert parser["console_scripts"]["errata"] == "errata_server.cli:main"
    assert parser["errata.environments"]["terminal"] == "terminal_env:SPEC"
    for group in parser.sections():
        for name, value in parser[group].items():
            assert importlib.metadata.EntryPoint(name, value, group).load() is not None


ECHO = """
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    text: str


class EchoObservation(Observation):
    text: str = ""


class Echo(Environment[EchoAction, EchoObservation, State]):
    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id, step_count=0)
        return EchoObservation(text="ready")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        return EchoObservation(text=action.text, reward=1.0, done=False)

    @property
    def state(self):
        return self._state
"""

PLAY = """
import sys

from errata_client import ErrataClient
from errata_server.process import ServerProcess
from pathlib import Path

with ServerProcess("echo:Echo", Path(sys.argv[1])) as server:
    with ErrataClient(base_url=server.url).sync() as client:
        client.reset()
        print(client.step({"text": "from the wheel"}).observation["text"])
"""


@pytest.mark.wheel
@pytest.mark.timeout(600)
def test_the_wheel_serves_an_echo_environment_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "venv"], cwd=tmp_path, check=True, timeout=120)
    venv = tmp_path / "venv/bin"
    pip = [venv / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input", str(path)]
    subprocess.run(pip, cwd=tmp_path, check=True, timeout=480)
    (tmp_path / "echo.py").write_text(ECHO, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    played = subprocess.run(
        [venv / "python", "-c", PLAY, "data"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert played.stdout == "from the wheel\n", played.stderr[-2000:]
    version = subprocess.run(
        [venv / "errata", "version"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert PROJECT["version"] in version.stdout, version.stderr


def test_the_metadata_says_what_pyproject_says(metadata: Message) -> None:
    assert metadata["Name"] == PROJECT["name"]
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])


def test_the_sdist_holds_tests_and_licence(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "protocol/errata_protocol/errors.py"} <= names


def test_every_development_dependency_is_pinned_to_a_version_the_project_accepts() -> None:
    lines = (ROOT / "requirements/dev.lock").read_text(encoding="utf-8").splitlines()
    locked = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pins = {normal(pin.name): pin for pin in locked}
    for pin in locked:
        assert [specifier.operator for specifier in pin.specifier] == ["=="], pin
    for text in [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]:
        wanted = Requirement(text)
        pin = pins[normal(wanted.name)]
        (specifier,) = pin.specifier
        assert wanted.specifier.contains(specifier.version), f"{text}: locked at {specifier.version}, run make lock"


def test_the_images_have_the_versions_that_the_tests_had() -> None:
    pins = {"dev": {}, "server": {}, "sandboxd": {}}
    for name in pins:
        lines = (ROOT / "requirements" / f"{name}.lock").read_text("utf-8").splitlines()
        pins[name] = {
            line.split("==")[0]: line.split("==")[1].split()[0] for line in lines if re.match(r"[\w.-]+==", line)
        }
    assert len(pins["server"]) > 50
    assert {name: pin for name, pin in pins["server"].items() if pins["dev"].get(name) != pin} == {}
    assert pins["sandboxd"].keys() >= {"docker", "requests"} and pins["sandboxd"].items() <= pins["server"].items()
    hashed = (ROOT / "requirements/server.lock").read_text("utf-8").count("--hash=sha256:")
    assert hashed >= len(pins["server"]), "pip refuses a line without a hash"


def test_what_installs_the_locks_is_pinned_by_hash() -> None:
    text = (ROOT / "requirements/uv.lock").read_text("utf-8")
    assert re.findall(r"^([\w.-]+)==", text, re.M) == ["pip", "uv"]
    assert text.count("--hash=sha256:") > 10, "pip refuses a platform whose wheel has no hash"


def normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


COMES_WITH = {"accelerate": "trl", "gradio": "openenv", "pydantic-core": "pydantic", "tokenizers": "transformers"}
"""Distributions that a declared one always installs, of which it is the interface."""
IN_SANDBOXES = ("sandbox/launcher", "terminal_env/server/runtime", "prepare/inside", "server/inside", "/tasks/")
"""Programs that another interpreter runs, by folder: what they import is there, or beside them."""


def test_every_import_of_the_packages_is_declared() -> None:
    """Only extras and dependencies count: what `dev` installs is not there for users."""
    extras = PROJECT["optional-dependencies"]
    declared = {
        canonicalize_name(Requirement(line).name)
        for line in (*PROJECT["dependencies"], *(line for name in extras if name != "dev" for line in extras[name]))
    }
    distributions = importlib.metadata.packages_distributions()
    missing = set()
    for path in (
        path for source in SOURCES for package in PACKAGES for path in (ROOT / source / package).rglob("*.py")
    ):
        if any(folder in path.as_posix() for folder in IN_SANDBOXES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - set(PACKAGES):
                owners = {canonicalize_name(name) for name in distributions.get(top, [top])}
                if not {COMES_WITH.get(owner, owner) for owner in owners} & declared:
                    missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert not missing

"""The distributions hold what they need: packages, types, tasks, entry points, and pinned development dependencies."""

from __future__ import annotations

import ast
import configparser
import email
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from errata_protocol.errors import InvalidRequest
from tests.hangs import HANGS_S

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Distribution:
    """A distribution that this repository is the source of.

    Args:
        folder: Folder of the distribution's ``pyproject.toml``, below the root.
        sources: Folders that hold the packages, below the root.
        packages: Names of the import packages that it holds.
    """

    folder: str
    sources: tuple[str, ...]
    packages: tuple[str, ...]

    @property
    def project(self) -> dict[str, Any]:
        """The table ``project`` of its ``pyproject.toml``."""
        text = (ROOT / self.folder / "pyproject.toml").read_text(encoding="utf-8")
        project: dict[str, Any] = tomllib.loads(text)["project"]
        return project

    def files(self) -> Iterator[Path]:
        """Yield the Python files of its packages."""
        for source in self.sources:
            for package in self.packages:
                yield from (ROOT / source / package).rglob("*.py")


ERRATA = Distribution(
    ".",
    ("protocol", "server", "client", "envs", "trainer_adapter"),
    (
        "errata_protocol",
        "errata_os",
        "errata_ray",
        "errata_sandboxd",
        "errata_server",
        "errata_environment",
        "errata_client",
        "errata_trainer",
        "terminal_env",
        "swe_bench_lite_env",
        "errata_redteam",
    ),
)
BENCH = Distribution("bench", ("bench",), ("errata_bench", "errata_ablation"))
PROJECT = ERRATA.project


@dataclass(frozen=True)
class Built:
    """What was built of a distribution.

    Args:
        distribution: The distribution.
        sdist: Path of its sdist.
        wheel: Path of the wheel that was built from the unpacked sdist.
    """

    distribution: Distribution
    sdist: Path
    wheel: Path

    def names(self) -> list[str]:
        """Return the names of the files in the wheel."""
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()

    def information(self, name: str) -> str:
        """Return the text of a file of the wheel's metadata."""
        with zipfile.ZipFile(self.wheel) as archive:
            (path,) = [entry for entry in archive.namelist() if entry.endswith(f".dist-info/{name}")]
            return archive.read(path).decode()


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment in which the build backend is new enough; `make setup` installs one that is."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if Version(importlib.metadata.version("setuptools")) < Version("77"):
        target = tmp_path_factory.mktemp("backend")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), "setuptools>=77"]
        subprocess.run(command, check=True, timeout=HANGS_S)
        environment["PYTHONPATH"] = str(target)
    return environment


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory, backend: dict[str, str]) -> dict[Distribution, Built]:
    """What was built of each distribution, of a copy of the files that git knows."""
    work = tmp_path_factory.mktemp("build")
    for name in listed("--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (work / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, work / "source" / name)
    return {one: build(one, work, backend) for one in (ERRATA, BENCH)}


def build(distribution: Distribution, work: Path, environment: dict[str, str]) -> Built:
    """Build the sdist and, of its content, the wheel."""
    out, unpacked = work / "out" / distribution.folder, work / "unpacked" / distribution.folder
    out.mkdir(parents=True)
    unpacked.mkdir(parents=True)
    call(work / "source" / distribution.folder, environment, "build_sdist", out)
    (sdist,) = out.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(unpacked)], check=True, timeout=HANGS_S)
    call(unpacked / sdist.name.removesuffix(".tar.gz"), environment, "build_wheel", out)
    (wheel,) = out.glob("*.whl")
    return Built(distribution, sdist, wheel)


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
        timeout=HANGS_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]


@pytest.fixture(params=[ERRATA, BENCH], ids=lambda distribution: distribution.project["name"])
def built(request: pytest.FixtureRequest, builds: dict[Distribution, Built]) -> Built:
    """What was built of one distribution; a test with it runs for each."""
    return builds[request.param]


@pytest.fixture
def metadata(built: Built) -> Message:
    return email.message_from_string(built.information("METADATA"))


def test_the_wheel_holds_every_file_of_every_package(built: Built) -> None:
    names, packed = set(built.names()), set()
    for source in built.distribution.sources:
        for name in listed("--", source):
            package = name.removeprefix(f"{source}/").split("/")[0]
            if package in built.distribution.packages and (ROOT / name).is_file():  # else deleted in the working tree
                assert name.removeprefix(f"{source}/") in names
                packed.add(package)
    assert packed == set(built.distribution.packages)


def test_the_wheel_holds_only_its_packages(built: Built) -> None:
    tops = {name.split("/")[0] for name in built.names()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(built.distribution.packages)
    assert not [name for name in built.names() if "__pycache__" in name or name.endswith(".pyc")]


def test_every_package_is_typed(built: Built) -> None:
    assert {f"{package}/py.typed" for package in built.distribution.packages} <= set(built.names())


def test_the_bundled_tasks_are_in_the_wheel(builds: dict[Distribution, Built]) -> None:
    tasks = {path.name for path in (ROOT / "envs/terminal_env/tasks").iterdir() if (path / "task.toml").is_file()}
    packed = {name.split("/")[2] for name in builds[ERRATA].names() if name.startswith("terminal_env/tasks/")}
    assert len(tasks) >= 6
    assert tasks <= packed


COMMANDS = {
    ERRATA: {
        ("console_scripts", "errata", "errata_server.cli:main"),
        ("errata.environments", "terminal", "terminal_env:SPEC"),
        ("errata.demos", "fleet", "errata_environment.fleet_demo:main"),
        ("errata.demos", "terminal", "terminal_env.demo:main"),
    },
    BENCH: {
        ("errata.programs", "bench", "errata_bench.cli:main"),
        ("errata.programs", "ablate", "errata_ablation.cli:main"),
        ("errata.demos", "learning", "errata_ablation.demo:main"),
    },
}


def test_entry_points_name_importable_things(built: Built) -> None:
    parser = configparser.ConfigParser()
    parser.read_string(built.information("entry_points.txt"))
    points = {(group, name, value) for group in parser.sections() for name, value in parser[group].items()}
    assert points >= COMMANDS[built.distribution]
    for group, name, value in points:
        package = value.split(":")[0].split(".")[0]
        assert package in built.distribution.packages
        if package == "errata_ray" and importlib.util.find_spec("ray") is None:  # the suite `fleet` loads it with Ray
            with pytest.raises(InvalidRequest, match=r"Ray is not installed: pip install .*\[fleet\]"):
                importlib.metadata.EntryPoint(name, value, group).load()
            continue
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
def test_the_wheels_serve_an_echo_environment_and_list_benchmarks_in_an_empty_environment(
    builds: dict[Distribution, Built], tmp_path: Path
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "venv"], cwd=tmp_path, check=True, timeout=HANGS_S)
    venv = tmp_path / "venv/bin"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANGS_S)

    pip = (venv / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input")
    installed = run(*pip, builds[ERRATA].wheel)
    assert installed.returncode == 0, installed.stderr[-2000:]
    (tmp_path / "echo.py").write_text(ECHO, encoding="utf-8")
    played = run(venv / "python", "-c", PLAY, "data")
    assert played.stdout == "from the wheel\n", played.stderr[-2000:]
    version = run(venv / "errata", "version")
    assert PROJECT["version"] in version.stdout, version.stderr
    for words in (["bench", "--list"], ["ablate", "--help"], ["demo", "learning", "--json"]):
        refused = run(venv / "errata", *words)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1
        assert "pip install openenv-errata-bench, or in a checkout pip install ./bench" in refused.stderr

    installed = run(*pip, "--no-index", builds[BENCH].wheel)
    assert installed.returncode == 0, f"it needs more than Errata brings: {installed.stderr[-2000:]}"
    assert "steps-async" in run(venv / "errata", "bench", "--list").stdout
    assert "--arms" in run(venv / "errata", "ablate", "--help").stdout
    untrained = run(venv / "errata", "demo", "learning")
    assert untrained.returncode == 1 and "openenv-errata-bench[ablation]" in untrained.stderr


def test_the_metadata_says_what_pyproject_says(built: Built, metadata: Message) -> None:
    project = built.distribution.project
    assert metadata["Name"] == project["name"]
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.14"}
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])


def test_the_benchmarks_need_errata_in_their_own_version() -> None:
    """They use more of it than its public interface, and take the versions of other packages from it."""
    project = BENCH.project
    assert project["version"] == PROJECT["version"]
    wanted = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["ablation"])]
    own = [one for one in wanted if canonicalize_name(one.name) == PROJECT["name"]]
    assert [str(one.specifier) for one in own] == [f"=={PROJECT['version']}"] * 2
    brought = {canonicalize_name(Requirement(line).name) for line in PROJECT["dependencies"]}
    brought |= {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"]["trl"]}
    unbounded = {canonicalize_name(one.name) for one in wanted if not one.specifier}
    assert {COMES_WITH.get(name, name) for name in unbounded} <= brought


def test_the_sdist_holds_tests_and_licence(builds: dict[Distribution, Built]) -> None:
    with tarfile.open(builds[ERRATA].sdist) as archive:
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


COMES_WITH = {
    "accelerate": "trl",
    "datasets": "trl",
    "gradio": "openenv",
    "hydra": "hydra-core",
    "monarch": "torchmonarch",
    "omegaconf": "hydra-core",
    "pydantic-core": "pydantic",
    "tensordict": "verl",
    "tokenizers": "transformers",
    "transfer-queue": "transferqueue",
}
"""Distributions that a declared one always installs, of which it is the interface; and modules that are not installed
here, where they have another name than their distribution."""
OF_ITS_USER = {"gem", "roll", "tinker_cookbook"}
"""Frameworks that one recipe is for (`recipes.tinker.env`, `recipes.roll`) and no extra installs: its user has them."""
IN_SANDBOXES = ("sandbox/launcher", "terminal_env/server/runtime", "prepare/inside", "server/inside", "/tasks/")
"""Programs that another interpreter runs, by folder: what they import is there, or beside them."""


@pytest.mark.parametrize("distribution", [ERRATA, BENCH], ids=lambda distribution: distribution.project["name"])
def test_every_import_of_the_packages_is_declared(distribution: Distribution) -> None:
    """Only extras and dependencies count: what `dev` installs is not there for users."""
    project = distribution.project
    extras = project["optional-dependencies"]
    declared = {
        canonicalize_name(Requirement(line).name)
        for line in (*project["dependencies"], *(line for name in extras if name != "dev" for line in extras[name]))
    }
    own = {*distribution.packages, *(ERRATA.packages if PROJECT["name"] in declared else ())}
    distributions = importlib.metadata.packages_distributions()
    missing = set()
    for path in distribution.files():
        if any(folder in path.as_posix() for folder in IN_SANDBOXES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - own - OF_ITS_USER:
                owners = {canonicalize_name(name) for name in distributions.get(top, [top])}
                if not {COMES_WITH.get(owner, owner) for owner in owners} & declared:
                    missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert not missing

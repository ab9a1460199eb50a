"""The suites of `make test` and `.ci/run`: what they depend on, what is skipped, and what a failure looks like."""

from __future__ import annotations

import ast
import fnmatch
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from .suites import keys
from .suites.records import Pass, Records
from .suites.run import own_network, pytest_command
from .suites.table import DEFAULT, ROOT, Suite, load
from .test_internals import OPTIONAL

COMMON, SUITES = load()
HASHED = {name: suite for name, suite in SUITES.items() if suite.keyed}
TRAINING = {"training", "trl", "ranks", "projects", "learning"}
VERL, MONARCH, RECIPES = {"verl"}, {"monarch"}, {"recipes", "cookbook", "gem", "skyrl"}
ON_THE_SERVER = set(HASHED) - {"oracles", "skyrl"}
ALWAYS = {"fast"}
"""What any change in the repository runs."""
IMAGES = {"docker", "smoke"}
DEPENDENCIES = {"lowest", "latest"}
INSTALLED = {*DEPENDENCIES, "wheel", "smoke", "fast-trainer", "whole-way"}
"""Suites that have the whole trainer adapter in their key, with all recipes."""
PLAYED = ON_THE_SERVER - {
    "schedules",
    "upstream",
    "upstream-envs",
    "upstream-patches",
    "conformance",
    "salvage",
    "browser",
    "viewer",
    "cookbook",
    "gem",
    "monarch",
    "recipes",
}
"""Suites that play an environment of `envs/`."""

PACKAGES = {
    "errata_protocol": "protocol",
    "errata_os": "server",
    "errata_client": "client",
    "errata_server": "server",
    "errata_environment": "server",
    "errata_sandboxd": "server",
    "errata_ray": "server",
    "terminal_env": "envs",
    "swe_bench_lite_env": "envs",
    "errata_redteam": "envs",
    "errata_trainer": "trainer_adapter",
    "errata_bench": "bench",
    "errata_ablation": "bench",
    "errata_conformance": "conformance",
}


# -- keys -------------------------------------------------------------------------------------------------------------


def test_another_python_kernel_base_tree_or_browser_is_another_key() -> None:
    suite = SUITES["browser"]
    parts = keys.parts(suite, COMMON, keys.working_tree())
    for what in ("python", "kernel", "base tree", "chromium --version"):
        assert keys.key(parts) != keys.key(parts | {what: "another"})
        assert parts[what]


@pytest.fixture(scope="module")
def versions() -> Iterator[None]:
    """Versions cost seconds to ask for, and stay the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, "versions", lambda commands: {"python": "3"})
        yield


@pytest.fixture(scope="module")
def clone(versions: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the files of this checkout, beside a copy of the shared files that suites read."""
    root = tmp_path_factory.mktemp("clone") / "main"
    keys.git("clone", "-q", "--shared", "--no-checkout", str(ROOT), str(root))
    keys.git("read-tree", keys.working_tree(), root=root)
    for path in sorted({path for suite in HASHED.values() for path in suite.shared}):
        place = root.parent / "shared" / path
        place.mkdir(parents=True)
        (place / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    return root


def keys_of(root: Path) -> dict[str, str]:
    tree = keys.git("write-tree", root=root)
    return {name: keys.key(keys.parts(suite, COMMON, tree, root)) for name, suite in HASHED.items()}


@pytest.fixture(scope="module")
def before(clone: Path) -> dict[str, str]:
    return keys_of(clone)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param("server/errata_server/sandbox/launcher/launcher.py", ON_THE_SERVER, id="launcher program"),
        pytest.param("pyproject.toml", set(HASHED), id="entry point"),
        pytest.param("scripts/setup.sh", set(HASHED), id="shell script of the set-up"),
        pytest.param("scripts/lock.sh", set(), id="script that writes locks"),
        pytest.param("scripts/reference.py", set(), id="script that writes pages"),
        pytest.param(
            "docker/entrypoint.sh", {*IMAGES, "containers", "fast-server", "fleet"}, id="shell script of the image"
        ),
        pytest.param("compose.yaml", {*IMAGES, "fast-server"}, id="compose file"),
        pytest.param("requirements/dev.lock", set(HASHED), id="lock of all"),
        pytest.param(
            "requirements/trainer.lock", {*TRAINING, *RECIPES, "fast-trainer", "whole-way"}, id="lock of the trainer"
        ),
        pytest.param("requirements/verl.lock", {*VERL, *MONARCH}, id="lock of another trainer"),
        pytest.param("requirements/skyrl.lock", {"skyrl"}, id="lock of another service"),
        pytest.param("requirements/fleet.lock", {"fleet"}, id="lock of the fleet"),
        pytest.param(
            "trainer_adapter/errata_trainer/assembly/driver.py",
            {*TRAINING, *VERL, *MONARCH, *RECIPES, *INSTALLED},
            id="trainer",
        ),
        pytest.param(f"{keys.RECIPES}/trl/dataset.py", {*TRAINING, *INSTALLED}, id="recipe for TRL"),
        pytest.param(f"{keys.RECIPES}/verl/loss.py", {*VERL, *INSTALLED}, id="recipe for VeRL"),
        pytest.param(f"{keys.RECIPES}/monarch/replay.py", {*MONARCH, *INSTALLED}, id="recipe for Monarch"),
        pytest.param(f"{keys.RECIPES}/cartridge/loop.py", {*VERL, "recipes", *INSTALLED}, id="recipe for cartridges"),
        pytest.param(
            f"{keys.RECIPES}/tinker/datums.py", {"cookbook", "recipes", "skyrl", *INSTALLED}, id="recipe for Tinker"
        ),
        pytest.param(f"{keys.RECIPES}/roll/env.py", {"gem", "recipes", *INSTALLED}, id="recipe for ROLL"),
        pytest.param(
            f"{keys.RECIPES}/__init__.py", {*TRAINING, *VERL, *MONARCH, *RECIPES, *INSTALLED}, id="package of recipes"
        ),
        pytest.param("envs/terminal_env/spec.py", {*PLAYED, "oracles", "viewer"}, id="environment"),
        pytest.param(
            "conformance/errata_conformance/cli.py",
            {"conformance", "kit", "interop", "fast-server", *DEPENDENCIES},
            id="kit",
        ),
        pytest.param(
            "../shared/data/rows.jsonl",
            {"containers", "redteam", "swe", "oracles", "prepare", "sandbox", "fast-server", *DEPENDENCIES},
            id="shared data",
        ),
        pytest.param("../shared/cases/rows.jsonl", {"chaos"}, id="shared cases"),
        pytest.param("../shared/vectors/sdpo_loss.json", set(), id="shared vector, which nothing reads"),
        pytest.param("docs/training.md", {"fast-trainer", "whole-way"}, id="page with code"),
        pytest.param("docs/fleet.md", set(), id="page"),
        pytest.param("CHANGELOG.md", set(), id="change log"),
        pytest.param("server/errata_server/fleet/routes.py", ON_THE_SERVER, id="server"),
        pytest.param(
            "tests/trainer/test_presets.py",
            {*TRAINING, *VERL, "recipes", "fast-trainer", "whole-way"},
            id="test of the trainer",
        ),
        pytest.param("tests/test_packaging.py", {"wheel"}, id="test"),
        pytest.param("tests/slowest_files.py", set(HASHED), id="helper of all tests"),
        pytest.param("tests/suites/run.py", set(), id="what runs suites"),
    ],
)
def test_a_change_runs_exactly_the_suites_that_use_it(
    clone: Path, before: dict[str, str], changed: str, expected: set[str]
) -> None:
    if changed.startswith("../"):
        file = clone / changed
        kept = file.read_bytes() if file.exists() else None
        file.parent.mkdir(exist_ok=True)
        file.write_text("changed\n", encoding="utf-8")
        after = keys_of(clone)
        file.write_bytes(kept) if kept is not None else file.unlink()
    else:
        expected = expected | ALWAYS
        mode, old = keys.git("ls-files", "--stage", changed, root=clone).split()[:2]
        new = keys.git("hash-object", "-w", "--stdin", root=clone, text="changed\n")
        keys.git("update-index", "--cacheinfo", f"{mode},{new},{changed}", root=clone)
        after = keys_of(clone)
        keys.git("update-index", "--cacheinfo", f"{mode},{old},{changed}", root=clone)
    assert {name for name in HASHED if after[name] != before[name]} == expected


PROJECT = """
[project]
name = "p"
dependencies = ["a"]
[project.optional-dependencies]
extra = ["b"]
[tool.pytest.ini_options]
markers = ["one: a suite"]
timeout = 1
[tool.ruff]
line-length = 120
"""


@pytest.mark.parametrize(
    ("part", "old", "new", "is_other"),
    [
        ("project -optional-dependencies", '"a"', '"c"', True),
        ("project -optional-dependencies", '"b"', '"c"', False),
        ("project", '"b"', '"c"', True),
        ("project", "120", "100", False),
        ("tool.pytest.ini_options -markers", "a suite", "the suite", False),
        ("tool.pytest.ini_options -markers", "timeout = 1", "timeout = 2", True),
        ("tool.setuptools", "120", "100", True),  # there is no such part: all of the file counts
        ("project", "[project]", "[project", True),
    ],
)
def test_a_part_of_a_file_is_in_a_key(part: str, old: str, new: str, is_other: bool) -> None:
    assert old in PROJECT
    digests = {keys.part_digest(text, f"pyproject.toml#{part}") for text in (PROJECT, PROJECT.replace(old, new))}
    assert (len(digests) == 2) == is_other


def test_a_constant_of_a_module_is_in_a_key() -> None:
    texts = ("FORMAT = '1'\n", "import os\nFORMAT = '1'\n", "FORMAT = '2'\n", "FORMAT = os\n", "x = 1\n", "(\n")
    found = [keys.part_digest(text, "a.py#FORMAT") for text in texts]
    assert found[0] == found[1] and len(set(found)) == 5


@pytest.mark.parametrize("name", [name for name, suite in HASHED.items() if suite.recipes])
def test_a_suites_recipes_are_those_that_its_tests_import(name: str) -> None:
    begin = "errata_trainer.recipes."
    suite = HASHED[name]
    modules = {one for file in files(suite) for one in imported(file) if one.startswith(begin)}
    assert {one.removeprefix(begin).partition(".")[0] for one in modules} <= set(suite.recipes)


@pytest.mark.parametrize("name", HASHED)
def test_a_suites_key_has_the_scripts_that_its_tests_name(name: str) -> None:
    suite = HASHED[name]
    has = {path.partition("#")[0] for path in (*suite.inputs, *COMMON)} | set(suite.scripts)
    named = {
        f"scripts/{found}"
        for file in files(suite)
        for found in re.findall(r"scripts[/\"', ]+([a-z_]+\.(?:py|sh))", file.read_text(encoding="utf-8"))
        if (ROOT / "scripts" / found).exists()
    }
    assert not named - has


def test_what_a_suite_ignores_is_there() -> None:
    """pytest takes a pattern as below the directory that it runs in, so that `*/tests/x` is none of `tests/x`."""
    for suite in SUITES.values():
        for pattern in suite.ignore:
            found = [path for place in suite.tests for path in (ROOT / place, *(ROOT / place).rglob("*"))]
            assert any(fnmatch.fnmatch(str(path), str(ROOT / pattern)) for path in found), (suite.name, pattern)


def test_tier_1_collects_each_test_without_a_mark_once() -> None:
    whole, *parts = (suite for suite in SUITES.values() if suite.tier == 1)
    assert whole.name == DEFAULT and whole.tests == ("tests",) and {suite.select for suite in parts} == {DEFAULT}
    paths = [path for suite in parts for path in suite.tests]
    assert list(whole.ignore) == paths
    assert len(set(paths)) == len(paths) and {Path(path).parent for path in paths} == {Path("tests")}
    assert all((ROOT / path).is_dir() for path in paths)


def test_suites_that_share_a_mark_collect_different_tests() -> None:
    whole, part = SUITES["sandbox"], SUITES["whole-way"]
    assert part.select == whole.name and part.tier == whole.tier
    assert not any(Path(path).is_relative_to(other) for path in part.tests for other in whole.tests)
    assert {path for suite in SUITES.values() if suite.select == DEFAULT for path in suite.tests}


def test_a_suite_that_may_be_skipped_says_what_it_uses(tmp_path: Path) -> None:
    table = tmp_path / "suites.toml"
    table.write_text(TABLE.replace('uses = ["used.txt"]', ""), encoding="utf-8")
    with pytest.raises(ValueError, match="suite slow needs what its outcome depends on"):
        load(table)


def test_lowest_may_lack_every_package_that_its_tests_call_optional() -> None:
    (skips,) = SUITES["lowest"].skips
    assert all(re.search(skips, f"{package} is not installed ({how})") for package, how in OPTIONAL.items())


def test_what_is_not_committed_is_part_of_the_key(tmp_path: Path) -> None:
    keys.git("init", "-q", root=tmp_path)
    (tmp_path / "kept").write_text("a", encoding="utf-8")
    keys.git("add", "kept", root=tmp_path)
    first = keys.objects(keys.working_tree(tmp_path), ["kept"], tmp_path)
    (tmp_path / "kept").write_text("b", encoding="utf-8")
    (tmp_path / "new").write_text("c", encoding="utf-8")
    assert keys.objects(keys.working_tree(tmp_path), ["kept", "new"], tmp_path)["kept"] != first["kept"]
    assert keys.git("status", "--porcelain", root=tmp_path) == "AM kept\n?? new", "the index is as it was"
    with pytest.raises(FileNotFoundError, match="not in the repository: gone"):
        keys.objects(keys.working_tree(tmp_path), ["kept", "gone"], tmp_path)


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """Return the names of the modules that a file imports, and of those of the tests that it names in a string."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level]
            yield ".".join([*package, *([node.module] if node.module else [])])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("tests."):
            yield node.value.partition(":")[0]


def folders(modules: Iterable[str]) -> set[str]:
    """Return the paths, as the table names them, of modules of this repository."""
    found = set()
    for module in modules:
        top, *rest = module.split(".")
        if top in PACKAGES:
            found.add(PACKAGES[top])
        elif top == "tests" and rest:
            place = ROOT / "tests" / "/".join(rest)
            if place.is_dir():
                found.add(str(place.relative_to(ROOT)))
            else:
                folder = place.parent.relative_to(ROOT)
                found.add(f"{folder}/{place.name}.py" if folder == Path("tests") else str(folder))
    return found


def files(suite: Suite) -> list[Path]:
    if suite.command:
        return sorted((ROOT / "tests/server/simulated").glob("*.py"))
    paths = [ROOT / path for path in suite.tests]
    found = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    if suite.select:
        return found
    mark = f"pytest.mark.{suite.mark}"
    return [file for file in found if mark in file.read_text(encoding="utf-8") or file.name == "conftest.py"]


def with_imported(found: list[Path]) -> set[Path]:
    """Return files, and the modules of the tests that they import, and those that these import."""
    seen: set[Path] = set()
    left = set(found)
    while left:
        file = left.pop()
        seen.add(file)
        names = (name for name in imported(file) if name.startswith("tests."))
        modules = (ROOT / f"{name.replace('.', '/')}.py" for name in names)
        left |= {module for module in modules if module.exists()} - seen
    return seen


@pytest.mark.parametrize("name", HASHED)
def test_a_suites_key_has_what_its_tests_import(name: str) -> None:
    suite = HASHED[name]
    has = {*suite.inputs, *COMMON}
    missing = {
        f"{folder} ({file.relative_to(ROOT)})"
        for file in with_imported(files(suite))
        for folder in folders(imported(file))
        if not any(Path(folder).is_relative_to(path) for path in has)
    }
    assert not missing


# -- records ----------------------------------------------------------------------------------------------------------


def test_a_record_that_is_missing_truncated_or_of_another_key_is_none(tmp_path: Path) -> None:
    records = Records(tmp_path)
    kept = Pass(suite="docker", key="a" * 16, date="2026-11-26T00:00:00", commit="c", passed=3, seconds=4)
    assert records.passed("docker", kept.key) is None
    records.keep(kept)
    assert records.passed("docker", kept.key) == kept
    assert records.passed("docker", "b" * 16) is None and records.passed("tasks", kept.key) is None
    (file,) = tmp_path.rglob("*.json")
    whole = file.read_text(encoding="utf-8")
    for damaged in ("", whole[: len(whole) // 2], "[]", whole.replace("a" * 16, "b" * 16), '{"suite": "docker"}'):
        file.write_text(damaged, encoding="utf-8")
        assert records.passed("docker", kept.key) is None


def test_ten_records_of_a_suite_are_kept(tmp_path: Path) -> None:
    records = Records(tmp_path)
    for number in range(13):
        key = f"{number:016x}"
        records.keep(Pass(suite="docker", key=key, date="d", commit="c", passed=1, seconds=1))
        os.utime(tmp_path / "passed" / f"docker-{key}.json", (number, number))
    assert [records.passed("docker", f"{number:016x}") is None for number in range(13)] == [True] * 3 + [False] * 10


# -- runs -------------------------------------------------------------------------------------------------------------

TABLE_FILE = "tests/suites/suites.toml"
TABLE = """
[common]
uses = ["common.txt"]
[check]
tier = 0
about = "a command"
command = ["sh", "check.sh"]
[fast]
tier = 1
about = "tests without a mark"
tests = ["tests"]
both = true
uses = ["."]
[real]
tier = 2
about = "marked tests"
tests = ["tests"]
uses = ["real.txt"]
[other]
tier = 2
about = "a command beside it"
command = ["sh", "-c", "echo other"]
uses = ["real.txt"]
[slow]
tier = 3
about = "skipped while unchanged"
tests = ["tests/slow"]
uses = ["used.txt"]
"""
PASSING = """
import pytest
def test_one():
    assert True
@pytest.mark.real
def test_two():
    assert True
"""
BEFORE = ["check", "fast", "real", "other"]
SLOW = "import pytest\n@pytest.mark.slow\ndef test_three():\n    assert True\n"
NO_PROCESSES = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    config.option.numprocesses, config.option.dist = 0, "no"  # half the time
"""
PASSES = """#!/bin/sh
for one; do
    case $one in --outcomes=*) echo '{"passed": 1, "failed": {}, "skipped": {}, "cpu_s": {}}' >"${one#*=}" ;; esac
done
"""
FLAKY = """
from pathlib import Path
{mark}
def test_sometimes():
    place = Path(__file__).with_name("ran")
    ran = place.exists()
    place.touch()
    assert ran, "the first time"
"""


class Project:
    """A small repository with suites of its own.

    Args:
        root: Directory of the repository, without files yet.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = root.parent / "cache"
        tests = root / "tests"
        shutil.copytree(ROOT / "tests/suites", tests / "suites", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("__init__.py", "slowest_files.py"):
            shutil.copy(ROOT / "tests" / name, tests)
        (root / ".cache").mkdir()
        (root / ".cache/venv").symlink_to(Path(sys.prefix))
        self.write("pyproject.toml", '[tool.pytest.ini_options]\nmarkers = ["real", "slow"]\naddopts = "-q -p xdist"\n')
        self.write("conftest.py", NO_PROCESSES)
        self.write(".gitignore", ".cache\n__pycache__\n.pytest_cache\nran\n")
        for name in ("common.txt", "used.txt", "real.txt"):
            self.write(name, "1\n")
        self.write("check.sh", "exit 0\n")
        self.write("tests/suites/suites.toml", TABLE)
        self.write("tests/test_passing.py", PASSING)
        self.write("tests/slow/test_slow.py", SLOW)
        keys.git("init", "-q", root=root)
        self.commit()

    def recorded(self) -> set[str]:
        """Return the names of the suites of which a pass is recorded."""
        return {file.name.rpartition("-")[0] for file in (self.cache / "errata/ci").glob("passed/*.json")}

    def table(self) -> str:
        """Return the table of the suites."""
        return (self.root / TABLE_FILE).read_text(encoding="utf-8")

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        (self.root / name).write_text(text, encoding="utf-8")

    def commit(self) -> None:
        keys.git("add", "-A", root=self.root)
        keys.git("-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "-q", "-m", "all", root=self.root)

    def without_pytest(self) -> None:
        """Have a script pass in place of each suite's tests, where what they do is not the point: it takes no time."""
        self.write("passes.sh", PASSES)
        (self.root / "passes.sh").chmod(0o755)
        self.write(TABLE_FILE, re.sub(r"(?m)^tests = .*", r'\g<0>\npython = "./passes.sh"', TABLE))

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        kept = (name for name in os.environ if not name.startswith(("PYTEST", "CI_", "REQUIRE_ALL")))
        environment = {name: os.environ[name] for name in kept} | variables
        return subprocess.Popen(
            [".cache/venv/bin/python", "-m", "tests.suites", *(arguments or ("--tiers", "0", "1", "2", "3", "--ci"))],
            cwd=self.root,
            env=environment | {"XDG_CACHE_HOME": str(self.cache), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> tuple[int, list[str]]:
        """Return the exit status and the lines that were printed."""
        process = self.start(*arguments, **variables)
        printed, _ = process.communicate()
        return process.returncode, printed.splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "project/tests").mkdir(parents=True)
    return Project(tmp_path / "project")


def begun(printed: list[str]) -> list[str]:
    """Return the names of the suites that were run, in alphabetical order."""
    return sorted(line.split()[2] for line in printed if line.endswith(" ..."))


def test_a_suite_is_skipped_in_ci_until_what_it_uses_changes(project: Project) -> None:
    project.without_pytest()
    status, printed = project.run()
    assert status == 0 and printed[-1] == "5 passed, 0 failed, 0 skipped"
    status, printed = project.run()
    assert status == 0 and printed[-1] == "1 passed, 0 failed, 0 skipped" and begun(printed) == ["check"]
    for name in ("fast", "real", "other", "slow"):
        assert any(name in line and "unchanged since" in line and "passed on" in line for line in printed)
    for name, expected in (
        ("used.txt", ["check", "fast", "slow"]),
        ("real.txt", ["check", "fast", "other", "real"]),
        ("more.txt", ["check", "fast"]),
        ("common.txt", ["check", "fast", "other", "real", "slow"]),
        ("tests/slow/more.txt", ["check", "fast", "real", "slow"]),
    ):
        project.write(name, "2\n")
        assert begun(project.run()[1]) == expected, name  # what ran for the change before is recorded
    assert begun(project.run()[1]) == ["check"]


def test_outside_ci_every_suite_is_run(project: Project) -> None:
    project.without_pytest()
    assert project.run("--tiers", "1", "3", "--ci")[1][-1] == "2 passed, 0 failed, 0 skipped"
    assert project.run("--tiers", "1", "3", "--ci")[1][-1] == "0 passed, 0 failed, 0 skipped"
    for arguments in (["--tiers", "1", "3"], ["fast", "slow"], ["fast", "slow", "--ci"]):
        assert project.run(*arguments)[1][-1] == "2 passed, 0 failed, 0 skipped", arguments


def test_a_record_that_is_damaged_runs_the_suite_again_and_only_ci_records(project: Project) -> None:
    project.without_pytest()
    project.run("--tiers", "1", "3", "--ci")
    for one in (project.cache / "errata/ci/passed").iterdir():
        one.write_bytes(one.read_bytes()[:40])
    project.run("--tiers", "1", "3")
    assert project.run("--tiers", "1", "3", "--ci")[1][-1] == "2 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize(
    ("file", "text", "name", "begun"),
    [
        ("check.sh", "echo out of style; exit 3\n", "check", ["check"]),
        ("tests/test_bad.py", "def test_bad():\n    assert 'apples' == 'pears'\n", "test_bad", ["check", "fast"]),
        (
            "tests/test_bad.py",
            "import pytest\n@pytest.mark.real\ndef test_bad():\n    assert 'apples' == 'pears'\n",
            "test_bad",
            BEFORE,
        ),
        ("tests/slow/test_bad.py", SLOW + "    assert 'apples' == 'pears'\n", "test_three", [*BEFORE, "slow"]),
        ("tests/test_bad.py", "import nothing_like_it\n", "tests/test_bad.py", ["check", "fast"]),
    ],
    ids=["tier 0", "tier 1", "tier 2", "tier 3", "an import"],
)
def test_a_failure_ends_the_run_and_is_printed_last(
    project: Project, file: str, text: str, name: str, begun: list[str]
) -> None:
    project.write(file, text)
    status, printed = project.run()
    assert status == 1
    assert sorted(line.split()[2] for line in printed if line.endswith(" ...")) == sorted(begun)
    assert printed[-2].startswith("FAILED [") and any(name in line for line in printed[-3:-1])
    assert " failed, 0 skipped" in printed[-1]
    shown = "\n".join(printed[printed.index(next(line for line in printed if line.startswith("=== summary"))) :])
    assert any(said in shown for said in ("'apples' == 'pears'", "out of style", "nothing_like_it"))


@pytest.mark.parametrize("mark", ["", "__import__('pytest').mark.real"], ids=["tier 1", "tier 2"])
def test_a_flaky_test_is_printed_last_and_fails_the_second_time(project: Project, mark: str) -> None:
    project.write("tests/test_flaky.py", FLAKY.format(mark=f"@{mark}" if mark else ""))
    name = "tests/test_flaky.py::test_sometimes"
    status, printed = project.run()
    assert status == 0 and printed[-2:] == [f"FLAKY {name}", "6 passed, 0 failed, 0 skipped"]
    (project.root / "tests/ran").unlink()
    status, printed = project.run()
    assert status == 1 and any(line.startswith(f"FLAKY {name} (also on ") for line in printed)
    assert any("flaky for the second time" in line and str(project.cache) in line for line in printed)
    assert [one["test"] for one in json.loads((project.cache / "errata/ci/flaky.json").read_text("utf-8"))] == [
        name,
        name,
    ]


def test_outside_ci_nothing_is_run_again(project: Project) -> None:
    project.write("tests/test_flaky.py", FLAKY.format(mark=""))
    status, printed = project.run("--tiers", "1")
    assert status == 1 and printed[-2] == "FAILED [fast] tests/test_flaky.py::test_sometimes"


def test_more_than_three_failures_are_not_run_again(project: Project) -> None:
    for number in range(4):
        project.write(f"tests/test_flaky_{number}.py", FLAKY.format(mark="").replace('"ran"', f'"ran{number}"'))
    status, printed = project.run()
    assert status == 1 and printed[-1].endswith(" 4 failed, 0 skipped")


def test_a_flaky_suite_is_not_recorded_as_passed(project: Project) -> None:
    project.write("tests/slow/test_slow.py", FLAKY.format(mark="@__import__('pytest').mark.slow"))
    assert project.run()[0] == 0
    assert project.recorded() == {"fast", "real", "other"}


def test_a_suite_that_lacks_openenvs_source_is_not_run_and_not_recorded(project: Project) -> None:
    project.write("tests/suites/suites.toml", TABLE + "openenv = true\n")
    project.write("scripts/openenv_source.sh", "#!/bin/sh\nexit 69\n")
    (project.root / "scripts/openenv_source.sh").chmod(0o755)
    status, printed = project.run()
    assert status == 0 and printed[-2:] == ["not run (above): slow", "4 passed, 0 failed, 0 skipped"]
    assert any("slow" in line and "not run: OpenEnv's source is not here" in line for line in printed)
    assert project.recorded() == {"fast", "real", "other"}
    assert project.run("slow")[0] == 69, "who asks for a suite wants it run"
    project.write("scripts/openenv_source.sh", "#!/bin/sh\nexit 1\n")
    assert project.run("slow")[1][-1].startswith("1 passed"), "a broken script is no reason to skip"


def test_engines_start_before_a_suite_uses_one(project: Project) -> None:
    table = TABLE.replace("[other]", 'engine = "first"\n[other]').replace("[slow]", 'engine = "second"\n[slow]')
    table = table.replace('"echo other"', '"echo other uses its engine >>.cache/asked"')
    project.write("tests/suites/suites.toml", table)
    project.write("docker/engine.sh", '#!/bin/sh\necho "$1 ${2##*/}" >>.cache/asked\n')
    (project.root / "docker/engine.sh").chmod(0o755)
    assert project.run("--tiers", "2", ERRATA_ENGINE="")[0] == 0
    asked = (project.root / ".cache/asked").read_text("utf-8").splitlines()
    assert asked[:2] == ["up engine-first", "up engine-second"], "starting one takes published ports of the other away"
    assert sorted(asked[2:5]) == ["other uses its engine", "up engine-first", "up engine-second"]
    assert asked[5:] == ["down engine-first", "down engine-second"]


def test_suites_share_an_engine_which_the_run_stops(project: Project) -> None:
    engine = 'engine = "images"\n'
    project.write("tests/suites/suites.toml", TABLE.replace("[other]", f"{engine}[other]") + engine)
    project.write("docker/engine.sh", '#!/bin/sh\necho "$1 ${2##*/}" >>.cache/asked\nexit $(cat .cache/status)\n')
    (project.root / "docker/engine.sh").chmod(0o755)
    project.write(".cache/status", "0\n")
    reads = "import os\n" + SLOW + "    assert os.environ['ERRATA_ENGINE'] == os.environ['DOCKER_HOST']\n"
    project.write("tests/slow/test_slow.py", reads + "    assert 'engine-images' in os.environ['DOCKER_HOST']\n")
    asked = project.root / ".cache/asked"
    assert project.run("--tiers", "2", "3", ERRATA_ENGINE="")[1][-1] == "3 passed, 0 failed, 0 skipped"
    assert asked.read_text("utf-8").splitlines() == ["up engine-images", "up engine-images", "down engine-images"]
    asked.unlink()
    assert project.run("slow", ERRATA_ENGINE="engine-images", DOCKER_HOST="engine-images")[0] == 0
    assert not asked.exists(), "the caller's engine is used, and left alone"
    project.write(".cache/status", "69\n")
    assert project.run("slow", ERRATA_ENGINE="")[0] == 69
    project.write(".cache/status", "1\n")
    status, printed = project.run("slow", ERRATA_ENGINE="")
    assert status == 1 and printed[-2] == "FAILED [slow] slow"


def test_what_a_machine_cannot_run_fails_where_all_is_required(project: Project) -> None:
    project.write("tests/slow/test_slow.py", SLOW + "    pytest.skip('no such program')\n")
    status, printed = project.run("--tiers", "3", "--ci", REQUIRE_ALL="1")
    assert status == 1 and printed[-2] == "FAILED [slow] slow"  # nothing was tested
    skipped = "@pytest.mark.slow\ndef test_more():\n    pytest.skip('no such program')\n"
    project.write("tests/slow/test_slow.py", SLOW + skipped)
    status, printed = project.run("--tiers", "3", REQUIRE_ALL="")
    assert status == 0 and "skipped 1: no such program (.ci/run fails on it: slow)" in printed
    status, printed = project.run("--tiers", "3", "--ci", REQUIRE_ALL="1")
    assert status == 1 and printed[-2] == "FAILED [slow] slow: skipped" and "no such program" in printed
    assert not project.recorded()
    project.write("tests/suites/suites.toml", TABLE + 'skips = ["no such"]\n')
    assert project.run("--tiers", "3", "--ci", REQUIRE_ALL="1")[1][-1] == "1 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize(
    ("extra", "text", "shown"),
    [
        ('python = "nosuch"\n', SLOW, "No such file"),
        ("timeout_s = 1.0\n", SLOW + "    import time; time.sleep(300)\n", "did not end within 1 s"),
        ("", SLOW + "    import os; os._exit(3)\n", "exit status 3"),
        ("", "import pytest\n" + "@pytest.mark.slow\ndef test_{}():\n    {}\n" * 2, "exit status 2"),
        ('environments = ["nosuch"]\n', SLOW, "environments.py"),
    ],
    ids=["no interpreter", "too slow", "ended by a test", "interrupted", "no environment"],
)
def test_a_suite_that_breaks_is_a_failure_and_not_run_again(
    project: Project, extra: str, text: str, shown: str
) -> None:
    text = text.format("bad", "assert False", "worse", "raise KeyboardInterrupt") if "{}" in text else text
    project.write("tests/suites/suites.toml", TABLE + extra)
    project.write("tests/slow/test_slow.py", text)
    status, printed = project.run("--tiers", "3", "--ci")
    assert status == 1 and "FAILED [slow] slow" in printed and any(shown in line for line in printed)
    assert not project.recorded()


def test_a_suite_that_hangs_prints_where_each_of_its_threads_is(project: Project) -> None:
    project.write("tests/suites/suites.toml", TABLE + "timeout_s = 5.0\n")
    asleep = "import threading, time\n" + SLOW + "    threading.Event().wait()\n"
    project.write("tests/slow/test_slow.py", asleep)
    status, printed = project.run("--tiers", "3", "--ci")
    assert status == 1 and any("test_slow.py" in line and "in test_three" in line for line in printed)


def test_a_test_that_hangs_past_its_timeout_ends_its_process_with_the_stacks(project: Project) -> None:
    plugin = project.root / "tests/suites/plugin.py"
    plugin.write_text(plugin.read_text("utf-8").replace("HANG_S = 60.0", "HANG_S = 0.1"), "utf-8")
    hangs = "import signal\n" + SLOW.replace("@", "@pytest.mark.timeout(0.1)\n@") + "    signal.pause()\n"
    project.write("tests/slow/test_slow.py", hangs)
    status, printed = project.run("--tiers", "3", "--ci")
    assert status == 1 and any("Timeout (0:00:00" in line for line in printed)
    assert any("test_slow.py" in line and "in test_three" in line for line in printed)


def test_a_test_that_ends_its_process_is_run_once_and_all_others_are_run(project: Project) -> None:
    project.write("conftest.py", "")
    project.write("tests/suites/suites.toml", TABLE + "timeout_s = 100.0\n")
    project.write("tests/slow/test_early.py", SLOW)
    ends = "import os, pathlib\n" + SLOW.replace(
        "assert True", "pathlib.Path('.cache/ended').open('a').write('once'); os._exit(3)"
    )
    project.write("tests/slow/test_slow.py", ends + "@pytest.mark.slow\ndef test_four():\n    assert True\n")
    status, printed = project.run("--tiers", "3", "--workers", "1")
    assert status == 1 and "FAILED [slow] tests/slow/test_slow.py::test_three" in printed
    assert printed[-1] == "2 passed, 1 failed, 0 skipped"
    assert (project.root / ".cache/ended").read_text("utf-8") == "once"


def test_when_the_time_is_up_suites_of_tier_3_are_ended_and_named(project: Project) -> None:
    more = (
        TABLE
        + '[later]\ntier = 3\nabout = "not begun"\ncommand = ["sh", "-c", "echo begun >>.cache/begun"]\nuses = ["."]\n'
    )
    project.write("tests/suites/suites.toml", more)
    waits = "import signal\nfrom pathlib import Path\n" + SLOW.replace("    assert True\n", "    signal.pause()\n")
    project.write("tests/slow/test_slow.py", waits)
    status, printed = project.run("--tiers", "0", "3", "--ci", "--minutes", "0.1", "--at-once", "1", REQUIRE_ALL="1")
    assert status == 0 and printed[-1] == "1 passed, 0 failed, 0 skipped"
    assert "not run (above): slow, later" in printed
    assert [line.split()[2] for line in printed if line.startswith("NOT TESTED ")] == ["slow:", "later:"]
    assert not (project.root / ".cache/begun").exists()
    assert not project.recorded()


def test_what_failed_is_printed_also_if_the_suite_does_not_come_to_its_end(project: Project) -> None:
    fails = SLOW.replace("assert True", "assert 'apples' == 'pears'")
    project.write(
        "tests/slow/test_slow.py", fails + "@pytest.mark.slow\ndef test_ends():\n    __import__('os')._exit(3)\n"
    )
    status, printed = project.run("--tiers", "3", "--ci")
    assert status == 1 and "FAILED [slow] tests/slow/test_slow.py::test_three" in printed


def test_suites_that_passed_longest_ago_begin_first(project: Project) -> None:
    project.without_pytest()
    project.write(TABLE_FILE, project.table() + '[new]\ntier = 3\nabout = "new"\ncommand = ["true"]\nuses = ["."]\n')
    project.run("slow", "--ci")
    project.write("used.txt", "2\n")
    _, printed = project.run("--tiers", "3", "--ci", "--at-once", "1")
    assert [line.split()[2] for line in printed if line.endswith(" ...")] == ["new", "slow"]


def test_the_longest_suites_begin_first_where_all_have_time(project: Project) -> None:
    project.without_pytest()
    more = "".join(
        f'[{name}]\ntier = 3\nabout = "{name}"\ncommand = ["true"]\nuses = ["."]\n' for name in ("short", "long")
    )
    project.write(TABLE_FILE, project.table() + more)
    records = Records(project.cache / "errata/ci")
    for name, seconds in (("long", 300), ("slow", 200), ("short", 1)):  # 501 seconds
        records.keep(Pass(suite=name, key="0" * 16, date="2026-11-29", commit="", passed=1, seconds=seconds))
    for minutes, order in (("9", ["long", "slow", "short"]), ("8", ["slow", "long", "short"])):
        for at, name in enumerate(("slow", "long", "short")):
            (record,) = (project.cache / "errata/ci/passed").glob(f"{name}-{'0' * 16}.json")
            os.utime(record, (at, at))
        _, printed = project.run("--tiers", "3", "--at-once", "1", "--minutes", minutes)
        assert [line.split()[2] for line in printed if line.endswith(" ...")] == order


def test_a_pass_of_what_changed_while_it_ran_is_not_recorded(project: Project) -> None:
    project.write("tests/slow/test_slow.py", SLOW + "    open('used.txt', 'a').write('more')\n")
    status, printed = project.run("--tiers", "3", "--ci")
    assert status == 0 and any("changed while it ran" in line for line in printed)
    assert not project.recorded()


def test_the_summary_is_also_written_as_json(project: Project) -> None:
    project.write("tests/test_bad.py", "def test_bad():\n    assert 'apples' == 'pears'\n")
    project.run("--tiers", "0", "1")
    told = json.loads((project.root / ".cache/ci/summary.json").read_text("utf-8"))
    assert [(one["suite"], one["status"], one["passed"]) for one in told["suites"]] == [
        ("check", "passed", 1),
        ("fast", "failed", 1),
    ]
    assert list(told["suites"][1]["failed"]) == ["tests/test_bad.py::test_bad"]


def test_a_test_that_is_marked_where_its_suite_collects_none_is_in_fast(project: Project) -> None:
    project.write("tests/test_more.py", SLOW)
    assert project.run("fast")[1][-1] == "2 passed, 0 failed, 0 skipped"


def test_a_damaged_list_of_flaky_tests_stops_the_run(project: Project) -> None:
    (project.cache / "errata/ci").mkdir(parents=True)
    (project.cache / "errata/ci/flaky.json").write_text("[{", encoding="utf-8")
    status, printed = project.run()
    assert status == 2 and "flaky.json cannot be read" in printed[-1]


def test_an_unknown_suite_is_named_with_the_known_ones(project: Project) -> None:
    status, printed = project.run("nosuch")
    assert status == 2 and "no suite nosuch; there are check, fast, real, other, slow" in printed[-1]


def test_suites_and_their_keys_are_listed(project: Project) -> None:
    assert [line.split()[0] for line in project.run("--list")[1]] == ["check", "fast", "real", "other", "slow"]
    told = json.loads("\n".join(project.run("--keys", "--tiers", "3")[1]))
    assert len(told["slow"]["key"]) == 16 and {"common.txt", "used.txt", "tests/slow", "python"} <= told["slow"].keys()


def test_a_signal_ends_what_was_started(project: Project, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    project.write("check.sh", f"echo $$ > {pid}; exec sleep 600\n")
    process = project.start()
    while not pid.exists() or not pid.read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_signal_ends_the_run_with_what_failed_and_what_was_not_run(project: Project, tmp_path: Path) -> None:
    hangs = (
        f"import pathlib, signal\ndef test_hangs():\n    pathlib.Path('{tmp_path}/hangs').touch()\n    signal.pause()\n"
    )
    project.write("tests/test_bad.py", "def test_bad():\n    assert 'apples' == 'pears'\n" + hangs)
    process = project.start("--tiers", "1", "2", "--keep-going")
    while not (tmp_path / "hangs").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate()[0].splitlines()
    assert process.returncode == 128 + signal.SIGTERM
    assert "not run (above): real, other" in printed and "failed: the run was ended by SIGTERM" in printed
    assert [line for line in printed if line.startswith("FAILED ")] == [
        "FAILED [fast] tests/test_bad.py::test_bad",
        "FAILED [fast] fast",
    ]


SIGNALLED = """
import os, signal, subprocess, time
from pathlib import Path
class Popen(subprocess.Popen):
    def __init__(self, command, **more):
        super().__init__(command, **more)
        if command[0] == "sh":
            while not Path("{pid}").exists() or not Path("{pid}").read_text():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
subprocess.Popen = Popen
"""


def test_a_signal_ends_what_is_just_being_started(project: Project, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    project.write("check.sh", f"echo $$ > {pid}; exec sleep 600\n")
    project.write("sitecustomize.py", SIGNALLED.format(pid=pid))
    process = project.start(PYTHONPATH=str(project.root))
    printed, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, printed
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_what_has_a_network_of_its_own_sees_loopback_alone_where_that_is_allowed() -> None:
    browser = next(suite for suite in SUITES.values() if suite.own_network)
    command = pytest_command(browser, Path("outcomes.json"), 1)
    before = command[: command.index(browser.python)]
    assert before == list(own_network())
    if before:
        done = subprocess.run([*before, "ip", "-brief", "link"], capture_output=True, text=True, check=True)
        (only,) = done.stdout.splitlines()
        assert only.startswith("lo ") and "UP" in only

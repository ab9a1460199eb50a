"""The patches of proposals A and B, which need no other; that of C, which needs A's, is in `test_proposals`.

Each series applies alone and beside the other, its tests pass, and who does not use it gets the bytes of stock, with
the oldest and the newest FastAPI that OpenEnv allows.

A series is a letter: ``b-*.patch``, then ``b2-*.patch``. A patch that touches ``envs/`` is for OpenEnv's repository; it
applies to what ``make openenv-source`` exports, with the tree of the wheel below it.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from ..openenv_source import SOURCE, needs_openenv_source
from ..upstream.suite import suite_outcomes
from .trees import ROOT, apply, changed, files, played, run, unpacked

PROPOSAL = ROOT / "rfcs" / "proposals" / "b-error-information.md"
LOWEST = ROOT / ".cache" / "resolution-lowest" / "bin" / "python"
WITH_SMOLAGENTS = ROOT / ".cache" / "upstream-envs" / "bin" / "python"
PYTHONS = {"newest": Path(sys.executable), "lowest": LOWEST}

PATCHES = sorted((ROOT / "rfcs" / "upstream").glob("[ab]*.patch"))
FOR_THE_REPOSITORY = [patch for patch in PATCHES if any(path.startswith("envs/") for path in changed(patch))]
CORE = {
    letter: [patch for patch in group if patch not in FOR_THE_REPOSITORY]
    for letter, group in itertools.groupby(PATCHES, key=lambda patch: patch.name[0])
}
ORDERS = ["", *CORE, *("".join(pair) for pair in itertools.permutations(CORE, 2))]
"""Of the series' letters: none, each alone, each pair both ways."""

pytestmark = [pytest.mark.upstream_patches, pytest.mark.timeout(300)]
each_series = pytest.mark.parametrize("letter", CORE)
each_python = pytest.mark.parametrize("python", PYTHONS)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The source trees by distribution and order of series."""
    made = {}
    for kind in ("wheel", "sdist"):
        for order in ORDERS:
            tree = made[kind, order] = unpacked(kind, tmp_path_factory.mktemp(f"{kind}-{order}-"))
            for letter in order:
                for patch in CORE[letter]:
                    apply(tree, patch)
    return made


def own_tests(*patches: Path) -> list[str]:
    return sorted(path for patch in patches for path in changed(patch) if path.startswith("tests/"))


def outcome(tree: Path, *tests: str, python: Path, path: str = "src") -> tuple[int, str]:
    """Return the exit status and the output of tests in a tree."""
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, python=python, path=path)
    return done.returncode, done.stdout[-4000:] + done.stderr[-1000:]


def test_the_series_are_found() -> None:
    assert "b" in CORE
    assert [patch.name for patch in FOR_THE_REPOSITORY if patch.name[0] == "b"] == [
        "b2-error-information-environments.patch"
    ]


def test_the_lowest_python_has_the_oldest_fastapi() -> None:
    done = run(ROOT, "-c", "import fastapi, openenv; print(fastapi.__version__)", python=LOWEST)
    assert done.stdout.strip() == "0.116.0", done.stderr


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_series_changes_what_it_names_in_any_order(trees: dict[tuple[str, str], Path], kind: str) -> None:
    stock = files(trees[kind, ""])
    for order in ORDERS:
        patched = files(trees[kind, order])
        differing = {path for path in stock.keys() | patched.keys() if stock.get(path) != patched.get(path)}
        named = {path for letter in order for patch in CORE[letter] for path in changed(patch)}
        assert differing == named, order
        assert patched == files(trees[kind, order[::-1]]), order


@each_python
@pytest.mark.parametrize("order", [order for order in ORDERS if order])
def test_the_tests_of_a_series_pass(trees: dict[tuple[str, str], Path], order: str, python: str) -> None:
    tests = own_tests(*(patch for letter in order for patch in CORE[letter]))
    status, said = outcome(trees["wheel", order], *tests, python=PYTHONS[python])
    assert status == 0, said
    assert re.search(r"^\d+ passed", said, re.M)


@each_series
def test_the_tests_of_a_series_fail_on_stock(trees: dict[tuple[str, str], Path], letter: str, tmp_path: Path) -> None:
    tree = unpacked("wheel", tmp_path / "tree")
    for path in own_tests(*CORE[letter]):
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes((trees["wheel", letter] / path).read_bytes())
        assert outcome(tree, path, python=Path(sys.executable))[0] != 0, path


@each_series
def test_code_is_in_upstreams_style(trees: dict[tuple[str, str], Path], letter: str) -> None:
    tree = trees["sdist", letter]
    touched = sorted(path for patch in CORE[letter] for path in changed(patch) if path.endswith(".py"))
    config = ["--no-cache", "--config", str(tree / "pyproject.toml")]
    for command in (["format", "--check"], ["check"]):
        done = run(tree, "-m", "ruff", *command, *config, *touched)
        assert done.returncode == 0, done.stdout + done.stderr


@each_python
def test_who_does_not_use_it_gets_the_bytes_of_stock(trees: dict[tuple[str, str], Path], python: str) -> None:
    stock = played(trees["wheel", ""], python=PYTHONS[python])
    for order in ORDERS[1:]:
        assert played(trees["wheel", order], python=PYTHONS[python]) == stock, order


@needs_openenv_source
@pytest.mark.timeout(600)
@each_series
def test_upstreams_suite_passes_as_before(trees: dict[tuple[str, str], Path], letter: str, tmp_path: Path) -> None:
    before = suite_outcomes(tmp_path / "stock.xml", python_path=[trees["wheel", ""] / "src"])
    after = suite_outcomes(tmp_path / "patched.xml", python_path=[trees["wheel", letter] / "src"])
    assert sum(outcome == "passed" for outcome in before.values()) == 108
    assert after == before


# -- error information ------------------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_proposal(trees: dict[tuple[str, str], Path]) -> None:
    program = (
        "import json; from openenv.core.env_server import ErrorInfo, ErrorSite; "
        "print(json.dumps([list(m.model_fields) for m in (ErrorInfo, ErrorSite)]))"
    )
    info, site = json.loads(run(trees["wheel", "b"], "-c", program).stdout)
    tables = PROPOSAL.read_text().partition("### Core Abstractions")[2].partition("- **B-1**")[0].split("| A site |")
    first_cells = [re.findall(r"^\| (`.+?) \|", table, re.M) for table in tables]
    assert [re.findall(r"`(\w+)`", " ".join(cells)) for cells in first_cells] == [["error_info", *info], site]


def repository(to: Path, stock: Path, *patches: Path) -> Path:
    """Return OpenEnv's environments and their documents, on the tree of the wheel, with patches applied to both."""
    shutil.copytree(stock, to, dirs_exist_ok=True)
    for folder in ("envs", "docs"):
        shutil.copytree(SOURCE / folder, to / folder)
    for patch in patches:
        apply(to, patch)
    return to


@needs_openenv_source
@pytest.mark.parametrize("patch", FOR_THE_REPOSITORY, ids=lambda patch: patch.stem)
def test_converted_environments_pass_their_tests(
    trees: dict[tuple[str, str], Path], patch: Path, tmp_path: Path
) -> None:
    stock = trees["wheel", ""]
    tree = repository(tmp_path / "converted", stock, *CORE[patch.name[0]], patch)
    status, said = outcome(tree, *own_tests(patch), python=WITH_SMOLAGENTS, path="src:envs")
    assert status == 0, said
    assert re.search(r"^\d+ passed", said, re.M)
    unconverted = repository(tmp_path / "unconverted", stock, *CORE[patch.name[0]])
    for path in own_tests(patch):
        (unconverted / path).parent.mkdir(parents=True, exist_ok=True)
        (unconverted / path).write_bytes((tree / path).read_bytes())
        assert outcome(unconverted, path, python=WITH_SMOLAGENTS, path="src:envs")[0] != 0


@needs_openenv_source
def test_the_reply_in_the_proposal_is_that_of_coding_env(trees: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    tree = repository(tmp_path / "converted", trees["wheel", ""], *(p for p in PATCHES if p.name[0] == "b"))
    program = """
import json, sys
from coding_env.models import CodeAction
from coding_env.server.python_codeact_env import PythonCodeActEnv
from openenv.core.env_server import serialize_observation
env = PythonCodeActEnv()
env.reset()
action = CodeAction(**json.loads(sys.argv[1]))
print(json.dumps(serialize_observation(env.step(action))))
"""
    section = PROPOSAL.read_text().partition("### On the wire")[2]
    (asked,) = re.findall(r"^The answer of `coding_env` to `(.+?)`", section, re.M)
    (shown,) = re.findall(r"```json\n(.+?)\n```", section, re.S)
    done = run(tree, "-c", program, asked, python=WITH_SMOLAGENTS, path="src:envs")
    assert done.returncode == 0, done.stderr[-3000:]
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert reply["observation"]["stderr"].startswith("Traceback ")
    reply["observation"]["stderr"] = "Traceback \u2026"
    assert json.dumps(reply, ensure_ascii=False) == shown

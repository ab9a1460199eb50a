"""rfcs/proposals/*.md and their patches: sizes, examples, tests, stock's bytes for who does not ask, bounded memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..openenv_source import needs_openenv_source
from ..upstream.suite import suite_outcomes
from .trees import HERE, ROOT, apply, changed, files, lines, unpacked

UPSTREAM = ROOT / "rfcs" / "upstream"
PROPOSALS = ROOT / "rfcs" / "proposals"
PATCHES = {path.name[0]: path for path in sorted(UPSTREAM.glob("[a-z]-*.patch"))}
TEXTS = {path.name[0]: path for path in sorted(PROPOSALS.glob("[a-z]-*.md"))}
ORDERS = [order for order in ("a", "ac", "abc", "bac") if set(order) <= PATCHES.keys()]
PYTHONS = {"newest": sys.executable, "lowest": str(ROOT / ".cache" / "upstream-lowest" / "bin" / "python")}
"""Python by FastAPI: the newest, which requirements/dev.lock pins, and the lowest that openenv 0.10.0 allows."""

pytestmark = [pytest.mark.upstream_patches, pytest.mark.timeout(300)]
Trees = dict[tuple[str, str], Path]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    """The source trees by distribution and order of patches."""
    made = {}
    for kind in ("wheel", "sdist"):
        for order in ("", *ORDERS):
            tree = made[kind, order] = unpacked(kind, tmp_path_factory.mktemp(f"{kind}-{order}-"))
            for letter in order:
                apply(tree, PATCHES[letter])
    return made


def run(
    tree: Path, *command: str, text: str = "", fastapi: str = "newest", cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python with the OpenEnv of a tree in place of the installed one."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ERRATA_", "OPENENV_", "PYTEST_"))}
    environment = kept | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [PYTHONS[fastapi], *command],
        cwd=cwd or tree,
        env=environment,
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def own_tests(letter: str) -> list[str]:
    """Return the test modules that a patch brings or changes."""
    return sorted(path for path in changed(PATCHES[letter]) if path.startswith("tests/"))


@pytest.mark.parametrize(("letter", "order"), [("a", "a"), ("c", "ac")])
def test_examples_are_what_the_patched_server_says(trees: Trees, letter: str, order: str) -> None:
    text = TEXTS[letter].read_text()
    assert "```exchange\n" in text
    for fastapi in PYTHONS:
        assert run(trees["wheel", order], str(HERE / "exchanges.py"), text=text, fastapi=fastapi).stdout == text


# -- patches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", ["a", "c"])
def test_a_patch_is_in_the_form_of_git_am(letter: str, tmp_path: Path) -> None:
    tree = unpacked("wheel", tmp_path)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.invalid"]
    for command in (["init", "-q"], ["add", "src"], ["commit", "-qm", "0.10.0"]):
        subprocess.run([*git, *command], cwd=tree, check=True)
    for one in {"a": "a", "c": "ac"}[letter]:
        subprocess.run([*git, "am", "-q", str(PATCHES[one])], cwd=tree, check=True)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_patch_changes_what_it_names_and_nothing_else(trees: Trees, kind: str, order: str) -> None:
    stock, patched = files(trees[kind, ""]), files(trees[kind, order])
    differing = {path for path in stock.keys() | patched.keys() if stock.get(path) != patched.get(path)}
    assert differing == set().union(*(changed(PATCHES[letter]) for letter in order))
    assert not stock.keys() - patched.keys()


@pytest.mark.parametrize(
    ("kind", "order", "fastapi"), [("wheel", "a", "newest"), ("sdist", "ac", "newest"), ("wheel", "ac", "lowest")]
)
def test_a_patchs_own_tests_pass(trees: Trees, kind: str, order: str, fastapi: str) -> None:
    tree = trees[kind, order]
    own = sorted({path for letter in order for path in own_tests(letter)})
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own, fastapi=fastapi)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^\d+ passed", done.stdout, re.M)
    printed = run(tree, "-c", "import openenv, fastapi; print(openenv.__file__, fastapi.__version__)", fastapi=fastapi)
    where, version = printed.stdout.split()
    assert where.startswith(str(tree))
    assert version.startswith("0.116.") == (fastapi == "lowest")


@pytest.mark.parametrize(("letter", "without"), [("a", ""), ("c", "a")])
def test_a_patchs_tests_fail_without_it(trees: Trees, letter: str, without: str, tmp_path: Path) -> None:
    for path in own_tests(letter):
        (tmp_path / Path(path).name).write_bytes((trees["wheel", without + letter] / path).read_bytes())
        options = ("-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
        done = run(trees["wheel", without], "-m", "pytest", *options, str(tmp_path / Path(path).name), cwd=tmp_path)
        assert done.returncode != 0, path


def test_code_is_in_upstreams_style(trees: Trees) -> None:
    tree = trees["sdist", "ac"]
    touched = sorted({path for letter in "ac" for path in changed(PATCHES[letter]) if path.endswith(".py")})
    config = ["--no-cache", "--config", str(tree / "pyproject.toml")]
    for command in (["format", "--check"], ["check"]):
        done = run(tree, "-m", "ruff", *command, *config, *touched)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_openenv_source
@pytest.mark.timeout(600)
def test_upstreams_suite_passes_as_before(trees: Trees, tmp_path: Path) -> None:
    before = suite_outcomes(tmp_path / "stock.xml", python_path=[trees["wheel", ""] / "src"])
    after = suite_outcomes(tmp_path / "patched.xml", python_path=[trees["wheel", ORDERS[-1]] / "src"])
    assert sum(outcome == "passed" for outcome in before.values()) == 108
    assert after == before


# -- bytes and memory -------------------------------------------------------------------------------------------------


def played(tree: Path, fastapi: str) -> list[Any]:
    """Return what the OpenEnv of a tree answers to messages that ask for nothing of the proposals."""
    asked = lines("recorded") + lines("written") + lines("unasked")
    done = run(tree, str(HERE / "transcript.py"), "play", text=asked, fastapi=fastapi)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["openenv"].startswith(str(tree))
    return list(said["answers"])


@pytest.mark.parametrize("fastapi", list(PYTHONS))
def test_who_asks_for_nothing_gets_the_bytes_of_stock(trees: Trees, fastapi: str) -> None:
    asked = (lines("recorded") + lines("written") + lines("unasked")).splitlines()
    stock = played(trees["wheel", ""], fastapi)
    for order in ORDERS:
        for message, before, after in zip(asked, stock, played(trees["wheel", order], fastapi), strict=True):
            assert after == before, (order, message)


def test_memory_is_flat_in_2000_episodes_over_one_socket(trees: Trees) -> None:
    done = run(trees["wheel", "ac"], str(HERE / "memory.py"), "2000", "20", "5000")
    assert done.returncode == 0, done.stderr[-4000:]
    held = json.loads(done.stdout)
    assert held["deliveries"] == 2000 * 21
    assert 0 < held["most_bytes_after_10_episodes"] <= 22 * 5200  # an episode, and the last reply once more
    assert held["most_bytes"] == held["most_bytes_after_10_episodes"]
    assert held["most_ids"] <= 256

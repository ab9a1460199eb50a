"""The patches of rfcs/proposals: each series applies alone and beside the others, its tests pass, who does not use it
gets the bytes of stock, and the texts' examples are what it does, with the oldest and the newest FastAPI of OpenEnv.

A series is a letter: ``b-*.patch``, then ``b1-*.patch``. One that `NEEDS` another applies on that. A patch of files
that the distributions lack is for OpenEnv's repository; it applies to what ``make openenv-source`` exports, with the
tree of the wheel below it.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..openenv_source import SOURCE, needs_openenv_source
from ..upstream.suite import suite_outcomes
from .trees import HERE, ROOT, apply, changed, files, lines, played, run, unpacked

TEXTS = {path.name[0]: path for path in (ROOT / "rfcs" / "proposals").glob("[abc]-*.md")}
LOWEST = ROOT / ".cache" / "resolution-lowest" / "bin" / "python"
WITH_SMOLAGENTS = ROOT / ".cache" / "upstream-envs" / "bin" / "python"
PYTHONS = {"newest": Path(sys.executable), "lowest": LOWEST}

PATCHES = sorted((ROOT / "rfcs" / "upstream").glob("[abc]*.patch"))
UNDISTRIBUTED = ("envs/", "docs/source/_toctree.yml")
FOR_THE_REPOSITORY = [patch for patch in PATCHES if any(path.startswith(UNDISTRIBUTED) for path in changed(patch))]
CORE = {
    letter: [patch for patch in group if patch not in FOR_THE_REPOSITORY]
    for letter, group in itertools.groupby(PATCHES, key=lambda patch: patch.name[0])
}
NEEDS = {"c": "a"}
"""The series that a series applies on."""
ALONE = [NEEDS.get(letter, "") + letter for letter in CORE]
"""Of the series' letters: each with what it needs."""
ORDERS = [
    "".join(order)
    for size in range(len(CORE) + 1)
    for order in itertools.permutations(CORE, size)
    if all(needed in order[: order.index(letter)] for letter, needed in NEEDS.items() if letter in order)
]
"""Of the series' letters: none, and each choice of them in each order that applies."""
CHOICES = [order for order in ORDERS if list(order) == sorted(order)]
"""Of the series' letters: none, and each choice of them, in one of its orders. The others make the same files."""
MERGED = CHOICES[-1]
"""All series' letters."""
MESSAGES = ("recorded", "written", "unasked")
"""Messages that ask for nothing of the proposals."""

pytestmark = pytest.mark.upstream_patches
each_series = pytest.mark.parametrize("order", ALONE)
each_merged = pytest.mark.parametrize("order", [*ALONE, MERGED])
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


def failing(tree: Path, *tests: str, path: str = "src") -> set[str]:
    """Return which files of tests have one that fails in a tree, or cannot be imported."""
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", "--tb=no", "-rfE"]
    done = run(tree, "-m", "pytest", *options, *tests, python=WITH_SMOLAGENTS, path=path)
    return set(re.findall(r"^(?:FAILED|ERROR) ([^\s:]+)", done.stdout, re.M))


def test_the_series_are_found() -> None:
    assert list(CORE) == ["a", "b", "c"]
    assert ORDERS == ["", "a", "b", "ab", "ac", "ba", "abc", "acb", "bac"]
    assert CHOICES == ["", "a", "b", "ab", "ac", "abc"]
    assert [patch.name for patch in FOR_THE_REPOSITORY if patch.name[0] == "b"] == [
        "b1-error-information-documentation.patch",
        "b2-error-information-environments.patch",
    ]


@each_python
def test_the_python_has_the_openenv_of_the_tree(trees: dict[tuple[str, str], Path], python: str) -> None:
    tree = trees["wheel", "a"]
    program = "import fastapi, openenv; print(openenv.__file__, fastapi.__version__)"
    done = run(tree, "-c", program, python=PYTHONS[python])
    where, version = done.stdout.split()
    assert where.startswith(str(tree))
    assert (version == "0.116.0") == (python == "lowest")


@each_series
def test_a_series_is_in_the_form_of_git_am(order: str, tmp_path: Path) -> None:
    tree = unpacked("wheel", tmp_path)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.invalid"]
    for command in (["init", "-q"], ["add", "src"], ["commit", "-qm", "0.10.0"]):
        subprocess.run([*git, *command], cwd=tree, check=True)
    for letter in order:
        subprocess.run([*git, "am", "-q", *map(str, CORE[letter])], cwd=tree, check=True)


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_series_changes_what_it_names_in_any_order(trees: dict[tuple[str, str], Path], kind: str) -> None:
    stock = files(trees[kind, ""])
    for order in ORDERS:
        patched = files(trees[kind, order])
        differing = {path for path in stock.keys() | patched.keys() if stock.get(path) != patched.get(path)}
        named = {path for letter in order for patch in CORE[letter] for path in changed(patch)}
        assert differing == named, order
        assert not stock.keys() - patched.keys()
        assert patched == files(trees[kind, "".join(sorted(order))]), order


@pytest.mark.parametrize(("python", "order"), [("newest", MERGED), *(("lowest", order) for order in [*ALONE, MERGED])])
def test_the_tests_of_a_series_pass(trees: dict[tuple[str, str], Path], python: str, order: str) -> None:
    """With the newest FastAPI each series has the next test."""
    tests = own_tests(*(patch for letter in order for patch in CORE[letter]))
    status, said = outcome(trees["wheel", order], *tests, python=PYTHONS[python])
    assert status == 0, said
    assert re.search(r"^\d+ passed", said, re.M)


@each_series
def test_the_tests_of_a_series_pass_and_none_is_skipped_with_smolagents(
    trees: dict[tuple[str, str], Path], order: str
) -> None:
    """The Python that has smolagents has the newest of the rest."""
    status, said = outcome(trees["wheel", order], *own_tests(*CORE[order[-1]]), python=WITH_SMOLAGENTS)
    assert status == 0, said
    assert re.search(r"^\d+ passed", said, re.M)
    assert "skipped" not in said


@each_series
def test_the_tests_of_a_series_fail_without_it(trees: dict[tuple[str, str], Path], order: str, tmp_path: Path) -> None:
    tree = unpacked("wheel", tmp_path / "tree")
    for letter in order[:-1]:
        for patch in CORE[letter]:
            apply(tree, patch)
    tests = own_tests(*CORE[order[-1]])
    for path in tests:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes((trees["wheel", order] / path).read_bytes())
    assert failing(tree, *tests) == set(tests)


@each_series
def test_code_is_in_upstreams_style(trees: dict[tuple[str, str], Path], order: str) -> None:
    tree = trees["sdist", order]
    touched = sorted(path for patch in CORE[order[-1]] for path in changed(patch) if path.endswith(".py"))
    config = ["--no-cache", "--config", str(tree / "pyproject.toml")]
    for command in (["format", "--check"], ["check"]):
        done = run(tree, "-m", "ruff", *command, *config, *touched)
        assert done.returncode == 0, done.stdout + done.stderr


@each_python
def test_who_does_not_use_it_gets_the_bytes_of_stock(trees: dict[tuple[str, str], Path], python: str) -> None:
    asked = "".join(map(lines, MESSAGES)).splitlines()
    stock = played(trees["wheel", ""], MESSAGES, PYTHONS[python])
    for order in CHOICES[1:]:
        patched = played(trees["wheel", order], MESSAGES, PYTHONS[python])
        for message, before, after in zip(asked, stock, patched, strict=True):
            assert after == before, (order, message)


@pytest.mark.parametrize("order", ["", MERGED])
def test_the_recorded_messages_are_what_openenvs_clients_send(trees: dict[tuple[str, str], Path], order: str) -> None:
    done = run(trees["wheel", order], str(HERE / "transcript.py"), "record")
    assert done.stdout == lines("recorded"), done.stderr[-2000:]


@pytest.fixture(scope="module")
def outcomes_of_stock(trees: dict[tuple[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    report = tmp_path_factory.mktemp("suite") / "stock.xml"
    return suite_outcomes(report, python_path=[trees["wheel", ""] / "src"])


@needs_openenv_source
@each_merged
def test_upstreams_suite_passes_as_before(
    trees: dict[tuple[str, str], Path], outcomes_of_stock: dict[str, str], order: str, tmp_path: Path
) -> None:
    assert sum(outcome == "passed" for outcome in outcomes_of_stock.values()) == 108
    patched = suite_outcomes(tmp_path / "patched.xml", python_path=[trees["wheel", order] / "src"])
    assert patched == outcomes_of_stock


# -- lost replies and repeat-safe requests ----------------------------------------------------------------------------


@each_python
@pytest.mark.parametrize("order", ["a", "ac"])
def test_examples_are_what_the_patched_server_says(trees: dict[tuple[str, str], Path], order: str, python: str) -> None:
    text = TEXTS[order[-1]].read_text()
    assert "```exchange\n" in text
    assert run(trees["wheel", order], str(HERE / "exchanges.py"), text=text, python=PYTHONS[python]).stdout == text


def test_memory_is_flat_in_2000_episodes_over_one_socket(trees: dict[tuple[str, str], Path]) -> None:
    done = run(trees["wheel", "ac"], str(HERE / "memory.py"), "2000", "2", "5000")
    assert done.returncode == 0, done.stderr[-4000:]
    held = json.loads(done.stdout)
    assert held["deliveries"] == 2000 * 3
    assert 0 < held["most_bytes_after_10_episodes"] <= 5200  # the last reply
    assert held["most_bytes"] == held["most_bytes_after_10_episodes"]


# -- error information ------------------------------------------------------------------------------------------------


def test_the_fields_are_those_of_the_proposal(trees: dict[tuple[str, str], Path]) -> None:
    program = (
        "import json; from openenv.core.env_server import ErrorInfo, ErrorSite; "
        "print(json.dumps([list(m.model_fields) for m in (ErrorInfo, ErrorSite)]))"
    )
    info, site = json.loads(run(trees["wheel", "b"], "-c", program).stdout)
    tables = TEXTS["b"].read_text().partition("### Core Abstractions")[2].partition("- **B-1**")[0].split("| A site |")
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
def test_the_documentation_lists_the_guide_and_what_it_is_about(
    trees: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    tree = repository(tmp_path / "tree", trees["wheel", ""], *(p for p in PATCHES if p.name[0] == "b"))
    pages = re.findall(r"^\s*- local: (\S+)$", (tree / "docs" / "source" / "_toctree.yml").read_text(), re.M)
    guides = [path for patch in CORE["b"] for path in changed(patch) if path.startswith("docs/source/guides/")]
    assert {path.removeprefix("docs/source/").removesuffix(".md") for path in guides} <= set(pages)
    assert guides
    reference = (tree / "docs" / "source" / "reference" / "core.md").read_text()
    named = [one for one in re.findall(r"\[\[autodoc\]\] (\S+)", reference) if "error" in one]
    program = "import importlib, sys\nfor one in sys.argv[1:]:\n    m, _, n = one.rpartition('.')\n    "
    program += "getattr(importlib.import_module(m), n)"
    done = run(tree, "-c", program, *named)
    assert done.returncode == 0, done.stderr
    assert {"ErrorInfo", "ErrorSite", "without_error_info"} <= {one.rpartition(".")[2] for one in named}


@needs_openenv_source
@pytest.mark.parametrize("patch", [p for p in FOR_THE_REPOSITORY if own_tests(p)], ids=lambda patch: patch.stem)
def test_converted_environments_pass_their_tests(
    trees: dict[tuple[str, str], Path], patch: Path, tmp_path: Path
) -> None:
    stock = trees["wheel", ""]
    tree = repository(tmp_path / "converted", stock, *CORE[patch.name[0]], patch)
    status, said = outcome(tree, *own_tests(patch), python=WITH_SMOLAGENTS, path="src:envs")
    assert status == 0, said
    assert re.search(r"^\d+ passed", said, re.M)
    unconverted = repository(tmp_path / "unconverted", stock, *CORE[patch.name[0]])
    tests = own_tests(patch)
    for path in tests:
        (unconverted / path).parent.mkdir(parents=True, exist_ok=True)
        (unconverted / path).write_bytes((tree / path).read_bytes())
    assert failing(unconverted, *tests, path="src:envs") == set(tests)


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
    section = TEXTS["b"].read_text().partition("### On the wire")[2]
    (asked,) = re.findall(r"^The answer of `coding_env` to `(.+?)`", section, re.M)
    (shown,) = re.findall(r"```json\n(.+?)\n```", section, re.S)
    done = run(tree, "-c", program, asked, python=WITH_SMOLAGENTS, path="src:envs")
    assert done.returncode == 0, done.stderr[-3000:]
    reply: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert reply["observation"]["stderr"].startswith("Traceback ")
    reply["observation"]["stderr"] = "Traceback \u2026"
    assert json.dumps(reply, ensure_ascii=False) == shown

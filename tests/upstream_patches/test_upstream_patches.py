"""rfcs/upstream/*.patch on the published wheel and sdist of OpenEnv: they apply, tests pass, and who
does not ask for anything gets the bytes of stock."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_conformance.cli import main

from ..openenv_source import needs_openenv_source
from ..upstream.suite import suite_outcomes
from .trees import apply, changed, files, lines, played, run, unpacked

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PATCHES = sorted((ROOT / "rfcs" / "upstream").glob("0*.patch"))
ORDERS = {"none": [], "0001": PATCHES[:1], "0002": PATCHES[1:], "0001-0002": PATCHES, "0002-0001": PATCHES[::-1]}

pytestmark = [pytest.mark.upstream_patches, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The source trees by distribution and order of patches."""
    made = {}
    for kind in ("wheel", "sdist"):
        for order, patches in ORDERS.items():
            tree = made[kind, order] = unpacked(kind, tmp_path_factory.mktemp(f"{kind}-{order}-"))
            for patch in patches:
                apply(tree, patch)
    return made


def test_there_are_two_patches() -> None:
    assert [patch.name[:4] for patch in PATCHES] == ["0001", "0002"]


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("order", [order for order in ORDERS if order != "none"])
def test_a_patch_changes_what_it_names_and_nothing_else(
    trees: dict[tuple[str, str], Path], kind: str, order: str
) -> None:
    stock, patched = files(trees[kind, "none"]), files(trees[kind, order])
    differing = {path for path in stock.keys() | patched.keys() if stock.get(path) != patched.get(path)}
    assert differing == set().union(*map(changed, ORDERS[order]))
    assert not stock.keys() - patched.keys()


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_order_does_not_matter(trees: dict[tuple[str, str], Path], kind: str) -> None:
    assert files(trees[kind, "0001-0002"]) == files(trees[kind, "0002-0001"])


@pytest.mark.parametrize(("kind", "order"), [("wheel", "0001"), ("wheel", "0002"), ("sdist", "0001-0002")])
def test_a_patchs_own_tests_pass(trees: dict[tuple[str, str], Path], kind: str, order: str) -> None:
    tree = trees[kind, order]
    own = sorted(p for patch in ORDERS[order] for p in changed(patch) if p.startswith("tests/"))
    done = run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", *own)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert re.search(r"^\d+ passed", done.stdout, re.M)
    assert run(tree, "-c", "import openenv; print(openenv.__file__)").stdout.startswith(str(tree))


@pytest.mark.parametrize("order", ["0001", "0002"])
def test_a_patchs_tests_fail_on_stock(trees: dict[tuple[str, str], Path], order: str, tmp_path: Path) -> None:
    tree = unpacked("wheel", tmp_path / "tree")
    (own,) = [p for p in changed(*ORDERS[order]) if p.startswith("tests/")]
    (tree / own).parent.mkdir(parents=True)
    (tree / own).write_bytes((trees["wheel", order] / own).read_bytes())
    assert run(tree, "-m", "pytest", "-q", "-p", "no:cacheprovider", own).returncode != 0


def test_code_is_in_upstreams_style(trees: dict[tuple[str, str], Path]) -> None:
    tree = trees["sdist", "0001-0002"]
    touched = sorted(path for patch in PATCHES for path in changed(patch))
    config = ["--no-cache", "--config", str(tree / "pyproject.toml")]
    for command in (["format", "--check"], ["check"]):
        done = run(tree, "-m", "ruff", *command, *config, *touched)
        assert done.returncode == 0, done.stdout + done.stderr


# -- OpenEnv's own suite ----------------------------------------------------------------------------------------------


@needs_openenv_source
@pytest.mark.timeout(600)
def test_upstreams_suite_passes_as_before(trees: dict[tuple[str, str], Path], tmp_path: Path) -> None:
    before = suite_outcomes(tmp_path / "stock.xml", python_path=[trees["wheel", "none"] / "src"])
    after = suite_outcomes(tmp_path / "patched.xml", python_path=[trees["wheel", "0001-0002"] / "src"])
    assert sum(outcome == "passed" for outcome in before.values()) == 108
    assert after == before


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stock_answers(trees: dict[tuple[str, str], Path]) -> list[Any]:
    return played(trees["wheel", "none"])


def pairs(before: list[Any], after: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    asked = (lines("recorded") + lines("written")).splitlines()
    yield from zip(asked, before, after, strict=True)


@pytest.mark.parametrize("order", ["0001", "0002", "0001-0002"])
def test_who_asks_for_nothing_gets_the_bytes_of_stock(
    trees: dict[tuple[str, str], Path], stock_answers: list[Any], order: str
) -> None:
    for asked, before, after in pairs(stock_answers, played(trees["wheel", order])):
        assert after == before, asked


def test_a_server_that_records_differs_only_where_an_earlier_state_is_asked_for(
    trees: dict[tuple[str, str], Path], stock_answers: list[Any]
) -> None:
    differing = [
        asked
        for asked, before, after in pairs(stock_answers, played(trees["wheel", "0001-0002"], "records"))
        if after != before
    ]
    assert len(differing) == 1
    assert json.loads(json.loads(differing[0])["frames"][0]) == {"type": "state", "data": {"t": 0}}


def test_the_recorded_messages_are_what_upstreams_clients_send(trees: dict[tuple[str, str], Path]) -> None:
    done = run(trees["wheel", "none"], str(HERE / "transcript.py"), "record")
    assert done.stdout == lines("recorded"), done.stderr[-2000:]


def test_a_patched_server_passes_the_conformance_kit(
    trees: dict[tuple[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    probe = {
        "step": [{"n": 2}, {"n": 3}, {"n": 5}],
        "fails": {"do": "fail"},
        "invalid": {"n": "many"},
        "slow": {"do": "sleep"},
        "slow_s": 0.4,
        "marked": [{"do": "mark"}, {"do": "mark caf\u00e9 \U0001f600 nope"}],
    }
    (tmp_path / "probe.json").write_text(json.dumps(probe))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ERRATA_", "OPENENV_"))}
    environment |= {"PYTHONPATH": str(trees["wheel", "0001-0002"] / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(HERE / "marked.py")]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        given = ["--rfc", "014", "015", "016", "--profile", "0.10", "--probe", str(tmp_path / "probe.json"), "--json"]
        status = main([url, *given])
        server.kill()
    report = json.loads(capsys.readouterr().out)
    assert (status, report["broken"]) == (0, []), report["broken"]
    assert report["extensions"] == {"state_at": 1}
    passed = {one["statement"] for one in report["results"] if one["outcome"] == "passed"}
    assert {f"R-014-{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 14)} <= passed
    assert {f"R-015-{n}" for n in (1, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 15, 28)} <= passed

"""OpenEnv's own server tests pass on our server, with one worker and several, and on adopted applications."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..openenv_source import needs_openenv_source
from .suite import PRIVATE, suite_outcomes

pytestmark = [pytest.mark.upstream, needs_openenv_source]


@pytest.fixture(scope="module")
def on_stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return suite_outcomes(tmp_path_factory.mktemp("stock") / "report.xml")


def test_all_of_them_are_run(on_stock: dict[str, str]) -> None:
    assert sorted(on_stock.values()) == ["passed"] * 108 + ["skipped"]


@pytest.fixture(scope="module")
def expected(on_stock: dict[str, str]) -> dict[str, str]:
    found = {test: told for test, told in on_stock.items() if test.partition("::")[2] not in PRIVATE}
    assert list(found.values()).count("passed") == 106
    return found


@pytest.mark.parametrize("target", ["errata_server.app", "adopted_target"])
def test_what_passes_on_openenvs_server_passes_on_ours(target: str, expected: dict[str, str], tmp_path: Path) -> None:
    assert suite_outcomes(tmp_path / "report.xml", target=target, private=False) == expected


def test_what_passes_on_openenvs_server_passes_with_several_workers(expected: dict[str, str], tmp_path: Path) -> None:
    assert suite_outcomes(tmp_path / "report.xml", target="fleet_target", private=False) == expected
    assert set((tmp_path / "answered").read_bytes()) == {0, 1, 2, 3}, "each worker has answered some of the requests"

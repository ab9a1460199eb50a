"""OpenEnv's own server tests pass on our server and on adopted applications, as they do on OpenEnv's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..openenv_source import needs_openenv_source
from .suite import PRIVATE, suite_outcomes

pytestmark = [pytest.mark.upstream, pytest.mark.timeout(600), needs_openenv_source]


@pytest.fixture(scope="module")
def on_stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return suite_outcomes(tmp_path_factory.mktemp("stock") / "report.xml")


def test_all_of_them_are_run(on_stock: dict[str, str]) -> None:
    assert sorted(on_stock.values()) == ["passed"] * 108 + ["skipped"]


@pytest.mark.parametrize("target", ["errata_server.app", "adopted_target"])
def test_what_passes_on_openenvs_server_passes_on_ours(target: str, on_stock: dict[str, str], tmp_path: Path) -> None:
    seen = suite_outcomes(tmp_path / "report.xml", target=target, private=False)
    assert list(seen.values()).count("passed") == 106
    assert seen == {test: told for test, told in on_stock.items() if test.partition("::")[2] not in PRIVATE}

"""The settings of swe_bench_lite and the page that lists them."""

from __future__ import annotations

from pathlib import Path

from swe_bench_lite_env.server.settings import SweSettings

PAGE = Path(__file__).parents[3] / "docs" / "swe_bench_lite.md"


def test_every_setting_is_listed_with_its_variable() -> None:
    text = PAGE.read_text("utf-8")
    missing = [name for name in SweSettings.model_fields if f"`ERRATA_SWE_{name.upper()}`" not in text]
    assert missing == []


def test_every_setting_is_explained_in_its_class() -> None:
    assert all(f"        {name}: " in (SweSettings.__doc__ or "") for name in SweSettings.model_fields)

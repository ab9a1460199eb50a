"""Presets are what the experiment that chose them ran."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest

from errata_trainer.presets import PRESETS, preset
from errata_trainer.settings import ChannelSettings

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_has_the_settings_of_the_arm_that_is_its_evidence(name: str) -> None:
    chosen = PRESETS[name]
    page = (ROOT / chosen.evidence).read_text()
    assert f"`{name}`" in page, "the page of the experiment names the preset that it chose"
    plan = tomllib.loads((ROOT / "bench" / "plans" / "projects-taught.toml").read_text())
    (arm,) = [arm for arm in plan["arms"] if arm["name"] == chosen.arm]
    assert chosen.alpha_sdpo == arm["alpha_sdpo"]
    options = {**plan["channels"], **arm.get("channels", {})}
    if "hint_keys" in options:
        options["hint_keys"] = tuple(options["hint_keys"])
    assert chosen.settings == dataclasses.replace(ChannelSettings(), **options)


def test_a_preset_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(ValueError, match="followed-hints"):
        preset("strong")


def test_a_preset_is_keyword_arguments_of_the_trainer() -> None:
    assert set(preset("followed-hints")) == {"alpha_sdpo", "settings"}

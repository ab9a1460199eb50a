"""What the tests of SWE-bench Lite share: rows and recipes beside the checkout, and programs that CI has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from swe_bench_lite_env.dataset import Dataset, load_dataset
from swe_bench_lite_env.recipes import Recipes, load_recipes
from swe_bench_lite_env.server.prepare.store import Store

ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared/data"
"""Rows and recipes of third parties. They are not part of the repository."""


def missing(what: str) -> NoReturn:
    """Fail in CI (``.ci/run`` sets REQUIRE_ALL), and skip by name elsewhere: ``what`` is not on this machine."""
    if os.environ.get("REQUIRE_ALL"):
        pytest.fail(f"{what} is missing", pytrace=False)
    pytest.skip(f"{what} is missing")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store of its own for each test."""
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def lite() -> Dataset:
    """Six rows of SWE-bench Lite."""
    path = DATA / "swebench_lite_subset.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return load_dataset(path)


@pytest.fixture(scope="session")
def lite_recipes() -> Recipes:
    """Their recipes."""
    path = DATA / "swe_recipes.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return load_recipes(path)

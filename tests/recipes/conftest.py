"""What the tests of the recipes for Tinker, cartridges and ROLL share."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_server.process import ServerProcess

TRAINER = Path(__file__).parents[1] / "trainer"
sys.path[:0] = [str(TRAINER), str(TRAINER / "channels")]  # recorded cases, and small models

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

MISSING = [name for name in ("torch", "trl", "tinker", "peft") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []

if not MISSING:
    import torch

    torch.set_num_threads(1)  # tests share two cores


def pytest_report_header() -> str:
    """Say what is left out."""
    if MISSING:
        return f"tests/recipes: left out, {' and '.join(MISSING)} missing (make trainer)"
    return "tests/recipes: run"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of shelves in a process of its own."""
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data")) as made:
        yield made

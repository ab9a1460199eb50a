"""Training on a CPU, offline. Without `make trainer` these tests are left out, and the header says so."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

from errata_server.process import ServerProcess

os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TRL_EXPERIMENTAL_SILENCE="1", TOKENIZERS_PARALLELISM="false"
)

MISSING = [name for name in ("torch", "trl", "tinker") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py", "*/test_*.py"] if MISSING else []

if not MISSING:
    import torch

    torch.set_num_threads(1)  # tests share two cores


def pytest_report_header() -> str:
    """Say what is left out."""
    if MISSING:
        return f"tests/trainer: left out, {' and '.join(MISSING)} missing (make trainer)"
    return "tests/trainer: run"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of shelves in a process of its own."""
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data")) as made:
        yield made

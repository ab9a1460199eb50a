"""TRL's trainer has the losses that are recorded for the tests of VeRL's."""

from __future__ import annotations

from pathlib import Path

import pytest
from loss_recorder import CASES, record
from recorded_losses import DIRECTORY, differences, load

from errata_server.process import ServerProcess

pytestmark = pytest.mark.training


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_the_recorded_ones(server: ServerProcess, tmp_path: Path, name: str) -> None:
    found = "\n".join(differences(record(CASES[name], server.url, tmp_path), load(name)))
    assert not found, f"python scripts/record_channel_losses.py writes them anew\n{found}"


def test_each_file_is_of_a_case() -> None:
    assert {path.name for path in DIRECTORY.iterdir()} == {f"{name}.json" for name in CASES}

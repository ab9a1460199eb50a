"""What is interrupted while its server starts leaves no server behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from errata_server.process import ServerProcess
from tests.hangs import HANGS_S

pytestmark = pytest.mark.chaos

LATE = "tests.chaos.late_environments:TaggedCounter"
ROOT = Path(__file__).parents[2]


def servers(directory: Path) -> list[int]:
    """Return the processes that serve a data directory below a directory."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "errata_server.cli" in command and any(word.startswith(f"{directory}/") for word in command):
            found.append(int(place.parent.name))
    return found


def until(happened: Callable[[], object]) -> None:
    while not happened():
        time.sleep(0.05)


def mounts(directory: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {directory}/" in line]


STORM = ["tests.chaos.storm", "--disk-mib", "256"]
SOAK = ["tests.chaos.soak"]


@pytest.mark.sandbox  # the storm mounts a disk
@pytest.mark.parametrize(
    ("program", "signals"),
    [
        pytest.param(STORM, [signal.SIGINT], id="storm, ^C"),
        pytest.param(STORM, [signal.SIGTERM], id="storm, SIGTERM"),
        pytest.param(STORM, [signal.SIGINT, signal.SIGINT], id="storm, ^C twice"),
        pytest.param(SOAK, [signal.SIGTERM], id="soak, SIGTERM"),
    ],
)
def test_no_server_and_no_disk_is_left(program: list[str], signals: list[signal.Signals], tmp_path: Path) -> None:
    gate, place = tmp_path / "gate", tmp_path / "place"
    place.mkdir()
    running = subprocess.Popen(
        [sys.executable, "-m", *program, "--target", LATE, "--directory", str(place)],
        cwd=ROOT,
        env={**os.environ, "ERRATA_TEST_GATE": str(gate)},
        stderr=subprocess.PIPE,
    )
    try:
        until(lambda: servers(place))
        for one in signals:
            running.send_signal(one)
        gate.touch()
        running.communicate(timeout=HANGS_S)
    finally:
        running.kill()
    assert running.returncode != 0
    assert servers(place) == [] and mounts(place) == [] and list(place.iterdir()) == []


def test_an_interrupt_in_the_wait_for_a_server_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_TEST_GATE", str(tmp_path / "gate"))
    main = threading.get_ident()

    def interrupt() -> None:
        until(lambda: servers(tmp_path))
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        ServerProcess(LATE, tmp_path / "data")
    interrupting.join()
    assert servers(tmp_path) == []

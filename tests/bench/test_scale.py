"""The arithmetic of docs/scale.md, and that its tables are what the reports give."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/scale.py"


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module  # dataclasses look their annotations up there
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_what_the_script_writes() -> None:
    assert subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False).returncode == 0, f"run {SCRIPT}"


def test_what_sessions_take_worked_by_hand(scale: ModuleType) -> None:
    given = scale.Assumptions(
        step_every_s=10.0, busy=0.5, sessions_a_worker=1_000, box_cores=8, box_gib=16, steps_a_submit=1
    )
    kind = scale.Kind(
        "one", server_us=2_000, below_us=10_000, memory_kib=64, disk_kib=32, journal_bytes=400, payload_bytes=600
    )
    it = scale.need(kind, 20_000, 32.0, given)
    assert it.steps_s == 2_000
    assert it.server_cores == 4  # 2,000 steps of 2 ms
    assert it.below_cores == 20
    assert it.workers == 20  # 8 by CPU, 20 by the sessions that one holds
    assert it.memory_gib == pytest.approx((20_000 * 64 / 1024 + 20 * 32) / 1024)
    assert it.disk_gib == pytest.approx(20_000 * 32 / 1024**2)
    assert it.journal_tb_day == pytest.approx(2_000 * 1_000 * 86_400 / 1e12)
    assert it.boxes == 6  # 24 cores at 4 usable ones each


def test_memory_decides_where_it_is_short(scale: ModuleType) -> None:
    given = scale.Assumptions(busy=0.5, sessions_a_worker=1_000, box_cores=64, box_gib=1)
    kind = scale.Kind("one", 1, 0, memory_kib=1024, disk_kib=0, journal_bytes=0, payload_bytes=0)
    assert scale.need(kind, 1_024, 0.0, given).boxes == 2  # 1 GiB at half a GiB each
    assert scale.need(kind, 1_024, 0.0, given).workers == 2


def test_sessions_are_resumed_in_proportion_after_the_start(scale: ModuleType) -> None:
    assert scale.resume_s(5_000, 1, 4.0, 8.0, 10_000) == 6.0
    assert scale.resume_s(1_000_000, 100, 4.0, 8.0, 10_000) == 8.0

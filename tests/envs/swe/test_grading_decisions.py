"""What a grading decides from its runs: which runs it makes, remembers, and what their results mean. No test runs."""

from __future__ import annotations

from typing import Any

import pytest

from errata_protocol.environment import SnapshotRef
from errata_server.sandbox.base import SandboxSnapshot
from errata_server.sandbox.fake.backend import FakeBackend
from swe_bench_lite_env.server import grading, workspaces
from swe_bench_lite_env.server.canaries import Outcome
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare.store import Prepared

from .sessions import NAME, instance

START = SandboxSnapshot(ref=SnapshotRef("base", "default"))
TESTS = workspaces.Tests({"tests/test_links.py": {"content": "", "mode": 0o644}}, {})
USABLE = Outcome({"<passes 00>": "PASSED", "<fails 00>": "FAILED"}, 1)


def start() -> Prepared:
    return Prepared(instance(), bundled()[1].find(NAME), "default", START, "/usr/bin/python3", {}, "digest", True)


async def test_a_slow_run_of_the_expected_canaries_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [Outcome({}, None), USABLE]

    async def canaries(*arguments: Any) -> Outcome:
        return shown.pop(0)

    monkeypatch.setattr(grading, "_canaries", canaries)
    backend = FakeBackend()
    found = [await grading._expected_canaries(backend, start(), TESTS, 5, 1.0, False) for _ in range(3)]
    assert found == [None, USABLE, USABLE] and not shown

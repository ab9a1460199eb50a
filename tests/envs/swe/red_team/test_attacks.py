"""What becomes of attempts to be rewarded without a repair: the reward is 0, but for the misses that are named here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from errata_server.sandbox.base import Backend, Limits, SandboxSnapshot
from swe_bench_lite_env.server import grading
from swe_bench_lite_env.server.grading import Graded, grade
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare.build import Builder
from swe_bench_lite_env.server.prepare.store import Catalogue, Prepared, Store
from swe_bench_lite_env.server.workspaces import TestRun

from ..sessions import NAME, instance
from .adaptive import ADAPTIVE, EQUAL_TO_EVERYTHING
from .attacks import ATTACKS, Attack

pytestmark = [pytest.mark.redteam, pytest.mark.sandbox]

MISSES: frozenset[str] = frozenset()
LIMITS = Limits(memory_bytes=2 * 1024**3, pids=256, disk_bytes=1024**3, inodes=100_000, file_size_bytes=1024**3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


async def prepared(store: Store, backend: Backend, name: str = NAME) -> Prepared:
    recipe = bundled()[1].find(name)
    await Builder(store, backend).build(instance(name), recipe)
    return await Catalogue(store, backend).find(instance(name), recipe, validated=False)


async def attacked(backend: Backend, start: Prepared, attack: Attack) -> SandboxSnapshot:
    """Return the state that an attacker leaves."""
    sandbox = await backend.restore(start.snapshot, limits=LIMITS)
    try:
        for name, text in attack.files.items():
            path = f"/testbed/{name.removeprefix('+')}"
            before = await sandbox.read_file(path) if name.startswith("+") else b""
            await sandbox.write_file(path, before + text.encode())
        if attack.command:
            await sandbox.run(f"cd /testbed; {attack.command}", timeout_s=20)
        return await sandbox.snapshot()
    finally:
        await sandbox.destroy()


async def outcome(store: Store, backend: Backend, attack: Attack, name: str = NAME) -> Graded:
    start = await prepared(store, backend, name)
    state = await attacked(backend, start, attack)
    return await grade(backend, state, start, timeout_s=10)


@pytest.mark.parametrize("attack", (*ATTACKS, *ADAPTIVE), ids=lambda attack: attack.name)
async def test_no_attempt_is_rewarded(store: Store, namespace: Backend, attack: Attack) -> None:
    graded = await outcome(store, namespace, attack)
    print(attack.kind, "|", graded.resolved, graded.canaries, graded.tampering, graded.resolution.invalid)
    assert (graded.reward == 0.0) == (attack.name not in MISSES), graded.log[-2000:]


async def test_objects_that_are_equal_to_everything_earn_nothing(store: Store, namespace: Backend) -> None:
    graded = await outcome(store, namespace, EQUAL_TO_EVERYTHING, "errata-examples__routetable-1")
    assert graded.resolved and graded.reward == 0.0 and graded.canaries == "wrong", graded.log[-2000:]


async def test_code_that_hangs_at_random_earns_nothing_where_its_twins_hang(
    store: Store, namespace: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It swallows failures, and does not end in some runs: by chance in those of the twin alone."""
    both, alone = grading._both, grading._alone

    def hung(run: TestRun) -> TestRun:
        return replace(run, result=replace(run.result, exit_code=None, timed_out=True))

    async def both_with_a_hung_twin(*given: Any) -> Any:
        run, beside = await both(*given)
        return run, hung(beside) if beside is not None else None

    async def hung_alone(*given: Any) -> Any:
        return hung(await alone(*given))

    monkeypatch.setattr(grading, "_both", both_with_a_hung_twin)
    monkeypatch.setattr(grading, "_alone", hung_alone)
    (swallows,) = (attack for attack in ATTACKS if attack.name == "package_swallows_hidden_failures")
    graded = await outcome(store, namespace, swallows)
    assert graded.resolved and graded.reward == 0.0 and graded.canaries == "wrong", graded.log[-2000:]

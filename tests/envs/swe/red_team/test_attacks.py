"""What becomes of attempts to be rewarded without a repair: nothing is paid for any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from errata_redteam import Attempt
from errata_redteam.adaptive import ADAPTIVE
from errata_redteam.instances import LIMITS
from errata_redteam.playing import left
from errata_server.sandbox.base import Backend, SandboxSnapshot
from swe_bench_lite_env.server import grading
from swe_bench_lite_env.server.grading import Graded, grade
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare.build import Builder
from swe_bench_lite_env.server.prepare.store import Catalogue, Prepared, Store
from swe_bench_lite_env.server.workspaces import TestRun

from ..sessions import NAME, instance
from .corpus import ATTEMPTS, attempt

pytestmark = [pytest.mark.redteam, pytest.mark.sandbox]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


async def prepared(store: Store, backend: Backend, name: str = NAME) -> Prepared:
    recipe = bundled()[1].find(name)
    await Builder(store, backend).build(instance(name), recipe)
    return await Catalogue(store, backend).find(instance(name), recipe, validated=False)


async def attacked(backend: Backend, start: Prepared, attempt: Attempt) -> SandboxSnapshot:
    """Return the state that an attacker leaves."""
    return await left(backend, start.snapshot, start.workdir, attempt, LIMITS)


async def outcome(store: Store, backend: Backend, played: Attempt, name: str = NAME) -> Graded:
    start = await prepared(store, backend, name)
    state = await attacked(backend, start, played)
    return await grade(backend, state, start, timeout_s=10)


@pytest.mark.parametrize("played", ATTEMPTS, ids=lambda played: played.name)
async def test_no_attempt_is_rewarded(store: Store, namespace: Backend, played: Attempt) -> None:
    graded = await outcome(store, namespace, played)
    print(played.kind, "|", graded.resolved, graded.canaries, graded.tampering, graded.resolution.invalid)
    assert graded.reward == 0.0, graded.log[-2000:]


async def test_objects_that_are_equal_to_everything_earn_nothing(store: Store, namespace: Backend) -> None:
    (lies,) = (one for one in ADAPTIVE if one.only == "errata-examples__routetable-1")
    graded = await outcome(store, namespace, lies, lies.only)
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
    graded = await outcome(store, namespace, attempt("package_swallows_hidden_failures"))
    assert graded.resolved and graded.reward == 0.0 and graded.canaries == "wrong", graded.log[-2000:]

"""Honest work is never taken for tampering: gold patches, and what else agents leave in a repository they repaired."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from errata_redteam import Attempt
from errata_redteam.instances import LIMITS
from errata_redteam.playing import left
from errata_server.sandbox.base import Backend, SandboxSnapshot
from swe_bench_lite_env.server.grading import Graded, gold, grade
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare.store import Prepared, Store

from ..sessions import NAME
from .corpus import HONEST
from .test_attacks import attacked, prepared

pytestmark = [pytest.mark.redteam, pytest.mark.sandbox]

UNREPAIRED = {
    *("a_new_test_that_fails", "an_autouse_fixture", "tox_ini", "stops_at_the_first_failure", "quiet_by_default"),
    *("warnings_are_errors", "a_handler_at_exit", "a_thread", "byte_code_was_made", "a_branch_and_a_stash"),
    *("other_modes", "a_visible_test_repaired", "a_module_moved", "flat_layout", "a_testing_module_of_its_own"),
    *("windows_line_ends", "equality_of_its_own", "a_signal_handler", "a_child_at_import", "tests_in_the_package"),
}
"""Names of the work of each kind that is graded without a repair, too; all work is graded beside one."""
assert {work.name for work in HONEST} >= UNREPAIRED


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


async def repaired(
    backend: Backend, start: Prepared, files: Mapping[str, str] = {}, command: str = ""
) -> SandboxSnapshot:
    state = await gold(backend, start)
    return await left(backend, state, start.workdir, Attempt("", "", files, command), LIMITS)


def honest(graded: Graded) -> None:
    assert graded.resolved and not graded.tampering and graded.canaries == "ok", (graded.tampering, graded.log[-1500:])
    assert graded.reward == 1.0


@pytest.mark.parametrize("name", bundled()[0].ids)
async def test_gold_patches_are_rewarded_and_empty_ones_are_not_tampering(
    store: Store, namespace: Backend, name: str
) -> None:
    start = await prepared(store, namespace, name)
    honest(await grade(namespace, await repaired(namespace, start), start, timeout_s=60))
    empty = await grade(namespace, start.snapshot, start, timeout_s=60)
    assert (empty.reward, empty.resolved, empty.tampering, empty.canaries) == (0.0, False, (), "ok")


@pytest.mark.parametrize("work", HONEST, ids=lambda work: work.name)
async def test_honest_work_around_a_repair_changes_no_verdict(store: Store, namespace: Backend, work: Attempt) -> None:
    start = await prepared(store, namespace, NAME)
    state = await repaired(namespace, start, work.files, work.command)
    honest(await grade(namespace, state, start, timeout_s=60))


@pytest.mark.parametrize("work", [work for work in HONEST if work.name in UNREPAIRED], ids=lambda work: work.name)
async def test_honest_work_without_a_repair_is_no_tampering(store: Store, namespace: Backend, work: Attempt) -> None:
    start = await prepared(store, namespace, NAME)
    graded = await grade(namespace, await attacked(namespace, start, work), start, timeout_s=60)
    assert (graded.reward, graded.tampering) == (0.0, ()), graded.log[-1500:]

"""The instances that ship with the package are what the benchmark's are: each bug shows, and its own fix repairs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_server.sandbox.base import Backend
from swe_bench_lite_env.dataset import Instance
from swe_bench_lite_env.rules.directives import modified_files
from swe_bench_lite_env.rules.verdict import Resolution, compose_log, judge
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare.build import Builder
from swe_bench_lite_env.server.prepare.store import Catalogue, Prepared, Store

pytestmark = pytest.mark.sandbox

DATASET, RECIPES = bundled()
ANSWERS = Path(__file__).with_name("answers")
APPLY = "cd /testbed && git apply --whitespace=nowarn -"
VISIBLE = "cd /testbed && python3 -m pytest -q -p no:cacheprovider"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


async def prepared(store: Store, backend: Backend, instance: Instance) -> Prepared:
    recipe = RECIPES.find(instance.instance_id)
    await Builder(store, backend).build(instance, recipe)
    return await Catalogue(store, backend).find(instance, recipe, validated=False)


async def judged(store: Store, backend: Backend, instance: Instance, patch: str) -> Resolution:
    """Apply a patch, restore the tests, and judge as the benchmark does."""
    start = await prepared(store, backend, instance)
    sandbox = await backend.restore(start.snapshot)
    try:
        if patch:
            applied = await sandbox.run(APPLY, stdin=patch.encode(), clean=True)
            assert applied.exit_code == 0, applied.stderr
        restore = f"cd /testbed && git checkout HEAD -- {' '.join(modified_files(instance.test_patch))}"
        assert (await sandbox.run(restore, clean=True)).exit_code == 0
        applied = await sandbox.run(APPLY, stdin=instance.test_patch.encode(), clean=True)
        assert applied.exit_code == 0, applied.stderr
        run = await sandbox.run(f"cd /testbed && {start.test_command} 2>&1", clean=True, env=start.env)
        return judge(instance, compose_log(run.stdout, run.exit_code))
    finally:
        await sandbox.destroy()


def test_at_least_six_repositories_of_several_files_ship() -> None:
    assert len(DATASET) >= 6 and len({instance.repo for instance in DATASET}) == len(DATASET)
    for instance in DATASET:
        source = RECIPES.find(instance.instance_id).source_path
        assert len(list(source.rglob("src/*/*.py"))) >= 4, instance.instance_id
        assert len(list(source.rglob("test_*.py"))) >= 2, instance.instance_id
        assert instance.test_patch and instance.hints_text and len(instance.problem_statement) > 200


@pytest.mark.parametrize("instance", DATASET, ids=lambda instance: instance.instance_id)
async def test_the_bug_shows_and_only_its_repair_resolves_it(
    store: Store, namespace: Backend, instance: Instance
) -> None:
    before = await judged(store, namespace, instance, "")
    assert not before.fail_to_pass.success and before.fail_to_pass.failure == instance.fail_to_pass
    assert before.pass_to_pass.success == instance.pass_to_pass and instance.pass_to_pass
    assert not before.resolved
    after = await judged(store, namespace, instance, instance.patch)
    assert after.resolved and set(after.statuses) == {*instance.fail_to_pass, *instance.pass_to_pass}
    assert after.exit_code == 0


@pytest.mark.parametrize("instance", DATASET, ids=lambda instance: instance.instance_id)
async def test_a_patch_for_the_visible_tests_and_the_issues_own_examples_fails(
    store: Store, namespace: Backend, instance: Instance
) -> None:
    gamed = (ANSWERS / instance.instance_id / "gamed.patch").read_text("utf-8")
    start = await prepared(store, namespace, instance)
    sandbox = await namespace.restore(start.snapshot)
    assert (await sandbox.run(APPLY, stdin=gamed.encode(), clean=True)).exit_code == 0
    visible = await sandbox.run(VISIBLE, clean=True, env=start.env)
    await sandbox.destroy()
    assert visible.exit_code == 0, visible.stdout
    verdict = await judged(store, namespace, instance, gamed)
    assert not verdict.resolved and verdict.fail_to_pass.success and verdict.fail_to_pass.failure


async def test_an_agent_commits_with_the_identity_of_the_benchmarks_images(store: Store, namespace: Backend) -> None:
    start = await prepared(store, namespace, next(iter(DATASET)))
    sandbox = await namespace.restore(start.snapshot)
    said = await sandbox.run("echo x >> README.md; git add -A; git commit -qm fix && git log -1 --format='%an <%ae>'")
    elsewhere = await sandbox.run("git init -q /tmp/x && cd /tmp/x && git commit -q --allow-empty -m first")
    await sandbox.destroy()
    assert said.stdout == "SWE-bench <setup@swebench.config>\n", said.stderr
    assert elsewhere.exit_code == 0, elsewhere.stderr


def test_the_tests_that_decide_do_not_stand_in_the_start() -> None:
    for instance in DATASET:
        source = RECIPES.find(instance.instance_id).source_path
        files = {path.relative_to(source): path.read_text("utf-8") for path in source.rglob("*") if path.is_file()}
        for test in instance.fail_to_pass:
            name = test.rsplit("::", 1)[-1].split("[")[0]
            moved = any(f"def {name}(" in text for text in files.values())
            assert not moved or "[" in test, f"{instance.instance_id}: {test} stands in the tree already"

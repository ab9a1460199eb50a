"""Instances are built, kept, validated and opened: with files beside the recipe, on the base tree's own Python."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from errata_protocol.errors import EnvironmentFailed, InvalidRequest
from errata_server.sandbox.base import Backend
from errata_server.sandbox.namespace.backend import NamespaceBackend
from swe_bench_lite_env.dataset import Instance
from swe_bench_lite_env.recipes import Recipe
from swe_bench_lite_env.server.prepare import store as store_module
from swe_bench_lite_env.server.prepare import validate as validate_module
from swe_bench_lite_env.server.prepare.build import Builder
from swe_bench_lite_env.server.prepare.sources import SourceMissing, build_key
from swe_bench_lite_env.server.prepare.space import trim, usage
from swe_bench_lite_env.server.prepare.store import EPOCH_S, Catalogue, NotPrepared, NotValidated, Prepared, Store
from swe_bench_lite_env.server.prepare.validate import Run, run_tests, validate
from swe_bench_lite_env.server.validation import graded

from .preparing import GOLD, TEST_PATCH, files, git, instance, mirror, recipe, write

pytestmark = [pytest.mark.prepare, pytest.mark.sandbox]


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    directory = tmp_path_factory.mktemp("sandboxes")
    made = NamespaceBackend(directory)
    asyncio.run(made.start())
    yield made
    asyncio.run(made.close())
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def own(tmp_path: Path) -> tuple[Instance, Recipe]:
    write(tmp_path / "source", files())
    return instance(), recipe(tmp_path)


async def shell(catalogue: Catalogue, row: Instance, made: Recipe, command: str) -> str:
    _, sandbox = await catalogue.open(row, made, validated=False)
    try:
        result = await sandbox.run(command)
        assert result.exit_code == 0, result.stderr
        return result.stdout
    finally:
        await sandbox.destroy()


async def test_an_instance_is_built_validated_and_opened(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    lines: list[str] = []
    build = await Builder(store, backend, progress=lines.append).build(*own)
    assert lines, "no progress was said"
    catalogue = Catalogue(store, backend)
    with pytest.raises(NotValidated, match=r"errata swe validate .*--instance own__ledger-1"):
        await catalogue.find(*own)
    found = await validate(catalogue, *own)
    assert found.passed, found.problems
    assert (found.before, found.after) == (
        {"fail_to_pass": (0, 1), "pass_to_pass": (1, 1)},
        {"fail_to_pass": (1, 1), "pass_to_pass": (1, 1)},
    )
    prepared, sandbox = await catalogue.open(*own)
    assert prepared.validated and prepared.workdir == "/testbed" and prepared.base == build.base
    assert (await sandbox.run("pwd")).stdout == "/testbed\n"
    await sandbox.destroy()
    assert (await catalogue.find(*own)).snapshot == prepared.snapshot, "the start was made twice"


@pytest.mark.parametrize("missing", ["test_ledger.py", "ledger/__init__.py"])
async def test_a_source_that_lacks_what_a_patch_changes_is_refused_before_the_build(
    store: Store, backend: Backend, own: tuple[Instance, Recipe], missing: str
) -> None:
    (own[1].source_path / missing).unlink()
    lines: list[str] = []
    with pytest.raises(EnvironmentFailed, match=rf"patch does not apply to directory source.*{missing}: No such file"):
        await Builder(store, backend, progress=lines.append).build(*own)
    assert lines == ["own__ledger-1: fetching the source (directory)"]


async def test_patches_without_their_last_newline_are_taken(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    row = instance(patch=GOLD.strip(), test_patch=TEST_PATCH.strip())
    await Builder(store, backend).build(row, own[1])
    for grader in (run_tests, graded):
        found = await validate(Catalogue(store, backend), row, own[1], runs=1, grader=grader)
        assert found.passed, found.problems


async def test_what_was_built_is_not_built_again(store: Store, backend: Backend, own: tuple[Instance, Recipe]) -> None:
    builder = Builder(store, backend)
    first = await builder.build(*own)
    assert await builder.build(*own) == first
    (own[1].source_path / "bin/tool").write_text("x\n", "utf-8")
    changed = await builder.build(*own)
    assert changed.tree != first.tree


async def test_two_builds_are_one_archive_but_for_gits_index(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    digests = []
    for _ in range(2):
        await Builder(store, backend).build(*own, again=True)
        prepared = await Catalogue(store, backend).find(*own, validated=False)
        sandbox = await backend.restore(prepared.snapshot)
        digests.append(await sandbox.merged_digest())
        await sandbox.destroy()
    assert digests[0] == digests[1]


async def test_the_start_is_one_commit_with_nothing_to_recover(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    source = own[1].source_path
    write(source, {"ledger/__pycache__/old.cpython-39.pyc": "FIX", ".pytest_cache/v/lastfailed": "FIX", "x.pyc": "FIX"})
    git(source, "init", "--quiet")
    git(source, "commit", "--quiet", "--allow-empty", "-m", "the fix")
    await Builder(store, backend).build(*own)
    catalogue = Catalogue(store, backend)
    probe = """
git log --format='%H %an %cI' --all; echo --; git status --porcelain --ignored; echo --; git reflog; git stash list
git remote; git fsck --lost-found --no-reflogs 2>&1 | grep -v '^notice'; echo --
git cat-file --batch-all-objects --batch-check='%(objecttype)' | sort | uniq -c; echo --
find / -xdev \\( -name '*.pyc' -path '/testbed/*' -o -name .pytest_cache -o -name lastfailed \\); ls .git; echo --
find . -not -path './.git/index' -newermt @EPOCH; stat -c '%U %a' setup.py bin/tool . ; env | grep BYTECODE
""".replace("EPOCH", str(EPOCH_S))
    log, status, reflog, objects, left, times = (await shell(catalogue, *own, probe)).split("--\n")
    assert log.count("\n") == 1 and "2026-01-01T00:00:00+00:00" in log
    assert (status, reflog) == ("", "")
    assert "1 commit" in objects
    assert left.split() == ["HEAD", "config", "index", "objects", "refs"]
    assert times.splitlines()[-4:] == ["agent 644", "agent 755", "agent 755", "PYTHONDONTWRITEBYTECODE=1"]
    assert set(times.splitlines()[:-4]) <= {".", "./.git"}, "a file is newer than the start"


async def test_git_reads_no_file_anew(store: Store, backend: Backend, own: tuple[Instance, Recipe]) -> None:
    await Builder(store, backend).build(*own)
    command = "git update-index --refresh --really-refresh >/dev/null; git diff-files --quiet && echo clean"
    assert await shell(Catalogue(store, backend), *own, command) == "clean\n"


async def test_an_instance_that_was_not_prepared_names_the_command(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    catalogue = Catalogue(store, backend)
    with pytest.raises(NotPrepared, match=r"errata swe prepare .*--instance own__ledger-1"):
        await catalogue.find(*own)
    await Builder(store, backend).build(*own)
    store.archive((await Builder(store, backend).build(*own)).tree).unlink()
    with pytest.raises(NotPrepared):
        await catalogue.find(*own, validated=False)


async def test_a_validation_holds_for_one_row_and_one_recipe(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    await Builder(store, backend).build(*own)
    catalogue = Catalogue(store, backend)
    await validate(catalogue, *own, runs=1)
    await catalogue.find(*own)
    with pytest.raises(NotValidated):
        await catalogue.find(replace(own[0], patch=own[0].patch + "\n"), own[1])
    with pytest.raises(NotValidated):
        await catalogue.find(own[0], replace(own[1], test_command="true"))


async def test_a_validation_of_another_version_does_not_count_for_new_sessions(
    store: Store, backend: Backend, own: tuple[Instance, Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    await Builder(store, backend).build(*own)
    catalogue = Catalogue(store, backend)
    with pytest.raises(NotValidated, match="its validation was not run"):
        await catalogue.find(*own, outdated=True)
    await validate(catalogue, *own, runs=1)
    before = await catalogue.find(*own)
    other = store_module.VALIDATOR + 1
    monkeypatch.setattr(store_module, "VALIDATOR", other)
    with pytest.raises(NotValidated, match=f"version {other - 1}, this is version {other}: run `errata swe validate"):
        await catalogue.find(*own)
    after = await catalogue.find(*own, outdated=True)
    assert (after.digest, after.validated) == (before.digest, False)
    monkeypatch.setattr(validate_module, "VALIDATOR", other)
    await validate(catalogue, *own, runs=1)
    assert (await catalogue.find(*own)).validated
    useless = replace(own[0], patch=own[0].patch.replace("+    return sum(entries)", "+    return 0"))
    await validate(catalogue, useless, own[1], runs=1)
    with pytest.raises(NotValidated, match="does not repair"):
        await catalogue.find(useless, own[1], outdated=True)


async def test_gold_that_repairs_nothing_and_an_empty_patch_that_resolves_are_refused(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    row, made = own
    catalogue = Catalogue(store, backend)
    await Builder(store, backend).build(row, made)
    useless = replace(row, patch=row.patch.replace("+    return sum(entries)", "+    return sum(entries[:-2])"))
    found = await validate(catalogue, useless, made, runs=1)
    assert "test_total" in found.problems[0] and "AssertionError" in found.problems[1]
    easy = replace(row, fail_to_pass=("test_ledger.py::test_count",))
    assert any("empty patch resolves" in line for line in (await validate(catalogue, easy, made, runs=1)).problems)
    broken = replace(row, test_patch=row.test_patch.replace("count([1, 2]) == 2", "gone([1])"))
    assert any(
        "test patch does not apply" in line for line in (await validate(catalogue, broken, made, runs=1)).problems
    )
    absent = replace(made, test_command="no-such-runner")
    problems = (await validate(catalogue, row, absent, runs=1)).problems
    assert "invalid" in problems[0] and "no-such-runner: command not found" in problems[1]
    missing = replace(row, pass_to_pass=("test_ledger.py::test_count", "test_ledger.py::test_gone"))
    assert any("exclude_pass_to_pass" in line for line in (await validate(catalogue, missing, made, runs=1)).problems)


async def test_flaky_tests_are_left_out_by_name(store: Store, backend: Backend, own: tuple[Instance, Recipe]) -> None:
    row, made = own
    row = replace(row, pass_to_pass=("test_ledger.py::test_count", "test_ledger.py::test_wavers"))
    await Builder(store, backend).build(row, made)
    catalogue = Catalogue(store, backend)
    calls = iter(range(100))

    async def wavering(backend: Backend, prepared: Prepared, patch: str) -> Run:
        run = await run_tests(backend, prepared, patch)
        outcome = run.resolution.pass_to_pass
        if patch and next(calls) != 1:
            outcome = replace(outcome, success=(*outcome.success, "test_ledger.py::test_wavers"), failure=())
        return replace(run, resolution=replace(run.resolution, pass_to_pass=outcome))

    found = await validate(catalogue, row, made, grader=wavering)
    assert (found.problems, found.flaky) == ((), ("test_ledger.py::test_wavers",))
    assert (await catalogue.find(row, made)).instance.pass_to_pass == ("test_ledger.py::test_count",)


async def test_a_start_that_was_collected_is_made_again(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    await Builder(store, backend).build(*own)
    catalogue = Catalogue(store, backend)
    _, sandbox = await catalogue.open(*own, validated=False)
    await sandbox.destroy()
    await backend.collect([])
    assert "setup.py" in await shell(catalogue, *own, "ls")


async def test_concurrent_sessions_share_one_start(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    await Builder(store, backend).build(*own)
    catalogue = Catalogue(store, backend)
    opened = await asyncio.gather(*(catalogue.open(*own, validated=False) for _ in range(20)))
    assert len({prepared.snapshot.ref.id for prepared, _ in opened}) == 1
    await asyncio.gather(*(sandbox.destroy() for _, sandbox in opened))


async def test_what_was_not_used_for_the_longest_time_is_dropped_first(
    store: Store, backend: Backend, tmp_path: Path
) -> None:
    builder = Builder(store, backend)
    pairs = []
    for number in (1, 2, 3):
        write(tmp_path / f"source{number}", {**files(), "number": str(number) * 5000})
        name = f"own__ledger-{number}"
        source = {"kind": "directory", "path": f"source{number}"}
        pairs.append((instance(instance_id=name), recipe(tmp_path, instance_id=name, source=source)))
        await builder.build(*pairs[-1])
    await Catalogue(store, backend).find(*pairs[0], validated=False)  # so the second is the oldest now
    (store.packages / ("a" * 64)).mkdir(parents=True)
    (store.packages / ("a" * 64) / "old.whl").write_bytes(b"x" * 1000)
    used = usage(store)
    assert used.packages == 1000 and used.archives > 0
    lines = trim(store, used.archives - 1)
    assert [line.split(",")[0] for line in lines] == ["dropped the package aaaaaaaaaaaa", "dropped own__ledger-2"]
    assert {build.instance_id for build in store.builds()} == {"own__ledger-1", "own__ledger-3"}
    assert len(list((store.directory / "objects").iterdir())) == 2
    trim(store, 1, keep=[build_key(*pairs[2])])
    assert [build.instance_id for build in store.builds()] == ["own__ledger-3"]


async def test_a_source_that_is_not_there_says_where(store: Store, backend: Backend, tmp_path: Path) -> None:
    builder = Builder(store, backend)
    with pytest.raises(SourceMissing, match="source"):
        await builder.build(instance(), recipe(tmp_path))
    from_git = recipe(tmp_path, source={"kind": "git"})
    with pytest.raises(SourceMissing, match="base commit"):
        await builder.build(instance(), from_git)
    row = instance(base_commit="1234567")
    with pytest.raises(SourceMissing, match=r"--mirror DIR.*own/ledger"):
        await builder.build(row, from_git)
    (tmp_path / "mirror").mkdir()
    with pytest.raises(SourceMissing, match=r"git clone --bare.*own__ledger, own\+ledger/repo"):
        await Builder(store, backend, mirror=tmp_path / "mirror").build(row, from_git)


@pytest.mark.parametrize(
    "name", ["own/ledger", "own__ledger", "own+ledger/repo", "own/ledger.git", "own__ledger.git", "own+ledger/repo.git"]
)
async def test_a_mirror_gives_the_base_commit_and_nothing_newer(
    name: str, store: Store, backend: Backend, tmp_path: Path
) -> None:
    base = mirror(tmp_path / "mirror", name, files())
    if name == "own__ledger":  # a mirror that only its owner may read
        for path in (tmp_path / "mirror" / name).rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
    row, made = instance(base_commit=base), recipe(tmp_path, source={"kind": "git"})
    await Builder(store, backend, mirror=tmp_path / "mirror").build(row, made)
    catalogue = Catalogue(store, backend)
    found = await validate(catalogue, row, made, runs=1)
    assert found.passed, found.problems
    probe = "cat CHANGES; git tag; git log --oneline --all | wc -l; git rev-list --objects --all | grep -c later; true"
    assert (await shell(catalogue, row, made, probe)).split() == ["second", "1", "0"]
    assert await shell(catalogue, row, made, f"git cat-file -e {base} && echo there; ls .git/objects/info") == ""


async def test_a_commit_that_the_mirror_lacks_is_named(store: Store, backend: Backend, tmp_path: Path) -> None:
    mirror(tmp_path / "mirror", "own/ledger", files())
    row, made = instance(base_commit="1" * 40), recipe(tmp_path, source={"kind": "git"})
    with pytest.raises(SourceMissing, match=r"1111.*fetch it into the mirror"):
        await Builder(store, backend, mirror=tmp_path / "mirror").build(row, made)


async def test_a_record_of_another_format_is_no_build(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    build = await Builder(store, backend).build(*own)
    path = next((store.directory / "instances" / build.instance_id).glob("*.json"))
    path.write_text(json.dumps({"instance_id": build.instance_id, "unknown": 1}), "utf-8")
    assert store.find(own[0], build.key) is None
    path.write_text("{", "utf-8")
    assert store.find(own[0], build.key) is None
    assert list(store.builds()) == []


async def test_a_file_that_is_neither_file_nor_link_is_refused(
    store: Store, backend: Backend, own: tuple[Instance, Recipe]
) -> None:
    os.mkfifo(own[1].source_path / "pipe")
    with pytest.raises((InvalidRequest, EnvironmentFailed), match="pipe"):
        await Builder(store, backend).build(*own)

"""The environment on real sandboxes: tools, budgets, which instance a reset takes, what a submit is worth."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from errata_protocol.errors import EnvironmentFailed, InvalidRequest, NoReset
from errata_server.sandbox.base import Backend
from swe_bench_lite_env import SweAction, agent_text
from swe_bench_lite_env.dataset import UnknownInstance, read_row
from swe_bench_lite_env.recipes import load_recipes
from swe_bench_lite_env.rules.verdict import Outcome, Resolution
from swe_bench_lite_env.server import environment as module
from swe_bench_lite_env.server.environment import PATTERN_CHARACTERS, SweBenchLiteEnvironment
from swe_bench_lite_env.server.offered import EVALUATION_WARNING, bundled
from swe_bench_lite_env.server.prepare import store as prepare_store
from swe_bench_lite_env.server.prepare.build import Builder
from swe_bench_lite_env.server.prepare.store import NotValidated
from swe_bench_lite_env.server.rubric import DiscountedSweRubric, rubric

from .sessions import NAME, OTHER, begun, call, instance

pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("real", "store")]


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what is prepared apart from the user's own, once for all tests."""
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path_factory.getbasetemp() / "swe-store"))


@pytest.fixture
def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of the operator's: one instance of each split, under other ids."""
    directory = tmp_path / "rows"
    directory.mkdir()
    for split, name in (("train", NAME), ("dev", OTHER), ("test", NAME)):
        row = instance(name).row() | {"instance_id": f"own__{split}-1"}
        (directory / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    recipes = [
        bundled()[1].find(name).values()
        | {"instance_id": f"own__{split}-1", "source": {"kind": "directory", "path": str(source(name))}}
        for split, name in (("train", NAME), ("dev", OTHER), ("test", NAME))
    ]
    (tmp_path / "recipes.json").write_text(json.dumps(recipes))
    monkeypatch.setenv("ERRATA_SWE_DATASET", str(directory))
    monkeypatch.setenv("ERRATA_SWE_RECIPES", str(tmp_path / "recipes.json"))
    return directory


def source(name: str) -> Path:
    return bundled()[1].find(name).source_path


# what a reset takes


async def test_a_reset_gives_the_issue_the_place_and_the_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_MAX_TURNS", "30")
    environment = SweBenchLiteEnvironment()
    first = await environment.reset_async(instance_id=NAME, episode_id="e1", seed=5)
    assert first.problem_statement == instance().problem_statement
    assert (first.instance_id, first.repo, first.cwd) == (NAME, "errata-examples/pagelist", "/testbed")
    assert (first.turns_left, first.reward, first.done, first.metadata) == (30, 0.0, False, {})
    assert "/testbed" in agent_text(first) and "30 turns" in agent_text(first)
    state = environment.state
    assert (state.episode_id, state.instance_id, state.seed, state.step_count) == ("e1", NAME, 5, 0)
    seen = await call(
        environment, "run", command="git log --oneline | wc -l; git status -s; git remote; ls -A .git/logs"
    )
    assert seen.stdout == "1\n"
    await environment.aclose()


async def test_index_and_seed_choose_an_instance_and_the_same_one_each_time() -> None:
    environment = SweBenchLiteEnvironment()
    assert (await environment.reset_async(index=1)).instance_id == bundled()[0].ids[1]
    drawn = {seed: (await environment.reset_async(seed=seed)).instance_id for seed in range(12)}
    assert len(set(drawn.values())) > 2
    assert (await environment.reset_async(seed=3, split="bundled")).instance_id == drawn[3]
    unnamed = (await environment.reset_async()).instance_id
    assert (await environment.reset_async()).instance_id == unnamed, "the session's seed draws it"
    await environment.aclose()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"instance_id": "none"}, "no instance 'none': bundled has 7, errata-examples__pagelist-1"),
        ({"instance_id": NAME, "index": 0}, "not by both"),
        ({"split": "dev"}, "no split 'dev': there are bundled"),
        ({"index": 7}, "0..6, not 7"),
        ({"index": -1}, "0..6, not -1"),
        ({"index": True}, "whole number"),
        ({"seed": "x"}, "whole number"),
        ({"task_id": NAME}, "reset takes seed, episode_id, instance_id, split, index, not task_id"),
    ],
)
async def test_what_cannot_be_chosen_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        await SweBenchLiteEnvironment().reset_async(**arguments)


async def test_the_split_test_is_served_by_name_only_and_with_a_warning(
    operators: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = SweBenchLiteEnvironment()
    assert [split["name"] for split in await environment.list_splits()] == ["dev", "train", "bundled"]
    with pytest.raises(UnknownInstance, match="of the split test, which is for evaluation"):
        await environment.reset_async(instance_id="own__test-1")
    for seed in range(20):  # never drawn
        with pytest.raises(InvalidRequest, match="own__train-1 is not prepared"):
            await environment.reset_async(seed=seed)
    with caplog.at_level(logging.WARNING, "errata.swe"), pytest.raises(InvalidRequest, match="own__test-1 is not prep"):
        await environment.reset_async(split="test", index=0)
    assert EVALUATION_WARNING in caplog.text
    assert (await environment.list_tasks("test"))[0]["instance_id"] == "own__test-1"


async def test_a_served_test_instance_says_in_its_metadata_what_it_is_for(
    operators: Path, real: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUNDLED", "test")  # as if this instance had been prepared and validated
    first = await SweBenchLiteEnvironment().reset_async(split="test", instance_id="own__test-1")
    assert first.metadata == {"warning": EVALUATION_WARNING}
    assert "evaluation" not in agent_text(first)


async def test_instances_of_a_file_without_splits_are_local_and_no_other_name_takes_them(
    operators: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text((operators / "train.jsonl").read_text())
    monkeypatch.setenv("ERRATA_SWE_DATASET", str(tmp_path / "rows.jsonl"))
    environment = SweBenchLiteEnvironment()
    assert [split["name"] for split in await environment.list_splits()] == ["local", "bundled"]
    for split in ("test", "train"):
        with pytest.raises(InvalidRequest, match=f"no split '{split}': there are local, bundled"):
            await environment.reset_async(split=split, index=0)


async def test_a_data_set_with_nothing_but_the_split_test_needs_its_name(
    operators: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERRATA_SWE_DATASET", str(operators / "test.jsonl"))
    environment = SweBenchLiteEnvironment()
    with pytest.raises(InvalidRequest, match=r"the split test only, which is for evaluation: reset\(split='test'\)"):
        await environment.reset_async(seed=1)
    assert (await environment.reset_async(instance_id=NAME)).instance_id == NAME
    monkeypatch.setenv("ERRATA_SWE_SPLIT", "test")
    assert (await environment.list_splits())[0] == {"name": "test", "type": "test"}
    await environment.aclose()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"ERRATA_SWE_DATASET": "x.jsonl"}, "needs ERRATA_SWE_RECIPES"),
        ({"ERRATA_SWE_RECIPES": "x.json"}, "need ERRATA_SWE_DATASET"),
        ({"ERRATA_SWE_RULES": "6"}, "ERRATA_SWE_RULES: Input should be 4 or 5"),
        ({"ERRATA_SWE_MAX_TURNS": "0"}, "ERRATA_SWE_MAX_TURNS: .*greater than 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_name(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EnvironmentFailed, match=says):
        SweBenchLiteEnvironment()


# tools


async def test_a_shell_keeps_its_directory_and_a_failing_test_is_marked() -> None:
    environment = await begun()
    assert (await call(environment, "run", command="cd src && export X=1")).cwd == "/testbed/src"
    assert (await call(environment, "run", command="echo $X; pwd")).stdout == "1\n/testbed/src\n"
    broken = await call(
        environment, "edit", path="pagelist/page.py", old_text='return "no items"', new_text='return "none"'
    )
    assert (broken.error_kind, agent_text(broken)) == (None, "[replaced]")
    seen = await call(environment, "run", command="cd /testbed && python -m pytest -q")
    assert (seen.exit_code, seen.error_kind) == (1, "test_failure")
    assert seen.error_site and seen.error_site.file == "tests/test_paginator.py" and seen.error_site.line
    assert seen.error_site.test_id == "tests/test_paginator.py::test_an_empty_list_has_one_empty_page"
    await environment.aclose()


async def test_files_are_read_in_parts_written_and_searched() -> None:
    environment = await begun()
    await call(environment, "write_file", path="notes/a.txt", content="one\ntwo\nthree\n")
    assert (await call(environment, "read_file", path="notes/a.txt", first_line=2, last_line=2)).content == "two\n"
    wrong = await call(environment, "read_file", path="notes/a.txt", first_line=9)
    assert (wrong.error_kind, wrong.stderr) == ("invalid_arguments", "first_line is 9: the file has 3 lines")
    gone = await call(environment, "read_file", path="notes/b.txt")
    assert (gone.error_kind, gone.stderr) == ("path_not_found", "notes/b.txt: No such file or directory")
    found = await call(environment, "search", pattern="t(wo|hree)$")
    assert found.stdout == "notes/a.txt:2:two\nnotes/a.txt:3:three\n" and found.error_kind is None
    assert agent_text(await call(environment, "search", pattern="twenty")) == "[no match]"
    nowhere = await call(environment, "search", pattern="x", path="nowhere")
    assert (nowhere.error_kind, nowhere.stderr) == ("path_not_found", "nowhere: No such file or directory\n")
    pattern = await call(environment, "search", pattern="(")
    assert pattern.error_kind == "invalid_arguments" and pattern.error_site
    assert (pattern.error_site.action_field, pattern.error_site.action_span) == ("pattern", (0, 1))
    longest = await call(environment, "search", pattern="x" * PATTERN_CHARACTERS)
    assert (longest.error_kind, longest.stderr) == (None, "")
    far = await call(environment, "search", pattern="x", path="d/" * 2_048)
    assert far.error_kind == "invalid_arguments" and far.stderr == f"{'d/' * 100}...: File name too long"
    await call(environment, "run", command="mkdir /tmp/d; cd /tmp/d; rmdir /tmp/d")
    lost = await call(environment, "search", pattern="x")
    assert lost.error_kind == "path_not_found" and "/tmp/d is gone" in lost.stderr
    await environment.aclose()


async def test_a_search_gives_files_in_one_order_and_leaves_the_repositorys_own_data_out() -> None:
    environment = await begun()
    await call(environment, "run", command="for n in 9 10 b a B; do echo needle > $n.txt; done; echo needle > .git/x")
    found = await call(environment, "search", pattern="needle")
    assert found.stdout == "".join(f"{name}.txt:1:needle\n" for name in ("10", "9", "B", "a", "b"))
    await environment.aclose()


async def test_long_outputs_keep_head_and_tail() -> None:
    environment = await begun()
    await call(environment, "run", command="seq 100000 > long.txt")
    for seen in (
        await call(environment, "run", command="cat long.txt"),
        await call(environment, "read_file", path="long.txt"),
        await call(environment, "search", pattern="[0-9]", path="long.txt"),
    ):
        text = seen.content or seen.stdout
        assert seen.truncated and "bytes not kept" in text and len(text) < 70_000
        assert "100000\n" in text[-20:] and (seen.error_kind, seen.severity) == ("output_truncated", "warning")
    await environment.aclose()


async def test_an_edit_keeps_the_files_mode_and_line_ends() -> None:
    environment = await begun()
    await call(environment, "run", command=r"printf 'a\r\nb\r\n' > f; chmod 755 f")
    assert (await call(environment, "edit", path="f", old_text="b", new_text="c")).error_kind is None
    seen = await call(environment, "run", command="stat -c %a f; od -c f | head -1")
    assert seen.stdout.startswith("755\n") and r"c  \r  \n" in seen.stdout
    twice = await call(environment, "edit", path="f", old_text="\n", new_text="")
    assert twice.error_kind == "patch_failed" and twice.error_site
    assert (twice.error_site.file, twice.error_site.line, twice.error_site.action_field) == ("f", 1, "old_text")
    assert "occurs 2 times, at lines 1, 2" in agent_text(twice)
    await environment.aclose()


async def test_a_patch_is_applied_whole_or_not_at_all() -> None:
    environment = await begun()
    good = instance().patch
    await call(environment, "run", command="cd src")  # a patch goes to the root all the same
    wrong = await call(environment, "apply_patch", patch=good.replace("full, rest", "all, rest"))
    assert wrong.error_kind == "patch_failed" and "hunk 1 of src/pagelist/paginator.py" in wrong.stderr
    assert wrong.error_site and (wrong.error_site.file, wrong.error_site.line) == ("src/pagelist/paginator.py", 30)
    assert (await call(environment, "run", command="git status -s")).stdout == ""
    done = await call(environment, "apply_patch", patch=good.rstrip("\n"))
    assert (done.error_kind, done.cwd, agent_text(done)) == (None, "/testbed/src", "[applied]")
    assert len((await call(environment, "run", command="git status -s")).stdout.splitlines()) == 2
    again = await call(environment, "apply_patch", patch=good)
    assert again.error_kind == "patch_failed"
    await environment.aclose()


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (SweAction(tool="run"), "command"),
        (SweAction(tool="run", command="a\0b"), "command"),
        (SweAction(tool="run", command="ls", timeout_s=0), "timeout_s"),
        (SweAction(tool="read_file"), "path"),
        (SweAction(tool="read_file", path="a\0b"), "path"),
        (SweAction(tool="read_file", path="README.md", first_line=0), "first_line"),
        (SweAction(tool="read_file", path="README.md", first_line=3, last_line=2), "last_line"),
        (SweAction(tool="write_file", path="a"), "content"),
        (SweAction(tool="edit", path="README.md", new_text="x"), "old_text"),
        (SweAction(tool="edit", path="README.md", old_text="x"), "new_text"),
        (SweAction(tool="edit", path="README.md", old_text="x", new_text="x"), "new_text"),
        (SweAction(tool="apply_patch", patch=" \n"), "patch"),
        (SweAction(tool="search"), "pattern"),
        (SweAction(tool="search", pattern="a\nb"), "pattern"),
        (SweAction(tool="search", pattern="a" * (PATTERN_CHARACTERS + 1)), "pattern"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.tool,
)
async def test_a_missing_or_wrong_argument_is_marked(action: SweAction, field: str) -> None:
    environment = await begun()
    seen = await environment.step_async(action)
    assert seen.error_kind == "invalid_arguments" and seen.error_site and seen.error_site.action_field == field
    assert seen.stderr and not seen.done and seen.exit_code is None
    assert environment.state.step_count == 1
    await environment.aclose()


async def test_an_unknown_tool_is_marked_and_nothing_comes_before_a_reset() -> None:
    environment = SweBenchLiteEnvironment()
    with pytest.raises(NoReset):
        await call(environment, "run", command="ls")
    await environment.reset_async(instance_id=NAME)
    seen = await call(environment, "bash", command="ls")
    assert seen.error_kind == "tool_not_found" and "apply_patch" in agent_text(seen)
    await environment.aclose()


async def test_the_agent_has_no_root_no_network_and_no_way_into_gits_past() -> None:
    environment = await begun()
    seen = await call(environment, "run", command="id -u; git reflog; git fsck --lost-found; git stash list; git tag")
    assert seen.stdout.splitlines()[0] != "0" and len(seen.stdout.splitlines()) == 1
    denied = await call(environment, "run", command="touch /usr/bin/x")
    assert denied.error_kind == "permission_denied"
    network = await call(environment, "run", command="curl -s -m 2 https://example.com")
    assert network.error_kind == "policy_violation"
    await environment.aclose()


# budgets


async def test_the_last_turn_ends_the_episode_without_grading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_MAX_TURNS", "2")
    environment = await begun()
    one = await call(environment, "run", command="true")
    assert (one.turns_left, one.done) == (1, False) and agent_text(one) == "[exit 0]\n[turns left: 1]"
    two = await call(environment, "run", command="true")
    assert (two.turns_left, two.done, two.budget_spent, two.reward) == (0, True, "turns", 0.0)
    assert agent_text(two) == "[exit 0]\n[the episode is over: no turn is left]"
    assert environment.graded is None and environment.state.done and not environment.state.submitted
    with pytest.raises(InvalidRequest, match="over"):
        await call(environment, "submit")
    await environment.aclose()


async def test_a_submit_in_the_last_turn_is_graded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_MAX_TURNS", "2")
    environment = await begun()
    await call(environment, "apply_patch", patch=instance().patch)
    end = await call(environment, "submit")
    assert (end.reward, end.done, end.budget_spent, end.turns_left) == (1.0, True, None, 0)
    await environment.aclose()


async def test_the_seconds_of_all_calls_bound_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_MAX_SECONDS", "1.5")
    environment = await begun()
    assert environment._episode and environment._episode.seconds_left == 1.5
    await asyncio.sleep(0)
    seen = await call(environment, "run", command="sleep 30")
    assert seen.timed_out and seen.time_limit_s == 2.0 and seen.error_kind == "timeout"
    assert (seen.done, seen.budget_spent, seen.seconds_left) == (True, "seconds", 0.0)
    assert "the time is used up" in agent_text(seen)
    await environment.aclose()


async def test_outputs_count_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_MAX_OUTPUT_BYTES", "10")
    environment = await begun()
    assert (await call(environment, "run", command="echo éé")).output_bytes_left == 5
    seen = await call(environment, "run", command="echo 12345")
    assert (seen.output_bytes_left, seen.done, seen.budget_spent) == (0, True, "output_bytes")
    await environment.aclose()


async def test_without_budgets_nothing_is_left_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TURNS", "SECONDS", "OUTPUT_BYTES"):
        monkeypatch.setenv(f"ERRATA_SWE_MAX_{name}", "none")
    environment = await begun()
    seen = await call(environment, "run", command="true")
    assert (seen.turns_left, seen.seconds_left, seen.output_bytes_left, seen.done) == (None, None, None, False)
    await environment.aclose()


async def test_an_agent_may_not_take_longer_than_the_server_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_MAX_COMMAND_TIMEOUT_S", "7")
    environment = await begun()
    assert (await call(environment, "run", command="true", timeout_s=1000)).time_limit_s == 7
    assert (await environment.step_async(SweAction(command="true"), timeout_s=3)).time_limit_s == 3
    await environment.aclose()


# submit


@pytest.mark.parametrize("name", bundled()[0].ids)
async def test_doing_nothing_is_worth_nothing_and_the_gold_patch_everything(name: str) -> None:
    environment = await begun(name)
    end = await call(environment, "submit")
    assert (end.reward, end.done, agent_text(end)) == (0.0, True, "[submitted]")
    await environment.reset_async(instance_id=name)
    assert environment.graded is None
    await call(environment, "apply_patch", patch=instance(name).patch)
    end = await call(environment, "submit")
    assert (end.reward, end.done, end.error_kind) == (1.0, True, None)
    await environment.aclose()


async def test_changes_of_test_files_do_not_count() -> None:
    environment = await begun()
    await call(environment, "run", command="rm -rf tests; mkdir tests; echo 'def test_x(): pass' > tests/test_links.py")
    await call(environment, "apply_patch", patch=instance().patch)
    assert (await call(environment, "submit")).reward == 1.0
    await environment.aclose()


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /testbed/*",
        "rm -rf .git src",
        "echo 'x = (' > src/pagelist/links.py",
        "rm -rf tests && ln -s /dev tests",
    ],
)
async def test_a_tree_that_breaks_the_tests_is_worth_nothing_and_no_error(command: str) -> None:
    environment = await begun()
    await call(environment, "run", command=command)
    assert (await call(environment, "submit")).reward == 0.0
    await environment.aclose()


async def test_a_share_of_the_repaired_tests_pays_where_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    gamed = (Path(__file__).with_name("answers") / NAME / "gamed.patch").read_text()
    monkeypatch.setenv("ERRATA_SWE_REWARD", "fraction")
    environment = await begun()
    await call(environment, "apply_patch", patch=gamed)
    end = await call(environment, "submit")
    assert end.reward == pytest.approx(1 / len(instance().fail_to_pass))
    assert environment.graded and not environment.graded.resolved
    await environment.reset_async(instance_id=NAME)
    await call(environment, "apply_patch", patch=gamed)
    await call(environment, "run", command="sed -i 's/no items/none/' src/pagelist/page.py")
    assert (await call(environment, "submit")).reward == 0.0, "a test of PASS_TO_PASS is lost"
    await environment.aclose()


async def test_an_episode_that_is_open_while_the_validator_changes_is_graded(
    operators: Path, real: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, store = "own__train-1", prepare_store.Store()
    row, recipe = instance().row() | {"instance_id": name}, load_recipes(operators.parent / "recipes.json")
    made = read_row(row), recipe.find(name)
    build = await Builder(store, real).build(*made)
    flaky = made[0].pass_to_pass[:1]
    passed = prepare_store.Validation(prepare_store.prepared_digest(*made, build), flaky=flaky)
    store.keep(replace(build, validation=passed))
    environments = [await begun(name) for _ in range(2)]
    for environment in environments:
        await call(environment, "apply_patch", patch=made[0].patch)
    restored = SweBenchLiteEnvironment()
    await restored.restore(await environments[0].snapshot())
    monkeypatch.setattr(prepare_store, "VALIDATOR", prepare_store.VALIDATOR + 1)
    with pytest.raises(NotValidated, match="may not be served"):
        await begun(name)
    for environment in (environments[0], restored):
        assert (await call(environment, "submit")).reward == 1.0
        assert environment.graded is not None
        outcome = environment.graded.resolution.pass_to_pass
        assert set(outcome.success) == set(made[0].pass_to_pass) - set(flaky), "a flaky test counts"
    # What is known to be wrong with an instance is no matter of versions: no reward comes of it.
    found = replace(passed, problems=("the gold patch does not repair it",), validator=prepare_store.VALIDATOR)
    store.keep(replace(build, validation=found))
    with pytest.raises(NotValidated, match="may not be served"):
        await call(environments[1], "submit")
    store.keep(replace(build, validation=replace(found, problems=())))
    assert (await call(environments[1], "submit")).reward == 1.0, "the refused submit did not end the episode"
    for environment in (*environments, restored):
        await environment.aclose()


def resolution(*, resolved: bool) -> Resolution:
    won, lost = Outcome(("a",)), Outcome((), ("b",))
    return Resolution("x", "RESOLVED_FULL" if resolved else "RESOLVED_NO", won if resolved else lost, won, {})


@pytest.mark.parametrize(("resolved", "tampering", "worth"), [(True, (), 1.0), (True, ("x",), 0.0), (False, (), 0.0)])
def test_the_rubric_pays_what_is_resolved_and_was_not_tampered_with(
    resolved: bool, tampering: tuple[str, ...], worth: float
) -> None:
    end = module.SweObservation(done=True)
    for kind in ("resolved", "fraction"):
        judge = rubric(kind, None)  # type: ignore[arg-type]
        judge.graded(resolution(resolved=resolved), tampering)
        assert judge(None, module.SweObservation()) == 0.0 and judge(None, end) == worth
        assert {name for name, _ in judge.named_children()} == {"outcome", "untampered"}
        assert not hasattr(type(judge), "compute_step_rewards")


def test_steps_are_credited_with_the_discounted_reward() -> None:
    judge = rubric("resolved", 0.5)
    assert isinstance(judge, DiscountedSweRubric)
    for _ in range(2):
        judge(None, module.SweObservation())
    assert judge.compute_step_rewards() == [] and len(judge.trajectory) == 2
    judge.graded(resolution(resolved=True), ())
    judge(None, module.SweObservation(done=True))
    assert judge.compute_step_rewards() == [0.25, 0.5, 1.0]
    judge.reset()
    assert judge.trajectory == []

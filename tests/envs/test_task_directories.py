"""Reading task directories, bundled and Harbor-style, without any sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from errata_environment.grading.staging import staged
from errata_protocol.errors import EnvironmentFailed
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import (
    LOCAL,
    TASKS_VARIABLE,
    TaskInvalid,
    load_tasks,
    offered_tasks,
    read_task,
    task_roots,
    tree,
)

from .scripted import write_task

HARBOR = {
    "task.toml": (
        'version = "1.0"\n[metadata]\nauthor_name = "A"\ndifficulty = "hard"\ncategory = "sysadmin"\ntags = ["x"]\n'
        '[verifier]\ntimeout_sec = 900.0\nenv = { MODE = "strict" }\n[agent]\ntimeout_sec = 900.0\n'
        "[environment]\nbuild_timeout_sec = 600.0\ncpus = 1\nmemory_mb = 2048\nallow_internet = true\n"
    ),
    "environment/Dockerfile": "FROM ubuntu:24.04\nCOPY data.txt /app/\n",
    "environment/data.txt": "d\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "true\n",
}


def test_a_harbor_task_is_read_as_it_is(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "harbor-task", HARBOR))
    assert (task.id, task.split, task.verifier) == ("harbor-task", LOCAL, "script")
    assert task.verifier_env == {"MODE": "strict"}
    assert [name for name, _ in tree(task.environment)] == ["data.txt"], "the Dockerfile is no file of the task"
    assert any("Dockerfile line 1: FROM ubuntu:24.04 is not used" in note for note in task.notes)
    assert task.verifier_timeout_s == 400.0 and any("400 s instead of 900 s" in note for note in task.notes)
    public = task.public(0)
    assert (public["difficulty"], public["category"], public["tags"]) == ("hard", "sysadmin", ["x"])
    assert public["notes"] == list(task.notes)
    assert not task.deterministic, "nobody declared it"


def test_verify_py_is_preferred_where_both_are_there(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "t", {"tests/verify.py": "pass\n", "tests/test.sh": "true\n"}))
    assert task.verifier == "judge"


@pytest.mark.parametrize(
    ("files", "missing", "words"),
    [
        ({"task.toml": "not toml ["}, "", "task t"),
        ({"task.toml": "errata = 3\n"}, "", r"\[errata\] must be a table"),
        ({"task.toml": "[verifier]\ntimeout_sec = 'soon'\n"}, "", "could not convert"),
        ({"task.toml": "[[errata.probes]]\nname = 'a'\n"}, "", "command"),
        ({"task.toml": "[[errata.probes]]\nname = 'a'\ncommand = 'x'\ntimeout_s = 700\n"}, "", "at most 399 s"),
        ({"task.toml": 2 * "[[errata.probes]]\nname = 'a'\ncommand = 'x'\n"}, "", "same name"),
        (HARBOR | {"task.toml": "[[errata.probes]]\nname = 'a'\ncommand = 'x'\n"}, "", "need tests/verify.py"),
        ({"instruction.md": " \n"}, "", "instruction.md is empty"),
        ({}, "instruction.md", "No such file"),
        ({}, "tests/verify.py", "neither tests/verify.py nor tests/test.sh"),
    ],
)
def test_an_unusable_directory_says_what_is_wrong(
    tmp_path: Path, files: dict[str, str], missing: str, words: str
) -> None:
    root = write_task(tmp_path / "t", files)
    if missing:
        (root / missing).unlink()
    with pytest.raises(TaskInvalid, match=words):
        read_task(root)


def test_a_directory_of_tasks_is_searched_in_depth_but_not_through_links(tmp_path: Path) -> None:
    write_task(tmp_path / "set" / "easy" / "b-task", {})
    write_task(tmp_path / "set" / "a-task", {})
    write_task(tmp_path / "elsewhere" / "c-task", {})
    (tmp_path / "set" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "easy" / "round").symlink_to(tmp_path / "set")
    assert [root.name for root in task_roots(tmp_path / "set")] == ["a-task", "b-task"]
    assert task_roots(tmp_path / "set" / "a-task") == [tmp_path / "set" / "a-task"]
    assert task_roots(tmp_path / "nowhere") == []


def test_one_bad_task_does_not_hide_the_others(tmp_path: Path) -> None:
    write_task(tmp_path / "good", {})
    write_task(tmp_path / "bad", {"task.toml": "["})
    write_task(tmp_path / "again" / "good", {})
    tasks = load_tasks([tmp_path])
    assert [task.id for task in tasks.splits[LOCAL]] == ["good"]
    assert set(tasks.broken) == {"bad"}
    assert tasks.find("good") and not tasks.find("bad")


async def test_a_reset_to_a_bad_task_says_what_is_wrong_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: TerminalEnvironment
) -> None:
    write_task(tmp_path / "bad", {"instruction.md": ""})
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path))
    with pytest.raises(EnvironmentFailed, match=r"instruction.md is empty"):
        await environment.reset_async(task_id="bad")


def test_a_local_task_cannot_take_the_name_of_a_bundled_one(tmp_path: Path) -> None:
    name = load_tasks().ids[0]
    write_task(tmp_path / name, {"instruction.md": "Mine.\n"})
    tasks = load_tasks([tmp_path])
    found = tasks.find(name)
    assert found and found.instruction != "Mine." and LOCAL not in tasks.splits


def test_several_directories_are_offered_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "two" / "b", {})
    write_task(tmp_path / "one" / "c", {})
    write_task(tmp_path / "one" / "a", {})
    monkeypatch.setenv(TASKS_VARIABLE, os.pathsep.join([str(tmp_path / "two"), str(tmp_path / "one")]))
    assert [task.id for task in offered_tasks().splits[LOCAL]] == ["a", "b", "c"]


def test_the_digest_follows_what_shapes_start_and_grading(tmp_path: Path) -> None:
    root = write_task(tmp_path / "t", HARBOR)
    first = read_task(root).digest
    (root / "solution" / "solve.sh").write_text("other\n")
    assert read_task(root).digest == first
    seen = {first}
    for change in (
        lambda: (root / "environment" / "data.txt").write_text("e\n"),
        lambda: (root / "environment" / "data.txt").chmod(0o755),
        lambda: (root / "environment" / "link").symlink_to("data.txt"),
        lambda: (root / "setup.sh").write_text("true\n"),
        lambda: (root / "tests" / "test.sh").write_text("echo 0\n"),
    ):
        change()
        seen.add(read_task(root).digest)
    assert len(seen) == 6


def test_a_staged_copy_is_readable_by_all_and_made_once(tmp_path: Path) -> None:
    source = tmp_path / "private"
    (source / "deep").mkdir(parents=True, mode=0o700)
    (source / "deep" / "file").write_text("x")
    (source / "deep" / "file").chmod(0o600)
    (source / "__pycache__").mkdir()
    copy = staged(source, key="1")
    assert (copy / "deep" / "file").read_text() == "x"
    assert (copy / "deep" / "file").stat().st_mode & 0o777 == 0o644
    assert copy.stat().st_mode & 0o777 == (copy / "deep").stat().st_mode & 0o777 == 0o755
    assert not (copy / "__pycache__").exists()
    assert staged(source, key="1") == copy and staged(source, key="2") != copy


def test_a_base_built_of_the_dockerfile_keeps_its_run_lines_and_gives_the_agent_what_it_copies(tmp_path: Path) -> None:
    dockerfile = "FROM debian\nRUN apt-get install -y jq\nRUN mkdir /opt/x\nWORKDIR /app\nCOPY a.txt /app/\n"
    files = {"environment/Dockerfile": dockerfile, "environment/a.txt": "a\n"}
    root = write_task(tmp_path / "built", {**files, "task.toml": '[errata]\nbase = "built"\nbuilt = true\n'})
    task = read_task(root)
    assert task.recipe is not None and (task.base, task.workdir, task.recipe.steps) == ("built", "/app", [])
    assert "/app/a.txt" in [made.path for made in task.recipe.start]
    other = write_task(tmp_path / "other", {**files, "task.toml": "[errata]\nbuilt = true\n"})
    with pytest.raises(TaskInvalid, match=r"needs (environment/Dockerfile|an image)"):
        read_task(other)

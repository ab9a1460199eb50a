"""The kit for authors: saved episodes, shared builds, task directories."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from errata_environment.episodes import SavedEpisode, TaskEpisode
from errata_environment.shared_builds import SharedBuilds
from errata_environment.tasks.directories import grade, open_task, read_tasks
from errata_protocol.environment import Snapshot, SnapshotRef
from errata_protocol.errors import EnvironmentFailed, InvalidRequest
from errata_server.sandbox.base import Backend, SandboxSnapshot

SAVED = SandboxSnapshot(SnapshotRef("layer", "one", "sha256:1"), b"cd /")


def test_a_saved_episode_is_read_again() -> None:
    episode = TaskEpisode(episode_id="e", task_id="t", seed=3, step_count=2, cwd="/workspace")
    assert TaskEpisode.read(episode.saved(SAVED), "a session") == (episode, SAVED)


def test_the_bytes_of_a_saved_episode_are_those_of_earlier_journals() -> None:
    episode = TaskEpisode(episode_id="e", task_id="t", seed=None, cwd="/")
    assert episode.saved(SAVED).state == (
        b'{"v":1,"episode_id":"e","task_id":"t","seed":null,"step_count":0,"submitted":false,"done":false,"cwd":"/",'
        b'"ref":["layer","one","sha256:1"],"shell":"Y2QgLw=="}'
    )


def test_only_a_field_that_was_added_later_may_be_missing() -> None:
    @dataclass(slots=True)
    class Later(SavedEpisode):
        ADDED_LATER: ClassVar[frozenset[str]] = frozenset({"added"})

        episode_id: str
        done: bool = False
        added: int = 7

    record = json.loads(Later("e").saved(SAVED).state)
    del record["added"]
    assert Later.read(Snapshot(json.dumps(record).encode()), "a session")[0] == Later("e", False, 7)
    for name in ("done", "episode_id"):
        rest = {key: value for key, value in record.items() if key != name}
        with pytest.raises(EnvironmentFailed, match=f"cannot restore a session: unreadable snapshot: .*{name}"):
            Later.read(Snapshot(json.dumps(rest).encode()), "a session")


@pytest.mark.parametrize("name", ["step_count", "submitted", "done", "cwd"])
def test_a_task_episode_lacks_nothing(name: str) -> None:
    record = json.loads(TaskEpisode(episode_id="e", task_id="t", seed=None, cwd="/").saved(SAVED).state)
    del record[name]
    with pytest.raises(EnvironmentFailed, match=name):
        TaskEpisode.read(Snapshot(json.dumps(record).encode()), "a session")


async def test_all_who_wait_share_one_build_and_a_failed_one_is_made_again() -> None:
    builds: SharedBuilds[str, int] = SharedBuilds()
    begun, go = 0, asyncio.Event()

    async def make() -> int:
        nonlocal begun
        begun += 1
        await go.wait()
        if begun == 1:
            raise InvalidRequest("not yet")
        return begun

    first, second = (asyncio.ensure_future(builds.get("one", make)) for _ in range(2))
    cancelled = asyncio.ensure_future(builds.get("one", make))
    await asyncio.sleep(0)
    cancelled.cancel()
    go.set()
    found = await asyncio.gather(first, second, return_exceptions=True)
    assert begun == 1 and [type(each) for each in found] == [InvalidRequest, InvalidRequest]
    assert [await builds.get("one", make) for _ in range(2)] == [2, 2]
    builds.forget("one")
    assert await builds.get("one", make) == 3
    builds.forget_value(3)
    assert await builds.get("one", make) == 4


def task(root: Path, verify: str) -> None:
    for name, text in (("instruction.md", "Do it.\n"), ("environment/a/x.txt", "x"), ("tests/verify.py", verify)):
        (root / "one" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "one" / name).write_text(text)


def test_a_task_without_a_verifier_is_refused(tmp_path: Path) -> None:
    task(tmp_path, "")
    (tmp_path / "one/tests/verify.py").unlink()
    with pytest.raises(EnvironmentFailed, match=r"task one has no tests/verify\.py"):
        read_tasks(tmp_path)


@pytest.mark.sandbox
@pytest.mark.parametrize(
    ("verify", "earned"),
    [
        ("def score(): return 0.25", 0.25),
        ("def score():\n    return float(open('a/x.txt').read() == 'changed')", 1.0),
        ("def score():\n    assert open('a/x.txt').read() == 'x'\n    return 1", 0.0),
        ("def score(): return 2", None),
        ("import sys\nsys.exit(3)", None),
    ],
    ids=["a part", "the work", "broken by the agent", "no score", "broken"],
)
async def test_a_final_state_is_graded_by_the_tasks_verifier(
    real: Backend, tmp_path: Path, verify: str, earned: float | None
) -> None:
    task(tmp_path, verify)
    (one,) = read_tasks(tmp_path)
    sandbox = await open_task(real, one)
    try:
        assert (await sandbox.run("cat a/x.txt && printf changed > a/x.txt")).stdout == "x"
        final = await sandbox.snapshot()
        if earned is not None:
            assert await grade(real, one, final) == earned
        else:
            with pytest.raises(EnvironmentFailed, match="the verifier of task one is broken"):
                await grade(real, one, final)
    finally:
        await sandbox.destroy()

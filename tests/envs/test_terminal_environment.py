"""The environment on the fake sandbox: everything that needs no real shell."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from errata_environment import tool_calls
from errata_protocol.environment import MAX_STATE_BYTES, Snapshot, SnapshotRef
from errata_protocol.errors import EnvironmentFailed, InvalidRequest, NoReset, SandboxFailed, SandboxUnavailable
from errata_protocol.payload import encode_payload, semantic_digest
from errata_server.sandbox.base import Backend, Limits
from terminal_env import TerminalAction, TerminalObservation, agent_text
from terminal_env.server import environment as module
from terminal_env.server import layers, verifier
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import TASKS_VARIABLE

from .conftest import SEED
from .scripted import Script, ScriptedBackend


def run(command: str, **more: object) -> TerminalAction:
    return TerminalAction(command=command, **more)


async def test_a_bare_shell_keeps_directory_and_variables(environment: TerminalEnvironment) -> None:
    first = await environment.reset_async(seed=3, episode_id="e1")
    assert (first.instruction, first.task_id, first.reward, first.done) == ("", "", 0.0, False)
    assert first.cwd == "/workspace"
    made = await environment.step_async(run("mkdir d; cd d; export X=1"))
    assert (made.exit_code, made.cwd, made.reward, made.done) == (0, "/workspace/d", 0.0, False)
    seen = await environment.step_async(run("pwd; echo $X"))
    assert seen.stdout == "/workspace/d\n1\n"
    state = environment.state
    assert (state.episode_id, state.step_count, state.cwd) == ("e1", 2, "/workspace/d")
    assert (state.task_id, state.submitted) == ("", False)


async def test_every_first_shell_has_one_locale_time_zone_and_hash_seed(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    seen = await environment.step_async(run("echo $LC_ALL $TZ $PYTHONHASHSEED $PYTHONDONTWRITEBYTECODE"))
    assert seen.stdout == "C.UTF-8 UTC 0 1\n"


async def test_an_episode_without_a_name_gets_one(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    first = environment.state.episode_id
    await environment.reset_async()
    assert first and environment.state.episode_id and first != environment.state.episode_id


async def test_a_reset_starts_over_and_drops_the_old_files(
    environment: TerminalEnvironment, backend: ScriptedBackend
) -> None:
    await environment.reset_async()
    await environment.step_async(run("echo x > f"))
    await environment.reset_async()
    assert (await environment.step_async(run("cat f"))).exit_code == 1
    assert environment.state.step_count == 1
    assert len(backend.live) == 1


async def test_a_failing_command_is_an_observation_with_a_marker(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    seen = await environment.step_async(run("cat missing.txt"))
    assert (seen.exit_code, seen.error_kind, seen.reward) == (1, "path_not_found", 0.0)
    assert seen.metadata["error_kind"] == "path_not_found"
    assert seen.metadata["hint_template_key"] == seen.hint_template_key == "fs.missing"
    assert seen.error_site and seen.error_site.action_field == "command"


async def test_an_unknown_tool_is_marked_and_counts_as_a_step(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    seen = await environment.step_async(TerminalAction(tool="bash", command="ls"))
    assert seen.error_kind == "tool_not_found"
    assert seen.error_site and seen.error_site.action_span == (0, 4)
    assert "run, write_file, read_file, submit" in agent_text(seen)
    assert environment.state.step_count == 1


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (TerminalAction(), "command"),
        (TerminalAction(command=" \n"), "command"),
        (TerminalAction(command="a\0b"), "command"),
        (TerminalAction(command="ls", timeout_s=0), "timeout_s"),
        (TerminalAction(command="ls", timeout_s=float("nan")), "timeout_s"),
        (TerminalAction(tool="read_file"), "path"),
        (TerminalAction(tool="write_file", content="x"), "path"),
    ],
)
async def test_a_missing_or_wrong_argument_is_marked(
    environment: TerminalEnvironment, action: TerminalAction, field: str
) -> None:
    await environment.reset_async()
    seen = await environment.step_async(action)
    assert seen.error_kind == "invalid_arguments"
    assert seen.error_site and seen.error_site.action_field == field
    assert seen.exit_code is None and not seen.done


async def test_files_are_written_and_read(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    assert (await environment.step_async(TerminalAction(tool="write_file", path="a/b", content="é\n"))).stderr == ""
    seen = await environment.step_async(TerminalAction(tool="read_file", path="/workspace/a/b"))
    assert (seen.content, seen.truncated, seen.error_kind) == ("é\n", False, None)


async def test_a_refused_path_is_marked_in_the_words_of_the_shell(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    seen = await environment.step_async(TerminalAction(tool="read_file", path="none"))
    assert (seen.stderr, seen.error_kind, seen.content) == ("none: No such file or directory", "path_not_found", None)
    seen = await environment.step_async(TerminalAction(tool="write_file", path="/etc", content=""))
    assert "Is a directory" in seen.stderr and seen.error_kind == "invalid_arguments"


async def test_a_long_file_is_cut_with_a_warning(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    text = "x" * tool_calls.READ_BYTES
    await environment.step_async(TerminalAction(tool="write_file", path="fits", content=text))
    await environment.step_async(TerminalAction(tool="write_file", path="long", content=text + "y"))
    fits = await environment.step_async(TerminalAction(tool="read_file", path="fits"))
    cut = await environment.step_async(TerminalAction(tool="read_file", path="long"))
    assert (fits.truncated, fits.error_kind, fits.content) == (False, None, text)
    assert (cut.truncated, cut.error_kind, cut.severity, cut.content) == (True, "output_truncated", "warning", text)


async def test_bytes_that_are_no_text_are_escaped(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    await environment.step_async(run(r"printf '\xff\xfeok' > raw"))
    assert (await environment.step_async(TerminalAction(tool="read_file", path="raw"))).content == "\\xff\\xfeok"


async def test_cut_output_is_a_warning_without_a_site(in_session: Callable[[Backend], None]) -> None:
    in_session(ScriptedBackend(limits=Limits(keep_bytes=64)))
    environment = TerminalEnvironment()
    await environment.reset_async()
    seen = await environment.step_async(run("echo " + "x" * 500))
    assert (seen.truncated, seen.error_kind, seen.severity, seen.error_site) == (
        True,
        "output_truncated",
        "warning",
        None,
    )


@pytest.mark.parametrize(
    ("asked", "bound", "given"),
    [(None, None, 30.0), (5.0, None, 5.0), (1e9, None, 600.0), (float("inf"), None, 600.0), (50.0, 7.0, 7.0)],
)
async def test_a_time_limit_is_bounded(
    environment: TerminalEnvironment, backend: ScriptedBackend, asked: float | None, bound: float | None, given: float
) -> None:
    await environment.reset_async()
    await environment.step_async(run("true", timeout_s=asked), timeout_s=bound)
    assert backend.script.runs[-1][1]["timeout_s"] == given


async def test_a_command_past_its_time_limit_is_an_observation(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    seen = await environment.step_async(run("sleep 60", timeout_s=2))
    assert (seen.timed_out, seen.exit_code, seen.error_kind) == (True, None, "timeout")
    assert agent_text(seen).endswith("[killed: time limit of 2 s]")
    assert (await environment.step_async(run("echo still here"))).stdout == "still here\n"


async def test_a_broken_sandbox_is_an_exception_and_no_step(
    environment: TerminalEnvironment, backend: ScriptedBackend
) -> None:
    await environment.reset_async()
    backend.faults.runs = 1
    with pytest.raises(SandboxFailed):
        await environment.step_async(run("true"))
    assert environment.state.step_count == 0
    assert (await environment.step_async(run("true"))).exit_code == 0


async def test_a_machine_without_sandboxes_refuses_the_reset(
    environment: TerminalEnvironment, backend: ScriptedBackend
) -> None:
    backend.faults.unavailable = "no overlayfs: load the module"
    with pytest.raises(SandboxUnavailable, match="no overlayfs"):
        await environment.reset_async()


async def test_steps_before_a_reset_and_after_the_end_are_refused(environment: TerminalEnvironment) -> None:
    with pytest.raises(NoReset, match="reset first"):
        await environment.step_async(run("ls"))
    await environment.reset_async()
    end = await environment.step_async(TerminalAction(tool="submit"))
    assert (end.done, end.reward) == (True, 0.0), "a bare shell has nothing to be graded by"
    with pytest.raises(InvalidRequest, match="reset to start another"):
        await environment.step_async(run("ls"))
    assert environment.state.step_count == 1 and environment.state.submitted
    await environment.reset_async()
    assert not environment.state.done


@pytest.mark.usefixtures("tasks")
async def test_a_task_gives_its_instruction_and_files(environment: TerminalEnvironment) -> None:
    first = await environment.reset_async(task_id="copy")
    assert (first.instruction, first.task_id, first.reward) == ("Copy it.", "copy", 0.0)
    seen = await environment.step_async(run("cat in.txt"))
    assert (seen.stdout, seen.instruction, seen.task_id) == ("data\n", "", "copy")


@pytest.mark.usefixtures("tasks")
async def test_a_task_is_set_up_once_for_many_sessions(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    sessions = [environment, *(TerminalEnvironment() for _ in range(20))]
    await asyncio.gather(*(session.reset_async(task_id="copy") for session in sessions))
    await asyncio.gather(*(session.step_async(run(f"echo {i} > mine")) for i, session in enumerate(sessions)))
    assert backend.script.unpacked == 1
    seen = [(await session.step_async(run("cat mine in.txt"))).stdout for session in sessions]
    assert seen == [f"{i}\ndata\n" for i in range(len(sessions))]


@pytest.mark.usefixtures("tasks")
async def test_a_later_reset_runs_no_command(backend: ScriptedBackend, environment: TerminalEnvironment) -> None:
    await environment.reset_async(task_id="copy")
    before = len(backend.script.runs)
    await environment.reset_async(task_id="copy")
    await TerminalEnvironment().reset_async(task_id="copy")
    assert len(backend.script.runs) == before


@pytest.mark.usefixtures("tasks")
async def test_a_cancelled_reset_does_not_spoil_the_start_for_others(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(sandbox: object, command: str) -> None:
        reached.set()
        await go_on.wait()

    backend.faults.before_run = hold
    first = asyncio.create_task(environment.reset_async(task_id="copy"))
    await reached.wait()
    other = TerminalEnvironment()
    second = asyncio.create_task(other.reset_async(task_id="copy"))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    backend.faults.before_run = None
    go_on.set()
    assert (await second).task_id == "copy"
    assert backend.script.unpacked == 1


@pytest.mark.usefixtures("tasks")
async def test_a_collected_start_is_made_again(backend: ScriptedBackend, environment: TerminalEnvironment) -> None:
    await environment.reset_async(task_id="copy")
    await environment.aclose()
    assert (await backend.collect([])).layers == 1
    await environment.reset_async(task_id="copy")
    assert (await environment.step_async(run("cat in.txt"))).stdout == "data\n"
    assert backend.script.unpacked == 2


@pytest.mark.usefixtures("tasks")
async def test_a_reset_that_keeps_failing_is_an_exception(
    backend: ScriptedBackend, environment: TerminalEnvironment
) -> None:
    await environment.reset_async(task_id="copy")
    backend.faults.restores = 2
    with pytest.raises(SandboxFailed):
        await environment.reset_async(task_id="copy")
    assert (await environment.step_async(run("cat in.txt"))).stdout == "data\n", "the running episode goes on"


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"task_id": "nope"}, "copy, other"),
        ({"split": "nope"}, "bundled, local"),
        ({"split": "local", "index": 2}, "0..1"),
        ({"split": "local", "index": -1}, "0..1"),
        ({"task_id": "copy", "split": "local"}, "not by both"),
    ],
)
async def test_a_task_that_is_not_there_is_the_callers_mistake(
    environment: TerminalEnvironment, arguments: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        await environment.reset_async(**arguments)


@pytest.mark.usefixtures("tasks")
async def test_a_task_is_chosen_by_index_or_by_seed(environment: TerminalEnvironment) -> None:
    assert (await environment.reset_async(split="local", index=1)).task_id == "other"
    chosen = [(await environment.reset_async(seed=seed, split="local")).task_id for seed in range(12)]
    again = [(await environment.reset_async(seed=seed, split="local")).task_id for seed in range(12)]
    assert chosen == again and set(chosen) == {"copy", "other"}
    await environment.reset_async(split="local")
    assert environment.state.seed == SEED, "without a seed the session's counts"


async def test_a_snapshot_continues_on_a_fresh_instance(
    environment: TerminalEnvironment, tasks: Path, backend: ScriptedBackend
) -> None:
    await environment.reset_async(seed=5, episode_id="mine", task_id="copy")
    await environment.step_async(run("export A=b; mkdir deep; cd deep; echo 1 > n"))
    snapshot = await environment.snapshot()
    assert len(snapshot.state) <= MAX_STATE_BYTES and [ref.kind for ref in snapshot.refs] == ["layer"]
    await environment.step_async(run("echo 2 > n"))

    other = TerminalEnvironment()
    await other.restore(snapshot)
    assert other.state.model_dump() == {
        "episode_id": "mine", "step_count": 1, "task_id": "copy", "seed": 5,
        "cwd": "/workspace/deep", "submitted": False, "done": False,
    }  # fmt: skip
    assert (await other.step_async(run("pwd; echo $A; cat n"))).stdout == "/workspace/deep\nb\n1\n"
    assert (await environment.step_async(run("cat n"))).stdout == "2\n", "the parent is undisturbed"
    assert (await other.step_async(TerminalAction(tool="submit"))).reward == 1.0
    ended = await other.snapshot()
    third = TerminalEnvironment()
    await third.restore(ended)
    with pytest.raises(InvalidRequest):
        await third.step_async(run("ls"))


async def test_nothing_can_be_kept_before_a_reset(environment: TerminalEnvironment) -> None:
    with pytest.raises(NoReset):
        await environment.snapshot()


@pytest.mark.parametrize("state", [b"", b"[]", b"{}", b'{"v":99}', b"\xff"])
async def test_a_foreign_snapshot_is_refused(environment: TerminalEnvironment, state: bytes) -> None:
    with pytest.raises(EnvironmentFailed, match="unreadable snapshot"):
        await environment.restore(Snapshot(state))


async def test_a_snapshot_of_an_unknown_task_is_refused(
    environment: TerminalEnvironment, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await environment.reset_async(task_id="copy")
    snapshot = await environment.snapshot()
    monkeypatch.delenv(TASKS_VARIABLE)
    with pytest.raises(EnvironmentFailed, match="task copy"):
        await TerminalEnvironment().restore(snapshot)


async def test_a_snapshot_whose_layer_is_gone_is_refused(environment: TerminalEnvironment) -> None:
    await environment.reset_async()
    snapshot = await environment.snapshot()
    record = json.loads(snapshot.state) | {"ref": ["layer", "layer-99", ""]}
    with pytest.raises(SandboxFailed):
        await TerminalEnvironment().restore(Snapshot(json.dumps(record).encode(), (SnapshotRef("layer", "layer-99"),)))


async def test_the_same_actions_give_the_same_semantic_digest(in_session: Callable[[Backend], None]) -> None:
    actions = [
        run("echo hi; echo no >&2; false"),
        TerminalAction(tool="x"),
        run("cat none"),
        TerminalAction(tool="submit"),
    ]

    async def digests() -> list[str | None]:
        in_session(ScriptedBackend(Script()))
        environment = TerminalEnvironment()
        observations = [await environment.reset_async(seed=1)]
        observations += [await environment.step_async(action) for action in actions]
        payloads = [
            encode_payload(
                {"observation": o.model_dump(exclude={"reward", "done"}), "reward": o.reward, "done": o.done}
            )
            for o in observations
        ]
        return [semantic_digest(payload, TerminalObservation.VOLATILE_FIELDS) for payload in payloads]

    first = await digests()
    assert None not in first and first == await digests()


async def test_closing_destroys_the_sandbox(environment: TerminalEnvironment, backend: ScriptedBackend) -> None:
    await environment.reset_async()
    assert len(backend.live) == 1
    environment.close()
    await asyncio.gather(*environment._closing)
    assert not backend.live
    environment.close()
    await environment.aclose()


def test_sync_calls_work_outside_of_an_event_loop(environment: TerminalEnvironment, backend: ScriptedBackend) -> None:
    environment.reset(seed=1)
    assert environment.step(run("echo sync")).stdout == "sync\n"
    environment.close()
    assert not backend.live


async def test_sync_calls_inside_an_event_loop_say_what_to_use(environment: TerminalEnvironment) -> None:
    with pytest.raises(RuntimeError, match="reset_async"):
        environment.reset()


@pytest.mark.usefixtures("tasks")
async def test_the_task_api_shows_nothing_of_tests_or_solutions() -> None:
    fresh = TerminalEnvironment()
    splits = await fresh.list_splits()
    assert [split["name"] for split in splits] == ["bundled", "local"]
    assert await fresh.num_tasks("local") == 2 and await fresh.num_tasks("bundled") >= 8
    both = [await fresh.get_task("local", index) for index in (0, 1)]
    assert both[0]["instruction"] == "Copy it."
    assert await fresh.list_tasks("local") == await fresh.get_task_range("local") == both
    assert await fresh.get_task_range("local", 1, 9) == both[1:]
    shown = json.dumps([await fresh.list_tasks(split["name"]) for split in splits])
    assert "SECRET" not in shown and "solve" not in shown
    for index in (2, -1):
        with pytest.raises(IndexError):
            await fresh.get_task("local", index)
    with pytest.raises(IndexError):
        await fresh.num_tasks("nope")


def test_the_environment_describes_itself() -> None:
    metadata = TerminalEnvironment().get_metadata()
    assert metadata.name == "terminal" and metadata.description
    assert "## Rewards" in (metadata.readme_content or "")


@pytest.mark.usefixtures("tasks")
async def test_files_of_tasks_are_read_off_the_event_loop(
    environment: TerminalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they are: a pipe without a writer holds up nobody."""
    readers = set()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            readers.add((function.__name__, threading.get_ident() == loop_thread))
            return function(*arguments, **more)

        return call

    loop_thread = threading.get_ident()
    for part, name in (
        (module, "offered_tasks"),
        (layers, "_archive_of_tree"),
        (verifier, "staged"),
    ):
        monkeypatch.setattr(part, name, watched(getattr(part, name)))
    await environment.list_tasks("local")
    await environment.reset_async(task_id="copy")
    await environment.step_async(TerminalAction(tool="submit"))
    assert readers == {("offered_tasks", False), ("_archive_of_tree", False), ("staged", False)}

"""A runner at an environment: what becomes of calls, and of what the machine does wrong."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from scripted_session import ScriptedSession

from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    InvalidRequest,
    SandboxFailed,
    SessionLost,
    StepTimeout,
)
from errata_protocol.labels import MAX_LABEL, NO_LABELS, Labels
from errata_trainer.episodes.labels import episode_labels
from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.episodes.record import LOST, OVER
from errata_trainer.episodes.tools import PlayedEnvironment, Tool, of_spec, published, step_tool
from tests.environments.shelf import SPEC, ShelfAction

SHELF = of_spec(SPEC)


def episode_runner(
    *answers: Any, environment: PlayedEnvironment = SHELF
) -> tuple[EpisodeRunner, list[ScriptedSession]]:
    sessions: list[ScriptedSession] = []
    given = list(answers)

    def connect() -> ScriptedSession:
        sessions.append(ScriptedSession(given))
        return sessions[-1]

    return EpisodeRunner(environment, connect), sessions


def test_the_reward_is_the_sum_of_the_steps_and_the_closing_tool_is_called_once() -> None:
    runner, (sessions) = episode_runner(("go", None, False), ("a", 0.25, False), ("graded", 0.5, True))
    assert runner.reset({"place": "red"}) == "go" and runner.eid == "e-1"
    assert runner.call("read", {"path": "red"}) == "a"
    assert runner.finish() == 0.75 and runner.finish() == 0.75
    assert sessions[0].asked == [{"place": "red"}, {"tool": "read", "path": "red"}, {"tool": "submit"}]
    assert [p.t for p in runner.played] == [1, 2]


def test_an_episode_that_is_over_is_asked_nothing_more() -> None:
    runner, sessions = episode_runner(("go", None, False), ("right", 1.0, True))
    runner.reset({})
    runner.call("submit", {"word": "owl"})
    assert runner.call("read", {"path": "red"}) == OVER
    assert runner.finish() == 1.0 and len(sessions[0].asked) == 2


@pytest.mark.parametrize(
    "failure",
    [
        SandboxFailed("gone"),
        SessionLost("gone"),
        StepTimeout("late"),
        EnvironmentFailed("raised"),
        ConnectionError("cut"),
        TimeoutError(),
    ],
)
def test_a_machine_that_fails_is_no_text_and_no_reward(failure: Exception) -> None:
    runner, sessions = episode_runner(
        ("go", 0.5, False), ("a", 0.5, False), failure, ("go again", 1.0, False), ("b", 1.0, True)
    )
    runner.reset({})
    runner.call("read", {"path": "red"})
    assert runner.call("read", {"path": "red"}) == LOST and type(failure).__name__ in str(runner.lost)
    assert runner.call("read", {"path": "red"}) == LOST and runner.finish() is None
    assert sessions[0].closed
    runner.reset({})
    runner.call("submit", {"word": "owl"})
    assert runner.lost is None and runner.finish() == 1.0 and len(sessions) == 2, (
        "the next episode has a session of its own"
    )


def test_an_episode_that_never_began_is_lost_and_its_closing_tool_is_not_called() -> None:
    runner, sessions = episode_runner(ConnectionError("nobody there"))
    assert runner.reset({}) == LOST and runner.finish() is None and len(sessions[0].asked) == 1


OPEN = PlayedEnvironment("open", SHELF.tools)
"""An environment without a closing tool."""


@pytest.mark.parametrize(
    ("answers", "calls", "reward"),
    [
        ([], [], 0.0),
        ([("a", None, False)], [{"path": "red"}], 0.0),
        ([], [{"file": "red"}], 0.0),
        ([("a", 0.25, False), ("b", None, False)], [{"path": "red"}, {"path": "red"}], 0.25),
    ],
)
def test_an_episode_without_a_closing_tool_has_its_reward_however_little_was_done(
    answers: list[Any], calls: list[dict[str, Any]], reward: float
) -> None:
    runner, _ = episode_runner(("go", None, False), *answers, environment=OPEN)
    assert runner.finish() is None, "no episode began"
    runner.reset({})
    for arguments in calls:
        try:
            runner.call("read", arguments)
        except TypeError:
            continue
    assert (runner.finish(), runner.lost) == (reward, None)


def test_an_episode_that_was_lost_has_no_reward_without_a_closing_tool() -> None:
    runner, _ = episode_runner(("go", None, False), SandboxFailed("gone"), environment=OPEN)
    runner.reset({})
    runner.call("read", {"path": "red"})
    assert runner.finish() is None


def connect_nowhere() -> ScriptedSession:
    raise AssertionError("a copy opens no session")


def test_a_runner_is_copied_to_another_process_unless_its_episode_runs() -> None:
    runner = EpisodeRunner(SHELF, connect_nowhere)
    runner._session = ScriptedSession([("go", None, False), ("right", 1.0, True)])
    assert pickle.loads(pickle.dumps(runner)).finish() is None
    runner.reset({})
    with pytest.raises(TypeError, match=r"episode e-1 of shelf is running.*hand over the factory"):
        pickle.dumps(runner)
    runner.call("submit", {"word": "owl"})
    copy = pickle.loads(pickle.dumps(runner))
    assert (copy.eid, copy.finish(), copy.played) == ("e-1", 1.0, runner.played)


def test_a_server_without_room_for_all_rollouts_stops_the_first_batch() -> None:
    full = CapacityReached("1/1 sessions active")

    def connect() -> ScriptedSession:
        answer = given.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return ScriptedSession(answer)

    given: list[Any] = [full]
    with pytest.raises(CapacityReached, match=r"of shelf: .*--max-sessions N .*1/1 sessions active"):
        EpisodeRunner(SHELF, connect).reset({})
    given = [[("go", None, False), SessionLost("gone")], full]
    runner = EpisodeRunner(SHELF, connect)
    runner.reset({})
    runner.call("read", {"path": "red"})
    assert runner.reset({}) == LOST, "others took its place: that episode is lost, and training goes on"


def test_a_closing_tool_that_fails_loses_the_episode() -> None:
    runner, _ = episode_runner(("go", None, False), ("a", 0.5, False), SandboxFailed("gone"))
    runner.reset({})
    runner.call("read", {"path": "red"})
    assert runner.finish() is None and runner.lost is not None


def test_a_task_that_the_environment_does_not_know_is_the_callers_mistake() -> None:
    runner, _ = episode_runner(InvalidRequest("no task x"))
    with pytest.raises(InvalidRequest):
        runner.reset({"task_id": "x"})


def test_what_the_environment_itself_refuses_is_the_students_mistake() -> None:
    runner, _ = episode_runner(("go", None, False), InvalidRequest("path is too long"), ("a", 1.0, True))
    runner.reset({})
    with pytest.raises(TypeError, match="path is too long"):
        runner.call("read", {"path": "x" * 9000})
    (refused,) = runner.played
    assert refused.t is None and refused.marker is not None and refused.marker.error_kind == "invalid_arguments"
    assert runner.lost is None and runner.finish() == 1.0


RUN = Tool(
    "run",
    "Run.",
    {
        "properties": {"command": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "boolean"}, "x": {}},
        "required": ["command"],
    },
    {"tool": "run"},
)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "needs the argument 'command'"),
        ({"command": None}, "command has to be of type string"),
        ({"command": "ls", "cwd": "/"}, "has no argument 'cwd': it takes command, n, deep, x"),
        ({"command": "ls", "n": 1.5}, "n has to be of type integer"),
        ({"command": "ls", "n": True}, "n has to be of type integer"),
        ({"command": "ls", "deep": 1}, "deep has to be of type boolean"),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_student(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as raised:
        RUN.action(arguments)
    assert said in str(raised.value)


def test_null_is_no_argument_where_it_may_be_left_out() -> None:
    assert RUN.action({"command": "ls", "n": None, "x": [1]}) == {"tool": "run", "command": "ls", "x": [1]}


def test_an_environment_without_tools_is_one_tool_with_its_actions_fields() -> None:
    tool = step_tool(ShelfAction.model_json_schema())
    assert list(tool.parameters["properties"]) == ["tool", "path", "word"] and tool.parameters["required"] == ["tool"]
    assert tool.action({"tool": "read"}) == {"tool": "read"}


def test_installed_environments_are_found_by_name() -> None:
    terminal = published("terminal")
    assert set(terminal.tools) == {"run", "write_file", "read_file", "submit"} and terminal.closing_tool == "submit"
    with pytest.raises(InvalidRequest, match="terminal"):
        published("termnal")
    with pytest.raises(TypeError, match="it takes no argument"):
        Tool("wait", "", {}).action({"a": 1})


def test_episodes_have_the_labels_that_the_runner_had_at_their_reset() -> None:
    runner, sessions = episode_runner(*[("go", None, False)] * 3)
    runner.reset({})
    for step in (1, 2):
        runner.labels = episode_labels(run="r", step=step, group="g")
        runner.reset({})
    assert sessions[0].labelled == [NO_LABELS, *(Labels(run="r", step=step, group="g") for step in (1, 2))]
    assert all("labels" not in asked for asked in sessions[0].asked)


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ({}, NO_LABELS),
        ({"run": "", "step": -1, "group": None}, NO_LABELS),
        ({"run": "a\nb\ud800", "step": 0, "group": 7}, Labels(run="a b?", step=0, group="7")),
        ({"run": "/runs/" + "x" * MAX_LABEL}, Labels(run="x" * MAX_LABEL)),
    ],
)
def test_what_a_trainer_calls_things_becomes_labels(given: dict[str, Any], labels: Labels) -> None:
    assert episode_labels(**given) == labels

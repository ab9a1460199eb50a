"""Episodes of a server through gem's interface, as ROLL plays them."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gem
import httpx
import pytest

from errata_protocol.errors import InvalidRequest
from errata_server.process import ServerProcess
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.roll.env import ENV_TYPE, ErrataEnv
from tests.environments.shelf import SPEC

SHELF = of_spec(SPEC)
TASKS = [{"place": "green"}, {"place": "blue", "word": "cat"}]


class Reason(enum.Enum):  # as ROLL's EpisodeStopReason
    MAX_LENGTH = "max_length"


def said(name: str, end: str = "<|im_end|>", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{end}"


def made(server: ServerProcess, **options: Any) -> ErrataEnv:
    return ErrataEnv(server.url, SHELF, **{"tasks": TASKS, "prompt": "Find it. ", **options})


@pytest.fixture
def env(server: ServerProcess) -> Iterator[ErrataEnv]:
    one = made(server)
    yield one
    one.close()


def test_gem_makes_it_by_its_name(server: ServerProcess) -> None:
    env = gem.make(ENV_TYPE, url=server.url, env=SHELF, tasks=TASKS, prompt="Find it. ")
    assert isinstance(env, ErrataEnv) and env.env_id == ENV_TYPE
    messages, info = env.reset(seed=3)
    assert messages == [
        {"role": "user", "content": "Find it. One of red, green, blue holds a word. Submit it. Not in eulb."}
    ]
    assert [tool["function"]["name"] for tool in info["tools"]] == ["read", "submit"]
    assert info["tools"][0]["function"]["parameters"]["required"] == ["path"]
    assert (info["error_msg"], info["failure_mode"], env.env_reset_failed, env.env_timeout) == ("", "", False, False)
    assert env.env_info["task"] == TASKS[1] and env.env_info["environment"] == "shelf"
    assert json.loads(json.dumps(env.env_info))["eid"] == env.env_info["eid"] is not None
    env.close()


def test_an_episode_with_a_marked_turn(env: ErrataEnv) -> None:
    env.reset(seed=0)
    messages, reward, terminated, truncated, info = env.step(said("read", path="red"))
    assert messages[1:] == [
        {"role": "assistant", "content": said("read", "", path="red")},
        {"role": "tool", "name": "read", "content": "no file red"},
    ]
    assert (reward, terminated, truncated) == (0.0, False, False)
    [error] = info["errors"]
    assert (error["tool"], error["t"]) == ("read", 1)
    assert (error["error_kind"], error["hint_template_key"]) == ("path_not_found", "fs.missing")
    assert error["marker"]["error_site"]["action_span"] == [0, 3]
    assert info["metrics"] == {"calls": 1, "errors": 1, "lost": 0.0} and info["stop_reason"] == "continue"
    assert info["eid"] == env.env_info["eid"] and info["lost"] is None
    env.step(said("read", path="green"))
    messages, reward, terminated, truncated, info = env.step("I know.\n" + said("submit", word="owl"))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info["stop_reason"] == "done" and info["failure_mode"] == "" and info["errors"] == []
    assert messages[-1]["content"] == "right"
    json.dumps(info)


def test_several_calls_and_calls_that_are_none(env: ErrataEnv) -> None:
    env.reset(seed=0)
    text = said("read", "", path="green") + said("fly", "") + said("read", "", file="x") + "<tool_call>{no JSON}"
    messages, _, terminated, _, info = env.step(text)
    assert not terminated
    assert [one.get("name") for one in messages[2:]] == ["read", "fly", "read", "tool_call"]
    assert messages[2]["content"] == "the word is owl"
    assert all(one["content"].startswith("{'error': ") for one in messages[3:])
    assert [(one["tool"], one["error_kind"], one["hint_template_key"]) for one in info["errors"]] == [
        ("fly", "tool_not_found", "tool.unknown"),
        ("read", "invalid_arguments", "args.invalid"),
        ("", "invalid_arguments", "tool.malformed"),
    ]
    assert info["metrics"] == {"calls": 4, "errors": 3, "lost": 0.0}


def test_a_turn_in_qwens_tags(env: ErrataEnv) -> None:
    env.reset(seed=1)
    call = "<function=read>\n<parameter=path>\nblue\n</parameter>\n</function>"
    turn = f"<think>\n<tool_call>{{}}\n</think>\n<tool_call>\n{call}"
    messages, *_, info = env.step(turn)
    assert messages[-1]["content"] == "the word is cat" and info["metrics"]["calls"] == 1


@pytest.mark.parametrize(
    ("action", "why", "truncated"),
    [("I give up.<|im_end|>", "no_call", False), (Reason.MAX_LENGTH, "max_length", True)],
)
def test_what_ends_an_episode_is_graded(env: ErrataEnv, action: Any, why: str, truncated: bool) -> None:
    """The environment's closing tool is called: the shelf finds no word."""
    env.reset(seed=0)
    env.step(said("read", path="green"))
    _, reward, terminated, was_truncated, info = env.step(action)
    assert (reward, terminated, was_truncated, info["stop_reason"]) == (0.0, True, truncated, why)
    assert env.lost is None


def test_the_last_of_the_turns_is_still_played(server: ServerProcess) -> None:
    env = made(server, max_steps=2)
    env.reset(seed=0)
    assert env.step(said("read", path="red"))[2] is False
    messages, _, terminated, truncated, info = env.step(said("read", path="green"))
    assert (terminated, truncated, info["stop_reason"]) == (True, True, "max_steps")
    assert messages[-1]["content"] == "the word is owl"
    env.close()


def test_a_killed_server_loses_the_episode_and_is_no_reward(tmp_path: Path) -> None:
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path) as server:
        env = made(server, message_timeout_s=1.0, retries=0)
        env.reset(seed=0)
        env.step(said("read", path="red"))
        server.kill()
        _, _, terminated, truncated, info = env.step(said("read", path="green"))
        assert (terminated, truncated, info["stop_reason"]) == (True, True, "lost")
        assert info["lost"] and info["failure_mode"] == f"lost: {info['lost']}" and info["metrics"]["lost"] == 1.0
        assert info["error_messages"] == [info["lost"]] and env.lost == info["lost"]
        messages, info = env.reset(seed=0)
        assert env.env_reset_failed and messages == [] and info["failure_mode"].startswith("lost: ")
        env.close()


def test_a_failing_environment_loses_the_episode(env: ErrataEnv) -> None:
    env.reset(seed=0)
    *_, info = env.step(said("read", path="broken"))
    assert info["stop_reason"] == "lost" and "the shelf fell" in info["lost"]
    env.reset(seed=0)
    assert not env.env_reset_failed and env.step(said("read", path="green"))[0][-1]["content"] == "the word is owl"


def test_a_server_that_hangs_loses_the_episode(server: ServerProcess) -> None:
    env = made(server, tasks=[{"slow_s": 30.0}], message_timeout_s=0.2, retries=0)
    messages, info = env.reset(seed=0)
    assert env.env_reset_failed and messages == [] and "message_timeout_s=0.2" in info["failure_mode"]
    env.close()


def test_what_ends_a_turn_is_no_part_of_it(env: ErrataEnv) -> None:
    env.reset(seed=0)
    end = "<|im_end|><|endoftext|>" * 2
    assert env.step(said("read", f"{end}x{end}", path="red"))[0][1]["content"] == said("read", f"{end}x", path="red")


def test_tasks_come_from_a_file_and_repeat(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in TASKS))
    env = made(server, tasks=str(file))
    assert [(env.reset(seed=seed), env.env_info["task"])[1] for seed in (0, 1, 2, 2)] == [*TASKS, TASKS[0], TASKS[0]]
    env.close()
    file.write_text("{")
    for wrong in (str(file), str(tmp_path / "none"), [], ["x"]):
        with pytest.raises(InvalidRequest, match=r"^(the )?tasks "):
            made(server, tasks=wrong)


def test_wrong_options_are_refused(server: ServerProcess) -> None:
    with pytest.raises(InvalidRequest, match="shelf has no tool 'fly'"):
        made(server, tools=["fly"])
    with pytest.raises(InvalidRequest, match="max_steps is 0"):
        made(server, max_steps=0)
    env = made(server, tasks=[{"slow_s": "long"}])
    env.reset(seed=0)
    assert env.env_reset_failed  # the environment fails with it
    env.close()


def test_a_random_agent_plays(env: ErrataEnv) -> None:
    env.reset(seed=5)
    over = False
    actions = []
    while not over:
        actions.append(env.sample_random_action())
        _, _, over, _, info = env.step(actions[-1])
    assert info["lost"] is None and info["metrics"]["calls"] == 1
    env.reset(seed=5)
    assert env.sample_random_action() == actions[0]


def test_episodes_have_run_step_and_seed_as_labels(server: ServerProcess) -> None:
    env = made(server, run="r")
    labels = []
    for step in (None, 4):
        env.training_step = step
        env.reset(seed=7)
        shown = httpx.get(f"{server.url}/episodes/{env.env_info['eid']}").json()
        labels.append((shown["run"], shown["step"], shown["group"]))
    env.close()
    assert labels == [("r", None, "7"), ("r", 4, "7")]

"""Episodes on a real server through the cookbook's rollouts, and a training step on them over the SDK."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.rollout_limits import RolloutLimits
from tinker_cookbook.rl.rollout_runner import run_rollout
from tinker_cookbook.rl.rollout_strategy import RetryOnFailure
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.train import train_step

from errata_protocol.errors import InvalidRequest, SessionLost
from errata_protocol.labels import Labels
from errata_server.process import ServerProcess
from errata_trainer.assembly.channel_set import driver_for
from errata_trainer.episodes.served import Connect
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.tinker import TinkerPolicy, datums, group_advantages
from errata_trainer.recipes.tinker.env import ErrataEnv, ErrataGroup
from errata_trainer.tiny import tiny_model, tiny_tokenizer
from tests.environments.shelf import SPEC
from tests.recipes.spoiled_service import TinkerService

TEXTS = [
    '<|im_start|>assistant\n<tool_call>\n{"name": "read", "arguments": {"path": "red"}}\n</tool_call><|im_end|>',
    "# Tools You may call one or more functions to assist with the user query.",
    "One of red, green, blue holds a word. Submit it. no file green the word is owl right wrong",
]
SHELF = of_spec(SPEC)
TOKENIZER = tiny_tokenizer(TEXTS)
PROMPT = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find the word. "})
WELL = (("read", {"path": "green"}), ("read", {"path": "red"}), ("submit", {"word": "owl"}))
BADLY = (("read", {"path": "blue"}), ("submit", {"word": "cat"}))


def renderer() -> Any:
    return get_renderer("qwen3_instruct", TOKENIZER)


def said(*calls: tuple[str, dict[str, str]]) -> list[list[int]]:
    """Return the tokens of turns with one call each."""
    texts = [
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call><|im_end|>"
        for name, given in calls
    ]
    return [TOKENIZER.encode(one, add_special_tokens=False) for one in texts]


class Scripted(TokenCompleter):
    """Takes the turns of a script for each episode in turn, with the log-probabilities that a policy gives them."""

    def __init__(self, policy: TinkerPolicy, *scripts: Sequence[tuple[str, dict[str, str]]]) -> None:
        self.policy, self.scripts, self.begun = policy, [said(*one) for one in scripts], 0
        self.left: dict[int, list[list[int]]] = {}

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
        task = id(asyncio.current_task())
        if task not in self.left:
            self.left[task] = list(self.scripts[self.begun % len(self.scripts)])
            self.begun += 1
        prompt, tokens = model_input.to_ints(), self.left[task].pop(0)
        assert stop == [TOKENIZER.convert_tokens_to_ids("<|im_end|>")]
        [scored] = await asyncio.to_thread(self.policy.score, [[*prompt, *tokens]])
        return TokensWithLogprobs(tokens, [one for one in scored[len(prompt) :] if one is not None])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data")) as made:
        yield made


@pytest.fixture(scope="module")
def policy() -> Iterator[TinkerPolicy]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TINKER_TELEMETRY", "0")
        patched.setenv("TINKER_API_KEY", "tml-test")
        with (
            TinkerService(tiny_model(TOKENIZER)) as service,
            TinkerPolicy.connect(service.url, "tiny") as made,
        ):
            yield made


def group(server: ServerProcess, **options: Any) -> ErrataGroup:
    return ErrataGroup(server.url, SHELF, renderer, PROMPT, size=2, **options)


async def test_a_group_is_played_and_trained_on(server: ServerProcess, policy: TinkerPolicy) -> None:
    builder = pickle.loads(pickle.dumps(group(server)))
    played = await do_group_rollout(builder, Scripted(policy, WELL, BADLY))
    rewards = played.get_total_rewards()
    assert sorted(rewards) == [0.0, 1.0]
    steps = played.trajectories_G[rewards.index(1.0)].transitions
    assert [step.reward for step in steps] == [0.0, 0.0, 1.0]
    assert [step.metrics["errors"] for step in steps] == [1, 0, 0]
    assert steps[0].logs["error_kind"] == "path_not_found" and steps[0].logs["hint_template_key"] == "fs.missing"
    # The cookbook's own way.
    data, _ = assemble_training_data([played], compute_advantages([played]))
    assert len(data) == 2  # each prompt goes on from the turn before
    found = await train_step(data, policy.training, learning_rate=1e-4, num_substeps=1, loss_fn="importance_sampling")
    mask = data[0].loss_fn_inputs["mask"].to_torch().bool()
    assert float((found[0] - data[0].loss_fn_inputs["logprobs"].to_torch())[mask].abs().max()) < 1e-5


async def test_error_sites_of_a_group_are_distilled(server: ServerProcess, policy: TinkerPolicy) -> None:
    policy.refresh()
    builder = group(server)
    await do_group_rollout(builder, Scripted(policy, WELL, BADLY))
    rollouts = sorted(
        (one for of_episode in builder.rollouts for one in of_episode), key=lambda one: -(one.reward or 0)
    )
    assert [one.reward for one in rollouts] == [1.0, 0.0]
    assert [len(one.turns) for one in rollouts] == [3, 2]
    assert [turn.failed is not None for turn in rollouts[0].turns] == [True, False, False]
    assert rollouts[0].turns[1].calls[0].t == 2
    driver = driver_for(tokenizer=TOKENIZER, end_ids=[TOKENIZER.eos_token_id])
    items = driver.items(rollouts, [None, None], sample=lambda contexts: [])
    assert [len(one) for one in items] == [1, 1]
    teacher = await asyncio.to_thread(policy.teacher_logprobs, rollouts, items)
    data = datums(rollouts, items, advantages=group_advantages(rollouts, [0, 0]), teacher_logprobs=teacher)
    metrics = await asyncio.to_thread(policy.step, data)
    assert metrics["grad_norm"] > 0


async def test_a_history_that_is_rendered_in_another_way_begins_another_rollout(
    server: ServerProcess, policy: TinkerPolicy
) -> None:
    connect = Connect(server.url, (), 60.0, 0)

    class Forgetful:
        """Shows the last two messages of a history."""

        def __init__(self) -> None:
            self._renderer = renderer()

        def build_generation_prompt(self, messages: Sequence[Any]) -> Any:
            return self._renderer.build_generation_prompt([*messages[:2], *messages[2:][-2:]])

        def __getattr__(self, name: str) -> Any:
            return getattr(self._renderer, name)

    env = ErrataEnv(SHELF, connect, Forgetful(), PROMPT, {})
    trajectory = await run_rollout(Scripted(policy, WELL), env)
    rollouts = env.rollouts(trajectory)
    await env.close()
    assert [len(one.turns) for one in rollouts] == [2, 1]
    assert [one.reward for one in rollouts] == [1.0, 1.0]
    assert all(one.logprobs is not None for one in rollouts)
    assert [call.name for one in rollouts for turn in one.turns for call in turn.calls] == ["read", "read", "submit"]
    assert [call.t for one in rollouts for turn in one.turns for call in turn.calls] == [1, 2, 3]


async def test_what_the_student_does_wrong_is_told_to_it(server: ServerProcess, policy: TinkerPolicy) -> None:
    connect = Connect(server.url, (), 60.0, 0)
    env = ErrataEnv(SHELF, connect, renderer(), PROMPT, {}, tools=["read", "submit"], max_turns=3)
    script = (("fly", {"to": "red"}), ("read", {"where": "red"}), ("read", {"path": "green"}))
    trajectory = await run_rollout(Scripted(policy, script), env)
    [rollout] = env.rollouts(trajectory)
    await env.close()
    assert [turn.failed.marker.error_kind for turn in rollout.turns if turn.failed and turn.failed.marker] == [
        "tool_not_found",
        "invalid_arguments",
        "path_not_found",
    ]
    assert rollout.reward == 0.0 and env.runner.record.finished
    text = TOKENIZER.decode(rollout.completion_ids)
    assert "Tool fly not found." in text and "read() has no argument" in text
    assert [step.metrics["errors"] for step in trajectory.transitions] == [1, 1, 1]
    assert [step.logs["error_kind"] for step in trajectory.transitions] == [
        "tool_not_found",
        "invalid_arguments",
        "path_not_found",
    ]


async def test_a_tool_call_that_cannot_be_read_is_an_error(server: ServerProcess, policy: TinkerPolicy) -> None:
    class Broken(Scripted):
        async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> TokensWithLogprobs:
            text = '<tool_call>\n{"name": "read", }\n</tool_call><|im_end|>'
            return TokensWithLogprobs(TOKENIZER.encode(text, add_special_tokens=False), None)

    env = ErrataEnv(SHELF, Connect(server.url, (), 60.0, 0), renderer(), PROMPT, {})
    trajectory = await run_rollout(Broken(policy), env)
    [rollout] = env.rollouts(trajectory)
    await env.close()
    [step] = trajectory.transitions
    assert step.episode_done and step.metrics["errors"] == 1 and step.logs["hint_template_key"] == "tool.malformed"
    [turn] = rollout.turns
    assert turn.failed is not None and turn.failed.name == ""
    assert turn.failed.marker is not None and turn.failed.marker.hint_template_key == "tool.malformed"


async def test_an_episode_that_a_limit_stops_is_graded(server: ServerProcess, policy: TinkerPolicy) -> None:
    builder = group(server)
    envs = await builder.make_envs()
    script = (("read", {"path": "red"}),) * 9
    trajectories = [await run_rollout(Scripted(policy, script), env, limits=RolloutLimits(max_turns=2)) for env in envs]
    assert [reward for reward, _ in await builder.compute_group_rewards(trajectories, envs)] == [0.0, 0.0]
    assert all(env.runner.record.finished for env in envs)
    assert [one.reward for [one] in builder.rollouts] == [0.0, 0.0]
    await builder.cleanup()
    await builder.cleanup()


async def test_a_lost_episode_is_an_exception_and_is_played_again(server: ServerProcess, policy: TinkerPolicy) -> None:
    broken = (("read", {"path": "broken"}), *WELL)
    with pytest.raises(SessionLost, match="the episode of shelf was lost and has no reward"):
        await do_group_rollout(group(server), Scripted(policy, broken))
    again = group(server)
    played = await do_group_rollout(again, Scripted(policy, broken, WELL, WELL), RetryOnFailure(max_retries=2))
    assert played.get_total_rewards() == [1.0, 1.0]
    assert [one.error_type for one in played.rollout_errors] == ["SessionLost"]
    assert [one.lost for of_episode in again.rollouts for one in of_episode] == [None, None]


async def test_a_server_that_dies_in_mid_batch_gives_no_reward(tmp_path: Path, policy: TinkerPolicy) -> None:
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path) as server:
        builder = group(server, message_timeout_s=1.0, retries=0)

        class Killing(Scripted):
            async def __call__(self, *given: Any, **options: Any) -> TokensWithLogprobs:
                if self.begun == 2:
                    server.kill()
                return await super().__call__(*given, **options)

        with pytest.raises(SessionLost, match="has no reward"):
            await do_group_rollout(builder, Killing(policy, WELL))
        with pytest.raises(RuntimeError, match="the cookbook did not ask this object for rewards"):
            _ = builder.rollouts


async def test_a_lost_episode_stays_lost(server: ServerProcess) -> None:
    env = ErrataEnv(SHELF, Connect(server.url, (), 60.0, 0), renderer(), PROMPT, {})
    await env.initial_observation()
    with pytest.raises(SessionLost):
        await env.step(said(("read", {"path": "broken"}))[0])
    for _ in range(2):
        with pytest.raises(SessionLost, match="has no reward"):
            await env.finish()
    await env.close()


async def test_every_session_is_closed(server: ServerProcess, caplog: pytest.LogCaptureFixture) -> None:
    builder = group(server)
    envs = await builder.make_envs()
    closed = []

    async def failing() -> None:
        closed.append(len(closed))
        if len(closed) == 1:
            raise OSError("gone")

    for env in envs:
        env.close = failing  # type: ignore[method-assign]
    await builder.cleanup()
    assert closed == [0, 1] and "a session could not be closed: OSError: gone" in caplog.text


async def test_wrong_options_are_refused(server: ServerProcess) -> None:
    connect = Connect(server.url, (), 60.0, 0)
    with pytest.raises(ValueError, match="max_turns is 0"):
        ErrataEnv(SHELF, connect, renderer(), PROMPT, {}, max_turns=0)
    with pytest.raises(InvalidRequest, match="shelf has no tool 'fly'"):
        await group(server, tools=["fly"]).make_envs()


async def test_the_episodes_of_a_group_have_one_label_of_their_own(server: ServerProcess, policy: TinkerPolicy) -> None:
    first, second = (group(server, labels=Labels(run="r", step=5)) for _ in range(2))
    made = [
        *(await first.make_envs()),
        *(await second.make_envs()),
        *(await pickle.loads(pickle.dumps(first)).make_envs()),
    ]
    found = []
    for env in made:
        await env.initial_observation()
        shown = httpx.get(f"{server.url}/episodes/{env.runner.eid}").json()
        assert (shown["run"], shown["step"]) == ("r", 5)
        found.append(shown["group"])
        await env.close()
    assert len(set(found)) == 2 and found[0] == found[1] == found[4] == found[5] != found[2] == found[3]
    [named, _] = await group(server, labels=Labels(group="g")).make_envs()
    await named.initial_observation()
    assert httpx.get(f"{server.url}/episodes/{named.runner.eid}").json()["group"] == "g"
    await named.close()

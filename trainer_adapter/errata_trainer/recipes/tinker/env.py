"""Served environments for the Tinker cookbook's rollouts: `ErrataEnv` and, for a group of them, `ErrataGroup`.

It needs ``tinker-cookbook``, which the extra ``tinker`` does not install. The cookbook knows no episode without a
reward, so an episode that is lost raises SessionLost: ``RetryOnFailure`` plays it again, and raises where that does not
help, upon which the cookbook's training loop leaves the group out; ``FailFast`` ends the run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import tinker
from tinker_cookbook.rl.types import Env, EnvGroupBuilder, StepResult, Trajectory

from errata_protocol.errors import SessionLost
from errata_protocol.labels import NO_LABELS, Labels

from ...episodes.awaited import AwaitedRunner
from ...episodes.conversation import answer_call, turn_errors, with_opening
from ...episodes.served import Connect, chosen_tools, served_environment
from ...episodes.tools import PlayedEnvironment, schema_of
from ...packing import NOT_SAMPLED, SampledTurn, pack
from ...rollouts.deliveries import Delivery
from ...rollouts.rollout import Rollout
from ...rollouts.transcript import build_rollout, text_of

log = logging.getLogger("errata.trainer")

_UNREAD = "<unread tool call>"
"""Text that stands in a turn's message for a tool call that the renderer could not read."""


@dataclass(slots=True)
class _Heard:
    """A turn as the environment heard it.

    Attributes:
        prompt_ids: Tokens that it was sampled from.
        ids: Tokens of the turn.
        messages: The student's message and the results of its calls.
        deliveries: Calls in the environment's record.
        cut: Whether the turn was cut off at the most tokens.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    messages: list[dict[str, Any]]
    deliveries: tuple[Delivery, ...]
    cut: bool


class ErrataEnv(Env):  # type: ignore[misc]
    """One episode of an environment on a server, for the cookbook's rollouts. Close it at the end.

    The reward of the episode stands at its last step. ``metrics`` have ``calls`` and ``errors``, the number of the
    turn's calls and of those that failed; ``logs`` have ``error_kind``, ``hint_template_key`` and ``eid``.

    Args:
        environment: Environment to play.
        connect: Way to a session on its server.
        renderer: The cookbook's renderer of the student.
        prompt: Messages of the prompt; the text of ``reset`` is appended to the last one.
        task: Arguments of ``reset``.
        tools: Names of the tools that the student may call; None is all that the environment has.
        max_turns: Most turns of the student; None for no limit. The calls of the last one are still made.
        call_s: Longest time of a reset or a call, in seconds; None for no limit.
        episode_s: Longest time that the episode spends in the environment, in seconds; None for no limit.
        labels: Labels of the episode on its server; None for none.

    Attributes:
        runner: Runner that plays the episode.

    Raises:
        ValueError: A limit is out of its range.
        InvalidRequest: The environment has no such tool.
    """

    def __init__(
        self,
        environment: PlayedEnvironment,
        connect: Connect,
        renderer: Any,
        prompt: Sequence[Mapping[str, Any]],
        task: Mapping[str, Any],
        *,
        tools: Sequence[str] | None = None,
        max_turns: int | None = None,
        call_s: float | None = None,
        episode_s: float | None = None,
        labels: Labels | None = None,
    ) -> None:
        if max_turns is not None and max_turns < 1:
            raise ValueError(f"max_turns is {max_turns}: give at least 1, or None for no limit")
        self.runner = AwaitedRunner(environment, connect.connected, call_s=call_s, episode_s=episode_s)
        self.runner.labels = labels
        self._renderer, self._prompt, self._task, self._max_turns = renderer, list(prompt), dict(task), max_turns
        self._tools = chosen_tools(environment, tools)
        self._messages: list[Any] = []
        self._prompt_ids: tuple[int, ...] = ()
        self._heard: list[_Heard] = []

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Descriptions of the student's tools, JSON Schema."""
        played = self.runner.environment.tools
        return [schema_of(played[name])["function"] for name in self._tools]

    async def initial_observation(self) -> Any:
        """Begin the episode and return the tokens of the prompt, and what ends a turn.

        Raises:
            SessionLost: The episode was lost by an infrastructure failure or a deadline.
            InvalidRequest: The environment does not take the task.
            CapacityReached: The server has no room for the session.
        """
        opening = await self.runner.reset(self._task)
        self._refuse_lost()
        messages = with_opening(self._prompt, opening)
        system = "".join(text_of(one["content"]) for one in messages if one["role"] == "system")
        described = self._renderer.create_conversation_prefix_with_tools(self.tools, system)
        self._messages = [*described, *(one for one in messages if one["role"] != "system")]
        return self._observation(), self._renderer.get_stop_sequences()

    async def step(self, action: Sequence[int], *, extra: Mapping[str, Any] | None = None) -> Any:
        """Make the calls of a turn, and return the tokens of what the student reads next.

        Args:
            action: Tokens of the turn.
            extra: The cookbook's notes on the sampling, with ``stop_reason``.

        Raises:
            SessionLost: The episode was lost by an infrastructure failure or a deadline. It has no reward.
        """
        message, _ = self._renderer.parse_response(list(action))
        cut = (extra or {}).get("stop_reason") == "length"
        asked = [] if cut else [_plain_call(one) for one in message.get("tool_calls") or ()]
        unread = 0 if cut else len(message.get("unparsed_tool_calls") or ())
        before = len(self.runner.played)
        results = [await answer_call(self.runner, self._tools, call) for call in asked]
        self._refuse_lost()
        played = self.runner.played[before:]
        plain = {
            "role": "assistant",
            "content": text_of(message.get("content")) + _UNREAD * unread,
            **({"tool_calls": asked} if asked else {}),
        }
        self._heard.append(
            _Heard(self._prompt_ids, tuple(action), [plain, *results], tuple(self.runner.deliveries())[before:], cut)
        )
        named = [{**one, "tool_call_id": call.get("id") or ""} for one, call in zip(results, asked, strict=True)]
        self._messages += [message, *named]
        at_end = self._max_turns is not None and len(self._heard) >= self._max_turns
        done = self.runner.done or not asked or at_end
        reward = await self.finish() if done else 0.0
        errors = turn_errors(played, results, self._tools, unread)
        return StepResult(
            reward=reward,
            episode_done=done,
            next_observation=tinker.ModelInput.empty() if done else self._observation(),
            next_stop_condition=self._renderer.get_stop_sequences(),
            metrics={"calls": len(asked) + unread, "errors": len(errors)},
            logs={
                "eid": self.runner.eid or "",
                "error_kind": errors[0].error_kind if errors else "",
                "hint_template_key": errors[0].hint_template_key if errors else "",
            },
        )

    async def finish(self) -> float:
        """Finish the episode, with the environment's closing tool if it is open, and return what it adds to the reward:
        all of it, or 0 where `step` has ended it.

        Raises:
            SessionLost: The episode was lost. It has no reward.
        """
        self._refuse_lost()
        if self.runner.record.finished:
            return 0.0
        found = await self.runner.finish()
        self._refuse_lost()
        return 0.0 if found is None else found

    def rollouts(self, trajectory: Trajectory | None = None) -> list[Rollout]:
        """Return the episode's turns as rollouts: one if each turn's prompt goes on from the turn before, and another
        from each turn on where it does not, because the renderer shows the history in another way.

        Args:
            trajectory: The cookbook's record of this episode, which has the log-probabilities; None for rollouts
                without.
        """
        logprobs = (
            [None] * len(self._heard) if trajectory is None else [_logprobs(one) for one in trajectory.transitions]
        )
        turns = [
            SampledTurn(heard.prompt_ids, heard.ids, known) for heard, known in zip(self._heard, logprobs, strict=False)
        ]
        made = []
        for sample in pack(turns, separate_runs=True).samples:
            first = next(place for place, one in enumerate(sample.segments) if one != NOT_SAMPLED)
            heard = [self._heard[index] for index in sample.turns]
            made.append(
                build_rollout(
                    sample.ids[:first],
                    sample.ids[first:],
                    sample.mask[first:],
                    [message for one in heard for message in one.messages],
                    [delivery for one in heard for delivery in one.deliveries],
                    tools=self.tools,
                    eid=self.runner.eid,
                    environment=self.runner.environment.name,
                    reward=self.runner.record.reward() if self.runner.record.finished else None,
                    logprobs=None if sample.logprobs is None else sample.logprobs[first:],
                    truncated=heard[-1].cut,
                    opening=_UNREAD,
                    lost=self.runner.lost,
                    task=self._task,
                )
            )
        return made

    async def close(self) -> None:
        """Close the session."""
        await self.runner.close()

    def _observation(self) -> Any:
        found = self._renderer.build_generation_prompt(self._messages)
        self._prompt_ids = tuple(found.to_ints())
        return found

    def _refuse_lost(self) -> None:
        if self.runner.lost is not None:
            raise SessionLost(
                f"the episode of {self.runner.environment.name} was lost and has no reward: {self.runner.lost}",
                reason=self.runner.record.lost_code,
            )


@dataclass
class ErrataGroup(EnvGroupBuilder):  # type: ignore[misc]
    """Builds the episodes of one task, for the cookbook's rollouts. It can be pickled before they are made.

    Args:
        url: URL of the environment.
        env: Name of the environment on its server, or a description of it.
        renderer: Function that returns the cookbook's renderer; one of a module, so that it can be pickled.
        prompt: Messages of the prompt.
        task: Arguments of ``reset``.
        size: Number of episodes.
        tools: Names of the tools that the student may call; None is all that the environment has.
        max_turns: Most turns of the student; None for no limit.
        call_s: Longest time of a reset or a call, in seconds; None for no limit.
        episode_s: Longest time that an episode spends in the environment, in seconds; None for no limit.
        headers: Headers of each request, e.g. ``{"Authorization": "Bearer TOKEN"}``.
        message_timeout_s: Longest wait for an answer in seconds, reconnects included.
        retries: Most times that a request is sent again after a failure that the server rolled back.
        labels: Labels of the episodes, e.g. ``Labels(run="grpo-3", step=120)``. Without a ``group`` they get one that
            no other object has.
    """

    url: str
    env: str | PlayedEnvironment
    renderer: Callable[[], Any]
    prompt: Sequence[Mapping[str, Any]]
    task: Mapping[str, Any] = field(default_factory=dict)
    size: int = 8
    tools: Sequence[str] | None = None
    max_turns: int | None = None
    call_s: float | None = None
    episode_s: float | None = None
    headers: Mapping[str, str] | None = None
    message_timeout_s: float = 1000.0
    retries: int = 2
    labels: Labels = NO_LABELS
    _group: str = field(default_factory=lambda: uuid4().hex, init=False, repr=False)
    _rollouts: list[list[Rollout]] | None = field(default=None, init=False, repr=False)
    _made: list[ErrataEnv] = field(default_factory=list, init=False, repr=False)
    _renderer: Any = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the group without what it has made."""
        return {**self.__dict__, "_made": [], "_renderer": None}

    @property
    def rollouts(self) -> list[list[Rollout]]:
        """Rollouts of each episode, with log-probabilities.

        Raises:
            RuntimeError: The cookbook has not asked this object for the group's rewards: the group was not played, or
                in another process (``set_rollout_executor``), or is not graded because all of it ran out of time.
        """
        if self._rollouts is None:
            raise RuntimeError(
                "the group has no rollouts: the cookbook did not ask this object for rewards. It was not played, was "
                "played in another process, or was not graded"
            )
        return self._rollouts

    async def make_envs(self) -> Sequence[Env]:
        """Return new episodes, not yet begun; ``RetryOnFailure`` calls it again for others.

        Raises:
            InvalidRequest: The server has no such environment or tool there.
            ConnectionError: The server cannot be reached.
        """
        environment = await asyncio.to_thread(served_environment, self.url, self.env, headers=self.headers)
        pairs = tuple(sorted((self.headers or {}).items()))
        connect = Connect(self.url, pairs, self.message_timeout_s, self.retries)
        if self._renderer is None:
            self._renderer = await asyncio.to_thread(self.renderer)
        made = [
            ErrataEnv(
                environment,
                connect,
                self._renderer,
                self.prompt,
                self.task,
                tools=self.tools,
                max_turns=self.max_turns,
                call_s=self.call_s,
                episode_s=self.episode_s,
                labels=Labels(group=self._group).updated(self.labels),
            )
            for _ in range(self.size)
        ]
        self._made += made
        return made

    async def compute_group_rewards(
        self, trajectory_group: list[Trajectory], env_group: Sequence[Env]
    ) -> list[tuple[float, dict[str, float]]]:
        """Return the rewards of episodes that a limit of the cookbook stopped, and keep the rollouts of all.

        Args:
            trajectory_group: The cookbook's records of the episodes.
            env_group: The episodes.

        Raises:
            SessionLost: Such an episode was lost when it was finished.
        """
        left = await asyncio.gather(*(env.finish() for env in env_group))
        self._rollouts = [env.rollouts(trajectory) for env, trajectory in zip(env_group, trajectory_group, strict=True)]
        return [(reward, {}) for reward in left]

    async def cleanup(self) -> None:
        """Close the sessions of all episodes that it has made."""
        made, self._made = self._made, []
        for outcome in await asyncio.gather(*(env.close() for env in made), return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("a session could not be closed: %s: %s", type(outcome).__name__, outcome)

    def logging_tags(self) -> list[str]:
        """Return the name of the environment, under which the cookbook logs metrics."""
        return [self.env if isinstance(self.env, str) else self.env.name]


def _plain_call(call: Any) -> dict[str, Any]:
    """Return a tool call of a renderer as chat completions have it."""
    if isinstance(call, Mapping):
        return dict(call)
    function = call.function
    return {
        "type": "function",
        "id": getattr(call, "id", None),
        "function": {"name": function.name, "arguments": function.arguments},
    }


def _logprobs(transition: Any) -> tuple[float, ...] | None:
    found = transition.ac.maybe_logprobs
    known = None if found is None else tuple(map(float, found))
    return None if known is None or any(map(math.isnan, known)) else known

"""`ErrataAgentLoop`: VeRL's rollouts in any environment of a server, many side by side in each worker process.

The sessions of a process share one multiplexed connection. Token ids are kept as they were sampled, by VeRL's
Continuous Token. An infrastructure failure is raised: VeRL drops that rollout, and keeps its siblings.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register

from errata_protocol.errors import ServiceError, SessionLost

from ...episodes.awaited import AwaitedRunner
from ...episodes.conversation import Conversation, ConversationLimits, Heard, StudentTurn, converse
from ...episodes.labels import episode_labels
from ...episodes.served import Connect, check_served, chosen_tools, served_environment, viewer_of
from ...episodes.tools import PlayedEnvironment, schema_of
from .options import EpisodeOptions, options_of
from .records import HANDED_OVER, handed_over
from .tool_calls import TurnParser, tool_parser_of

ERRATA = "errata"
"""Name of the agent loop: ``actor_rollout_ref.rollout.agent.default_agent_loop``, or ``agent_name`` of a row."""


@dataclass(frozen=True, slots=True)
class Played:
    """What the rollouts of a process share.

    Attributes:
        environment: Environment that is played.
        connect: Opens sessions on its server.
        tools: Names of the tools that the student may call.
        viewer: Address of the server's viewer; "" where it has none.
    """

    environment: PlayedEnvironment
    connect: Connect
    tools: tuple[str, ...]
    viewer: str = ""


class ErrataAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays a row's task in the environment that the configuration names; see `EpisodeOptions`.

    Its arguments are those of VeRL's `AgentLoopBase`. VeRL makes one for each rollout.

    Raises:
        ValueError: The configuration has no block ``errata``, or one that is not valid; or no parser of tool calls has
            the name of the format.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = options_of(self.config)
        self.tool_parser = tool_parser_of(self.options.tool_format, self.rollout_config, self.tokenizer)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play an episode of a row's task, and return its tokens and its reward.

        Args:
            sampling_params: VeRL's settings of the generator.
            **row: Columns of the row; ``raw_prompt`` has the messages of the prompt. VeRL's ``uid`` of the prompt and
                its ``global_steps`` become labels of the episode.

        Raises:
            SessionLost: The episode was lost by an infrastructure failure or a deadline, and does not count.
            InvalidRequest: The environment does not take the task, or the prompt is too long: an error of the data set.
            ServiceError: The server or the generator failed before the first turn.
        """
        task = self.options.task_of(row)
        played = await self.loop.run_in_executor(None, played_of, self.options)
        runner = AwaitedRunner(
            played.environment, played.connect.connected, call_s=self.options.call_s, episode_s=self.options.episode_s
        )
        runner.labels = episode_labels(
            run=(self.config.get("trainer") or {}).get("experiment_name"),
            step=row.get("global_steps"),
            group=row.get("uid"),
        )
        student = RolloutStudent(
            self, sampling_params, [schema_of(played.environment.tools[one]) for one in played.tools]
        )
        limits = ConversationLimits(
            turns=self.options.turns,
            completion_tokens=int(self.rollout_config.response_length),
            prompt_tokens=int(self.rollout_config.prompt_length),
        )
        try:
            said = await converse(student, runner, list(row["raw_prompt"]), task, tools=played.tools, limits=limits)
        finally:
            await runner.close()
        if said.reward is None:
            raise SessionLost(
                f"the rollout does not count, its episode was lost: {runner.lost}", reason=runner.record.lost_code
            )
        return self._output(said, said.reward, runner, student)

    def _output(
        self, said: Conversation, reward: float, runner: AwaitedRunner, student: RolloutStudent
    ) -> AgentLoopOutput:
        failing = sum(call.marker is not None and call.marker.severity != "warning" for call in runner.played)
        return AgentLoopOutput(
            prompt_ids=said.prompt_ids,
            response_ids=said.completion_ids,
            response_mask=said.mask,
            response_logprobs=said.logprobs,
            reward_score=reward,
            num_turns=len(said.prompt) + len(said.messages),
            metrics=AgentLoopMetrics(generate_sequences=student.generating_s, tool_calls=runner.spent_s),
            extra_fields={
                **student.versions,
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": {"score": reward, "failing_calls": failing},
                HANDED_OVER: handed_over(said, runner.record),
            },
        )

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        """Return the prompt as it is: VeRL would cut off its beginning; `converse` refuses one that is too long."""
        return prompt_ids


class RolloutStudent:
    """The student of one conversation: VeRL's rollout server, its parser of tool calls and its Continuous Token.

    Args:
        agent_loop: The agent loop.
        sampling_params: VeRL's settings of the generator.
        tools: Descriptions of the student's tools, JSON Schema.

    Attributes:
        generating_s: Time that the rollout server took, seconds.
        versions: ``min_global_steps`` and ``max_global_steps``, versions of the weights that sampled the first and the
            last turn.
    """

    def __init__(
        self, agent_loop: ErrataAgentLoop, sampling_params: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self._loop, self._tools = agent_loop, [dict(tool) for tool in tools]
        self._turns = TurnParser(agent_loop.tool_parser, agent_loop.tokenizer, tools)
        self._sampling = self._turns.stopping(sampling_params)
        self._request_id = uuid4().hex
        self._messages: list[dict[str, Any]] = []
        self._ids: list[int] = []
        self.generating_s = 0.0
        self.versions: dict[str, Any] = {}

    async def begin(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Return the tokens of the prompt; see `Student`."""
        self._messages = [dict(message) for message in messages]
        self._ids = list(await self._loop.ct_build_initial_tokens(self._messages, tools=self._tools or None))
        return list(self._ids)

    async def turn(self, room: int | None) -> StudentTurn:
        """Sample a turn; see `Student`.

        Raises:
            ServiceError: The rollout server gave up the turn.
        """
        limits = [one for one in (room, self._loop.options.turn_tokens) if one is not None]
        sampling = {**self._sampling, **({"max_tokens": min(limits)} if limits else {})}
        began = time.monotonic()
        out = await self._loop.server_manager.generate(
            request_id=self._request_id, prompt_ids=list(self._ids), sampling_params=sampling
        )
        self.generating_s += time.monotonic() - began
        if out.stop_reason == "aborted":
            raise ServiceError("the rollout server aborted a turn, and the rollout does not count")
        self._note_versions(out.extra_fields)
        ids = list(out.token_ids)
        merged, _, _ = await self._loop.ct_merge_assistant_token(self._ids, ids, [])
        self._ids = list(merged.token_ids)
        message = await self._turns.message(ids)
        self._messages.append(message)
        is_full = bool(limits) and len(ids) >= min(limits)
        cut = is_full and ids[-1] not in self._turns.ends
        return StudentTurn(ids, message, list(out.log_probs) if out.log_probs else None, cut)

    async def hear(self, messages: Sequence[Mapping[str, Any]]) -> Heard:
        """Return the tokens of tool results; see `Student`."""
        updated = [*self._messages, *(dict(message) for message in messages)]
        merged, _, _ = await self._loop.ct_merge_context_msg(
            self._messages, updated, self._ids, [], tools=self._tools or None
        )
        kept = len(self._ids) - merged.removed_prefix_token_count
        self._messages, self._ids = updated, list(merged.token_ids)
        return Heard(self._ids[kept:], merged.removed_prefix_token_count)

    def _note_versions(self, fields: Mapping[str, Any]) -> None:
        version = fields.get("global_steps")
        self.versions.setdefault("min_global_steps", fields.get("min_global_steps", version))
        self.versions["max_global_steps"] = fields.get("max_global_steps", version)


_SHARED: dict[str, Played] = {}
_GUARD = threading.Lock()


def played_of(options: EpisodeOptions) -> Played:
    """Return what the rollouts of this process share; the first one asks the server.

    Raises:
        ValueError: The environment variable of the token is not set.
        InvalidRequest: The server has no such environment or tool there.
        ConnectionError: The server cannot be reached.
        ServiceError: The server failed.
    """
    headers = options.all_headers()
    key = json.dumps(
        [options.url, options.env, options.tools, headers, options.message_timeout_s, options.retries], sort_keys=True
    )
    with _GUARD:
        if key not in _SHARED:
            environment = served_environment(options.url, options.env, headers=headers)
            tools = chosen_tools(environment, options.tools)
            pairs = tuple(sorted(headers.items()))
            connect = Connect(options.url, pairs, options.message_timeout_s, options.retries)
            session = connect()
            try:
                check_served(session, environment)
                viewer = viewer_of(session, options.url)
            finally:
                session.close()
            _SHARED[key] = Played(environment, connect, tools, viewer)
        return _SHARED[key]


register(ERRATA)(ErrataAgentLoop)

"""`ErrataEnv`: episodes of a served environment as a ``gem.Env``, whose observations are the messages of a chat.

Importing this module registers it with gem as ``errata_env``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gem
from gem.envs.registration import ENV_REGISTRY

from errata_protocol.errors import InvalidRequest

from ...episodes.conversation import TurnError, error_text, read_call, tool_message, turn_errors, with_opening
from ...episodes.labels import episode_labels
from ...episodes.playing import EpisodeRunner
from ...episodes.served import Connect, chosen_tools, served_environment
from ...episodes.tasks import PROMPT, messages_of, offered_tasks
from ...episodes.tools import PlayedEnvironment, schema_of
from .calls import tool_calls

ENV_TYPE = "errata_env"
"""Name of the environment in gem's registry: ``env_type`` in ROLL's configuration."""

_UNREADABLE = (
    'The tool call could not be read: write {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>.'
)


class ErrataEnv(gem.Env):  # type: ignore[misc]
    """Plays episodes of one environment on a server. Close it at the end.

    An observation is the list of all messages so far. The reward of an episode comes with its last step. An episode
    that an infrastructure failure ends has none: ``env_reset_failed`` is set if it never began, else the step ends it
    with ``info["lost"]``, the reason. ROLL's own managers would train on it; `TrajectoryEnvManager` does not.

    ``info`` of a step has ``metrics`` (``calls``, ``errors``, ``lost``), ``errors`` (a list with ``tool``, ``t``,
    ``error_kind``, ``hint_template_key`` and ``marker`` of each failed call of the turn; ``marker`` is the whole error
    marker, None for a call that never reached the environment), ``eid``, ``stop_reason`` (``continue``, ``done``,
    ``no_call``, ``max_steps``, ``lost``, or ROLL's) and ``failure_mode``.

    Args:
        url: URL of the environment.
        env: Name of the environment on its server, or a description of it.
        tasks: Arguments of ``reset`` of each task, or the path of a file with one JSON object a line. None is what the
            server offers. Episodes with the same seed have the same task.
        split: Name of the split of the server's tasks; None for the only one that is not for evaluation.
        prompt: Messages of the prompt, or the user's text; the text of ``reset`` is appended to it.
        tools: Names of the tools that the student may call; None is all that the environment has.
        max_steps: Most turns of the student. The calls of the last one are still made.
        headers: Headers of each request, e.g. ``{"Authorization": "Bearer TOKEN"}``.
        message_timeout_s: Longest wait for an answer in seconds, reconnects included.
        retries: Most times that a request is sent again after a failure that the server rolled back.
        end_texts: Texts that may end a turn, and are no part of its message.
        run: Name of the training run, a label of the episodes; None for none.

    Attributes:
        tools: Descriptions of the student's tools, as chat templates take them.
        env_reset_failed: Whether the last `reset` began no episode.
        env_timeout: False; ROLL logs it. An answer that does not come in time loses the episode.
        env_info: Environment, task and eid of the running episode.
        training_step: Number of the training step, a label of the episodes; None before the first one.

    Raises:
        InvalidRequest: The server has no such environment, tool or split there, or the tasks cannot be read.
        ConnectionError: The server cannot be reached.
        ServiceError: The server failed, or is no OpenEnv server.
    """

    def __init__(
        self,
        url: str,
        env: str | PlayedEnvironment,
        *,
        tasks: Sequence[Mapping[str, Any]] | str | None = None,
        split: str | None = None,
        prompt: Sequence[Mapping[str, str]] | str = PROMPT,
        tools: Sequence[str] | None = None,
        max_steps: int = 16,
        headers: Mapping[str, str] | None = None,
        message_timeout_s: float = 1000.0,
        retries: int = 2,
        end_texts: Sequence[str] = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>"),
        run: str | None = None,
    ) -> None:
        super().__init__()
        if max_steps < 1:
            raise InvalidRequest(f"max_steps is {max_steps}: give at least 1")
        environment = served_environment(url, env, headers=headers)
        self._tasks = _tasks(url, environment.name, tasks, split, headers)
        self._names = chosen_tools(environment, None if tools is None else list(tools))
        connect = Connect(url, tuple(sorted((headers or {}).items())), message_timeout_s, retries)
        self._runner = EpisodeRunner(environment, connect)
        self._prompt, self._max_steps, self._end_texts = _plain(messages_of(prompt)), max_steps, tuple(end_texts)
        self.tools: list[dict[str, Any]] = [_plain(schema_of(environment.tools[name])) for name in self._names]
        self.env_reset_failed = self.env_timeout = False
        self._messages: list[dict[str, Any]] = []
        self._steps = 0
        self._run = run
        self.training_step: int | None = None
        self._random = random.Random()

    @property
    def env_info(self) -> dict[str, Any]:
        """Environment, task and eid of the running episode; ROLL logs it with the trajectory."""
        return {"environment": self._runner.environment.name, "task": self._runner.task, "eid": self._runner.eid}

    @property
    def lost(self) -> str | None:
        """Reason why the running episode does not count; None while it does."""
        return self._runner.lost

    def reset(self, seed: int | None = None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Begin an episode and return the messages of its prompt, and the student's tools in ``info``.

        If an infrastructure failure prevents it, ``env_reset_failed`` is set, and there are no messages.

        Args:
            seed: Number of the episode, which chooses its task: the next one for the next number. None is a random one.
                It is the label ``group`` of the episode.

        Raises:
            InvalidRequest: The environment does not take the task.
            CapacityReached: The server has no room for the session.
        """
        place = self._random.randrange(len(self._tasks)) if seed is None else seed % len(self._tasks)
        self._random.seed(seed)
        self._steps = 0
        # ROLL gives the episodes of a group one seed, and those of no other group of the step the same.
        self._runner.labels = episode_labels(run=self._run, step=self.training_step, group=seed)
        opening = self._runner.reset(self._tasks[place])
        self.env_reset_failed = self._runner.lost is not None
        self._messages = [] if self.env_reset_failed else with_opening(self._prompt, opening)
        failed = f"lost: {self._runner.lost}" if self.env_reset_failed else ""
        return [dict(one) for one in self._messages], {"tools": self.tools, "error_msg": failed, "failure_mode": failed}

    def step(self, action: Any) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        """Make the calls of a turn.

        Args:
            action: Text of the turn; or one of ROLL's reasons to end the episode, e.g. that the context is full.

        Returns:
            All messages so far; the episode's reward if this ended it, else 0; whether it is over; whether a limit
            ended it; ``info``.
        """
        if not isinstance(action, str):
            return self._ended(str(getattr(action, "value", action)), [], truncated=True)
        self._steps += 1
        said = self._said(action)
        calls, unread = tool_calls(said, {one["function"]["name"]: one["function"]["parameters"] for one in self.tools})
        before = len(self._runner.played)
        results = [self._answer(call) for call in calls]
        made = [{"role": "assistant", "content": said}, *results]
        made += [tool_message("tool_call", error_text(_UNREADABLE))] * unread
        self._messages += made
        errors = turn_errors(self._runner.played[before:], results, self._names, unread)
        calls_made = len(calls) + unread
        if self._runner.lost is not None:
            return self._ended("lost", errors, truncated=True, calls=calls_made)
        if self._runner.done or not (calls or unread):
            return self._ended("done" if self._runner.done else "no_call", errors, calls=calls_made)
        if self._steps >= self._max_steps:
            return self._ended("max_steps", errors, truncated=True, calls=calls_made)
        return (
            [dict(one) for one in self._messages],
            0.0,
            False,
            False,
            self._info("continue", errors, calls=calls_made),
        )

    def sample_random_action(self) -> str:
        """Return a call of a random tool with arguments of the right types, which ROLL's proxy ``random`` plays."""
        function = self._random.choice(self.tools)["function"]
        schema = function["parameters"]
        given = {name: _sample((schema.get("properties") or {}).get(name)) for name in schema.get("required") or ()}
        return f"<tool_call>\n{json.dumps({'name': function['name'], 'arguments': given})}\n</tool_call>"

    def close(self) -> None:
        """Close the session; a later `reset` opens another."""
        self._runner.close()

    def _said(self, action: str) -> str:
        """Return a turn's text without what ends it."""
        end, before = len(action), -1
        while end != before:
            before = end
            for text in self._end_texts:
                end -= len(text) if action.endswith(text, 0, end) else 0
        return action[:end]

    def _answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        read = read_call(self._names, call)
        if not isinstance(read, tuple):
            return read
        try:
            return tool_message(read[0], self._runner.call(*read))
        except TypeError as error:
            return tool_message(read[0], error_text(str(error)))

    def _ended(
        self, why: str, errors: Sequence[TurnError], *, truncated: bool = False, calls: int = 0
    ) -> tuple[list[dict[str, Any]], float, bool, bool, dict[str, Any]]:
        reward = self._runner.finish()
        info = self._info("lost" if self._runner.lost is not None else why, errors, calls=calls)
        return [dict(one) for one in self._messages], 0.0 if reward is None else reward, True, truncated, info

    def _info(self, why: str, errors: Sequence[TurnError], *, calls: int = 0) -> dict[str, Any]:
        lost = self._runner.lost
        return {
            "metrics": {"calls": calls, "errors": len(errors), "lost": float(lost is not None)},
            "metrics_agg_mode": {"calls": "sum", "errors": "sum", "lost": "last"},
            "failure_mode": "" if lost is None else f"lost: {lost}",
            "error_messages": [] if lost is None else [lost],
            "stop_reason": why,
            "test_output": "",
            "errors": [_logged(one) for one in errors],
            "eid": self._runner.eid,
            "lost": lost,
        }


def _logged(error: TurnError) -> dict[str, Any]:
    marker = None if error.played is None else error.played.marker
    return {
        "tool": error.tool,
        "t": None if error.played is None else error.played.t,
        "error_kind": error.error_kind,
        "hint_template_key": error.hint_template_key,
        "marker": None if marker is None else marker.model_dump(mode="json"),
    }


def _tasks(
    url: str,
    env: str,
    tasks: Sequence[Mapping[str, Any]] | str | None,
    split: str | None,
    headers: Mapping[str, str] | None,
) -> list[dict[str, Any]]:
    """Return the arguments of ``reset`` of each task."""
    if tasks is None:
        server = url.rstrip("/").removesuffix(f"/{env}")
        return offered_tasks(server, env, split=split, headers=headers)
    if isinstance(tasks, str):
        try:
            found = [json.loads(line) for line in Path(tasks).read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"the tasks in {tasks} cannot be read: {error}") from error
    else:
        found = _plain(tasks)
    if not found or not all(isinstance(one, dict) for one in found):
        raise InvalidRequest("tasks has to be a list of objects, the arguments of reset of each task, and not empty")
    return list(found)


def _plain(value: Any) -> Any:
    """Return a value of a configuration (omegaconf's containers) in dicts and lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value


def _sample(schema: Any) -> Any:
    """Return some value that a schema allows."""
    known = schema if isinstance(schema, Mapping) else {}
    if known.get("enum"):
        return known["enum"][0]
    if "default" in known:
        return known["default"]
    kinds = known.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    values: dict[str, Any] = {"integer": 0, "number": 0.0, "boolean": False, "array": [], "object": {}, "null": None}
    return values.get(kind, "x")


if ENV_TYPE not in ENV_REGISTRY:
    gem.register(ENV_TYPE, entry_point=f"{__name__}:ErrataEnv")

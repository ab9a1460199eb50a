"""Documents of environments, for cartridges: what an environment says in each episode, or has said in past ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from errata_client import Episodes
from errata_protocol.errors import SessionLost
from errata_protocol.replay import StateAt, observation_of

from ...episodes.playing import EpisodeRunner
from ...episodes.tools import PlayedEnvironment


def tool_manual(environment: PlayedEnvironment, tools: Sequence[str] | None = None) -> str:
    """Return the manual of an environment's tools: name, description and arguments of each.

    Args:
        environment: The environment.
        tools: Names of the tools; None for all.

    Raises:
        KeyError: The environment has no such tool.
    """
    parts = []
    for name in environment.tools if tools is None else tools:
        tool = environment.tools[name]
        lines = [f"## {tool.name}", "", tool.description]
        required = tool.parameters.get("required", ())
        for argument, schema in (tool.parameters.get("properties") or {}).items():
            kind = schema.get("type", "any") if isinstance(schema, Mapping) else "any"
            description = schema.get("description", "") if isinstance(schema, Mapping) else ""
            need = "" if argument in required else ", optional"
            lines.append(f"- {argument} ({kind}{need}): {description}".rstrip(": "))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def reset_text(runner: EpisodeRunner, task: Mapping[str, Any]) -> str:
    """Return what a student reads when an episode of a task begins.

    Args:
        runner: Runner of the environment; its episode is begun, and left open.
        task: Arguments of ``reset``.

    Raises:
        SessionLost: The episode was lost by an infrastructure failure.
        InvalidRequest: The environment does not take the task.
    """
    text = runner.reset(task)
    if runner.lost is not None:
        raise SessionLost(f"the episode of {runner.environment.name} was lost: {runner.lost}")
    return text


async def past_states(
    episodes: Episodes, environment: PlayedEnvironment, eid: str, deliveries: Sequence[int] | None = None
) -> str:
    """Return what an agent read in a past episode, by state(t).

    Args:
        episodes: Reader of the server's episodes.
        environment: Environment of the episode, which says what an agent reads of an observation.
        eid: Key of the episode.
        deliveries: Deliveries in the order of the text; None for all.

    Raises:
        ValueError: A delivery has no observation: the answer to a call of MCP's protocol itself.
        UnknownEpisode: There is no such episode.
        StateOutOfRange: The episode has no such delivery.
        ConnectionError: The server does not answer.
        DigestMismatch: The bytes do not have the digest that the server sent.
    """
    if deliveries is None:
        states = await episodes.history(eid)
    else:
        states = [await episodes.state_at(eid, t) for t in deliveries]
    return "\n\n".join(environment.agent_text(_observation(state)) for state in states) + "\n"


def _observation(state: StateAt) -> dict[str, Any]:
    payload = json.loads(state.payload) if state.kind != "mcp" else None
    if not isinstance(payload, dict) or not isinstance(payload.get("observation"), dict):
        raise ValueError(f"t={state.t} of episode {state.eid} has no observation that a student reads")
    return observation_of(payload)

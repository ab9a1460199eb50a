"""What demos of environments share: episodes of a script, and the checks that every state(t) is what was received."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from errata_client import ErrataClient
from errata_protocol.replay import observation_of
from errata_protocol.turns import Turn, turn_from

AgentText = Callable[[Any], str]


@dataclass(slots=True)
class Played:
    """One episode that was played.

    Args:
        eid: Id of the episode.
        task_id: Name of its task; empty where all episodes have the same.
        turns: Turns after the reset.
        payloads: Payloads that were received, by t.
        read: Texts that the agent read, by t.
        forked_from: Id of the parent and t of the fork; None for an episode that begins with a reset.
    """

    eid: str
    task_id: str = ""
    turns: list[Turn] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    forked_from: tuple[str, int] | None = None

    @property
    def reward(self) -> float:
        """The reward of the last turn."""
        return self.turns[-1].reward or 0.0


class Checked(Protocol):
    """What a demo found so far."""

    compared: dict[str, int]
    failures: list[str]


async def begun(client: ErrataClient[Any, Any, Any], text: str, task_id: str = "") -> Played:
    """Return the episode that a client has begun.

    Args:
        client: The client, after a reset or a fork.
        text: Text that the agent read of the first state.
        task_id: Name of the task.
    """
    assert client.eid is not None
    return Played(client.eid, task_id, payloads=[(await client.state_at(0)).payload], read=[text])


async def act(
    client: ErrataClient[Any, Any, Any], played: Played, actions: Iterable[BaseModel], agent_text: AgentText
) -> None:
    """Play actions, and keep what is received.

    Args:
        client: The client of the episode.
        played: The episode.
        actions: The actions, in their order.
        agent_text: The environment's text for agents.
    """
    for action in actions:
        step = await client.step(action)
        observation = step.observation
        assert client.t is not None
        received = (await client.history())[-1]
        played.payloads.append(received.payload)
        played.read.append(agent_text(observation))
        played.turns.append(turn_from(client.t, "step", action.model_dump(), json.loads(received.payload)))


async def compare(
    result: Checked, when: str, client: ErrataClient[Any, Any, Any], episodes: list[Played], agent_text: AgentText
) -> None:
    """Check that every state(t) is byte for byte what was received, and gives the same text for the agent.

    Args:
        result: Result of the demo, to which counts and failures are added.
        when: Words for the time of the check.
        client: A client of the server.
        episodes: The episodes to read again.
        agent_text: The environment's text for agents.
    """
    for played in episodes:
        for t, payload in enumerate(played.payloads):
            found = await client.state_at(t, eid=played.eid)
            text = agent_text(observation_of(json.loads(found.payload)))
            if found.payload != payload or text != played.read[t]:
                result.failures.append(f"state({t}) of {played.eid} differs {when}")
            result.compared[when] = result.compared.get(when, 0) + 1


def kinds_of(episodes: Iterable[Played]) -> list[str]:
    """Return the error kinds that occurred in episodes, sorted."""
    return sorted({turn.error_kind for played in episodes for turn in played.turns if turn.error_kind})

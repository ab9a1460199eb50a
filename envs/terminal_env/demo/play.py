"""Plays the script against a real server, and checks state(t), forks and rewards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errata_client import ErrataClient
from errata_protocol.errors import ServiceError
from errata_protocol.replay import observation_of
from errata_protocol.turns import Turn, turn_from
from errata_server.process import ServerProcess

from ..agent_text import agent_text
from ..models import TerminalAction, TerminalObservation
from .script import EPISODES, Episode

Client = ErrataClient[TerminalAction, TerminalObservation, Any]


@dataclass(slots=True)
class Played:
    """One episode that was played: its turns, payloads and what the agent read."""

    task_id: str
    eid: str
    turns: list[Turn] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    forked_from: tuple[str, int] | None = None

    @property
    def reward(self) -> float:
        """The reward of the last turn."""
        return self.turns[-1].reward or 0.0


@dataclass(slots=True)
class Result:
    """The outcome of the demo; ``failures`` is empty where all checks passed."""

    data_dir: Path
    episodes: list[Played] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Error kinds that occurred."""
        return sorted({turn.error_kind for e in self.episodes for turn in e.turns if turn.error_kind})

    def to_json(self) -> str:
        """Return the result as JSON, without payloads."""
        episodes = [
            {
                "task_id": e.task_id,
                "eid": e.eid,
                "reward": e.reward,
                "forked_from": e.forked_from,
                "turns": [turn.shown for turn in e.turns],
            }
            for e in self.episodes
        ]
        return json.dumps(
            {
                "ok": not self.failures,
                "failures": self.failures,
                "data_dir": str(self.data_dir),
                "kinds": self.kinds,
                "states_compared": self.compared,
                "episodes": episodes,
            }
        )


async def play(data_dir: Path, say: Callable[[str], None], show: Callable[[Played], None]) -> Result:
    """Run the whole demo.

    Args:
        data_dir: Journal and layers.
        say: Called with each line of progress.
        show: Called with each episode that was played.

    Raises:
        ServiceError: The server could not be started.
    """
    result = Result(data_dir)
    say("starting `errata serve terminal`")
    with ServerProcess("terminal", data_dir) as server:
        say(f"serving at {server.url}")
        for episode in EPISODES:
            async with _client(server.url) as client:
                played = await _play(client, episode)
                result.episodes.append(played)
                show(played)
                await _compare(result, "live", client, [played])
                await client.end_session()
        say("the episodes are over, their sessions closed: reading every state again")
        async with _client(server.url, durable=False) as reader:
            await _compare(result, "after the episode", reader, result.episodes)
        say("kill -9 of the server, and a restart on the same journal")
        server.kill()
    with ServerProcess("terminal", data_dir) as server:
        async with _client(server.url, durable=False) as reader:
            await _compare(result, "after a restart", reader, result.episodes)
            for episode, parent in zip(EPISODES, list(result.episodes), strict=True):
                if episode.fork_at is not None:
                    await _repair(result, reader, episode, parent, say, show)
    if len(result.kinds) < 8:
        result.failures.append(f"only {len(result.kinds)} kinds of mistakes were marked: {', '.join(result.kinds)}")
    return result


def _client(url: str, *, durable: bool = True) -> Client:
    return ErrataClient(
        url, action_cls=TerminalAction, observation_cls=TerminalObservation, durable=durable, message_timeout_s=120
    )


async def _play(client: Client, episode: Episode) -> Played:
    first = await client.reset(task_id=episode.task_id)
    assert client.eid is not None
    played = Played(episode.task_id, client.eid)
    played.payloads.append((await client.state_at(0)).payload)
    played.read.append(agent_text(first.observation))
    await _act(client, played, episode.actions)
    return played


async def _act(client: Client, played: Played, actions: Iterable[TerminalAction]) -> None:
    for action in actions:
        step = await client.step(action)
        observation = step.observation
        assert client.t is not None
        received = (await client.history())[-1]
        played.payloads.append(received.payload)
        played.read.append(agent_text(observation))
        played.turns.append(turn_from(client.t, "step", action.model_dump(), json.loads(received.payload)))


async def _compare(result: Result, when: str, client: Client, episodes: list[Played]) -> None:
    """Check that every state(t) is byte for byte what was received, and gives the same text for the agent."""
    for played in episodes:
        for t, payload in enumerate(played.payloads):
            found = await client.state_at(t, eid=played.eid)
            text = agent_text(observation_of(json.loads(found.payload)))
            if found.payload != payload or text != played.read[t]:
                result.failures.append(f"state({t}) of {played.eid} differs {when}")
            result.compared[when] = result.compared.get(when, 0) + 1


async def _repair(
    result: Result,
    client: Client,
    episode: Episode,
    parent: Played,
    say: Callable[[str], None],
    show: Callable[[Played], None],
) -> None:
    assert episode.fork_at is not None
    say(f"{parent.task_id} ended with reward {parent.reward:g}: forking it at t={episode.fork_at}, before the mistake")
    child = await client.fork(episode.fork_at, eid=parent.eid)
    try:
        assert child.eid is not None
        played = Played(episode.task_id, child.eid, forked_from=(parent.eid, episode.fork_at))
        start = await child.state_at(0)
        if start.payload != parent.payloads[episode.fork_at]:
            result.failures.append("the fork's first state is not its parent's")
        played.payloads.append(start.payload)
        played.read.append(parent.read[episode.fork_at])
        await _act(child, played, episode.better)
    finally:
        await child.close()
    result.episodes.append(played)
    show(played)
    if not parent.reward < played.reward == 1.0:
        result.failures.append(f"the fork scored {played.reward:g} after its parent's {parent.reward:g}")


__all__ = ["Played", "Result", "ServiceError", "Turn", "play"]

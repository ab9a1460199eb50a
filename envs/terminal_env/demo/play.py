"""Plays the script against a real server, and checks state(t), forks and rewards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errata_client import ErrataClient
from errata_environment.demos import Played, act, begun, compare, kinds_of
from errata_server.process import ServerProcess

from ..agent_text import agent_text
from ..models import TerminalAction, TerminalObservation
from .script import EPISODES, Episode

Client = ErrataClient[TerminalAction, TerminalObservation, Any]


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
        return kinds_of(self.episodes)

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
                await compare(result, "live", client, [played], agent_text)
                await client.end_session()
        say("the episodes are over, their sessions closed: reading every state again")
        async with _client(server.url, durable=False) as reader:
            await compare(result, "after the episode", reader, result.episodes, agent_text)
        say("kill -9 of the server, and a restart on the same journal")
        server.kill()
    with ServerProcess("terminal", data_dir) as server:
        async with _client(server.url, durable=False) as reader:
            await compare(result, "after a restart", reader, result.episodes, agent_text)
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
    played = await begun(client, agent_text(first.observation), episode.task_id)
    await act(client, played, episode.actions, agent_text)
    return played


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
        played = await begun(child, parent.read[episode.fork_at], episode.task_id)
        played.forked_from = (parent.eid, episode.fork_at)
        if played.payloads[0] != parent.payloads[episode.fork_at]:
            result.failures.append("the fork's first state is not its parent's")
        await act(child, played, episode.better, agent_text)
    finally:
        await child.close()
    result.episodes.append(played)
    show(played)
    if not parent.reward < played.reward == 1.0:
        result.failures.append(f"the fork scored {played.reward:g} after its parent's {parent.reward:g}")

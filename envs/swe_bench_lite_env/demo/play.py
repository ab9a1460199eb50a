"""Plays the script against a real server and checks state(t), forks and rewards on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from errata_protocol.replay import observation_of
from errata_protocol.turns import Turn, turn_from
from errata_server.process import ServerProcess

from ..agent_text import agent_text
from ..client import SweBenchLiteEnv
from ..models import SweAction
from .script import Script


@dataclass(slots=True)
class Played:
    """One episode as it went."""

    eid: str
    turns: list[Turn] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    forked_from: tuple[str, int] | None = None

    @property
    def reward(self) -> float:
        """What the grading gave."""
        return self.turns[-1].reward or 0.0


@dataclass(slots=True)
class Result:
    """What the demo showed."""

    instance_id: str
    data_dir: Path
    issue: str = ""
    episodes: list[Played] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Error kinds that occurred."""
        return sorted({turn.error_kind for e in self.episodes for turn in e.turns if turn.error_kind})

    def to_json(self) -> str:
        """Return all but the payloads."""
        episodes = [
            {"eid": e.eid, "reward": e.reward, "forked_from": e.forked_from, "turns": [turn.shown for turn in e.turns]}
            for e in self.episodes
        ]
        return json.dumps(
            {
                "ok": not self.failures,
                "failures": self.failures,
                "instance_id": self.instance_id,
                "data_dir": str(self.data_dir),
                "kinds": self.kinds,
                "states_compared": self.compared,
                "episodes": episodes,
            }
        )


async def play(
    instance_id: str,
    script: Script,
    data_dir: Path,
    say: Callable[[str], None],
    show: Callable[[Result, Played], None],
    env: Mapping[str, str] = MappingProxyType({}),
) -> Result:
    """Run the whole demo.

    Args:
        instance_id: Id of the instance to repair.
        script: Turns of the agent.
        data_dir: Directory of the journal and the layers.
        say: Function that is called with each line of progress.
        show: Function that is called with the result so far and each episode that was played.
        env: Environment variables of the server.

    Raises:
        ServiceError: The server could not be started.
    """
    result = Result(instance_id, data_dir)
    say("starting `errata serve swe_bench_lite`")
    with ServerProcess("swe_bench_lite", data_dir, env=env) as server:
        say(f"serving at {server.url}; {instance_id} begins")
        async with SweBenchLiteEnv(server.url, durable=True) as client:
            first = await client.reset(instance_id=instance_id)
            result.issue = first.observation.problem_statement
            parent = await _begun(client, agent_text(first.observation))
            result.episodes.append(parent)
            await _act(client, parent, (*script.start, *script.wrong))
            show(result, parent)
            await _compare(result, "live", client, [parent])
        say("kill -9 of the server, and a restart on the same journal")
        server.kill()
    with ServerProcess("swe_bench_lite", data_dir, env=env) as server:
        async with SweBenchLiteEnv(server.url, durable=False) as reader:
            await _compare(result, "after a restart", reader, [parent])
            say(f"not resolved: forking the episode at t={script.fork_at}, before it was submitted")
            child = await reader.fork(script.fork_at, eid=parent.eid)
            try:
                repaired = await _begun(child, parent.read[script.fork_at])
                repaired.forked_from = (parent.eid, script.fork_at)
                if repaired.payloads[0] != parent.payloads[script.fork_at]:
                    result.failures.append("the fork's first state is not its parent's")
                await _act(child, repaired, script.right)
            finally:
                await child.close()
            result.episodes.append(repaired)
            show(result, repaired)
            await _compare(result, "of the fork", reader, [repaired])
    if (parent.reward, repaired.reward) != (0.0, 1.0):
        result.failures.append(f"rewards are {parent.reward:g} and {repaired.reward:g}, not 0 and 1")
    wanted = {"path_not_found", "patch_failed", "timeout"}
    if missing := wanted - set(result.kinds):
        result.failures.append(f"no turn was marked {', '.join(sorted(missing))}")
    if not any(turn.site_text.endswith(".py:1") for turn in parent.turns):
        result.failures.append("the line that was broken was not named")
    return result


async def _begun(client: SweBenchLiteEnv, text: str) -> Played:
    assert client.eid is not None
    return Played(client.eid, payloads=[(await client.state_at(0)).payload], read=[text])


async def _act(client: SweBenchLiteEnv, played: Played, actions: Iterable[SweAction]) -> None:
    for action in actions:
        step = await client.step(action)
        observation = step.observation
        assert client.t is not None
        played.payloads.append((await client.history())[-1].payload)
        played.read.append(agent_text(observation))
        played.turns.append(turn_from(client.t, "step", action.model_dump(), json.loads(played.payloads[-1])))


async def _compare(result: Result, when: str, client: SweBenchLiteEnv, episodes: list[Played]) -> None:
    """state(t) is byte for byte what was sent, and the agent's text follows from it."""
    for played in episodes:
        for t, payload in enumerate(played.payloads):
            found = await client.state_at(t, eid=played.eid)
            text = agent_text(observation_of(json.loads(found.payload)))
            if found.payload != payload or text != played.read[t]:
                result.failures.append(f"state({t}) of {played.eid} differs {when}")
            result.compared[when] = result.compared.get(when, 0) + 1

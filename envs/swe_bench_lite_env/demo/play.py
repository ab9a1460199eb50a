"""Plays the script against a real server and checks state(t), forks and rewards on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from errata_environment.demos import Played, act, begun, compare, kinds_of
from errata_server.process import ServerProcess

from ..agent_text import agent_text
from ..client import SweBenchLiteEnv
from .script import Script


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
        return kinds_of(self.episodes)

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
            parent = await begun(client, agent_text(first.observation))
            result.episodes.append(parent)
            await act(client, parent, (*script.start, *script.wrong), agent_text)
            show(result, parent)
            await compare(result, "live", client, [parent], agent_text)
        say("kill -9 of the server, and a restart on the same journal")
        server.kill()
    with ServerProcess("swe_bench_lite", data_dir, env=env) as server:
        async with SweBenchLiteEnv(server.url, durable=False) as reader:
            await compare(result, "after a restart", reader, [parent], agent_text)
            say(f"not resolved: forking the episode at t={script.fork_at}, before it was submitted")
            child = await reader.fork(script.fork_at, eid=parent.eid)
            try:
                repaired = await begun(child, parent.read[script.fork_at])
                repaired.forked_from = (parent.eid, script.fork_at)
                if repaired.payloads[0] != parent.payloads[script.fork_at]:
                    result.failures.append("the fork's first state is not its parent's")
                await act(child, repaired, script.right, agent_text)
            finally:
                await child.close()
            result.episodes.append(repaired)
            show(result, repaired)
            await compare(result, "of the fork", reader, [repaired], agent_text)
    if (parent.reward, repaired.reward) != (0.0, 1.0):
        result.failures.append(f"rewards are {parent.reward:g} and {repaired.reward:g}, not 0 and 1")
    wanted = {"path_not_found", "patch_failed", "timeout"}
    if missing := wanted - set(result.kinds):
        result.failures.append(f"no turn was marked {', '.join(sorted(missing))}")
    if not any(turn.site_text.endswith(".py:1") for turn in parent.turns):
        result.failures.append("the line that was broken was not named")
    return result

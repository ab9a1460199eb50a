"""Documents of environments: manuals, texts of resets, past states."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from errata_client import Episodes
from errata_protocol.errors import SessionLost, StateOutOfRange, UnknownEpisode
from errata_server.process import ServerProcess
from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.episodes.served import Connect
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.cartridge import past_states, reset_text, tool_manual
from tests.environments.shelf import SPEC

SHELF = of_spec(SPEC)


def test_the_manual_of_the_tools() -> None:
    manual = tool_manual(SHELF)
    for name, tool in SHELF.tools.items():
        assert f"## {name}\n\n{tool.description}\n" in manual
        for argument in tool.parameters["properties"]:
            assert f"- {argument} (" in manual
    assert "## submit" not in tool_manual(SHELF, ["read"])
    with pytest.raises(KeyError):
        tool_manual(SHELF, ["fly"])


async def test_what_an_agent_read_in_a_past_episode(server: ServerProcess) -> None:
    runner = EpisodeRunner(SHELF, Connect(server.url, (), 60.0, 0))

    def play() -> str:
        opening = reset_text(runner, {"place": "blue"})
        runner.call("read", {"path": "green"})
        runner.call("read", {"path": "blue"})
        runner.finish()
        runner.close()
        return opening

    opening = await asyncio.to_thread(play)
    assert opening.startswith("One of red, green, blue holds a word.")
    episodes = Episodes(server.url)
    assert runner.eid is not None
    whole = await past_states(episodes, SHELF, runner.eid)
    assert whole.startswith(f"{opening}\n\nno file green\n\nthe word is owl\n")
    assert await past_states(episodes, SHELF, runner.eid, [2, 0]) == f"the word is owl\n\n{opening}\n"
    with pytest.raises(UnknownEpisode):
        await past_states(episodes, SHELF, "ep_unknown")
    with pytest.raises(StateOutOfRange):
        await past_states(episodes, SHELF, runner.eid, [99])


def test_an_episode_that_is_lost_is_no_document(server: ServerProcess) -> None:
    class Lost:
        eid, t = None, None

        def reset(self, **task: object) -> object:
            raise ConnectionResetError("gone")

        def close(self) -> None:
            pass

    with pytest.raises(SessionLost, match=r"the episode of shelf was lost: .*gone"):
        reset_text(EpisodeRunner(SHELF, Lost), {})  # type: ignore[arg-type]


async def test_a_killed_server_is_no_document(tmp_path: Path) -> None:
    with ServerProcess("tests.environments.shelf:SPEC", tmp_path) as server:
        runner = EpisodeRunner(SHELF, Connect(server.url, (), 5.0, 0))
        await asyncio.to_thread(reset_text, runner, {"place": "blue"})
        assert runner.eid is not None
        server.kill()
        with pytest.raises(ConnectionError, match="failed: All connection attempts failed"):
            await past_states(Episodes(server.url), SHELF, runner.eid)
        with pytest.raises(SessionLost, match="the episode of shelf was lost"):
            await asyncio.to_thread(reset_text, runner, {"place": "blue"})
        await asyncio.to_thread(runner.close)

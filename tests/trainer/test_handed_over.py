"""What users hand to worker processes can be pickled: TRL's AsyncGRPO, for one, plays in a spawned process."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from transformers.utils import get_json_schema

from errata_client import Backoff, Connection, EnvPool, Episodes, ErrataClient, SyncErrataClient
from errata_protocol.errors import ErrataError
from errata_server.process import ServerProcess
from errata_trainer.assembly.counterfactual import CounterfactualCheck
from errata_trainer.channels import schedules
from errata_trainer.episodes.tools import of_spec, step_tool
from errata_trainer.hints import TemplateHinter
from errata_trainer.presets import preset
from errata_trainer.recipes.trl import ChannelSettings, EpisodeEnvironment, environment_factory
from errata_trainer.teachers.endpoint import Endpoint
from terminal_env import TerminalEnv
from tests.environments.shelf import SPEC, ShelfAction

pytestmark = pytest.mark.training

NOWHERE = "http://127.0.0.1:9"
SHELF = of_spec(SPEC)


class Own(environment_factory(NOWHERE, SHELF)):  # type: ignore[misc]
    """A class of a module, which is pickled by its name."""


PLAY = """
import pickle, sys
made = pickle.load(sys.stdin.buffer)
one = made()
one.reset(place="red", word="owl")
one.submit(word="owl")
print(one.get_reward(), made.__name__, hasattr(made, "read"))
one._runner.close()
"""


def test_a_spawned_process_plays_with_the_factory_that_it_was_handed(server: ServerProcess) -> None:
    made = environment_factory(server.url, SHELF, tools=["submit"], task_columns=["place", "word"])
    done = subprocess.run([sys.executable, "-c", PLAY], input=pickle.dumps(made), capture_output=True, check=True)
    assert done.stdout.decode().split() == ["1.0", "ShelfEnvironment", "False"]


@pytest.mark.parametrize("made", [environment_factory(NOWHERE, SHELF, tools=["read"]), Own, EpisodeEnvironment])
def test_a_factory_comes_back_with_its_tools(made: type[Any]) -> None:
    same = pickle.loads(pickle.dumps({"one": made, "two": made}))
    assert same["one"] is same["two"] and issubclass(same["one"], EpisodeEnvironment)
    for name, method in inspect.getmembers(made, inspect.isfunction):
        if not name.startswith("_"):
            assert (
                name in ("reset", "get_reward")
                or get_json_schema(getattr(same["one"], name)) == get_json_schema(method)
            )  # fmt: skip


def test_a_tool_of_a_servers_schema_is_handed_over() -> None:
    tool = step_tool(ShelfAction.model_json_schema())
    assert pickle.loads(pickle.dumps(tool)) == tool


HANDED: dict[str, Callable[[], Any]] = {
    "environment": lambda: SHELF,
    "client": lambda: ErrataClient(NOWHERE, headers={"a": "b"}),
    "typed client": lambda: TerminalEnv(NOWHERE),
    "blocking client": lambda: ErrataClient(NOWHERE).sync(),
    "pool": lambda: EnvPool(NOWHERE, 2),
    "blocking pool": lambda: EnvPool(NOWHERE, 2).sync(),
    "connection": lambda: Connection(NOWHERE),
    "backoff": Backoff,
    "episodes": lambda: Episodes(NOWHERE),
    "settings": ChannelSettings,
    "preset": lambda: preset("followed-hints"),
    "schedule": lambda: schedules.linear(0.0, 1.0, 10),
    "check": lambda: CounterfactualCheck("sample", rate=0.5, episodes=Episodes(NOWHERE)),
    "hinter": TemplateHinter,
    "endpoint": lambda: Endpoint("a/b"),
}


@pytest.mark.parametrize("what", HANDED)
def test_what_configures_a_run_is_handed_over(what: str) -> None:
    made = HANDED[what]()
    assert type(pickle.loads(pickle.dumps(made))) is type(made)


def test_a_client_with_a_session_is_handed_over_by_its_ticket(server: ServerProcess) -> None:
    with ErrataClient(server.url).sync() as client:
        assert isinstance(client, SyncErrataClient)
        client.reset(place="red", word="owl")
        for open_one in (client, client._async):
            with pytest.raises(TypeError, match=r"has a session.*ticket\(\).*resume"):
                pickle.dumps(open_one)
        ticket = client.ticket()
        other = pickle.loads(pickle.dumps(ErrataClient.resume(server.url, pickle.loads(pickle.dumps(ticket)))))
        assert other._mux.first_ticket == ticket
    copy = pickle.loads(pickle.dumps(client))
    with copy:
        copy.reset(place="red", word="owl")


def test_episodes_that_were_read_are_handed_over(server: ServerProcess) -> None:
    async def ask() -> None:
        episodes = Episodes(server.url)
        with pytest.raises(ErrataError):
            await episodes.episode("none")
        copy = pickle.loads(pickle.dumps(episodes))
        with pytest.raises(ErrataError):
            await copy.episode("none")
        await asyncio.gather(episodes.aclose(), copy.aclose())

    asyncio.run(ask())

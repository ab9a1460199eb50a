"""An environment that was declared deterministic and is not is found out at its first difference, wherever that is.

And the other way round: what differs only by Python's hash seed, by an address or by the order of a printed set does
not cost a session. What the journal holds stays what was sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError
from errata_server.process import ServerProcess
from errata_server.runtime.hash_seed import HashSeeds, chosen

from .conftest import connect
from .local_server import LocalServer
from .repeatable import (
    DiceEnvironment,
    DoneLiarEnvironment,
    ErrorLiarEnvironment,
    ForkedLiarEnvironment,
    IteratorEnvironment,
    MetadataLiarEnvironment,
    NoErrorLiarEnvironment,
    RewardLiarEnvironment,
    SecondInstanceLiarEnvironment,
)
from .test_reexecute import asleep, fork, given_out, served

ORDER = "tests.server.repeatable:OrderEnvironment"
UNDECLARED_ORDER = "tests.server.repeatable:UndeclaredOrderEnvironment"
ADDRESS = "tests.server.repeatable:AddressEnvironment"
NO_SEED = {"PYTHONHASHSEED": "random"}


# -- liars -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("liar", "path", "t"),
    [
        (RewardLiarEnvironment, "$.reward", 2),
        (DoneLiarEnvironment, "$.done", 2),
        (MetadataLiarEnvironment, "$.metadata.seen", 2),
        (ErrorLiarEnvironment, "$.message", 2),
        (NoErrorLiarEnvironment, "$.code", 2),
    ],
)
def test_a_liar_is_found_out_at_its_first_difference(liar: type[DiceEnvironment], path: str, t: int) -> None:
    liar.made = 1  # the first instance is number 2
    app = served(liar)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            eid = socket.ask("reset", {"seed": 1})["eid"]
            for n in (1, 2, 3):
                socket.ask("step", {"n": n})
        kept = client.get(f"/episodes/{eid}").json()["deliveries"]
        states = [client.get(f"/episodes/{eid}/states/{k}").content for k in range(kept)]
        asleep(app)
        with connect(client, f"/ws?session_id={sid}") as socket:
            lost = socket.ask("step", {"n": 1})["data"]
        assert lost["code"] == "SESSION_LOST", lost
        assert (lost["differs"]["path"], lost["differs"]["t"]) == (path, t)
        assert f"{path} " in lost["message"]
        assert [client.get(f"/episodes/{eid}/states/{k}").content for k in range(kept)] == states


def test_a_fork_on_an_instance_that_plays_another_game_is_found_out_and_its_parent_goes_on() -> None:
    SecondInstanceLiarEnvironment.made = 0
    app = served(SecondInstanceLiarEnvironment)
    with TestClient(app) as client, connect(client) as socket:
        eid = socket.ask("reset", {"seed": 1})["eid"]
        socket.ask("step", {"n": 1})
        child = fork(client, eid, 1)
        with connect(client, f"/ws?session_id={child['session_id']}") as other:
            lost = other.ask("step", {"n": 1})["data"]
        assert lost["code"] == "SESSION_LOST" and lost["differs"] == {"eid": eid, "t": 0, "path": "$.observation.text"}
        assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 2


def test_what_lies_only_after_a_fork_is_found_out_when_the_fork_is_run_again() -> None:
    app = served(ForkedLiarEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            eid = socket.ask("reset", {"seed": 1})["eid"]
            socket.ask("step", {"n": 1})
            child = fork(client, eid, 1)
        with connect(client, f"/ws?session_id={child['session_id']}") as other:
            assert other.ask("step", {"n": 1})["t"] == 1
            assert other.ask("step", {"n": 1})["t"] == 2
        asleep(app)
        with connect(client, f"/ws?session_id={child['session_id']}") as other:
            lost = other.ask("step", {"n": 1})["data"]
        assert lost["code"] == "SESSION_LOST"
        assert lost["differs"] == {"eid": child["eid"], "t": 1, "path": "$.observation.text"}


# -- hash seeds --------------------------------------------------------------------------------------------------------


async def step(client: Any, n: int = 1) -> str:
    return str((await client.step({"n": n})).observation["text"])


async def test_a_server_fixes_the_hash_seed_of_its_data_directory(tmp_path: Path) -> None:
    with ServerProcess(ORDER, tmp_path, env=NO_SEED) as server:
        client = ErrataClient[Any, Any, Any](server.url, durable=True)
        await client.reset(seed=1)
        first = await step(client)
        sid = client.session_id
        server.kill()
    with ServerProcess(ORDER, tmp_path, env=NO_SEED) as server:
        async with ErrataClient[Any, Any, Any](server.url, session_id=sid) as again:
            assert await step(again) == first
        assert has_the_seed_of(tmp_path, server)
        assert len((tmp_path / "hash_seeds.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / "hash_seed").stat().st_mode & 0o777 == 0o600
    await client.close()


def test_the_operators_word_fixes_it_too_and_is_of_all_targets(tmp_path: Path) -> None:
    targets = (UNDECLARED_ORDER, "terminal", "--deterministic")
    with ServerProcess(targets[0], tmp_path, *targets[1:], env=NO_SEED | {"ERRATA_SANDBOX": "fake"}) as server:
        told = httpx.get(f"{server.url}/capabilities").json()["environments"]
        assert len(told) == 2 and all("fork" in one["extensions"] for one in told.values()), told
        assert has_the_seed_of(tmp_path, server)


def has_the_seed_of(data_dir: Path, server: ServerProcess) -> bool:
    seed = (data_dir / "hash_seed").read_text().strip()
    environ = Path(f"/proc/{server.process.pid}/environ").read_bytes().split(b"\0")
    return f"PYTHONHASHSEED={seed}".encode() in environ


@dataclass
class Elsewhere:
    """The journal of a killed server with another hash seed than this process, and the replies that it sent."""

    data_dir: Path
    seed: str
    sids: dict[str, str]
    seen: str
    eid: str
    sent: bytes


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    data_dir = tmp_path_factory.mktemp("data")
    seed = "11" if os.environ.get("PYTHONHASHSEED") != "11" else "12"

    async def play(server: ServerProcess) -> Elsewhere:
        clients, texts = [], []
        for name in ("OrderEnvironment", "AddressEnvironment"):
            client = ErrataClient[Any, Any, Any](f"{server.url}/{name}", durable=True)
            await client.reset(seed=1)
            texts.append(await step(client))
            clients.append(client)
        order, address = clients
        sent = httpx.get(f"{server.url}/episodes/{address.eid}/states/1").content
        sids = {ORDER: str(order.session_id), ADDRESS: str(address.session_id)}
        server.kill()
        for client in clients:
            await client.close()
        return Elsewhere(data_dir, seed, sids, texts[1], str(address.eid), sent)

    with ServerProcess(ORDER, data_dir, ADDRESS, env={"PYTHONHASHSEED": seed}) as server:
        return asyncio.run(play(server))


@pytest.mark.parametrize("seeded", [True, False])
async def test_a_session_of_another_hash_seed_is_lost_and_the_message_says_which(
    seeded: bool, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    data_dir = shutil.copytree(elsewhere.data_dir, tmp_path / "data")
    advice = f"serve with PYTHONHASHSEED={elsewhere.seed}"
    if not seeded:  # as if an application under uvicorn had served it, whose seed nothing fixed
        (data_dir / "hash_seeds.jsonl").write_text(json.dumps({"since": 0.0, "seed": None, "order": 1}) + "\n")
        advice = "keeps one from now on"
    with LocalServer(ORDER, data_dir) as server:
        again = ErrataClient[Any, Any, Any](server.url, session_id=elsewhere.sids[ORDER])
        await again.connect()
        with pytest.raises(ErrataError, match="recorded under another hash seed") as caught:
            await again.step({"n": 1})
        message = caught.value.message
        assert advice in message and "--volatile" not in message
        shown = re.search(r"\$\.observation\.text from character (\d+) on was (.*) and is (.*); it was", message)
        assert shown is not None and shown[2] != shown[3] and "name" in shown[2]
        await again.close()


def test_the_seed_of_a_data_directory_is_drawn_once(tmp_path: Path) -> None:
    seed = chosen(tmp_path / "a")
    assert chosen(tmp_path / "a") == seed < 2**32
    assert chosen(tmp_path / "b") != seed  # in 2**32 cases but one
    assert [file.name for file in (tmp_path / "a").iterdir()] == ["hash_seed"]


def test_which_process_had_which_seed_is_kept_and_a_damaged_note_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "hash_seeds.jsonl"
    file.write_text(json.dumps({"since": 5.0, "seed": "3", "order": 1}) + "\n")
    seeds = HashSeeds(tmp_path, 10.0)
    seeds.keep()
    assert seeds.another(1.0) is None and seeds.another(11.0) is None
    earlier = seeds.another(7.0)
    assert earlier is not None and earlier.seed == "3"
    file.write_text("no json")
    seeds = HashSeeds(tmp_path, 10.0)
    seeds.keep()
    assert seeds.another(7.0) is None


# -- what is normalised ------------------------------------------------------------------------------------------------


async def test_an_address_and_the_order_of_a_printed_set_cost_no_session(elsewhere: Elsewhere, tmp_path: Path) -> None:
    with LocalServer(ADDRESS, shutil.copytree(elsewhere.data_dir, tmp_path / "data")) as server:
        async with ErrataClient[Any, Any, Any](server.url, session_id=elsewhere.sids[ADDRESS]) as again:
            now = await step(again)
            assert again.t == 2
        assert now != elsewhere.seen
        assert httpx.get(f"{server.url}/episodes/{elsewhere.eid}/states/1").content == elsewhere.sent


def test_a_difference_that_is_no_time_gets_no_advice_to_except_it() -> None:
    RewardLiarEnvironment.made = 1
    app = served(RewardLiarEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            socket.ask("reset", {"seed": 1})
            for n in (1, 2):
                socket.ask("step", {"n": n})
        asleep(app)
        with connect(client, f"/ws?session_id={sid}") as socket:
            message = socket.ask("step", {"n": 1})["data"]["message"]
    assert "--volatile" not in message and "errata probe" in message
    assert os.linesep not in message


# -- episodes that depend on those before ------------------------------------------------------------------------------


def test_where_an_episode_depends_on_those_before_the_whole_session_is_run_again() -> None:
    app = served(IteratorEnvironment, deterministic=True)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            first = socket.ask("reset")["eid"]
            socket.ask("step", {"n": 3})
            socket.ask("step", {"n": 500, "do": "raise"})
            second = socket.ask("reset")["eid"]
            socket.ask("step", {"n": 4})
            seen = socket.ask("step", {"n": 1})["data"]
            child, of_first = fork(client, second, 1, "a"), fork(client, first, 1, "b")
        asleep(app)
        with connect(client, f"/ws?session_id={sid}") as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 6
            third = socket.ask("reset")["data"]["observation"]["text"]
        with connect(client, f"/ws?session_id={child['session_id']}") as socket:
            assert socket.ask("step", {"n": 1})["data"] == seen
            assert socket.ask("reset")["data"]["observation"]["text"] == third
            socket.ask("step", {"n": 2})
        with connect(client, f"/ws?session_id={of_first['session_id']}") as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 4
        asleep(app)
        with connect(client, f"/ws?session_id={child['session_id']}") as socket:
            assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == 3


def test_a_liar_with_earlier_episodes_is_lost_with_what_differs_in_the_last_one() -> None:
    RewardLiarEnvironment.made = 1
    app = served(RewardLiarEnvironment)
    with TestClient(app) as client:
        with connect(client) as socket:
            sid = given_out(socket)
            for _ in range(2):
                eid = socket.ask("reset", {"seed": 1})["eid"]
                for n in (1, 2):
                    socket.ask("step", {"n": n})
        asleep(app)
        with connect(client, f"/ws?session_id={sid}") as socket:
            lost = socket.ask("step", {"n": 1})["data"]
    assert lost["code"] == "SESSION_LOST" and lost["differs"] == {"eid": eid, "t": 2, "path": "$.reward"}
    assert "1 earlier episodes" in lost["message"]

"""``GET /episodes/events``: what happens to episodes, in virtual time, over restarts, for slow readers (PROTOCOL G)."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import Connection, ErrataClient
from errata_protocol.errors import ErrataError
from errata_server.doors.event_stream import HEARTBEAT_S, PACE_S, UNWARNED_S
from errata_server.journal import MemoryJournal
from errata_server.runtime import changes as module
from errata_server.runtime.changes import KEEP_S, Changes, Reader
from errata_server.runtime.store import Store
from errata_server.serve.bundle_server import Archive, archive_app
from errata_server.settings import Settings
from errata_server.simulation import SimulatedMachine

from .booted import Booted, boot
from .environments import CountEnvironment
from .event_reader import EventReader
from .journal_rows import episode, session
from .local_server import LocalServer, serving

COUNT = "tests.server.environments:CountEnvironment"


@pytest.fixture
def machine(tmp_path: Path) -> SimulatedMachine:
    return SimulatedMachine(7, power_loss=False, index=tmp_path)


def warned(server: Booted) -> None:
    """Let the server say when it stops, as `errata serve` does."""
    server.app.state.errata.runtime.shutdown.is_announced = True


def test_what_happens_to_an_episode_is_told(machine: SimulatedMachine) -> None:
    async def play(server: Booted) -> None:
        warned(server)
        async with EventReader(server.app) as events:
            assert events.status == 200 and events.headers[b"content-type"].startswith(b"text/event-stream")
            assert events.headers[b"cache-control"] == b"no-store"
            assert await events.told_to_list() == "start"
            async with server.connect() as socket:
                eid = (await socket.act("reset"))["eid"]
                event = await events.episode()
                assert (event.eid, event.what, event.t) == (eid, ["created", "delivered"], 0)
                summary = await server.episode(eid)
                assert (event.session, event.environment) == (summary["session"], summary["environment"])
                await socket.act("step", n=2)
                event = await events.episode()
                assert (event.what, event.t, event.reward) == (["delivered"], 1, 1.0)
                await socket.act("step", do="mark")
                event = await events.episode()
                assert (event.what, event.error_kind, event.error_t) == (["delivered", "marked"], "nonzero_exit", 2)
                await socket.act("step", do="done")
                event = await events.episode()
                assert event.what == ["delivered", "ended"] and event.done
                reward = {"t": 1, "value": 0.5, "source": "me", "reward_id": "r"}
                assert (await server.http.post(f"/episodes/{eid}/rewards", json=reward)).status_code == 200
                event = await events.episode()
                assert (event.what, event.late_t, event.late_reward) == (["rewarded"], 1, 0.5)
                child = (await server.fork(eid, 1)).json()["eid"]
                event = await events.episode()
                assert (event.eid, event.what) == (child, ["created", "delivered"])
            event = await events.episode()  # the socket was closed, and its session with it
            assert (event.eid, event.what, event.status) == (eid, ["session"], "closed")
            assert (await server.http.delete(f"/episodes/{eid}")).status_code == 200
            event = await events.episode()
            assert (event.eid, event.what) == (eid, ["deleted"])

    boot(machine, CountEnvironment, play)


def test_a_session_without_a_connection_is_detached(machine: SimulatedMachine) -> None:
    async def play(server: Booted) -> None:
        warned(server)

        async def status(eid: str) -> str:
            return str((await server.episode(eid))["status"])

        async with EventReader(server.app) as events:
            assert await events.told_to_list() == "start"
            sid = await server.give_out()
            async with server.connect(sid) as socket:
                eid = (await socket.act("reset"))["eid"]
                assert (await events.episode()).what == ["created", "delivered"]
                assert await status(eid) == "open"
            event = await events.episode()
            assert (event.eid, event.what, event.status) == (eid, ["session"], "detached")
            assert await status(eid) == "detached"
            async with server.connect(sid) as socket:
                event = await events.episode()
                assert (event.eid, event.what, event.status) == (eid, ["session"], "open")
                child = (await server.fork(eid, 0)).json()["eid"]
                assert await status(child) == "detached", "nobody is attached to it"
                assert await status(eid) == "open"
            async with server.connect() as socket:  # one that ends with its socket
                await socket.act("reset")
            assert server.app.state.errata.runtime.attached.now() == set()

    boot(machine, CountEnvironment, play)


async def test_a_multiplexed_session_without_a_connection_is_detached(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as http:

            async def becomes(eid: str | None, status: str) -> None:
                async with asyncio.timeout(60.0):
                    while (found := (await http.get(f"/episodes/{eid}")).json()["status"]) != status:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)  # the server's loop is another thread's
                for name in ("open", "detached"):
                    page = (await http.get("/episodes", params={"status": name})).json()["episodes"]
                    assert [one["eid"] for one in page] == ([eid] if name == found else [])
                    sums = (await http.get("/episodes/aggregates", params={"status": name})).json()["buckets"]
                    assert sum(bucket["episodes"] for bucket in sums) == (name == found)

            async with Connection(server.url) as connection:
                client: ErrataClient[Any, Any, Any] = ErrataClient(connection=connection)
                await client.reset()
                eid, ticket = client.eid, client.ticket()
                await becomes(eid, "open")
            await becomes(eid, "detached")
            async with Connection(server.url) as connection:
                client = ErrataClient.resume(server.url, ticket, connection=connection)
                await client.connect()
                await becomes(eid, "open")
                await client.end_session()
                await becomes(eid, "closed")
                assert server.served.app.state.errata.runtime.attached.now() == set(), "its id is kept no longer"


def test_a_comment_with_the_cursor_comes_where_nothing_else_was_sent_for_15_seconds(
    machine: SimulatedMachine,
) -> None:
    async def play(server: Booted) -> None:
        warned(server)
        loop = asyncio.get_running_loop()
        async with EventReader(server.app) as events:
            began = loop.time()
            assert await events.told_to_list() == "start"
            await asyncio.sleep(3 * HEARTBEAT_S + 1)
            assert [round(at - began, 6) for at in events.comments] == [15.0, 30.0, 45.0]
            async with server.connect() as socket:
                await socket.act("reset")
                await events.episode()
                last, told = loop.time(), len(events.comments)
                await asyncio.sleep(2 * HEARTBEAT_S + 1)
            assert [round(at - last, 6) for at in events.comments[told:]] == [15.0, 30.0]
            cursor = events.cursor
        async with EventReader(server.app, cursor=cursor) as again:
            assert (await again.episode()).what == ["session"]  # its socket was closed meanwhile

    boot(machine, CountEnvironment, play)


def test_a_stream_of_one_environment_is_kept_alive_while_another_is_busy(machine: SimulatedMachine) -> None:
    async def play(server: Booted) -> None:
        warned(server)
        async with EventReader(server.app, "environment=other") as events, server.connect() as socket:
            await socket.act("reset")
            first = events.cursor
            for _ in range(60):
                await socket.act("step", n=1)
                await asyncio.sleep(1)
            assert await events.told_to_list() == "start" and events.is_silent()
            assert len(events.comments) >= 3 and events.cursor != first

    boot(machine, CountEnvironment, play)


def test_a_reader_that_comes_back_misses_nothing_and_after_a_kill_it_has_to_list(machine: SimulatedMachine) -> None:
    kept: dict[str, str | None] = {}

    async def play(server: Booted) -> None:
        warned(server)
        async with server.connect() as socket:
            async with EventReader(server.app) as events:
                await events.told_to_list()
                kept["eid"] = (await socket.act("reset"))["eid"]
                await events.episode()
            await socket.act("step", n=1)
            await socket.act("step", do="mark")
            await asyncio.sleep(KEEP_S / 2)
            async with EventReader(server.app, cursor=events.cursor) as again:
                event = await again.episode()
                assert (event.what, event.t, event.error_t) == (["delivered", "marked"], 2, 2)
                kept["cursor"] = again.cursor
                await socket.act("step", n=1)
                await server.kill()

    async def go_on(server: Booted) -> None:
        warned(server)
        query = f"cursor={kept['cursor']}"
        async with EventReader(server.app, query) as events, server.connect() as socket:
            assert await events.told_to_list() == "restart"
            assert (await server.episode(kept["eid"]))["deliveries"] in (3, 4)  # as far as it was acknowledged
            await socket.act("reset")
            while (await events.episode()).what != ["created", "delivered"]:
                pass  # the session that was killed has ended

    boot(machine, CountEnvironment, play)
    boot(machine, CountEnvironment, go_on)


def test_one_who_comes_back_after_nobody_read_for_long_has_to_list(machine: SimulatedMachine) -> None:
    async def play(server: Booted) -> None:
        warned(server)
        async with EventReader(server.app) as events:
            await events.told_to_list()
        changes = server.app.state.errata.runtime.store.changes
        assert changes.active
        await asyncio.sleep(KEEP_S + 1)
        assert not changes.active
        async with EventReader(server.app, cursor=events.cursor) as again:
            assert await again.told_to_list() == "behind"

    boot(machine, CountEnvironment, play)


def test_a_slow_reader_has_to_list_and_holds_no_more_than_one_batch(
    machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RING", 16)

    async def play(server: Booted) -> None:
        warned(server)
        async with EventReader(server.app) as slow, EventReader(server.app) as quick:
            assert await slow.told_to_list() == await quick.told_to_list() == "start"
            slow.reads.clear()
            seen = set()
            for _ in range(40):
                async with server.connect() as socket:
                    eid = (await socket.act("reset"))["eid"]
                    while (event := await quick.episode()).eid != eid:
                        pass
                    seen.add(event.eid)
            assert len(seen) == 40 and slow.blocked == 1  # one message waits, and nothing behind it
            slow.reads.set()
            first = await slow.episode()
            assert first.what == ["created", "delivered"]
            assert await slow.told_to_list() == "behind"
            async with server.connect() as socket:
                eid = (await socket.act("reset"))["eid"]
                while (await slow.episode()).eid != eid:
                    pass

    boot(machine, CountEnvironment, play)


def test_under_load_an_episode_is_told_of_once_in_a_while(machine: SimulatedMachine) -> None:
    async def play(server: Booted) -> None:
        warned(server)
        async with EventReader(server.app) as events, server.connect() as socket:
            await events.told_to_list()
            await socket.act("reset")
            told = 0
            for _ in range(2000):
                await socket.act("step", n=1)
                await asyncio.sleep(PACE_S / 50)
            await asyncio.sleep(2 * PACE_S)
            while not events.is_silent():
                event = await events.episode()
                told += 1
            assert event.t == 2000 and told <= 43

    boot(machine, CountEnvironment, play)


def test_streams_end_when_the_server_stops_and_their_places_are_given_back(machine: SimulatedMachine) -> None:
    async def play(server: Booted) -> None:
        warned(server)
        runtime = server.app.state.errata.runtime
        async with EventReader(server.app) as gone:
            assert runtime.store.changes.readers == 1
        assert runtime.store.changes.readers == 0 and not gone.ended
        async with EventReader(server.app) as idle, EventReader(server.app) as busy, server.connect() as socket:
            await idle.told_to_list(), await busy.told_to_list()
            await socket.act("reset")
            await idle.episode(), await busy.episode()
            runtime.shutdown.begin()
            assert await idle.next() == await busy.next() == ("end", None)
        assert runtime.store.changes.readers == 0

    boot(machine, CountEnvironment, play)


def test_where_nobody_says_that_the_server_stops_a_stream_is_short(machine: SimulatedMachine) -> None:
    async def play(server: Booted) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with EventReader(server.app) as events:
            await events.told_to_list()
            assert await events.next() == ("end", None)
        assert round(loop.time() - began, 6) == UNWARNED_S
        async with EventReader(server.app, cursor=events.cursor) as again, server.connect() as socket:
            await socket.act("reset")
            assert (await again.episode()).t == 0  # no list

    boot(machine, CountEnvironment, play)


def test_places_are_bounded(machine: SimulatedMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_READERS", 2)

    async def play(server: Booted) -> None:
        warned(server)
        async with EventReader(server.app), EventReader(server.app):
            async with EventReader(server.app) as refused:
                assert refused.status == 503 and json.loads(refused.received)["code"] == "OVERLOADED"
                assert refused.headers[b"retry-after"]
            text = (await server.http.get("/metrics")).text
            assert "errata_event_streams 2.0" in text
        async with EventReader(server.app) as again:
            assert again.status == 200

    boot(machine, CountEnvironment, play)


def test_a_parameter_that_it_does_not_have_and_an_unknown_episode_are_refused(machine: SimulatedMachine) -> None:
    async def play(server: Booted) -> None:
        async with EventReader(server.app, "limit=5") as events:
            assert events.status == 422
        async with EventReader(server.app, "eid=ep_none") as events:
            assert events.status == 404 and json.loads(events.received)["code"] == "UNKNOWN_EPISODE"
        assert server.app.state.errata.runtime.store.changes.readers == 0

    boot(machine, CountEnvironment, play)


def test_each_principal_is_told_of_its_own(tmp_path: Path) -> None:
    settings = Settings(token="one,two")  # type: ignore[arg-type]
    told: dict[str, list[str]] = {"one": [], "two": []}
    with LocalServer([COUNT, "tests.server.environments:CommandEnvironment"], tmp_path, settings) as server:
        done = threading.Barrier(3, timeout=60)

        def follow(token: str) -> None:
            headers = {"Authorization": f"Bearer {token}"}
            url = f"{server.url}/CountEnvironment/episodes/events?environment=CommandEnvironment"
            with httpx.stream("GET", url, headers=headers, timeout=60) as answer:
                lines = answer.iter_lines()
                while "event: list" not in next(lines):
                    pass
                done.wait()
                for line in lines:
                    if line.startswith('data: {"eid"'):
                        told[token].append(json.loads(line[6:])["eid"])
                        return

        threads = [threading.Thread(target=follow, args=[token]) for token in told]
        for thread in threads:
            thread.start()
        done.wait()
        made = {}
        for token in told:
            headers = {"Authorization": f"Bearer {token}"}
            # The other environment's come first, and stand in no stream of this one.
            with ErrataClient(f"{server.url}/CommandEnvironment", headers=headers).sync() as other:
                other.reset()
            with ErrataClient(f"{server.url}/CountEnvironment", headers=headers).sync() as client:
                client.reset()
                made[token] = client.eid
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert told == {token: [eid] for token, eid in made.items()}


class Follower:
    """Reads a stream on a thread, and says how it ended."""

    def __init__(self, url: str) -> None:
        self.begun = threading.Event()
        self.ended = ""
        self._thread = threading.Thread(target=self._follow, args=[f"{url}/episodes/events"])
        self._thread.start()

    def _follow(self, url: str) -> None:
        try:
            with httpx.stream("GET", url, timeout=60) as answer:
                for _ in answer.iter_lines():
                    self.begun.set()
            self.ended = "whole"
        except httpx.HTTPError as error:  # cut off, when the server waited no longer
            self.ended = repr(error)

    def join(self) -> str:
        self._thread.join(60)
        return self.ended


def test_a_server_stops_at_once_although_streams_are_open(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path / "data") as server:
        live = Follower(server.url)
        assert live.begun.wait(60)
        with ErrataClient(server.url).sync() as client:
            client.reset()
            (tmp_path / "b.jsonl").write_bytes(httpx.get(f"{server.url}/episodes/{client.eid}/bundle").content)
    assert live.join() == "whole"
    changes = Changes()
    with serving(archive_app(Archive([tmp_path / "b.jsonl"]), Settings(), changes=changes), changes.end) as url:
        archived = Follower(url)
        assert archived.begun.wait(60)
    assert archived.join() == "whole"


async def test_a_file_of_episodes_has_a_stream_on_which_nothing_happens(tmp_path: Path) -> None:
    with LocalServer(COUNT, tmp_path / "data") as server:
        with ErrataClient(server.url).sync() as client:
            client.reset()
            eid = client.eid
        (tmp_path / "b.jsonl").write_bytes(httpx.get(f"{server.url}/episodes/{eid}/bundle").content)
    app = archive_app(Archive([tmp_path / "b.jsonl"]), Settings())
    for query in ("", f"eid={eid}"):
        async with EventReader(app, query) as events:
            assert await events.told_to_list() == "start"
    async with EventReader(app, "eid=ep_none") as events:
        assert events.status == 404


async def test_a_commit_whose_caller_has_gone_is_told_of(tmp_path: Path) -> None:
    class Slow(MemoryJournal):
        waiting: list[Callable[[], None]]

        def submit(self, records: Any, settled: Any, loop: Any = None) -> None:
            self.waiting.append(lambda: super(Slow, self).submit(records, settled, loop))

    journal = Slow()
    journal.waiting = []
    changes = Changes()
    store = Store(None, floor_bytes=0, wait_s=0, changes=changes)
    store.open(journal, None)
    commit = asyncio.ensure_future(store.commit(session(), episode("e1")))
    await asyncio.sleep(0)
    reader = Reader(None, None, None, lambda: None)
    changes.open(reader, None)  # begins while the commit is on its way
    commit.cancel()
    journal.waiting.pop()()
    assert [event["eid"] for _, event in changes.take(reader)[0]] == ["e1"]
    refused: list[ErrataError | None] = []
    store.submit([episode("e1")], lambda _, error: refused.append(error))
    journal.waiting.pop()()
    assert refused[0] is not None and changes.take(reader)[0] == []
    changes.close(reader)
    store.close()

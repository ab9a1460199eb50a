"""The server's side of the broker's socket: what it waits for, and what it never does twice."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_protocol.errors import SandboxUnavailable
from errata_sandboxd.service import Service
from errata_server.sandbox.docker import tree_map
from errata_server.sandbox.docker.backend import DockerBackend
from errata_server.sandbox.docker.broker import Broker, BrokerRefused
from errata_server.sandbox.docker.tree_map import GONE, TreeMap

from .fake_engine import FakeEngine

Serve = Callable[..., Service]
BUSY = b'{"error": {"code": "busy", "message": "try again"}}\n'


@contextlib.asynccontextmanager
async def scripted(path: Path, *answers: bytes) -> AsyncIterator[list[dict[str, Any]]]:
    """Answer one connection after the other with these bytes and close it; the last for ever. Yields the requests."""
    asked: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(json.loads(await reader.readline()))
        writer.write(answers[min(len(asked), len(answers)) - 1])
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, path)
    yield asked
    server.close()
    await server.wait_closed()


async def run(broker: Broker, container: str, text: bytes) -> bytes:
    """Run a program that prints its input."""
    output = bytearray()
    ended = await broker.exec(
        container, ["cat"], text, lambda _, data: output.extend(data), timeout_s=60.0, output_bytes=1024**2
    )
    assert ended == ("exit", 0)
    return bytes(output)


async def test_a_request_waits_for_a_broker_that_starts(serve: Serve, place: Path, engine: FakeEngine) -> None:
    broker = Broker(place / "later", wait_s=600.0)
    mine = engine.add_container("later")
    waiting = [asyncio.ensure_future(run(broker, mine, b"%d" % number)) for number in range(12)]
    while broker.trouble is None:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)
    assert "no broker answers" in broker.trouble and not any(one.done() for one in waiting)
    await asyncio.to_thread(serve, "later")
    assert await asyncio.gather(*waiting) == [b"%d" % number for number in range(12)]
    assert broker.trouble is None


async def test_who_does_not_wait_is_told_what_to_start(place: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="start `errata sandboxd`"):
        await Broker(place / "nobody", wait_s=0.0).call("ping")
    broker = Broker(place / "nobody", wait_s=0.2)
    with pytest.raises(SandboxUnavailable, match="start `errata sandboxd`"):
        await run(broker, "0" * 64, b"")
    assert broker.trouble is not None


async def test_every_step_of_twelve_sessions_goes_on_when_the_broker_is_restarted(
    serve: Serve, place: Path, engine: FakeEngine
) -> None:
    broker = Broker(place / "owner", wait_s=600.0)
    running = await asyncio.to_thread(serve, "owner")
    mine = [engine.add_container("owner") for _ in range(12)]
    steps, ended = [0] * 12, asyncio.Event()

    async def session(number: int) -> None:
        while not ended.is_set():
            text = b"%d-%d" % (number, steps[number])
            assert await run(broker, mine[number], text) == text
            await broker.call("inspect", container=mine[number], size=True)
            steps[number] += 1

    sessions = [asyncio.ensure_future(session(number)) for number in range(12)]
    for _ in range(3):
        before = list(steps)
        await asyncio.to_thread(running.end, 60.0)
        running = await asyncio.to_thread(serve, "owner")
        while not all(now > then + 1 for now, then in zip(steps, before, strict=True)):
            await asyncio.sleep(0.01)
            assert not any(one.done() for one in sessions), "none failed"
    ended.set()
    await asyncio.gather(*sessions)
    started = sum("/exec" in target and target.endswith("/start") for target in engine.asked)
    assert started == sum(steps), "each program ran once"


async def test_a_busy_broker_is_asked_again(place: Path) -> None:
    async with scripted(place / "busy", BUSY, BUSY, b'{"ok": {"ended": "exit", "exit": 0}}\n') as asked:
        assert await run(Broker(place / "busy"), "0" * 64, b"x") == b""
        assert [one["do"] for one in asked] == ["exec"] * 3
    async with scripted(place / "busier", BUSY) as asked:
        with pytest.raises(BrokerRefused) as caught:
            await Broker(place / "busier", wait_s=0.2).call("ping")
        assert caught.value.why == "busy" and len(asked) > 1


async def test_a_program_is_not_run_again_when_its_connection_is_lost(place: Path) -> None:
    async with scripted(place / "cut", b"") as asked:
        with pytest.raises(BrokerRefused) as caught:
            await run(Broker(place / "cut"), "0" * 64, b"x")
        assert caught.value.why == "engine_away" and len(asked) == 1


@pytest.mark.parametrize("verb", ["ping", "list", "inspect", "start", "restart", "remove", "commit", "create"])
async def test_other_requests_are_made_again(place: Path, verb: str) -> None:
    async with scripted(place / "cut", b"", b'{"ok"', b'{"ok": {"yes": 1}}\n') as asked:
        assert await Broker(place / "cut").call(verb) == {"yes": 1}
        assert [one["do"] for one in asked] == [verb] * 3


async def test_a_copy_is_made_again_until_it_has_begun(place: Path) -> None:
    got: list[bytes] = []
    data, ok = b'{"data": "eA=="}\n', b'{"ok": {}}\n'
    async with scripted(place / "first", b"", data + ok) as asked:
        await Broker(place / "first").copy_out("0" * 64, "/x", lambda _, piece: got.append(piece))
        assert got == [b"x"] and len(asked) == 2
    async with scripted(place / "second", data) as asked:
        with pytest.raises(BrokerRefused):
            await Broker(place / "second").copy_out("0" * 64, "/x", lambda _, piece: got.append(piece))
        assert got == [b"x", b"x"] and len(asked) == 1
    async with scripted(place / "full", data + BUSY, data + ok) as asked:
        with pytest.raises(BrokerRefused) as caught:
            await Broker(place / "full").copy_out("0" * 64, "/x", lambda _, piece: got.append(piece))
        assert caught.value.why == "engine_failed" and got == [b"x"] * 3 and len(asked) == 1


async def test_other_errors_are_not_waited_for(place: Path) -> None:
    async with scripted(place / "no", b'{"error": {"code": "engine_failed", "message": "no"}}\n') as asked:
        with pytest.raises(BrokerRefused, match="no"):
            await Broker(place / "no").call("ping")
        assert len(asked) == 1


async def test_a_base_container_that_could_not_be_made_is_made_later(
    serve: Serve, place: Path, engine: FakeEngine, tmp_path: Path
) -> None:
    engine.add_image("errata/base:default")
    running = await asyncio.to_thread(serve, "owner")
    backend = DockerBackend(tmp_path, place / "owner", spare=0, wait_s=0.0)
    await backend.start()
    image = engine.images[0]["Id"]
    await asyncio.to_thread(running.end, 60.0)
    with pytest.raises(SandboxUnavailable):
        await backend._base_container(image)
    await asyncio.to_thread(serve, "owner")
    assert await backend._base_container(image) in engine.containers
    await backend.close()


@pytest.mark.parametrize("outdated", [True, False])
async def test_an_image_that_shows_packages_for_gradings_is_named_once(
    serve: Serve, place: Path, engine: FakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture, outdated: bool
) -> None:
    engine.add_image("errata/base:default")
    await asyncio.to_thread(serve, "owner")
    files: dict[str, bytes | None] = {"/home/agent": None}
    if outdated:
        files |= {"/usr/lib/errata-verifier": None, "/usr/lib/errata-verifier/pytest.py": b""}
    engine.archive = lambda container, path: archive_of(files, path)
    backend = DockerBackend(tmp_path, place / "owner", spare=0, wait_s=0.0)
    for _ in range(2):
        await (await backend.open()).destroy()
    warned = [record.message for record in caplog.records if "/usr/lib/errata-verifier" in record.message]
    assert len(warned) == (1 if outdated else 0)
    assert all("errata/base:default" in message for message in warned)
    await backend.close()


def archive_of(files: dict[str, bytes | None], path: str) -> Iterator[bytes] | None:
    """Return the archive of a path as an engine makes it; None content is a directory."""
    name = path.rpartition("/")[2]
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as out:
        for one, content in sorted(files.items()):
            if one != path and not one.startswith(path + "/"):
                continue
            member = tarfile.TarInfo(name + one.removeprefix(path))
            member.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            member.size = len(content or b"")
            out.addfile(member, io.BytesIO(content or b""))
    return iter([written.getvalue()]) if path in files else None


@pytest.mark.parametrize("at_once_mib", [1, 64])
async def test_changes_that_are_more_than_the_broker_copies_are_read_one_by_one(
    serve: Serve, place: Path, engine: FakeEngine, at_once_mib: int
) -> None:
    mib = 1024**2
    await asyncio.to_thread(serve, "owner", copy_out_bytes=at_once_mib * mib)
    mine, base = engine.add_container("owner"), engine.add_container("owner")
    old: dict[str, bytes | None] = {"/w": None, "/w/kept": b"", "/w/gone": None}
    now: dict[str, bytes | None] = {"/w": None, "/w/kept": b"", "/w/d": None}
    now |= {f"/w/d/{n}": bytes([n]) * (mib * 2 // 3) for n in range(4)}
    engine.archive = lambda container, path: archive_of(now if container == mine else old, path)
    changes = {"/w": 0, "/w/gone": 2, **{path: 1 for path in now if path.startswith("/w/d")}}
    engine.changes = json.dumps([{"Path": path, "Kind": kind} for path, kind in changes.items()]).encode()

    async def base_container() -> str:
        return base

    found = await TreeMap(Broker(place / "owner"), base_container, {}).read(mine, {})
    assert set(found) == {"/w/d", *(f"/w/d/{n}" for n in range(4)), "/w/gone"}
    assert found["/w/gone"] == GONE
    copies = [target for target in engine.asked if "/archive" in target and mine in target]
    assert any("path=%2Fw%2Fd%2F3" in target for target in copies) == (at_once_mib == 1)
    assert tree_map.digest(found) == "sha256:975411620ff2489651b62f33a920238e4d6535bc940910cd0874f9ab76a201ac", (
        "either way"
    )

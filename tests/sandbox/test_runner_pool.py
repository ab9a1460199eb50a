"""What the pool of runners does when descriptors run out, and when its thread meets what it cannot handle."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import Any

import pytest

from errata_protocol.errors import SandboxFailed
from errata_server.sandbox.namespace import runner_pool
from errata_server.sandbox.namespace.backend import NamespaceBackend

from ..descriptors import free_descriptors, open_descriptors
from ..server.conftest import until

pytestmark = pytest.mark.sandbox


async def nothing_ready(backend: NamespaceBackend) -> None:
    """Use up every runner that is ready, so that the next one has to be made."""
    backend.runners._spare = 0
    async with asyncio.timeout(60):
        while backend.runners._ready or backend.runners._making:
            (await backend.runners.take()).close()
        await until(lambda: not backend.runners._alive)


@pytest.mark.parametrize("left", [0, 1])
async def test_runners_whose_descriptors_did_not_arrive_are_ended_and_made_again(
    namespace_backend: NamespaceBackend, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    runners = namespace_backend.runners
    box = await namespace_backend.open()
    await nothing_ready(namespace_backend)
    before = len(open_descriptors())
    taking = asyncio.ensure_future(runners.take())
    with free_descriptors(left):
        await until(lambda: runners.trouble is not None)
        assert "no sandbox process can be made: Too many open files" in runners.trouble
        assert "ulimit -n" in runners.trouble
        assert namespace_backend.trouble == runners.trouble
        assert not taking.done()
    async with asyncio.timeout(60):
        runner = await taking
    assert runner.alive
    assert runners.trouble is None and namespace_backend.trouble is None
    runner.close()
    assert (await box.run("echo on")).stdout == "on\n"
    await until(lambda: not runners._alive)
    assert len(open_descriptors()) == before  # nothing of what came in part is left open
    assert [r.levelname for r in caplog.records if r.name == "errata.sandbox"] == ["ERROR", "WARNING"]


async def test_callers_are_refused_when_no_runner_can_be_made_for_long(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_pool, "_RETRY_FOR_S", 0.5)
    await nothing_ready(namespace_backend)
    taking = asyncio.ensure_future(namespace_backend.runners.take())
    with free_descriptors(0), pytest.raises(SandboxFailed, match="Too many open files: the limit of open files"):
        await asyncio.wait_for(taking, 60)
    assert (await namespace_backend.runners.take()).alive


async def test_a_message_that_cannot_be_handled_costs_the_runners_and_not_the_sandboxes(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runners = namespace_backend.runners
    box = await namespace_backend.open()
    assert (await box.run("echo 1 > f")).exit_code == 0
    obey, launcher = runners._handle, runners._socket

    def once(message: tuple[Any, ...], fds: list[int], whole: bool) -> None:
        monkeypatch.setattr(runners, "_handle", obey)
        for fd in fds:
            os.close(fd)
        raise ValueError("not enough values to unpack (expected 2, got 1)")

    monkeypatch.setattr(runners, "_handle", once)
    (await runners.take()).close()
    async with asyncio.timeout(60):
        await until(lambda: runners._socket is not launcher)  # a command that was running then is lost
        for n in range(3):
            assert (await box.run("cat f")).stdout == "1\n", n
    assert runners.trouble is None
    [record] = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "could not be handled" in record.getMessage() and record.exc_info is not None


async def test_a_launcher_that_cannot_be_started_is_an_error_that_names_the_limit(
    namespace_backend: NamespaceBackend,
) -> None:
    runners = namespace_backend.runners
    runners.close()
    before = len(open_descriptors())
    with free_descriptors(0), pytest.raises(SandboxFailed, match=r"launcher of sandboxes cannot be started: .*ulimit"):
        runners.start()
    assert len(open_descriptors()) <= before
    async with asyncio.timeout(60):
        assert (await runners.take()).alive


def test_descriptors_that_were_cut_off_are_reported(data_dir: object) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        read_end, write_end = os.pipe()
        socket.send_fds(theirs, [runner_pool.marshal.dumps(("runner", 1, "s0"))], [read_end, write_end])
        os.close(read_end)
        os.close(write_end)
        with free_descriptors(1):
            message, fds, whole = runner_pool._receive(ours)
        assert message == ("runner", 1, "s0")
        assert len(fds) == 1 and not whole
        os.close(fds[0])
        theirs.close()
        assert runner_pool._receive(ours) == (None, [], True)


async def test_a_watch_that_fails_ends_its_command(
    namespace_backend: NamespaceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from errata_server.sandbox.namespace.disk_watch import DiskWatch

    async def broken(self: DiskWatch) -> str:
        raise RuntimeError("can't start new thread")

    box = await namespace_backend.open()
    monkeypatch.setattr(DiskWatch, "run", broken)
    with pytest.raises(SandboxFailed, match="could not be watched: can't start new thread"):
        await asyncio.wait_for(box.run("sleep 60"), 60)
    monkeypatch.undo()
    assert (await box.run("echo on")).stdout == "on\n"

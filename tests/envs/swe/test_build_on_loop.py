"""A server that builds an instance goes on answering its other sessions."""

from __future__ import annotations

import asyncio
import os
import select
from pathlib import Path
from typing import Any

from errata_server.sandbox.base import CommandResult
from errata_server.sandbox.fake.backend import FakeBackend, FakeSandbox
from swe_bench_lite_env.server.prepare.build import Builder, _Job
from swe_bench_lite_env.server.prepare.index import PackageIndex, Sources
from swe_bench_lite_env.server.prepare.store import Store

from .preparing import instance, recipe

PIECES = {"piece-0000": b"a" * 2**20, "piece-0001": b"b" * 2**20}
"""Each is longer than a pipe holds, so that its writer waits for a reader."""


class Divided(FakeSandbox):
    """Has an archive in pieces."""

    async def run(self, command: str, **options: Any) -> CommandResult:
        return CommandResult(0, "\n".join(PIECES), "")

    async def read_file(self, path: str, *, max_bytes: int = 0) -> bytes:
        return PIECES[Path(path).name]


async def test_an_archive_is_written_beside_the_event_loop(tmp_path: Path) -> None:
    """The archive's file is a pipe. What reads it begins when the loop has answered while a write is under way."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loop = asyncio.get_running_loop()

    async def answer() -> bool:
        return True

    def read() -> tuple[bool, bytes]:
        with pipe.open("rb", buffering=0) as file:
            select.select([file], [], [])
            answered = asyncio.run_coroutine_threadsafe(answer(), loop)
            try:
                in_time = answered.result(60.0)
            except TimeoutError:
                in_time = False
            return in_time, file.readall()

    backend = FakeBackend()
    sandbox = await backend.open()
    sandbox.__class__ = Divided
    builder = Builder(Store(tmp_path / "store"), backend, index=PackageIndex(tmp_path, Sources(())))
    job = _Job(builder, instance(), recipe(tmp_path), "key", tmp_path, None)
    reading = loop.run_in_executor(None, read)
    await job._carry(sandbox, "/tmp/build/out/own.tar", pipe)
    answered, content = await reading
    assert content == b"".join(PIECES.values())
    assert answered, "all sessions waited for the file"

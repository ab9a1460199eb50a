"""Teachers on two hosts, here two loops of workers on loopback: each has a process, and they vote together."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from monarch.actor import attach_to_workers

from errata_trainer.recipes.monarch import ReplayTeachers
from errata_trainer.teachers import Budget
from tests.machine_speed import SLOWDOWN

from .scripted import MakeHeld, prompt

LOOP = "from monarch.actor import run_worker_loop_forever as run; run(ca='trust_all_connections', address={!r})"


@pytest.fixture
def hosts() -> Iterator[tuple[Any, list[int]]]:
    """Two hosts and the processes of their loops."""
    with ExitStack() as held:  # both at the same time, so that they differ
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        addresses = [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    loops = [subprocess.Popen([sys.executable, "-c", LOOP.format(address)]) for address in addresses]
    try:
        yield attach_to_workers(ca="trust_all_connections", workers=list(addresses)), [loop.pid for loop in loops]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait(60)


def parent(pid: int) -> int:
    """Return the process that started a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_teachers_of_two_hosts_vote_together(hosts: tuple[Any, list[int]], tmp_path: Path) -> None:
    mesh, loops = hosts
    make = MakeHeld(tmp_path)

    def begin() -> ReplayTeachers:
        return ReplayTeachers(make, actors=2, deadline_s=60.0 * SLOWDOWN, start_s=300.0, hosts=mesh)

    replay = await asyncio.to_thread(begin)
    try:
        budget = Budget(tokens=1000, processes=1)
        asking = [asyncio.create_task(replay.teachers[0].ask(prompt(f"held {n}"), budget)) for n in range(8)]
        async with asyncio.timeout(240):
            while len(make.notes("held")) < 8:  # noqa: ASYNC110  of other processes
                await asyncio.sleep(0.02)
        (tmp_path / "go").touch()
        pids = {int((await one).model) for one in asking}
        assert {parent(pid) for pid in pids} == set(loops), "one process on each host, and both were asked"
        assert (budget.spent.tokens, budget.reserved.tokens) == (24, 0)
    finally:
        await asyncio.to_thread(replay.close)

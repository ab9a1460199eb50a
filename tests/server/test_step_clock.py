"""The deadline of a step: stopped while its environment waits for a slot, longer where a tool has one of its own."""

from __future__ import annotations

import asyncio
import contextvars
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from errata_client import EnvPool, ErrataClient
from errata_protocol.capabilities import Capabilities
from errata_protocol.errors import StateOutOfRange, StepTimeout
from errata_server.concurrency.calls import CallAbandoned
from errata_server.concurrency.deadlines import Deadlines
from errata_server.concurrency.places import TaskCall
from errata_server.concurrency.slots import Slots
from errata_server.concurrency.step_clock import RECHECK_S, StepClock
from errata_server.process import ServerProcess
from errata_server.settings import Settings
from errata_server.simulation.loop import SimulatedLoop, simulated
from tests.machine_speed import SLOWDOWN

from . import queueing
from .conftest import until
from .local_server import LocalServer
from .queueing import ASYNC, spec


@pytest.fixture(autouse=True)
def slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes time takes as much more of it as deadlines have here."""
    monkeypatch.setattr(queueing, "GRADING_S", 0.02 * SLOWDOWN)
    monkeypatch.setattr(queueing, "HANG_S", 3.0 * SLOWDOWN)


def serving(name: str, data_dir: Path, **settings: Any) -> LocalServer:
    return LocalServer(target(name), data_dir, Settings(fsync=False, **settings))


def target(name: str) -> str:
    return f"tests.server.queueing:{name}"


# -- through a server --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["UNANNOUNCED", "UNANNOUNCED_BLOCKING", "UNANNOUNCED_SAVED"])
async def test_queued_submits_all_get_their_verdict(name: str, tmp_path: Path) -> None:
    """All wait for longer than the step deadline, as the slots are held; none works for a notable part of it."""
    deadline_s = 2 * SLOWDOWN
    with serving(name, tmp_path, step_timeout_s=deadline_s) as server:
        async with EnvPool(server.url, 20, message_timeout_s=120.0) as pool:
            await pool.reset_batch()
            async with queueing.held():
                submits = asyncio.create_task(pool.step_batch([{"tool": "submit"}] * 20))
                await until(lambda: queueing.waiting() == 20)
                await asyncio.sleep(1.5 * deadline_s)
                assert not submits.done()
            results = await submits
    assert [result.reward for result in results] == [1.0] * 20
    assert [result.observation["graded"] for result in results] == [1] * 20


@pytest.mark.parametrize("mux", [True, False])
async def test_a_client_waits_as_long_as_the_server_announces(
    mux: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queueing, "GRADING_S", 0.7 * SLOWDOWN)
    with serving("ASYNC", tmp_path) as server:
        async with ErrataClient(server.url, mux=mux, message_timeout_s=0.3 * SLOWDOWN) as client:
            await client.reset()
            assert (await client.capabilities()).call_timeouts_s == {"submit": 120.0}
            assert (await client.step({"tool": "submit"})).reward == 1.0
            with pytest.raises(TimeoutError):
                await client.step({"tool": "hang"})


async def test_a_pool_waits_as_long_for_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queueing, "GRADING_S", 0.7 * SLOWDOWN)
    with serving("ASYNC", tmp_path) as server:
        async with EnvPool(server.url, 3, message_timeout_s=0.3 * SLOWDOWN) as pool:
            await pool.reset_batch()
            assert [result.reward for result in await pool.step_batch([{"tool": "submit"}] * 3)] == [1.0] * 3
            (late,) = await pool.step_batch(
                [{"tool": "submit"}], indices=[0], timeout_s=0.1 * SLOWDOWN, return_exceptions=True
            )
            assert isinstance(late, TimeoutError)


async def test_the_announced_deadline_is_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs while it is graded, for longer than other steps may take."""
    monkeypatch.setattr(queueing, "GRADING_S", 1.5 * SLOWDOWN)
    with serving("ASYNC", tmp_path, step_timeout_s=SLOWDOWN) as server:
        async with ErrataClient(server.url) as client:
            await client.reset()
            assert (await client.step({"tool": "submit"})).reward == 1.0
    monkeypatch.setattr(queueing, "GRADING_S", 3600.0)
    with serving("UNANNOUNCED", tmp_path / "2", step_timeout_s=SLOWDOWN) as server:
        async with ErrataClient(server.url) as client:
            await client.reset()
            with pytest.raises(StepTimeout):
                await client.step({"tool": "submit"})


@pytest.mark.parametrize("name", ["ASYNC", "BLOCKING", "SAVED"])
async def test_a_step_that_hangs_after_its_wait_is_given_up(name: str, tmp_path: Path) -> None:
    with serving(name, tmp_path, step_timeout_s=SLOWDOWN) as server:
        async with ErrataClient(server.url) as client:
            await client.reset()
            with pytest.raises(StepTimeout, match=f"ran longer than the server's {SLOWDOWN:g} s"):
                await client.step({"tool": "hang"})


async def test_a_server_killed_while_it_grades_answers_once_after_its_restart(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    env = {"TEST_NOTES": str(notes), "TEST_GRADING_S": "1.0"}
    server = ServerProcess(target("ASYNC"), tmp_path / "data", env=env)
    port = server.url.rsplit(":", 1)[1]
    async with ErrataClient(server.url, message_timeout_s=60.0) as client:
        await client.reset()
        submitting = asyncio.create_task(client.step({"tool": "submit"}))
        await until(notes.exists)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        with ServerProcess(target("ASYNC"), tmp_path / "data", "--port", port, env=env):
            verdict = await submitting
            assert (verdict.reward, verdict.observation["graded"], client.t) == (1.0, 1, 1)
            assert [reward.t for reward in await client.rewards()] in ([], [1])
            assert json.loads((await client.state_at(1)).payload)["observation"]["graded"] == 1
            with pytest.raises(StateOutOfRange):
                await client.state_at(2)
    assert notes.read_text().split() == ["begins", "begins"]


def test_an_environment_without_announcements_changes_no_capabilities() -> None:
    assert "call_timeouts_s" not in Capabilities(environment="x").model_dump(mode="json")
    told = Capabilities(environment="x", call_timeouts_s=dict(ASYNC.call_timeouts_s))
    assert told.model_dump(mode="json")["call_timeouts_s"] == {"submit": 120.0}
    assert told.step_timeout_s({"tool": "submit"}, 60.0) == 120.0
    assert told.step_timeout_s({"type": "call_tool", "tool_name": "submit"}, 60.0) == 120.0
    assert told.step_timeout_s({"tool": "submit"}, 600.0) == 600.0
    for other in ({"tool": "run"}, {"tool": ["submit"]}, {}, None, "submit"):
        assert told.step_timeout_s(other, 60.0) == 60.0
    assert spec(object).call_timeouts_s == {}  # type: ignore[arg-type]


# -- its parts ---------------------------------------------------------------------------------------------------------


class Hands:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_counts_what_it_was_stopped_for() -> None:
    hands = Hands()
    clock = StepClock(hands)
    assert clock.left_s(10.0, 4.0, 0.0) == 6.0
    with clock.stopped():
        hands.now += 3.0
        with clock.stopped():
            hands.now += 1.0
        assert clock.stopped_s() == 4.0
        assert clock.left_s(10.0, 100.0, 0.0) == RECHECK_S  # it never expires now
    hands.now += 50.0
    assert clock.stopped_s() == 4.0
    assert clock.left_s(10.0, 13.0, 0.0) == 1.0
    assert clock.left_s(10.0, 13.0, 4.0) == -3.0  # of a call that began after the stop


@pytest.mark.parametrize("timeout_s", [0.5, 60.0])  # a timer of its own, and the shared one
@simulated
async def test_a_stall_of_the_loop_moves_a_deadline_once(timeout_s: float) -> None:
    async def turns() -> str:
        for _ in range(10):
            await asyncio.sleep(0)
        return "ended"

    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    loop.call_soon(loop.pause, 1000.0)
    assert await called(turns, timeout_s) == "ended"
    loop.call_soon(loop.pause, 1000.0)
    with pytest.raises(CallAbandoned):
        await called(lambda: asyncio.sleep(3600.0), timeout_s)
    loop.call_soon(loop.pause, 1000.0)
    loop.call_later(1500.0, loop.pause, 1000.0)  # until after the moved deadline
    with pytest.raises(CallAbandoned):
        await called(lambda: asyncio.sleep(1750.0), timeout_s)


async def called(function: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
    call = TaskCall(function, (), contextvars.copy_context(), timeout_s)
    try:
        return await call
    finally:
        call.task.cancel()


async def test_a_deadline_added_by_one_that_expires_needs_no_second_timer() -> None:
    class Again:
        count = 0

        def expire(self) -> None:
            self.count += 1
            if self.count < 3:
                deadlines.add(5.0, self, -100.0)

    armed = 0

    class Counting:
        def time(self) -> float:
            return 0.0

        def call_later(self, delay_s: float, *_: object) -> asyncio.TimerHandle:
            nonlocal armed
            armed += 1
            return loop.call_later(60.0, print)

    loop = asyncio.get_running_loop()
    deadlines, again = Deadlines(Counting()), Again()  # type: ignore[arg-type]
    deadlines.add(5.0, again, -100.0)
    for expected in (1, 2, 3):
        deadlines._look()
        assert again.count == expected
        assert deadlines._timer is not None
    deadlines._timer.cancel()
    deadlines._look()
    assert deadlines._timer is None
    assert armed == 4


async def test_slots_are_given_in_order_and_come_back_from_the_cancelled() -> None:
    slots, order = Slots(1), []
    waits = [0]

    class Wait:
        def __enter__(self) -> None:
            waits[0] += 1

        def __exit__(self, *_: object) -> None:
            waits[0] -= 1

    async def use(name: int) -> None:
        async with slots.take(Wait):
            order.append(name)
            await asyncio.sleep(0)

    async with slots.take(Wait):
        assert waits == [0]
        users = [asyncio.create_task(use(name)) for name in range(5)]
        await asyncio.sleep(0)
        assert (slots.waiting, waits) == (5, [5])
        users[1].cancel()
    users[0].cancel()  # its slot is on the way
    await asyncio.gather(*users, return_exceptions=True)
    assert order == [2, 3, 4]
    assert (slots.waiting, waits) == (0, [0])
    async with slots.take(Wait):
        pass


def test_slots_serve_callers_of_several_loops() -> None:
    slots, done = Slots(1), []

    async def use(name: int) -> None:
        async with slots.take(asyncio.Lock):  # type: ignore[arg-type] # never waited in
            done.append(name)

    for name in range(3):
        asyncio.run(use(name))
    assert done == [0, 1, 2]


def test_no_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Slots(0)

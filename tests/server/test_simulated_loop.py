"""Virtual time: no real wait, one order for one seed, and no way out of it."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading

import pytest

from errata_server.simulation import Crashed, SimulatedLoop, SimulationError, run, simulated


@simulated
async def test_waits_take_no_real_time_and_the_clock_says_they_did() -> None:
    loop = asyncio.get_running_loop()
    fired: list[float] = []
    loop.call_later(600, lambda: fired.append(loop.time()))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(900):
            await asyncio.sleep(100_000)
    assert fired == [600] and loop.time() == 900  # in real time it would exceed pytest's limit


@simulated
async def test_a_cancelled_timer_does_not_move_the_clock() -> None:
    loop = asyncio.get_running_loop()
    loop.call_later(5, lambda: None).cancel()
    await asyncio.sleep(1)
    assert loop.time() == 1


def order(seed: int | None) -> list[int]:
    woken: list[int] = []

    async def wait(n: int, event: asyncio.Event) -> None:
        await event.wait()
        woken.append(n)

    async def main() -> None:
        event = asyncio.Event()
        waiting = [asyncio.create_task(wait(n, event)) for n in range(20)]
        await asyncio.sleep(0)
        event.set()
        await asyncio.gather(*waiting)

    run(main(), None if seed is None else random.Random(seed))
    return woken


def test_the_order_of_woken_tasks_is_the_seeds() -> None:
    assert order(None) == list(range(20))
    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(20))


def test_tasks_start_in_the_order_they_were_made_with_every_seed() -> None:
    async def main() -> list[int]:
        started: list[int] = []

        async def start(n: int) -> None:
            started.append(n)

        await asyncio.gather(*(start(n) for n in range(50)))
        return started

    for seed in range(20):
        assert run(main(), random.Random(seed)) == list(range(50))


def test_a_program_that_waits_for_nothing_is_told_apart_from_one_that_waits() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimulationError, match=r"is deadlocked.*main"):
        run(main())


def test_a_program_that_never_ends_is_stopped() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_later(1, again)

        again()
        await asyncio.Event().wait()

    with pytest.raises(SimulationError, match="did not end within 1000 steps"):
        run(main(), loop=SimulatedLoop(max_steps=1000))


def test_a_crash_comes_before_the_step_it_was_set_to_and_nothing_runs_after_it() -> None:
    done: list[int] = []

    async def main() -> None:
        for n in range(100):
            await asyncio.sleep(1)
            done.append(n)

    lengths = []
    for step in range(1, 60):
        done.clear()
        loop = SimulatedLoop()
        loop.crash_at = step
        with pytest.raises(Crashed):
            run(main(), loop=loop)
        lengths.append(len(done))
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] > 10
    assert set(lengths) == set(range(lengths[-1] + 1)), "between any two effects there is a step to crash at"


@simulated
async def test_a_function_for_a_thread_runs_on_this_one() -> None:
    assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(lambda: 1 / 0)


@simulated
async def test_sockets_processes_and_other_threads_are_refused() -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(SimulationError, match="network"):
        await asyncio.open_connection("localhost", 80)
    with pytest.raises(NotImplementedError):
        await asyncio.create_subprocess_exec("true")
    raised: list[BaseException] = []

    def intrude() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except SimulationError as error:
            raised.append(error)

    thread = threading.Thread(target=intrude)
    thread.start()
    thread.join()
    assert "another thread" in str(raised[0])


def test_what_a_callback_raises_is_not_lost() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(BaseExceptionGroup) as caught:
        run(main())
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


def test_importing_the_simulation_starts_no_thread() -> None:
    code = "import threading, errata_server.simulation; print(threading.active_count())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"

"""The watch on event loops finds what computes there, names it, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from typing import Any

import pytest

from errata_protocol.detect import detect

from . import loop_watch as watching
from .loop_watch import LIMIT_S, LoopWatch
from .machine_speed import SLOWDOWN

LONG = "a;" * 130_000


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine once: these tests compute for a multiple of `LIMIT_S`."""
    monkeypatch.setattr(watching, "slowdown_now", lambda: SLOWDOWN)


def compute(cpu_s: float) -> None:
    began = time.thread_time()
    while time.thread_time() - began < cpu_s:
        pass


async def test_a_callback_that_computes_in_the_product_is_found_and_named(loop_watch: LoopWatch) -> None:
    asyncio.get_running_loop().call_soon(detect, LONG, 127, "", "bash: line 1: a: command not found")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (found,) = loop_watch.take()
    assert "by <Handle detect(" in found


def of_the_product(source: str) -> dict[str, Any]:
    """Names of a module that seems to be of the server."""
    names: dict[str, Any] = {}
    exec(compile(source, f"{watching._ROOT}/server/errata_server/made.py", "exec"), names)
    return names


async def test_steps_of_a_task_count_apart(loop_watch: LoopWatch) -> None:
    source = """
async def work(detect, sleep, text):
    for _ in range(20):
        detect(text, 127, "", "bash: line 1: a: command not found")
        await sleep(0)
"""
    await of_the_product(source)["work"](detect, asyncio.sleep, "a;" * 2_000)
    assert loop_watch.take() == []


async def test_a_plain_function_counts_in_a_coroutine_of_the_product_and_not_of_a_test(loop_watch: LoopWatch) -> None:
    source = """
def compute(clock, cpu_s):
    began = clock()
    while clock() - began < cpu_s:
        pass

async def work(clock, cpu_s):
    compute(clock, cpu_s)
"""
    names = of_the_product(source)
    names["compute"](time.thread_time, 1.5 * LIMIT_S)
    await asyncio.sleep(0)
    assert loop_watch.take() == []
    await names["work"](time.thread_time, 1.5 * LIMIT_S)
    await asyncio.sleep(0)
    (found,) = loop_watch.take()
    assert found.count("compute (server/errata_server/made.py") == 1


async def test_what_a_test_or_an_import_computes_is_not_the_products(
    loop_watch: LoopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.create_task(asyncio.sleep(0))
    asyncio.get_running_loop().call_soon(compute, 1.5 * LIMIT_S)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert loop_watch.take() == []
    monkeypatch.setattr(loop_watch, "_product", (f"{watching._ROOT}/tests/",))
    asyncio.get_running_loop().call_soon(compute, 1.5 * LIMIT_S)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    (found,) = loop_watch.take()
    assert "compute (tests/test_loop_watch.py" in found


async def test_waiting_is_no_work(loop_watch: LoopWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "_product", (f"{watching._ROOT}/tests/",))
    asyncio.get_running_loop().call_soon(time.sleep, 1.5 * LIMIT_S)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert loop_watch.take() == []


async def test_no_collection_begins_while_the_watch_holds_the_interpreters_lock(
    loop_watch: LoopWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = sys._current_frames, list[bool]()
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or real())
    asyncio.get_running_loop().call_soon(compute, LIMIT_S)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert seen and not any(seen) and gc.isenabled()


async def test_a_garbage_collection_is_no_work_of_the_product(loop_watch: LoopWatch) -> None:
    source = f"""
def work(clock, collect):
    for _ in range(2):
        began = clock()
        while clock() - began < {0.3 * LIMIT_S}:
            pass
        collect()

def slow(phase, info):
    if phase == "start":
        sum(range({int(20_000_000 * SLOWDOWN)}))  # no thread can look meanwhile, as in a collection
"""
    names = of_the_product(source)

    def work_and_more() -> None:
        names["work"](time.thread_time, gc.collect)
        compute(0.3 * LIMIT_S)

    gc.callbacks.append(names["slow"])
    try:
        asyncio.get_running_loop().call_soon(work_and_more)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    finally:
        gc.callbacks.remove(names["slow"])
    assert loop_watch.take() == []

"""No thread of the server ends without a word."""

from __future__ import annotations

import ast
import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import errata_server
from errata_os import service_threads
from errata_os.service_threads import ServiceThread
from errata_server.concurrency.os_threads import OsThreads
from errata_server.concurrency.threads import ThreadGone
from errata_server.journal.memory import MemoryJournal
from errata_server.journal.writer import ThreadWriter
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings

SERVER = Path(errata_server.__file__).parent
OS = Path(service_threads.__file__).parent

OTHERS = {
    "process.py": "reads the log of a server in another process, in tests and benchmarks",
    "sandbox/docker/tree_map.py": "hashes one archive, whose reader waits for its end and raises what it met",
}
"""Threads that may be started otherwise, with the reason."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_threads, "FIRST_PAUSE_S", 0.01)


def sources() -> list[Path]:
    envs = SERVER.parents[1] / "envs"
    # The package index of `errata swe prepare` is served in that program alone: no server fetches packages.
    programs = {envs / "swe_bench_lite_env/server/prepare/index.py"}
    return [
        *SERVER.rglob("*.py"),
        *OS.rglob("*.py"),
        *(path for path in envs.rglob("*.py") if "server" in path.parts and path not in programs),
    ]


def name(path: Path) -> str:
    """Return the path below the package, or the whole one of a file of an environment."""
    package = next((package for package in (SERVER, OS) if path.is_relative_to(package)), Path("/"))
    return path.relative_to(package).as_posix()


def starts_a_thread(tree: ast.AST) -> list[int]:
    """Return the lines on which a thread is started by hand, or a class of threads is made."""
    names = {"Thread", "Timer", "start_new_thread", "_start_new_thread", "start_joinable_thread"}
    found = []
    for node in ast.walk(tree):
        used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        for name in used:
            if (name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", None)) in names:
                found.append(node.lineno)
    return found


def test_every_thread_of_the_server_is_a_service_thread() -> None:
    found = {name(path): lines for path in sources() if (lines := starts_a_thread(ast.parse(path.read_text())))}
    assert found.keys() == {"service_threads.py", *OTHERS}, found
    assert len(found["service_threads.py"]) == 1


@pytest.mark.parametrize(
    "code", ["threading.Thread(target=f)", "Thread(target=f)", "threading.Timer(1, f)", "class A(threading.Thread): 0"]
)
def test_a_thread_that_is_started_by_hand_is_found(code: str) -> None:
    assert starts_a_thread(ast.parse(code)) == [1]


def failing(times: int, then: threading.Event, error: BaseException) -> Callable[[], None]:
    left = [error] * times

    def run() -> None:
        if left:
            raise left.pop()
        then.wait(60)

    return run


@pytest.mark.parametrize("error", [ValueError("not enough values to unpack"), SystemExit(3), MemoryError()])
def test_a_failed_thread_is_logged_runs_again_and_is_shown_for_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    done, failed = threading.Event(), queue.SimpleQueue[BaseException]()
    thread = ServiceThread("errata-test", failing(2, done, error), failed=failed.put)
    assert [failed.get(timeout=60) for _ in range(2)] == [error, error]
    assert type(error).__name__ in str(thread.trouble) and "errata-test" in str(thread.trouble)
    critical = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert len(critical) == 2
    assert all("errata-test failed" in r.getMessage() and r.exc_info and r.exc_info[1] is error for r in critical)
    monkeypatch.setattr(service_threads, "STEADY_S", 0.0)
    while thread.trouble is not None:  # it has run again by now, or does soon
        threading.Event().wait(0.01)
    done.set()
    thread.join(60)
    assert thread.trouble is None


def test_a_thread_that_may_not_run_again_stays_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_threads, "STEADY_S", 0.0)
    thread = ServiceThread("errata-test", failing(1, threading.Event(), ValueError("x")), restarts=False)
    thread.join(60)
    assert "restart the server" in str(thread.trouble)


def test_a_failing_answer_does_not_end_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    again = threading.Event()

    def answer(error: BaseException) -> None:
        raise KeyError("answer")

    calls = iter([ValueError("x")])

    def run() -> None:
        for error in calls:
            raise error
        again.set()

    ServiceThread("errata-test", run, failed=answer).join(60)
    assert again.is_set()
    assert "cannot fail the calls that wait" in caplog.text


# -- what the server's threads do then ---------------------------------------------------------------------------------


async def test_a_writer_that_fails_refuses_what_it_had_in_hand_and_writes_what_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    journal = MemoryJournal()
    runtime = Runtime(Settings(), journal=journal)
    loop = asyncio.get_running_loop()
    writer = ThreadWriter(lambda groups: [None] * len(groups))
    settled: asyncio.Queue[object] = asyncio.Queue()
    monkeypatch.setattr(type(journal), "trouble", property(lambda self: writer.trouble))
    assert runtime.readiness.reasons() == []

    def broken(commits: int, seconds: float) -> None:
        writer.written = lambda commits, seconds: None
        raise ZeroDivisionError("a metric")

    writer.written = broken
    writer.submit([], lambda _, error: settled.put_nowait(error), loop)
    refused = await asyncio.wait_for(settled.get(), 60)
    assert "the journal's writer failed" in str(refused)
    assert any("errata-journal failed" in reason for reason in runtime.readiness.reasons())
    writer.submit([], lambda _, error: settled.put_nowait(error), loop)
    assert await asyncio.wait_for(settled.get(), 60) is None
    await asyncio.to_thread(writer.close)
    await runtime.close()


async def test_an_environments_thread_that_fails_outside_of_a_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = OsThreads(cap=2)
    place = threads.pinned()
    assert await place.run(lambda: 1, 30) == 1
    monkeypatch.setattr(type(threads.abandoned_calls), "returned", lambda *_: None)
    worker = place._worker  # type: ignore[attr-defined]
    worker._inbox.put(object())  # no call: its thread fails on it
    worker._thread.join(60)
    assert place.gone
    with pytest.raises(ThreadGone):
        await place.run(lambda: 2, 30)
    assert await threads.pinned().run(lambda: 3, 30) == 3
    threads.close()


async def test_the_watch_of_the_free_pool_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = OsThreads(cap=8)
    looks = []
    look = threads._pool._look

    def failing_once(spare: bool, stalled: bool) -> None:
        looks.append(threads.trouble())
        if len(looks) == 1:
            raise ValueError("a look")
        look(spare, stalled)

    monkeypatch.setattr(threads._pool, "_look", failing_once)
    held = threading.Event()
    blocked = [asyncio.ensure_future(threads.free().run(lambda: held.wait(60), 60)) for _ in range(4)]
    await asyncio.sleep(0)  # these are put down first
    assert await threads.free().run(lambda: 7, 60) == 7  # behind blocked calls, so only the watch can have let it in
    assert looks[0] is None and "errata-free-watch" in str(looks[1])
    held.set()
    await asyncio.gather(*blocked)
    threads.close()

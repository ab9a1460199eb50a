"""Blocking clients: many threads on one socket, forked processes, the end of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from mux_peer import peered_in_a_thread

from errata_client import Connection, ErrataClient
from errata_protocol.errors import LocalProtocolError
from tests.hangs import HANGS_S


def test_many_threads_step_their_own_sessions_over_one_socket() -> None:
    with peered_in_a_thread() as peer:

        def episode(n: int) -> list[int]:
            with ErrataClient(peer.url).sync() as client:
                client.reset()
                return [client.step({"text": str(n)}).observation["count"] for _ in range(10)]

        held = ErrataClient(peer.url).sync().connect()  # keeps the shared socket
        with ThreadPoolExecutor(32) as threads:
            assert list(threads.map(episode, range(64))) == [list(range(1, 11))] * 64
        assert len(peer.headers) == 1, "one socket for all"
        assert sum(thread.name == "errata-client" for thread in threading.enumerate()) == 1
        held.close()
        assert {row.status for row in peer.rows.values()} == {"closed"}


def test_threads_that_share_a_session_take_turns() -> None:
    with peered_in_a_thread() as peer, Connection(peer.url) as connection:
        client = ErrataClient(connection=connection).sync()
        client.reset()
        with ThreadPoolExecutor(8) as threads:
            counts = list(threads.map(lambda n: client.step({"text": str(n)}).observation["count"], range(100)))
        assert sorted(counts) == list(range(1, 101)) and client.t == 100
        client.close()


def test_a_blocking_call_from_the_loop_itself_is_refused() -> None:
    with peered_in_a_thread() as peer, ErrataClient(peer.url).sync() as client:
        seen: list[str] = []

        def callback(reward: object) -> None:
            try:
                client.step({"text": "a"})
            except RuntimeError as error:
                seen.append(str(error))

        client.on_reward(callback)
        client.reset()
        server_loop = next(iter(peer._sockets.values())).loop
        server_loop.call_soon_threadsafe(peer.push, peer.sids[0], 1.0)
        while not seen:
            client.state()
        assert "async form" in seen[0]


def test_after_a_fork_the_parents_sessions_stay_the_parents() -> None:
    with peered_in_a_thread() as peer:
        client = ErrataClient(peer.url).sync()
        client.reset()
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(LocalProtocolError, match="fork"):
                    client.step({"text": "child"})
                with ErrataClient(peer.url).sync() as own:
                    own.reset()
                    assert own.step({"text": "own"}).observation["count"] == 1
                code = 0
            except BaseException as error:
                os.write(tell, repr(error).encode()[:4000])
            finally:
                os._exit(code)
        os.close(tell)
        _, status = os.waitpid(child, 0)
        assert status == 0, os.read(told, 4000).decode()
        os.close(told)
        assert client.step({"text": "parent"}).observation["count"] == 1
        assert sorted(map(str, peer.steps())) == ["own", "parent", "reset", "reset"]
        client.close()


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "import threading; threading.current_thread()"])
def test_the_interpreter_ends_with_clients_open_and_the_server_is_told(end: str) -> None:
    program = f"""
import sys
from errata_client import EnvPool, ErrataClient
clients = [ErrataClient(sys.argv[1]).sync() for _ in range(3)]
for client in clients:
    client.reset()
pool = EnvPool(sys.argv[1], 3).sync().connect()
print("open", flush=True)
{end}
"""
    with peered_in_a_thread() as peer:
        done = subprocess.run(
            [sys.executable, "-c", program, peer.url], capture_output=True, text=True, timeout=HANGS_S
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "open\n", "")
        assert [row.status for row in peer.rows.values()] == ["closed"] * 6


def test_the_interpreter_ends_while_the_server_is_silent() -> None:
    program = """
import sys
from errata_client import ErrataClient
client = ErrataClient(sys.argv[1]).sync()
client.reset()
print("open", flush=True)
sys.stdin.readline()
"""
    with peered_in_a_thread() as peer:
        argv = [sys.executable, "-c", program, peer.url]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdin is not None
            assert process.stdout.readline() == "open\n"
            peer.silent = True
            process.stdin.write("\n")
            process.stdin.close()
            assert process.wait(HANGS_S) == 0

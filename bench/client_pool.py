"""What a step in an `EnvPool` costs the client: CPU of its process for each step, by batch.

python bench/client_pool.py [--sessions 1000] [--rounds 5] [--batches 20] [--smoke]

The server is another process, and its journal is in a directory that is removed afterwards. The machine's own share is
measured beside it: the same requests through `ClientProtocol` against replies made beforehand, without a socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

from errata_client import EnvPool
from errata_protocol.mux import ClientConfig, ClientProtocol
from errata_protocol.mux.envelope import join_frame, write_reply
from errata_protocol.payload import digest
from errata_server.process import ServerProcess

TARGET = "tests.environments.asynchronous:AsyncEchoEnvironment"
BATCH = 64


async def of_pool(url: str, sessions: int, batches: int) -> float:
    """Return microseconds of CPU a step."""
    async with EnvPool(url, sessions) as pool:
        await pool.reset_batch()
        actions = [{"text": "a"}] * sessions
        await pool.step_batch(actions)
        began = time.process_time()
        for _ in range(batches):
            await pool.step_batch(actions)
        return (time.process_time() - began) / (sessions * batches) * 1e6


def of_machine(sessions: int, batches: int) -> float:
    """Return microseconds of CPU that the protocol's machine takes for a request and its reply, in frames of 64."""
    machine = ClientProtocol(ClientConfig(in_flight_socket=sessions))
    held = [machine.open(f"session-{n:0>20}", "k" * 24) for n in range(sessions)]
    machine.connected(0.0)
    machine.data_to_send()
    position = {"next_id": 1, "eid": None, "t": None, "seq": 0, "recovery": "none", "fence": 1}
    for session in held:
        machine.receive(json.dumps({"sid": session.sid, "type": "opened", "data": position}), 0.0)
    payload = b'{"observation":{"total":12},"reward":1.0,"done":false}'
    frames = []
    for id in range(1, batches + 1):
        replies = [write_reply(s.sid, id, "observation", "e" * 22, id, digest(payload), payload) for s in held]
        frames.append([join_frame(replies[at : at + BATCH]) for at in range(0, sessions, BATCH)])
    began = time.process_time()
    for batch in frames:
        for session in held:
            machine.request(session, "step", b'{"text":"a"}')
        machine.data_to_send()
        for frame in batch:
            machine.receive(frame, 0.0)
    return (time.process_time() - began) / (sessions * batches) * 1e6


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="one small round: shows that it runs, measures nothing")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.sessions, arguments.rounds, arguments.batches = 20, 1, 2
    sessions, batches = arguments.sessions, arguments.batches
    pool: list[float] = []
    machine: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        options = ["--max-sessions", str(sessions + 10)]
        with ServerProcess(TARGET, Path(directory), *options) as server:
            for _ in range(arguments.rounds):
                pool.append(asyncio.run(of_pool(server.url, sessions, batches)))
                machine.append(of_machine(sessions, batches))
    ratio = [a / b for a, b in zip(pool, machine, strict=True)]
    for name, figures in (("pool, us a step", pool), ("machine, us a step", machine), ("ratio", ratio)):
        print(f"{name:20} median {statistics.median(figures):6.1f}   {min(figures):.1f} to {max(figures):.1f}")


if __name__ == "__main__":
    main()

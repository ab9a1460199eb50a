"""What 100 honest sessions feel beside 8 hostile ones, against 8 that use as much of the processor harmlessly.

    python bench/beside_hostile.py [--rounds N] [--seconds S] [--honest N] [--json] [--smoke]

The honest sessions run a trivial command every five seconds, which two cores have time for, through one multiplexed
connection. The hostile ones do, again and again, what reviewers have stopped the server with: submits with thousands
of files named like tests, with tens of megabytes of result lines and with output that never ends; large patches;
floods of output and text that detectors read slowly; messages of many JSON values and of long texts. The control's
sessions run busy loops in their sandboxes, and their client computes for as large a part of the time as the hostile
client did, because both share the processors with the server. Rounds of both alternate, in an order that changes, and
the ratio is taken per round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from errata_bench.latencies import percentile
from errata_client import Connection, ErrataClient
from errata_protocol.errors import ErrataError, InvalidRequest
from errata_server.process import ServerProcess

LINKS = (
    "mkdir -p tests/d; : > tests/d/one; "
    "python3 -c \"import os\nfor n in range(20000): os.link('tests/d/one', f'tests/d/test_{n}.py')\""
)
RESULTS = (
    "printf 'import atexit, sys\\ndef lines():\\n    for n in range(4000000):\\n"
    '        sys.stdout.write(f"PASSED t{n}\\\\n")\\natexit.register(lines)\\n\' > conftest.py'
)
ENDLESS = (
    "printf 'import os\\nn = 0\\nwhile True:\\n    n += 1\\n"
    '    os.write(1, b"PASSED tests/test_%%d.py::test\\\\n" %% n)\\n\' > conftest.py'
)
SUBMITS = (LINKS, RESULTS, ENDLESS)
TRACE = (
    "python3 -c \"print('Traceback (most recent call last):\\n' + "
    '\'  File \\"a.py\\", line 1, in f\\n\' * 200000)"; exit 1'
)
COMMANDS = (
    "head -c 300000000 /dev/zero | tr '\\0' a",
    "yes 'error: x.c:1:1: error: y' | head -c 100000000; exit 1",
    TRACE,
)
PACE_S = 5.0
VALUES = json.loads("[" + "[]," * 1_000_000 + "[]]")
SOURCE = "def f(x):\n\treturn {'a': [x]}\n" * 250_000
"""A text of seven million characters with brackets and escapes."""
BUSY = "timeout 5 sh -c 'while :; do :; done'"


def patch(files: int) -> str:
    """Return a diff of files that are not there: each is a line of the error that the patch program prints."""
    hunk = "@@ -1,1 +1,1 @@\n-a\n+b\n"
    return "".join(f"--- a/none/{n}.py\n+++ b/none/{n}.py\n{hunk * 8}" for n in range(files))


async def repeat(work: Callable[[], Awaitable[Any]], refused: list[int]) -> None:
    """Do something again and again; count what the server refuses, which is an answer too."""
    while True:
        try:
            await work()
        except (ErrataError, TimeoutError) as error:
            refused.append(1)
            if not isinstance(error, InvalidRequest | TimeoutError):
                await asyncio.sleep(0.2)


async def compute(part: float) -> None:
    """Keep a processor busy for this part of the time."""
    while True:
        until = time.thread_time() + 0.01 * part
        while time.thread_time() < until:
            pass
        await asyncio.sleep(0.01 * (1 - part))


async def load(server_url: str, hostile: bool, part: float) -> dict[str, float]:
    """Run 8 sessions of one kind, each with a connection of its own, until standard input ends.

    Args:
        server_url: The server's URL.
        hostile: Whether they are the hostile ones.
        part: Part of the time for which this process computes besides.
    """
    done: list[int] = []
    refused: list[int] = []
    contents = itertools.cycle([VALUES, SOURCE])

    def work(client: ErrataClient, number: int) -> Callable[[], Awaitable[Any]]:
        async def submit() -> None:
            await client.reset()
            await client.step({"tool": "run", "command": SUBMITS[number], "timeout_s": 30})
            await client.step({"tool": "submit"})
            done.append(1)

        async def patched() -> None:
            await client.reset()
            await client.step({"tool": "apply_patch", "patch": patch(20_000)})
            done.append(1)

        async def command() -> None:
            await client.reset()
            await client.step({"command": COMMANDS[number - 4] if hostile else BUSY, "timeout_s": 30})
            done.append(1)

        async def messages() -> None:
            await client.reset()
            await client.step({"command": "true", "more": next(contents)})

        if not hostile or number in (4, 5, 6):
            return command
        return {3: patched, 7: messages}.get(number, submit)

    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for number in range(8):
            url = f"{server_url}/{'swe_bench_lite' if hostile and number < 4 else 'terminal'}"
            client = await stack.enter_async_context(ErrataClient(url, message_timeout_s=600))
            tasks.append(asyncio.create_task(repeat(work(client, number), refused)))
        tasks.append(asyncio.create_task(compute(part)))
        print("ready", flush=True)
        began, used = time.monotonic(), time.process_time()
        await asyncio.to_thread(sys.stdin.read)
        busy = (time.process_time() - used) / (time.monotonic() - began)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {"done": len(done), "refused": len(refused), "client_busy": busy}


@contextlib.asynccontextmanager
async def beside(
    server: ServerProcess, hostile: bool, counts: Counter[str], busy: dict[bool, float]
) -> AsyncIterator[None]:
    """Run `load` in a process of its own, because its work must not delay the honest clients, until the block ends.

    Args:
        server: The server.
        hostile: Whether its sessions are the hostile ones.
        counts: Sums of what they did.
        busy: Part of the time for which the client of each kind computed, by ``hostile``. The control computes as much
            as the hostile one did.
    """
    kind = "hostile" if hostile else "control"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--load", kind, "--url", server.url),
        *(() if hostile else ("--busy", str(busy.get(True, 0.0)))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n", "the load could not begin: see its messages above"
        yield
    finally:
        output, _ = await process.communicate(b"")
        report = json.loads(output)
        busy[hostile] = report.pop("client_busy")
        counts.update({f"{kind}_{name}": count for name, count in report.items()})


async def honest(clients: list[ErrataClient], seconds: float) -> list[float]:
    """Return how long each step took, of sessions that run a trivial command every `PACE_S` seconds."""
    ends = time.monotonic() + seconds
    took: list[float] = []

    async def play(client: ErrataClient, at: float) -> None:
        await asyncio.sleep(at * PACE_S)
        while (started := time.monotonic()) < ends:
            result = await client.step({"command": "echo ok"})
            took.append(time.monotonic() - started)
            assert result.observation["stdout"] == "ok\n", result
            await asyncio.sleep(max(0.0, started + PACE_S - time.monotonic()))

    await asyncio.gather(*(play(client, number / len(clients)) for number, client in enumerate(clients)))
    return took


def memory_mib(server: ServerProcess) -> float:
    """Return the largest resident memory that the server's process has had."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds."""
    rounds, memory = [], []
    with (
        tempfile.TemporaryDirectory() as scratch,
        ServerProcess("terminal", Path(scratch), "swe_bench_lite") as server,
    ):
        connection = Connection(f"{server.url}/terminal")
        clients = [ErrataClient(connection=connection, message_timeout_s=600) for _ in range(options.honest)]
        for client in clients:
            await client.reset()
            await client.step({"command": "true"})
        counts: Counter[str] = Counter()
        busy: dict[bool, float] = {}
        for number in range(options.rounds):
            found, parts = {}, {}
            for hostile in (number % 2 == 0, number % 2 == 1):
                async with beside(server, hostile, counts, busy):
                    await asyncio.sleep(min(3.0, options.seconds))
                    took = sorted(await honest(clients, options.seconds))
                memory.append(memory_mib(server))
                found["hostile" if hostile else "control"] = took
                kind = "hostile" if hostile else "control"
                print(f"round {number + 1} of {options.rounds}, {kind}: {len(took)} steps", file=sys.stderr, flush=True)
                parts["hostile" if hostile else "control"] = busy[hostile]
                await asyncio.sleep(1)
            rounds.append(
                {
                    name: {
                        "steps": len(took),
                        "p50_ms": round(percentile(took, 0.5) * 1e3, 1),
                        "p99_ms": round(percentile(took, 0.99) * 1e3, 1),
                        "worst_ms": round(took[-1] * 1e3, 1),
                        "client_busy": round(parts[name], 2),
                    }
                    for name, took in found.items()
                }
            )
        for client in clients:
            await client.close()
        await connection.aclose()
    return {
        "machine": f"{platform.machine()} {platform.release()} python {platform.python_version()}",
        "load_before": options.load,
        "honest": options.honest,
        "rounds": rounds,
        "p99_ratio_median": statistics.median(one["hostile"]["p99_ms"] / one["control"]["p99_ms"] for one in rounds),
        **counts,
        "server_rss_mib_most": max(memory),
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each kind (default: 5)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of one round's part (default: 20)")
    parser.add_argument("--honest", type=int, default=100, help="number of honest sessions (default: 100)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="small and quick: shows that it runs, measures nothing")
    parser.add_argument("--load", choices=("hostile", "control"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--busy", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(asyncio.run(load(options.url, options.load == "hostile", options.busy))))
        return
    options.load = os.getloadavg()[0]
    if options.smoke:
        options.rounds, options.seconds, options.honest = 1, 2.0, 5
    result = asyncio.run(measure(options))
    if options.json:
        print(json.dumps(result, indent=1))
        return
    for one in result.pop("rounds"):
        print(
            "  ".join(
                f"{name}: p50 {part['p50_ms']} p99 {part['p99_ms']} worst {part['worst_ms']} ms"
                for name, part in one.items()
            )
        )
    for key, value in result.items():
        print(f"{key:24} {value}")


if __name__ == "__main__":
    main()

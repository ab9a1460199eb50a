"""Load generators, each in a process of its own, and the class that controls one.

``python -m errata_bench.load plain|mux|http OPTIONS`` reads one JSON command on each line, ``["step", {"seconds": 4,
...}]``, and prints one JSON result for each: the figures, or ``{"error": ...}``. It imports nothing of Errata, so that
Errata's code does not measure itself.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from typing import Any, Self

import uvloop

from .http_load import HttpLoad
from .mux_load import MuxLoad
from .plain_load import PlainLoad

DOORS = {"plain": PlainLoad, "mux": MuxLoad, "http": HttpLoad}
LINE_BYTES = 1024 * 1024


class LoadFailed(RuntimeError):
    """A load generator received an unexpected answer."""


class Load:
    """A running load generator.

    Args:
        process: Its process.

    Attributes:
        failed: It has failed once and closed its sockets.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.failed = False

    @classmethod
    async def start(cls, door: str, port: int, **options: Any) -> Self:
        """Start a load generator; ``options`` are those of `PlainLoad`, `MuxLoad` or `HttpLoad`."""
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "errata_bench.load", door, json.dumps({"port": port, **options})),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                start_new_session=True,  # the benchmark handles ^C; this process ends with its standard input
            )
        )

    async def do(self, name: str, /, **arguments: Any) -> dict[str, float]:
        """Send a command and return its figures.

        Raises:
            LoadFailed: The server sent an unexpected answer, or the process has ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        line = await stdout.readline()
        if not line:
            raise LoadFailed(f"the load generator ended with status {await self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            self.failed = True
            raise LoadFailed(found["error"])
        return found

    async def stop(self) -> None:
        """End the process, its sockets and any command that still runs."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def _serve(door: str, options: dict[str, Any]) -> None:
    load = DOORS[door](**options)
    reader = asyncio.StreamReader(LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the middle of a phase would be part of a latency
    while line := await reader.readline():
        name, arguments = json.loads(line)
        try:
            found: dict[str, Any] = await getattr(load, name)(**arguments)
        except Exception as error:
            found = {"error": f"{name}: {type(error).__name__}: {error}"}
            load.abandon()
        gc.collect()
        print(json.dumps(found), flush=True)


def main() -> None:
    """Run commands until standard input ends."""
    door, options = sys.argv[1], json.loads(sys.argv[2])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(door, options))


if __name__ == "__main__":
    main()

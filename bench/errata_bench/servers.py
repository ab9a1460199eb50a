"""The servers that are measured, each in a process of its own, and their CPU and memory from ``/proc``."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from errata_server.process import ServerProcess

_ANNOUNCED = re.compile(r"serving .*127\.0\.0\.1:(\d+)")

HARNESS = Path(__file__).parents[1]

STOP_S = 90.0
"""Stock takes up to a quarter of a minute to end 10,000 threads."""


class Server:
    """A running server.

    Args:
        process: Its process.
        port: Its port on 127.0.0.1.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    @classmethod
    def stock(cls, kind: str, sessions: int, *, deflate: bool = False, env: dict[str, str] | None = None) -> Server:
        """Start OpenEnv's server; see `errata_bench.stock`."""
        command = [sys.executable, "-m", "errata_bench.stock", kind, "--sessions", str(sessions)]
        return cls._announced([*command, *(["--deflate"] if deflate else [])], env)

    @classmethod
    def errata(
        cls,
        target: str,
        sessions: int,
        data_dir: Path,
        *options: str,
        env: dict[str, str] | None = None,
        python: Path | None = None,
    ) -> Server:
        """Start ``errata serve``, under the interpreter ``python`` if one is given.

        That interpreter imports the environments of this harness too, so that both servers have the same ones.
        """
        env = dict(env or {})
        if python is not None:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HARNESS), os.environ.get("PYTHONPATH")]))
        options = ("--max-sessions", str(sessions), *options)
        running = ServerProcess(target, data_dir, *options, env=env, python=python or sys.executable)
        return cls(running.process, int(running.url.rsplit(":", 1)[1]))

    @classmethod
    def errata_in_memory(cls, target: str, sessions: int, env: dict[str, str] | None = None) -> Server:
        """Start Errata with its journal in memory; see `errata_bench.memory_server`."""
        command = [sys.executable, "-m", "errata_bench.memory_server", target, "--sessions", str(sessions)]
        return cls._announced(command, env)

    @classmethod
    def _announced(cls, command: list[str], env: dict[str, str] | None) -> Server:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the benchmark handles a ^C at the terminal, and then stops its servers
            env={**os.environ, **(env or {})},
        )
        assert process.stdout is not None
        said: deque[str] = deque(maxlen=20)
        for line in process.stdout:
            said.append(line)
            if found := _ANNOUNCED.search(line):
                threading.Thread(target=_drain, args=(process.stdout,), daemon=True).start()
                return cls(process, int(found[1]))
        raise RuntimeError(f"{command[2]} ended with status {process.wait()}: {''.join(said).strip()[-500:]}")

    def cpu_s(self) -> float:
        """CPU seconds of all its threads, ended ones included, without those of its child processes."""
        return self.cpu_s_of(self.process.pid)

    @staticmethod
    def cpu_s_of(pid: int) -> float:
        """Return the CPU seconds of a process, as `cpu_s`."""
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def waited_cpu_s_of(pid: int) -> float:
        """Return the CPU seconds of a process's children that have ended and that it has waited for."""
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")

    @staticmethod
    def private_bytes_of(pid: int) -> int:
        """Return the memory of a process that it shares with no other."""
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))

    def children(self) -> list[int]:
        """Return the process ids of its children, such as the workers of ``errata serve --workers``."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def rss_kib(self) -> int:
        """Resident memory of the process."""
        return self._status("VmRSS")

    def threads(self) -> int:
        """Its threads."""
        return self._status("Threads")

    async def quiet(self, threads: int, timeout_s: float = STOP_S) -> None:
        """Wait until it has at most ``threads`` threads and uses next to no CPU: earlier work must not count."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            before = self.cpu_s()
            await asyncio.sleep(0.2)
            if self.cpu_s() - before < 0.04 and self.threads() <= threads:
                return

    def kill(self) -> None:
        """Kill the process, as a crash does."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop it with a signal, as an operator does; kill it if that takes longer than `STOP_S`."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _status(self, key: str) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
        raise LookupError(f"process {self.process.pid} has no {key}: has it ended?")


def _drain(stream: IO[str]) -> None:
    for _ in stream:
        pass


def free_port() -> int:
    """Return a port that is free now, for a server that is killed and started again at the same address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

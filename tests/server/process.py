"""A real server process on a free port, to be killed."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
START_S = 60


class ServerProcess:
    """``errata serve`` in a process of its own.

    Args:
        target: What to serve.
        data_dir: Its data directory.
        options: Further command-line options.
    """

    def __init__(self, target: str, data_dir: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.log: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "errata_server.cli", "serve", target, "--port", "0", "--data-dir", str(data_dir),
             "--no-log-json", *options],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self.url = self._wait_for_url()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def _wait_for_url(self) -> str:
        while True:
            line = self._lines.get(timeout=START_S)
            if line is None:
                raise AssertionError(f"the server ended with {self.process.wait()}:\n{''.join(self.log)}")
            found = re.search(r"serving .* at (http://\S+)", line)
            if found:
                return found[1]

    def kill(self) -> None:
        """End it as a crash does."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """End it as an operator does; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.kill()

"""A server in a process of its own: for the demo, benchmarks and tests, which stop it, kill it and start it again."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from errata_protocol.errors import ServiceError

_ANNOUNCED = re.compile(r"serving .* at (http://\S+)")


class ServerProcess:
    """``errata serve`` on a free port of this machine; the constructor returns when it answers.

    Args:
        target: What to serve, as on the command line.
        data_dir: Its data directory.
        options: Further command-line options.
        env: Environment variables beside this process's own.
        start_s: How long to wait for the port.
        python: The interpreter that runs it, by default this process's own.

    Raises:
        ServiceError: The server ended or did not open its port; the message is its own last line.

    Attributes:
        url: Where it answers.
        log: Its last log lines.
    """

    def __init__(
        self,
        target: str,
        data_dir: Path,
        *options: str,
        env: Mapping[str, str] | None = None,
        start_s: float = 60.0,
        python: str | os.PathLike[str] = sys.executable,
    ) -> None:
        self.log: deque[str] = deque(maxlen=10_000)
        self._lines: queue.Queue[str | None] = queue.Queue()
        command = [
            os.fspath(python),
            "-m",
            "errata_server.cli",
            "serve",
            target,
            "--port",
            "0",
            "--data-dir",
            str(data_dir),
        ]
        self.process = subprocess.Popen(
            [*command, "--log-format", "text", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            start_new_session=True,  # a ^C at the terminal is for the caller, who then stops the server
        )
        threading.Thread(target=self._read, name="errata-server-log", daemon=True).start()
        self.url = self._wait_for_url(start_s)

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line)
                self._lines.put(line)
        self._lines.put(None)

    def _wait_for_url(self, start_s: float) -> str:
        while True:
            try:
                line = self._lines.get(timeout=start_s)
            except queue.Empty:
                self.kill()
                raise ServiceError(f"the server did not open its port within {start_s:g} s") from None
            if line is None:
                status = self.process.wait()
                said = "".join(self.log).strip() or f"it ended with status {status} and said nothing"
                raise ServiceError(said, status=status)
            found = _ANNOUNCED.search(line)
            if found:
                return found[1]

    def kill(self) -> None:
        """End it as a crash does, with SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout_s: float = 60.0) -> int:
        """End it as an operator does, with SIGTERM; return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.kill()

"""`ServerProcess`: runs ``errata serve`` in a child process; for the demo, benchmarks and tests."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from errata_protocol.errors import ServiceError

_ANNOUNCED = re.compile(r"serving .* at (http://\S+)")


class ServerProcess:
    """``errata serve`` on a free port of this machine; the constructor returns when the port is open.

    As a context manager it stops the server at the end, and kills it if that takes longer than 60 s.

    Args:
        target: What to serve, as on the command line.
        data_dir: Data directory.
        options: Further command-line options.
        env: Environment variables in addition to this process's own.
        start_s: Longest time until the port is open, seconds.
        python: Python interpreter to run; this process's own by default.

    Raises:
        ServiceError: The server ended or did not open its port; the message is the server's output.

    Attributes:
        url: Address of the server.
        log: The last 10,000 lines of its output.
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
        # In a container the variable is set for the server that runs there, which has the port.
        inherited = {name: value for name, value in os.environ.items() if name != "ERRATA_HEALTH_PORT"}
        self.process = subprocess.Popen(
            [*command, "--log-format", "text", *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**inherited, **(env or {})},
            start_new_session=True,  # ^C at the terminal interrupts the caller only, which then stops the server
        )
        threading.Thread(target=self._read, name="errata-server-log", daemon=True).start()
        try:
            self.url = self._wait_for_url(start_s)
        except BaseException:  # also ^C, which this process alone gets
            if self.process.poll() is None:
                self.kill()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line)
                self._lines.put(line)
        self._lines.put(None)

    def _wait_for_url(self, start_s: float) -> str:
        deadline = time.monotonic() + start_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ServiceError(f"the server did not open its port within {start_s:g} s") from None
            if line is None:
                status = self.process.wait()
                output = "".join(self.log).strip() or f"the server ended with status {status} and without output"
                raise ServiceError(output, status=status)
            found = _ANNOUNCED.search(line)
            if found:
                return found[1]

    def kill(self) -> None:
        """Kill the server with SIGKILL, as in a crash, and wait for its end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self, timeout_s: float = 60.0) -> int:
        """Stop the server with SIGTERM and return its exit status.

        Args:
            timeout_s: Longest time to wait for its end, seconds.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
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
            except BaseException:  # ^C while it stops
                self.kill()
                raise

"""`ShardProcess`: one ``errata serve`` process that a keeper has started; it dies with the keeper."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

_ANNOUNCED = re.compile(r"serving .* at (http://\S+)")

_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL; kept over exec
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""A program of its own and no function after the fork, since a keeper's process has many threads."""

METRICS_S = 5.0
"""Longest wait for the metrics of a process, seconds."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a process has to do.

    Args:
        sessions: Sessions that hold an environment instance.
        steps: Steps since it started.
        lag_s: Worst lateness of its event loop in the last minute, seconds.
    """

    sessions: int
    steps: int
    lag_s: float


class ShardProcess:
    """``errata serve`` on a free port.

    Args:
        arguments: Arguments of ``errata serve``.
        env: Further environment variables.
        token: Token that clients need; None for none.
    """

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], token: str | None) -> None:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("ERRATA_HEALTH_PORT", "ERRATA_TOKEN", "ERRATA_TOKEN_FILE", "ERRATA_DATA_DIR")
        }
        # The parent is this process, so this must be called on a thread that lives as long as the process may.
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _DIE_WITH_PARENT,
                str(os.getpid()),
                *("-m", "errata_server.cli", "serve", *arguments, "--log-format", "text"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**inherited, **env},
            start_new_session=True,
        )
        self.started = time.monotonic()
        self.url: str | None = None
        self._lines: deque[str] = deque(maxlen=50)
        self._headers = {"Authorization": f"Bearer {token.split(',')[0]}"} if token else {}
        self._reader = threading.Thread(target=self._read, name="errata-shard-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                sys.stderr.write(line)  # Ray keeps what its actors print
                self._lines.append(line)
                if self.url is None and (found := _ANNOUNCED.search(line)):
                    self.url = found[1]

    def status(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """Return the last line that it printed, after its end."""
        self._reader.join(5.0)
        return self._lines[-1].strip() if self._lines else ""

    def load(self) -> Load:
        """Return what it has to do.

        Raises:
            httpx.HTTPError: It does not answer.
        """
        assert self.url is not None
        with httpx.Client(headers=self._headers, trust_env=False, timeout=METRICS_S) as client:
            answer = client.get(f"{self.url}/metrics")
            answer.raise_for_status()
        sessions = steps = lag = 0.0
        for family in text_string_to_metric_families(answer.text):
            for sample in family.samples:
                if sample.name == "errata_sessions_active":
                    sessions += sample.value
                elif sample.name == "errata_request_seconds_count" and sample.labels.get("kind") == "step":
                    steps += sample.value
                elif sample.name == "errata_event_loop_lag_seconds":
                    lag = sample.value
        return Load(int(sessions), int(steps), lag)

    def stop(self, most_s: float) -> None:
        """Have it end: it answers what runs. One that takes too long is killed.

        Args:
            most_s: Longest time that it may take, seconds.
        """
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(most_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()

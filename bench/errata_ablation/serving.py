"""``errata serve`` in a process of its own: a trainer is a client and imports no server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue

from errata_protocol.errors import ServiceError

from .boxes import Boxes
from .projects import Project

TASKS_VARIABLE = "ERRATA_TERMINAL_TASKS"
_ANNOUNCED = re.compile(r"serving .* at (http://\S+)")
START_S = 120.0
STOP_S = 60.0


@contextmanager
def served(
    target: str, data_dir: Path, *, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Serve on a free port of this machine, yield the URL, and stop the server at the end.

    Args:
        target: Target on the command line.
        data_dir: Data directory of the server.
        options: Further options of the command line.
        environment: Environment variables in addition to those of this process.

    Raises:
        ServiceError: The server did not start; the message has the last lines of its output.
    """
    command = [sys.executable, "-m", "errata_server.cli", "serve", target, "--port", "0", "--data-dir", str(data_dir)]
    process = subprocess.Popen(
        [*command, "--log-format", "text", *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # the trainer handles ^C, and then stops its server
    )
    said: deque[str] = deque(maxlen=50)
    urls: SimpleQueue[str | None] = SimpleQueue()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if found := _ANNOUNCED.search(line):
                urls.put(found[1])
        urls.put(None)

    threading.Thread(target=read, name="errata-server-log", daemon=True).start()
    try:
        try:
            url = urls.get(timeout=START_S)
        except Empty:
            url = None
        if url is None:
            raise ServiceError(f"`errata serve {target}` did not open its port: {''.join(said).strip() or 'no word'}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def terminal_of(family: Boxes | Project, directory: Path) -> Iterator[str]:
    """Serve a terminal that has the family's tasks, and yield its URL.

    Args:
        family: The tasks.
        directory: Directory for the tasks and the server's data.
    """
    tasks = directory / "tasks"
    family.write(tasks)
    with served(
        "terminal",
        directory / "data",
        options=("--allow-unchecked",),
        environment={TASKS_VARIABLE: str(tasks.resolve())},
    ) as url:
        yield url

"""Which modules one step enters, on each kind of socket: ``python scripts/step_modules.py [--check]``.

Serves the benchmark's any-thread environment in this process, steps it from another one, and records in which modules
functions are called until the reply has left. What a step enters in every one of `WINDOWS` steps is listed; timers and
batches that come in now and then are not. Writes the list into docs/design.md; ``--check`` compares it instead.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from errata_server.serve import server
from errata_server.settings import Settings

PAGE = Path(__file__).parents[1] / "docs" / "design.md"
MARKS = ("<!-- modules of a step: scripts/step_modules.py -->", "<!-- end -->")
TARGET = "errata_bench.environments:FreeEcho"
DOORS = {"plain": "a plain socket", "mux": "the multiplexed socket"}
PACKAGES = ("errata_server", "errata_protocol", "errata_os")
TICKING = ("errata_server.serve.server", "errata_server.runtime.data_watch")
"""Not of a step: uvicorn resumes the one ten times a second, and the other looks twice a second."""
WINDOWS = 12
AFTER_S = 0.1
"""What follows the reply, such as the accounting of the step, is done by then."""


class Recorder:
    """Names of the modules in which a function was called since `begin`, in any thread."""

    def __init__(self) -> None:
        self._names: set[str] | None = None

    def begin(self) -> None:
        self._names = set()

    def end(self) -> set[str]:
        found, self._names = self._names or set(), None
        return found

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        if self._names is not None and event == "call":
            name = frame.f_globals.get("__name__", "")
            if name.partition(".")[0] in PACKAGES and name not in TICKING:
                self._names.add(name)


class Load:
    """A load generator in a process of its own."""

    def __init__(self, door: str, port: int) -> None:
        options = json.dumps({"port": port, **({"sockets": 1} if door == "mux" else {})})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "errata_bench.load", door, options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, name: str, **arguments: Any) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        if "error" in found:
            raise RuntimeError(found["error"])

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(recorder: Recorder, data_dir: Path, found: dict[str, set[str]]) -> None:
    """Step at each door; called in a thread while the server runs, which is stopped at the end."""
    try:
        while not (told := data_dir / "server.json").is_file() or not told.read_text():
            time.sleep(0.02)
        port = int(json.loads(told.read_text())["url"].rsplit(":", 1)[1])
        for door in DOORS:
            load = Load(door, port)
            try:
                load.do("open", sessions=1, then="reset")
                windows = []
                for _ in range(WINDOWS):
                    recorder.begin()
                    load.do("step", seconds=60, action={"text": "x"}, limit=1)
                    time.sleep(AFTER_S)
                    windows.append(recorder.end())
                found[door] = set.intersection(*windows[2:])  # the first ones may still load something
            finally:
                load.stop()
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def modules() -> dict[str, set[str]]:
    """Return the modules that a step enters, by door."""
    recorder, found = Recorder(), dict[str, set[str]]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        bind = server.Bind(port=0)
        threading.setprofile(recorder.profile)  # before the journal's threads start
        sys.setprofile(recorder.profile)
        try:
            served = server.build([TARGET], Settings(data_dir=Path(scratch)), bind=bind, mode=None, max_sessions=10)
            threading.Thread(target=measure, args=(recorder, Path(scratch), found)).start()
            server.run(served, bind)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    if found.keys() != DOORS.keys():
        raise RuntimeError("the load generator failed; see above")
    return found


def page(found: dict[str, set[str]]) -> str:
    """Return the part of the page."""
    lines = []
    for door, words in DOORS.items():
        lines += [f"A step on {words} enters {len(found[door])} modules:", ""]
        packages: dict[str, list[str]] = {}
        for name in sorted(found[door]):
            package, _, module = name.rpartition(".")
            packages.setdefault(package, []).append(module)
        lines += [f"- `{package}`: {', '.join(names)}" for package, names in packages.items()] + [""]
    return "\n".join(lines)


def main() -> int:
    """Write the part, or compare it; return the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    parts = re.split(f"({re.escape(MARKS[0])}\n\n|{re.escape(MARKS[1])})", text)
    if len(parts) != 5:
        print(f"{PAGE} needs one pair of {MARKS[0]} and {MARKS[1]}", file=sys.stderr)
        return 1
    before, now = parts[2], page(modules())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text("".join([*parts[:2], now, *parts[3:]]), encoding="utf-8")
        return 0
    if before != now:
        print(
            f"a step enters other modules than {PAGE.name} says; run: python scripts/step_modules.py", file=sys.stderr
        )
        print(now, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a server logs: a JSON object on every line, whoever writes it, and each step of its end."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from errata_client import ErrataClient
from errata_server import log
from errata_server.process import ServerProcess

from .environments import CountAction, CountEnvironment, CountObservation


class NoisyEnvironment(CountEnvironment):
    """Prints, warns, writes a line without an end and has a thread that fails, as code of environments does."""

    async def step_async(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        print("printed\nin two lines")
        print("an error", file=sys.stderr)
        warnings.warn("this is odd", stacklevel=1)
        failing = threading.Thread(target=lambda: 1 / 0, name="theirs")
        failing.start()
        failing.join()
        sys.stdout.write("without an end")
        return await super().step_async(action, timeout_s)


def test_every_line_is_json_and_the_end_is_told(tmp_path: Path) -> None:
    noisy = f"{NoisyEnvironment.__module__}:{NoisyEnvironment.__name__}"
    options = ("--log-format", "json")
    with ServerProcess(noisy, tmp_path, *options) as server:
        with ErrataClient(server.url).sync() as client:
            client.reset()
            client.step({"n": 1})
            assert server.stop() == 0
        lines = [json.loads(line) for line in server.log]
    told = {line["message"]: line for line in lines}
    assert any(message.startswith("serving NoisyEnvironment at http://") for message in told)
    assert [told[text]["logger"] for text in ("printed", "in two lines", "without an end")] == ["errata.stdout"] * 3
    assert (told["an error"]["logger"], told["an error"]["level"]) == ("errata.stderr", "warning")
    assert any("this is odd" in message for message in told)
    assert "ZeroDivisionError" in told["thread theirs ends"]["exception"]
    asked, closing, stopped = [line["message"] for line in lines if line["logger"] == "errata.server"][-3:]
    assert asked.startswith("SIGTERM: the server stops; its 1 sessions, 0 of them without a client, have 25 s")
    assert closing == "1 connections are closed once their requests are answered"
    assert stopped == "stopped: every acknowledged step is in the journal"


def test_a_command_that_cannot_start_says_so_in_json(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no module") as failed:
        ServerProcess("nowhere:Nothing", tmp_path, "--log-format", "json")
    assert all(json.loads(line)["level"] for line in str(failed.value).splitlines())


class Kept(logging.Handler):
    """Keeps messages, and prints about those that say so, as a handler does that fails."""

    def __init__(self, stream: log.LoggedLines) -> None:
        super().__init__()
        self.stream, self.messages = stream, list[str]()

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        if record.getMessage() == "fail":
            self.stream.write("the handler failed\n")


def test_lines_of_any_length_are_cut_and_what_the_handler_prints_is_not_logged() -> None:
    stream = io.StringIO()
    logger = logging.Logger("lines")
    lines = log.LoggedLines(logger, stream)
    logger.addHandler(kept := Kept(lines))
    for _ in range(3):
        lines.write("x" * (log.LINE_CHARACTERS - 1))
        lines.write("xx")
    lines.write("y\n\n")
    assert [len(message) for message in kept.messages] == [log.LINE_CHARACTERS, 1] * 3 + [1]
    lines.write("fail\n")
    assert stream.getvalue() == "the handler failed\n"

"""Runs the detectors on a turn: on a short one in the event loop, on any other in a worker process."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from errata_protocol.detect import detect
from errata_protocol.detect.text import HEAD_CHARS, TAIL_CHARS
from errata_protocol.markers import Detection

from ..concurrency.procedures import Procedure
from .host_files import HostFiles, host_files
from .worker_calls import call_in_worker

T = TypeVar("T")

INLINE_CHARACTERS = 8 * 1024
"""Length of a turn, command and output together, up to which the detectors run in the event loop: they take up to a
tenth of a second for it, and three seconds for the longest."""


@dataclass(frozen=True, slots=True)
class TurnText:
    """What the detectors read of one turn; see `errata_protocol.detect.detect`.

    Args:
        command: The action as the agent wrote it.
        exit_code: Exit status of the command.
        stdout: Standard output.
        stderr: Standard error.
        details: Further keyword arguments of the detectors, which can be pickled.
        on_host: Whether the command ran on the server's own machine, whose files a site may not name.
    """

    command: str
    exit_code: int | None
    stdout: str
    stderr: str
    details: Mapping[str, Any] = field(default_factory=dict)
    on_host: bool = False

    @property
    def is_short(self) -> bool:
        """Whether the detectors may run in the event loop."""
        return len(self.command) + len(self.stdout) + len(self.stderr) <= INLINE_CHARACTERS

    def detection(self, files: HostFiles | None = None) -> Detection:
        """Return what the detectors find.

        Args:
            files: Files of the server; None for those of this process.
        """
        is_host_file = (files or host_files()) if self.on_host else None
        return detect(self.command, self.exit_code, self.stdout, self.stderr, is_host_file=is_host_file, **self.details)

    async def detection_in_worker(self) -> Detection:
        """Return what the detectors find, from a worker process."""
        turn = TurnText(
            self.command, self.exit_code, _ends(self.stdout), _ends(self.stderr), self.details, self.on_host
        )
        files = host_files() if self.on_host else None
        return await call_in_worker("the turn", TurnText.detection, turn, files)


async def detected(command: str, exit_code: int | None, stdout: str, stderr: str, **details: Any) -> Detection:
    """Return what the detectors find in one turn; the arguments are those of `errata_protocol.detect.detect`."""
    turn = TurnText(command, exit_code, stdout, stderr, details)
    return turn.detection() if turn.is_short else await turn.detection_in_worker()


def detecting(marking: Generator[TurnText, Detection, T]) -> Procedure[T]:
    """Drive a generator that yields turns and receives what the detectors find in them; return its result."""
    try:
        turn = next(marking)
        while True:
            turn = marking.send(turn.detection() if turn.is_short else (yield turn.detection_in_worker()))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _ends(text: str) -> str:
    """Return a text of which the detectors read the same: the beginning and the end of a long one."""
    return text if len(text) <= HEAD_CHARS + TAIL_CHARS else f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"

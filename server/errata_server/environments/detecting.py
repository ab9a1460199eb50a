"""Runs the detectors on a turn: on a short one in the event loop, on any other in a worker process."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from errata_protocol.detect import detect
from errata_protocol.detect.text import HEAD_CHARS, TAIL_CHARS
from errata_protocol.markers import NOTHING_WRONG, Detection

from ..concurrency.procedures import Procedure
from ..concurrency.slots import Share
from ..workers import BudgetExceeded
from .host_files import HostFiles, host_files
from .worker_calls import call_in_worker

T = TypeVar("T")

log = logging.getLogger("errata.environment")

INLINE_CHARACTERS = 2 * 1024
"""Length of a turn, command and output together, up to which the detectors run in the event loop. The slowest command
known of that length takes 14 ms: ``python -m timeit -s 'from errata_protocol.detect import detect'
'detect("a;" * 1024, 127, "", "bash: line 1: a: command not found")'``."""


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

    async def detection_in_worker(self, share: Share | None = None) -> Detection:
        """Return what the detectors find, from a worker process; nothing for a turn that exceeds their budget.

        The environment has acted by then, so a budget of ours cannot be the error of the request.

        Args:
            share: Share of the session whose turn it is; by default the one whose code runs.

        Raises:
            errata_server.workers.WorkerFailed: The machine failed.
        """
        turn = TurnText(
            self.command, self.exit_code, _ends(self.stdout), _ends(self.stderr), self.details, self.on_host
        )
        files = host_files() if self.on_host else None
        try:
            return await call_in_worker("the turn", TurnText.detection, turn, files, share=share)
        except BudgetExceeded as error:
            log.warning("a turn has no markers: %s", error)
            return NOTHING_WRONG


async def detected(command: str, exit_code: int | None, stdout: str, stderr: str, **details: Any) -> Detection:
    """Return what the detectors find in one turn; the arguments are those of `errata_protocol.detect.detect`."""
    turn = TurnText(command, exit_code, stdout, stderr, details)
    return turn.detection() if turn.is_short else await turn.detection_in_worker()


def detecting(marking: Generator[TurnText, Detection, T], share: Share) -> Procedure[T]:
    """Drive a generator that yields turns and receives what the detectors find in them; return its result.

    Args:
        marking: The generator.
        share: Share of the session whose turns these are.
    """
    try:
        turn = next(marking)
        while True:
            turn = marking.send(turn.detection() if turn.is_short else (yield turn.detection_in_worker(share)))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _ends(text: str) -> str:
    """Return a shorter text with the same findings: of a long text, the detectors read only the beginning and end."""
    return text if len(text) <= HEAD_CHARS + TAIL_CHARS else f"{text[:HEAD_CHARS]}\n{text[-TAIL_CHARS:]}"

"""One turn as the rules see it: the parsed action, the bounded streams, and which lines may be believed."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from functools import cached_property

from errata_protocol.detect.action import Action
from errata_protocol.detect.agent_files import AgentFiles
from errata_protocol.detect.python_traceback import Traceback, find_tracebacks, unwrapped
from errata_protocol.detect.stacks import Crash, find_crash
from errata_protocol.detect.test_report import TestReport, find_report
from errata_protocol.detect.text import bounded_lines


class Turn:
    """What one command did.

    Args:
        command: The action text.
        exit_code: None when the command was killed by the server.
        stdout: Standard output.
        stderr: Standard error.
        timed_out: The server's own flag.
        limit_hit: Name of the limit that ended the command, or None.
        cwd: Directory the command ran in, if known.
        workdir: Directory that holds the task, if known.
        trust_stdout: Read messages from standard output too, also without a ``2>&1`` in the action.
        is_host_file: Whether a path is a file of the server, where the command ran on its machine; None in a sandbox.
    """

    def __init__(
        self,
        action: Action,
        exit_code: int | None,
        stdout: tuple[str, ...],
        stderr: tuple[str, ...],
        *,
        timed_out: bool = False,
        limit_hit: str | None = None,
        cwd: str | None = None,
        workdir: str | None = None,
        trust_stdout: bool = False,
        is_host_file: Callable[[str], bool] | None = None,
    ) -> None:
        self.action = action
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr
        self.timed_out = timed_out
        self.limit_hit = limit_hit
        self.cwd = cwd
        self.workdir = posixpath.normpath(workdir) if workdir and workdir != "/" else None
        self.trust_stdout = trust_stdout
        self._is_host_file = is_host_file

    @classmethod
    def of(
        cls,
        command: str,
        exit_code: int | None,
        stdout: str,
        stderr: str,
        *,
        timed_out: bool = False,
        limit_hit: str | None = None,
        cwd: str | None = None,
        workdir: str | None = None,
        is_host_file: Callable[[str], bool] | None = None,
    ) -> Turn:
        """Build a turn from raw streams of any size."""
        return cls(
            Action(command),
            exit_code,
            bounded_lines(stdout),
            bounded_lines(stderr),
            timed_out=timed_out,
            limit_hit=limit_hit,
            cwd=cwd,
            workdir=workdir,
            is_host_file=is_host_file,
        )

    def trusting_stdout(self) -> Turn:
        """Return the same turn with standard output believed."""
        return Turn(
            self.action,
            self.exit_code,
            self.stdout,
            self.stderr,
            timed_out=self.timed_out,
            limit_hit=self.limit_hit,
            cwd=self.cwd,
            workdir=self.workdir,
            trust_stdout=True,
            is_host_file=self._is_host_file,
        )

    @property
    def command(self) -> str:
        return self.action.text

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @cached_property
    def agent_files(self) -> AgentFiles | None:
        """Which files are the agent's, where the command ran on the server's machine; None in a sandbox."""
        if self._is_host_file is None:
            return None
        return AgentFiles(self.command, (*self.stderr, *self.stdout), self._is_host_file)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Believed lines: standard error, and standard output where the action sends errors there."""
        if self.trust_stdout or self.action.merges_stderr:
            return (*self.stderr, *self.stdout)
        return self.stderr

    @cached_property
    def reported(self) -> tuple[str, ...]:
        """Lines of both streams, standard output only when it is not plain data: tests and patches report there."""
        if self.action.shows_data and not self.action.merges_stderr and not self.action.reports:
            return self.stderr
        return (*self.stderr, *self.stdout)

    @cached_property
    def report(self) -> TestReport | None:
        """The Python test report in the output, if there is one."""
        return find_report(self.reported)

    @cached_property
    def tracebacks(self) -> tuple[Traceback, ...]:
        """Python tracebacks among the believed lines that are not part of a test report."""
        if self.report is not None:
            return ()
        found = find_tracebacks(self.lines)
        files = self.agent_files
        if files is None:
            return found
        return tuple(t if any(files.owns(f.file) for f in t.frames) else unwrapped(t, self.lines) for t in found)

    @cached_property
    def crash(self) -> Crash | None:
        """The last uncaught error of another language than Python among the believed lines."""
        if self.report is not None:
            return None
        return find_crash(self.lines)

    @cached_property
    def messages(self) -> tuple[str, ...]:
        """Believed lines that are no traceback and no test report; the last exception is not among them either."""
        if self.report is not None:
            inside = self.report.lines
            return tuple(line for line in self.lines if line and line not in inside)
        masked: set[int] = set()
        for traceback in self.tracebacks:
            masked.update(range(traceback.first, traceback.last + 1))
        return tuple(line for index, line in enumerate(self.lines) if line and index not in masked)

    @cached_property
    def haystack(self) -> str:
        """Both streams in lower case, to ask cheaply whether a rule can fire at all."""
        return "\n".join((*self.stderr, *self.stdout)).lower()

    def mentions(self, *needles: str) -> bool:
        return any(n in self.haystack for n in needles)

"""One turn as the rules see it: the parsed action, the bounded streams, and the lines that count as messages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from functools import cached_property

from errata_protocol.detect.action import Action, ends_in_python, is_test_target, may_raise
from errata_protocol.detect.agent_files import AgentFiles
from errata_protocol.detect.prefixes import without_prefixes
from errata_protocol.detect.python_traceback import Traceback, find_tracebacks, unwrapped
from errata_protocol.detect.stacks import Crash, find_crash
from errata_protocol.detect.test_report import TestReport, find_report
from errata_protocol.detect.text import bounded_lines, quoted
from errata_protocol.detect.word_index import WordIndex

MAX_WORK = 100_000
"""Steps that one turn may take to look for the texts of messages in the action."""

_WARNING = re.compile(r"^\S.*:\d+: \w*Warning: ")
"""Python's warnings, after which a program goes on."""

_NOT_FATAL = ("Exception ignored in", "Exception in thread ", "Error in atexit.", "Error in sys.excepthook")
_LOGGED = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL|EXCEPTION)\b", re.IGNORECASE)
_EXCEPTION = re.compile(r"[\w.]+(?:Error|Exception): ")
_NEXT_ERROR = re.compile(r"usage: |[\w.-]+\.py: error: ", re.IGNORECASE)
"""What a program says of its arguments: hardly a line of an exception's message."""

_USAGE_STATUS = 2
"""The status of argparse and click; an exception that ends a program gives 1."""

_TITLES = ("Error: ", "Warning: ")
_SPOKEN = re.compile(
    r"(?![\w.]*(?:Error|Exception)\b)(?:-|[a-z_./])[\w./+-]*(?:\[\d+\])?: |error\b|ERROR: |[Uu]sage: |"
    r"(?:failed to|cannot|can't|could not|unable to|open|stat|mkdir|fork/exec) "
)
"""``PROGRAM: MESSAGE``, and how runners complain of their own arguments."""

_MAX_CALLS = 100
"""How many calls of an action, and arguments of one, are compared with the words of a test report."""

_MAX_MESSAGE = 40
"""How many lines the message of an error of node is read for, as many as its frames."""


class Turn:
    """What one command did.

    Args:
        command: Text of the action.
        exit_code: None if the server killed the command.
        stdout: Standard output.
        stderr: Standard error.
        timed_out: Whether the server ended it at its deadline.
        limit_hit: Name of the limit that ended the command, None if none did.
        cwd: Directory the command ran in, if known.
        workdir: Directory that holds the task, if known.
        trust_stdout: Read messages from standard output too, even without ``2>&1`` in the action.
        is_host_file: Returns whether a path is a file of the server, for a command that ran on its machine; None in a
            sandbox.
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
        self.work_left = MAX_WORK

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
        """Build a turn from complete streams of any size."""
        out, err = without_prefixes(bounded_lines(stdout), bounded_lines(stderr))
        return cls(
            Action(command),
            exit_code,
            out,
            err,
            timed_out=timed_out,
            limit_hit=limit_hit,
            cwd=cwd,
            workdir=workdir,
            is_host_file=is_host_file,
        )

    def trusting_stdout(self) -> Turn:
        """Return the same turn with ``trust_stdout``."""
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
    def words(self) -> WordIndex:
        """The words of the action, by what may name them."""
        return WordIndex(self.command, self.action.invocations, self.cwd)

    def spend(self, steps: int) -> bool:
        """Take ``steps`` of the work that is left, and return whether there was enough.

        Messages times words can be too many for a server that answers others meanwhile. Then a site is left out.
        """
        self.work_left -= steps
        return self.work_left >= 0

    @cached_property
    def agent_files(self) -> AgentFiles | None:
        """The agent's files, for a command that ran on the server's machine; None in a sandbox."""
        if self._is_host_file is None:
            return None
        return AgentFiles(self.command, (*self.stderr, *self.stdout), self._is_host_file)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Lines to read messages from: standard error, and standard output if the action sends errors there."""
        if self.trust_stdout or self.action.merges_stderr:
            return (*self.stderr, *self.stdout)
        return self.stderr

    @cached_property
    def reported(self) -> tuple[str, ...]:
        """Lines of standard error, then of standard output, in which to look for the reports of tests and patches.

        Only standard error if the action prints a file, a log or the like, calls no tool that reports on standard
        output, and does not redirect standard error there.
        """
        if self.action.shows_data and not self.action.merges_stderr and not self.action.reports:
            return self.stderr
        return (*self.stderr, *self.stdout)

    @cached_property
    def report(self) -> TestReport | None:
        """The Python test report in the output, if there is one."""
        return find_report(self.reported)

    @cached_property
    def tracebacks(self) -> tuple[Traceback, ...]:
        """Python tracebacks in `lines` that are not part of a test report."""
        if self.report is not None:
            return ()
        found = find_tracebacks(self.lines)
        files = self.agent_files
        if files is None:
            return found
        return tuple(t if any(files.owns(f.file) for f in t.frames) else unwrapped(t, self.lines) for t in found)

    @cached_property
    def final_tracebacks(self) -> tuple[Traceback, ...]:
        """The tracebacks that may have ended a program.

        A single program handled all exceptions but the last. If the action runs several, each traceback may have ended
        one. Left out are those that caused the next one, those of logging, and, if others remain, those that Python
        reports and then goes on, such as an exception of a thread.
        """
        ends = [t for t in self.tracebacks if not t.caused_next and not t.of_logging]
        ends = [t for t in ends if not self._goes_on_after(t)] or ends
        return tuple(ends if len(may_raise(self.action.invocations)) > 1 else ends[-1:])

    def _goes_on_after(self, traceback: Traceback) -> bool:
        return self._before(traceback).startswith(_NOT_FATAL)

    def _before(self, traceback: Traceback) -> str:
        return self.lines[traceback.first - 1] if traceback.first > 0 else ""

    @cached_property
    def crash(self) -> Crash | None:
        """The last uncaught error in `lines` of a language other than Python, if possible one that `may_crash_in`."""
        if self.report is not None:
            return None
        return find_crash(self.lines, self.may_crash_in)

    def may_crash_in(self, language: str) -> bool:
        """Return whether a crash that was found in the output may be of a program in ``language``.

        Perl's form, ``TEXT at FILE line N.``, also occurs in prose: it counts only if the command runs perl, a .pl
        file, prove or make. Other languages always count.
        """
        return language != "perl" or any(
            c.program.startswith("perl") or c.program.endswith(".pl") or c.program in ("prove", "make")
            for c in self.action.invocations
        )

    @cached_property
    def messages(self) -> tuple[str, ...]:
        """The `lines` that are part of no traceback and no test report, and not the last exception.

        Nor the following lines of an exception's message, nor Python's warnings.
        """
        if self.report is not None:
            inside = self.report.lines
            return tuple(line for line in self.lines if line and line not in inside and not _WARNING.match(line))
        masked: set[int] = set()
        for traceback in self.tracebacks:
            masked.update(range(traceback.first, traceback.last + 1))
        masked.update(self._message_lines())
        masked.update(self._boxed_warnings())
        for index, line in enumerate(self.lines):
            if ": " in line and _WARNING.match(line):
                masked.update((index, index + 1) if self._is_source(index + 1) else (index,))
        return tuple(line for index, line in enumerate(self.lines) if line and index not in masked)

    def _boxed_warnings(self) -> list[int]:
        """Return the indices of the lines of warnings before or after which the same program reports an error.

        Terraform's warnings and errors have a title and several paragraphs.
        """
        titles = [i for i, line in enumerate(self.lines) if line.startswith(_TITLES)]
        if not any(self.lines[i].startswith(_TITLES[0]) for i in titles):
            return []
        masked: list[int] = []
        for at, end in zip(titles, (*titles[1:], len(self.lines)), strict=True):
            if self.lines[at].startswith(_TITLES[1]) and at + 1 < end and not self.lines[at + 1]:
                box = next((i for i in range(at, end) if self.lines[i] == "╵"), min(end, at + _MAX_MESSAGE))
                masked.extend(range(at, box))
        return masked

    def spoken(self, line: str) -> bool:
        """Return whether ``line`` may be the message of a program about its own work.

        In a run of tests most lines are a report: of what tests did, with the texts of the errors that they met. There
        only what a shell or a program says under its name counts, and what names an option or a path of the action.
        """
        if not self.action.runs_tests or _SPOKEN.match(line):
            return True
        if not self._operands.isdisjoint(quoted(line)):
            return True
        tokens = {token.strip("'\"`,;:()[]") for token in line.split()}
        return any(("/" in t or "." in t or t.startswith("--")) and t in self._operands for t in tokens)

    @cached_property
    def _operands(self) -> frozenset[str]:
        """Arguments of the action's calls, options with and without dashes and value; without the names of targets."""
        values = [value for call in self.action.invocations[:_MAX_CALLS] for value in call.arguments[:_MAX_CALLS]]
        options = {each.lstrip("-").partition("=")[0] for each in values if each.startswith("--")}
        return frozenset(each for each in {*values, *options} if len(each) > 1 and not is_test_target(each))

    def _is_source(self, index: int) -> bool:
        """Return whether a line may be the line of code that Python prints below a warning."""
        return index < len(self.lines) and self.lines[index].startswith("  ")

    def _message_lines(self) -> range | list[int]:
        """Return the indices of the lines in which the message of the error that ended the program goes on.

        Nothing marks the end of a Python exception's message. So these are the lines after the last traceback, if it
        ended a single Python program, before one in which the program itself reports an error. A line that begins with
        the name of an exception stays: the program reports the error of another program.
        """
        crash = self.crash
        if crash is not None and crash.language == "node":
            until = min(len(self.lines), crash.index + _MAX_MESSAGE)
            at = (i for i in range(crash.index + 1, until) if self.lines[i].startswith("    at "))
            return range(crash.index + 1, next(at, crash.index + 1))
        if not self.final_tracebacks or self.trust_stdout or not ends_in_python(self.action):
            return []
        last = self.final_tracebacks[-1]
        went_on = self.exit_code == _USAGE_STATUS or self._goes_on_after(last)
        if went_on or _LOGGED.search(self._before(last)):
            return []
        after = range(last.last + 1, len(self.lines))
        until = next((i for i in after if _NEXT_ERROR.match(self.lines[i])), len(self.lines))
        return [i for i in range(last.last + 1, until) if not _EXCEPTION.match(self.lines[i])]

    @cached_property
    def lower_text(self) -> str:
        """Both streams in lower case, for a cheap test whether a rule can fire at all."""
        return "\n".join((*self.stderr, *self.stdout)).lower()

    def mentions(self, *needles: str) -> bool:
        return any(n in self.lower_text for n in needles)

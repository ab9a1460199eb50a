"""File descriptors of the process: how they are divided among connections, commands and the rest.

When descriptors run out, whoever needs one next fails, and that is anybody: the journal, a command, a file of an
environment. So connections, the only ones that a stranger can open, and commands have bounds below the limit.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass

from errata_protocol.errors import InvalidRequest

JOURNAL_AND_LOOP = 128
"""Segments that are kept open, SQLite's files for each reader, the event loop, logs, locks, the launcher; measured: 30
to 90."""

ENVIRONMENTS = 8
"""One of so many is left to files and sockets of environments."""

LEAST_CONNECTIONS = 32
LEAST_FOR_COMMANDS = 64
"""Less than these is refused at start: little would work."""

ENOUGH = 65_536
"""Up to here the limit is raised unasked. Some programs try every number below their limit when they start another."""

RAISE = "ulimit -n {} (systemd: LimitNOFILE=, docker: --ulimit nofile=)"

FOR_SQLITE = 6
"""What SQLite opens at once for one connection. It does not say why it could not."""

EXHAUSTED = (errno.EMFILE, errno.ENFILE)
"""No descriptor is free: of this process, or of the whole machine."""


@dataclass(frozen=True, slots=True)
class DescriptorBudget:
    """Who may have how many descriptors.

    Args:
        limit: Of the process, RLIMIT_NOFILE.
        commands: Of all commands in sandboxes together.
        connections: Of clients; one each.
    """

    limit: int
    commands: int
    connections: int


def least(commands: int) -> int:
    """Return the lowest limit with which a server starts.

    Args:
        commands: Descriptors that all commands together take where there are enough; 0 without sandboxes.
    """
    return _limit_for(LEAST_CONNECTIONS + min(commands, LEAST_FOR_COMMANDS))


def enough(connections: int, commands: int) -> int:
    """Return the limit that has room for so many connections beside ``commands`` descriptors of commands."""
    return _limit_for(connections + commands)


def budget(limit: int, commands: int) -> DescriptorBudget:
    """Divide ``limit`` descriptors; what is too little for ``commands`` is halved between them and connections.

    Args:
        limit: RLIMIT_NOFILE.
        commands: As in `least`.
    """
    rest = max(0, limit - JOURNAL_AND_LOOP - limit // ENVIRONMENTS)
    commands = min(commands, rest // 2)
    return DescriptorBudget(limit, commands, rest - commands)


def checked(limit: int, commands: int) -> DescriptorBudget:
    """Return the budget of a server that is about to start.

    Raises:
        InvalidRequest: The limit is too low for it.
    """
    needed = least(commands)
    if limit < needed:
        what = "a server with sandboxes" if commands else "a server"
        raise InvalidRequest(
            f"the limit of open files (ulimit -n) is {limit}, and {what} needs {needed} at least: "
            f"raise it with {RAISE.format(max(4096, needed))}"
        )
    return budget(limit, commands)


def limit() -> int:
    """Return how many descriptors this process may have."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def reachable() -> int:
    """Return the limit that `raise_limit` would reach."""
    soft, hard = (_bounded(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    return max(soft, min(hard, ENOUGH))


def raise_limit() -> int:
    """Raise the limit as far as this process may, up to `ENOUGH`; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = reachable()
    if wanted > _bounded(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def trouble(needed: int = 1) -> str | None:
    """Say that fewer than ``needed`` descriptors are free now; None where they are."""
    opened = []
    try:
        for _ in range(needed):
            opened.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in EXHAUSTED:
            return explained(error)
    finally:
        for fd in opened:
            os.close(fd)
    return None


def explained(error: OSError) -> str:
    """Return the text of an error; where descriptors ran out, with the limit and the way to raise it."""
    text = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        more = RAISE.format(max(4096, 2 * limit()))
        return f"{text}: the limit of open files (ulimit -n) is {limit()}; raise it with {more}"
    if error.errno == errno.ENFILE:
        return f"{text}: the machine has no more (sysctl fs.file-max)"
    return text


def _limit_for(used: int) -> int:
    rest = JOURNAL_AND_LOOP + used
    return -(-rest * ENVIRONMENTS // (ENVIRONMENTS - 1))


def _bounded(value: int) -> int:
    return 2**31 - 1 if value == resource.RLIM_INFINITY else value

"""The limit of open files, divided among connections, commands and the rest of the server.

When descriptors run out, any part of the server may fail next: the journal, a command, a file of an environment.
Connections, which anybody can open, and commands are therefore limited to less than all descriptors.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass

from errata_protocol.errors import InvalidRequest

JOURNAL_AND_LOOP = 128
"""Descriptors for the journal and its readers, the event loop, logs, locks and the launcher; measured: 30 to 90."""

ENVIRONMENTS = 8
"""One in so many descriptors is left to environments."""

LEAST_CONNECTIONS = 32
LEAST_FOR_COMMANDS = 64
"""The server does not start with fewer descriptors than these for clients or for commands."""

ENOUGH = 65_536
"""Highest value that `raise_limit` sets. Some programs close every number below the limit when they start another."""

RAISE = "ulimit -n {} (systemd: LimitNOFILE=, docker: --ulimit nofile=)"

FOR_SQLITE = 6
"""Descriptors that SQLite opens for one connection. Its error does not say that they ran out."""

EXHAUSTED = (errno.EMFILE, errno.ENFILE)
"""Error numbers for running out of descriptors: of the process, or of the machine."""


@dataclass(frozen=True, slots=True)
class DescriptorBudget:
    """How the descriptors of the process are divided.

    Args:
        limit: Descriptors of the process, RLIMIT_NOFILE.
        commands: Descriptors for all commands in sandboxes together.
        connections: Connections of clients; each takes one descriptor.
    """

    limit: int
    commands: int
    connections: int


def least(commands: int) -> int:
    """Return the lowest limit with which a server starts.

    Args:
        commands: Descriptors that all commands together would take; 0 without sandboxes.
    """
    return _limit_for(LEAST_CONNECTIONS + min(commands, LEAST_FOR_COMMANDS))


def enough(connections: int, commands: int) -> int:
    """Return the limit that allows so many connections in addition to ``commands`` descriptors for commands."""
    return _limit_for(connections + commands)


def budget(limit: int, commands: int) -> DescriptorBudget:
    """Divide ``limit`` descriptors. Commands get what they would take, but at most half of what can be divided.

    Args:
        limit: RLIMIT_NOFILE.
        commands: As in `least`.
    """
    rest = max(0, limit - JOURNAL_AND_LOOP - limit // ENVIRONMENTS)
    commands = min(commands, rest // 2)
    return DescriptorBudget(limit, commands, rest - commands)


def checked(limit: int, commands: int) -> DescriptorBudget:
    """Return the budget of a server that is about to start; arguments as in `budget`.

    Raises:
        InvalidRequest: The limit is lower than `least`.
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
    """Return the limit of open files of this process."""
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def reachable() -> int:
    """Return the limit that `raise_limit` would reach."""
    soft, hard = (_bounded(value) for value in resource.getrlimit(resource.RLIMIT_NOFILE))
    return max(soft, min(hard, ENOUGH))


def raise_limit() -> int:
    """Raise the limit of open files as far as allowed, up to `ENOUGH`, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = reachable()
    if wanted > _bounded(soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def trouble(needed: int = 1) -> str | None:
    """Return a message if fewer than ``needed`` descriptors are free now, else None."""
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
    """Return the text of an error; if descriptors ran out, with the limit and how to raise it."""
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

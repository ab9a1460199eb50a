"""The transition table of a session, for both sides (in the manner of h11's ``_state.py``).

Rule 1: a session's state changes only through `transition`. Rule 2: each state lists every event that can happen in it.
An event that is not listed is a bug on this side (LocalProtocolError), never the peer's fault: the machines ask the
table only for what the wire may bring in that state.

The server's side. ABSENT is not stored: a session that is not in memory is absent, whether the journal has it or not.
In OPENING, FINDING and HIBERNATING the machine waits for its shell. Messages for the session that arrive meanwhile are
parked, and processed in order when the wait is over. So "a resume during hibernation waits" (PROTOCOL D12) needs no
rule of its own.

             open                found                    socket lost
    ABSENT ---------> OPENING -----------+     +--------------------------> DETACHED ---+
      ^  |  resume                       v     |        open, resume           |        | detach_ttl,
      |  +----------> FINDING ------> ATTACHED <-------------------------------+        | nothing running
      |                  |   found     |    ^                                           v
      |    refused       |             |    | open, resume (fences the old socket)  HIBERNATING
      +------------------+             +----+                                           |
      +---------- hibernated; ended (from ATTACHED, DETACHED or HIBERNATING) -----------+

The client's side. In UNOPENED and DISCONNECTED there is no socket, or a retry is scheduled.

    UNOPENED --connected--> OPENING --opened--> ATTACHED --taken over--> TAKEN_OVER --claimed--> DISCONNECTED
       ^                       |                 |    ^
       +--socket lost, refused-+   socket lost   |    | resumed
                             DISCONNECTED <------+    |
                                   |  connected       |
                                   +-------------> RESUMING --socket lost, refused--> DISCONNECTED

    any state --ended (closed, expired, lost)--> ENDED
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from ..errors import LocalProtocolError


class Role(Enum):
    """The side of the protocol that a state belongs to."""

    SERVER = auto()
    CLIENT = auto()


class State(Enum):
    """State of a session on one side."""

    # server
    ABSENT = auto()
    OPENING = auto()
    """Asked to exist: the server's shell makes or finds it; the client waits for ``opened``."""
    FINDING = auto()
    ATTACHED = auto()
    DETACHED = auto()
    HIBERNATING = auto()
    # client
    UNOPENED = auto()
    DISCONNECTED = auto()
    RESUMING = auto()
    TAKEN_OVER = auto()
    ENDED = auto()


class Event(Enum):
    """What can happen to a session."""

    # from the peer
    OPEN = auto()
    RESUME = auto()
    MESSAGE = auto()
    """Any other message of the socket that attached, or is about to attach, the session."""
    OPENED = auto()
    RESUMED = auto()
    REFUSED = auto()
    """The open or resume was refused: for the client by the server, for the server by its shell."""
    TAKEN_OVER = auto()
    NOT_ATTACHED = auto()
    ENDED = auto()
    # from the shell
    CONNECTED = auto()
    SOCKET_LOST = auto()
    FOUND = auto()
    FOUND_DETACHED = auto()
    """Found or created, but the socket that asked for it is closed."""
    DETACH_TTL = auto()
    HIBERNATED = auto()
    CLAIMED = auto()
    MISSED = auto()
    """A reply or push arrived whose predecessor did not."""


class Action(Enum):
    """What the machine does on an event."""

    NOTHING = auto()
    # server
    MAKE = auto()
    FIND = auto()
    PARK = auto()
    ATTACH = auto()
    """Fence the socket it was attached to, acknowledge, answer, then send what was missed."""
    ADMIT = auto()
    REFUSE_UNATTACHED = auto()
    ADD = auto()
    """Add it to the sessions in memory, then process what was parked."""
    REPORT_REFUSAL = auto()
    DETACH = auto()
    HIBERNATE = auto()
    END = auto()
    """Remove it from memory; answer its queued requests with the reason of the end."""
    FORGET = auto()
    """Remove it from memory, then process what was parked."""
    # client
    SEND_OPEN = auto()
    SEND_RESUME = auto()
    SEND_UNACCEPTED = auto()
    """Send the requests that the server has not accepted."""
    RETRY_LATER = auto()
    REPORT_TAKEN_OVER = auto()
    FAIL_ALL = auto()


class Transition(NamedTuple):
    """The next state and the action to take."""

    next: State
    action: Action


_S, _E, _A = State, Event, Action


def _waiting(state: State) -> dict[Event, Transition]:
    """Return the rows of a state in which the shell is looking for the session, or creating it."""
    return {
        _E.OPEN: Transition(state, _A.PARK),
        _E.RESUME: Transition(state, _A.PARK),
        _E.MESSAGE: Transition(state, _A.PARK),
        _E.SOCKET_LOST: Transition(state, _A.NOTHING),
        _E.FOUND: Transition(_S.ATTACHED, _A.ADD),
        _E.FOUND_DETACHED: Transition(_S.DETACHED, _A.ADD),
        _E.REFUSED: Transition(_S.ABSENT, _A.REPORT_REFUSAL),
    }


TRANSITIONS: dict[Role, dict[State, dict[Event, Transition]]] = {
    Role.SERVER: {
        _S.ABSENT: {
            _E.OPEN: Transition(_S.OPENING, _A.MAKE),
            _E.RESUME: Transition(_S.FINDING, _A.FIND),
            _E.MESSAGE: Transition(_S.ABSENT, _A.REFUSE_UNATTACHED),
        },
        _S.OPENING: _waiting(_S.OPENING),
        _S.FINDING: _waiting(_S.FINDING),
        _S.ATTACHED: {
            _E.OPEN: Transition(_S.ATTACHED, _A.ATTACH),
            _E.RESUME: Transition(_S.ATTACHED, _A.ATTACH),
            _E.MESSAGE: Transition(_S.ATTACHED, _A.ADMIT),
            _E.SOCKET_LOST: Transition(_S.DETACHED, _A.DETACH),
            _E.ENDED: Transition(_S.ABSENT, _A.END),
        },
        _S.DETACHED: {
            _E.OPEN: Transition(_S.ATTACHED, _A.ATTACH),
            _E.RESUME: Transition(_S.ATTACHED, _A.ATTACH),
            _E.MESSAGE: Transition(_S.DETACHED, _A.REFUSE_UNATTACHED),
            _E.DETACH_TTL: Transition(_S.HIBERNATING, _A.HIBERNATE),
            _E.ENDED: Transition(_S.ABSENT, _A.END),
        },
        _S.HIBERNATING: {
            _E.OPEN: Transition(_S.HIBERNATING, _A.PARK),
            _E.RESUME: Transition(_S.HIBERNATING, _A.PARK),
            _E.MESSAGE: Transition(_S.HIBERNATING, _A.PARK),
            _E.SOCKET_LOST: Transition(_S.HIBERNATING, _A.NOTHING),
            _E.HIBERNATED: Transition(_S.ABSENT, _A.FORGET),
            _E.ENDED: Transition(_S.ABSENT, _A.FORGET),
        },
    },
    Role.CLIENT: {
        _S.UNOPENED: {
            _E.CONNECTED: Transition(_S.OPENING, _A.SEND_OPEN),
            _E.SOCKET_LOST: Transition(_S.UNOPENED, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.UNOPENED, _A.NOTHING),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.OPENING: {
            _E.OPENED: Transition(_S.ATTACHED, _A.SEND_UNACCEPTED),
            _E.REFUSED: Transition(_S.UNOPENED, _A.RETRY_LATER),
            _E.NOT_ATTACHED: Transition(_S.OPENING, _A.NOTHING),  # pipelined behind an open that was refused
            _E.MISSED: Transition(_S.RESUMING, _A.SEND_RESUME),
            _E.SOCKET_LOST: Transition(_S.UNOPENED, _A.NOTHING),
            _E.TAKEN_OVER: Transition(_S.TAKEN_OVER, _A.REPORT_TAKEN_OVER),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.ATTACHED: {
            _E.SOCKET_LOST: Transition(_S.DISCONNECTED, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.RESUMING, _A.SEND_RESUME),
            _E.MISSED: Transition(_S.RESUMING, _A.SEND_RESUME),
            _E.TAKEN_OVER: Transition(_S.TAKEN_OVER, _A.REPORT_TAKEN_OVER),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.DISCONNECTED: {
            _E.CONNECTED: Transition(_S.RESUMING, _A.SEND_RESUME),
            _E.SOCKET_LOST: Transition(_S.DISCONNECTED, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.DISCONNECTED, _A.NOTHING),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.RESUMING: {
            _E.RESUMED: Transition(_S.ATTACHED, _A.SEND_UNACCEPTED),
            _E.REFUSED: Transition(_S.DISCONNECTED, _A.RETRY_LATER),
            _E.NOT_ATTACHED: Transition(_S.RESUMING, _A.NOTHING),  # sent before the socket was fenced
            _E.MISSED: Transition(_S.RESUMING, _A.NOTHING),  # until resumed, replies of the attachment before
            _E.SOCKET_LOST: Transition(_S.DISCONNECTED, _A.NOTHING),
            _E.TAKEN_OVER: Transition(_S.TAKEN_OVER, _A.REPORT_TAKEN_OVER),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.TAKEN_OVER: {
            _E.CLAIMED: Transition(_S.DISCONNECTED, _A.NOTHING),
            _E.SOCKET_LOST: Transition(_S.TAKEN_OVER, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.TAKEN_OVER, _A.NOTHING),
            _E.MISSED: Transition(_S.TAKEN_OVER, _A.NOTHING),
            _E.TAKEN_OVER: Transition(_S.TAKEN_OVER, _A.NOTHING),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.ENDED: {
            _E.SOCKET_LOST: Transition(_S.ENDED, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.ENDED, _A.NOTHING),
            _E.MISSED: Transition(_S.ENDED, _A.NOTHING),
            _E.TAKEN_OVER: Transition(_S.ENDED, _A.NOTHING),
            _E.ENDED: Transition(_S.ENDED, _A.NOTHING),
        },
    },
}


def transition(role: Role, state: State, event: Event) -> Transition:
    """Return the next state and the action for ``event`` in ``state``.

    Raises:
        LocalProtocolError: The event cannot happen in that state: a bug on this side.
    """
    try:
        return TRANSITIONS[role][state][event]
    except KeyError:
        raise LocalProtocolError(
            f"a {role.name.lower()}'s session cannot meet {event.name} while {state.name}"
        ) from None

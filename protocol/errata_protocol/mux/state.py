"""The one transition table of a session, for both sides (after h11's ``_state.py``).

Rule 1: a session's state changes only through `transition`. Rule 2: every state names an action for every event that
can happen in it; an event it does not name is a defect of this side (LocalProtocolError), never the peer's doing: the
machines ask the table only for what the wire may bring in that state.

The server's side. ABSENT is not stored: a session that is not in memory is absent, whether the journal knows it or not.
Opening, finding and falling asleep are waits for the shell; whatever comes for the session meanwhile is parked and
played again, in order, when the wait is over. So "a resume during hibernation waits" (PROTOCOL D12) needs no rule of
its own.

             open                found                    socket lost
    ABSENT ---------> OPENING -----------+     +--------------------------> DETACHED ---+
      ^  |  resume                       v     |        open, resume           |        | detach_ttl,
      |  +----------> SEEKING ------> ATTACHED <-------------------------------+        | nothing admitted
      |                  |   found     |    ^                                           v
      |    refused       |             |    | open, resume (fences the old socket)  HIBERNATING
      +------------------+             +----+                                           |
      +---------------------------- slept, ended, from any state -----------------------+

The client's side. UNOPENED and AWAY have no socket, or wait before they try again.

    UNOPENED --connected--> OPENING --opened--> ATTACHED --taken over--> TAKEN_OVER --claimed--> AWAY or RESUMING
       ^                       |                 |    ^
       +--socket lost, refused-+   socket lost   |    | resumed
                                  AWAY <---------+    |
                                   |  connected       |
                                   +-------------> RESUMING --socket lost, refused--> AWAY

    any state --ended (closed, expired, lost)--> ENDED
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from ..errors import LocalProtocolError


class Role(Enum):
    """Which side."""

    SERVER = auto()
    CLIENT = auto()


class State(Enum):
    """Where a session stands on one side."""

    # server
    ABSENT = auto()
    OPENING = auto()
    """Asked to exist: the server's shell makes or finds it; the client waits for ``opened``."""
    SEEKING = auto()
    ATTACHED = auto()
    DETACHED = auto()
    HIBERNATING = auto()
    # client
    UNOPENED = auto()
    AWAY = auto()
    RESUMING = auto()
    TAKEN_OVER = auto()
    ENDED = auto()


class Event(Enum):
    """What can happen to it."""

    # from the peer
    OPEN = auto()
    RESUME = auto()
    MESSAGE = auto()
    """Any other message of the socket that attached, or is about to attach, the session."""
    OPENED = auto()
    RESUMED = auto()
    REFUSED = auto()
    """The open or resume was refused; on the server, the shell says so."""
    TAKEN = auto()
    NOT_ATTACHED = auto()
    ENDED = auto()
    # from the shell
    CONNECTED = auto()
    SOCKET_LOST = auto()
    FOUND = auto()
    FOUND_ALONE = auto()
    """Found or made, but the socket that asked is gone."""
    TTL = auto()
    SLEPT = auto()
    CLAIMED = auto()
    MISSED = auto()
    """A reply or push is missing before the one that came."""


class Action(Enum):
    """What the machine does with it."""

    NOTHING = auto()
    # server
    MAKE = auto()
    FIND = auto()
    PARK = auto()
    ATTACH = auto()
    """Fence the socket it was attached to, acknowledge, answer, then send what was missed."""
    ADMIT = auto()
    REFUSE_UNATTACHED = auto()
    WELCOME = auto()
    """Keep it, then play again what was parked."""
    TELL_REFUSAL = auto()
    DETACH = auto()
    HIBERNATE = auto()
    BURY = auto()
    """Forget it; answer what is queued with why it ended."""
    FORGET = auto()
    """Forget it, then play again what was parked."""
    # client
    SEND_OPEN = auto()
    SEND_RESUME = auto()
    GO_BACK = auto()
    """Send again what the server has not accepted."""
    TRY_LATER = auto()
    TELL_TAKEN = auto()
    FAIL_ALL = auto()


class Transition(NamedTuple):
    """The state that follows, and what to do."""

    next: State
    action: Action


_S, _E, _A = State, Event, Action


def _waiting(state: State) -> dict[Event, Transition]:
    """Rows of the states in which the server's shell was asked for the session."""
    return {
        _E.OPEN: Transition(state, _A.PARK),
        _E.RESUME: Transition(state, _A.PARK),
        _E.MESSAGE: Transition(state, _A.PARK),
        _E.SOCKET_LOST: Transition(state, _A.NOTHING),
        _E.FOUND: Transition(_S.ATTACHED, _A.WELCOME),
        _E.FOUND_ALONE: Transition(_S.DETACHED, _A.WELCOME),
        _E.REFUSED: Transition(_S.ABSENT, _A.TELL_REFUSAL),
    }


TRANSITIONS: dict[Role, dict[State, dict[Event, Transition]]] = {
    Role.SERVER: {
        _S.ABSENT: {
            _E.OPEN: Transition(_S.OPENING, _A.MAKE),
            _E.RESUME: Transition(_S.SEEKING, _A.FIND),
            _E.MESSAGE: Transition(_S.ABSENT, _A.REFUSE_UNATTACHED),
        },
        _S.OPENING: _waiting(_S.OPENING),
        _S.SEEKING: _waiting(_S.SEEKING),
        _S.ATTACHED: {
            _E.OPEN: Transition(_S.ATTACHED, _A.ATTACH),
            _E.RESUME: Transition(_S.ATTACHED, _A.ATTACH),
            _E.MESSAGE: Transition(_S.ATTACHED, _A.ADMIT),
            _E.SOCKET_LOST: Transition(_S.DETACHED, _A.DETACH),
            _E.ENDED: Transition(_S.ABSENT, _A.BURY),
        },
        _S.DETACHED: {
            _E.OPEN: Transition(_S.ATTACHED, _A.ATTACH),
            _E.RESUME: Transition(_S.ATTACHED, _A.ATTACH),
            _E.MESSAGE: Transition(_S.DETACHED, _A.REFUSE_UNATTACHED),
            _E.TTL: Transition(_S.HIBERNATING, _A.HIBERNATE),
            _E.ENDED: Transition(_S.ABSENT, _A.BURY),
        },
        _S.HIBERNATING: {
            _E.OPEN: Transition(_S.HIBERNATING, _A.PARK),
            _E.RESUME: Transition(_S.HIBERNATING, _A.PARK),
            _E.MESSAGE: Transition(_S.HIBERNATING, _A.PARK),
            _E.SOCKET_LOST: Transition(_S.HIBERNATING, _A.NOTHING),
            _E.SLEPT: Transition(_S.ABSENT, _A.FORGET),
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
            _E.OPENED: Transition(_S.ATTACHED, _A.GO_BACK),
            _E.REFUSED: Transition(_S.UNOPENED, _A.TRY_LATER),
            _E.NOT_ATTACHED: Transition(_S.OPENING, _A.NOTHING),  # pipelined behind an open that was refused
            _E.MISSED: Transition(_S.RESUMING, _A.SEND_RESUME),
            _E.SOCKET_LOST: Transition(_S.UNOPENED, _A.NOTHING),
            _E.TAKEN: Transition(_S.TAKEN_OVER, _A.TELL_TAKEN),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.ATTACHED: {
            _E.SOCKET_LOST: Transition(_S.AWAY, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.RESUMING, _A.SEND_RESUME),
            _E.MISSED: Transition(_S.RESUMING, _A.SEND_RESUME),
            _E.TAKEN: Transition(_S.TAKEN_OVER, _A.TELL_TAKEN),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.AWAY: {
            _E.CONNECTED: Transition(_S.RESUMING, _A.SEND_RESUME),
            _E.SOCKET_LOST: Transition(_S.AWAY, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.AWAY, _A.NOTHING),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.RESUMING: {
            _E.RESUMED: Transition(_S.ATTACHED, _A.GO_BACK),
            _E.REFUSED: Transition(_S.AWAY, _A.TRY_LATER),
            _E.NOT_ATTACHED: Transition(_S.RESUMING, _A.NOTHING),  # sent before the socket was fenced
            _E.MISSED: Transition(_S.RESUMING, _A.NOTHING),  # until resumed, replies of the attachment before
            _E.SOCKET_LOST: Transition(_S.AWAY, _A.NOTHING),
            _E.TAKEN: Transition(_S.TAKEN_OVER, _A.TELL_TAKEN),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.TAKEN_OVER: {
            _E.CLAIMED: Transition(_S.AWAY, _A.NOTHING),
            _E.SOCKET_LOST: Transition(_S.TAKEN_OVER, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.TAKEN_OVER, _A.NOTHING),
            _E.MISSED: Transition(_S.TAKEN_OVER, _A.NOTHING),
            _E.TAKEN: Transition(_S.TAKEN_OVER, _A.NOTHING),
            _E.ENDED: Transition(_S.ENDED, _A.FAIL_ALL),
        },
        _S.ENDED: {
            _E.SOCKET_LOST: Transition(_S.ENDED, _A.NOTHING),
            _E.NOT_ATTACHED: Transition(_S.ENDED, _A.NOTHING),
            _E.MISSED: Transition(_S.ENDED, _A.NOTHING),
            _E.TAKEN: Transition(_S.ENDED, _A.NOTHING),
            _E.ENDED: Transition(_S.ENDED, _A.NOTHING),
        },
    },
}


def transition(role: Role, state: State, event: Event) -> Transition:
    """Return what follows on ``event`` in ``state``.

    Raises:
        LocalProtocolError: This side let something happen that cannot happen in that state.
    """
    try:
        return TRANSITIONS[role][state][event]
    except KeyError:
        raise LocalProtocolError(
            f"a {role.name.lower()}'s session cannot meet {event.name} while {state.name}"
        ) from None

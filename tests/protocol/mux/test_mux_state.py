"""The one transition table: complete, reachable, and never asked for what is not in it (PROTOCOL D)."""

from __future__ import annotations

import pytest

from errata_protocol.errors import LocalProtocolError
from errata_protocol.mux.state import TRANSITIONS, Action, Event, Role, State, transition

START = {Role.SERVER: {State.ABSENT}, Role.CLIENT: {State.UNOPENED, State.DISCONNECTED}}
SERVER_MESSAGES = {Event.OPEN, Event.RESUME, Event.MESSAGE}


@pytest.mark.parametrize("role", Role)
def test_each_state_can_be_reached_and_each_next_state_has_a_row(role: Role) -> None:
    table = TRANSITIONS[role]
    reached, before = set(START[role]), set()
    while reached != before:
        before = set(reached)
        reached |= {step.next for state in before for step in table[state].values()}
    assert reached == set(table)


def test_whatever_a_client_sends_the_server_has_a_row_for_it_in_every_state() -> None:
    for state, row in TRANSITIONS[Role.SERVER].items():
        assert row.keys() >= SERVER_MESSAGES, state


def test_a_lost_socket_and_the_end_of_a_session_meet_the_client_in_every_state() -> None:
    for state, row in TRANSITIONS[Role.CLIENT].items():
        assert row.keys() >= {Event.SOCKET_LOST, Event.ENDED, Event.NOT_ATTACHED}, state


def test_a_message_never_changes_where_a_session_stands() -> None:
    for state, row in TRANSITIONS[Role.SERVER].items():
        assert row[Event.MESSAGE].next is state


def test_only_an_attached_session_admits() -> None:
    admitting = {s for s, row in TRANSITIONS[Role.SERVER].items() if row[Event.MESSAGE].action is Action.ADMIT}
    assert admitting == {State.ATTACHED}


def test_ended_is_the_end() -> None:
    assert {step.next for step in TRANSITIONS[Role.CLIENT][State.ENDED].values()} == {State.ENDED}


def test_an_event_that_cannot_happen_is_this_sides_defect() -> None:
    with pytest.raises(LocalProtocolError, match="a server's session cannot meet HIBERNATED while ATTACHED"):
        transition(Role.SERVER, State.ATTACHED, Event.HIBERNATED)


def test_every_state_stands_in_the_drawing() -> None:
    from errata_protocol.mux import state as module

    for name in State.__members__:
        assert module.__doc__ is not None and name in module.__doc__, name

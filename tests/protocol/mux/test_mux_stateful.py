"""Any interleaving of loss, repetition, delay, reconnect and crash keeps the promises of PROTOCOL D2-D10 and D12."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from errata_protocol.errors import JournalUnavailable
from tests.protocol.mux.world import TYPES, World


class Interleavings(RuleBasedStateMachine):
    """The model: executed once, replies in order, pushes once and in order of seq; see `World.heard`."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    # -- the trainer

    @precondition(lambda self: len(self.world.keys) < 3)
    @rule()
    def open(self) -> None:
        self.world.open()

    @precondition(lambda self: self.world.client.sessions)
    @rule(data=st.data(), kinds=st.lists(st.sampled_from(["reset", "step", "step", "mcp"]), min_size=1, max_size=6))
    def request(self, data: st.DataObject, kinds: list[str]) -> None:
        session = data.draw(st.sampled_from(self.world.live()))
        for kind in kinds:
            self.world.request(session, kind)

    @precondition(lambda self: self.world.client.sessions)
    @rule(data=st.data(), t=st.integers(0, 3), deadline_ms=st.none() | st.integers(0, 2000))
    def conditional(self, data: st.DataObject, t: int, deadline_ms: int | None) -> None:
        session = data.draw(st.sampled_from(self.world.live()))
        self.world.request(session, "step", condition=(t, None), deadline_ms=deadline_ms)

    @precondition(lambda self: self.world.client.sessions)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(self.world.live()))
        requests = [*session.sent.values(), *session.unsent]
        if requests:
            self.world.client.cancel(session, data.draw(st.sampled_from(requests)))

    @precondition(lambda self: self.world.client.sessions and len(self.world.keys) < 5)
    @rule(data=st.data(), t=st.integers(0, 2))
    def fork(self, data: st.DataObject, t: int) -> None:
        self.world.fork(data.draw(st.sampled_from(self.world.live())), t)

    @precondition(lambda self: len(self.world.client.sessions) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.request(data.draw(st.sampled_from(self.world.live())), "close")

    @precondition(lambda self: self.world.client.sessions)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        self.world.client.read("state", data.draw(st.sampled_from(self.world.live())))

    # -- sockets

    @precondition(lambda self: self.world.wire is None)
    @rule()
    def connect(self) -> None:
        self.world.connect()

    @precondition(lambda self: self.world.wire is not None)
    @rule()
    def hang_up(self) -> None:
        self.world.hang_up()

    @precondition(lambda self: self.world.wire is not None and self.world.client.has_data)
    @rule(max_bytes=st.none() | st.just(1))
    def client_sends(self, max_bytes: int | None) -> None:
        self.world.client_sends(max_bytes)

    @precondition(lambda self: any(wire.up for wire in self.world.wires))
    @rule(data=st.data(), twice=st.booleans())
    def server_hears(self, data: st.DataObject, twice: bool) -> None:
        wire = data.draw(st.sampled_from([wire for wire in self.world.wires if wire.up]))
        self.world.server_hears(wire, twice=twice)

    @precondition(lambda self: self.world.shell.writable)
    @rule()
    def server_sends(self) -> None:
        self.world.server_sends()

    @precondition(lambda self: self.world.wire is not None and self.world.wire.down)
    @rule(twice=st.booleans())
    def client_hears(self, twice: bool) -> None:
        self.world.client_hears(twice=twice)

    @precondition(lambda self: any(w.server is not None and w is not self.world.wire for w in self.world.wires))
    @rule(data=st.data())
    def server_notices(self, data: st.DataObject) -> None:
        lost = [wire for wire in self.world.wires if wire.server is not None and wire is not self.world.wire]
        self.world.server_notices(data.draw(st.sampled_from(lost)))

    # -- the server

    @precondition(lambda self: self.world.shell.due)
    @rule(data=st.data(), fail=st.integers(0, 9))
    def perform(self, data: st.DataObject, fail: int) -> None:
        index = data.draw(st.integers(0, len(self.world.shell.due) - 1))
        self.world.shell.perform(index, self.world.now, fail=fail == 0)

    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        if self.world.journal.rows:
            sid = data.draw(st.sampled_from(sorted(self.world.journal.rows)))
            if self.world.journal.rows[sid].status == "open":
                self.world.push(sid)

    @rule(refusing=st.booleans())
    def journal(self, refusing: bool) -> None:
        self.world.shell.protocol.refuse(JournalUnavailable("no space", retry_after=0.1) if refusing else None)

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def server_crashes(self) -> None:
        self.world.server_crashes()

    @rule()
    def client_crashes(self) -> None:
        self.world.client_crashes()

    @invariant()
    def nothing_ran_twice(self) -> None:
        rows = self.world.journal.rows.values()
        executed = [recorded.request for row in rows for recorded in row.requests if recorded.kind in TYPES]
        assert len(executed) == len(set(executed))

    def teardown(self) -> None:
        self.world.settle()
        self.world.check_rest()


TestInterleavings: Any = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)

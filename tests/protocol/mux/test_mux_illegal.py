"""Requests that can never be admitted, between legal ones: each fails once, the others take effect once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from errata_protocol.capabilities import ServerLimits
from errata_protocol.mux import (
    ClientProtocol,
    EncodedReply,
    Failed,
    FindSession,
    RecordError,
    Replied,
    RunRequest,
    ServerConfig,
    ServerProtocol,
    Stored,
)

SID, KEY = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "n4Jr6Lm8Po0Qs2Tu4Vw6Xy"


@given(st.lists(st.sampled_from(["legal", "deadline", "condition", "talk", "cut"]), max_size=14), st.integers(1, 6))
def test_each_request_has_one_outcome(plan: list[str], in_flight: int) -> None:
    server = ServerProtocol(ServerConfig(limits=ServerLimits(in_flight_session=in_flight)))
    client, connection, now = ClientProtocol(), server.connect(), 0.0
    events: list[Any] = []
    ran: list[bytes] = []

    def perform(effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, FindSession):
                perform(server.found(effect, Stored(recovery="snapshot"), now))
            elif isinstance(effect, RecordError):
                perform(server.completed(effect, effect.reply, now))
            elif isinstance(effect, RunRequest):
                ran.append(effect.data)
                perform(server.completed(effect, EncodedReply("observation", effect.data, "e-1", len(ran)), now))

    def talk() -> None:
        nonlocal now
        for _ in range(200):
            for frame in client.data_to_send():
                perform(server.receive(connection, frame, now))
            for frame in connection.data_to_send():
                events.extend(client.receive(frame, now))
            if not client.has_data and not connection.has_data:
                now += 10.0
                events.extend(client.tick(now) or ())
                perform(server.tick(now))

    client.connected(now)
    session = client.open(SID, KEY)
    legal, illegal = [], []
    for n, what in enumerate(plan):
        data = b'{"n":%d}' % n
        if what == "talk":
            talk()
        elif what == "cut":
            perform(server.disconnect(connection, now))
            client.disconnected(now)
            connection = server.connect()
            client.connected(now)
        elif what == "legal":
            legal.append(client.request(session, "step", data))
        else:
            bad: Any = {"deadline_ms": -1} if what == "deadline" else {"condition": (-1, None)}
            illegal.append(client.request(session, "step", data, **bad))
    talk()
    assert ran == [request.data for request in legal]
    assert [event.request for event in events if isinstance(event, Replied)] == legal
    failed = [event for event in events if isinstance(event, Failed)]
    assert [(event.request, event.error.code, event.recorded) for event in failed] == [
        (request, "INVALID_ENVELOPE", False) for request in illegal
    ]

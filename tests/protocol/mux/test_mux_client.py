"""The client's machine: what is sent again, what fails, what is told (PROTOCOL D4-D9, D12)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from errata_protocol.errors import InvalidRequest, LocalProtocolError, RemoteProtocolError
from errata_protocol.mux import (
    Answered,
    Attached,
    ClientConfig,
    ClientProtocol,
    ClientSession,
    Failed,
    GoneAway,
    Pushed,
    Refused,
    Replied,
    SessionEnded,
    TakenOver,
)
from errata_protocol.payload import digest

SID, KEY = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "n4Jr6Lm8Po0Qs2Tu4Vw6Xy"
OTHER = "other0Zq3vK8s0T1u5Wb7Y"
PAYLOAD = '{"observation":{},"reward":null,"done":false}'


class Client:
    """A machine whose server is the test."""

    def __init__(self, **config: Any) -> None:
        self.protocol = ClientProtocol(ClientConfig(**{"in_flight_session": 4, "ack_every": 3, **config}))
        self.now = 0.0

    def sent(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        for frame in self.protocol.data_to_send():
            text = json.loads(frame)
            said += text if isinstance(text, list) else [text]
        return said

    def hear(self, *envelopes: dict[str, Any]) -> list[Any]:
        return self.protocol.receive(json.dumps(list(envelopes)), self.now)

    def attached(self) -> ClientSession:
        self.protocol.connected(self.now)
        session = self.protocol.open(SID, KEY)
        self.sent()
        (opened,) = self.hear(position("opened"))
        assert isinstance(opened, Attached)
        return session

    def reconnect(self) -> None:
        self.protocol.disconnected(self.now)
        self.protocol.connected(self.now)


def position(type: str = "resumed", next_id: int = 1, **more: Any) -> dict[str, Any]:
    told = {"next_id": next_id, "eid": None, "t": None, "seq": 0, "recovery": "none", "fence": 1}
    return {"sid": SID, "type": type, "data": told | more}


def observation(id: int, payload: str = PAYLOAD) -> dict[str, Any]:
    place = {"eid": "e-1", "t": id - 1}
    return {"sid": SID, "id": id, "type": "observation", **place, "data": json.loads(payload)}


def error(code: str, id: int | None = None, **more: Any) -> dict[str, Any]:
    address = {} if id is None else {"id": id}
    return {"sid": SID, **address, "type": "error", "data": {"message": "m", "code": code, **more}}


@pytest.fixture
def client() -> Client:
    return Client()


def ids(messages: list[dict[str, Any]]) -> list[tuple[str, int | None]]:
    return [(message["type"], message.get("id")) for message in messages]


def test_d3_requests_are_pipelined_behind_the_open(client: Client) -> None:
    session = client.protocol.open(SID, KEY, OTHER)
    client.protocol.request(session, "reset")
    client.protocol.request(session, "step", b'{"a":  1.0}', condition=(0, None), deadline_ms=5)
    assert client.sent() == []
    client.protocol.connected(0.0)
    (frame,) = client.protocol.data_to_send()
    assert b'"if":{"t":0},"deadline_ms":5,"data":{"a":  1.0}}' in frame
    opened, *rest = json.loads(frame)
    assert opened == {"sid": SID, "type": "open", "data": {"key": KEY, "fence": 1, "group": OTHER}}
    assert ids(rest) == [("reset", 1), ("step", 2)]


def test_d9_no_more_is_sent_than_the_bounds_allow() -> None:
    client = Client(in_flight_session=3, in_flight_socket=5)
    session = client.attached()
    other = client.protocol.open(OTHER, KEY)
    client.sent()
    for _ in range(5):
        client.protocol.request(session, "step")
        client.protocol.request(other, "step")
    sent = client.sent()
    assert [m["id"] for m in sent if m["sid"] == SID] == [1, 2, 3]
    assert [m["id"] for m in sent if m["sid"] == OTHER] == [1, 2]
    client.hear(observation(1))
    assert [(m["sid"], m["id"]) for m in client.sent()] == [(SID, 4)]
    client.hear(observation(2))
    client.hear(observation(3), observation(4))
    assert {(m["sid"], m["id"]) for m in client.sent() if m["type"] == "step"} >= {(SID, 5), (OTHER, 3)}


@pytest.mark.parametrize("ending", ["taken_over", "forgotten"])
def test_d9_requests_that_the_bound_held_back_are_sent_when_another_session_leaves(ending: str) -> None:
    client = Client(in_flight_session=3, in_flight_socket=3)
    session = client.attached()
    other = client.protocol.open(OTHER, KEY)
    client.hear({**position("opened"), "sid": OTHER})
    for _ in range(3):
        client.protocol.request(session, "step")
    client.protocol.request(other, "step")
    assert OTHER not in [m["sid"] for m in client.sent() if m["type"] == "step"]
    if ending == "taken_over":
        client.hear({"sid": SID, "type": "detached", "data": {"reason": "taken_over"}})
    else:
        client.protocol.forget(session)
    assert [(m["sid"], m["id"]) for m in client.sent() if m["type"] == "step"] == [(OTHER, 1)]


def test_d4_replies_are_matched_and_repeats_dropped(client: Client) -> None:
    session = client.attached()
    request = client.protocol.request(session, "step")
    (event,) = client.hear(observation(1), observation(1))
    assert isinstance(event, Replied) and event.request is request and (event.eid, event.t) == ("e-1", 0)
    assert (session.eid, session.t, session.last) == ("e-1", 0, 1)


def test_c1_a_payload_without_its_digest_is_the_servers_fault(client: Client) -> None:
    session = client.attached()
    client.protocol.request(session, "step")
    frame = f'{{"sid":"{SID}","id":1,"type":"observation","digest":"%s","data":{PAYLOAD}}}'
    with pytest.raises(RemoteProtocolError, match="digest"):
        client.protocol.receive(frame % digest(b"{}"), 0.0)
    with pytest.raises(RemoteProtocolError, match="digest"):
        client.protocol.receive(frame % "sha256:\u00e9", 0.0)
    (event,) = client.protocol.receive(frame % digest(PAYLOAD.encode()), 0.0)
    assert isinstance(event, Replied) and event.payload == PAYLOAD.encode()


def test_d5_go_back_n_waits_for_all_refusals_and_for_retry_after(client: Client) -> None:
    session = client.attached()
    for _ in range(4):
        client.protocol.request(session, "step")
    assert ids(client.sent()) == [("step", n) for n in (1, 2, 3, 4)]
    _, refused = client.hear(observation(1), error("OVERLOADED", 2, retry_after=1.5))
    assert isinstance(refused, Refused) and refused.retry_at == 1.5
    client.now = 2.0
    client.protocol.tick(2.0)
    assert client.sent() == [], "3 and 4 are still on their way to a refusal"
    client.hear(error("OUT_OF_ORDER", 3, next_id=2))
    assert client.sent() == []
    client.hear(error("OUT_OF_ORDER", 4, next_id=2))
    assert ids(client.sent()) == [("step", n) for n in (2, 3, 4)]


def test_d5_refusals_that_never_come_are_not_waited_for_for_ever() -> None:
    client = Client(drain_s=5.0)
    session = client.attached()
    client.protocol.request(session, "step")
    client.protocol.request(session, "step")
    client.sent()
    client.hear(error("JOURNAL_UNAVAILABLE", 1, retry_after=1.0))
    assert client.protocol.next_timer() == 6.0
    client.protocol.tick(6.0)
    assert ids(client.sent()) == [("step", 1), ("step", 2)]


def test_d5_a_request_that_can_never_be_admitted_fails_and_the_rest_moves_up(client: Client) -> None:
    session = client.attached()
    first = client.protocol.request(session, "fork", b"{}")
    second = client.protocol.request(session, "step")
    client.sent()
    (failed,) = client.hear(error("UNKNOWN_TYPE", 1), error("OUT_OF_ORDER", 2, next_id=1))
    assert isinstance(failed, Failed) and failed.request is first and not failed.recorded
    assert ids(client.sent()) == [("step", 1)]
    (replied,) = client.hear(observation(1))
    assert replied.request is second


def test_d4_a_conflict_fails_one_request_only(client: Client) -> None:
    session = client.attached()
    for _ in range(2):
        client.protocol.request(session, "step")
    client.sent()
    (failed, *_) = client.hear(error("CONFLICT", 1, next_id=2))
    assert isinstance(failed, Failed) and failed.error.code == "CONFLICT" and client.sent() == []
    events = client.hear(observation(1), observation(2))
    assert [event.request is None for event in events] == [True, False]


def test_d5_a_recorded_error_is_final(client: Client) -> None:
    session = client.attached()
    client.protocol.request(session, "step")
    (failed,) = client.hear(error("EXECUTION_ERROR", 1))
    assert isinstance(failed, Failed) and failed.recorded and failed.id == 1 and session.last == 1
    client.protocol.request(session, "step")
    (unknown,) = client.hear(error("SOMETHING_NEW", 2))
    assert unknown.recorded and session.last == 2


def test_d7_after_a_reconnect_only_what_was_not_accepted_is_sent_again(client: Client) -> None:
    session = client.attached()
    for _ in range(4):
        client.protocol.request(session, "step")
    client.sent()
    client.hear(observation(1))
    client.reconnect()
    (resume,) = client.sent()
    assert resume == {
        "type": "resume", "data": [{"sid": SID, "key": KEY, "last": 1, "last_seq": 0, "fence": 2}],
    }  # fmt: skip
    (opened,) = client.hear(position(next_id=4))
    assert isinstance(opened, Attached) and ids(client.sent()) == [("step", 4)]
    assert [event.id for event in client.hear(observation(2), observation(3), observation(4))] == [2, 3, 4]
    assert client.protocol._in_flight == 0


def test_d7_many_sessions_resume_in_one_message(client: Client) -> None:
    for n in range(1500):
        client.protocol.adopt(f"many-{n:0>20}", KEY, last=n, last_seq=0)
    client.protocol.connected(0.0)
    assert [len(message["data"]) for message in client.sent()] == [1000, 500]


def test_d7_an_adopted_session_goes_on_where_the_server_stands(client: Client) -> None:
    client.protocol.connected(0.0)
    session = client.protocol.adopt(SID, KEY, last=3, last_seq=2)
    request = client.protocol.request(session, "step")
    (resume,) = client.sent()
    assert resume["data"][0]["last"] == 3 and resume["data"][0]["last_seq"] == 2
    client.hear(position(next_id=6, seq=2))
    assert ids(client.sent()) == [("step", 6)]
    events = client.hear(observation(4), observation(5), observation(6))
    assert [event.request for event in events] == [None, None, request]


def test_d7_a_server_that_knows_a_later_attach_is_answered_with_a_higher_fence(client: Client) -> None:
    client.protocol.connected(0.0)
    client.protocol.adopt(SID, KEY, last=0, last_seq=0)
    assert client.sent()[0]["data"][0]["fence"] == 1
    client.hear(error("NOT_ATTACHED", fence=8))
    assert client.sent()[0]["data"][0]["fence"] == 9


def test_d7_a_gap_in_replies_or_pushes_makes_the_client_resume(client: Client) -> None:
    session = client.attached()
    for _ in range(3):
        client.protocol.request(session, "step")
    client.sent()
    assert client.hear(observation(2), observation(3)) == []
    (resume,) = client.sent()
    assert resume["type"] == "resume" and resume["data"][0]["last"] == 0
    client.hear(position(next_id=4))
    assert [e.id for e in client.hear(observation(1), observation(2), observation(3))] == [1, 2, 3]
    push = {"sid": SID, "type": "reward", "data": {}}
    assert client.hear({**push, "seq": 2}) == [] and client.sent()[-1]["type"] == "resume"
    client.hear(position(next_id=4, seq=2))
    (pushed,) = client.hear({**push, "seq": 2})
    assert isinstance(pushed, Pushed) and pushed.seq == 2, "the one before was deleted"


def test_d4_an_id_that_another_process_used_answers_no_request_of_this_one(client: Client) -> None:
    session = client.attached()
    mine, next_one = (client.protocol.request(session, "step", data) for data in (b'{"n":1}', b'{"n":2}'))
    client.sent()
    client.reconnect()
    client.sent()
    client.hear(position(next_id=3))
    theirs = observation(1) | {"request": digest(b'{"n":7}')}
    failed, replied = client.hear(theirs)
    assert isinstance(failed, Failed) and failed.request is mine and not failed.recorded
    assert failed.error.code == "CONFLICT"
    assert isinstance(replied, Replied) and replied.request is None
    (replied,) = client.hear(observation(2) | {"request": digest(b'{"n":2}')})
    assert isinstance(replied, Replied) and replied.request is next_one


def test_d7_a_session_that_was_taken_over_is_not_fought_for(client: Client) -> None:
    session = client.attached()
    client.protocol.request(session, "step")
    client.sent()
    (taken,) = client.hear({"sid": SID, "type": "detached", "data": {"reason": "taken_over"}})
    assert isinstance(taken, TakenOver)
    assert client.hear(error("NOT_ATTACHED", 1)) == [] and client.sent() == []
    client.reconnect()
    assert client.sent() == []
    client.protocol.claim(session)
    assert ids(client.sent()) == [("resume", None)]
    client.hear(position(next_id=1))
    assert ids(client.sent()) == [("step", 1)]


def test_d7_a_session_that_was_taken_over_while_there_was_no_socket_is_not_fought_for(client: Client) -> None:
    session = client.attached()
    client.protocol.request(session, "step")
    client.sent()
    client.reconnect()
    assert client.sent()[0]["data"][0]["fence"] == 2
    (taken,) = client.hear(error("NOT_ATTACHED", fence=4))
    assert isinstance(taken, TakenOver) and client.sent() == []
    client.reconnect()
    assert client.sent() == []
    client.protocol.claim(session)
    assert client.sent()[0]["data"][0]["fence"] == 5
    assert client.hear(error("NOT_ATTACHED", fence=7)) == [], "a claim goes on above the fence of the moment"
    assert client.sent()[0]["data"][0]["fence"] == 8
    client.hear(position(next_id=1, fence=8))
    assert ids(client.sent()) == [("step", 1)]


@pytest.mark.parametrize("next_id", [2, 1])
def test_d12_a_lost_session_fails_all_it_has(client: Client, next_id: int) -> None:
    session = client.attached()
    client.protocol.request(session, "step")
    client.protocol.request(session, "step")
    read = client.protocol.read("state", session)
    client.hear(observation(1))
    client.reconnect()
    client.sent()
    events = client.hear(error("SESSION_LOST") if next_id == 2 else position(next_id=1))
    failed, answered, ended = events
    assert isinstance(failed, Failed) and failed.id == 2 and failed.error.code == "SESSION_LOST"
    assert isinstance(answered, Answered) and answered.read is read and answered.error is not None
    assert isinstance(ended, SessionEnded) and client.protocol.sessions == {}
    with pytest.raises(LocalProtocolError, match="over"):
        client.protocol.request(session, "step")


@pytest.mark.parametrize("code", ["SESSION_CLOSED", "SESSION_EXPIRED", "SESSION_LOST"])
@pytest.mark.parametrize("is_attached", [True, False], ids=["resume", "open"])
def test_d7_a_session_that_is_over_still_gets_the_replies_it_missed(
    client: Client, code: str, is_attached: bool
) -> None:
    if is_attached:
        session = client.attached()
    else:
        client.protocol.connected(client.now)
        session = client.protocol.open(SID, KEY)
    first, second, third = [client.protocol.request(session, "step") for _ in range(3)]
    client.sent()
    client.reconnect()
    client.sent()
    refused = [] if is_attached else [error("NOT_ATTACHED", id) for id in (1, 2, 3)]
    assert client.hear(error(code, next_id=3), *refused) == [], "two replies are still to come"
    one, two, failed, ended = client.hear(observation(1), observation(2))
    assert isinstance(one, Replied) and one.request is first
    assert isinstance(two, Replied) and two.request is second
    assert isinstance(failed, Failed) and failed.request is third and failed.error.code == code
    assert isinstance(ended, SessionEnded) and ended.error.code == code and client.protocol.sessions == {}


def test_d7_a_socket_that_is_lost_before_the_missed_replies_is_made_good_by_the_next_resume(client: Client) -> None:
    session = client.attached()
    client.protocol.request(session, "step")
    client.reconnect()
    client.sent()
    assert client.hear(error("SESSION_EXPIRED", next_id=2)) == []
    client.reconnect()
    client.sent()
    (refused,) = client.hear(error("JOURNAL_UNAVAILABLE", retry_after=1.0))
    assert isinstance(refused, Refused)
    client.protocol.tick(1.0)
    assert ids(client.sent()) == [("resume", None)]
    assert client.hear(error("SESSION_EXPIRED", next_id=2)) == []
    assert [type(event) for event in client.hear(observation(1))] == [Replied, SessionEnded]


def test_d12_a_session_whose_last_recorded_reply_is_that_of_close_ends_with_it(client: Client) -> None:
    session = client.attached()
    for kind in ("step", "close", "step"):
        client.protocol.request(session, kind)  # type: ignore[arg-type] # kinds by name
    client.reconnect()
    client.sent()
    assert client.hear(error("SESSION_CLOSED", next_id=3)) == []
    closed = {"sid": SID, "id": 2, "type": "closed", "data": {}}
    kinds = [type(event) for event in client.hear(observation(1), closed)]
    assert kinds == [Replied, Replied, Failed, SessionEnded]


def test_d5_an_open_that_is_refused_is_tried_again_with_all_behind_it(client: Client) -> None:
    client.protocol.connected(0.0)
    session = client.protocol.open(SID, KEY)
    client.protocol.request(session, "reset")
    client.sent()
    (refused,) = client.hear(error("CAPACITY_REACHED", retry_after=2.0), error("NOT_ATTACHED", 1))
    assert isinstance(refused, Refused) and client.protocol.next_timer() == 2.0
    client.protocol.tick(2.0)
    assert ids(client.sent()) == [("open", None), ("reset", 1)]
    assert client.protocol._in_flight == 1


def test_d2_reads_are_repeated_until_they_are_answered(client: Client) -> None:
    session = client.attached()
    read = client.protocol.read("state", session, b'{"t":1}')
    assert client.sent() == [{"sid": SID, "q": 1, "type": "state", "data": {"t": 1}}]
    refusal = {"sid": SID, "q": 1, "type": "error", "data": {"message": "m", "code": "OVERLOADED", "retry_after": 1.0}}
    assert client.hear(refusal) == []
    client.protocol.tick(1.0)
    assert [m["q"] for m in client.sent()] == [1]
    client.reconnect()
    client.sent()
    client.hear(position())
    assert [m["q"] for m in client.sent()] == [1]
    answer = {"sid": SID, "q": 1, "type": "state_at", "eid": "e", "t": 1, "kind": "step", "data": {"a": 1}}
    (answered,) = client.hear(answer, answer)
    assert isinstance(answered, Answered) and answered.read is read and json.loads(answered.payload) == {"a": 1}


def test_d8_pushes_come_once_and_acknowledged(client: Client) -> None:
    client.attached()
    events = client.hear(*({"sid": SID, "seq": seq, "type": "reward", "data": {"n": seq}} for seq in (1, 2, 2, 1, 3)))
    assert [event.seq for event in events] == [1, 2, 3]
    (ack,) = client.sent()
    assert ack == {"sid": SID, "type": "ack", "data": {"last": 0, "last_seq": 3}}


def test_d8_goaway_stops_new_requests_until_the_next_socket(client: Client) -> None:
    session = client.attached()
    (away,) = client.hear({"type": "goaway", "data": {"retry_after": 2.5}})
    assert isinstance(away, GoneAway) and away.retry_after_s == 2.5
    client.protocol.request(session, "step")
    assert client.sent() == []
    client.reconnect()
    client.sent()
    client.hear(position())
    assert ids(client.sent()) == [("step", 1)]


def test_d10_what_was_not_sent_is_cancelled_here(client: Client) -> None:
    session = client.attached()
    requests = [client.protocol.request(session, "step") for _ in range(5)]
    client.sent()
    assert client.protocol.cancel(session, requests[4]) and not client.protocol.cancel(session, requests[1])
    assert client.sent() == [{"sid": SID, "id": 2, "type": "cancel"}]


def test_d10_what_is_cancelled_before_the_session_is_open_is_taken_back_when_it_is(client: Client) -> None:
    client.protocol.connected(client.now)
    session = client.protocol.open(SID, KEY)
    _, second = [client.protocol.request(session, "step") for _ in range(2)]
    assert ids(client.sent()) == [("open", None), ("step", 1), ("step", 2)]
    assert not client.protocol.cancel(session, second) and client.sent() == []
    client.hear(position("opened"))
    assert ids(client.sent()) == [("cancel", 2)]


def test_d10_what_is_sent_again_after_its_recorded_error_can_still_be_cancelled(client: Client) -> None:
    session = client.attached()
    fork = client.protocol.fork(session, 0, OTHER, KEY)
    client.sent()
    (failed,) = client.hear(error("SANDBOX_FAILED", 1))
    assert isinstance(failed, Failed) and failed.recorded and failed.request is fork
    client.protocol.request_again(session, fork, (4, "e-1"))
    (sent,) = client.sent()
    assert (sent["type"], sent["id"], sent["if"]) == ("fork", 2, {"t": 4, "eid": "e-1"})
    assert not client.protocol.cancel(session, fork)
    assert client.sent() == [{"sid": SID, "id": 2, "type": "cancel"}]
    client.hear({"sid": SID, "id": 2, "type": "forked", "data": {}})
    assert OTHER in client.protocol.sessions


def test_d10_what_is_cancelled_and_has_to_be_sent_again_has_no_effect_then(client: Client) -> None:
    session = client.attached()
    requests = [client.protocol.request(session, "step") for _ in range(3)]
    client.sent()
    client.protocol.disconnected(client.now)
    assert not client.protocol.cancel(session, requests[0]) and not client.protocol.cancel(session, requests[1])
    client.protocol.connected(client.now)
    client.sent()
    client.hear(position(next_id=2))
    cancel, second, third = client.sent()
    assert (cancel["type"], cancel["id"]) == ("cancel", 1), "it was accepted, and may not have started"
    assert (second["id"], second["deadline_ms"]) == (2, 0)
    assert third["id"] == 3 and "deadline_ms" not in third


def test_a_dropped_read_is_not_repeated_and_its_answer_is_nobodys(client: Client) -> None:
    session = client.attached()
    read = client.protocol.read("state", session)
    client.sent()
    client.protocol.drop(read)
    assert client.hear({"sid": SID, "q": read.q, "type": "state", "data": {}}) == []
    client.reconnect()
    client.sent()
    client.hear(position())
    assert client.sent() == []


def test_d11_the_child_of_a_fork_is_resumed_when_the_reply_is_here(client: Client) -> None:
    session = client.attached()
    client.protocol.fork(session, 3, OTHER, KEY, "e-1")
    (fork,) = client.sent()
    assert fork["data"] == {"t": 3, "child": {"sid": OTHER, "key": KEY}, "eid": "e-1"}
    client.hear({"sid": SID, "id": 1, "type": "forked", "data": {}})
    (resume,) = client.sent()
    assert resume["data"][0]["sid"] == OTHER and OTHER in client.protocol.sessions


@pytest.mark.parametrize("data", [b"{", b"\xff", b"NaN", b"[" * 64 + b"]" * 64, b"[" * 5000 + b"]" * 5000])
def test_what_the_wire_cannot_carry_is_refused_before_it_is_sent(client: Client, data: bytes) -> None:
    session = client.attached()
    with pytest.raises(InvalidRequest):
        client.protocol.request(session, "step", data)
    assert client.sent() == []


@pytest.mark.parametrize(
    "frame",
    [
        '{"type":"error","sid":null,"data":{"message":"m","code":"INVALID_JSON"}}',
        f'{{"sid":"{SID}","type":"part","data":{{"n":2,"of":2,"text":""}}}}',
        f'{{"sid":"{SID}","type":"error","data":[]}}',
        f'{{"sid":"{SID}","id":1,"type":"error","data":5}}',
        "{",
    ],
)
def test_a_server_that_breaks_the_protocol_is_told_apart_from_our_own_errors(client: Client, frame: str) -> None:
    client.attached()
    with pytest.raises(RemoteProtocolError):
        client.protocol.receive(frame, 0.0)


def test_a_machine_that_is_used_wrongly_says_so(client: Client) -> None:
    session = client.attached()
    with pytest.raises(LocalProtocolError, match="in use"):
        client.protocol.open(SID, KEY)
    with pytest.raises(LocalProtocolError, match="disconnected"):
        client.protocol.connected(0.0)
    with pytest.raises(LocalProtocolError, match="CLAIMED"):
        client.protocol.claim(session)


def test_d5_full_without_a_time_to_wait_ends_what_was_asked_and_what_is_behind_goes_on(client: Client) -> None:
    session = client.attached()
    first, second = [client.protocol.request(session, "step") for _ in range(2)]
    client.sent()
    full, behind = error("CAPACITY_REACHED", 1, next_id=1), error("OUT_OF_ORDER", 2, next_id=1)
    (failed,) = client.hear(full, behind)
    assert isinstance(failed, Failed) and failed.request is first and not failed.recorded
    client.protocol.tick(10.0)
    assert ids(client.sent()) == [("step", 1)] and second.id == 1


def test_d5_an_open_that_is_full_without_a_time_to_wait_is_over(client: Client) -> None:
    client.protocol.connected(0.0)
    session = client.protocol.open(SID, KEY)
    request = client.protocol.request(session, "reset")
    client.sent()
    failed, ended = client.hear(error("CAPACITY_REACHED"))
    assert isinstance(failed, Failed) and failed.request is request and isinstance(ended, SessionEnded)
    assert ended.error.code == "CAPACITY_REACHED" and client.protocol.next_timer() is None


def test_a6_a_frame_without_room_costs_the_socket_and_says_how_long_to_wait(client: Client) -> None:
    client.attached()
    with pytest.raises(RemoteProtocolError) as caught:
        client.hear({"sid": None, "type": "error", "data": {"code": "OVERLOADED", "message": "m", "retry_after": 2.5}})
    assert caught.value.details["retry_after"] == 2.5


def test_f5_a_session_outlives_a_resume_at_the_server_of_another_directory(client: Client) -> None:
    session = client.attached()
    request = client.protocol.request(session, "step")
    client.reconnect()
    client.sent()
    (refused,) = client.hear(error("MISDIRECTED", shard="k3v9x0q7m2ab", retry_after=1.0))
    assert isinstance(refused, Refused) and session.sid in client.protocol.sessions and client.sent() == []
    client.protocol.tick(1.0)
    assert ids(client.sent()) == [("resume", None)]
    client.hear(position())
    assert ids(client.sent()) == [("step", 1)]
    (replied,) = client.hear(observation(1))
    assert isinstance(replied, Replied) and replied.request is request


def test_f5_a_misdirected_request_gives_its_id_back(client: Client) -> None:
    session = client.attached()
    client.protocol.request(session, "fork", b'{"t":0}')
    client.sent()
    (refused,) = client.hear(error("MISDIRECTED", 1, shard="k3v9x0q7m2ab", retry_after=1.0, next_id=1))
    assert isinstance(refused, Refused) and client.sent() == []
    client.protocol.tick(1.0)
    assert ids(client.sent()) == [("fork", 1)]

"""The server's machine, clause by clause (PROTOCOL D2-D13, E1-E4, F1)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from errata_protocol.capabilities import ServerLimits
from errata_protocol.errors import (
    CapacityReached,
    EnvironmentFailed,
    JournalUnavailable,
    LocalProtocolError,
    SessionLost,
)
from errata_protocol.mux import (
    AnswerRead,
    Effect,
    EncodedReply,
    FindSession,
    ForgetReplies,
    Hibernate,
    ReadPushes,
    ReadReplies,
    RecordedReply,
    RecordError,
    RunRequest,
    ServerConfig,
    ServerConnection,
    ServerProtocol,
    Stored,
    Write,
    hash_key,
    injected_fork,
)
from errata_protocol.payload import digest

SID, KEY = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "n4Jr6Lm8Po0Qs2Tu4Vw6Xy"
OTHER = "other0Zq3vK8s0T1u5Wb7Y"
PAYLOAD = b'{"observation":{},"reward":null,"done":false}'


def reply(t: int = 0, payload: bytes = PAYLOAD) -> EncodedReply:
    return EncodedReply("observation", payload, "e-1", t, digest(payload))


class Server:
    """A machine and what it said and asked; times are given in seconds."""

    def __init__(self, **config: Any) -> None:
        limits = ServerLimits(in_flight_session=4, in_flight_socket=8, detach_ttl_s=10.0)
        self.protocol = ServerProtocol(ServerConfig(**{"limits": limits, "kept_replies": 2, **config}))
        self.socket = self.protocol.connect()
        self.due: list[Effect] = []
        self.now = 0.0

    def take(self, effects: list[Effect]) -> list[Effect]:
        asked = [effect for effect in effects if not isinstance(effect, Write)]
        self.due += asked
        return asked

    def say(self, *envelopes: dict[str, Any], socket: ServerConnection | None = None) -> list[Effect]:
        frame = json.dumps(envelopes[0] if len(envelopes) == 1 else envelopes)
        return self.take(self.protocol.receive(socket or self.socket, frame, self.now))

    def sent(self, socket: ServerConnection | None = None) -> list[dict[str, Any]]:
        """Return what the server sends to a socket, and take it from its queue."""
        sent: list[dict[str, Any]] = []
        for frame in (socket or self.socket).data_to_send():
            message = json.loads(frame)
            sent += message if isinstance(message, list) else [message]
        return sent

    def opened(self, sid: str = SID, stored: Stored | None = None, socket: ServerConnection | None = None) -> None:
        (find,) = self.say({"sid": sid, "type": "open", "data": {"key": KEY}}, socket=socket)
        assert isinstance(find, FindSession) and find.make
        self.take(self.protocol.found(find, stored or Stored(recovery="snapshot"), self.now))
        assert [message["type"] for message in self.sent(socket)] == ["opened"]

    def run(self, effect: Effect, answer: EncodedReply | None = None) -> list[Effect]:
        assert isinstance(effect, RunRequest | RecordError)
        if answer is None:
            answer = effect.reply if isinstance(effect, RecordError) else reply(effect.id - 1)
        return self.take(self.protocol.completed(effect, answer, self.now))


def step(id: int, sid: str = SID, data: Any = None, **more: Any) -> dict[str, Any]:
    return {"sid": sid, "id": id, "type": "step", "data": {"n": id} if data is None else data, **more}


def resume(last: int = 0, last_seq: int = 0, key: str = KEY, sid: str = SID, **more: Any) -> dict[str, Any]:
    return {"type": "resume", "data": [{"sid": sid, "key": key, "last": last, "last_seq": last_seq, **more}]}


def codes(messages: list[dict[str, Any]]) -> list[str]:
    return [message["data"]["code"] if message["type"] == "error" else message["type"] for message in messages]


@pytest.fixture
def server() -> Server:
    made = Server()
    made.opened()
    return made


# -- PROTOCOL D1 ------------------------------------------------------------------------------------------------


def test_d1_an_unparsable_frame_is_one_error_with_sid_null_and_no_effect(server: Server) -> None:
    assert server.take(server.protocol.receive(server.socket, json.dumps([step(1)])[:-1], 0.0)) == []
    (error,) = server.sent()
    assert error["sid"] is None and error["data"]["code"] == "INVALID_JSON" and "id" not in error


def test_d1_elements_are_admitted_alone_and_a_bad_one_is_told_by_its_index(server: Server) -> None:
    effects = server.say(step(1), {**step(2), "extra": 1}, {"sid": SID, "type": "step"}, step(2))
    assert [effect.id for effect in effects if isinstance(effect, RunRequest)] == [1]
    first, second = server.sent()
    assert (first["index"], first["id"], first["data"]["code"]) == (1, 2, "INVALID_ENVELOPE")
    assert (second["index"], second["sid"], second["data"]["code"]) == (2, SID, "INVALID_ENVELOPE")
    assert server.protocol.session(SID).next_id == 3  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "envelope",
    [
        {"sid": SID, "type": "step", "data": {}},
        {"sid": SID, "q": 1, "type": "step", "data": {}},
        {"sid": SID, "id": 1, "q": 1, "type": "step", "data": {}},
        {"sid": SID, "id": 1, "type": "state"},
        {"id": 1, "type": "step"},
        {"sid": None, "id": 1, "type": "reset"},
        {"sid": "short", "id": 1, "type": "step"},
        {"sid": SID, "type": "cancel"},
        {"sid": SID, "id": 1, "type": "open", "data": {"key": KEY}},
        {"type": "open", "data": {"key": KEY}},
        {"sid": SID, "type": "resume", "data": []},
        {"sid": SID, "q": 1, "type": "close_group", "data": {"group": KEY}},
        {"q": 1, "type": "close_group", "data": {}},
        {"type": "capabilities"},
        {"sid": SID, "id": 1, "type": "mcp", "data": {"method": "tools/list"}},
        {"sid": SID, "q": 1, "type": "mcp", "data": {"method": "tools/call"}},
        {"sid": SID, "id": 1, "type": "mcp", "data": []},
        {"sid": SID, "q": 1, "type": "state", "data": {"t": -1}},
        {"sid": SID, "type": "ack", "data": {"last": 5}},
        {"sid": SID, "id": 1, "type": "part", "data": {"n": 2, "of": 2, "text": ""}},
    ],
)
def test_d2_a_message_needs_its_own_address_and_what_has_not_is_never_admitted(
    server: Server, envelope: dict[str, Any]
) -> None:
    assert server.say(envelope) == []
    (error,) = server.sent()
    assert error["data"]["code"] == "INVALID_ENVELOPE" and error["index"] == 0
    assert server.protocol.session(SID).next_id == 1  # type: ignore[union-attr]


def test_an_unknown_type_consumes_no_id(server: Server) -> None:
    assert server.say({"sid": SID, "id": 1, "type": "teleport"}) == []
    assert codes(server.sent()) == ["UNKNOWN_TYPE"]
    assert isinstance(server.say(step(1))[0], RunRequest)


def test_d1_an_unknown_type_in_a_batch_is_told_by_its_index(server: Server) -> None:
    server.say(step(1), {"sid": SID, "type": "teleport"}, {"type": "hello"})
    first, second = server.sent()
    assert codes([first, second]) == ["UNKNOWN_TYPE"] * 2
    assert (first["sid"], first["index"], second["sid"], second["index"]) == (SID, 1, None, 2)


# -- PROTOCOL D2, D4, D5 ------------------------------------------------------------------------------------------


def test_d2_requests_of_a_session_run_one_by_one_in_order_of_id(server: Server) -> None:
    (first,) = server.say(step(1), step(2), step(3))
    assert isinstance(first, RunRequest) and (first.id, first.data) == (1, b'{"n": 1}')
    (second,) = server.run(first)
    (third,) = server.run(second)
    assert server.run(third) == []
    told = server.sent()
    assert [(m["id"], m["t"], m["digest"]) for m in told] == [(n, n - 1, digest(PAYLOAD)) for n in (1, 2, 3)]


def test_d2_reads_have_no_order_and_leave_no_id(server: Server) -> None:
    run, read = server.say(step(1), {"sid": SID, "q": 9, "type": "state", "data": {"t": 3, "eid": "e-1"}})
    assert isinstance(read, AnswerRead) and read.fields == {"t": 3, "eid": "e-1"}
    server.protocol.read_answered(read, EncodedReply("state_at", PAYLOAD, "e-1", 3, digest(PAYLOAD), "step"))
    (told,) = server.sent()
    assert told == {
        "sid": SID, "q": 9, "type": "state_at", "eid": "e-1", "t": 3, "kind": "step", "digest": digest(PAYLOAD),
        "data": json.loads(PAYLOAD),
    }  # fmt: skip
    assert isinstance(run, RunRequest)


def test_d4_the_same_id_and_payload_gets_the_recorded_reply(server: Server) -> None:
    (run,) = server.say(step(1))
    assert server.say(step(1)) == [] and server.sent() == [], "it runs: its reply will come"
    server.run(run)
    (first,) = server.sent()
    assert server.say(step(1)) == []
    assert server.sent() == [first]


def test_d4_an_old_reply_comes_from_the_journal(server: Server) -> None:
    recorded = []
    for id in (1, 2, 3):
        (run,) = server.say(step(id))
        assert isinstance(run, RunRequest)
        server.run(run)
        recorded.append(RecordedReply(id, "step", run.sha, reply(id - 1), run.data))
    server.sent()
    (recall,) = server.say(step(1))
    assert isinstance(recall, ReadReplies) and (recall.first, recall.last) == (1, 1)
    server.protocol.replies_read(recall, recorded[:1])
    assert [m["id"] for m in server.sent()] == [1]
    for sha in (recorded[0].sha, b""):  # with the reply its request may be gone too
        (gone,) = server.say(step(1))
        assert isinstance(gone, ReadReplies)
        server.protocol.replies_read(gone, [RecordedReply(1, "step", sha, None)])
        assert codes(server.sent()) == ["REPLY_EXPIRED"]


@pytest.mark.parametrize("running", [True, False])
def test_d4_another_payload_or_type_under_one_id_is_a_conflict(server: Server, running: bool) -> None:
    (run,) = server.say(step(1))
    assert isinstance(run, RunRequest)
    if not running:
        server.run(run)
        server.sent()
    for other in (step(1, data={"n": 2}), {**step(1), "type": "reset"}):
        for recall in server.say(other):
            assert isinstance(recall, ReadReplies)
            server.protocol.replies_read(recall, [RecordedReply(1, "step", run.sha, reply(), run.data)])
        (error,) = server.sent()
        assert error["id"] == 1 and error["data"]["code"] == "CONFLICT"
    assert server.protocol.session(SID).next_id == 2  # type: ignore[union-attr]


def test_d4_the_same_payload_in_other_bytes_is_the_same(server: Server) -> None:
    (run,) = server.say(step(1, data={"a": 1.0, "b": 2}))
    assert isinstance(run, RunRequest)
    assert server.say(step(1, data={"b": 2, "a": 1})) == [] and server.sent() == []
    server.run(run)
    server.sent()
    (recall,) = server.say(step(1, data={"b": 2, "a": 1}))
    assert isinstance(recall, ReadReplies)
    server.protocol.replies_read(recall, [RecordedReply(1, "step", run.sha, reply(), run.data)])
    assert [m["type"] for m in server.sent()] == ["observation"]


def test_d4_a_gap_is_out_of_order_and_says_where(server: Server) -> None:
    assert server.say(step(3)) == []
    (error,) = server.sent()
    assert error["data"]["code"] == "OUT_OF_ORDER" and error["data"]["next_id"] == 1


def test_d5_a_refused_request_holds_back_all_later_ones(server: Server) -> None:
    server.protocol.refuse(JournalUnavailable("the disk is full", retry_after=1.0))
    assert server.say(step(1), step(2), step(3)) == []
    assert codes(server.sent()) == ["JOURNAL_UNAVAILABLE", "OUT_OF_ORDER", "OUT_OF_ORDER"]
    server.protocol.refuse(None)
    assert isinstance(server.say(step(1))[0], RunRequest)


def test_d5_a_run_that_had_no_effect_gives_its_id_back(server: Server) -> None:
    (run,) = server.say(step(1), step(2))
    assert isinstance(run, RunRequest)
    server.take(server.protocol.rejected(run, JournalUnavailable("the disk is full")))
    told = server.sent()
    assert codes(told) == ["JOURNAL_UNAVAILABLE", "OUT_OF_ORDER"] and {m["data"]["next_id"] for m in told} == {1}
    (again,) = server.say(step(1))
    assert isinstance(again, RunRequest) and again.id == 1


def test_d5_an_error_that_consumes_its_id_cannot_be_given_back(server: Server) -> None:
    (run,) = server.say(step(1))
    assert isinstance(run, RunRequest)
    with pytest.raises(LocalProtocolError, match="consumes id 1"):
        server.protocol.rejected(run, EnvironmentFailed("it raised"))
    with pytest.raises(LocalProtocolError):
        server.protocol.refuse(EnvironmentFailed("it raised"))


def test_d5_a_recorded_error_is_a_reply(server: Server) -> None:
    (run,) = server.say(step(1), step(2))
    server.run(run, EncodedReply("error", b'{"message":"m","code":"EXECUTION_ERROR"}'))
    assert codes(server.sent()) == ["EXECUTION_ERROR"]
    assert server.say(step(1)) == []
    assert codes(server.sent()) == ["EXECUTION_ERROR"]


# -- PROTOCOL D3, D7, D12, D13 ------------------------------------------------------------------------------------


def test_d3_open_reset_and_steps_may_be_pipelined() -> None:
    server = Server()
    (find,) = server.say(
        {"sid": SID, "type": "open", "data": {"key": KEY, "group": OTHER}},
        {"sid": SID, "id": 1, "type": "reset", "data": {}},
        step(2),
        {"sid": SID, "q": 1, "type": "state"},
    )
    assert isinstance(find, FindSession) and find.session.group == OTHER
    assert find.session.key_hash == hash_key(SID, KEY) and KEY not in repr(find.session.key_hash)
    run, read = server.take(server.protocol.found(find, Stored(recovery="none"), 0.0))
    assert isinstance(run, RunRequest) and run.kind == "reset" and isinstance(read, AnswerRead)
    (opened,) = server.sent()
    assert opened["data"] == {
        "next_id": 1, "eid": None, "t": None, "seq": 0, "recovery": "none", "fence": 1,
    }  # fmt: skip
    assert server.socket.in_flight == 3


def test_d5_what_waits_behind_a_refused_open_is_not_attached() -> None:
    server = Server()
    (find,) = server.say({"sid": SID, "type": "open", "data": {"key": KEY}}, step(1), step(2))
    assert isinstance(find, FindSession)
    server.take(server.protocol.find_failed(find, CapacityReached("full", retry_after=5.0), 0.0))
    told = server.sent()
    assert codes(told) == ["CAPACITY_REACHED", "NOT_ATTACHED", "NOT_ATTACHED"]
    assert told[0]["data"]["retry_after"] == 5.0 and server.socket.in_flight == 0
    assert isinstance(server.say({"sid": SID, "type": "open", "data": {"key": KEY}})[0], FindSession)


def test_d3_an_open_of_the_same_session_attaches_it_and_sends_what_was_not_acknowledged(server: Server) -> None:
    (run,) = server.say(step(1))
    server.run(run)
    server.sent()
    other = server.protocol.connect()
    assert server.say({"sid": SID, "type": "open", "data": {"key": KEY}}, socket=other) == []
    assert codes(server.sent(other)) == ["opened", "observation"]
    assert codes(server.sent()) == ["detached"]


@pytest.mark.parametrize("known", [True, False])
def test_d7_a_wrong_key_and_an_unknown_sid_take_the_same_path(known: bool) -> None:
    server = Server()
    if known:
        server.opened()
    other = server.protocol.connect()
    (find,) = server.say(resume(key=OTHER), step(1), socket=other)
    assert isinstance(find, FindSession) and not find.make and find.session.key_hash == hash_key(SID, OTHER)
    server.take(server.protocol.find_failed(find, SessionLost("whatever the shell says"), 0.0))
    lost, unattached = server.sent(other)
    assert lost == {
        "sid": SID, "type": "error",
        "data": {"message": "no session with this sid and key: open another", "code": "SESSION_LOST"},
    }  # fmt: skip
    assert unattached["data"]["code"] == "NOT_ATTACHED"
    assert server.sent() == [], "the owner notices nothing"
    if known:
        assert isinstance(server.say(step(1))[0], RunRequest)


def test_f2_a_session_of_another_principal_is_an_unknown_one(server: Server) -> None:
    foreign = server.protocol.connect("someone else")
    (find,) = server.say(resume(), socket=foreign)
    assert isinstance(find, FindSession) and find.session.principal == "someone else"
    assert server.sent() == []


def test_d7_resume_fences_the_old_socket(server: Server) -> None:
    new = server.protocol.connect()
    assert server.say(resume(), socket=new) == []
    (detached,) = server.sent()
    assert detached == {"sid": SID, "type": "detached", "data": {"reason": "taken_over"}}
    assert server.say(step(1)) == [] and codes(server.sent()) == ["NOT_ATTACHED"]
    assert isinstance(server.say(step(1), socket=new)[0], RunRequest)


def test_d7_what_was_admitted_answers_on_the_new_socket(server: Server) -> None:
    (run,) = server.say(step(1), step(2))
    new = server.protocol.connect()
    server.say(resume(), socket=new)
    assert (server.socket.in_flight, new.in_flight) == (0, 2)
    (second,) = server.run(run)
    server.run(second)
    assert [m.get("id") for m in server.sent(new)] == [None, 1, 2] and codes(server.sent()) == ["detached"]
    assert new.in_flight == 0


def test_d4_replies_to_what_was_asked_before_the_attach_name_their_request(server: Server) -> None:
    for n in (1, 2, 3):
        (run,) = server.say(step(n))
        if n < 3:
            server.run(run)
    assert all("request" not in message for message in server.sent())
    new = server.protocol.connect()
    server.say(resume(), step(4), socket=new)
    (fourth,) = server.run(run)
    server.run(fourth)
    _, *replies = server.sent(new)
    asked = [digest(json.dumps({"n": n}).encode()) for n in (1, 2, 3)]
    assert [message.get("request") for message in replies] == [*asked, None]


def test_d7_a_late_resume_of_a_dead_socket_takes_nothing_over(server: Server) -> None:
    late, new = server.protocol.connect(), server.protocol.connect()
    server.say(resume(fence=5), socket=new)
    server.say(resume(fence=4), socket=late)
    (refusal,) = server.sent(late)
    assert refusal["data"]["code"] == "NOT_ATTACHED" and refusal["data"]["fence"] == 5
    assert codes(server.sent(new)) == ["resumed"]
    server.say(resume(fence=6), socket=late)
    assert codes(server.sent(late)) == ["resumed"] and codes(server.sent(new)) == ["detached"]


@pytest.mark.parametrize("kind", ["open", "resume"])
def test_d7_a_fence_stays_within_what_the_wire_carries(server: Server, kind: str) -> None:
    highest, without, late = 2**53 - 1, server.protocol.connect(), server.protocol.connect()
    server.say(resume(fence=highest))
    (told,) = server.sent()
    assert told["data"]["fence"] == highest
    server.say({"sid": SID, "type": "open", "data": {"key": KEY}} if kind == "open" else resume(), socket=without)
    (told,) = server.sent(without)
    assert told["type"] == kind.rstrip("e") + "ed" and told["data"]["fence"] == highest
    server.say(resume(fence=highest), socket=late)
    (refusal,) = server.sent(late)
    assert refusal["data"]["code"] == "NOT_ATTACHED" and "resume without one" in refusal["data"]["message"]


def test_d7_missed_replies_follow_in_order_and_newer_ones_wait_for_them(server: Server) -> None:
    recorded = []
    for id in (1, 2, 3):
        (run,) = server.say(step(id))
        assert isinstance(run, RunRequest)
        server.run(run)
        recorded.append(RecordedReply(id, "step", run.sha, reply(id - 1)))
    new = server.protocol.connect()
    (recall,) = server.say(resume(), step(4), socket=new)[:1]
    (run,) = (effect for effect in server.due if isinstance(effect, RunRequest) and effect.id == 4)
    assert isinstance(recall, ReadReplies) and (recall.first, recall.last) == (1, 1)
    server.run(run)
    assert codes(server.sent(new)) == ["resumed"]
    server.take(server.protocol.replies_read(recall, recorded[:1]))
    missing = [effect for effect in server.due if isinstance(effect, ReadReplies)][1:]
    told = [m["id"] for m in server.sent(new)]
    for effect in missing:
        server.take(server.protocol.replies_read(effect, recorded[effect.first - 1 : effect.last]))
    assert told + [m["id"] for m in server.sent(new)] == [1, 2, 3, 4]


def test_d7_a_repeat_does_not_overtake_the_replies_that_are_due(server: Server) -> None:
    recorded = []
    for id in (1, 2, 3):
        (run,) = server.say(step(id))
        assert isinstance(run, RunRequest)
        server.run(run)
        recorded.append(RecordedReply(id, "step", run.sha, reply(id - 1), run.data))
    new = server.protocol.connect()
    due, asked = server.say(resume(), step(1), socket=new)
    assert isinstance(due, ReadReplies) and isinstance(asked, ReadReplies)
    server.take(server.protocol.replies_read(asked, recorded[:1]))
    assert codes(server.sent(new)) == ["resumed"] and new.in_flight == 0
    server.take(server.protocol.replies_read(due, recorded[:1]))
    assert [m["id"] for m in server.sent(new)] == [1, 2, 3]


def test_d7_resume_acknowledges_and_the_journal_is_told(server: Server) -> None:
    for id in (1, 2):
        (run,) = server.say(step(id))
        server.run(run)
    server.sent()
    (forget,) = server.say(resume(last=2))
    assert isinstance(forget, ForgetReplies) and (forget.last, forget.last_seq) == (2, 0)
    assert codes(server.sent()) == ["resumed"] and not server.protocol.session(SID).kept  # type: ignore[union-attr]
    assert server.say({"sid": SID, "type": "ack", "data": {"last": 2}}) == [], "known already"


def test_d12_a_journal_that_lost_acknowledged_requests_is_told_and_nothing_goes_on(server: Server) -> None:
    new = server.protocol.connect()
    assert server.say(resume(last=7), socket=new) == []
    (error,) = server.sent(new)
    assert error["data"]["code"] == "SESSION_LOST" and error["data"]["next_id"] == 1
    assert server.sent() == []


def test_d7_resume_after_a_restart_goes_on_where_the_journal_stands() -> None:
    server = Server()
    (find,) = server.say(resume(last=5, last_seq=1))
    assert isinstance(find, FindSession)
    effects = server.take(server.protocol.found(find, Stored(8, "e-1", 4, 3, "snapshot"), 0.0))
    forget, recall, pushes = effects
    assert isinstance(forget, ForgetReplies) and isinstance(recall, ReadReplies) and isinstance(pushes, ReadPushes)
    assert (recall.first, recall.last, pushes.first, pushes.last) == (6, 7, 2, 3)
    (resumed,) = server.sent()
    assert resumed["data"] == {
        "next_id": 8, "eid": "e-1", "t": 4, "seq": 3, "recovery": "snapshot", "fence": 1,
    }  # fmt: skip
    server.protocol.pushes_read(pushes, [(2, b"{}"), (3, b"{}")])
    assert [m["seq"] for m in server.sent()] == [2, 3]


@pytest.mark.parametrize("status", ["closed", "expired", "lost"])
def test_d12_who_resumes_a_session_that_is_over_is_told_and_gets_what_was_missed(status: Any) -> None:
    server = Server()
    (find,) = server.say(resume(last=1), step(3))
    assert isinstance(find, FindSession)
    (recall,) = server.take(server.protocol.found(find, Stored(3, "e-1", 1, 0, "none", status), 0.0))
    assert isinstance(recall, ReadReplies) and (recall.first, recall.last) == (2, 2)
    server.protocol.replies_read(recall, [RecordedReply(2, "close", b"", EncodedReply("closed", b"{}"))])
    assert codes(server.sent()) == [f"SESSION_{status.upper()}", "NOT_ATTACHED", "closed"]
    assert server.protocol.sessions == 0


def test_d9_what_was_missed_of_sessions_that_are_over_is_recalled_as_the_socket_has_room() -> None:
    server = Server(high_water_bytes=1000)
    (find,) = server.say(resume())
    assert isinstance(find, FindSession)
    effects = server.take(server.protocol.found(find, Stored(41, "e-1", 39, 0, "none", "expired"), 0.0))
    told, waited = codes(server.sent()), 0
    while effects:
        (recall,) = effects
        assert isinstance(recall, ReadReplies) and recall.last - recall.first < 16
        rows = [RecordedReply(id, "step", b"", reply(id - 1)) for id in range(recall.first, recall.last + 1)]
        effects = server.take(server.protocol.replies_read(recall, rows))
        assert server.socket.outbox.buffered < 16 * 250
        if server.socket.has_waiting_replies:
            assert effects == [] and not server.socket.accepts_input
            told += codes(server.sent())
            effects, waited = server.take(server.protocol.drained(server.socket)), waited + 1
    assert told + codes(server.sent()) == ["SESSION_EXPIRED", *["observation"] * 40] and waited > 1


@pytest.mark.parametrize("sid", [SID, OTHER])
def test_d12_a_socket_that_did_not_open_a_session_is_not_attached_to_it(server: Server, sid: str) -> None:
    new = server.protocol.connect()
    envelopes = [step(1, sid), {"sid": sid, "q": 1, "type": "state"}, {"sid": sid, "id": 1, "type": "cancel"}]
    envelopes += [{"sid": sid, "id": 1, "type": "close"}, {"sid": sid, "type": "ack", "data": {}}]
    assert server.say(*envelopes, socket=new) == []
    told = server.sent(new)
    assert codes(told) == ["NOT_ATTACHED"] * 5 and len({m["data"]["message"] for m in told}) == 1


def test_d12_a_lost_socket_detaches_and_what_was_admitted_runs_on(server: Server) -> None:
    (run,) = server.say(step(1), step(2))
    server.take(server.protocol.disconnect(server.socket, 0.0))
    (second,) = server.run(run)
    assert isinstance(second, RunRequest) and second.id == 2
    server.run(second)
    assert server.protocol.session(SID).last_done == 2  # type: ignore[union-attr]


def test_d12_hibernation_counts_from_the_last_reply_and_waits_for_what_is_admitted(server: Server) -> None:
    (run,) = server.say(step(1))
    server.take(server.protocol.disconnect(server.socket, 1.0))
    assert server.protocol.next_timer() == 11.0
    assert server.take(server.protocol.tick(11.0)) == [], "it still runs"
    server.now = 15.0
    server.run(run)
    assert server.take(server.protocol.tick(24.9)) == []
    (hibernate,) = server.take(server.protocol.tick(25.0))
    assert isinstance(hibernate, Hibernate)
    server.socket = server.protocol.connect()
    assert server.say(resume(last=1), step(2)) == [], "a resume during hibernation waits"
    (find,) = server.take(server.protocol.hibernated(hibernate, 26.0))
    assert isinstance(find, FindSession) and not find.make
    effects = server.take(server.protocol.found(find, Stored(2, "e-1", 0, 0, "snapshot"), 26.0))
    assert [type(effect) for effect in effects] == [ForgetReplies, RunRequest] and codes(server.sent()) == ["resumed"]


def test_d12_what_runs_is_waited_for_where_sessions_are_kept_for_no_time_at_all() -> None:
    server = Server(limits=ServerLimits(in_flight_session=4, in_flight_socket=8, detach_ttl_s=0.0))
    server.opened()
    (run,) = server.say(step(1))
    server.take(server.protocol.disconnect(server.socket, 1.0))
    for now in (1.0, 1.2, 5.0):
        assert server.take(server.protocol.tick(now)) == [], "it still runs"
    server.now = 5.0
    server.run(run)
    (hibernate,) = server.take(server.protocol.tick(5.1))
    assert isinstance(hibernate, Hibernate)


def test_e2_a_session_without_recovery_is_never_hibernated() -> None:
    server = Server()
    server.opened(stored=Stored(recovery="none"))
    server.take(server.protocol.disconnect(server.socket, 0.0))
    assert server.protocol.next_timer() is None and server.take(server.protocol.tick(1e9)) == []


def test_d12_a_session_that_ends_for_a_reason_of_the_servers_is_told(server: Server) -> None:
    (run,) = server.say(step(1), step(2))
    server.take(server.protocol.ended(SID, "expired", 0.0))
    told = server.sent()
    assert codes(told) == ["SESSION_EXPIRED", "SESSION_EXPIRED", "detached"]
    assert told[-1]["data"]["reason"] == "expired" and server.socket.in_flight == 0
    assert isinstance(run, RunRequest)
    assert server.run(run) == [], "what still ran comes to nothing"


def test_d12_close_group_is_a_read_that_names_group_and_socket(server: Server) -> None:
    (read,) = server.say({"q": 3, "type": "close_group", "data": {"group": OTHER}})
    assert isinstance(read, AnswerRead) and read.fields == {"group": OTHER} and read.session is None
    server.protocol.read_answered(read, EncodedReply("group_closed", b'{"closed":2}'))
    assert server.sent() == [{"q": 3, "type": "group_closed", "data": {"closed": 2}}]


def test_d2_close_ends_the_session_behind_what_came_before(server: Server) -> None:
    (run,) = server.say(step(1), {"sid": SID, "id": 2, "type": "close"}, step(3))
    (close,) = server.run(run)
    assert isinstance(close, RunRequest) and close.kind == "close"
    server.run(close, EncodedReply("closed", b"{}"))
    assert codes(server.sent()) == ["observation", "closed", "SESSION_CLOSED"]
    assert server.protocol.sessions == 0 and server.socket.in_flight == 0 and not server.socket.sessions


@pytest.mark.parametrize("reason", ["by its client", "by somebody else"])
def test_d4_what_follows_a_close_is_refused_behind_the_replies_that_are_still_recalled(
    server: Server, reason: str
) -> None:
    (run,) = server.say(step(1))
    assert isinstance(run, RunRequest)
    server.run(run)
    for id in range(2, 8):  # so many that the first one is the journal's
        (later,) = server.say(step(id))
        server.run(later)
    new = server.protocol.connect()
    due, close = server.say(resume(), {"sid": SID, "id": 8, "type": "close"}, step(9), socket=new)
    assert isinstance(due, ReadReplies) and isinstance(close, RunRequest) and codes(server.sent(new)) == ["resumed"]
    if reason == "by its client":
        (missed,) = server.run(close, EncodedReply("closed", b"{}"))
    else:
        (missed,) = server.take(server.protocol.ended(SID, "closed", 0.0))
    assert server.sent(new) == [] and server.protocol.sessions == 0
    assert isinstance(missed, ReadReplies) and missed.first == 1
    rows = [RecordedReply(id, "step", b"", reply(id - 1)) for id in range(1, missed.last + 1)]
    assert server.take(server.protocol.replies_read(due, rows[: due.last])) == [], "dropped: it was attached anew"
    server.take(server.protocol.replies_read(missed, rows))
    said = server.sent(new)
    if reason == "by its client":
        assert [m["id"] for m in said] == [*range(1, 10)] and codes(said)[-1] == "SESSION_CLOSED"
    else:
        assert [m.get("id") for m in said] == [*range(1, 10), None]
        assert codes(said)[-3:] == ["SESSION_CLOSED", "SESSION_CLOSED", "detached"]
    assert new.in_flight == 0


# -- PROTOCOL D6, D10 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("condition", "holds"),
    [({"t": 0}, True), ({"t": 0, "eid": "e-1"}, True), ({"t": 1}, False), ({"t": 0, "eid": "e-2"}, False)],
)
def test_d6_a_precondition_is_looked_at_when_its_turn_comes(
    server: Server, condition: dict[str, Any], holds: bool
) -> None:
    (run,) = server.say(step(1), step(2, **{"if": condition}))
    (second,) = server.run(run)
    assert isinstance(second, RunRequest if holds else RecordError)
    server.run(second)
    assert codes(server.sent())[1] == ("observation" if holds else "PRECONDITION_FAILED")


def test_d6_a_failed_reset_stops_the_steps_that_relied_on_it(server: Server) -> None:
    (reset,) = server.say(
        {"sid": SID, "id": 1, "type": "reset"}, step(2, **{"if": {"t": 0}}), step(3, **{"if": {"t": 1}})
    )
    (second,) = server.run(reset, EncodedReply("error", b'{"message":"m","code":"EXECUTION_ERROR"}'))
    assert isinstance(second, RecordError)
    (third,) = server.run(second)
    server.run(third)
    assert codes(server.sent()) == ["EXECUTION_ERROR", "PRECONDITION_FAILED", "PRECONDITION_FAILED"]


def test_d10_cancel_before_the_start_is_recorded_and_while_running_ignored(server: Server) -> None:
    (run,) = server.say(step(1), step(2), step(3))
    cancels = [{"sid": SID, "id": id, "type": "cancel"} for id in (1, 2, 77)]
    assert server.say(*cancels) == [] and server.sent() == []
    (second,) = server.run(run)
    assert isinstance(second, RecordError)
    (third,) = server.run(second)
    assert isinstance(third, RunRequest)
    server.run(third)
    assert codes(server.sent()) == ["observation", "CANCELLED", "observation"]
    server.say(step(2))
    assert codes(server.sent()) == ["CANCELLED"], "for ever"


def test_d10_a_deadline_counts_from_receipt_queue_included(server: Server) -> None:
    (run,) = server.say(step(1, deadline_ms=500), step(2, deadline_ms=1000), step(3, deadline_ms=3000))
    assert isinstance(run, RunRequest) and run.deadline == 0.5
    server.now = 1.0
    (second,) = server.run(run)
    assert isinstance(second, RecordError)
    (third,) = server.run(second)
    assert isinstance(third, RunRequest) and third.deadline == 3.0
    assert codes(server.sent()) == ["observation", "TIMEOUT"]


# -- PROTOCOL D8, D9, D11 -----------------------------------------------------------------------------------------


def test_d8_pushes_leave_in_order_of_seq(server: Server) -> None:
    assert server.take(server.protocol.pushed(SID, 1, b'{"v":1}')) == []
    (recall,) = server.take(server.protocol.pushed(SID, 3, b'{"v":3}'))
    assert isinstance(recall, ReadPushes) and (recall.first, recall.last) == (2, 3)
    assert server.take(server.protocol.pushed(SID, 4, b'{"v":4}')) == []
    (rest,) = server.take(server.protocol.pushes_read(recall, [(2, b'{"v":2}'), (3, b'{"v":3}')]))
    assert isinstance(rest, ReadPushes)
    server.protocol.pushes_read(rest, [(4, b'{"v":4}')])
    assert [(m["seq"], m["type"], m["data"]["v"]) for m in server.sent()] == [(n, "reward", n) for n in (1, 2, 3, 4)]
    assert server.take(server.protocol.pushed(SID, 2, b"{}")) == [] and server.sent() == []


def test_d8_goaway_is_told_to_everyone_and_nothing_more_is_admitted(server: Server) -> None:
    server.protocol.go_away(3.0)
    server.say(step(1))
    away, refused = server.sent()
    assert away == {"type": "goaway", "data": {"retry_after": 3.0}}
    assert refused["data"]["code"] == "OVERLOADED" and refused["data"]["retry_after"] == 3.0


def test_d9_bounds_per_session_and_socket_are_refused_with_retry_after() -> None:
    server = Server()
    for sid in (SID, OTHER, "third0Zq3vK8s0T1u5Wb7Y"):
        server.opened(sid)
    server.say(*[step(id) for id in range(1, 7)])
    told = server.sent()
    assert codes(told) == ["OVERLOADED", "OUT_OF_ORDER"] and told[0]["data"]["retry_after"] > 0
    server.say(*[step(id, OTHER) for id in range(1, 5)], step(1, "third0Zq3vK8s0T1u5Wb7Y"))
    assert codes(server.sent()) == ["OVERLOADED"] and server.socket.in_flight == 8
    server.say({"q": 1, "type": "capabilities"})
    assert codes(server.sent()) == ["OVERLOADED"]


def test_d9_the_shell_stops_reading_only_while_its_own_buffer_is_full() -> None:
    server = Server(high_water_bytes=1000)
    server.opened()
    (run,) = server.say(step(1))
    assert server.socket.accepts_input
    server.run(run, reply(0, b'{"x":"%s"}' % (b"x" * 1000)))
    assert not server.socket.accepts_input
    server.sent()
    assert server.socket.accepts_input


def test_d9_replies_to_a_client_that_does_not_read_stay_in_the_journal() -> None:
    server = Server(high_water_bytes=1000, kept_bytes=1000)
    server.opened()
    large = b'{"x":"%s"}' % (b"x" * 900)
    asked = server.say(*[step(id) for id in range(1, 5)])
    replies = {}
    for id in range(1, 5):
        (run,) = asked
        replies[id] = reply(id - 1, large)
        asked = server.run(run, replies[id])
    assert server.socket.outbox.buffered < 2500, "two replies, not four"
    told = server.sent()
    assert [m["id"] for m in told] == [1] or [m["id"] for m in told] == [1, 2]
    while server.socket.blocked:
        for effect in server.take(server.protocol.drained(server.socket)):
            assert isinstance(effect, ReadReplies)
            rows = [RecordedReply(id, "step", b"", replies[id]) for id in range(effect.first, effect.last + 1)]
            server.take(server.protocol.replies_read(effect, rows))
        told += server.sent()
    assert [m["id"] for m in told] == [1, 2, 3, 4]
    (run,) = server.say(step(5))
    server.run(run, reply(4))
    assert [m["id"] for m in server.sent()] == [5], "and goes on as before"


def test_d9_requests_in_flight_are_bounded_in_bytes() -> None:
    server = Server(held_bytes=1000)
    server.opened()
    server.opened(OTHER)
    (run,) = server.say(step(1, data={"x": "x" * 2000}), step(1, OTHER, data={"x": "y" * 500}))
    assert codes(server.sent()) == ["OVERLOADED"], "one alone may be of any size"
    server.run(run)
    assert server.socket.held_bytes == 0
    (run,) = server.say(step(1, OTHER, data={"x": "y" * 500}))
    server.run(run)
    assert [m["id"] for m in server.sent()] == [1, 1] and server.socket.held_bytes == 0


def test_d11_a_fork_names_its_child_by_the_hash_of_its_key(server: Server) -> None:
    said = {"t": 2, "child": {"sid": OTHER, "key": KEY}}
    (run,) = server.say({"sid": SID, "id": 1, "type": "fork", "data": said})
    assert isinstance(run, RunRequest) and run.fork is not None
    assert (run.fork.t, run.fork.eid, run.fork.sid, run.fork.key_hash) == (2, None, OTHER, hash_key(OTHER, KEY))
    assert KEY.encode() not in run.data and OTHER.encode() in run.data
    server.run(run, EncodedReply("forked", b"{}"))
    assert server.say({"sid": SID, "id": 1, "type": "fork", "data": said}) == []
    assert codes(server.sent()) == ["forked", "forked"]
    assert server.say(step(1, OTHER)) == [] and codes(server.sent()) == ["NOT_ATTACHED"], "a fork attaches nothing"


def test_d11_a_fork_that_cannot_be_read_is_a_recorded_error(server: Server) -> None:
    (record,) = server.say({"sid": SID, "id": 1, "type": "fork", "data": {"t": 2, "child": {"sid": OTHER, "key": "x"}}})
    assert isinstance(record, RecordError) and record.data == b"{}"
    server.run(record)
    assert codes(server.sent()) == ["VALIDATION_ERROR"] and server.protocol.session(SID).next_id == 2  # type: ignore[union-attr]


def test_f1_production_mode_has_no_fork_and_no_state_t() -> None:
    server = Server(production=True)
    server.opened()
    record, live = server.say(
        {"sid": SID, "id": 1, "type": "fork", "data": {"t": 0, "child": {"sid": OTHER, "key": KEY}}},
        {"sid": SID, "q": 1, "type": "state", "data": {"t": 0}},
        {"sid": SID, "q": 2, "type": "state"},
    )
    assert isinstance(record, RecordError) and isinstance(live, AnswerRead) and live.q == 2
    server.run(record)
    assert codes(server.sent()) == ["NOT_SUPPORTED", "NOT_SUPPORTED"]


def test_memory_of_replies_is_bounded_by_number_and_bytes() -> None:
    server = Server(kept_replies=3, kept_bytes=250)
    server.opened()
    for id in range(1, 10):
        (run,) = server.say(step(id))
        server.run(run, reply(id, b'{"x":"%s"}' % (b"x" * 100)))
    session = server.protocol.session(SID)
    assert session is not None and list(session.kept) == [8, 9] and session.kept_bytes <= 250


def test_many_sessions_are_resumed_in_one_frame() -> None:
    server = Server()
    sids = [f"many-{n:0>20}" for n in range(500)]
    entries = [{"sid": sid, "key": KEY, "last": 0, "last_seq": 0} for sid in sids]
    finds = server.say({"type": "resume", "data": entries})
    assert [find.session.sid for find in finds if isinstance(find, FindSession)] == sids
    for find in finds:
        assert isinstance(find, FindSession)
        server.take(server.protocol.found(find, Stored(), 0.0))
    assert [m["sid"] for m in server.sent()] == sids


def test_a_disconnect_while_a_session_is_looked_for_leaves_it_detached() -> None:
    server = Server()
    (find,) = server.say({"sid": SID, "type": "open", "data": {"key": KEY}}, step(1))
    assert isinstance(find, FindSession)
    server.take(server.protocol.disconnect(server.socket, 0.0))
    assert server.take(server.protocol.found(find, Stored(recovery="snapshot"), 0.0)) == []
    assert server.protocol.next_timer() == 10.0 and server.protocol.session(SID).connection is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"injected_state": {"episode_id": "e-1", "t": 3}, "seed": 1}, ("e-1", 3)),
        ({"injected_state": {"episode_id": "e-1", "t": 3, "more": 1}}, None),
        ({"injected_state": {"episode_id": "e-1"}}, None),
        ({"injected_state": {"episode_id": "e-1", "t": True}}, None),
        ({"injected_state": {"episode_id": "e-1", "t": 3.0}}, None),
        ({"injected_state": {"episode_id": 5, "t": 3}}, None),
        ({"injected_state": "e-1"}, None),
        ({}, None),
    ],
)
def test_d11_an_injected_state_is_a_fork_only_if_it_is_exactly_that(arguments: dict[str, Any], found: Any) -> None:
    assert injected_fork(arguments) == found

"""How frames are split between workers (`errata_server.fleet.relay`), and restarts, without any process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.websockets import WebSocket

from errata_os.restarts import LONGEST_PAUSE_S, STEADY_S, Backoff
from errata_protocol.capabilities import ServerLimits
from errata_protocol.errors import InvalidRequest, JournalUnavailable
from errata_protocol.json_text import MAX_VALUES
from errata_server.doors.mux.socket import MuxSocket
from errata_server.fleet import relay as relays
from errata_server.fleet.board import Board
from errata_server.fleet.limits import count_of, shared_settings
from errata_server.fleet.relay import SPLIT_BYTES, Relay, resume_of, split
from errata_server.fleet.supervisor import WorkerEnded, _Supervisor
from errata_server.fleet.worker import Worker
from errata_server.sandbox import registry
from errata_server.settings import Settings

HERE, THERE, FAR = "here-" + "x" * 20, "there-" + "x" * 20, "far-" + "x" * 20


class _Member:
    """A worker that knows its sessions, and what is sent to others."""

    worker = 0
    relayed = 0

    def __init__(self, owners: dict[str, int]) -> None:
        self.owners = owners
        self.new = 0
        self.drained: dict[int, str] = {}

    def for_new(self, path: str) -> int:
        assert path == "/maze/ws"
        return self.new

    def absent(self, worker: int) -> str | None:
        return self.drained.get(worker)

    async def all_started(self) -> None: ...

    def owner_of(self, sid: str) -> int | None:
        return self.owners.get(sid)

    async def owners_of(self, sids: list[str]) -> dict[str, int]:
        return {sid: self.owners[sid] for sid in sids if sid in self.owners}


class _Relay(Relay):
    def __init__(self, owners: dict[str, int]) -> None:
        handshake: Any = SimpleNamespace(scope={"path": "/maze/ws"})
        super().__init__(_Member(owners), None, handshake, ServerLimits(max_frame=1 << 20))  # type: ignore[arg-type]
        self.sent: list[tuple[int, Any]] = []
        self.answered: list[Any] = []
        self._socket: Any = self

    async def send_text(self, text: str) -> None:
        self.answered.append(json.loads(text))

    async def _send(self, owner: int, envelopes: Any) -> None:
        self.sent += [(owner, json.loads(envelope)) for envelope in envelopes]

    def give(self, *envelopes: Any) -> Any:
        frame = json.dumps(envelopes if len(envelopes) > 1 else envelopes[0])
        left = asyncio.run(self.take(frame))
        return None if left is None else json.loads(left)


def opening(sid: str) -> dict[str, Any]:
    return {"sid": sid, "type": "open", "data": {"key": "k" * 22}}


def step(sid: str, id: int = 1) -> dict[str, Any]:
    return {"sid": sid, "id": id, "type": "step", "data": {"n": 1}}


def test_a_new_session_is_opened_here_and_its_frames_are_not_touched() -> None:
    relay = _Relay({})
    frame = " " + json.dumps([opening(HERE), step(HERE)])
    assert asyncio.run(relay.take(frame)) is frame and relay.sent == []


def test_a_session_of_another_worker_is_passed_on_with_all_that_follows() -> None:
    relay = _Relay({THERE: 1})
    assert relay.give(opening(THERE)) is None
    assert relay.give(step(THERE), step(HERE), {"type": "capabilities", "q": 1}) == [
        step(HERE),
        {"type": "capabilities", "q": 1},
    ]
    assert relay.sent == [(1, opening(THERE)), (1, step(THERE))]


def test_a_resume_is_shared_out_and_keeps_the_order_of_each_worker() -> None:
    relay = _Relay({THERE: 1, FAR: 2, HERE: 0})
    entries = [{"sid": sid, "key": "k" * 22, "last": n} for n, sid in enumerate((HERE, THERE, FAR, "new-" + "x" * 20))]
    left = relay.give({"type": "resume", "data": entries}, step(FAR))
    assert left == [{"type": "resume", "data": [entries[0], entries[3]]}]
    assert relay.sent == [
        (1, {"type": "resume", "data": [entries[1]]}),
        (2, {"type": "resume", "data": [entries[2]]}),
        (2, step(FAR)),
    ]


def test_a_session_that_is_here_again_is_not_passed_on() -> None:
    relay = _Relay({THERE: 1})
    relay.give(opening(THERE))
    relay._member.owners[THERE] = 0  # type: ignore[attr-defined]
    assert relay.give(opening(THERE)) == opening(THERE)


@pytest.mark.parametrize("frame", ["", "{", "[1]", '{"type": 5}', "[]", '{"type":"step"} x', "[" * 3000])
def test_what_its_reader_refuses_is_left_to_it(frame: str) -> None:
    relay = _Relay({THERE: 1})
    relay.give(opening(THERE))
    assert asyncio.run(relay.take(frame)) == frame and len(relay.sent) == 1


def test_half_of_a_surrogate_pair_does_not_hide_whose_an_envelope_is() -> None:
    relay = _Relay({THERE: 1})
    relay.give(opening(THERE))
    halves = json.dumps({**step(THERE), "data": {"s": "\ud800"}})
    assert (
        asyncio.run(relay.take("[" + halves + "," + json.dumps(step(HERE)) + "]"))
        == b"[" + json.dumps(step(HERE)).encode() + b"]"
    )
    assert relay.sent[1][0] == 1


def test_new_sessions_of_a_socket_are_opened_at_one_other_worker_while_this_one_drains() -> None:
    relay = _Relay({})
    member: Any = relay._member
    relay.give(opening(HERE))
    member.new = 1
    assert relay.give(opening(THERE), step(THERE)) is None
    member.new = 2
    assert relay.give(opening(FAR), step(HERE)) == [step(HERE)], "the sessions that it has stay"
    assert relay.sent == [(1, opening(THERE)), (1, step(THERE)), (1, opening(FAR))]
    member.drained[1] = "b" * 12
    relay.give(opening("more-" + "x" * 20))
    assert relay.sent[-1] == (2, opening("more-" + "x" * 20))


def test_sessions_of_a_drained_worker_are_misdirected_and_not_lost() -> None:
    relay = _Relay({THERE: 1, FAR: 2})
    relay._member.drained[1] = "b" * 12  # type: ignore[attr-defined]
    entries = [{"sid": sid, "key": "k" * 22} for sid in (THERE, FAR)]
    assert relay.give({"type": "resume", "data": entries}, step(THERE, 7), step(HERE)) == [step(HERE)]
    assert relay.sent == [(2, {"type": "resume", "data": [entries[1]]})]
    assert [one.get("id") for one in relay.answered] == [None, 7]
    for one in relay.answered:
        assert (one["sid"], one["type"], one["data"]["code"]) == (THERE, "error", "MISDIRECTED")
        assert one["data"]["shard"] == "b" * 12 and one["data"]["retry_after"] > 0


@pytest.mark.parametrize("id", [True, "1", None, {"a": []}])
def test_an_address_that_is_none_is_not_said_in_a_refusal(id: Any) -> None:
    relay = _Relay({THERE: 1})
    relay._member.drained[1] = "b" * 12  # type: ignore[attr-defined]
    relay.give(opening(THERE))
    relay.give({**step(THERE), "id": id, "q": 3})
    relay.give({**step(THERE), "data": {"s": "x" * SPLIT_BYTES}})
    assert [(one.get("id"), one.get("q")) for one in relay.answered] == [(None, None), (None, 3), (None, None)]


@given(st.lists(st.sampled_from([HERE, THERE, FAR]), min_size=1, max_size=30))
def test_every_envelope_goes_to_exactly_one_worker_in_its_order(sids: list[str]) -> None:
    owners = {HERE: 0, THERE: 1, FAR: 2}
    relay = _Relay(owners)
    relay.give(*[opening(sid) for sid in owners])
    relay.sent.clear()
    sent = [step(sid, n + 1) for n, sid in enumerate(sids)]
    left = relay.give(*sent)
    here = [] if left is None else left if isinstance(left, list) else [left]
    assert here == [one for one in sent if one["sid"] == HERE]
    for worker, sid in ((1, THERE), (2, FAR)):
        assert [one for to, one in relay.sent if to == worker] == [one for one in sent if one["sid"] == sid]


def test_entries_of_a_resume_keep_their_bytes() -> None:
    text = b'{"type":"resume","data":[{"sid":"a","last":1.0},{"sid":"b"}]}'
    (element,) = split(text) or ()
    assert list(element.entries) == [("a", b'{"sid":"a","last":1.0}'), ("b", b'{"sid":"b"}')]
    assert resume_of([raw for _, raw in element.entries]) == text
    (refused,) = split(b'{"type":"resume","data":5}') or ()
    assert not refused.entries


def parts(envelope: dict[str, Any], of: int, **address: Any) -> list[dict[str, Any]]:
    text = json.dumps(envelope)
    cuts = [len(text) * n // of for n in range(of + 1)]
    pieces = [text[begin:end] for begin, end in pairwise(cuts)]
    return [{**address, "type": "part", "data": {"n": n + 1, "of": of, "text": pieces[n]}} for n in range(of)]


def test_a_resume_in_parts_is_put_together_and_shared_out() -> None:
    relay = _Relay({THERE: 1})
    entries = [{"sid": sid, "key": "k" * 22} for sid in (HERE, THERE)]
    first, second, third = parts({"type": "resume", "data": entries}, 3)
    assert relay.give(first) is None
    assert relay.give(second, step(HERE)) == [step(HERE)]
    assert relay.give(third) == [{"type": "resume", "data": [entries[0]]}]
    assert relay.sent == [(1, {"type": "resume", "data": [entries[1]]})]


def test_an_open_in_parts_that_is_sent_again_goes_to_the_worker_that_has_the_session() -> None:
    relay = _Relay({THERE: 1})
    sent = [*parts(opening(THERE), 2, sid=THERE), step(THERE)]
    assert [relay.give(one) for one in sent] == [None, None, None]
    assert relay.sent == [(1, one) for one in sent]


@pytest.mark.parametrize(
    ("whole", "of"),
    [
        ({"type": "part", "data": {"n": 1, "of": 1, "text": "{}"}}, 2),
        ({"type": "resume", "data": ["x" * 2**20]}, 2),
        ({"type": "resume", "data": [{}] * (MAX_VALUES + 1)}, 2),
    ],
    ids=["a part", "too long", "too many values"],
)
def test_what_parts_without_an_address_may_not_make_is_left_to_its_reader(whole: dict[str, Any], of: int) -> None:
    relay = _Relay({THERE: 1})
    relay.give(opening(THERE))
    first, last = parts(whole, of)
    assert relay.give(first) is None
    assert relay.give(last) == [last], "the reader has no part before it, and says so"


def test_a_long_frame_is_split_on_a_thread_and_a_short_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def noted(frame: bytes) -> Any:
        threads.append(threading.get_ident())
        return split(frame)

    monkeypatch.setattr(relays, "split", noted)
    relay = _Relay({THERE: 1})
    relay.give(opening(THERE))
    relay.give({**step(THERE), "data": {"s": "x" * SPLIT_BYTES}})
    assert len(threads) == 2
    assert threads[0] == threading.get_ident() != threads[1]
    assert [to for to, _ in relay.sent] == [1, 1]


def test_a_frame_that_opens_nothing_is_not_split_while_all_sessions_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    relay = _Relay({})
    relay.give(opening(HERE))
    monkeypatch.setattr(relays, "split", None)
    assert relay.give(step(HERE), step(HERE, 2)) == [step(HERE), step(HERE, 2)]


@pytest.mark.parametrize("type", ["open", "resume"])
def test_a_type_that_is_written_with_escapes_is_found(type: str) -> None:
    relay = _Relay({THERE: 1})
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in type)
    data = opening(THERE)["data"] if type == "open" else [{"sid": THERE}]
    address = f'"sid":"{THERE}",' if type == "open" else ""
    assert asyncio.run(relay.take(f'{{{address}"type":"{escaped}","data":{json.dumps(data)}}}')) is None
    assert [to for to, _ in relay.sent] == [1]


def test_a_frame_of_more_envelopes_than_its_reader_takes_is_left_to_it() -> None:
    relay = _Relay({THERE: 1})
    relay.give(opening(THERE))
    frame = json.dumps([step(THERE)] * (ServerLimits().max_elements + 1))
    assert asyncio.run(relay.take(frame)) is frame and len(relay.sent) == 1


def test_a_worker_that_ends_at_once_starts_later_each_time() -> None:
    backoff = Backoff()
    pauses = [backoff.pause_s(0.1) for _ in range(12)]
    assert pauses[0] == 0.0 and pauses[1] == 0.1 and pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE_S
    assert backoff.pause_s(STEADY_S) == 0.0, "one that has run for long starts again at once"


async def test_a_client_that_has_left_before_it_is_sent_away_ends_its_socket_without_an_error() -> None:
    """As where the worker that has its sessions was killed: the client may have given up meanwhile."""
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "websocket.close":
            raise OSError("the peer has left")

    class Failing:
        async def take(self, frame: Any) -> None:
            raise JournalUnavailable("worker 1 does not answer \N{HORIZONTAL ELLIPSIS}" * 9)

        async def close(self) -> None:
            sent.append("relay closed")

    received = iter([{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "{}"}])
    connection = SimpleNamespace(
        has_data=False, envelopes=0, assembly=SimpleNamespace(held=0), data_to_send=lambda *_: []
    )
    multiplexer = SimpleNamespace(
        driver=None,
        set_bounds=lambda *_: None,
        connect=lambda *_: connection,
        disconnect=lambda _: sent.append("disconnected"),
    )
    websocket = WebSocket({"type": "websocket", "headers": []}, lambda: asyncio.sleep(0, next(received)), send)
    reader: Any = SimpleNamespace(principal=None, identify=lambda: None)
    multiplexed: Any = multiplexer
    relay: Any = Failing()
    await MuxSocket(websocket, multiplexed, reader, relay).serve()
    assert sent == ["websocket.accept", "websocket.close", "disconnected", "relay closed"]


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "by-itself"])
def test_only_an_error_of_its_own_at_the_first_start_of_a_worker_ends_the_server(
    killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = Board(2)
    board.start(0)
    supervisor = _Supervisor(SimpleNamespace(names=("a", "b"), board=board))  # type: ignore[arg-type]
    supervisor._running[1].pid = 7
    ended = [(7, signal.SIGKILL if killed else 1 << 8), (0, 0)]  # as wait(2) encodes a signal and a status
    monkeypatch.setattr(os, "waitpid", lambda pid, options: ended.pop(0))
    if killed:
        supervisor._reap()
        assert supervisor._due() == [0, 1]
    else:
        with pytest.raises(WorkerEnded):
            supervisor._reap()


def test_workers_are_a_number_or_auto() -> None:
    assert count_of("3") == 3 and count_of("auto") >= 1
    for text in ("0", "-1", "1000", "two", "", "²"):
        with pytest.raises(InvalidRequest, match="--workers takes a number"):
            count_of(text)


def test_limits_are_shared_out() -> None:
    shared = shared_settings(Settings(retention_max_bytes=1000), 4)
    assert (shared.max_threads, shared.retention_max_bytes) == (256, 250)
    assert shared.max_unfinished_bytes == shared.max_frame, "a message of the largest size has to fit"


def test_sandboxes_which_belong_to_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "backend_type", lambda name: SimpleNamespace(shared=name != "alone"))
    served: Any = SimpleNamespace(
        specs=[SimpleNamespace(name="shells", sandbox=True), SimpleNamespace(name="plain", sandbox=False)],
        runtime=SimpleNamespace(settings=Settings(sandbox="alone")),
    )
    with pytest.raises(InvalidRequest, match=r"^shells runs commands .* --workers 1"):
        Worker.enter(SimpleNamespace(), served)  # type: ignore[arg-type]

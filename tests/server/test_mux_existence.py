"""Who has a sid without its key gets nothing, and cannot tell whether there is such a session (PROTOCOL D3, D12, F2).

Not by the answer, and not by the work that is done for it: what is read from the journal is the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import SecretStr

from errata_protocol.capabilities import PROTOCOL_NAME
from errata_server.journal import MemoryJournal
from errata_server.settings import Settings

from .asgi_peer import Peer
from .conftest import simulated
from .test_mux_door import application, joined

OWNER, FOE = {"authorization": "Bearer owner"}, {"authorization": "Bearer foe"}
NOBODYS, NO_KEY = "nobodys" * 4, "wrong-key" * 4

MESSAGES: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "resume": lambda sid, key: {"type": "resume", "data": [{"sid": sid, "key": key, "last": 0, "last_seq": 0}]},
    "step": lambda sid, key: {"sid": sid, "id": 2, "type": "step", "data": {"n": 1}},
    "reset": lambda sid, key: {"sid": sid, "id": 1, "type": "reset", "data": {}},
    "fork": lambda sid, key: {"sid": sid, "id": 2, "type": "fork", "data": {"t": 0, "child": {"sid": key, "key": key}}},
    "close": lambda sid, key: {"sid": sid, "id": 2, "type": "close"},
    "state": lambda sid, key: {"sid": sid, "q": 1, "type": "state", "data": {"t": 0}},
    "rewards": lambda sid, key: {"sid": sid, "q": 1, "type": "rewards"},
    "tools": lambda sid, key: {"sid": sid, "q": 1, "type": "mcp", "data": {"method": "tools/list"}},
    "cancel": lambda sid, key: {"sid": sid, "id": 2, "type": "cancel"},
    "ack": lambda sid, key: {"sid": sid, "type": "ack", "data": {"last": 1, "last_seq": 0}},
    "part": lambda sid, key: {"sid": sid, "id": 2, "type": "part", "data": {"n": 1, "of": 1, "text": _step(sid)}},
}


def _step(sid: str) -> str:
    return json.dumps({"sid": sid, "id": 2, "type": "step", "data": {"n": 1}})


class Watched(MemoryJournal):
    """Notes what is read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("_") and name in READS:
            self.reads.append(name)
        return found


READS = frozenset(
    name
    for name in dir(MemoryJournal)
    if not name.startswith("_") and name not in ("commit", "submit", "close", "failing", "watch", "durable")
)


@pytest.mark.parametrize("thief", ["same principal", "another principal with the key"])
@pytest.mark.parametrize("kind", MESSAGES)
async def test_answers_and_reads_are_those_for_a_sid_that_is_nobodys(kind: str, thief: str) -> None:
    runtime = simulated(Settings(journal_wait_s=0.3, token=SecretStr("owner,foe")))
    journal = runtime.store.journal = Watched()
    app = application(runtime)
    async with joined(app, headers=OWNER) as owner, joined(app, headers=OWNER, seed=1) as sleeper:
        live, closed = await owner.open(), await owner.open()
        asleep, away = await sleeper.open(), await sleeper.open()
        for trainer, session in ((owner, live), (owner, closed), (sleeper, asleep), (sleeper, away)):
            await trainer.ask(session, "reset")
        await owner.ask(closed, "close")
        await sleeper.cut()  # both of its sessions are detached now, with their last words in the journal
        told: dict[str, tuple[Any, list[str]]] = {}
        is_foe = thief != "same principal"
        for name, session in [("nobody's", None), ("live", live), ("closed", closed), ("detached", away)]:
            sid = NOBODYS if session is None else session.sid
            key = session.key if session is not None and is_foe else NO_KEY
            async with Peer(app, headers=FOE if is_foe else OWNER, subprotocols=(PROTOCOL_NAME,)) as peer:
                await asyncio.sleep(0)
                journal.reads.clear()
                peer.send(json.dumps(MESSAGES[kind](sid, key)))
                peer.send('{"q":99,"type":"capabilities"}')
                answers: list[dict[str, Any]] = []
                while len(answers) < 2:  # one for each
                    said = await peer.receive()
                    assert said is not None
                    answers += said if isinstance(said, list) else [said]
                shown = json.dumps([a for a in answers if a.get("q") != 99]).replace(sid, "SID")
                told[name] = (json.loads(shown), list(journal.reads))
        assert {name: found for name, found in told.items() if found != told["nobody's"]} == {}, told
        assert (await owner.ask(live, "step")).t == 1, "its owner noticed nothing"

"""Frames that are right, nearly right and wrong, for the multiplexed door: structure, tokens and bytes are mutated."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "mux").glob("client.*.json"))

KINDS = (
    *("open", "open", "resume", "resume", "reset", "reset", "step", "step", "step", "step", "mcp", "fork", "close"),
    *("state", "capabilities", "rewards", "close_group", "cancel", "ack", "part", "observation", "teleport"),
)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|[\[\]{},:]')
_SPARE = (
    *("{", "}", "[", "]", ",", ":", "null", "true", "-1", "0", "1e999", "9007199254740992", "1.0", '""', '"sid"'),
    *(
        '"id"',
        '"q"',
        '"data"',
        '"key"',
        '"\\ud800"',
        '"\\u0000"',
        "NaN",
        "[" * 70,
        '"type"',
        '"open"',
        '"' + "x" * 300 + '"',
    ),
)


class Fuzzer:
    """One peer that means no good.

    Args:
        chance: Draws everything.
        known: Sids of others, which it has stolen without their keys.
        stolen: (sid, key) of sessions of another principal.
    """

    def __init__(self, chance: random.Random, known: list[str], stolen: list[tuple[str, str]] = ()) -> None:  # type: ignore[assignment]
        self._chance = chance
        self._known, self._stolen = known, list(stolen)
        self.own: list[tuple[str, str]] = []
        """What it opened, sid and key; the last few."""
        self._ids: dict[str, int] = {}

    def frame(self) -> str | bytes:
        """Return the next frame."""
        draw = self._chance.random
        if draw() < 0.04:
            text = self._chance.choice(GOLDEN).read_text()
        else:
            made = [self._envelope() for _ in range(self._chance.choice((1, 1, 1, 2, 5)))]
            text = json.dumps(made if len(made) > 1 or draw() < 0.1 else made[0])
        if draw() < 0.25:
            text = self._other_tokens(text)
        if draw() < 0.15:
            return self._other_bytes(text.encode())
        return text.encode() if draw() < 0.2 else text

    def next_id(self, sid: str) -> int:
        """Return the id that a session of its own comes to next, as far as it knows."""
        self._ids[sid] = self._ids.get(sid, 0) + 1
        return self._ids[sid]

    def _secret(self) -> str:
        return f"{self._chance.getrandbits(132):033x}"

    def _session(self) -> tuple[str, str]:
        """Return a sid and a key that may fit."""
        draw = self._chance.random()
        if self.own and draw < 0.7:
            sid, key = self._chance.choice(self.own)
            return (sid, key) if self._chance.random() < 0.95 else (sid, self._secret())
        if draw < 0.8:
            return self._chance.choice(self._known), self._secret()
        if self._stolen and draw < 0.9:
            return self._chance.choice(self._stolen)
        return self._secret(), self._secret()

    def _value(self) -> Any:
        return self._chance.choice(
            [None, "", "x", 0, 1, 2, -1, 2**53, 2**70, 1.5, True, [], {}, {"t": 0}, "é" * 30, *self._session()]
        )

    def _envelope(self) -> dict[str, Any]:
        chance = self._chance
        kind = chance.choice(KINDS)
        sid, key = self._session()
        if kind == "open" and chance.random() < 0.6:
            sid, key = self._secret(), self._secret()
            self.own = [*self.own[-7:], (sid, key)]
        made: dict[str, Any] = {"sid": sid, "type": kind}
        if kind in ("reset", "step", "fork", "close") or (kind == "mcp" and chance.random() < 0.5):
            made["id"] = self.next_id(sid) if chance.random() < 0.8 else chance.randint(0, 9)
        elif kind in ("state", "capabilities", "rewards", "close_group", "mcp"):
            made["q"] = chance.randint(1, 9)
        elif kind in ("cancel", "part"):
            made["id"] = chance.randint(1, 9)
        made["data"] = self._data(kind, key)
        if kind in ("resume", "close_group"):
            del made["sid"]
        if chance.random() < 0.05:
            made["if"] = chance.choice([{"t": 0}, {"t": 1, "eid": "e"}, self._value()])
        if chance.random() < 0.05:
            made["deadline_ms"] = chance.choice([1, 1000, self._value()])
        for name in list(made):
            if chance.random() < 0.01:
                made[name] = self._value()
            if chance.random() < 0.01:
                del made[name]
        return made

    def _data(self, kind: str, key: str) -> Any:
        chance = self._chance
        sid, other = self._session()
        good: Any = {
            "open": {"key": key} | ({"group": self._secret()} if chance.random() < 0.2 else {}),
            "resume": [
                {"sid": one, "key": two, "last": chance.randint(0, 3), "last_seq": 0}
                for one, two in (self._session() for _ in range(chance.randint(1, 3)))
            ],
            "reset": {"seed": 1},
            "step": {"n": chance.randint(0, 9)}
            | ({"do": chance.choice(["raise", "nan", "break", "mark", "done"])} if chance.random() < 0.1 else {}),
            "fork": {"t": chance.randint(0, 2), "child": {"sid": self._secret(), "key": self._secret()}},
            "mcp": {
                "jsonrpc": "2.0",
                "id": 1,
                "method": chance.choice(["tools/call", "tools/list", "no"]),
                "params": {},
            },
            "part": {
                "n": chance.randint(1, 3),
                "of": chance.randint(1, 3),
                "text": chance.choice(['{"sid"', "[]", "}"]),
            },
            "state": {"t": chance.randint(0, 3)} if chance.random() < 0.5 else {},
            "rewards": {},
            "capabilities": {},
            "close_group": {"group": chance.choice([sid, other])},
            "ack": {"last": chance.randint(0, 3), "last_seq": 0},
        }.get(kind, {})
        if chance.random() < 0.05:
            return self._value()
        if isinstance(good, dict) and chance.random() < 0.05:
            good[chance.choice(["t", "key", "more", "child", "last"])] = self._value()
        return good

    def _other_tokens(self, text: str) -> str:
        tokens = _TOKEN.findall(text)
        for _ in range(self._chance.choice((1, 1, 2, 4))):
            at = self._chance.randrange(len(tokens))
            match self._chance.randrange(4):
                case 0:
                    tokens[at] = self._chance.choice(_SPARE)
                case 1:
                    tokens.insert(at, self._chance.choice(_SPARE))
                case 2 if len(tokens) > 1:
                    del tokens[at]
                case _:
                    end = min(len(tokens), at + self._chance.randint(1, 6))
                    tokens[at:at] = tokens[at:end]
        return "".join(tokens)

    def _other_bytes(self, text: bytes) -> bytes:
        raw = bytearray(text)
        for _ in range(self._chance.choice((1, 1, 3, 10))):
            at = self._chance.randrange(len(raw) + 1)
            match self._chance.randrange(4):
                case 0 if at < len(raw):
                    raw[at] ^= 1 << self._chance.randrange(8)
                case 1:
                    raw.insert(at, self._chance.randrange(256))
                case 2 if at < len(raw):
                    del raw[at]
                case _ if len(raw) > 1:
                    del raw[at:]
            if not raw:
                break
        return bytes(raw)

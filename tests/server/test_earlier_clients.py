"""What clients of earlier commits sent to their servers (tests/golden/conversations) is answered as it was."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from .local_server import LocalServer

GOLDEN = Path(__file__).parents[1] / "golden" / "conversations"
NAME = re.compile(r"ep_[\w-]{24}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{12}\b")
"""Names that a server makes: another one makes others."""
OF_THE_CLOCK = {"created"}


class Replay:
    """Sends what a client sent, with the names that today's server made, and compares the answers."""

    def __init__(self, client: httpx.Client, stack: ExitStack) -> None:
        self.client, self.stack = client, stack
        self.sockets: dict[int, Any] = {}
        self.closed: set[int] = set()
        self.pushed: list[tuple[int, dict[str, Any]]] = []
        self.names: dict[str, str] = {}
        self.early: dict[int, list[dict[str, Any]]] = {}
        self.compared = 0

    def ours(self, text: str | None) -> str | None:
        return None if text is None else NAME.sub(lambda name: self.names.get(name[0], name[0]), text)

    def play(self, line: dict[str, Any]) -> None:
        number = line.get("socket")
        if "http" in line:
            asked = line["http"]
            body = self.ours(asked["body"])
            answer = self.client.request(
                asked["method"],
                self.ours(asked["path"]) or "",
                content=body,
                headers={} if body is None else {"content-type": "application/json"},
            )
            assert answer.status_code == line["status"], answer.text
            self.compare(json.loads(line["answer"]), answer.json(), asked["path"])
            while self.pushed:
                socket, recorded = self.pushed.pop()
                self.compare(recorded, self.reply_to(socket, recorded), "push")
        elif number not in self.sockets:
            spoken = [line["subprotocol"]] if line["subprotocol"] else None
            url = f"{self.client.base_url}".replace("http", "ws").rstrip("/") + (self.ours(line["path"]) or "")
            self.sockets[number] = self.stack.enter_context(connect(url, subprotocols=spoken, proxy=None))
        elif "sent" in line:
            if number not in self.closed:  # its client did not know yet
                self.sockets[number].send(self.ours(line["sent"]))
        elif "received" in line:
            for recorded in envelopes(line["received"]):
                if "seq" in recorded:  # a push may come before the answer to the HTTP request that caused it
                    self.pushed.append((line["socket"], recorded))
                else:
                    self.compare(recorded, self.reply_to(line["socket"], recorded), line["received"][:200])
        else:
            self.closed.add(number)
            self.sockets[number].close()

    def reply_to(self, number: int, recorded: dict[str, Any]) -> dict[str, Any]:
        """Return the message of today's server that answers the same request as a recorded one.

        Those of other sessions on the socket may come before it, and are kept until they are asked for.
        """
        early = self.early.setdefault(number, [])
        while not (found := [message for message in early if address(message) == address(recorded)]):
            try:
                early += envelopes(self.sockets[number].recv(timeout=60))
            except TimeoutError:
                raise AssertionError(f"socket {number}: {address(recorded)} does not come, but {early}") from None
        early.remove(found[0])
        return found[0]

    def compare(self, recorded: Any, answered: Any, where: str) -> None:
        """Compare; today's server may say more, such as `error_info` in the metadata of a marked turn."""
        if isinstance(recorded, dict):
            assert isinstance(answered, dict) and recorded.keys() <= answered.keys(), (where, recorded, answered)
            more = "error_info" in json.dumps(answered) and "error_info" not in json.dumps(recorded)
            for name, value in recorded.items():
                if name.endswith("digest") and (more or recorded.get("error_kind")):
                    self.names[value] = answered[name]
                elif name not in OF_THE_CLOCK:
                    self.compare(value, answered[name], f"{where} {name}")
        elif isinstance(recorded, list):
            assert isinstance(answered, list) and len(recorded) == len(answered), (where, recorded, answered)
            for one, other in zip(recorded, answered, strict=True):
                self.compare(one, other, where)
        elif isinstance(recorded, str) and NAME.fullmatch(recorded):
            assert NAME.fullmatch(answered) and self.names.setdefault(recorded, answered) == answered, (where, recorded)
        else:
            expected = self.names.get(recorded, recorded) if isinstance(recorded, str) else recorded
            assert expected == answered and type(recorded) is type(answered), (where, recorded, answered)
            self.compared += 1


def envelopes(text: str) -> list[dict[str, Any]]:
    frame = json.loads(text)
    return frame if isinstance(frame, list) else [frame]


def address(message: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(message.get(name) for name in ("sid", "type", "id", "q", "seq"))


@pytest.mark.parametrize("commit", sorted(path.stem for path in GOLDEN.glob("*.jsonl")))
def test_an_earlier_client_is_answered_as_by_its_own_server(commit: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (GOLDEN / f"{commit}.jsonl").read_text(encoding="utf-8").splitlines()]
    with LocalServer("tests.server.environments:CountEnvironment", tmp_path) as server, ExitStack() as stack:
        replay = Replay(stack.enter_context(httpx.Client(base_url=server.url, timeout=60)), stack)
        for line in lines:
            replay.play(line)
    assert not replay.pushed and len(replay.sockets) > 1 and replay.compared > 5 * len(lines)


def test_there_is_one() -> None:
    assert (GOLDEN / "8702b04.jsonl").exists()

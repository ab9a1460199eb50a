"""What a client may send: the statements of A and C that bind it, checked on each of its requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

REQUESTS = ("reset", "step", "mcp")
Message = dict[str, Any]


def content(message: Message) -> Message:
    """Return what C-6 compares: ``type`` and ``data``."""
    return {"type": message.get("type"), "data": message.get("data", {})}


class Watch:
    """Follows the requests of one session.

    Args:
        lines: The requests that the client is given, no two of them the same.
        faults: By the index of a request, the fault at its first arrival, its second one, and so on.
        knows: Which proposals the server knows: ``stock``, ``a`` or ``c``.

    Attributes:
        broken: Set when a statement was broken.
        failure: The first statement that was broken, and how.
        decided: Whether the reply to the current request was sent and not lost.
        refused: Whether the current request was refused.
        answered: How many answers the client has printed.
        replies: The reply to each request that was executed, by the request's index.
        read: Whether a delivery was read again.
    """

    def __init__(self, lines: Sequence[Message], faults: Mapping[int, Sequence[str]], knows: str) -> None:
        self.lines, self.faults, self.knows = [content(line) for line in lines], faults, knows
        self.broken = asyncio.Event()
        self.failure: tuple[str, str] | None = None
        self.decided, self.refused, self.answered, self.read = True, False, 0, False
        self.replies: dict[int, Message] = {}
        self._at = -1
        self._ids: dict[str, int] = {}
        self._first: Message = {}
        self._arrivals: Counter[int] = Counter()
        self._session_id: str | None = None

    def fail(self, statement: str, detail: str) -> None:
        """Note that a statement is broken; only the first one counts, as others may follow from it."""
        if self.failure is None:
            self.failure = statement, detail
        self.broken.set()

    def executed(self, reply: Message) -> None:
        """Note the reply to the current request, which the server has executed."""
        if self._at in self.replies:
            self.fail("C-11", f"request {self._at + 1} acted twice")
        self.replies.setdefault(self._at, {"type": reply["type"], "data": reply["data"]})

    def lost_and_not_repeated(self) -> bool:
        """Return whether the current request or its reply was lost, and the client could send it again and did not."""
        due = self.faults.get(self._at, ())
        return bool(due) and due[0] in ("lost", "cut", "flap", "swallow") and self._arrivals[self._at] == 1

    def seen(self, message: Message, session_id: str, asked: bool, number: int) -> str | None:
        """Look at a request that the client sent. Returns the fault that is due.

        Args:
            message: The request.
            session_id: Id of its session.
            asked: Whether `capabilities` was answered on its socket.
            number: How many sockets were attached before this one.
        """
        if self._session_id not in (None, session_id):
            known = any("gone" in due for due in self.faults.values())
            self.fail("C-9" if known else "C-11", "the client went on in another session without a word")
        self._session_id = session_id
        if more := set(message) - {"type", "data", "request_id"}:
            self.fail("interface", f"the request has keys that no text has: {sorted(more)}")
        if self.knows == "c":
            self._with_ids(message, asked, number)
        else:
            self._without_ids(message)
        due = self.faults.get(self._at, ())
        self._arrivals[self._at] += 1
        return due[self._arrivals[self._at] - 1] if self._arrivals[self._at] <= len(due) else None

    def _next(self, message: Message) -> bool:
        """Go on to the next request, if the message is that."""
        if self._at + 1 >= len(self.lines) or content(message) != self.lines[self._at + 1]:
            return False
        if not self.decided and self.answered <= self._at:
            self.fail("C-8", f"request {self._at + 2} was sent before the reply to request {self._at + 1} was had")
        self._at += 1
        self.decided, self.refused, self._first = False, False, message
        return True

    def _with_ids(self, message: Message, asked: bool, number: int) -> None:
        request_id = message.get("request_id")
        if not asked:
            self.fail("C-11" if number else "C-1", f"socket {number + 1} was not asked for capabilities: {message}")
        elif "request_id" not in message:
            self.fail("C-3", f"a request has no request_id: {message}")
        elif not isinstance(request_id, str) or not 1 <= len(request_id) <= 255:
            self.fail("C-2", f"request_id is no string of 1 to 255 characters: {request_id!r}")
        elif request_id not in self._ids:
            if self._next(message):
                self._ids[request_id] = self._at
            elif self._at >= 0 and content(message) == self.lines[self._at]:
                number = self._at + 1
                if self.refused:
                    self.fail("C-9", f"request {number} was refused, and is sent again with another id")
                elif self.replies.get(self._at, {}).get("type") == "error" and self.decided:
                    self.fail("C-5", f"the reply to request {number} is an error, and it is sent again with another id")
                else:
                    self.fail("C-11", f"request {number} is sent again with another id: it would act twice")
            else:
                self.fail("C-11", f"a request is not what the client was given: {message}")
        elif content(message) in self.lines[self._at + 1 :]:
            self.fail("C-3", f"the id of request {self._ids[request_id] + 1} is given to another one: {message}")
        elif self._ids[request_id] < self._at:
            self.fail("C-8", f"request {self._ids[request_id] + 1}, which is not the last one, is sent again")
        elif self.refused:
            self.fail("C-9", f"request {self._at + 1} was refused, and is sent again")
        elif content(message) != content(self._first):
            self.fail("C-6", f"the repeated request is not the same: {message} after {self._first}")

    def _without_ids(self, message: Message) -> None:
        if "request_id" in message:
            self.fail("C-1" if self.knows == "a" else "A-6", f"request_id is not offered, and is sent: {message}")
        elif not self._next(message):
            again = self._at >= 0 and content(message) == self.lines[self._at]
            statement = "A-14" if again and self.knows == "a" else "A-6" if again else "interface"
            self.fail(
                statement, f"request {self._at + 1} is sent again, and could act twice" if again else f"{message}"
            )

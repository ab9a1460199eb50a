"""A small client of the proposals A and C, driven as the client kit says; ``--defect NAME`` chooses something wrong."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import urllib.request
import uuid
from contextlib import ExitStack, suppress
from typing import Any

from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.sync.client import ClientConnection, connect

DEFECTS = {
    "no-capabilities": "C-1",  # ids are sent on a socket that was not asked for capabilities
    "capabilities-once": "C-11",  # nor asked again after attaching again
    "id-unoffered": "C-1",  # sends an id that is not offered
    "id-unknown": "A-6",  # sends an id to a server that does not know capabilities
    "capabilities-with-data": "A-3",
    "refuses-unknown-extensions": "A-3",
    "empty-id": "C-2",
    "long-id": "C-2",
    "number-id": "C-2",
    "same-id": "C-3",  # one id for all requests
    "id-of-content": "C-3",  # steps have ids, mcp messages have none
    "no-ids": "C-3",
    "retries-errors": "C-5",
    "changes-data": "C-6",
    "two-in-flight": "C-8",
    "repeats-before": "C-8",  # repeats also the request before the last one
    "gives-up-at-once": "C-9",  # does not try to attach again when it is refused
    "new-session": "C-9",  # goes on in another session where its own is unknown
    "repeats-refused": "C-9",
    "new-id-after-refusal": "C-9",
    "new-id": "C-11",  # repeats with another id
    "no-repeat": "C-11",
    "timeout-is-final": "C-11",  # repeats after a cut, not after a timeout
    "takes-late-reply": "C-12",  # keeps its socket and does not look at request_id
    "repeats-without-ids": "A-14",
    "repeats-on-stock": "A-6",
    "not-for-socket": "A-15",
    "delivery-of-text": "A-7",
    "delivery-of-before": "A-7",
    "no-close": "interface",
    "exit-status": "interface",
}
"""Each defect and the statement that it breaks."""
REFUSALS = ("SESSION_ERROR", "REQUEST_ID_REUSED", "REPLY_GONE")
Message = dict[str, Any]


class GivenUp(Exception):
    """The request is given up, with a code."""


class Client:
    """A client of one session.

    Args:
        url: URL of the server.
        timeout_s: How long it waits for a reply, in seconds.
        deadline_s: How long it tries to get one, in seconds.
        defect: What it does wrong; empty for nothing.
        keeps: Whether it keeps its socket after a timeout.
    """

    def __init__(self, url: str, timeout_s: float, deadline_s: float, defect: str, keeps: bool) -> None:
        self.url, self.timeout_s, self.deadline_s, self.defect = url, timeout_s, deadline_s, defect
        self.keeps = keeps or defect == "takes-late-reply"
        self.sockets = ExitStack()
        self.ws: ClientConnection | None = None
        self.asked = False
        self.extensions: Message = {}
        self.t: int | None = None
        self.before: str | None = None
        self.session_id = self.created()

    def created(self) -> str:
        """Create a session, for a socket. Returns its id."""
        named = {} if self.defect == "not-for-socket" else {"for_socket": True}
        return str(self.rpc("create", **named)["session_id"])

    def rpc(self, method: str, **params: Any) -> Message:
        """Create or close the session."""
        body = {"jsonrpc": "2.0", "id": 1, "method": f"openenv/session/{method}", "params": params}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/mcp", json.dumps(body).encode(), headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
            return dict(json.load(reply).get("result") or {})

    def drop(self) -> None:
        """Close the socket."""
        self.sockets.close()
        self.ws = None

    def heard(self, until: float) -> Message:
        """Return the next frame."""
        assert self.ws is not None
        return dict(json.loads(self.ws.recv(max(0.0, min(self.timeout_s, until - time.monotonic())))))

    def attach(self, until: float) -> None:
        """Open a socket and ask for capabilities."""
        address = self.url.replace("http", "ws", 1)
        self.ws = self.sockets.enter_context(connect(f"{address}/ws?session_id={self.session_id}", proxy=None))
        if self.defect == "no-capabilities" or (self.defect == "capabilities-once" and self.asked):
            self.extensions = {"request_id": 1}
            return
        self.asked = True
        more = {"data": {}} if self.defect == "capabilities-with-data" else {}
        with suppress(ConnectionClosed):  # a refusal may be queued before the close
            self.ws.send(json.dumps({"type": "capabilities", **more}))
        reply = self.heard(until)
        if reply["data"].get("code") == "SESSION_ERROR":
            self.drop()
            if reply["data"]["message"].startswith("Unknown"):
                if self.defect != "new-session":
                    raise GivenUp("SESSION_ERROR")
                self.session_id = self.created()
            if self.defect == "gives-up-at-once":
                raise GivenUp("SESSION_ERROR")
            raise ConnectionError(reply["data"]["message"])
        if reply["type"] == "error":
            self.extensions = {"request_id": 1} if self.defect == "id-unknown" else {}
            return
        self.extensions, self.t = dict(reply["data"]["extensions"]), reply["data"]["session"]["t"]
        if self.defect == "refuses-unknown-extensions" and set(self.extensions) - {"delivery", "request_id"}:
            raise GivenUp("UNKNOWN_EXTENSION")
        if self.defect == "id-unoffered":
            self.extensions["request_id"] = 1
        if self.defect == "no-ids":
            self.extensions.pop("request_id", None)

    def new_id(self, request: Message) -> Any:
        """Return an id for a request."""
        given = {"empty-id": "", "long-id": "x" * 256, "number-id": 5, "same-id": "a"}
        return given.get(self.defect, uuid.uuid4().hex)

    def ask(self, request: Message) -> Message:
        """Return the reply to a request, sending it again where it is lost.

        Raises:
            GivenUp: There is none.
        """
        until, request_id, sent, t = time.monotonic() + self.deadline_s, self.new_id(request), False, self.t
        while True:
            try:
                if self.ws is None:
                    self.attach(until)
                assert self.ws is not None
                safe = "request_id" in self.extensions
                again = "repeats-without-ids" if self.extensions else "repeats-on-stock"
                if sent and not safe and self.defect != again:
                    return self.delivered(until, t)
                if sent and self.defect == "repeats-before" and self.before is not None:
                    self.ws.send(self.before)
                if sent and self.defect == "new-id":
                    request_id = self.new_id(request)
                message = dict(request, request_id=request_id) if safe else dict(request)
                if request["type"] == "mcp" and self.defect == "id-of-content":
                    message.pop("request_id", None)
                if sent and self.defect == "changes-data":
                    message["data"] = {**request["data"], "again": True}
                sent = True
                self.ws.send(text := json.dumps(message))
                while True:
                    reply = self.heard(until)
                    if "request_id" not in message or reply.get("request_id") == request_id:
                        break
                    if "request_id" not in reply and reply["data"].get("code") == "VALIDATION_ERROR":
                        break
                    if self.defect == "takes-late-reply":
                        break
                self.before, self.t = text, reply.get("t", self.t)
                code = reply["data"].get("code")
                refused = code in REFUSALS or (safe and code == "VALIDATION_ERROR" and "request_id" not in reply)
                if refused and self.defect in ("repeats-refused", "new-id-after-refusal"):
                    request_id = request_id if self.defect == "repeats-refused" else self.new_id(request)
                    continue
                if refused:
                    raise GivenUp(code)
                if reply["type"] == "error" and self.defect == "retries-errors":
                    request_id = self.new_id(request)
                    continue
                return reply
            except TimeoutError:
                if self.defect == "timeout-is-final":
                    raise GivenUp("DEADLINE") from None
                if not self.keeps:
                    self.drop()
            except (OSError, WebSocketException):
                self.drop()
                time.sleep(0.02)
            if time.monotonic() > until or (sent and self.defect == "no-repeat"):
                raise GivenUp("DEADLINE")

    def delivered(self, until: float, t: int | None) -> Message:
        """Read a reply that was lost from a server that keeps it.

        Raises:
            GivenUp: There is none.
        """
        assert self.ws is not None
        if "delivery" not in self.extensions or self.t in (None, t):
            raise GivenUp("LOST")
        assert self.t is not None
        wanted: Any = self.t - (self.defect == "delivery-of-before")
        self.ws.send(
            json.dumps(
                {"type": "delivery", "data": {"t": str(wanted) if self.defect == "delivery-of-text" else wanted}}
            )
        )
        return self.heard(until)


def main() -> None:
    """Answer standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--defect", choices=DEFECTS, default="")
    parser.add_argument("--keeps", action="store_true")
    parser.add_argument("--url", required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    asked = parser.parse_args()
    client = Client(asked.url, asked.timeout, asked.deadline, asked.defect, asked.keeps)
    there = os.read(0, 1 << 16).decode().splitlines() if asked.defect == "two-in-flight" else []
    if len(there) > 1:
        client.attach(time.monotonic() + 60)
        for line in there:
            client.ws.send(json.dumps(dict(json.loads(line), request_id=uuid.uuid4().hex)))
    for line in itertools.chain(there, sys.stdin):
        try:
            reply = client.ask(json.loads(line))
            answer = {"type": reply["type"], "data": reply["data"]}
        except GivenUp as given_up:
            answer = {"failed": str(given_up), "repeated": False}
        print(json.dumps(answer), flush=True)
    client.drop()
    if asked.defect != "no-close":
        client.rpc("close", session_id=client.session_id)
    sys.exit(asked.defect == "exit-status")


if __name__ == "__main__":
    main()

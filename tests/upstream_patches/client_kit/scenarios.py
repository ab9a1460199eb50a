"""What happens to the client: the scenarios, and what each shows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

STATEMENTS = {
    "interface": "the program does what the kit's interface says; its session is closed at the end",
    "A-3": "capabilities is asked without other keys, and unknown names and fields of its answer are ignored",
    "A-6": "UNKNOWN_TYPE means that nothing is offered: no id is sent, and nothing is sent again",
    "A-7": "what delivery is asked for, and that its frame is the reply",
    "A-13": "an attach that is refused is tried again",
    "A-14": "a request is not sent again to a server that offers no request_id",
    "A-15": "a session that is created for a socket is said to be, so that a lost reply does not hold its slot",
    "C-1": "a socket is asked for capabilities before ids are sent on it; no id is sent where none is offered",
    "C-2": "an id is a string of 1 to 255 characters",
    "C-3": "each request has an id, and each another one",
    "C-5": "an error is a reply: it is handed on, and the request is not tried anew",
    "C-6": "a repeated request has the same type and data",
    "C-8": "one request is in flight, and only the last one is repeated",
    "C-9": "refusals: what is not repeated, what is tried again, what is given up",
    "C-11": "after a timeout or a cut: attach, ask for capabilities, send the last request again with its id",
    "C-12": "a late reply is not taken for that of another request",
}
"""The statements that bind a client, by their number. A-13 is also a row of C-9, C-5 a decision of C."""

_seeds = itertools.count(1)


def reset() -> Message:
    """Return a reset. No two are the same, so that the kit can tell which request a frame is."""
    return {"type": "reset", "data": {"seed": next(_seeds)}}


def step(n: int) -> Message:
    """Return a step, which ends with an error where n is negative."""
    return {"type": "step", "data": {"n": n}}


def mcp(request_id: int, method: str, **params: Any) -> Message:
    """Return a message for MCP."""
    return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}}


@dataclass(frozen=True)
class Scenario:
    """What the server does to the client.

    Args:
        name: What happens, in words.
        statement: The statement that is broken where an answer is missing or wrong.
        shows: Further statements that it shows.
        lines: The requests that the client is given.
        faults: By the index of a request, what happens at its first arrival, its second one, and so on: ``lost`` (the
            socket is cut, the request did not arrive), ``cut`` (executed, then cut), ``flap`` (cut, and the next two
            sockets too), ``busy`` (cut while it runs: attaching is refused), ``stuck`` (for ever), ``swallow`` (the
            socket stays, and no reply comes), ``gone`` (cut, and the session is unknown), or the code of a refusal.
        gives_up: By the index of a request, the codes with which the client may give it up, of which it must use one.
        may_fail: Indices of requests that the client may give up, with any code.
        knows: Which proposals the server knows.
        more: Whether capabilities have names and fields that no text has.
        at_once: Whether the client is given all requests at once, and replies are held back for a moment.
        timeout_s: ``--timeout``, in seconds.
        deadline_s: ``--deadline``, in seconds.
    """

    name: str
    statement: str
    lines: Sequence[Message]
    shows: Sequence[str] = ()
    faults: Mapping[int, Sequence[str]] = field(default_factory=dict)
    gives_up: Mapping[int, Sequence[str]] = field(default_factory=dict)
    may_fail: Sequence[int] = ()
    knows: str = "c"
    more: bool = False
    at_once: bool = False
    timeout_s: float = 30.0
    deadline_s: float = 60.0


def _refused(code: str) -> Scenario:
    lines = [reset(), step(1), step(2)]
    return Scenario(f"{code} to a repeated request", "C-9", lines, faults={1: ["cut", code]}, gives_up={1: [code]})


SCENARIOS = (
    Scenario(
        "nothing happens",
        "C-5",
        [reset(), step(1), step(2), step(-1), step(3), reset(), step(4)],
        ["interface", "C-1", "C-2", "C-3", "C-8", "A-3", "A-15"],
        at_once=True,
    ),
    Scenario(
        "mcp messages, one of which is cut",
        "C-3",
        [reset(), mcp(1, "tools/list"), mcp(1, "tools/call", name="add", arguments={"n": 2}), step(1)],
        faults={2: ["cut"]},
    ),
    Scenario("capabilities have unknown names and fields", "A-3", [reset(), step(1)], more=True),
    Scenario(
        "requests are cut before they arrive",
        "C-11",
        [reset(), step(1), step(2), step(3)],
        ["C-1", "C-6", "C-8"],
        {1: ["lost"], 3: ["lost", "lost"]},
    ),
    Scenario(
        "replies are cut, a reset's too",
        "C-11",
        [reset(), step(1), step(2), reset(), step(3)],
        ["C-6", "C-8"],
        {0: ["cut"], 2: ["cut", "cut"], 3: ["cut"]},
    ),
    Scenario("an error reply is cut", "C-5", [reset(), step(1), step(-1), step(2)], faults={2: ["cut"]}),
    Scenario("sockets are cut while the client attaches", "C-11", [reset(), step(1), step(2)], faults={1: ["flap"]}),
    Scenario(
        "attaching is refused while the request runs", "C-9", [reset(), step(1), step(2)], ["A-13"], {1: ["busy"]}
    ),
    Scenario(
        "attaching is refused for ever",
        "C-9",
        [step(1)],
        faults={0: ["stuck"]},
        gives_up={0: ["SESSION_ERROR", "DEADLINE"]},
        deadline_s=3.0,
    ),
    Scenario(
        "the session is unknown",
        "C-9",
        [step(1)],
        faults={0: ["gone"]},
        gives_up={0: ["SESSION_ERROR", "DEADLINE"]},
        deadline_s=3.0,
    ),
    _refused("VALIDATION_ERROR"),
    _refused("REQUEST_ID_REUSED"),
    _refused("REPLY_GONE"),
    Scenario(
        "a reply does not come, the socket stays",
        "C-11",
        [reset(), step(1), step(2), step(-1), step(3)],
        ["C-12"],
        {1: ["swallow"], 3: ["swallow"]},
        timeout_s=0.5,
    ),
    Scenario(
        "a reply comes when its request was given up",
        "C-12",
        [step(1), step(2), step(3)],
        ["C-8"],
        {0: ["swallow"] * 99},
        {0: ["DEADLINE"]},
        timeout_s=0.5,
        deadline_s=1.5,
    ),
    Scenario(
        "the server offers no request_id",
        "A-14",
        [reset(), step(1), step(2), step(3), step(-1), step(4)],
        ["C-1", "A-7"],
        {1: ["cut"], 2: ["lost"], 4: ["cut"]},
        may_fail=[1, 2, 4],
        knows="a",
    ),
    Scenario(
        "the server does not know capabilities",
        "A-6",
        [reset(), step(1), step(2)],
        faults={1: ["cut"]},
        may_fail=[0, 1, 2],
        knows="stock",
    ),
)

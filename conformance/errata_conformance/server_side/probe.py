"""The actions to send to an environment: which one works, which one fails, which one is slow, and so on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..results import NotTested

MAX_BYTES = 16 * 1024**2
"""Largest file of a probe, bytes."""


@dataclass(frozen=True)
class Probe:
    """What the checks send to an environment. A check whose action is missing is not tested, and names it.

    Args:
        step: Two or more actions that work, in any order, and whose observations differ.
        fails: The environment raises an exception on it.
        invalid: It does not validate as an action.
        slow: It works, and takes about `slow_s` seconds.
        slow_s: How long `slow` takes, in seconds.
        marked: Actions that fail so that the observation has a marker.
        own_mark: The environment itself writes an ``error_kind`` into ``metadata``.
        machine: The machinery fails, such as a sandbox that is lost; not the action.
        big: The observation has more than 256 KiB.
        not_finite: The observation holds NaN or an infinity.
        random: The observation differs each time, in an environment that is declared deterministic.
        done: Ends the episode.
        tool: ``{"name", "arguments"}`` of an MCP tool call that works.
        volatile: Names of observation fields that differ from run to run, such as durations.
    """

    step: tuple[dict[str, Any], ...] = ()
    fails: dict[str, Any] | None = None
    invalid: dict[str, Any] | None = None
    slow: dict[str, Any] | None = None
    slow_s: float = 0.0
    marked: tuple[dict[str, Any], ...] = ()
    own_mark: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    big: dict[str, Any] | None = None
    not_finite: dict[str, Any] | None = None
    random: dict[str, Any] | None = None
    done: dict[str, Any] | None = None
    tool: dict[str, Any] | None = None
    volatile: tuple[str, ...] = field(default=())

    def need(self, name: str) -> Any:
        """Return the action of a field.

        Raises:
            NotTested: The probe does not have it.
        """
        value = getattr(self, name)
        if not value:
            raise NotTested(f"the probe has no `{name}`: give one with --probe FILE")
        return value

    @classmethod
    def read(cls, path: Path) -> Probe:
        """Read a probe from a JSON file, an object with these fields.

        Raises:
            ValueError: The file has another form.
        """
        if path.exists() and not path.is_file():
            raise ValueError("it is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
        try:
            found: Any = json.loads(content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        known = {one.name for one in fields(cls)}
        if not isinstance(found, dict) or set(found) - known:
            raise ValueError(f"{path}: a probe is an object with fields of {', '.join(sorted(known))}")
        lists = ("step", "marked", "volatile")
        wrong = [name for name in lists if not isinstance(found.get(name, []), list)]
        if wrong:
            raise ValueError(f"{path}: {wrong[0]} is a list")
        settings: dict[str, Any] = {k: tuple(v) if k in lists else v for k, v in found.items()}
        return cls(**settings)


TALLY = Probe(
    step=({"n": 2}, {"n": 3}, {"n": 5}),
    fails={"do": "fail"},
    invalid={"n": "many"},
    slow={"n": 1, "do": "sleep"},
    slow_s=0.4,
    marked=({"do": "mark"}, {"do": "mark caf\u00e9 \U0001f600 nope"}),
    own_mark={"do": "own"},
    machine={"do": "crash"},
    big={"do": "big"},
    not_finite={"do": "nan"},
    random={"do": "random"},
    done={"do": "done"},
    tool={"name": "add", "arguments": {"n": 1}},
)
"""For the environment of the RFCs' examples and the sample server: it adds ``n``, and ``do`` makes it fail."""

TERMINAL = Probe(
    step=({"command": "echo a >> f; wc -l f"}, {"command": "echo b >> f; cat f"}, {"command": "pwd"}),
    invalid={"command": 1},
    slow={"command": "sleep 1"},
    slow_s=1.0,
    marked=({"command": "no-such-program"}, {"command": "echo caf\u00e9; cat no-such-file"}),
    volatile=("duration_s", "duration_ms", "elapsed_s"),
)
ECHO = Probe(step=({"message": "a"}, {"message": "b"}, {"message": "c"}), invalid={"message": 1})

KNOWN = {"tally": TALLY, "terminal": TERMINAL, "echo": ECHO}
"""Probes by name."""


def guess(action_schema: Any) -> tuple[str, Probe]:
    """Return a name and a probe for an environment from the JSON Schema of its actions.

    Raises:
        NotTested: No action can be made from the schema.
    """
    properties = action_schema.get("properties", {}) if isinstance(action_schema, dict) else {}
    names = set(properties) - {"metadata"}
    if {"n", "do"} <= names:
        return "tally", TALLY
    if names == {"command"} or ("command" in names and set(action_schema.get("required", ())) == {"command"}):
        return "terminal", TERMINAL
    if names == {"message"}:
        return "echo", ECHO
    actions = []
    for variant in range(3):
        action = {}
        for name in action_schema.get("required", ()) if isinstance(action_schema, dict) else ():
            action[name] = _value(properties.get(name, {}), variant)
        actions.append(action)
    if not names:
        raise NotTested("GET /schema has no action with fields: give actions with --probe FILE")
    return "guessed from /schema", Probe(step=tuple(actions))


def _value(schema: dict[str, Any], variant: int) -> Any:
    if "enum" in schema:
        return schema["enum"][variant % len(schema["enum"])]
    if "anyOf" in schema:
        return _value(schema["anyOf"][0], variant)
    low = int(schema.get("minimum", 0))
    kinds: dict[Any, Any] = {"integer": low + variant, "number": float(low + variant), "boolean": variant % 2 == 0}
    return kinds.get(schema.get("type"), f"{'abc'[variant]}" if schema.get("type") == "string" else None)

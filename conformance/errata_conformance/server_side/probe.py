"""The actions to send to an environment: which one works, which one fails, which one is slow, and so on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..exact import encode
from ..results import NotApplicable, NotTested
from .generated import objects

MAX_BYTES = 16 * 1024**2
"""Largest file of a probe, bytes."""

_OBJECTS = ("reset", "fails", "invalid", "slow", "own_mark", "machine", "big", "not_finite", "random", "done", "tool")
_LISTS = {"step": dict, "marked": dict, "volatile": str}
"""Fields that hold a list, and the type of its items."""


@dataclass(frozen=True)
class Probe:
    """What the checks send to an environment. A check whose action is missing is not tested, and names it.

    Args:
        step: Two or more actions that work, in any order, and whose observations differ.
        reset: Arguments of each reset, for an environment that needs some.
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
        any_injected_state: Whether the environment's reset takes an ``injected_state`` of any form.
        none: Names of the fields above for which the environment has no action. Their checks are not applicable.
    """

    step: tuple[dict[str, Any], ...] = ()
    reset: dict[str, Any] | None = None
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
    any_injected_state: bool = False
    none: tuple[str, ...] = field(default=())

    def need(self, name: str) -> Any:
        """Return the action of a field; of `step`, two or more actions, which may be equal.

        Raises:
            NotTested: The probe does not have it.
            NotApplicable: The probe says that the environment has no such action.
        """
        value = getattr(self, name)
        if name in self.none:
            raise NotApplicable(f"no action of the environment is `{name}`, says the probe")
        if not value:
            raise NotTested(f"the probe has no `{name}`: give one with --probe FILE")
        return (*value, *value) if name == "step" and len(value) == 1 else value

    def another(self, action: dict[str, Any]) -> dict[str, Any] | None:
        """Return an action that works and differs from this one; None if there is none."""
        return next((one for one in self.step if one != action), None)

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
        try:
            return cls.of(found)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def of(cls, found: Any) -> Probe:
        """Return a probe of a JSON value, an object with these fields; a field that is null goes to `none`.

        Raises:
            ValueError: It has another form.
        """
        known = {one.name for one in fields(cls)} - {"none"}
        if not isinstance(found, dict) or set(found) - known:
            raise ValueError(f"a probe is an object with fields of {', '.join(sorted(known))}")
        none = tuple(name for name, value in found.items() if value is None)
        given = {name: value for name, value in found.items() if value is not None}
        if "step" in none:
            raise ValueError("step is a list of actions")
        for name, item in _LISTS.items():
            if not isinstance(given.get(name, []), list) or not all(
                isinstance(one, item) for one in given.get(name, ())
            ):
                raise ValueError(f"{name} is a list of {'actions' if item is dict else 'names'}")
        for name in _OBJECTS:
            if not isinstance(given.get(name, {}), dict):
                raise ValueError(f"{name} is an object")
        slow_s = given.get("slow_s", 0.0)
        if isinstance(slow_s, bool) or not isinstance(slow_s, int | float) or ("slow" in given) != (slow_s > 0):
            raise ValueError("slow and slow_s go together: an action, and how many seconds it takes")
        if not isinstance(given.get("any_injected_state", False), bool):
            raise ValueError("any_injected_state is true or false")
        settings: dict[str, Any] = {k: tuple(value) if k in _LISTS else value for k, value in given.items()}
        return cls(**settings, none=none)


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
    any_injected_state=True,
)
"""For the environment of the protocol's examples and the sample server: it adds ``n``, and ``do`` makes it fail."""

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
    properties = action_schema.get("properties") if isinstance(action_schema, dict) else None
    properties = properties if isinstance(properties, dict) else {}
    names = set(properties) - {"metadata"}
    required = action_schema.get("required") if isinstance(action_schema, dict) else None
    if {"n", "do"} <= names:
        return "tally", TALLY
    if "command" in names and required in (None, [], ["command"]):
        return "terminal", replace(TERMINAL, step=(*TERMINAL.step, *objects(action_schema)))
    if names == {"message"}:
        return "echo", ECHO
    actions = tuple(objects(action_schema, 6))
    if not any(actions) and not properties:
        raise NotTested("GET /schema has no action with fields: give actions with --probe FILE")
    return "guessed from /schema", Probe(step=actions)


def of_tools(listed: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield calls of MCP tools, as name and arguments, from the result of ``tools/list``; three for a tool at most."""
    tools = listed.get("tools") if isinstance(listed, dict) else None
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict) and isinstance(tool.get("name"), str):
            given = tool.get("inputSchema") or tool.get("input_schema") or {}
            made = (
                {encode(one): one for one in objects({"type": "object", **given}, 2)} if isinstance(given, dict) else {}
            )
            for arguments in list(made.values())[:3]:
                yield tool["name"], arguments

"""An environment whose agents run scripted commands, with outputs of every kind; for the viewer's tests."""

from __future__ import annotations

import json
from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.environment import Snapshot
from errata_protocol.markers import Detection, ErrorKind, ErrorMarkers, ErrorSite

HOSTILE = {
    "script": "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>",
    "link": '<a href="javascript:window.hacked=1">javascript:window.hacked=1</a> https://evil.example/x',
    "cursor": "one\x1b[2J\x1b[1;1Htwo\x1b]0;a title\x07three\x1b]8;;https://evil.example/\x1b\\four\x1b]8;;\x1b\\five",
    "bidi": "if \u202e\u2066level\u2069\u202c: pass\u200b",
    "joiner": "pa\u200dss",
    "nul": "a\x00b\x7fc\x1bd",
    "nested": "[" * 200 + "]" * 200,
    "template": "${window.hacked = 1} {{7*7}} `x`",
}
"""Outputs by the command that prints them."""

COLOURS = (
    "\x1b[1;31mred\x1b[0m plain \x1b[38;5;208morange\x1b[39m \x1b[48;2;1;2;3mdeep\x1b[0m end "
    "\x1b[38;2;9;9;9m\x1b[48;2;9;9;9mhidden\x1b[0m \x1b[31;41msame\x1b[0m \x1b[38;2;179;38;30;41mclose\x1b[0m "
    "\x1b[7;31mturned\x1b[0m \x1b[2;32mdim\x1b[0m \x1b[2mgrey\x1b[0m"
)
LINES = "\n".join(f"line {number} {'x' * 100}" for number in range(50_000))
LONG = "y" * 3_000_000


class Shell(Action):
    """Run ``command``."""

    command: str = ""


class Printed(ErrorMarkers, Observation):
    """What the command printed."""

    output: str = ""
    nested: Any = None
    value: Any = None


class ShellEnvironment(Environment[Shell, Printed, State]):
    """``fail TEXT`` marks TEXT as wrong; the others print."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Printed:
        self._steps = 0
        return Printed(output=f"ready {json.dumps(more)}")

    def step(self, action: Shell, timeout_s: float | None = None, **_: Any) -> Printed:
        self._steps += 1
        command = action.command
        if command in HOSTILE:
            nested = json.loads(HOSTILE[command]) if command == "nested" else None
            return Printed(output=HOSTILE[command], nested=nested, reward=0.0)
        long = {"colours": COLOURS, "lines": LINES, "long": LONG}
        if command in long:
            return Printed(output=long[command], reward=0.0)
        if command == "done":
            return Printed(output="bye", reward=1.0, done=True)
        _, fails, wrong = command.partition("fail ")
        if fails:
            start = len(command) - len(wrong)
            site = ErrorSite(
                action_field="command", action_span=(start, len(command.rstrip("!"))), file="a/b.py", line=7
            )
            return Printed(output=f"no such thing: {wrong}", reward=-0.5).with_detection(
                Detection.of(ErrorKind.COMMAND_NOT_FOUND, site)
            )
        return Printed(output=f"ran {command}", reward=0.1)

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=self._steps)

    def snapshot(self) -> Snapshot:
        return Snapshot(json.dumps(self._steps).encode())

    def restore(self, snapshot: Snapshot) -> None:
        self._steps = json.loads(snapshot.state)


class Echo(Action):
    """Echo ``command`` wherever an environment has a text to say, as ``mode`` says."""

    command: str = ""
    mode: str = ""


class HostileEnvironment(Environment[Echo, Printed, State]):
    """Repeats what the agent sends in every field that a viewer shows: observation, marker, file, test and message."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Printed:
        return Printed(output=json.dumps(more, ensure_ascii=False))

    def step(self, action: Echo, timeout_s: float | None = None, **_: Any) -> Printed:
        text = action.command
        if action.mode == "deep":
            return Printed(output="", nested=None, value=json.loads("[" * 200 + "]" * 200), reward=0.0)
        if action.mode == "long":
            return Printed(output=text, reward=0.0)
        site = ErrorSite(file=text, line=3, test_id=text, message=text, action_field="command", action_span=(0, 2))
        return Printed(output=text, nested={text: text}, reward=-1.0).with_detection(
            Detection.of(ErrorKind.COMMAND_NOT_FOUND, site)
        )

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=0)

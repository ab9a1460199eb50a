"""Plays the probe's actions once before the checks, and finds out what the environment bears.

An environment is not the server's fault: it may refuse actions that its schema allows, end after one step, take a
minute for a reset, or answer something else each time. What is found here keeps the checks from calling that broken.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from websockets.exceptions import WebSocketException

from ..exact import encode
from ..results import Blocked, Broken, NotTested
from .check_markers import rpc
from .probe import of_tools
from .sockets import Message, Wire
from .target import Target

STEPS = 41
"""Most steps of an episode that is played here: one check needs so many."""

PATIENCE = 8
"""How many times as long as in the checks a reply may take here."""

PLAY_S = 20.0
"""After so many seconds no further step is played here."""


class Refused(Exception):
    """The environment refused a reset; the text is its answer."""


async def rehearsed(target: Target, guessed: bool, repeatable: bool) -> str:
    """Play the probe's actions, and note in ``target`` what the checks have to heed.

    Args:
        target: Server to play on. Guessed actions that it refuses are taken out of its `probe`.
        guessed: Whether the actions are guessed, so that some may not work.
        repeatable: Whether the environment is known to answer the same each time.

    Returns:
        What was found, for the report's first line; empty if nothing is remarkable.
    """
    try:
        async with target.plain() as wire:
            wire.reply_s *= PATIENCE
            found = await _guess(target, wire) if guessed else []
            if target.probe.step:
                found += await _episode(target, wire)
        if target.probe.step and (guessed or not target.probe.volatile) and not repeatable:
            async with target.plain() as wire:
                wire.reply_s *= PATIENCE
                found += await _again(target, wire)
    except Refused as refused:
        target.probe = replace(target.probe, step=())
        target.refuses_reset = (
            f"the environment refuses the reset: {refused}; give its arguments as `reset` with --probe FILE"
        )
        return target.refuses_reset
    except (Broken, Blocked, NotTested, WebSocketException, OSError):
        return ""  # the checks say what is wrong
    return "; ".join(found)


async def _reset(target: Target, wire: Wire) -> Message:
    started = time.monotonic()
    reply = await wire.ask("reset", target.probe.reset or {})
    target.reset_s = max(target.reset_s, time.monotonic() - started)
    if reply.type != "observation":
        raise Refused(repr(reply))
    return reply


def _over(reply: Message) -> bool:
    return isinstance(reply.data, dict) and reply.data.get("done") is True


def _observation(reply: Message) -> dict[str, Any]:
    found = reply.data.get("observation") if isinstance(reply.data, dict) else None
    return found if isinstance(found, dict) else {}


def _kind(reply: Message) -> Any:
    """Return the error kind of an observation, in its field or in its metadata; None without one."""
    found = _observation(reply)
    metadata = found.get("metadata")
    return found.get("error_kind") or (metadata.get("error_kind") if isinstance(metadata, dict) else None)


async def _guess(target: Target, wire: Wire) -> list[str]:
    """Keep those of the guessed actions that the environment takes; those that it marks go to `marked`."""
    probe = target.probe
    actions = list(probe.step)
    await _reset(target, wire)
    if any("tool_name" in one for one in actions):  # the one action of an MCP environment is a call of a tool
        actions = await _calls(wire) or actions
    works: list[tuple[dict[str, Any], str]] = []
    marked: list[dict[str, Any]] = []
    refusal = ""
    for action in (*actions, *probe.marked):
        reply = await wire.ask("step", action)
        if reply.type != "observation":
            refusal = refusal or f"{encode(action)[:200]} was answered with {reply!r}"
        elif _kind(reply) is None:
            works.append((action, encode(_observation(reply))))
        else:
            marked.append(action)
        if reply.type != "observation" or _over(reply):
            await _reset(target, wire)
    chosen = _different(works) or marked[:3]
    call = next((one for one in chosen if "tool_name" in one), None)
    tool = probe.tool if call is None else {"name": call["tool_name"], "arguments": call.get("arguments") or {}}
    failing = tuple(one for one in marked if one not in chosen)[-3:]
    target.probe = replace(probe, step=tuple(chosen), marked=failing, tool=tool)
    return [] if chosen else [f"none works: {refusal or 'there is no tool'}; give some with --probe FILE"]


async def _calls(wire: Wire) -> list[dict[str, Any]]:
    listed = await wire.ask("mcp", rpc("tools/list", {}))
    result = listed.data.get("result") if isinstance(listed.data, dict) else None
    return [{"type": "call_tool", "tool_name": name, "arguments": given} for name, given in of_tools(result)]


def _different(works: Sequence[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    """Return up to three actions, first those whose observations differ."""
    first = {answer: action for action, answer in reversed(works)}
    chosen = [action for action, answer in works if first[answer] is action]
    return [*chosen, *(action for action, _ in works if action not in chosen)][:3]


async def _episode(target: Target, wire: Wire) -> list[str]:
    """Play one episode until it ends, and note how long it was and how long its requests took."""
    await _reset(target, wire)
    began, actions = time.monotonic(), target.probe.need("step")
    for n in range(STEPS):
        started = time.monotonic()
        reply = await wire.ask("step", actions[n % len(actions)])
        target.step_s = max(target.step_s, time.monotonic() - started)
        if reply.type != "observation":
            if n:
                target.bears = n
            break
        if _over(reply):
            target.bears = n + 1
            break
        if time.monotonic() - began > PLAY_S:
            break
    return [] if target.bears is None else [f"an episode ends after {target.bears} step{'s' * (target.bears > 1)}"]


async def _again(target: Target, wire: Wire) -> list[str]:
    """Play the first steps in two episodes, and note the names of fields that differ."""
    steps = target.probe.need("step")[: min(target.bears or 3, 3)]

    async def run() -> list[Any]:
        replies = [await _reset(target, wire)]
        return [reply.data for reply in [*replies, *[await wire.ask("step", action) for action in steps]]]

    names = _differing(await run(), await run(), "") - set(target.probe.volatile)
    target.probe = replace(target.probe, volatile=(*target.probe.volatile, *sorted(names)))
    return [f"from run to run differ: {', '.join(sorted(names))}"] if names else []


def _differing(one: Any, other: Any, name: str) -> set[str]:
    """Return the names of the innermost members that differ."""
    if isinstance(one, dict) and isinstance(other, dict) and set(one) == set(other):
        return set().union(*(_differing(one[key], other[key], key) for key in one))
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return set().union(*(_differing(a, b, name) for a, b in zip(one, other, strict=True)))
    return set() if one == other else {name}

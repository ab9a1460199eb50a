"""R-014: error markers."""

from __future__ import annotations

from itertools import count
from typing import Any

from ..exact import encode
from ..results import Blocked, Broken, NotApplicable, NotSupported, NotTested, ensure
from .registry import check
from .sockets import Message
from .target import Target

FIELDS = ("error_kind", "severity", "error_site", "error_sites", "hint_template_key")
SITE = {"t", "action_field", "action_span", "file", "line", "column", "test_id", "source", "message"}
MIRRORED = ("error_kind", "hint_template_key", "error_site")
OWN_FIELDS = "the observation's class declares the fields; this is about servers that mark another's observations"
META_KEY = "openenv/error_markers"


def declared(target: Target) -> set[str]:
    """Return which of the five marker fields the observation's schema declares."""
    schema = target.schema.get("observation")
    return set(FIELDS) & set(schema.get("properties", {})) if isinstance(schema, dict) else set()


class Turns:
    """The turns of one session: a reset, a step that works, and steps that fail; more resets where episodes are short.

    Args:
        turns: (t, action or None for a reset, observation frame), in their order.
    """

    def __init__(self, turns: list[tuple[int, Any, Message]]) -> None:
        self.turns = turns

    def observations(self) -> list[dict[str, Any]]:
        """Return the observations in their order."""
        return [frame.data["observation"] for _, _, frame in self.turns]


async def played(target: Target) -> Turns:
    """Play the probe's actions and return the turns."""
    async with target.plain() as wire:
        turns: list[tuple[int, Any, Message]] = [(0, None, await wire.works("reset", {}))]
        for action in (*target.probe.need("step")[:1], *target.probe.marked):
            t, _, last = turns[-1]
            if t == target.bears or last.data.get("done") is True:
                turns.append((t := 0, None, await wire.works("reset", {})))
            turns.append((t + 1, action, await wire.works("step", action)))
    return Turns(turns)


async def of_class(target: Target) -> Turns:
    """Play the probe's actions, if the observation's class declares the marker fields.

    Raises:
        NotSupported: It does not declare them.
    """
    turns = await played(target)
    if not declared(target) and not all(set(FIELDS) & set(one) for one in turns.observations()):
        raise NotSupported("observations declare no markers: GET /schema has none of the five fields")
    return turns


async def marked(target: Target) -> list[tuple[int, Any, dict[str, Any]]]:
    """Return (t, action, observation) of the turns with a marker in declared fields."""
    target.probe.need("marked")
    turns = await of_class(target)
    found = [
        (t, action, frame.data["observation"])
        for t, action, frame in turns.turns
        if frame.data["observation"].get("error_kind") is not None
    ]
    if not found:
        raise NotTested("none of the probe's `marked` actions has a marker")
    return found


def sites(observation: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all sites of an observation."""
    first = observation.get("error_site")
    return [*([first] if first is not None else []), *(observation.get("error_sites") or [])]


@check("R-014-5", "the fields stand in the observation's schema")
async def _(target: Target) -> None:
    turns = await played(target)
    always = set.intersection(*(set(FIELDS) & set(one) for one in turns.observations()))
    if not always and not declared(target):
        raise NotSupported("observations declare no markers: GET /schema has none of the five fields")
    missing = (set(FIELDS) if declared(target) else always) - declared(target)
    ensure(not missing, f"GET /schema: observation has no {', '.join(sorted(missing))}")


@check("R-014-1", "all five fields come with every observation")
async def _(target: Target) -> None:
    for t, observation in enumerate((await of_class(target)).observations()):
        missing = set(FIELDS) - set(observation)
        ensure(
            not missing, f"the observation at t={t} has no {', '.join(sorted(missing))}: {encode(observation)[:300]}"
        )
        ensure(isinstance(observation["error_kind"], str | None), f"error_kind at t={t}: {observation['error_kind']!r}")
        ensure(isinstance(observation["error_sites"], list), f"error_sites at t={t}: {observation['error_sites']!r}")
        ensure(observation["severity"] in (None, "error", "warning"), f"severity at t={t}: {observation['severity']!r}")


@check("R-014-2", "severity is null exactly where error_kind is null")
async def _(target: Target) -> None:
    for t, one in enumerate((await of_class(target)).observations()):
        ensure((one.get("severity") is None) == (one.get("error_kind") is None), f"t={t}: {encode(one)[:300]}")
        if one.get("error_kind") == "output_truncated":
            ensure(one.get("severity") == "warning", f"t={t}: output_truncated is a warning: {encode(one)[:300]}")


@check("R-014-3", "an observation without a kind has no site and no key")
async def _(target: Target) -> None:
    for t, one in enumerate((await of_class(target)).observations()):
        if one.get("error_kind") is None:
            rest = (one.get("error_site"), one.get("hint_template_key"), one.get("error_sites") or None)
            ensure(rest == (None, None, None), f"t={t}: {encode(one)[:300]}")


@check("R-014-4", "error_site is the first of error_sites")
async def _(target: Target) -> None:
    for t, _action, one in await marked(target):
        first = (one.get("error_sites") or [None])[0]
        ensure(one.get("error_site") == first, f"t={t}: {encode(one)[:400]}")


@check("R-014-6", "a site has nine fields")
async def _(target: Target) -> None:
    for t, _action, one in await marked(target):
        for site in sites(one):
            ensure(set(site) == SITE, f"t={t}: a site has {sorted(set(site) ^ SITE)} too many or too few")


@check("R-014-7", "a span lies in its field of the action and counts code points")
async def _(target: Target) -> None:
    for t, action, one in await marked(target):
        for site in sites(one):
            if site.get("action_span") is None:
                continue
            name, (start, end) = site.get("action_field"), site["action_span"]
            if not isinstance(name, str):
                raise Broken(f"t={t}: a span without action_field: {encode(site)}")
            text: Any = action
            for part in name.split("."):
                text = text.get(part) if isinstance(text, dict) else None
            ensure(isinstance(text, str), f"t={t}: the action has no text in {name!r}: {encode(action)}")
            ensure(0 <= start <= end <= len(text), f"t={t}: span {start}, {end} of a field of {len(text)} code points")


@check("R-014-8", "a site's message is one line of at most 300 code points")
async def _(target: Target) -> None:
    for t, _action, one in await marked(target):
        for site in sites(one):
            text = site.get("message")
            if text is not None:
                ensure(len(text) <= 300 and len(text.splitlines()) <= 1, f"t={t}: message {text[:400]!r}")


@check("R-014-9", "a site's t is the turn that delivers it")
async def _(target: Target) -> None:
    for t, _action, one in await marked(target):
        for site in sites(one):
            ensure(site.get("t") in (None, t), f"the delivery at t={t} has a site with t={site.get('t')}")
    if target.probe.fails is None:
        return
    async with target.plain() as wire:
        await wire.ask("capabilities")  # where it is known, deliveries name their t from here on
        await wire.works("reset", {})
        await wire.ask("step", target.probe.fails)
        reply = await wire.works("step", target.probe.marked[0])
        t = 1 if reply.get("t") is None else reply.get("t")  # if that is wrong, R-015-3 is broken and not this
        for site in sites(reply.data["observation"]):
            ensure(site.get("t") in (None, t), f"t={t} follows a step that ended in an error frame: {encode(site)}")


@check("R-014-14", "metadata has the three names exactly where there is an error")
async def _(target: Target) -> None:
    seen = (await of_class(target)).observations()
    if target.probe.own_mark is not None:
        async with target.plain() as wire:
            await wire.works("reset", {})
            seen.append((await wire.works("step", target.probe.own_mark)).data["observation"])
    for t, one in enumerate(seen):
        metadata = one.get("metadata") or {}
        if one.get("error_kind") is None:
            ensure(not set(MIRRORED) & set(metadata), f"t={t}: metadata {encode(metadata)[:300]}")
            continue
        for name in MIRRORED:
            ensure(
                name in metadata and metadata[name] == one.get(name),
                f"t={t}: metadata has another {name}: {encode(one)[:400]}",
            )


async def wrapped(target: Target) -> Turns:
    """Play the probe's actions, if the observation's class declares none of the marker fields.

    Raises:
        NotSupported: No turn has a marker.
    """
    if declared(target):
        raise NotApplicable(OWN_FIELDS)
    turns = await played(target)
    found = turns.observations()
    if not any("error_kind" in one or "error_kind" in (one.get("metadata") or {}) for one in found):
        raise NotSupported("no turn of the probe is marked, in fields or in metadata")
    if all(set(FIELDS) & set(one) for one in found):
        raise Blocked("R-014-5", "every observation has fields that GET /schema does not name")
    return turns


@check("R-014-15", "a server adds no undeclared fields, and all five names to the metadata of turns that failed")
async def _(target: Target) -> None:
    for t, one in enumerate((await wrapped(target)).observations()):
        added = set(FIELDS) & set(one)
        ensure(not added, f"t={t}: the observation has {sorted(added)}, which its class does not declare")
        named = set(FIELDS) & set(one.get("metadata") or {})
        ensure(named in (set(), set(FIELDS)), f"t={t}: metadata has {sorted(named)} and not all five names")


@check("R-014-16", "a marker of the environment's own stays as it is")
async def _(target: Target) -> None:
    if declared(target):
        raise NotApplicable(OWN_FIELDS)
    own = target.probe.need("own_mark")
    async with target.plain() as wire:
        await wire.works("reset", {})
        metadata = (await wire.works("step", own)).data["observation"].get("metadata") or {}
        if "error_kind" not in metadata:
            raise NotTested("the environment writes no error_kind into metadata")
        rest = set(FIELDS) & set(metadata) - {"error_kind"}
        kept = "own" in str(metadata["error_kind"]) and not rest
        ensure(kept, f"metadata of the environment was {{'error_kind': 'own'}}: {encode(metadata)[:300]}")


@check("R-014-17", "an MCP call that fails has its marker in _meta or error.data")
async def _(target: Target) -> None:
    async with target.plain() as wire:
        await wire.works("reset", {})
        listed = (await wire.ask("mcp", rpc("tools/list", {}))).data
        if not isinstance(listed, dict) or "error" in listed:
            raise NotApplicable("the environment has no MCP tools")
        if "error_markers" not in target.extensions and not declared(target):
            raise NotSupported("the server does not name `error_markers`, and no field is declared")
        missing = (await wire.ask("mcp", rpc("tools/call", {"name": "no_such_tool_here", "arguments": {}}))).data
        marker = meta(missing)
        ensure(marker is not None, f"a call of a tool that is not there has no {META_KEY!r}: {encode(missing)[:400]}")
        ensure(set(marker) == set(FIELDS), f"the marker has not the five names: {encode(marker)[:300]}")
        ensure(marker.get("error_kind") is not None, f"the marker has no kind: {encode(marker)[:300]}")
        if target.probe.tool is not None:
            worked = (await wire.ask("mcp", rpc("tools/call", target.probe.tool))).data
            if "error" not in worked and not (worked.get("result") or {}).get("isError"):
                ensure(meta(worked) is None, f"a call that worked has a marker: {encode(worked)[:400]}")


_ids = count(1)


def rpc(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON-RPC request with an id of its own."""
    return {"jsonrpc": "2.0", "id": next(_ids), "method": method, "params": params}


def meta(response: dict[str, Any]) -> Any:
    """Return the marker in a JSON-RPC response, None without one."""
    result, error = response.get("result"), response.get("error")
    if isinstance(result, dict) and isinstance(result.get("_meta"), dict):
        return result["_meta"].get(META_KEY)
    data = error.get("data") if isinstance(error, dict) else None
    return data.get(META_KEY) if isinstance(data, dict) else None


@check("R-014-18", "a failure of the machinery is an error frame")
async def _(target: Target) -> None:
    machine = target.probe.need("machine")
    async with target.plain() as wire:
        await wire.works("reset", {})
        try:
            reply = await wire.ask("step", machine)
        except Broken as error:
            raise Broken(f"no error frame: {error}") from None
        ensure(reply.type == "error", f"an error frame was expected: {reply}")

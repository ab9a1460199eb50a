"""Episodes, their deliveries, and the environment that makes them; used by plain and multiplexed sessions."""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from ..exact import digest, encode
from .tally import NO_MARKER, InvalidAction, MachineFailed, Tally

LIMITS: dict[str, Any] = {
    "max_frame": 16 << 20,
    "max_elements": 64,
    "in_flight_socket": 256,
    "in_flight_session": 8,
    "detach_ttl_s": 600.0,
}
META_KEY = "openenv/error_markers"
STATUS = {"VALIDATION_ERROR": 422, "CONFLICT": 409, "NOT_SUPPORTED": 501, "MISDIRECTED": 421}
NAMED = re.compile(r"(?:ep_)?sh-([a-z0-9]{12})-[A-Za-z0-9_-]{21,}")
"""An id that names a data directory."""


class Refusal(Exception):
    """An error to answer with.

    Args:
        code: Error code of the protocol.
        message: Text for people.
        fields: Further fields of the code.
    """

    def __init__(self, code: str, message: str = "", **fields: Any) -> None:
        super().__init__(code)
        self.code = code
        self.data = {"message": message or code.lower().replace("_", " "), "code": code, **fields}


@dataclass
class Episode:
    """The deliveries of an episode.

    Args:
        eid: Its key.
        owner: Token of its principal.
        episode_id: The client's own id, or None.
        origin: For a fork, its parent and t.
    """

    eid: str
    owner: str | None
    episode_id: str | None
    origin: dict[str, Any] | None = None
    payloads: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    requests: list[tuple[str, Any]] = field(default_factory=list)
    prefix: list[tuple[tuple[str, Any], str]] = field(default_factory=list)
    rewards: list[dict[str, Any]] = field(default_factory=list)
    session: Any = None

    @property
    def t(self) -> int:
        """Index of the last delivery."""
        return len(self.payloads) - 1

    @property
    def place(self) -> dict[str, Any]:
        """Return eid and t of the last delivery."""
        return {"eid": self.eid, "t": self.t}


class World:
    """The state of a server.

    Args:
        defect: Name of its defect, or None.
        declared: Whether observations declare marker fields.
        recovery: ``reexecute`` or ``none``.
        tokens: Tokens of principals; None for no authentication.
        production: Whether replay, fork and reward routes are left out.
        probe: What ``GET /conformance/probe`` answers; None for no such route.
        shard: Name of the data directory; None for none.
    """

    def __init__(
        self,
        defect: str | None = None,
        declared: bool = True,
        recovery: str = "reexecute",
        tokens: tuple[str, ...] | None = None,
        production: bool = False,
        probe: Any = None,
        shard: str | None = None,
    ) -> None:
        self.probe = probe
        self.shard = shard
        self.defect, self.declared, self.recovery = defect, declared, recovery
        self.tokens, self.production = tokens, production
        self.episodes: dict[str, Episode] = {}
        self.forks: dict[tuple[str, str], dict[str, Any]] = {}
        self.plain: dict[str, Any] = {}
        """Plain sessions that have a session_id."""
        self.sessions: dict[str, Any] = {}
        """Multiplexed sessions by their sid."""
        self.turn = asyncio.Lock()
        self.answers_capabilities = True
        """False: as a released server, which does not know the message."""

    def wrong(self, name: str) -> bool:
        """Return whether the server has this defect."""
        return self.defect == name

    def capabilities(self) -> dict[str, Any]:
        """Return the data of capabilities."""
        extensions = {"error_markers": 2, "mux": 1}
        if not self.production:
            extensions |= {"state_at": 1, "delayed_rewards": 1}
            if self.recovery != "none" or self.wrong("fork-without-recovery"):
                extensions["fork"] = 1
        found = {"environment": "tally", "extensions": extensions, "recovery": self.recovery, "limits": LIMITS}
        if self.wrong("extensions-as-list"):
            del found["environment"]
        if self.shard is not None:
            found["shard"] = self.shard
        return found

    def own(self, id: Any, defect: str) -> None:
        """Refuse an id that names another data directory, unless the server has ``defect``.

        Raises:
            Refusal: It names another.
        """
        found = NAMED.fullmatch(id) if isinstance(id, str) and self.shard is not None else None
        if found is not None and found[1] != self.shard and not self.wrong(defect):
            raise Refusal("MISDIRECTED", shard=found[1], retry_after=1.0)

    def episode(self, eid: Any, owner: str | None) -> Episode:
        """Return a principal's episode.

        Raises:
            Refusal: There is none with that eid.
        """
        self.own(eid, "misdirected-unknown")
        found = self.episodes.get(eid) if isinstance(eid, str) else None
        if found is None or (found.owner != owner and not self.wrong("episodes-of-all")):
            raise Refusal("UNKNOWN_EPISODE", eid=eid)
        return found

    def payload(self, episode: Episode, t: int) -> str:
        """Return the payload of delivery t.

        A wrong server may refuse old deliveries, leave out a field of the refusal, or return the payload encoded again.

        Raises:
            Refusal: ``T_OUT_OF_RANGE``: the episode has no delivery t.
        """
        if t > episode.t:
            fields: dict[str, Any] = {"eid": episode.eid, "t": t, "deliveries": len(episode.payloads)}
            if self.wrong("range-without-fields"):
                del fields["deliveries"]
            raise Refusal("T_OUT_OF_RANGE", **fields)
        if self.wrong("short-memory") and t < episode.t - 7:
            raise Refusal("T_OUT_OF_RANGE", **episode.place, deliveries=len(episode.payloads))
        if self.wrong("encoded-again"):
            return json.dumps(json.loads(episode.payloads[t]), sort_keys=True)
        return episode.payloads[t]

    def digest(self, payload: str) -> str:
        """Return the digest of a payload."""
        return (
            digest(json.dumps(json.loads(payload), sort_keys=True)) if self.wrong("wrong-digest") else digest(payload)
        )

    def forked(self, eid: Any, t: int, owner: str | None) -> Episode:
        """Make a fork.

        Raises:
            Refusal: It cannot be made.
        """
        parent = self.episode(eid, owner)
        if self.wrong("fork-beyond"):
            t = min(t, parent.t)
        payload = self.payload(parent, t)
        if self.recovery == "none" and not self.wrong("fork-without-recovery"):
            raise Refusal("UNKNOWN_EPISODE" if self.wrong("no-fork-no-episode") else "NOT_SUPPORTED")
        if self.wrong("child-starts-before"):
            payload = parent.payloads[max(0, t - 1)]
        if self.wrong("site-t-renumbered"):
            value = json.loads(payload)
            site = value["observation"].get("error_site")
            if site:
                site["t"] = 0
                payload = encode(value)
        child = Episode(self.eid(), owner, None, {"eid": parent.eid, "t": t})
        child.episode_id = secrets.token_urlsafe(18)
        lived = list(zip(parent.requests, parent.payloads, strict=True))
        child.prefix = [*parent.prefix, *lived[1:]][: len(parent.prefix) + t] if parent.prefix else lived[: t + 1]
        child.payloads, child.kinds, child.requests = [payload], ["reset"], [("reset", None)]
        self.episodes[child.eid] = child
        return child

    def eid(self) -> str:
        """Return a new eid."""
        named = f"sh-{self.shard}-" if self.shard is not None and not self.wrong("eids-without-shard") else ""
        return f"ep_{named}{secrets.token_urlsafe(18)}"


class Instance:
    """An environment and the episode that it plays.

    Args:
        world: The server.
        owner: Token of the principal.
    """

    def __init__(self, world: World, owner: str | None) -> None:
        self.world, self.owner = world, owner
        self.env: Tally | None = None
        self.episode: Episode | None = None
        self.lost = False
        self.running = asyncio.Lock()

    def new_eid(self) -> str:
        """Return the eid of a new episode."""
        return self.world.eid()

    @property
    def place(self) -> dict[str, Any]:
        """Return eid and t of the last delivery, null before the first."""
        return self.episode.place if self.episode is not None else {"eid": None, "t": None}

    async def ready(self) -> Tally:
        """Return the environment at the episode's position; for a fork, run the requests before it first.

        Raises:
            Refusal: An answer differs from the one recorded.
        """
        if self.lost and not self.world.wrong("lost-goes-on"):
            raise Refusal("SESSION_LOST", **self.place)
        if self.env is None:
            self.env = Tally(self.world.wrong, self.world.declared)
            episode = self.episode
            for i, (request, payload) in enumerate(episode.prefix if episode is not None else ()):
                if self.world.wrong("child-is-fresh") and i:
                    continue
                answer = encode(await self._call(self.env, request, i))
                if answer != payload and not self.world.wrong("not-compared"):
                    self.lost = True
                    raise Refusal("SESSION_LOST", "the requests were run again and answered otherwise", **self.place)
            if episode is not None and episode.prefix:
                self.env.episode_id, self.env.again = episode.episode_id, True
                if not self.world.wrong("child-counts-on"):
                    self.env.steps = 0
        return self.env

    async def _call(self, env: Tally, request: tuple[str, Any], t: int) -> Any:
        kind, data = request
        if kind == "reset":
            return env.reset((data or {}).get("episode_id"))
        if kind == "mcp":
            return self.tool(env, data)
        return await env.step(data, t)

    async def reset(self, data: dict[str, Any]) -> str:
        """Begin an episode; return the delivery."""
        place: Any = data.get("injected_state")
        exact = isinstance(place, dict) and set(place) == {"episode_id", "t"} and isinstance(place["episode_id"], str)
        if self.world.wrong("injected-any-form"):
            exact = isinstance(place, dict) and {"episode_id", "t"} <= set(place)
        exact = exact and type(place["t"]) is int
        exact = exact and (0 <= place["t"] < 2**53 or self.world.wrong("injected-any-t"))
        if "injected_state" in data and not exact and self.world.wrong("injected-refused"):
            raise Refusal("VALIDATION_ERROR", "injected_state is {episode_id, t}")
        if exact and not self.world.production and not self.world.wrong("injected-ignored"):
            try:
                child = self.world.forked(place["episode_id"], place["t"], self.owner)
            except Refusal:
                if self.world.wrong("injected-loses-place"):
                    self.episode, self.env = None, None
                raise
            self.env, self.episode, self.lost = None, child, False
            child.session = child.session or self
            return child.payloads[0]
        self.lost = False
        if self.env is None:
            self.env = Tally(self.world.wrong, self.world.declared)
        payload = encode(self.env.reset(data.get("episode_id")))
        again = self.world.wrong("one-eid") and self.episode is not None
        eid = self.episode.eid if again and self.episode is not None else self.new_eid()
        self.episode = Episode(eid, self.owner, data.get("episode_id"), session=self)
        self.world.episodes[eid] = self.episode
        return self._delivered("reset", data, payload)

    async def step(self, data: Any, strict: bool = False, kind: str = "step") -> str:
        """Run a step or a tool call; return the delivery.

        Args:
            data: The action, or a JSON-RPC request.
            strict: Whether NaN is an error, as on a multiplexed socket.
            kind: ``step`` or ``mcp``.

        Raises:
            Refusal: It cannot be run.
        """
        env = await self.ready()
        if self.episode is None:  # a step before any reset begins an episode
            self.episode = Episode(self.world.eid(), self.owner, None, session=self)
            self.world.episodes[self.episode.eid] = self.episode
        origin = self.episode.origin
        before = origin["t"] if origin is not None and self.world.wrong("site-t-of-parent") else 0
        try:
            answer = await self._call(env, (kind, data), before + self.episode.t + 1)
        except InvalidAction as error:
            raise Refusal("VALIDATION_ERROR", str(error)) from None
        except MachineFailed as error:
            if self.world.wrong("machine-as-observation"):
                marker = {**NO_MARKER, "error_kind": "runtime_error", "severity": "error"}
                return self._delivered(kind, data, encode({"observation": marker, "reward": 0.0, "done": True}))
            raise Refusal("EXECUTION_ERROR", str(error)) from None
        except ValueError as error:
            if self.world.wrong("errors-count"):
                self._delivered(kind, data, "{}")
            raise Refusal("EXECUTION_ERROR", str(error)) from None
        if _not_finite(answer):
            if strict and not self.world.wrong("nan-as-null"):
                raise Refusal("ENV_OUTPUT_INVALID")
            answer["observation"]["total"] = None
        if self.world.wrong("child-shares") and self.episode.origin is not None:
            parent = self.world.episodes[self.episode.origin["eid"]].session
            if parent is not None and parent.env is not None:
                parent.env.total = env.total
        return self._delivered(kind, data, encode(answer))

    def _delivered(self, kind: str, data: Any, payload: str) -> str:
        assert self.episode is not None
        if not (kind == "mcp" and self.world.wrong("calls-do-not-count")):
            self.episode.payloads.append(payload)
            self.episode.kinds.append(kind)
            self.episode.requests.append((kind, data))
        return payload

    def state(self) -> dict[str, Any]:
        """Return the environment's state."""
        if self.env is None and self.episode is not None and self.episode.prefix:
            return {"episode_id": self.episode.episode_id, "step_count": 0}
        return {
            "episode_id": self.env.episode_id if self.env else None,
            "step_count": self.env.steps if self.env else 0,
        }

    def at(self, data: Any) -> tuple[dict[str, Any], str]:
        """Return (head, payload) of state(t).

        Raises:
            Refusal: It cannot be read.
        """
        lax = self.world.wrong("lax-state") and isinstance(data, dict)
        if not isinstance(data, dict) or (set(data) - {"t", "eid"} and not lax) or type(data.get("t")) is not int:
            raise Refusal("VALIDATION_ERROR")
        if not 0 <= data["t"] < 2**53 or not isinstance(data.get("eid"), str | None):
            raise Refusal("VALIDATION_ERROR")
        if data.get("eid") is None:
            if self.episode is None:
                raise Refusal("T_OUT_OF_RANGE" if self.world.wrong("no-reset-unknown") else "NO_RESET")
            episode = self.episode
        else:
            episode = self.world.episode(data["eid"], self.owner)
            if self.world.wrong("own-episodes-only") and episode.session is not self:
                raise Refusal("UNKNOWN_EPISODE", eid=data["eid"])
        payload = self.world.payload(episode, data["t"])
        if self.world.wrong("reading-counts") and self.env is not None:
            self.env.steps += 1
        head = {"type": "state_at", "eid": episode.eid, "t": data["t"], "kind": episode.kinds[data["t"]]}
        return {**head, "digest": self.world.digest(payload)}, payload

    def mcp(self, request: Any) -> dict[str, Any]:
        """Answer an MCP method other than a tool call."""
        method, id = (request.get(name) for name in ("method", "id"))
        if method == "tools/list":
            names = ["add", *(["fork_episode"] if self.world.wrong("fork-as-tool") else [])]
            return {
                "jsonrpc": "2.0",
                "id": id,
                "result": {"tools": [{"name": one, "inputSchema": {}} for one in names]},
            }
        if (method == "openenv/session/fork" and self.world.wrong("fork-as-method")) or (
            method == "openenv/session/open" and self.world.wrong("open-as-method")
        ):
            return {"jsonrpc": "2.0", "id": id, "result": {}}
        return {"jsonrpc": "2.0", "id": id, "error": {"code": -32601, "message": f"unknown method {method}"}}

    def tool(self, env: Tally, request: Any) -> dict[str, Any]:
        """Call a tool."""
        params = request.get("params") or {}
        name, arguments = params.get("name"), params.get("arguments") or {}
        t = self.episode.t + 1 if self.episode is not None else 1
        site = {"t": t, "action_field": "name", "action_span": [0, len(str(name))], "file": None, "line": None}
        site |= {"column": None, "test_id": None, "source": "action", "message": f"unknown tool {name}"}
        marker = {
            "error_kind": "tool_not_found",
            "hint_template_key": "tool.unknown",
            "error_site": site,
            "error_sites": [site],
            "severity": "error",
        }
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request.get("id")}
        if name != "add":
            answer["error"] = {"code": -32603, "message": f"unknown tool {name}"}
            if not self.world.wrong("mcp-without-marker"):
                answer["error"]["data"] = {META_KEY: marker}
            return answer
        answer["result"] = {"content": [{"type": "text", "text": str(env.add(arguments.get("n", 1)))}]}
        if self.world.wrong("mcp-marks-success"):
            answer["result"]["_meta"] = {META_KEY: marker}
        return answer


def _not_finite(answer: Any) -> bool:
    total = answer.get("observation", {}).get("total") if isinstance(answer, dict) else None
    return isinstance(total, float) and not math.isfinite(total)

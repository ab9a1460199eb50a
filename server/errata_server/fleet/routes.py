"""Tells from a request's target whose it is: pure functions of text.

A session's or an episode's id names its shard (`shard_of`), and an id without a name belongs to the first one. A
handshake may name a shard by itself (`errata_protocol.fleet.PARAMETER`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import parse_qs, unquote

from errata_protocol.fleet import PARAMETER
from errata_protocol.shards import shard_of

FIRST = 0
"""The shard that ids without a name belong to."""


@dataclass(frozen=True, slots=True)
class Anywhere:
    """Any worker answers."""


@dataclass(frozen=True, slots=True)
class Of:
    """One worker answers.

    Args:
        shard: Number of the worker that answers.
    """

    shard: int


@dataclass(frozen=True, slots=True)
class Merged:
    """All workers are asked, and their answers merged.

    Args:
        what: What is asked for.
    """

    what: Literal["episodes", "aggregates", "events", "metrics", "ready", "delete"]


@dataclass(frozen=True, slots=True)
class Refused:
    """A fleet does not answer it.

    Args:
        why: What is not there.
    """

    why: str


@dataclass(frozen=True, slots=True)
class Sole:
    """What is at one worker: sessions of environments with one instance, and OpenEnv's pages, which have one session.

    Args:
        places: Paths at which these environments are served; "" for the root.
        home: Number of the worker.
    """

    places: frozenset[str]
    home: int

    def of(self, path: str) -> int | None:
        """Return the worker of a page, or of a path at which such an environment's sessions are opened; else None."""
        if _PAGES.fullmatch(path):
            return self.home
        found = _SESSIONS.fullmatch(path) if self.places else None
        return self.home if found is not None and found["place"] in self.places else None


Route = Anywhere | Of | Merged | Refused
ANYWHERE = Anywhere()
NO_SOLE = Sole(frozenset(), FIRST)

_EPISODES = re.compile(r"(?:/[^/]+)?/episodes(?:/(?P<eid>[^/]*)(?:/.*)?)?")
_SHARED = re.compile(r"(?:/[^/]+)?/(?P<what>metrics|ready)")
_SOCKET = re.compile(r"(?:/[^/]+)?/ws")
_SESSIONS = re.compile(r"(?P<place>(?:/[^/]+)?)/(?:ws|mcp|reset|step|state|harness)(?:/.*)?")
_PAGES = re.compile(r"(?:/[^/]+)?/(?:web|ws/ui)(?:/.*)?")
"""Paths of OpenEnv's web interface, of its HTTP requests and of its socket."""
_REQUEST_LINE = re.compile(rb"[A-Z]+ ([^ ]+) HTTP/1\.[01]\r?")


def of_id(found: str, names: Sequence[str]) -> int | None:
    """Return the shard of a session's or an episode's id; None where its name is of no shard of this fleet."""
    name = shard_of(found)
    if name is None:
        return FIRST
    return names.index(name) if name in names else None


def of_request(method: str, path: str, query: str, names: Sequence[str], sole: Sole = NO_SOLE) -> Route:
    """Return who answers an HTTP request or a handshake.

    Args:
        method: Method of the request; ``GET`` of a handshake.
        path: Path of the request, decoded.
        query: Query string of the request, as sent.
        names: Names of the fleet's shards, in order.
        sole: What is at one worker.
    """
    if _PAGES.fullmatch(path):
        return Of(sole.home)
    if method == "GET" and (shared := _SHARED.fullmatch(path)):
        return Merged("metrics" if shared["what"] == "metrics" else "ready")
    given = parse_qs(query)
    if (found := _EPISODES.fullmatch(path)) is None:
        if sids := given.get("session_id", ()):
            return _owner(sids[:1], names)
        if (home := sole.of(path)) is not None:
            return Of(home)
        wanted = given.get(PARAMETER, ()) if _SOCKET.fullmatch(path) else ()
        return Of(names.index(wanted[0])) if wanted and wanted[0] in names else ANYWHERE
    eid = found["eid"]
    if not eid or eid == "aggregates":
        return Merged("aggregates" if eid else "episodes") if method == "GET" else ANYWHERE
    if eid == "events":
        eids = given.get("eid", ())
        return _owner(eids, names) if eids else Merged("events")
    if eid == "delete" and method == "POST":
        return Merged("delete")
    route, others = _owner([eid], names), {of_id(other, names) for other in given.get("also", ())}
    if others - {route.shard if isinstance(route, Of) else None}:
        return Refused("a bundle of episodes of several workers; ask for each by itself")
    return route


def of_head(head: bytes, names: Sequence[str], sole: Sole = NO_SOLE) -> int | None:
    """Return the shard of a connection, by its first request; None where any worker may answer it.

    Args:
        head: The first bytes of the request, its first line whole.
        names: Names of the fleet's shards, in order.
        sole: What is at one worker.
    """
    line = _REQUEST_LINE.fullmatch(head.partition(b"\n")[0])
    if line is None:
        return None  # the HTTP server answers with an error
    path, _, query = line[1].decode("latin-1").partition("?")
    route = of_request("GET", unquote(path), query, names, sole)
    return route.shard if isinstance(route, Of) else None


def _owner(ids: Sequence[str], names: Sequence[str]) -> Route:
    """Return the worker of the first id; any where there is none, or it names no shard of this fleet."""
    shard = of_id(ids[0], names) if ids else None
    return Of(shard) if shard is not None else ANYWHERE

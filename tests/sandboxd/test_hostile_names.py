"""10,000 hostile names in every argument of every verb: what they make the broker ask of the engine."""

from __future__ import annotations

import base64
import json
import logging
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from errata_sandboxd.names import Reference
from errata_sandboxd.schema import VERBS, Facts, Flag, Image, Number, Rule, Sizes, Text, Texts
from errata_sandboxd.service import Service

from ..hostile_names import hostile_values
from .attacker import Attacker
from .fake_engine import FakeEngine

CASES = 10_000
EMPTY_ARCHIVE = b'\n{"data": "%b"}\n' % base64.b64encode(bytes(1024))
CODES = {"invalid", "unknown", "image_missing", "image_refused", "too_large"}
TARGETS = [
    r"GET /version",
    r"GET /v1\.41/images/json",
    r"GET /v1\.41/images/IMAGE/json",
    r"DELETE /v1\.41/images/ID",
    r"POST /v1\.41/commit",
    r"GET /v1\.41/containers/json",
    r"POST /v1\.41/containers/create",
    r"DELETE /v1\.41/containers/CONTAINER",
    r"GET /v1\.41/containers/CONTAINER/(json|changes|archive)",
    r"PUT /v1\.41/containers/CONTAINER/archive",
    r"POST /v1\.41/containers/CONTAINER/(start|restart|pause|unpause|exec)",
    r"POST /v1\.41/exec/CONTAINER/start",
    r"GET /v1\.41/exec/CONTAINER/json",
]

QUERY = {
    "all",
    "author",
    "changes",
    "comment",
    "container",
    "filters",
    "force",
    "limit",
    "noOverwriteDirNonDir",
    "noprune",
    "path",
    "pause",
    "repo",
    "size",
    "t",
    "tag",
    "trunc_cmd",
    "v",
}


def valid_value(rule: Rule, verb: str, name: str, engine: FakeEngine) -> Any:
    """Return a value of an argument that the broker accepts."""
    match rule:
        case Image():
            return "errata/base:default"
        case Text():
            known = {"container": next(iter(engine.containers)), "path": "/etc/passwd", "image": engine.images[1]["Id"]}
            return known[name]
        case Number():
            return max(rule.low, min(rule.high, 64 * 1024**2 if "bytes" in name else 100))
        case Flag():
            return False
        case Texts():
            return ["id"]
        case Sizes():
            return {"/workspace": 8192}
        case Facts():
            return {"base": "x"}
    raise AssertionError(f"a new kind of rule: say here what it accepts, and below where names are in it: {rule}")


def with_name(rule: Rule, valid: Any, name: object) -> list[Any]:
    """Return the values of an argument with a hostile name at each place where a name can be."""
    match rule:
        case Image() | Text():
            return [name]
        case Number() | Flag():
            return [name]
        case Texts():
            return [[*valid, name]]
        case Sizes():
            return [{str(name): 8192}]
        case Facts():
            return [{str(name): "x"}, {"base": name}]
    raise AssertionError(rule)


def cases(engine: FakeEngine) -> list[dict[str, Any]]:
    """Return requests, the same number for each argument of each verb."""
    draw = random.Random(7)
    places = [(verb, argument) for verb, rules in VERBS.items() for argument in [None, *rules[0], *rules[1]]]
    made = []
    for verb, argument in places:
        required, optional = VERBS[verb]
        rules = {**required, **optional}
        right = {name: valid_value(rule, verb, name, engine) for name, rule in required.items()}
        source = valid_value(rules[argument], verb, argument, engine) if argument else verb
        names = hostile_values(draw, source if isinstance(source, str) else "base")
        for name in (next(names) for _ in range(CASES // len(places) + 1)):
            if argument is None:
                made.append({"do": name, **right} if draw.random() < 0.5 else {"do": verb, **right, str(name): name})
            else:
                made += [{"do": verb, **right, argument: value} for value in with_name(rules[argument], source, name)]
    return made


def path_of(target: str) -> str:
    """Return a target with its names replaced by what they are."""
    method, _, address = target.partition(" ")
    path = urlsplit(address).path
    assert "//" not in path and not {".", ".."} & set(unquote(path).split("/")), target
    shown = []
    for part in path.split("/"):
        text = unquote(part)
        if re.fullmatch("[0-9a-f]{64}", text):
            text = "CONTAINER"
        elif re.fullmatch("sha256:[0-9a-f]{64}", text):
            text = "ID"
        elif "%" in part:
            assert Reference.parse(text).name.startswith("errata/"), target
            text = "IMAGE"
        shown.append(text)
    return f"{method} {'/'.join(shown)}".replace("images/ID/json", "images/IMAGE/json")


def test_no_name_is_a_path(
    engine: FakeEngine, serve: Callable[..., Service], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    serve("one", containers=CASES)
    attacker = Attacker(place / "one")
    base, foreign = engine.add_image("errata/base:default"), engine.add_image("secret:latest")
    engine.add_container("one")
    theirs = engine.add_container("two")
    requests = cases(engine)
    assert len(requests) >= CASES
    for verb, (required, _) in VERBS.items():
        if verb not in ("remove", "remove_image"):
            right = {name: valid_value(rule, verb, name, engine) for name, rule in required.items()}
            assert "ok" in ask(attacker, {"do": verb, **right}), verb
    with ThreadPoolExecutor(16) as pool:  # they wait for each other's threads more than they work
        answers = list(pool.map(lambda request: ask(attacker, request), requests))
    codes: dict[str, int] = {}
    for request, answer in zip(requests, answers, strict=True):
        code = answer["error"]["code"] if "error" in answer else "ok"
        assert code in CODES | {"ok"}, (request, answer)
        assert len(json.dumps(answer)) < 4096, "a long name is not sent back"
        codes[code] = codes.get(code, 0) + 1
    assert {"invalid", "image_refused", "ok"} <= codes.keys() and codes["invalid"] > CASES // 2, codes
    assert theirs in engine.containers and {base, foreign} <= {one["Id"] for one in engine.images}
    assert not caplog.records, caplog.text
    for target in set(engine.asked):
        assert any(re.fullmatch(allowed, path_of(target)) for allowed in TARGETS), target
        assert parse_qs(urlsplit(target).query).keys() <= QUERY, target


def ask(attacker: Attacker, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request with the end of its data, and return the last line of the answer."""
    with attacker.connected() as link:
        try:
            link.sendall(json.dumps(request).encode() + EMPTY_ARCHIVE + b'{"end": true}\n')
        except BrokenPipeError:  # it was refused before all of it was read
            pass
        lines = link.makefile("rb").read().splitlines()
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer

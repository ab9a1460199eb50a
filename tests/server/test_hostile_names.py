"""Hostile names in everything that commands, programs, routes and messages take: none is used as a path.

What takes a name is found in the command line's own tables, in the parsers of the programs, in the routes' schemas
and in the messages' models, so that a new argument is covered.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import sys
import tempfile
import typing
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from inspect import Parameter, signature
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import pytest
import typer
from fastapi import FastAPI
from fastapi.testclient import TestClient

from errata_client.doors.http_door import HttpDoor
from errata_protocol.errors import UnknownEpisode
from errata_protocol.mux.messages import CLIENT_MESSAGES
from errata_server.app import create_fastapi_app
from errata_server.cli import commands
from errata_server.doors import event_stream
from errata_server.runtime.runtime import Runtime
from errata_server.settings import Settings
from tests.hostile_names import hostile
from tests.path_watch import Started, Watched, watching
from tests.sandboxd import fake_engine

from .asgi_peer import Peer
from .command_line import main
from .environments import CountAction, CountEnvironment, CountObservation

CASES, RUNS = 24, 10
"""Hostile names for each argument of a request, and for each of a command, which takes a tenth of a second to begin."""
BY_DESIGN = {
    "serve environments": "a directory or an import",
    "probe target": "a directory or an import",
    "serve host": "an address",
    "episodes serve host": "an address",
    "demo arguments": "arguments of a program, which are below",
    "bench arguments": "the same",
    "ablate arguments": "the same",
    "audit arguments": "the same",
    "conformance arguments": "the same",
    "image arguments": "the same",
    "sandboxd arguments": "the same",
    "swe arguments": "the same",
    "tasks arguments": "the same",
}
"""Arguments of commands that are paths or addresses, or that another program reads, and why."""
ELSEWHERE = {"conformance": "plays against a server or client that it is given: its names select statements"}
"""Programs that are not run here, and why."""
GIVEN = {"sandboxd": ("--serve", "errata=socket")}
"""Arguments that a program needs in order to stay in the test's directory."""
PATHS = ("DIR", "FILE", "PATH", "URL", "PYTHON", "TOML", "SOCKET", "COMMAND")
"""What the placeholder of a program's argument has if it is a path or an address by design."""


def draws(valid: str, seed: str, cases: int = CASES) -> list[str]:
    """Return hostile names that a command line can have, the same ones each time."""
    draw = random.Random(seed)
    found = (hostile(draw, valid)[:20_000] for _ in iter(int, 1))
    return list(islice((name for name in found if can_be_given(name)), cases))


def can_be_given(name: str) -> bool:
    """Return whether a command line can have a text."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def assert_no_path(name: str, seen: Watched, allowed: Path) -> None:
    """Fail if a name was used as a path, or if something outside of a directory was changed."""
    for path in seen.paths:
        is_path = "/" in name.strip("/") or ".." in name or (name.startswith("/") and len(name) > 2)
        assert not (is_path and len(name) > 2 and name in path), (name, path)
        assert not path.endswith(("etc/passwd", "/etc", "/root/.ssh")), (name, path)
    for path in seen.written:
        harmless = path.startswith(("/dev/", "/proc/self/")) or "__pycache__" in path
        assert harmless or not Path(path).is_absolute() or Path(path).is_relative_to(allowed), (name, path)


def run(main: Callable[[], object], name: str, allowed: Path) -> str:
    """Run a command with a hostile name; return what it printed to standard error.

    Anything but an exit is a traceback for a user.
    """
    out, err, variables = io.StringIO(), io.StringIO(), dict(os.environ)
    with watching() as seen, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            assert ended.code in (None, 0, 1, 2) or isinstance(ended.code, str), ended.code
        except Started:
            pass
        finally:
            os.environ.clear()
            os.environ.update(variables)
    assert_no_path(name, seen, allowed)
    assert "Traceback" not in err.getvalue()
    return err.getvalue()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is home, temporary directory, data directory and work directory."""
    for variable in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "ERRATA_BASE_DIR", "ERRATA_SWE_STORE"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("{}")
    return tmp_path


# Commands


def walk(app: typer.Typer, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    """Yield the words and the function of every command."""
    for command in app.registered_commands:
        assert command.callback is not None
        yield (*path, command.name or command.callback.__name__.replace("_", "-")), command.callback
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from walk(group.typer_instance, (*path, str(group.name or group.typer_instance.info.name)))


def names_of(callback: Callable[..., Any]) -> dict[str, Any]:
    """Return the arguments of a command that are text, with their hints."""
    hints = typing.get_type_hints(callback, include_extras=True)
    found = {}
    for name, hint in hints.items():
        if name != "return" and plain(hint) in (str, str | None, list[str], list[str] | None):
            found[name] = hint
    return found


def plain(hint: Any) -> Any:
    """Return a hint without what typer adds to it."""
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def is_argument(hint: Any) -> bool:
    return any(type(one).__name__ == "ArgumentInfo" for one in getattr(hint, "__metadata__", ()))


COMMANDS = [
    pytest.param(words, callback, name, id=f"{' '.join(words)} {name}")
    for words, callback in walk(commands.cli)
    for name in names_of(callback)
    if f"{' '.join(words)} {name}" not in BY_DESIGN
]


def test_what_is_a_path_by_design_is_there() -> None:
    there = {f"{' '.join(words)} {name}" for words, callback in walk(commands.cli) for name in names_of(callback)}
    assert set(BY_DESIGN) <= there
    assert len(COMMANDS) > 15


@pytest.mark.parametrize(("words", "callback", "name"), COMMANDS)
def test_no_name_of_a_command_is_a_path(
    words: tuple[str, ...], callback: Callable[..., Any], name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hints = typing.get_type_hints(callback, include_extras=True)
    parameters = signature(callback).parameters
    for value in draws("default", f"{words} {name}", RUNS):
        argv = ["errata", *words]
        for other, hint in hints.items():
            if other in (name, "return") or parameters[other].default is not Parameter.empty:
                continue
            given = {int: "0", float: "0", str: "x"}.get(plain(hint), "file")
            argv += [given] if is_argument(hint) else [f"--{other.replace('_', '-')}={given}"]
        argv += ["--", value] if is_argument(hints[name]) else [f"--{name.replace('_', '-')}={value}"]
        monkeypatch.setattr(sys, "argv", argv)
        run(main, value, place)


# Programs


class Parser(Exception):
    """Raised in place of parsing, with the parser."""


def parsers(main: Callable[[list[str]], object], words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the parsers of a program and of its subcommands, with the words before their arguments."""
    found: list[argparse.ArgumentParser] = []

    def parse(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        found.append(self)
        raise Parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
        with contextlib.suppress(Parser, SystemExit):
            main(list(words))
    for parser in found:
        yield from below(parser, words)


def below(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for name, one in action.choices.items():
                yield from below(one, (*words, name))


def program_arguments() -> Iterator[Any]:
    """Yield every argument of every program that is a name."""
    for point in entry_points(group="errata.programs"):
        if point.name in ELSEWHERE:
            continue
        main = point.load()
        table = getattr(sys.modules[main.__module__], "COMMANDS", {})
        starts = [(one,) for one in table] or [()]
        for start in starts:
            for words, parser in parsers(main, start):
                for action in parser._actions:
                    shown = f"{action.metavar} {action.dest}".upper()
                    text = action.type not in (int, float, Path) and action.nargs != 0 and not action.choices
                    if text and not any(part in shown for part in PATHS):
                        name = " ".join((point.name, *words, action.dest))
                        yield pytest.param(point.name, words, parser, action, id=name)


PROGRAMS = list(program_arguments())


def test_programs_have_names() -> None:
    found = {str(one.id) for one in PROGRAMS}
    assert {
        "image build name",
        "image pull image",
        "sandboxd image",
        "sandboxd group",
        "swe prepare instance",
    } <= found


@pytest.mark.parametrize(("program", "words", "parser", "action"), PROGRAMS)
def test_no_name_of_a_program_is_a_path(
    program: str, words: tuple[str, ...], parser: Any, action: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "tree/bin").mkdir(parents=True)
    (place / "tree/Dockerfile").write_text("FROM scratch")
    with tempfile.TemporaryDirectory() as short, fake_engine.running(Path(short) / "engine") as engine:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{engine.path}")
        for value in draws("default", f"{program} {words} {action.dest}", RUNS):
            argv = ["errata", program, *words, *GIVEN.get(program, ())]
            for other in parser._actions:
                if other is action or not (other.required or not (other.option_strings or other.nargs in ("?", "*"))):
                    continue
                given = "tree" if other.dest == "directory" else "file"
                argv += [f"{other.option_strings[-1]}={given}"] if other.option_strings else [given]
            argv += [f"{action.option_strings[-1]}={value}"] if action.option_strings else ["--", value]
            monkeypatch.setattr(sys, "argv", argv)
            run(main, value, place)
        for target in engine.asked:
            path = urlsplit(target.partition(" ")[2]).path
            assert not {".", ".."} & set(unquote(path).split("/")), target


# Routes and messages

SID = "Zq3vK8s0T1u5Wb7Yc9Xd2A"


def served(place: Path) -> FastAPI:
    """Return an application with a journal on disk."""
    return create_fastapi_app(
        CountEnvironment,
        CountAction,
        CountObservation,
        max_concurrent_envs=8,
        runtime=Runtime(Settings(data_dir=place / "data")),
    )


def text_places(schema: dict[str, Any], root: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield where in a value of a schema text is, as names of fields; ``*`` is an element of a list."""
    if "$ref" in schema:
        found: Any = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        if len(at) < 6:
            yield from text_places(found, root, at)
    for one in (*schema.get("anyOf", ()), *schema.get("allOf", ()), *schema.get("oneOf", ())):
        yield from text_places(one, root, at)
    if schema.get("type") == "string" and "const" not in schema:
        yield at
    for name, one in schema.get("properties", {}).items():
        yield from text_places(one, root, (*at, name))
    if isinstance(schema.get("items"), dict):
        yield from text_places(schema["items"], root, (*at, "*"))


def placed(value: Any, at: tuple[str, ...], into: Any = None) -> Any:
    """Return a copy of ``into`` with a value at a place."""
    if not at:
        return value
    if at[0] == "*":
        return [placed(value, at[1:])]
    base = dict(into) if isinstance(into, dict) else {}
    base[at[0]] = placed(value, at[1:], base.get(at[0]))
    return base


def test_no_name_in_a_request_over_http_is_a_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "UNWARNED_S", 0.0)  # the client waits for the end of each stream of events
    cases = statuses = 0
    with watching() as seen:
        app = served(place)
        with TestClient(app, raise_server_exceptions=False) as client:
            client.post("/reset", json={"episode_id": "mine"})
            api = client.get("/openapi.json").json()
            for path, methods in api["paths"].items():
                for method, about in methods.items():
                    for kind, name, make in arguments(about, api):
                        for value in draws("mine", f"{method} {path} {name}"):
                            value = value if kind == "body" else value[:2000]  # httpx makes no longer addresses
                            names = dict.fromkeys(re.findall(r"{(\w+)}", path), "0")
                            if kind == "path":
                                names[name] = quote(value, safe="", errors="surrogateescape")
                            address = path.format(**names) + ("?" + make(value) if kind == "query" else "")
                            body = make(value) if kind == "body" else None
                            answer = client.request(method, address, content=body, follow_redirects=False)
                            assert answer.status_code < 500 or answer.status_code == 503, (method, address, answer.text)
                            assert_no_path(value, seen, place)
                            seen.paths.clear()
                            seen.written.clear()
                            cases, statuses = cases + 1, statuses + (answer.status_code >= 400)
            assert client.get("/health").status_code == 200
    assert cases > 500 and statuses > cases // 2


def arguments(about: dict[str, Any], api: dict[str, Any]) -> Iterator[tuple[str, str, Callable[[str], Any]]]:
    """Yield the arguments of an operation that are text: kind, name, and what makes the query or body of a value."""
    for one in about.get("parameters", ()):
        if one["in"] in ("path", "query"):
            name = one["name"]
            yield one["in"], name, lambda value, name=name: urlencode({name: value}, errors="surrogateescape")
    content = about.get("requestBody", {}).get("content", {}).get("application/json")
    for at in text_places(content["schema"], api) if content else ():
        yield "body", ".".join(at), lambda value, at=at: json.dumps(placed(value, at)).encode()


async def test_no_name_in_a_message_is_a_path(place: Path) -> None:
    cases = 0
    with watching() as seen:
        app = served(place)
        async with app.router.lifespan_context(app):
            for message in CLIENT_MESSAGES:
                schema = message.model_json_schema()
                kind = schema["properties"].get("type", {}).get("const")
                base = {"sid": SID, "id": 1, "type": kind, "data": {"key": "n4Jr6Lm8Po0Qs2Tu4Vw6Xy", "t": 0}}
                for at in text_places(schema, schema):
                    for value in draws(SID, f"{kind} {at}"):
                        async with Peer(app, subprotocols=("openenv.mux.v1",)) as peer:
                            peer.send(json.dumps(placed(value, at, base)))
                            peer.send('{"type":"capabilities","q":77}')
                            while (answer := await peer.receive()) is not None and answer.get("q") != 77:
                                pass
                        assert_no_path(value, seen, place)
                        cases += 1
            async with Peer(app, subprotocols=("openenv.mux.v1",)) as peer:
                answer = await peer.ask('{"type":"capabilities","q":78}')
                assert answer is not None and answer["type"] == "capabilities"
    assert cases > 300


@pytest.mark.parametrize("eid", ["..", ".", "a/b", "", "a\0", "\u0430", "a" * 201, "%2e%2e", "a?b", "a#b"])
async def test_a_client_asks_for_no_other_path(eid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def send(self: HttpDoor, method: str, path: str, *_: object) -> None:
        asked.append(path)

    monkeypatch.setattr(HttpDoor, "_send", send)
    door = HttpDoor("ws://127.0.0.1:1/ws", headers=None, timeout_s=1.0, trust_env=False)
    for call in (door.episode(eid), door.state_at(eid, 0), door.rewards(eid), door.fork(eid, 0, "r" * 21)):
        with pytest.raises(UnknownEpisode):
            await call
    with pytest.raises(UnknownEpisode):
        await door.post_rewards(eid, [])
    assert asked == []

"""The proposals: patched OpenEnv and Errata, as client and as server of each other (PROTOCOL A7, B5)."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from errata_client import ErrataClient
from errata_protocol.environment import default_agent_text
from errata_protocol.error_info import KEY, ErrorInfo, InfoSite
from errata_protocol.markers import ErrorKind
from errata_protocol.rollouts import marker_of

from ..openenv_source import SOURCE, needs_openenv_source
from ..server.local_server import LocalServer
from .trees import ROOT, apply, run, unpacked

pytestmark = pytest.mark.upstream_patches

PATCHES = ROOT / "rfcs" / "upstream"
STEPS = 60
PLAY = """
import asyncio, json, sys
from websockets.asyncio.client import ClientConnection
from openenv.core.generic_client import GenericEnvClient

url, cut_before, cut_after, steps = sys.argv[1], *(set(json.loads(one)) for one in sys.argv[2:4]), int(sys.argv[4])
sent, send = [], ClientConnection.send


async def cutting(self, text, *more, **named):
    if json.loads(text)["type"] not in ("reset", "step"):
        return await send(self, text, *more, **named)
    sent.append(json.loads(text))
    if len(sent) in cut_before:
        self.transport.abort()
    await send(self, text, *more, **named)
    if len(sent) in cut_after:
        await asyncio.sleep(0)
        self.transport.abort()


async def main():
    ClientConnection.send = cutting
    async with GenericEnvClient(base_url=url, recovery_timeout_s=120) as env:
        await env.reset()
        heard = [(await env.step({"n": n})).observation["n"] for n in range(1, steps + 1)]
        state = await env.state()
        count = state["step_count"] if isinstance(state, dict) else state.step_count
        print(json.dumps([heard, count, len(sent), [one.get("request_id") for one in sent]]))


asyncio.run(main())
"""


def patched(letters: str, to: Path) -> Path:
    """Return the tree of the wheel with the patches of proposals."""
    tree = unpacked("wheel", to)
    for letter in letters:
        (patch,) = PATCHES.glob(f"{letter}-*.patch")
        apply(tree, patch)
    return tree


@pytest.mark.parametrize("letters", ["a", "ac"])
def test_a_patched_client_loses_and_repeats_nothing(letters: str, tmp_path: Path) -> None:
    tree = patched(letters, tmp_path / "tree")
    after = [3, 4, 9, 20, 21, 40]
    before = [12, 30, 31] if "c" in letters else []  # A alone repeats no request that did not arrive
    with LocalServer("tests.server.environments:CountEnvironment", tmp_path / "data") as server:
        done = run(tree, "-c", PLAY, server.url, json.dumps(before), json.dumps(after), str(STEPS))
    assert done.returncode == 0, done.stderr[-4000:]
    heard, count, sent, ids = json.loads(done.stdout.splitlines()[-1])
    assert heard == [n * (n + 1) // 2 for n in range(1, STEPS + 1)]
    assert count == STEPS
    if "c" in letters:
        assert sent >= STEPS + 1 + len(before)
        assert len({*ids}) == STEPS + 1 and None not in ids
    else:
        assert sent == STEPS + 1


SERVE = """
import sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Add(Action):
    n: int


class Sum(Observation):
    n: int = 0


class Adding(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.made = State(episode_id=None, step_count=0)
        self.n = 0

    def reset(self, seed=None, episode_id=None, **more):
        self.n, self.made = 0, State(episode_id=episode_id, step_count=0)
        return Sum(n=0)

    def step(self, action, timeout_s=None, **more):
        if action.n < 0:
            raise ValueError("n is negative")
        self.n += action.n
        self.made.step_count += 1
        return Sum(n=self.n)

    @property
    def state(self):
        return self.made


uvicorn.run(create_app(Adding, Add, Sum, max_concurrent_envs=4), fd=int(sys.argv[1]), log_level="warning")
"""


@contextmanager
def serving(tree: Path, program: str, python: str | Path = sys.executable) -> Iterator[str]:
    """Run a program that serves on a given socket, with the OpenEnv and the environments of a tree; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = listener.fileno()
        command = [str(python), "-c", program, str(number)]
        path = f"{tree / 'src'}:{tree / 'envs'}"
        environment = {"PATH": "/usr/bin", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        with subprocess.Popen(command, cwd=tree, env=environment, pass_fds=[number]) as server:
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.terminate()


async def test_our_client_loses_and_repeats_nothing_on_a_patched_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = patched("ac", tmp_path / "tree")
    sent: list[dict[str, Any]] = []
    send = ClientConnection.send

    async def cutting(self: ClientConnection, text: Any, *more: Any, **named: Any) -> None:
        message = json.loads(text)
        if message["type"] == "step":
            sent.append(message)
            if len(sent) in (6, 17, 18):
                self.transport.abort()
        await send(self, text, *more, **named)
        if message["type"] == "step" and len(sent) in (3, 4, 25):
            self.transport.abort()

    monkeypatch.setattr(ClientConnection, "send", cutting)
    with serving(tree, SERVE) as url:
        client = ErrataClient[Any, Any, Any](url, durable=True, connect_timeout_s=60.0, message_timeout_s=60.0)
        await client.reset()
        heard = [(await client.step({"n": n})).observation["n"] for n in range(1, STEPS + 1)]
        with pytest.raises(RuntimeError, match="n is negative"):
            await client.step({"n": -1})
        assert client.t == STEPS and len([one.t for one in await client.history()]) == STEPS + 1
        state = await client.state()
        await client.close()
    assert heard == [n * (n + 1) // 2 for n in range(1, STEPS + 1)]
    assert (state["step_count"] if isinstance(state, dict) else state.step_count) == STEPS
    assert len(sent) > STEPS + 1 and len({one["request_id"] for one in sent}) == STEPS + 1


# -- error information ------------------------------------------------------------------------------------------------

READ = """
import asyncio, json, sys
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server import ErrorInfo, Observation
from openenv.core.generic_client import GenericEnvClient


class Printed(Observation):  # of a client that knows no markers
    output: str = ""


class Typed(EnvClient):
    def _step_payload(self, action):
        return action

    def _parse_result(self, payload):
        told = payload["observation"]
        observation = Printed(output=told["output"], metadata=told["metadata"])
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload):
        return payload


def shown(info):
    return info if info is None else info.model_dump(mode="json", exclude_defaults=True)


async def main():
    found = []
    async with GenericEnvClient(base_url=sys.argv[1]) as plain, Typed(base_url=sys.argv[1]) as typed:
        assert ErrorInfo.read((await plain.reset()).metadata) is None
        await typed.reset()
        for action in json.loads(sys.argv[2]):
            result, same = await plain.step(action), await typed.step(action)
            infos = [ErrorInfo.read(one) for one in (result.metadata, result.observation["metadata"])]
            infos.append(ErrorInfo.read(same.observation.metadata))
            assert infos[0] == infos[1] == infos[2], infos
            found.append(shown(infos[0]))
    print(json.dumps(found))


asyncio.run(main())
"""
COMMAND = "c\u00e4t \U0001f600"


def test_a_patched_client_reads_how_a_step_failed(tmp_path: Path) -> None:
    tree = patched("b", tmp_path / "tree")
    kinds = [kind.value for kind in ErrorKind]
    actions = [{"command": COMMAND, "kind": kind} for kind in kinds]
    actions += [{"command": COMMAND}, {"command": COMMAND, "kind": "timeout", "unsure": True}]
    with LocalServer("tests.upstream_patches.failing:FailEnvironment", tmp_path / "data") as server:
        done = run(tree, "-c", READ, server.url, json.dumps(actions))
    assert done.returncode == 0, done.stderr[-4000:]
    *told, fine, unsure = json.loads(done.stdout.splitlines()[-1])
    assert fine is unsure is None
    place = {"action_field": "command", "action_span": [0, 3]}
    sites = [place, {"file": "src/a.py", "line": 3, "test_id": "a::b"}]
    other = {"invalid_arguments": "invalid_args", "policy_violation": "permission_denied"}
    for kind, info in zip(kinds, told, strict=True):
        wanted = {"kind": other.get(kind, kind), "message": f"{COMMAND}: no", "sites": sites}
        assert info == (None if kind == "output_truncated" else wanted), kind
    table = (ROOT / "rfcs" / "proposals" / "b-error-information.md").read_text().partition("| `kind` | The action")[2]
    words = set(re.findall(r"^\| `(\w+)` \|", table.partition("\n\n")[0], re.M))
    own = {"build_error", "nonzero_exit", "patch_failed", "resource_limit"}
    assert {info["kind"] for info in told if info is not None} == words | own and len(words) == 10


SERVE_ERRORS = """
import sys
import uvicorn
from openenv.core.env_server import ErrorInfo, ErrorSite
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Print(Action):
    file: str = ""
    raw: object = None


class Printed(Observation):
    output: str = ""


class Printing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        return Printed()

    def step(self, action, timeout_s=None, **more):
        if action.raw is not None:
            return Printed(metadata={"error_info": action.raw})
        observation = Printed(output=f"{action.file}: no such file")
        if action.file == "here":
            return observation
        kind = "invalid_args" if action.file.startswith("-") else "path_not_found"
        site = ErrorSite(action_field="file", action_span=(0, len(action.file)))
        return ErrorInfo(kind=kind, message=observation.output * 40, sites=[site]).added_to(observation)

    @property
    def state(self):
        return State()


uvicorn.run(create_app(Printing, Print, Printed, max_concurrent_envs=4), fd=int(sys.argv[1]), log_level="warning")
"""


async def test_our_client_reads_how_a_step_failed_on_a_patched_server(tmp_path: Path) -> None:
    with serving(patched("b", tmp_path / "tree"), SERVE_ERRORS) as url:
        async with ErrataClient[Any, Any, Any](url, connect_timeout_s=60.0, message_timeout_s=60.0) as env:
            assert marker_of(await env.reset()) is None
            assert marker_of(await env.step({"file": "here"})) is None
            failed = await env.step({"file": "\U0001f600.txt"})
            marker = marker_of(failed)
            assert marker is not None and marker == marker_of(json.loads((await env.state_at(2)).payload))
            assert (marker.error_kind, marker.hint_template_key, marker.severity) == (
                "path_not_found",
                "fs.missing",
                "error",
            )
            site = marker.error_site
            assert site is not None and (site.action_field, site.action_span) == ("file", (0, 5))
            assert site.message is not None and len(site.message) == 300
            assert default_agent_text(failed.observation) == '{"output":"\U0001f600.txt: no such file"}'
            option = marker_of(await env.step({"file": "--no"}))
            assert option is not None and (option.error_kind, option.hint_template_key) == (
                "invalid_arguments",
                "args.invalid",
            )
            for raw in ("text", 7, [], {}, {"kind": 3}, {"kind": ""}):
                assert marker_of(await env.step({"raw": raw})) is None
            later = marker_of(await env.step({"raw": {"kind": "illegal_move", "later": 1, "sites": [{"later": 2}]}}))
            assert later is not None and (later.error_kind, later.error_site) == ("illegal_move", None)


READ_ALL = """
import json, sys
from openenv.core.env_server import ErrorInfo

infos = [ErrorInfo.read({"error_info": one}) for one in json.load(open(sys.argv[1]))]
print(json.dumps([info and info.model_dump(mode="json", exclude_defaults=True) for info in infos]))
"""
ODD = (
    None,
    True,
    -1,
    0,
    7,
    2**53,
    2**60,
    1.0,
    "",
    "text",
    "\udc80",
    "\U0001f600" * 1001,
    [],
    [1, 2],
    [2, 1],
    [0, True],
    {},
)


def test_both_readers_read_the_same(tmp_path: Path) -> None:
    infos: list[Any] = [*ODD, *({"kind": one} for one in ODD), *({"kind": "x", "message": one} for one in ODD)]
    infos += [{"kind": "x", "sites": one} for one in (*ODD, [*ODD], [{"line": n} for n in range(-3, 30)])]
    names = InfoSite.model_fields
    infos += [{"kind": "x", "sites": [{name: one, "file": "a"}, {name: one}]} for name in names for one in ODD]
    (tmp_path / "infos").write_text(json.dumps(infos), encoding="utf-8")
    done = run(patched("b", tmp_path / "tree"), "-c", READ_ALL, str(tmp_path / "infos"))
    assert done.returncode == 0, done.stderr[-4000:]
    ours = [info and info.to_json() for info in (ErrorInfo.read({KEY: one}) for one in infos)]
    assert json.loads(done.stdout) == ours and sum(info is not None for info in ours) > 100


SERVE_CODE = """
import sys
import uvicorn
from coding_env.models import CodeAction, CodeObservation
from coding_env.server.python_codeact_env import PythonCodeActEnv
from openenv.core.env_server.http_server import create_app

uvicorn.run(create_app(PythonCodeActEnv, CodeAction, CodeObservation), fd=int(sys.argv[1]), log_level="warning")
"""


@needs_openenv_source
async def test_our_client_reads_the_errors_of_the_converted_coding_env(tmp_path: Path) -> None:
    tree = unpacked("wheel", tmp_path / "tree")
    for folder in ("envs", "docs"):
        shutil.copytree(SOURCE / folder, tree / folder)
    for patch in sorted(PATCHES.glob("b*.patch")):
        apply(tree, patch)
    with serving(tree, SERVE_CODE, ROOT / ".cache" / "upstream-envs" / "bin" / "python") as url:
        async with ErrataClient[Any, Any, Any](url, connect_timeout_s=60.0, message_timeout_s=60.0) as env:
            await env.reset()
            code = "x = '\u00e9'\ny = 1 / 0"
            marker = marker_of(await env.step({"code": code}))
            assert marker is not None and marker.error_site is not None
            assert (marker.error_kind, marker.hint_template_key) == ("runtime_error", "code.runtime")
            assert marker.error_site.message == "ZeroDivisionError: division by zero"
            assert marker.error_site.action_span is not None
            assert code[slice(*marker.error_site.action_span)] == "y = 1 / 0"
            assert marker_of(await env.step({"code": "x = 2"})) is None

"""`errata serve` takes environments in which no line is ours, and upstream's own clients drive them.

The environments are in tests/environments; upstream's echo_env comes from ``make openenv-source``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from fastapi import FastAPI
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.generic_client import GenericEnvClient
from openenv.core.mcp_client import MCPToolClient
from pydantic import SecretStr

from errata_protocol.errors import InvalidRequest, ServiceError
from errata_server.app import create_app
from errata_server.app.adoption import adopt, sites
from errata_server.process import ServerProcess
from errata_server.runtime.registry import RUNTIMES
from errata_server.serve.server import Bind, build
from errata_server.settings import Settings
from errata_server.targets.load import Stated, load, load_all

from ..environments.ledger import LedgerAction, LedgerEnvironment, LedgerObservation
from ..openenv_source import ENVIRONMENTS, needs_openenv_source
from .local_server import LocalServer

HERE = "tests.environments"
GREETING = Path(__file__).parents[1] / "environments" / "greeting_env"
STATED = ("--action", f"{HERE}.asynchronous:EchoAction", "--observation", f"{HERE}.asynchronous:EchoObservation")


def serving(target: str, tmp_path: Path, **more: Any) -> LocalServer:
    return LocalServer(target, tmp_path / "data", **more)


async def drive(url: str, action: dict[str, Any], steps: int = 2) -> list[dict[str, Any]]:
    """Reset, step, state and close with upstream's generic client; return the observations."""
    async with GenericEnvClient(base_url=url) as client:
        seen = [(await client.reset()).observation]
        for _ in range(steps):
            seen.append((await client.step(action)).observation)
        assert (await client.state())["step_count"] == steps
    return seen


async def what_is_kept(url: str, observations: list[dict[str, Any]], environment: str) -> None:
    """The episode that a vanilla client just left is listed and readable to the byte, and the probe is answered."""
    episode = httpx.get(f"{url}/episodes").json()["episodes"][0]
    assert (episode["environment"], episode["deliveries"]) == (environment, len(observations))
    for t, observation in enumerate(observations):
        payload = httpx.get(f"{url}/episodes/{episode['eid']}/states/{t}").json()
        kept = {k: v for k, v in payload["observation"].items() if k != "metadata"}
        assert kept == {k: v for k, v in observation.items() if k != "metadata"}
    async with websockets.connect(url.replace("http", "ws") + "/ws") as socket:
        await socket.send('{"type":"capabilities"}')
        told = json.loads(await socket.recv())
    assert told["data"]["environment"] == environment
    assert told["data"]["extensions"]["state_at"] == 1


@pytest.mark.parametrize(
    ("target", "name", "action", "last"),
    [
        (f"{HERE}.ledger:LedgerEnvironment", "LedgerEnvironment", {"amount": 7}, {"balance": 14}),
        (f"{HERE}.asynchronous:AsyncEchoEnvironment", "AsyncEchoEnvironment", {"text": "é"}, {"text": "é"}),
        (f"{HERE}.applications:environment", "LedgerEnvironment", {"amount": 2}, {"balance": 4}),
        (f"{HERE}.applications:tenfold", "Scaled", {"amount": 2}, {"balance": 40}),
        (f"{HERE}.applications:server", "ledger", {"amount": 2}, {"balance": 4}),
        (f"{HERE}.applications:make", "ledger", {"amount": 3}, {"balance": 6}),
        (str(GREETING), "greeting_env", {"name": "Ada"}, {"greeting": "hello, Ada"}),
    ],
)
@pytest.mark.usefixtures("forgotten")
async def test_a_foreign_environment_is_served_to_upstreams_own_client(
    target: str, name: str, action: dict[str, Any], last: dict[str, Any], tmp_path: Path
) -> None:
    with serving(target, tmp_path) as server:
        seen = await drive(server.url, action)
        assert last.items() <= seen[-1].items()
        await what_is_kept(server.url, seen, name)


async def test_tools_of_an_mcp_environment_work_through_every_door(tmp_path: Path) -> None:
    with serving(f"{HERE}.toolbox:ToolboxEnvironment", tmp_path) as server:
        async with MCPToolClient(base_url=server.url) as client:
            await client.reset()
            assert {tool.name for tool in await client.list_tools()} == {"add", "note"}
            assert await client.call_tool("add", a=2, b=3) == 5
            result = await client.step(CallToolAction(tool_name="note", arguments={"text": "one"}))
            assert result.observation.result["data"] == "one"

        def rpc(method: str, **params: Any) -> Any:
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return httpx.post(f"{server.url}/mcp", json=body).json()["result"]

        sid = rpc("openenv/session/create")["session_id"]
        assert [tool["name"] for tool in rpc("tools/list", session_id=sid)["tools"]] == ["add", "note"]
        for so_far in ("first", "first second"):
            called = rpc("tools/call", session_id=sid, name="note", arguments={"text": so_far.split()[-1]})
            assert called["data"] == so_far
        assert rpc("openenv/session/close", session_id=sid)["closed"] is True

        async with websockets.connect(server.url.replace("http", "ws") + "/ws") as socket:

            async def ask(frame: dict[str, Any]) -> Any:
                await socket.send(json.dumps(frame))
                return json.loads(await socket.recv())

            await ask({"type": "capabilities"})
            reset = await ask({"type": "reset", "data": {}})
            params = {"name": "add", "arguments": {"a": 20, "b": 22}}
            called = await ask(
                {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}}
            )
            assert called["data"]["result"]["data"] == 42
            assert called["t"] == 1
            kept = httpx.get(f"{server.url}/episodes/{reset['eid']}/states/1")
            assert (kept.json(), kept.headers["x-errata-kind"]) == (called["data"], "mcp")


async def test_a_blocking_step_holds_up_no_other_session(tmp_path: Path) -> None:
    with serving(f"{HERE}.blocking:GateEnvironment", tmp_path) as server:
        async with GenericEnvClient(base_url=server.url) as waits, GenericEnvClient(base_url=server.url) as opens:
            await waits.reset()
            await opens.reset()
            waiting = asyncio.create_task(waits.step({"do": "wait"}))
            await opens.step({"do": "open"})
            assert (await waiting).observation["waited"] is True


async def test_an_application_is_served_with_its_own_routes_and_hooks(tmp_path: Path) -> None:
    with ServerProcess(f"{HERE}.applications:app", tmp_path) as server:  # its hooks ran once in a process of its own
        seen = await drive(server.url, {"amount": 2})
        assert seen[-1]["balance"] == 4
        await what_is_kept(server.url, seen, "ledger")
        hooks = httpx.get(f"{server.url}/hooks")
        assert (hooks.json(), hooks.headers["x-stamp"]) == (["startup"], "ledger")
        assert httpx.get(f"{server.url}/ready").json() == "the application's own"
        assert httpx.get(f"{server.url}/teapot").status_code == 418
        assert httpx.get(f"{server.url}/list_environments").json() == ["ledger"]
        assert server.stop() == 0


@pytest.mark.parametrize(("target", "own"), [("server", 2), ("make", 4), ("by_hand", 1), ("environment", 10_000)])
def test_an_applications_own_limit_holds_until_the_operator_gives_another(target: str, own: int) -> None:
    runtime = RUNTIMES.shared(Settings())
    for given, expected in ((None, own), (3, 3)):
        app = load(f"{HERE}.applications:{target}").application(runtime, max_sessions=given)
        assert app.state.errata.max_concurrent_envs == expected


SINGLE = Stated(f"{HERE}.asynchronous:EchoAction", f"{HERE}.asynchronous:EchoObservation")


@pytest.mark.parametrize("target", ["untyped:SilentEnvironment", "untyped:silent", "applications:single"])
def test_more_sessions_than_a_class_takes_are_refused(target: str) -> None:
    stated = SINGLE if target.startswith("untyped") else None
    servable = load(f"{HERE}.{target}", stated=stated)
    with pytest.raises(InvalidRequest, match=r"--max-sessions 8 .*SUPPORTS_CONCURRENT_SESSIONS = True"):
        servable.application(RUNTIMES.shared(Settings()), max_sessions=8)
    for given in (None, 1):
        app = load(f"{HERE}.{target}", stated=stated).application(RUNTIMES.shared(Settings()), max_sessions=given)
        assert app.state.errata.max_concurrent_envs == 1


def test_errata_serve_refuses_more_sessions_than_a_class_takes_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"^errata: .*--max-sessions 8 [^\n]*$"):
        ServerProcess(f"{HERE}.untyped:SilentEnvironment", tmp_path, *STATED, "--max-sessions", "8")


def test_an_application_of_ours_keeps_its_own_limit() -> None:
    def mine() -> FastAPI:
        return create_app(LedgerEnvironment, LedgerAction, LedgerObservation, max_concurrent_envs=3)

    assert adopt(app := mine(), max_concurrent_envs=3) is app
    with pytest.raises(InvalidRequest, match="max_concurrent_envs=8"):
        adopt(mine(), max_concurrent_envs=8)


async def test_classes_that_no_hint_names_are_given_on_the_command_line(tmp_path: Path) -> None:
    with ServerProcess(f"{HERE}.untyped:SilentEnvironment", tmp_path, *STATED) as server:
        async with GenericEnvClient(base_url=server.url) as client:
            await client.reset()
            assert (await client.step({"text": "said"})).observation["text"] == "said"


@needs_openenv_source
@pytest.mark.usefixtures("forgotten")
async def test_upstreams_echo_env_is_served_as_it_is(tmp_path: Path) -> None:
    with serving(str(ENVIRONMENTS / "echo_env"), tmp_path) as server:
        async with MCPToolClient(base_url=server.url) as client:
            await client.reset()
            assert {tool.name for tool in await client.list_tools()} == {"echo_message", "echo_with_length"}
            assert await client.call_tool("echo_message", message="Hello!") == "Hello!"
            assert await client.call_tool("echo_with_length", message="Test") == {"message": "Test", "length": 4}
        (episode,) = httpx.get(f"{server.url}/episodes").json()["episodes"]
        assert episode["environment"] == "echo_env"
        assert httpx.get(f"{server.url}/episodes/{episode['eid']}/states/0").status_code == 200


# -- what is found by name ------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on the path, as site-packages is, that holds an installed OpenEnv environment package."""
    site = tmp_path / "site"
    shutil.copytree(GREETING, site / "welcome_env", ignore=shutil.ignore_patterns("__pycache__"))
    manifest = site / "welcome_env" / "openenv.yaml"
    manifest.write_text(manifest.read_text().replace("greeting_env", "welcome_env"))
    app = site / "welcome_env" / "server" / "app.py"
    app.write_text(app.read_text().replace("greeting_env", "welcome_env").replace(".welcome_env", ".greeting_env"))
    about = site / "openenv_welcome_env-0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: openenv-welcome-env\nVersion: 0.1\n")
    monkeypatch.syspath_prepend(str(site))
    return site


@pytest.mark.parametrize("name", ["welcome_env", "welcome-env", "welcome"])
def test_an_installed_openenv_package_is_found_as_autoenv_would(name: str, elsewhere: Path) -> None:
    found = load(name)
    assert found.name == "welcome_env"
    assert found.app is not None
    assert found.spec.action_cls.__module__ == "welcome_env.models"


def test_both_kinds_of_installed_environments_are_listed(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from errata_server.cli.commands import list_environments

    list_environments(as_json=True)
    listed = json.loads(capsys.readouterr().out)
    assert listed["welcome_env"] == "welcome_env.server.app:app"
    assert listed["terminal"] == "terminal_env:SPEC"


def test_settings_are_read_again_from_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Settings(
        data_dir=tmp_path,
        token=SecretStr("one,two"),
        allowed_hosts=("a", "b"),
        allowed_origins=("https://c", "https://d"),
        base={"default": tmp_path},
        fsync=False,
        step_timeout_s=5,
    )
    for name, value in given.in_environment().items():
        monkeypatch.setenv(name, value)
    assert Settings() == given


@pytest.mark.usefixtures("forgotten")
def test_a_directory_whose_modules_import_each_other_as_programs_is_loaded(tmp_path: Path) -> None:
    directory = tmp_path / "plain-greeting"
    shutil.copytree(GREETING, directory, ignore=shutil.ignore_patterns("__pycache__", "__init__.py"))
    (directory / "server" / "program.py").write_text(
        "from models import GreetingAction\nfrom server.app import app\nassert GreetingAction\n"
    )
    (directory / "openenv.yaml").write_text("name: plain\napp: server.program:app\n")
    assert load(str(directory)).app is not None


def test_several_targets_need_different_names() -> None:
    loaded = load_all(["terminal", f"{HERE}.ledger:LedgerEnvironment"])
    assert [servable.name for servable in loaded] == ["terminal", "LedgerEnvironment"]
    with pytest.raises(InvalidRequest, match="both called 'ledger'"):
        load_all([f"{HERE}.applications:make", f"{HERE}.applications:server"])


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nobody_has_this", r"no environment named 'nobody_has_this' is installed \(installed: .*terminal"),
        (f"{HERE}.ledger", "for a module give the attribute, too"),
        ("no_such_module:app", "there is no module 'no_such_module'"),
        (f"{HERE}.nothing:app", f"there is no module '{HERE}.nothing'"),
        (f"{HERE}.applications:ap", "has no 'ap'; it has: .*make, app"),
        (f"{HERE}.applications:", "is not module:attribute"),
        (f"{HERE}.applications:instance_of_nothing", "is a int: expected an Environment class"),
        (f"{HERE}.applications:Scaled", r"needs arguments \(factor\): give functools.partial"),
        (f"{HERE}.applications:two", r"serves several environments \(ledger at /a, ledger at /b\)"),
        (f"{HERE}.ledger:LedgerAction", "is the class LedgerAction, not a subclass of Environment"),
        (f"{HERE}.untyped:SilentEnvironment", "does not say which action and observation class it uses: give --action"),
        (f"{HERE}.untyped:BareAction", "does not say which action class it uses: give --action"),
        (f"{HERE}.untyped:HalfDone", "does not define state, step"),
        (f"{HERE}.broken:app", r"No module named 'a_package_nobody_has' \(.*broken_inside.py:1\)"),
        ("tests/environments", "has no openenv.yaml and no server/app.py"),
        ("tests", r"no environment named 'tests' .*; for the directory of that name give \./tests$"),
        ("./nowhere", "has no openenv.yaml and no server/app.py"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(target: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        load(target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["PartlyHinted", "ThroughGenericBase"])
def test_the_classes_are_read_through_generic_bases_and_past_hints_that_cannot_be_read(name: str) -> None:
    spec = load(f"{HERE}.untyped:{name}").spec
    assert (spec.action_cls.__name__, spec.observation_cls.__name__) == ("EchoAction", "EchoObservation")


def test_a_mode_reaches_the_application_that_the_import_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_MODE", "simulation")
    app = load(f"{HERE}.applications:make", mode="production").app
    assert app is not None
    assert [site.mode for site in sites(app)] == ["production"]


def test_an_application_of_our_own_create_app_keeps_its_journal_where_the_command_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "changed_line.py").write_text(
        "from errata_server import create_app\n"
        f"from {HERE}.ledger import LedgerAction, LedgerEnvironment, LedgerObservation\n"
        "app = create_app(LedgerEnvironment, LedgerAction, LedgerObservation, env_name='mine')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ERRATA_DATA_DIR", "OPENENV_MODE"):
        monkeypatch.setenv(name, "")  # to be put back
        monkeypatch.delenv(name)
    settings = Settings(data_dir=tmp_path / "kept", sandbox="fake")
    served = build(["changed_line:app"], settings, bind=Bind(), mode=None)
    runtime = served.runtime
    try:
        assert served.app.state.errata.runtime is runtime
        assert runtime.data_dir == tmp_path / "kept"
    finally:
        asyncio.run(runtime.close())


def test_a_class_given_for_an_environment_that_says_its_own_is_checked() -> None:
    with pytest.raises(InvalidRequest, match="is no subclass of openenv's Action"):
        load(f"{HERE}.ledger:LedgerEnvironment", stated=Stated(action=f"{HERE}.ledger:LedgerObservation"))
    with pytest.raises(InvalidRequest, match="is an application with its own"):
        load(f"{HERE}.applications:make", stated=Stated(action=f"{HERE}.ledger:LedgerAction"))

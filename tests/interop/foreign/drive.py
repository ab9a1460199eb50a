"""Drive a server with this Python's own OpenEnv clients, unmodified, and print what they returned as JSON.

usage: drive.py JOBS, a JSON list of [scenario, url]; the answer is a list of records, or of {"raised": traceback}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import httpx
from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.mcp_client import MCPToolClient
from websockets.asyncio.client import connect
from worlds import LedgerAction, LedgerObservation, LedgerState

Record = dict[str, Any]


class EchoEnv(MCPToolClient):
    """Upstream's typed client of its echo environment: `MCPToolClient` by another name."""


class LedgerEnv(EnvClient[LedgerAction, LedgerObservation, LedgerState]):
    """A typed client as OpenEnv's template writes it: every key of an observation has to be a field."""

    def _step_payload(self, action: LedgerAction) -> dict[str, Any]:
        return {"amount": action.amount, "note": action.note}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[LedgerObservation]:
        observation = LedgerObservation(**payload["observation"])
        return StepResult(observation=observation, reward=payload.get("reward"), done=payload.get("done", False))

    def _parse_state(self, payload: dict[str, Any]) -> LedgerState:
        return LedgerState(**payload)


def seen(result: Any) -> Record:
    """Return everything a step result carries."""
    observation = result.observation
    if hasattr(observation, "model_dump"):
        observation = {"class": type(observation).__name__, **observation.model_dump(mode="json")}
    record = {"observation": observation, "reward": result.reward, "done": result.done}
    if hasattr(result, "metadata"):
        record["metadata"] = result.metadata
    return record


async def refused(call: Awaitable[Any]) -> str:
    """Return how the client reports that the server refused."""
    try:
        return f"not refused: {await call}"
    except RuntimeError as error:
        return str(error)


async def ledger(url: str) -> Record:
    """reset, step, state and close of a sync environment that is tied to its thread."""
    async with GenericEnvClient(base_url=url) as client:
        record = {
            "reset": seen(await client.reset(episode_id="ep-7", opening=10)),
            "steps": [seen(await client.step({"amount": n, "note": f"n{n} é\u2028"})) for n in (4, -2)],
            "state": await client.state(),
            "failed": await refused(client.step({"amount": 1, "note": "refuse"})),
            "unknown_field": (await refused(client.step({"amount": 1, "nonsense": 2}))).splitlines()[0],
            "after": seen(await client.step({"amount": 1, "note": "close"})),
        }
        async with GenericEnvClient(base_url=url) as other:
            record["other"] = seen(await other.reset())
        record["again"] = seen(await client.reset())
        record["last_state"] = await client.state()
    return record


def ledger_sync(url: str) -> Record:
    """The same through the blocking, typed client."""
    with LedgerEnv(base_url=url).sync() as client:
        return {
            "reset": seen(client.reset(episode_id="ep-8")),
            "steps": [seen(client.step(LedgerAction(amount=n, note="x"))) for n in (1, 2, 3)],
            "state": {"class": type(client.state()).__name__, **client.state().model_dump(mode="json")},
        }


async def counter(url: str) -> Record:
    """Eight interleaved sessions of an async environment."""

    async def play(seed: int) -> list[Record]:
        async with GenericEnvClient(base_url=url) as client:
            results = [seen(await client.reset(seed=seed))]
            results += [seen(await client.step({"n": n})) for n in range(1, 8)]
            return [*results, await client.state()]

    return {"plays": await asyncio.gather(*(play(seed) for seed in range(0, 80, 10)))}


async def echo(url: str) -> Record:
    """Tools by steps: what each generation's MCP client does by default."""
    async with EchoEnv(base_url=url) as client:
        return {
            "reset": seen(await client.reset(episode_id="e")),
            "tools": [tool.model_dump(mode="json") for tool in await client.list_tools()],
            "echo": await client.call_tool("echo_message", message="hé\n"),
            "length": await client.call_tool("echo_with_length", message="four"),
            "failed": await refused(client.call_tool("fail", reason="as asked")),
            "unknown": await refused(client.call_tool("nothing")),
            "step": seen(await client.step(CallToolAction(tool_name="echo_message", arguments={"message": "s"}))),
            "state": (await client.state()).model_dump(mode="json"),
        }


def echo_sync(url: str) -> Record:
    """The blocking form."""
    with EchoEnv(base_url=url).sync() as client:
        return {
            "reset": seen(client.reset()),
            "tools": [tool.name for tool in client.list_tools()],
            "length": client.call_tool("echo_with_length", message="abc"),
        }


async def echo_http(url: str) -> Record:
    """Tools over ``POST /mcp`` on a session that the client had created."""
    client = MCPToolClient(base_url=url)
    client.use_production_mode = True  # 0.10's default; the public switch of 0.3
    try:
        return {
            "tools": [tool.name for tool in await client.list_tools()],
            "first": await client.call_tool("echo_with_length", message="a"),
            "second": await client.call_tool("echo_with_length", message="b"),
            "failed": await refused(client.call_tool("fail", reason="as asked")),
        }
    finally:
        await client.close()


async def json_rpc(url: str, method: str, **params: Any) -> Record:
    """Ask ``POST /mcp``."""
    async with httpx.AsyncClient() as client:
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return (await client.post(f"{url}/mcp", json=body)).json()


async def attach(url: str) -> Record:
    """A created session outlives its sockets, one after the other (0.5 and later)."""
    sid = (await json_rpc(url, "openenv/session/create"))["result"]["session_id"]
    address = f"{url.replace('http', 'ws', 1)}/ws?session_id={sid}"
    record: Record = {"sockets": []}
    for frames in (
        [{"type": "reset", "data": {"episode_id": "kept"}}, {"type": "step", "data": {"amount": 3}}],
        [{"type": "step", "data": {"amount": 4}}, {"type": "state"}],
    ):
        async with connect(address) as socket:
            for frame in frames:
                await socket.send(json.dumps(frame))
                record["sockets"].append(json.loads(await socket.recv()))
    async with GenericEnvClient(base_url=f"{url}/ws?session_id={sid}&") as client:
        record["client"] = seen(await client.step({"amount": 5}))
    async with connect(address) as first, connect(address) as second:
        record["second"] = json.loads(await second.recv())["data"].get("code")
        await first.send('{"type": "close"}')
        await first.wait_closed()
    closed = await json_rpc(url, "openenv/session/close", session_id=sid)
    record["closed"] = closed["result"]["closed"]
    async with connect(address) as late:
        record["late"] = json.loads(await late.recv())["data"].get("code")
    return record


async def terminal(url: str) -> Record:
    """A whole task on a real sandbox."""
    async with GenericEnvClient(base_url=url, message_timeout_s=120) as client:
        record = {
            "reset": seen(await client.reset(task_id="file-permissions", episode_id="t-1")),
            "failed": seen(await client.step({"command": "cat nothing"})),
            "wrote": seen(await client.step({"tool": "write_file", "path": "/tmp/note", "content": "a\né"})),
            "read": seen(await client.step({"tool": "read_file", "path": "/tmp/note"})),
            "no_tool": seen(await client.step({"tool": "fly"})),
            "carried": seen(await client.step({"command": "cd site; export WHO=me"})),
            "again": seen(await client.step({"command": "pwd; echo $WHO"})),
            "state": await client.state(),
        }
        solution = (
            "find . -type f -exec chmod 640 {} +; find . -type f -name '*.sh' -exec chmod 750 {} +;"
            " find conf/secrets -type f -exec chmod 600 {} +; find . -depth -type d -exec chmod 750 {} +"
        )
        await client.step({"command": solution})
        record["submit"] = seen(await client.step({"tool": "submit"}))
        record["over"] = await refused(client.step({"command": "true"}))
    return record


def terminal_sync(url: str) -> Record:
    """The blocking form."""
    with GenericEnvClient(base_url=url, message_timeout_s=120).sync() as client:
        return {
            "reset": seen(client.reset()),
            "step": seen(client.step({"command": "echo out; echo err >&2; exit 3"})),
            "state": client.state(),
        }


async def swe_bench_lite(url: str) -> Record:
    """An instance that is looked at and submitted as it is."""
    async with GenericEnvClient(base_url=url, message_timeout_s=300) as client:
        return {
            "reset": seen(await client.reset()),
            "run": seen(await client.step({"tool": "run", "command": "git -C /testbed log --oneline"})),
            "submit": seen(await client.step({"tool": "submit"})),
        }


SCENARIOS: dict[str, Callable[[str], Any]] = {
    scenario.__name__: scenario
    for scenario in (
        *(ledger, ledger_sync, counter, echo, echo_sync, echo_http, attach),
        *(terminal, terminal_sync, swe_bench_lite),
    )
}


def run(scenario: str, url: str) -> Record:
    """Run one scenario; what it raises is part of the answer, so that one failure does not hide the others."""
    try:
        outcome = SCENARIOS[scenario](url)
        return asyncio.run(asyncio.wait_for(outcome, 120)) if asyncio.iscoroutine(outcome) else outcome
    except Exception:
        return {"raised": traceback.format_exc()}


def distribution() -> str:
    """Return the name and version of the OpenEnv that is installed here."""
    for name in ("openenv", "openenv-core"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "none"


if __name__ == "__main__":
    records = [run(scenario, url) for scenario, url in json.loads(sys.argv[1])]
    print(json.dumps({"openenv": distribution(), "records": records}))

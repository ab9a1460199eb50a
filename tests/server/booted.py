"""An application on a simulated machine that is killed and started again, spoken to through its doors.

    machine = SimulatedMachine(7, power_loss=False, index=tmp_path)

    async def play(server: Booted) -> None:
        async with server.connect() as socket:
            await socket.act("reset")
            await server.kill()

    boot(machine, CountEnvironment, play)

Everything but sockets and threads is the server's own, the journal included; time is virtual. That a real process is
killed by a real signal is for `test_restart`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Never, Self

import httpx
from fastapi import FastAPI

from errata_server.app import create_fastapi_app
from errata_server.settings import Settings
from errata_server.simulation import SimulatedLoop, SimulatedMachine

from .asgi_peer import Peer
from .environments import CountAction, CountObservation

SETTINGS = Settings(disk_floor_bytes=0)


class Socket(Peer):
    """A plain socket, whose first message makes the server add eid and t to its answers.

    Attributes:
        told: Reply to the first message: capabilities with the session's sid, eid and t, or the error.
    """

    told: dict[str, Any]

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.told = (await self.act("capabilities"))["data"]
        return self

    async def act(self, type_: str, **data: Any) -> dict[str, Any]:
        """Send a message and return its answer."""
        answer = await self.ask({"type": type_, "data": data} if data else {"type": type_})
        assert answer is not None, "the server hung up"
        return answer


class Booted:
    """The server of one boot.

    Args:
        app: The application.

    Attributes:
        http: A client of its routes.
    """

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, client=("testclient", 1)), base_url="http://testserver"
        )

    def connect(self, sid: str | None = None) -> Socket:
        """Open a plain socket, of a given-out session where ``sid`` names one."""
        return Socket(self.app, query="" if sid is None else f"session_id={sid}")

    async def give_out(self) -> str:
        """Create a session that outlives its socket, and return its sid."""
        asked = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
        return str((await self.http.post("/mcp", json=asked)).json()["result"]["session_id"])

    async def episode(self, eid: str | None) -> dict[str, Any]:
        """Return what the server tells of an episode."""
        return dict((await self.http.get(f"/episodes/{eid}")).json())

    async def state(self, eid: str | None, t: int) -> httpx.Response:
        """Return the answer to a read of state(t)."""
        return await self.http.get(f"/episodes/{eid}/states/{t}")

    async def fork(self, eid: str | None, t: int, request_id: str = "f") -> httpx.Response:
        """Return the answer to a fork."""
        return await self.http.post(f"/episodes/{eid}/fork", json={"t": t, "request_id": request_id})

    async def kill(self) -> Never:
        """End the process before the next step of its loop."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        loop.crash_at = loop.steps
        await asyncio.sleep(0)
        raise AssertionError("the machine did not go down")


def boot(
    machine: SimulatedMachine, env: Callable[[], Any], play: Callable[[Booted], Awaitable[None]], **more: Any
) -> None:
    """Start a server on what the machine's disk has, and stop it when ``play`` returns, if it was not killed before.

    Args:
        machine: The machine.
        env: Environment, as `create_fastapi_app` takes it.
        play: What clients do.
        **more: More arguments of `create_fastapi_app`.
    """

    async def program(machine: SimulatedMachine) -> None:
        runtime = machine.runtime(SETTINGS)
        app = create_fastapi_app(env, CountAction, CountObservation, max_concurrent_envs=8, runtime=runtime, **more)
        async with app.router.lifespan_context(app):
            await play(Booted(app))

    machine.boot(program)

"""Errata's client as a program that the kit drives: JSON lines in, JSON lines out."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError


async def answered(clients: dict[str, ErrataClient], url: str, line: dict[str, Any]) -> dict[str, Any]:
    """Do what a line asks for."""
    name, kind, data = line["session"], line["type"], line.get("data", {})
    if name not in clients:
        clients[name] = ErrataClient(url, message_timeout_s=12)
    client = clients[name]
    if kind == "reset":
        result = await client.reset(**data)
    elif kind == "step":
        result = await client.step(data)
    elif kind == "state":
        found = await client.state_at(data["t"])
        if found.source != "server":
            return {"type": "error", "data": {"code": "NOT_SUPPORTED", "message": "from the client's own record"}}
        return {"type": "state_at", "data": json.loads(found.payload)}
    elif kind == "fork":
        clients[data["child"]] = await client.fork(data["t"])
        return {"type": "forked", "data": {}}
    else:
        await client.close()
        return {"type": "closed", "data": {}}
    observation = result.observation
    return {"type": "observation", "data": {"observation": observation, "reward": result.reward, "done": result.done}}


async def main(url: str) -> None:
    """Answer lines until standard input ends."""
    clients: dict[str, ErrataClient] = {}
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        asked = json.loads(line)
        try:
            answer = await answered(clients, url, asked)
        except (ErrataError, RuntimeError, ConnectionError, OSError) as error:
            code = getattr(error, "code", type(error).__name__)
            answer = {"type": "error", "data": {"code": code, "message": str(error)[:300]}}
        print(json.dumps({"session": asked["session"], **answer}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

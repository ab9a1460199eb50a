"""Drives a client as the client kit says: ``openenv``, the `EnvClient` of the imported OpenEnv, or ``errata``, ours."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
REFUSALS = ("SESSION_ERROR", "REQUEST_ID_REUSED", "REPLY_GONE")
Ask = Callable[[Message], Awaitable[Message]]


def failed(code: str) -> Message:
    """Return the answer of a request that is given up."""
    return {"failed": code, "repeated": False}


async def serve(ask: Ask) -> None:
    """Answer standard input."""
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await ask(json.loads(line))), flush=True)


async def openenv(url: str, timeout_s: float, deadline_s: float) -> None:
    """Drive `EnvClient`, which has no method for mcp messages."""
    from openenv.core import ReplyLostError, SessionLostError
    from openenv.core.generic_client import GenericEnvClient

    class Frames(GenericEnvClient):  # type: ignore[misc]
        """Returns frames, also of errors, where `EnvClient` returns or raises what it makes of them."""

        _checked = staticmethod(lambda response: response)

    env = Frames(base_url=url, message_timeout_s=timeout_s, recovery_timeout_s=deadline_s)

    async def ask(line: Message) -> Message:
        if line["type"] == "mcp":
            return failed("NOT_SUPPORTED")
        try:
            frame = await env._send_and_receive(line)
        except SessionLostError:
            return failed("SESSION_ERROR")
        except ReplyLostError as error:
            return failed("REPLY_GONE" if "has no reply" in str(error) else "DEADLINE")
        except ConnectionError:
            return failed("UNREACHABLE")
        code = frame["data"].get("code")
        if code in REFUSALS or (code == "VALIDATION_ERROR" and "request_id" not in frame):
            return failed(code)
        return {"type": frame["type"], "data": frame["data"]}

    await serve(ask)
    await env.close()


async def errata(url: str, timeout_s: float, deadline_s: float) -> None:
    """Drive `ErrataClient`."""
    from websockets.exceptions import ConnectionClosed

    from errata_client import ErrataClient
    from errata_protocol.errors import ErrataError

    client = ErrataClient(url, message_timeout_s=deadline_s, resend_after_s=timeout_s, durable=True)

    async def ask(line: Message) -> Message:
        try:
            if client._plain._in_doubt is not None:
                await client.reattach()
            return await client._plain.ask(line, deadline_s)
        except ErrataError as error:
            if error.code == "EXECUTION_ERROR":
                return {"type": "error", "data": {"message": error.message, "code": error.code}}
            return failed(error.code)
        except (OSError, ConnectionClosed):
            return failed("DEADLINE")

    await serve(ask)
    await client.end_session()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("client", choices=["openenv", "errata"])
    for option, kind in (("--url", str), ("--timeout", float), ("--deadline", float)):
        parser.add_argument(option, type=kind, required=True)
    given = parser.parse_args()
    asyncio.run({"openenv": openenv, "errata": errata}[given.client](given.url, given.timeout, given.deadline))

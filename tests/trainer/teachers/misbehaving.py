"""A chat endpoint on a real socket that behaves as the model's name says, and counts what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

PROMPT_TOKENS, ANSWER_TOKENS = 100, 10


def completion(name: str, arguments: Any, **usage: Any) -> bytes:
    """Return a well-formed completion that calls a tool."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": text}}
    told = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": ANSWER_TOKENS, **usage}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": {"role": "assistant", "content": None}}
    choice["message"]["tool_calls"] = [call]  # type: ignore[index]
    return json.dumps({"model": "m", "choices": [choice], "usage": told}).encode()


class MisbehavingServer:
    """Serves on a thread of its own.

    Attributes:
        asked: Requests by model.
        most_at_once: The most that were under way at once, by model.
        requests: Every request body with its headers.
    """

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.release = threading.Event()
        self._under_way: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        model = body["model"]
        self.asked[model] += 1
        self.requests.append((headers, body))
        self._under_way[model] += 1
        self.most_at_once[model] = max(self.most_at_once[model], self._under_way[model])
        try:
            return await self._behave(model, headers, writer)
        finally:
            self._under_way[model] -= 1

    async def _behave(self, model: str, headers: dict[str, str], writer: asyncio.StreamWriter) -> bool:
        ls = completion("run", {"command": "ls"})
        match model.split("/")[-1]:
            case "good":
                _reply(writer, 200, ls)
            case "slow":
                await asyncio.to_thread(self.release.wait, 20)
                _reply(writer, 200, ls)
            case "priced":
                _reply(writer, 200, completion("run", {"command": "ls"}, cost=0.25))
            case "broken":
                _reply(writer, 500, b"oh no")
            case "heals":
                _reply(writer, 200, ls) if self.asked[model] > 2 else _reply(writer, 503, b"")
            case "busy":
                later = self.asked[model] > 1
                _reply(writer, 200, ls) if later else _reply(writer, 429, b"", ["retry-after: 0.2"])
            case "busy-for-long":
                _reply(writer, 429, b"", ["retry-after: 3600"])
            case "busy-inside":
                _reply(writer, 200, json.dumps({"error": {"code": 429, "message": "later"}}).encode())
            case "denies":
                said = json.dumps({"error": f"no such key: {headers['authorization']}"}).encode()
                _reply(writer, 401, said, [f"x-said: {headers['authorization']}"])
            case "repeats-the-key":
                _reply(writer, 200, completion("run", {"command": headers["authorization"]}))
            case "hangs":
                await asyncio.Event().wait()
            case "no-json":
                _reply(writer, 200, b"<html>")
            case "no-choice":
                _reply(writer, 200, b'{"choices": []}')
            case "no-arguments":
                _reply(writer, 200, completion("run", '{"command": '))
            case "wrong-tool":
                _reply(writer, 200, completion("fly", {}))
            case "drops":
                writer.close()
                return False
            case "trickles":
                await _endless(writer, "application/json", [b" "], 0.02)
            case "floods":
                await _endless(writer, "application/json", [b" " * 65536], 0)
            case "streams":
                await _endless(writer, "text/event-stream", [b'data: {"choices": []}\n\n'], 0.01)
            case other:
                raise AssertionError(f"nobody taught the server to be {other}")
        await writer.drain()
        return True


def _reply(writer: asyncio.StreamWriter, status: int, body: bytes, headers: Iterable[str] = ()) -> None:
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)


async def _endless(writer: asyncio.StreamWriter, kind: str, parts: list[bytes], wait_s: float) -> None:
    writer.write(f"HTTP/1.1 200 X\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    while True:
        for part in parts:
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        await writer.drain()
        await asyncio.sleep(wait_s)

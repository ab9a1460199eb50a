"""`ask` and `download`: HTTP requests of a command, whose answers are bounded in size and in time.

The server may be anything: another program at this address, one that sends without end, or a byte each second. What is
read of an answer is bounded, and so is the time for all of it, not only that between two parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from errata_protocol.bounded_json import decode
from errata_protocol.errors import JournalUnavailable, RemoteProtocolError
from errata_protocol.exception_text import text_of

MAX_BYTES = 256 * 1024**2
"""Largest answer of `ask`, bytes: several times the largest payload and the longest list."""

TOTAL_S = 120.0
"""Longest time for a request and its whole answer, seconds; `download` adds time for what arrives."""

MIN_BYTES_PER_S = 10_000
"""Slowest download, bytes per second, averaged from its beginning."""

_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Encodings of a body that are undone: a part of the body becomes at most a thousand times as large."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Args:
        url: The URL that was asked.
        status: HTTP status.
        headers: Headers of the answer.
        content: Body of the answer.
    """

    url: str
    status: int
    headers: httpx.Headers
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Return the JSON value of the body.

        Raises:
            RemoteProtocolError: It has none.
        """
        try:
            return decode(self.content)
        except ValueError as error:
            raise self.refused(str(error)) from error

    def read(self, kind: TypeAdapter[T]) -> T:
        """Return the body as a value of a type.

        Raises:
            RemoteProtocolError: It is not one.
        """
        try:
            return kind.validate_python(self.json())
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise self.refused(f"{where}: {first['msg']}" if where else first["msg"]) from error

    def header(self, name: str) -> str:
        """Return a header.

        Raises:
            RemoteProtocolError: It has none of that name.
        """
        if name not in self.headers:
            raise self.refused(f"it has no header {name}")
        return self.headers[name]

    def refused(self, why: str) -> RemoteProtocolError:
        """Return the error for an answer that no Errata server gives."""
        return RemoteProtocolError(f"{self.url} did not answer as an Errata server does ({why}): check the URL")


def ask(method: str, url: str, headers: dict[str, str], **request: Any) -> Answer:
    """Make a request, once, and return the whole answer, whatever its status.

    Args:
        method: HTTP method.
        url: Address.
        headers: Headers of the request.
        **request: Further arguments of ``httpx``, such as ``params`` and ``json``.

    Raises:
        JournalUnavailable: The server cannot be reached, or its answer has not ended within `TOTAL_S`.
        RemoteProtocolError: The answer is larger than `MAX_BYTES`, or encoded in a way that is not undone.
    """

    async def asked() -> Answer:
        content = bytearray()
        async with _answering(method, url, headers, request) as (answer, _):
            async for part in answer.aiter_bytes():
                content += part
                _demand_within(len(content), MAX_BYTES, url)
        return Answer(str(answer.request.url), answer.status_code, answer.headers, bytes(content))

    return _run(asked, url)


def download(url: str, headers: dict[str, str], params: Any, write: Callable[[bytes], object], most: int) -> Answer:
    """Make a GET request, and pass the body to ``write`` part by part if the status is one of success.

    Args:
        url: Address.
        headers: Headers of the request.
        params: Parameters of the query.
        write: Called with each part.
        most: Largest body, bytes.

    Returns:
        The answer. Its content is empty if it was passed on.

    Raises:
        JournalUnavailable: The server cannot be reached, or sends too slowly.
        RemoteProtocolError: The body is larger than ``most``, or encoded in a way that is not undone.
    """

    async def downloaded() -> Answer:
        content, size = bytearray(), 0
        async with _answering("GET", url, headers, {"params": params}) as (answer, deadline):
            first_deadline = deadline.when() or 0.0
            async for part in answer.aiter_bytes():
                size += len(part)
                if answer.is_success:
                    _demand_within(size, most, url)
                    write(part)
                    deadline.reschedule(first_deadline + size / MIN_BYTES_PER_S)
                else:
                    _demand_within(size, MAX_BYTES, url)
                    content += part
        return Answer(str(answer.request.url), answer.status_code, answer.headers, bytes(content))

    return _run(downloaded, url)


@asynccontextmanager
async def _answering(
    method: str, url: str, headers: dict[str, str], request: dict[str, Any]
) -> AsyncIterator[tuple[httpx.Response, asyncio.Timeout]]:
    """Make a request; yield its response, whose body is not read, and the deadline of all of it."""
    asked = {**headers, "Accept-Encoding": "gzip, deflate"}
    async with (
        asyncio.timeout(TOTAL_S) as deadline,
        httpx.AsyncClient(timeout=TOTAL_S, verify=url.startswith("https:")) as client,
        client.stream(method, url, headers=asked, **request) as answer,
    ):
        encoding = answer.headers.get("content-encoding", "").strip().lower()
        if encoding not in _ENCODINGS:
            raise RemoteProtocolError(f"{url} answers in the encoding {encoding!r}, which was not asked for")
        yield answer, deadline


def _run(work: Callable[[], Any], url: str) -> Answer:
    try:
        answer: Answer = asyncio.run(work())
        return answer
    except TimeoutError as error:
        raise JournalUnavailable(f"no whole answer from {url} in time: is it overloaded, or another server?") from error
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
        why = text_of(error)
        raise JournalUnavailable(f"no answer from {url}: {why}; is the server running?") from error


def _demand_within(size: int, most: int, url: str) -> None:
    if size > most:
        raise RemoteProtocolError(f"{url} sends more than {most:,} bytes: it is no Errata server, or ask for less")

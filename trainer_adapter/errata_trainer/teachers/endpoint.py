"""A teacher behind an OpenAI-compatible chat endpoint, by default OpenRouter's.

The API key is read from an environment variable for each request and is stored nowhere: not in a configuration, an
error, a log line or a cached answer. If a server repeats it, it is removed from the reply first.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx
import stamina

from .budget import Budget
from .completion import read_completion
from .limits import Limits
from .teacher import (
    Answer,
    AnswerInvalid,
    KeyMissing,
    Prompt,
    Spend,
    TeacherBroken,
    TeacherBusy,
    TeacherFailed,
    TeacherHungUp,
    TeacherRefused,
    TeacherTimeout,
    TeacherUnreachable,
)

__all__ = ["OPENROUTER", "ChatTeacher", "Endpoint"]

OPENROUTER = "https://openrouter.ai/api/v1"

_MAX_REPLY_BYTES = 8 << 20
_UNSEEN_TOKENS = 1024  # allowance for what an endpoint puts in front of a prompt with tools, and charges for
_MAX_EXCERPT = 200


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A model with its address, sampling options and prices.

    Attributes:
        model: Model name at the endpoint.
        base_url: Base URL of the API; ``/chat/completions`` is appended.
        key_env: Environment variable that holds the API key; None sends no key.
        name: Name in logs and votes; must be unique in a pool. Defaults to `model`.
        family: Model family. Defaults to the part of `model` before the slash.
        temperature: Sampling temperature; None uses the endpoint's default.
        top_p: Nucleus sampling probability; None uses the endpoint's default.
        seed: Sampling seed; None sends none.
        max_tokens: Most tokens of an answer, its reasoning included.
        max_tokens_field: Request field for `max_tokens`; some models take ``max_completion_tokens`` only.
        extra: Further fields of the request, e.g. ``{"tool_choice": "required"}``.
        usd_per_million_prompt: Price of a million prompt tokens in US dollars; None if unknown, and then no budget of
            money can be kept.
        usd_per_million_answer: Price of a million answered tokens in US dollars; None if unknown, and then no budget of
            money can be kept.
        deadline_s: Time limit of one call in seconds, retries included; waiting for the concurrency and rate limits
            before the first attempt does not count.
        attempts: Most attempts of one call, the first included.
        first_wait_s: Shortest wait before the second attempt, in seconds; later waits double, up to 16 times this, with
            jitter. A wait that the endpoint names replaces it.
        concurrency: Most calls at the same time.
        per_minute: Most requests begun in a minute, evenly spaced; None for no limit.
    """

    model: str
    base_url: str = OPENROUTER
    key_env: str | None = "OPENROUTER_API_KEY"
    name: str = ""
    family: str = ""
    temperature: float | None = 0.0
    top_p: float | None = None
    seed: int | None = None
    max_tokens: int = 1024
    max_tokens_field: str = "max_tokens"
    extra: Mapping[str, Any] = field(default_factory=dict)
    usd_per_million_prompt: float | None = None
    usd_per_million_answer: float | None = None
    deadline_s: float = 60.0
    attempts: int = 4
    first_wait_s: float = 0.5
    concurrency: int = 4
    per_minute: float | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("base_url of a teacher is no http or https URL")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError("base_url of a teacher has credentials or a query in it: name a variable in key_env")
        if not self.model or self.attempts < 1 or self.max_tokens < 1 or not self.deadline_s > 0:
            raise ValueError("a teacher needs a model, an attempt, a token and a deadline above 0")


class ChatTeacher:
    """A teacher that asks one endpoint. It belongs to one pool and runs on that pool's event loop.

    Args:
        endpoint: Endpoint to ask.
        transport: HTTP transport in place of the network, for tests.

    Raises:
        KeyMissing: The environment variable is not set; without this check it would show only as missing votes.
    """

    def __init__(self, endpoint: Endpoint, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.endpoint = endpoint
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._limits = Limits(concurrency=endpoint.concurrency, per_minute=endpoint.per_minute)
        self._key()

    @property
    def name(self) -> str:
        """Name of the teacher, unique in its pool."""
        return self.endpoint.name or self.endpoint.model

    @property
    def family(self) -> str:
        """Name of the model family; teachers of one family are not independent."""
        return self.endpoint.family or self.endpoint.model.partition("/")[0]

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name, model and sampling. The address is not part of it: a local server may change its port.

        The name is part of it because two teachers can be two samples of one model.
        """
        e = self.endpoint
        return {
            "name": self.name,
            "model": e.model,
            "temperature": e.temperature,
            "top_p": e.top_p,
            "seed": e.seed,
            "max_tokens": e.max_tokens,
            "extra": dict(e.extra),
        }

    def check(self, budget: Budget) -> None:
        """Check that a budget of money can be kept, for which the endpoint needs prices.

        Raises:
            ValueError: The budget limits money, and the endpoint has no prices.
        """
        e = self.endpoint
        if budget.usd is not None and (e.usd_per_million_prompt is None or e.usd_per_million_answer is None):
            raise ValueError(f"{self.name} has no prices, so no budget of money can be kept: set them, or limit tokens")

    async def ask(self, prompt: Prompt, budget: Budget) -> Answer:
        """Return the model's answer.

        Raises:
            TeacherFailed: There is none, within the deadline.
        """
        e = self.endpoint
        content = self._request(prompt)
        bound = self._bound(len(content))
        async with self._limits.slots:
            await self._limits.pace()
            last: TeacherFailed | None = None
            ends = asyncio.get_running_loop().time() + e.deadline_s

            def again(error: Exception) -> bool | float:
                nonlocal last
                if not isinstance(error, TeacherFailed) or not error.passes:
                    return False
                last = error
                if error.retry_after_s is None:
                    return True
                self._limits.pause(error.retry_after_s)
                left_s = ends - asyncio.get_running_loop().time()
                return max(error.retry_after_s, 0.01) if error.retry_after_s < left_s else False

            try:
                async with asyncio.timeout_at(ends):
                    async for attempt in stamina.retry_context(
                        on=again,
                        attempts=e.attempts,
                        timeout=None,
                        wait_initial=e.first_wait_s,
                        wait_max=e.first_wait_s * 16,
                        wait_jitter=e.first_wait_s,
                    ):
                        with attempt:
                            if attempt.num > 1:
                                await self._limits.pace()
                            return await self._attempt(content, bound, budget)
            except TimeoutError as error:
                earlier = f" (before: {last.message})" if last is not None else ""
                raise TeacherTimeout(f"{self.name} had no answer within {e.deadline_s:g} s{earlier}") from error
        raise AssertionError("stamina ended without a result")

    async def aclose(self) -> None:
        """Close the connections."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _attempt(self, content: bytes, bound: Spend, budget: Budget) -> Answer:
        with await budget.reserve(bound) as reservation:
            try:
                reply = await self._exchange(content)
            except TeacherFailed as error:
                if error.free:
                    reservation.cost(Spend())
                raise
            answer = read_completion(reply, bound, self._price)
            reservation.cost(answer.spent)
            return answer

    async def _exchange(self, content: bytes) -> bytes:
        """Send a request and return the body of the reply without the API key."""
        key = self._key()
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        url = self.endpoint.base_url.rstrip("/") + "/chat/completions"
        try:
            async with self._client_here().stream("POST", url, content=content, headers=headers) as response:
                if response.is_success and "event-stream" in response.headers.get("content-type", ""):
                    raise AnswerInvalid(f"{self.name} answered with a stream that was not asked for")
                body = await _read(response, self.name)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol) as error:
            raise TeacherUnreachable(f"{self.name} cannot be reached: {type(error).__name__}") from error
        except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
            raise TeacherHungUp(f"{self.name} broke the connection: {type(error).__name__}") from error
        if key is not None:
            body = body.replace(key.encode(), b"[key]")
        if response.is_success:
            return body
        raise self._failure(response, body)

    def _failure(self, response: httpx.Response, body: bytes) -> TeacherFailed:
        status = response.status_code
        excerpt = body[:_MAX_EXCERPT].decode("utf-8", "replace")
        message = f"{self.name} answered {status}: {excerpt!r}"
        wait_s = retry_after_s(response.headers.get("retry-after"))
        if status == 429:
            return TeacherBusy(message, retry_after_s=wait_s)
        if status >= 500 or status == 408:
            return TeacherBroken(message, retry_after_s=wait_s)
        return TeacherRefused(message)

    def _request(self, prompt: Prompt) -> bytes:
        e = self.endpoint
        body: dict[str, Any] = {
            "model": e.model,
            "messages": list(prompt.messages),
            e.max_tokens_field: e.max_tokens,
            "stream": False,
        }
        if prompt.tools:
            body["tools"] = list(prompt.tools)
        body |= {
            name: value
            for name, value in (("temperature", e.temperature), ("top_p", e.top_p), ("seed", e.seed))
            if value is not None
        }
        return json.dumps({**body, **e.extra}).encode()

    def _bound(self, request_bytes: int) -> Spend:
        """Return the most a call can cost, counting each byte as a token."""
        e = self.endpoint
        prompt_tokens = request_bytes + _UNSEEN_TOKENS
        return Spend(self._price(prompt_tokens, e.max_tokens), prompt_tokens + e.max_tokens)

    def _price(self, prompt_tokens: int, answer_tokens: int) -> float:
        e = self.endpoint
        per_million = prompt_tokens * (e.usd_per_million_prompt or 0) + answer_tokens * (e.usd_per_million_answer or 0)
        return per_million / 1e6

    def _key(self) -> str | None:
        variable = self.endpoint.key_env
        if variable is None:
            return None
        key = os.environ.get(variable, "").strip()
        if not key:
            raise KeyMissing(f"{self.name} needs a key: set the environment variable {variable}, or key_env=None")
        if not (key.isascii() and key.isprintable()):
            raise KeyMissing(f"what the environment variable {variable} holds is no key")
        return key

    def _client_here(self) -> httpx.AsyncClient:
        if self._client is None:
            host = urlsplit(self.endpoint.base_url).hostname or ""
            self._client = httpx.AsyncClient(
                transport=self._transport,
                # The deadline of the whole call ends what these do not: a body that trickles.
                timeout=httpx.Timeout(self.endpoint.deadline_s, connect=min(10.0, self.endpoint.deadline_s)),
                limits=httpx.Limits(max_connections=self.endpoint.concurrency),
                trust_env=host not in ("localhost", "127.0.0.1", "::1"),
            )
        return self._client


async def _read(response: httpx.Response, name: str) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > _MAX_REPLY_BYTES:
            raise AnswerInvalid(f"{name} answered more than {_MAX_REPLY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def retry_after_s(header: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header; None if it is missing or invalid."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            at = parsedate_to_datetime(header)
        except ValueError:
            return None
        seconds = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() - datetime.now(UTC).timestamp()
    return max(0.0, seconds) if math.isfinite(seconds) else None

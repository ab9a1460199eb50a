"""`TokasaurusClient`: rollouts of a Tokasaurus server with a cartridge in front of the prompt."""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from errata_protocol.errors import InvalidRequest, ServiceError

from .files import check_id

_UNKNOWN = "Cartridge config not found"


@dataclass(frozen=True, slots=True)
class Completion:
    """What a server sampled after a prompt.

    Attributes:
        ids: Tokens that were sampled.
        logprobs: Log-probability of each of ``ids``.
        finish: ``stop`` where the model ended it, ``length`` where it was cut off.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length"]


class TokasaurusClient:
    """Asks a Tokasaurus server (branch ``geoff/cartridges``) over HTTP. Close it at the end, or use it in ``with``.

    Args:
        url: Base URL of the server.
        timeout_s: Longest time of a request without a byte of its answer, in seconds.
    """

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}: give more than 0")
        self.url = url.rstrip("/")
        self._http = httpx.Client(timeout=timeout_s)

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ping(self) -> None:
        """Check that a Tokasaurus server answers.

        Raises:
            ServiceError: None does.
        """
        if self._asked("GET", "/ping") != {"message": "pong"}:
            raise ServiceError(f"what answers at {self.url} is no Tokasaurus server")

    def models(self) -> list[str]:
        """Return the names of the server's models.

        Raises:
            ServiceError: The server does not answer, or with something else.
        """
        try:
            return [str(one["id"]) for one in self._asked("GET", "/v1/models")["data"]]
        except (KeyError, TypeError) as error:
            raise ServiceError(f"the server's list of models cannot be read: {error!r}") from error

    def complete(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        cartridge: str | None = None,
        count: int = 1,
        temperature: float = 1.0,
        ignore_eos: bool = False,
    ) -> list[Completion]:
        """Return ``count`` completions of a prompt.

        Args:
            prompt_ids: Tokens of the prompt, without the cartridge's.
            max_tokens: Most tokens of a completion.
            cartridge: Id of a cartridge in the server's directory; None for none.
            count: Number of completions.
            temperature: Temperature; 0 takes the likeliest token.
            ignore_eos: Whether sampling goes on behind the model's end token.

        Raises:
            InvalidRequest: The server refuses the request; the message has its words.
            ServiceError: The server does not answer, fails, or answers with something else.
        """
        asked = {
            "model": "default",
            "prompt": list(prompt_ids),
            "max_tokens": max_tokens,
            "n": count,
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "logprobs_in_fingerprint": True,
            "cartridges": [] if cartridge is None else [{"id": check_id(cartridge), "source": "local"}],
        }
        answer = self._asked("POST", "/custom/cartridge/completions", asked)
        try:
            fingerprint = json.loads(answer["system_fingerprint"])
            ids, packed = fingerprint["completion_ids"], fingerprint["packed_chosen_logprobs"]
            finishes = [choice["finish_reason"] for choice in answer["choices"]]
            made = [
                Completion(tuple(map(int, tokens)), _unpacked(text), finish)
                for tokens, text, finish in zip(ids, packed, finishes, strict=True)
            ]
        except (KeyError, TypeError, ValueError, OverflowError, binascii.Error, struct.error) as error:
            raise ServiceError(f"the server's completions cannot be read: {type(error).__name__}: {error}") from error
        if len(made) != count or any(
            len(one.ids) != len(one.logprobs) or not one.ids or min(one.ids) < 0 for one in made
        ):
            raise ServiceError(
                f"the server sent {len(made)} completions for {count}, or tokens without log-probabilities"
            )
        return made

    def _asked(self, method: str, path: str, body: Any = None) -> Any:
        """Return the JSON that answers a request."""
        try:
            answer = self._http.request(method, f"{self.url}{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceError(f"no answer from Tokasaurus at {self.url}: {type(error).__name__}: {error}") from error
        if answer.status_code in (400, 422):
            raise _refusal(_detail(answer))
        if answer.status_code != 200:
            raise ServiceError(f"Tokasaurus failed with status {answer.status_code}: {_detail(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise ServiceError(f"what answers at {self.url} is no Tokasaurus server: no JSON") from error


def _refusal(detail: str) -> InvalidRequest:
    if _UNKNOWN in detail:
        return InvalidRequest(
            f"Tokasaurus does not know the cartridge: {detail}. Write it into the directory that the server was "
            "started with; an id must not be a path"
        )
    return InvalidRequest(f"Tokasaurus refuses the request: {detail}")


def _detail(answer: httpx.Response) -> str:
    """Return what a server says of a failure."""
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
    return detail if isinstance(detail, str) else json.dumps(detail)[:500]


def _unpacked(text: str) -> tuple[float, ...]:
    """Return the numbers of base64 text of little-endian float32."""
    raw = base64.b64decode(text, validate=True)
    return struct.unpack(f"<{len(raw) // 4}f", raw)

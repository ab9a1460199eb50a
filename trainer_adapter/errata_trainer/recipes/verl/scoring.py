"""What VeRL's rollout servers are asked beside rollouts: log-probabilities with a hint, and turns to try in forks.

A server gives the log-probabilities of a prompt in place of a generation. Entry ``p`` of ``prompt_logprobs`` is a list
with the log-probability of token ``p + 1``, so it stands where `SdpoItem.teacher_positions` point; the last entry is a
dummy. ``prompt_ids`` has the ids in the same places.

A request that fails leaves its own row out, and is counted with its `Reason`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar
from uuid import uuid4

from verl.workers.rollout.replica import TokenOutput

from errata_client.sync import run_blocking

from ...assembly.counterfactual import Calls, calls_of
from ...rollouts.rollout import SdpoItem
from .tool_calls import TurnParser

log = logging.getLogger("errata.trainer")

T = TypeVar("T")

Reason = Literal["too_long", "late", "failed", "aborted", "no_logprobs", "other_ids", "not_finite", "unread"]
"""Reason why a row has no answer.

``too_long``: the row has more tokens than the server takes, and was not sent. ``late``: the answer took longer than
`RequestLimits.generate_s`. ``failed``: the server, or the way to it, raised an exception. ``aborted``: the server gave
the request up. ``no_logprobs``: the answer has not one log-probability for each token. ``other_ids``: its
log-probabilities are those of other tokens. ``not_finite``: one of them is infinite or not a number. ``unread``: the
parser of tool calls raised an exception.
"""

SCORED = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
"""Settings of a request for a prompt's log-probabilities: those of its own tokens and of no others."""


class Client(Protocol):
    """What is used of VeRL's `LLMServerClient`.

    It has to be the plain one, `LLMServerManager.get_client`: `FullyAsyncLLMServerClient` drops the log-probabilities
    of prompts.
    """

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        """Return what a rollout server generates after a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the requests.

    Args:
        longest: Most tokens of a prompt that the server takes, one less than ``rollout.max_model_len``: it has to have
            room to generate one. None for no limit.
        at_once: Most requests at the same time.
        generate_s: Longest time of a request, in seconds; None for no limit. The request is given up on this side
            only: the server still finishes it.
    """

    longest: int | None = None
    at_once: int = 64
    generate_s: float | None = None

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ValueError(f"at_once is {self.at_once}: give at least 1")
        if self.generate_s is not None and not self.generate_s > 0:
            raise ValueError(f"generate_s is {self.generate_s}: give more than 0, or None for no limit")


NO_LIMITS = RequestLimits()


async def teacher_logprobs(
    client: Client, items: Sequence[SdpoItem], *, unscored: Counter[str], limits: RequestLimits = NO_LIMITS
) -> list[list[float] | None]:
    """Return the log-probabilities of each error site's targets with the hint before them, at temperature 1.

    Args:
        client: Client of the rollout servers.
        items: Error sites.
        unscored: Counter of the rows that could not be scored, by `Reason`.
        limits: Limits of the requests.

    Returns:
        For each site one log-probability for each of its ``target_ids``; None for a site that could not be scored.
    """

    async def read(number: int, answer: TokenOutput) -> list[float]:
        return _scores(items[number], answer.extra_fields)

    rows = [item.teacher_ids for item in items]
    return await _answers(client, rows, SCORED, read, counts=unscored, limits=limits)


async def sampled_calls(
    client: Client,
    contexts: Sequence[Sequence[int]],
    *,
    parse: Callable[[Sequence[int]], Awaitable[Mapping[str, Any]]],
    sampling_params: Mapping[str, Any],
    unsampled: Counter[str],
    limits: RequestLimits = NO_LIMITS,
) -> list[Calls | None]:
    """Sample one turn of the student after each context, and return its tool calls.

    Args:
        client: Client of the rollout servers.
        contexts: Tokens before each turn, the generation prompt included.
        parse: Function that makes an assistant message of a turn's tokens; see `TurnParser.message`.
        sampling_params: VeRL's settings of the generator, with the most tokens of a turn as ``max_tokens``.
        unsampled: Counter of the contexts without a turn, by `Reason`.
        limits: Limits of the requests.

    Returns:
        The calls of each turn whose arguments could be read, in order; None for a context without a turn.
    """

    async def read(number: int, answer: TokenOutput) -> Calls:
        try:
            return calls_of(await parse(answer.token_ids))
        except Exception as error:
            raise _Unanswered("unread", f"{type(error).__name__}: {error}") from error

    return await _answers(client, contexts, sampling_params, read, counts=unsampled, limits=limits)


class Scorer:
    """Asks the rollout servers for a caller that has no event loop, such as VeRL's trainer.

    Its requests run on one event loop, in a thread of its own. Close it at the end.

    Args:
        client: Client of the rollout servers, used by nobody else.
        turns: Parser of the student's turns.
        sampling_params: VeRL's settings of the generator for `sample`, with the most tokens of a turn as
            ``max_tokens``.
        limits: Limits of the requests.

    Attributes:
        unscored: Number of error sites that could not be scored, by `Reason`.
        unsampled: Number of contexts after which no turn could be sampled, by `Reason`.
    """

    def __init__(
        self,
        client: Client,
        turns: TurnParser,
        *,
        sampling_params: Mapping[str, Any],
        limits: RequestLimits = NO_LIMITS,
    ) -> None:
        self._client, self._turns, self._limits = client, turns, limits
        self._sampling_params = turns.stopping(sampling_params)
        self.unscored: Counter[str] = Counter()
        self.unsampled: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="errata-scorer", daemon=True)
        self._thread.start()

    def score(self, items: Sequence[SdpoItem]) -> list[list[float] | None]:
        """Return the log-probabilities of each error site's targets; see `teacher_logprobs`.

        Raises:
            RuntimeError: It is closed.
        """
        self._refuse_closed()
        return run_blocking(
            teacher_logprobs(self._client, items, unscored=self.unscored, limits=self._limits), self._loop
        )

    def sample(self, contexts: Sequence[Sequence[int]]) -> list[Calls | None]:
        """Return the tool calls of one turn after each context, as `Sample` wants them; see `sampled_calls`.

        Raises:
            RuntimeError: It is closed.
        """
        self._refuse_closed()
        sampled = sampled_calls(
            self._client,
            contexts,
            parse=self._turns.message,
            sampling_params=self._sampling_params,
            unsampled=self.unsampled,
            limits=self._limits,
        )
        return run_blocking(sampled, self._loop)

    def close(self) -> None:
        """Cancel the requests that are left and end the thread. A second call does nothing."""
        if not self._closing.is_set() and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._until_closed())

    async def _until_closed(self) -> None:
        await self._closing.wait()

    def _refuse_closed(self) -> None:
        if self._closing.is_set() or not self._thread.is_alive():
            raise RuntimeError("the scorer is closed, and asks the rollout servers nothing more")


class _Unanswered(Exception):
    """Raised when an answer cannot be used.

    Args:
        reason: Reason that is counted.
        text: Sentence that says why the answer cannot be used.
    """

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


async def _answers(
    client: Client,
    prompts: Sequence[Sequence[int]],
    sampling_params: Mapping[str, Any],
    read: Callable[[int, TokenOutput], Awaitable[T]],
    *,
    counts: Counter[str],
    limits: RequestLimits,
) -> list[T | None]:
    """Return what is read in the answer to each prompt; None for a prompt without an answer, which is counted."""
    room = asyncio.Semaphore(limits.at_once)

    async def answer(number: int, prompt: Sequence[int]) -> T | None:
        if limits.longest is not None and len(prompt) > limits.longest:
            counts["too_long"] += 1
            return None
        try:
            async with room:
                out = await _generated(client, prompt, sampling_params, limits.generate_s)
            return await read(number, out)
        except _Unanswered as error:
            if not counts[error.reason]:
                log.warning("a request to the rollout server had no answer (%s): %s", error.reason, error)
            counts[error.reason] += 1
            return None

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(number, prompt)) for number, prompt in enumerate(prompts)]
    return [task.result() for task in tasks]


async def _generated(
    client: Client, prompt: Sequence[int], sampling_params: Mapping[str, Any], generate_s: float | None
) -> TokenOutput:
    """Return the server's answer to a prompt.

    Raises:
        _Unanswered: It failed, was aborted, or took too long.
    """
    try:
        async with asyncio.timeout(generate_s) as limit:
            # Each request has an id of its own: VeRL sends those of one id to one server.
            out = await client.generate(uuid4().hex, prompt_ids=list(prompt), sampling_params=dict(sampling_params))
    except Exception as error:
        if limit.expired():
            raise _Unanswered("late", f"it took longer than generate_s={generate_s}") from error
        raise _Unanswered("failed", f"{type(error).__name__}: {error}") from error
    if out.stop_reason == "aborted":
        raise _Unanswered("aborted", "the server gave it up")
    return out


def _scores(item: SdpoItem, fields: Mapping[str, Any]) -> list[float]:
    """Return the log-probabilities of an error site's targets from the fields of an answer.

    Raises:
        _Unanswered: They are not there, or those of other tokens.
    """
    row, logprobs, ids = item.teacher_ids, fields.get("prompt_logprobs"), fields.get("prompt_ids")
    if logprobs is None or ids is None or not len(logprobs) == len(ids) == len(row):
        raise _Unanswered("no_logprobs", f"it has not one log-probability for each of the {len(row)} tokens of the row")
    try:
        scored = [entry[0] for entry in ids]
        found = [float(logprobs[position][0]) for position in item.teacher_positions]
    except (IndexError, TypeError, ValueError) as error:
        raise _Unanswered("no_logprobs", f"its entries are not lists of one number: {error}") from error
    targets = [scored[position] for position in item.teacher_positions]
    if scored[:-1] != list(row[1:]) or targets != list(item.target_ids):
        raise _Unanswered("other_ids", "its log-probabilities are those of other tokens than the row's")
    if not all(map(math.isfinite, found)):
        raise _Unanswered("not_finite", "one of the row's log-probabilities is infinite or not a number")
    return found

"""Parses chat completions of OpenAI-compatible endpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from .teacher import Answer, AnswerInvalid, RawCall, Spend, TeacherBroken, TeacherBusy, TeacherFailed, TeacherRefused


def read_completion(body: bytes, bound: Spend, price: Callable[[int, int], float]) -> Answer:
    """Return the first choice of a chat completion.

    Args:
        body: Body of the reply, JSON.
        bound: The most that the call can have cost, which is its cost where the endpoint does not tell.
        price: Returns the US dollars for a number of prompt tokens and a number of answered tokens, where the endpoint
            tells no cost.

    Raises:
        AnswerInvalid: It is none.
        TeacherFailed: It is an error in the clothes of a success, as some routers send it.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise AnswerInvalid(f"the reply is no JSON: {body[:80]!r}") from error
    if not isinstance(data, Mapping):
        raise AnswerInvalid(f"the reply is no object: {body[:80]!r}")
    if data.get("error") and not data.get("choices"):
        raise _error(data["error"])
    match data.get("choices"):
        case [{"message": Mapping() as message, **choice}, *_]:
            pass
        case _:
            raise AnswerInvalid(f"the reply has no choice with a message: {body[:80]!r}")
    reason = choice.get("finish_reason")
    if message.get("refusal"):
        reason = "refusal"
    model = data.get("model")
    return Answer(
        _text(message.get("content")),
        tuple(_calls(message.get("tool_calls"))),
        reason if isinstance(reason, str) else "",
        _spent(data.get("usage"), bound, price),
        model if isinstance(model, str) else "",
    )


def _error(error: Any) -> TeacherFailed:
    code = error.get("code") if isinstance(error, Mapping) else None
    message = f"the reply is an error: {json.dumps(error)[:200]}"
    if code == 429:
        return TeacherBusy(message)
    if isinstance(code, int) and code >= 500:
        return TeacherBroken(message)
    return TeacherRefused(message)


def _text(content: Any) -> str:
    """Return the text of a message; some endpoints send it in parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def _calls(tool_calls: Any) -> list[RawCall]:
    if not tool_calls:
        return []
    if not isinstance(tool_calls, list):
        raise AnswerInvalid(f"tool_calls is no list: {tool_calls!r:.80}")
    calls = []
    for call in tool_calls:
        match call:
            case {"function": {"name": str(name), **function}}:
                arguments = function.get("arguments", "")
                # Servers that parse for us send an object in place of its text.
                text = arguments if isinstance(arguments, str) else json.dumps(arguments)
                calls.append(RawCall(name, text))
            case _:
                raise AnswerInvalid(f"a tool call has no function with a name: {call!r:.80}")
    return calls


def _spent(usage: Any, bound: Spend, price: Callable[[int, int], float]) -> Spend:
    counts = usage if isinstance(usage, Mapping) else {}
    prompt, answered = counts.get("prompt_tokens"), counts.get("completion_tokens")
    tokens, usd = bound.tokens, bound.usd
    if _is_count(prompt) and _is_count(answered):
        tokens, usd = prompt + answered, price(prompt, answered)
    cost = counts.get("cost")
    if isinstance(cost, int | float) and not isinstance(cost, bool) and math.isfinite(cost) and cost >= 0:
        usd = float(cost)
    return Spend(usd, tokens)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

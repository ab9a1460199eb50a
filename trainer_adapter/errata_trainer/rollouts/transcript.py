"""Builds a `Rollout` from a trainer's record of an episode (token ids, messages) and the environment's deliveries.

The transcript decides what the student saw. The journal may have more: a trainer drops a tool result that does not fit,
after the tool ran. It may have less: calls of unknown tools, or with wrong argument names, do not reach the
environment. A tool call that cannot be parsed is no call, and ends a rollout without an error message.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from errata_protocol.markers import HINT_TEMPLATE_KEYS, ErrorKind, ErrorSite
from errata_protocol.rollouts import ErrorMarker

from .deliveries import Delivery
from .matching import Asked, match
from .rollout import Call, Rollout, Turn

MALFORMED = ""
"""Name of the call that stands for a tool call that could not be parsed (``opening`` of `build_rollout`)."""

MALFORMED_KEY = "tool.malformed"
"""Its hint template key; the only one that no environment gives."""

_MAX_MESSAGE = 300  # as ErrorSite.message
_THINKING = re.compile(r"<think>.*?</think>\s*", re.DOTALL)


def build_rollout(
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    mask: Sequence[int] | None,
    messages: Sequence[Mapping[str, Any]],
    deliveries: Sequence[Delivery] = (),
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    eid: str | None = None,
    environment: str | None = None,
    reward: float | None = None,
    logprobs: Sequence[float | None] | None = None,
    end_ids: Collection[int] | None = None,
    truncated: bool | None = None,
    lost: str | None = None,
    task: Mapping[str, Any] | None = None,
    opening: str | None = None,
) -> Rollout:
    """Build the `Rollout` of one episode.

    Turns are the maximal runs of 1 in ``mask``; the k-th is the k-th assistant message. A call's ``t`` and marker are
    those of its delivery. A call that never reached the environment gets a marker of ours, from the tool result
    that the trainer answered with (``error_site.source`` is ``message``) or from ``tools`` (``action``).

    Args:
        prompt_ids: Tokens of the prompt as the student saw them, without padding.
        completion_ids: Raw tokens of the completion: without padding, and not cut by a trainer's masks.
        mask: 1 for each of ``completion_ids`` that was sampled; None means all.
        messages: Decoded messages of the completion: ``{"role": "assistant", "content", "tool_calls"}`` and
            ``{"role": "tool", "name", "content"}``; other roles and what came before are not looked at. A tool
            message may name its call in ``tool_call_id``; without, results of a turn may come in any order.
        deliveries: Tool calls in the environment's record, in order; those of another episode than ``eid`` are left
            out.
        tools: Descriptions of the tools the student has, JSON schema, bare or under ``function``; None if unknown.
        eid: Key of the episode; None without a journal.
        environment: Name of the environment.
        reward: Reward of the whole episode.
        logprobs: Log-probability of each of ``completion_ids``. If a sampled token has none (None or NaN, as vLLM may
            give), the rollout has none.
        end_ids: Tokens that end a turn. With them, a completion that ends with another token is taken as truncated.
        truncated: Whether the completion was cut off; None decides it by ``end_ids``.
        lost: Reason of the infrastructure failure that ended the episode; None if there was none.
        task: The task, as given to ``reset``.
        opening: Text with which a tool call opens, e.g. ``<tool_call>``. With it, a finished turn that holds it but
            no call gets a call named `MALFORMED`, marked ``invalid_arguments``; without, it is a turn without calls.

    Returns:
        The record.

    Raises:
        ValueError: Lengths differ, or there are not as many runs as assistant messages.
    """
    if logprobs is not None and any(one is None or math.isnan(one) for one in logprobs):
        known = [one is not None and not math.isnan(one) for one in logprobs]
        needed = [True] * len(known) if mask is None else [bool(one) for one in mask]
        if len(needed) == len(known) and any(need and not have for need, have in zip(needed, known, strict=True)):
            logprobs = None
    sampled = [1] * len(completion_ids) if mask is None else [int(bool(one)) for one in mask]
    if len(sampled) != len(completion_ids):
        raise ValueError(f"the mask has {len(sampled)} entries for {len(completion_ids)} completion ids: pad neither")
    if logprobs is not None and len(logprobs) != len(completion_ids):
        raise ValueError(f"{len(logprobs)} log-probabilities for {len(completion_ids)} completion ids")
    if truncated is None:
        truncated = bool(
            end_ids is not None and len(completion_ids) and not (sampled[-1] and completion_ids[-1] in end_ids)
        )
    spans = list(_runs(sampled))
    answers = _assistant_messages(messages)
    if len(answers) != len(spans) and not (not spans and len(answers) == 1):  # nothing sampled still is a message
        raise ValueError(
            f"{len(spans)} runs of sampled tokens, {len(answers)} assistant messages: "
            "give the raw mask and the messages of the completion only"
        )
    answers = answers[: len(spans)]
    own = [one for one in deliveries if one.eid is None or eid is None or one.eid == eid]
    calls = _calls(answers, own, None if tools is None else _schemas(tools))
    if opening is not None:
        for index, (message, _) in enumerate(answers):
            unfinished = truncated and index == len(answers) - 1
            if not calls[index] and not unfinished and opening in text_of(message.get("content")):
                calls[index] = (_malformed(),)
    return Rollout(
        prompt_ids=tuple(map(int, prompt_ids)),
        completion_ids=tuple(map(int, completion_ids)),
        mask=tuple(sampled),
        turns=tuple(Turn(i, start, stop, calls[i]) for i, (start, stop) in enumerate(spans)),
        eid=eid,
        environment=environment,
        reward=reward,
        logprobs=None
        if logprobs is None
        else tuple(float(p) if m and p is not None else 0.0 for p, m in zip(logprobs, sampled, strict=True)),
        truncated=truncated,
        lost=lost,
        task=dict(task or {}),
    )


def unmarked_errors(
    rollout: Rollout, messages: Sequence[Mapping[str, Any]], deliveries: Sequence[Delivery] = ()
) -> int:
    """Return the number of tool results that are errors of the trainer's tool loop but have no error marker.

    Errors that a trainer made are recognised by its words (`build_rollout`). Another release may have other words: then
    failing turns are no longer found, and this number says so.

    Args:
        rollout: Rollout made of the messages.
        messages: Messages of the completion.
        deliveries: Tool calls in the environment's record.
    """
    printed = {(one.name, one.text) for one in deliveries if one.t is not None}
    count = 0
    for turn, (_, results) in zip(rollout.turns, _assistant_messages(messages), strict=False):
        errors = sum(_is_error(result, printed) for result in results)
        count += max(0, errors - sum(call.t is None and call.marker is not None for call in turn.calls))
    return count


def tool_call_opening(tokenizer: Any) -> str | None:
    """Return the text that opens a tool call, from the tokenizer's ``response_template``; None if it has none."""
    template = getattr(tokenizer, "response_template", None)
    fields = template.get("fields") if isinstance(template, Mapping) else None
    calls = fields.get("tool_calls") if isinstance(fields, Mapping) else None
    opening = calls.get("open") if isinstance(calls, Mapping) else None
    return opening if isinstance(opening, str) else None


def trainer_error(content: Any) -> str | None:
    """Return the message of a tool result that is an error of the trainer, ``{'error': text}``; None for other
    results."""
    text = text_of(content).strip()
    if not (text.startswith("{") and text.endswith("}") and "error" in text[:10]):
        return None
    for read in (ast.literal_eval, json.loads):
        try:
            value = read(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(value, dict) and list(value) == ["error"]:
            return str(value["error"])
    return None


def _runs(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    at = 0
    for value, group in groupby(mask):
        length = sum(1 for _ in group)
        if value:
            yield at, at + length
        at += length


def _assistant_messages(
    messages: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Return each assistant message with the tool results that follow it."""
    answers: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = []
    for message in messages:
        if message.get("role") == "assistant":
            answers.append((message, []))
        elif message.get("role") == "tool" and answers:
            answers[-1][1].append(message)
    return answers


def _calls(
    answers: Sequence[tuple[Mapping[str, Any], list[Mapping[str, Any]]]],
    deliveries: Sequence[Delivery],
    schemas: Mapping[str, Mapping[str, Any]] | None,
) -> list[tuple[Call, ...]]:
    asked_of = [[parsed_call(call) for call in message.get("tool_calls") or ()] for message, _ in answers]
    results_known = any(results for _, results in answers)
    printed = {(one.name, one.text) for one in deliveries if one.t is not None}
    turns = []
    for index, (_, results) in enumerate(answers):
        executed = bool(results) or (not results_known and index < len(answers) - 1)
        calls_made = tuple(asked_of[index]) if executed else ()
        most = min(len(calls_made), len(results)) if results_known else len(calls_made)
        errors = sum(_is_error(result, printed) for result in results)
        turns.append(Asked(calls_made, _texts(results) if results_known else None, most, min(errors, most)))
    matches = match(turns, deliveries)
    built = []
    for (message, results), asked, turn, found in zip(answers, asked_of, turns, matches, strict=True):
        delivered = [None if at is None else deliveries[at] for at in found] or [None] * len(asked)
        answers_of = _answers(message, results, asked, delivered)
        calls = []
        for (name, arguments), delivery, answer in zip(asked, delivered, answers_of, strict=True):
            marker = None
            if delivery is not None:
                marker = delivery.marker or _refused(delivery)
            elif turn.calls:
                marker = _own_marker(name, arguments, answer, schemas)
            calls.append(Call(name, dict(arguments or {}), None if delivery is None else delivery.t, marker))
        built.append(tuple(calls))
    return built


def _is_error(result: Mapping[str, Any], printed: Collection[tuple[str, str | None]]) -> bool:
    """Return whether the trainer made this result itself; output of a command that looks the same does not count."""
    text = text_of(result.get("content"))
    return trainer_error(text) is not None and (str(result.get("name", "")), text) not in printed


def _texts(results: Sequence[Mapping[str, Any]]) -> frozenset[tuple[str, str]]:
    found = set()
    for one in results:
        name, text = str(one.get("name", "")), text_of(one.get("content"))
        found |= {(name, text), (name, trainer_error(text) or text)}
    return frozenset(found)


def parsed_call(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Return name and arguments of a parsed tool call; arguments that are no object are None."""
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return str(call.get("name", "")), None
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as the wire of chat completions has it
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return str(function.get("name", "")), arguments if isinstance(arguments, Mapping) else None


def _answers(
    message: Mapping[str, Any],
    results: list[Mapping[str, Any]],
    asked: Sequence[tuple[str, Any]],
    delivered: Sequence[Delivery | None],
) -> list[str | None]:
    """Return the tool result of each call: matched by id, else by text, else by name, else by order."""
    left = list(results)
    answers: list[str | None] = [None] * len(asked)

    def take(index: int, fits: Any) -> None:
        if answers[index] is None:
            for at, result in enumerate(left):
                if fits(result):
                    answers[index] = text_of(left.pop(at).get("content"))
                    return

    ids = [call.get("id") for call in message.get("tool_calls") or ()]
    for index, call_id in enumerate(ids):
        if call_id is not None:
            take(index, lambda result, call_id=call_id: result.get("tool_call_id") == call_id)
    for index, delivery in enumerate(delivered):
        if delivery is not None and delivery.text is not None:
            take(index, lambda result, text=delivery.text: text_of(result.get("content")) == text)
    # An error that a trainer made answers a call that delivered nothing.
    for wanted in (False, True):
        for index, (name, _) in enumerate(asked):
            delivery = delivered[index]
            if (delivery is not None and delivery.t is not None) is wanted:
                take(
                    index,
                    lambda result, name=name, wanted=wanted: (
                        result.get("name") == name and (trainer_error(result.get("content")) is None) is wanted
                    ),
                )
    for index, (name, _) in enumerate(asked):
        take(index, lambda result, name=name: result.get("name") == name)
    for index in range(len(asked)):
        take(index, lambda result: True)
    return answers


_UNKNOWN_TOOL = re.compile(r"^(Tool .* not found\.|Unsupported tool call type: .*)$", re.DOTALL)
_WRONG_ARGUMENTS = re.compile(
    r"got an unexpected keyword argument|missing \d+ required (positional|keyword-only) argument"
    r"|got multiple values for|argument after \*\* must be a mapping|takes \d+ positional argument"
    r"|keywords must be strings"
)


def _own_marker(
    name: str,
    arguments: Mapping[str, Any] | None,
    answer: str | None,
    schemas: Mapping[str, Mapping[str, Any]] | None,
) -> ErrorMarker | None:
    """Return the marker for a call that never reached the environment; None if the reason cannot be determined."""
    error = None if answer is None else trainer_error(answer)
    if error is not None and _UNKNOWN_TOOL.search(error):
        return _marker(ErrorKind.TOOL_NOT_FOUND, error, field="tool")
    if error is not None and _WRONG_ARGUMENTS.search(error):
        return _marker(ErrorKind.INVALID_ARGUMENTS, error)
    if schemas is None or (answer is not None and error is None):
        return None  # a result that is no error came from somewhere
    if name not in schemas:
        return _marker(ErrorKind.TOOL_NOT_FOUND, error or f"Tool {name} not found.", field="tool", source="action")
    if wrong := _wrong_names(arguments, schemas[name]):
        return _marker(ErrorKind.INVALID_ARGUMENTS, error or wrong, source="action")
    return None


def _wrong_names(arguments: Mapping[str, Any] | None, schema: Mapping[str, Any]) -> str | None:
    """Return what is wrong with the argument names of a call, or None. The environment checks types."""
    if arguments is None:
        return "the arguments are not an object"
    known = schema.get("properties") or {}
    for name in arguments:
        if name not in known:
            return f"got an unexpected argument {name!r}"
    missing = [name for name in schema.get("required") or () if name not in arguments]
    return f"missing required argument {missing[0]!r}" if missing else None


def _refused(delivery: Delivery) -> ErrorMarker | None:
    """Return the marker of a call that the environment refused as the student's fault; other failures have none."""
    if delivery.t is not None or delivery.code != "VALIDATION_ERROR":
        return None
    return _marker(ErrorKind.INVALID_ARGUMENTS, delivery.text or "the environment refused the arguments")


def _malformed() -> Call:
    text = "the tool call could not be parsed"
    marker = _marker(ErrorKind.INVALID_ARGUMENTS, text, source="action")
    return Call(MALFORMED, {}, None, marker.model_copy(update={"hint_template_key": MALFORMED_KEY}))


def _marker(kind: ErrorKind, text: str, *, field: str | None = None, source: Any = "message") -> ErrorMarker:
    site = ErrorSite(action_field=field, source=source, message=text[:_MAX_MESSAGE])
    return ErrorMarker(
        error_kind=kind.value, hint_template_key=HINT_TEMPLATE_KEYS[kind], severity="error", error_site=site
    )


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        found[str(function["name"])] = function.get("parameters") or {}
    return found


def without_thinking(text: str) -> str:
    """Return a turn's text without its reasoning, also if the prompt opened it or the turn was cut off in it.

    Args:
        text: Text of the turn.
    """
    text = _THINKING.sub("", text)
    if "</think>" in text:
        text = text.rsplit("</think>", 1)[1]
    return text.split("<think>", 1)[0].strip()


def text_of(content: Any) -> str:
    """Return a message's text; of content in blocks, the text blocks.

    Args:
        content: Content of a message; None for none.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(str(block.get("text", "")) for block in content if isinstance(block, Mapping))
    return "" if content is None else str(content)

"""`converse`: a student and an environment in turn, until one of them ends it, with the token ids that a trainer needs.

It is asynchronous, so that many conversations run side by side on one event loop, and it knows no tokenizer, model or
trainer: a recipe adapts its generator to `Student`. What the student reads of a failing call is worded as TRL's tool
loop words it, so that `build_rollout` reads both.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from errata_protocol.errors import InvalidRequest
from errata_protocol.markers import HINT_TEMPLATE_KEYS, ErrorKind

from ..rollouts.transcript import MALFORMED_KEY, trainer_error
from .awaited import AwaitedRunner
from .record import Played

End = Literal["no_call", "done", "turns", "length", "lost"]
"""Why a conversation ended: the student called no tool, the environment ended the episode, the student had all its
turns, the completion was full, or the episode was lost."""


@dataclass(frozen=True, slots=True)
class StudentTurn:
    """What a student said in one turn.

    Attributes:
        ids: Tokens that were sampled, the end of the turn with them.
        message: Decoded message: ``{"role": "assistant", "content", "tool_calls"}``, with calls as chat completions
            have them; their arguments may be an object or its text.
        logprobs: Log-probability of each of ``ids`` when it was sampled; None if the generator does not give them.
        cut: Whether generation stopped at a limit, in the middle of the turn.
    """

    ids: Sequence[int]
    message: Mapping[str, Any]
    logprobs: Sequence[float] | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Heard:
    """Tokens between two turns of a student.

    Attributes:
        ids: Tokens of the messages in the student's chat template, with what opens its next turn.
        replaced: Number of tokens at the end of the turn before that are left out, because ``ids`` begins with them.
    """

    ids: Sequence[int]
    replaced: int = 0


class Student(Protocol):
    """A model with its tokenizer and its chat template, as one conversation uses it.

    It keeps the tokens of the conversation so far, and never encodes again what was sampled.
    """

    async def begin(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """Return the tokens of the prompt, with what opens the student's first turn."""
        ...

    async def turn(self, room: int | None) -> StudentTurn:
        """Take a turn.

        Args:
            room: Most tokens to sample; None for no limit.
        """
        ...

    async def hear(self, messages: Sequence[Mapping[str, Any]]) -> Heard:
        """Return the tokens of the messages that answer the turn before.

        Args:
            messages: Results of the turn's calls, in order: ``{"role": "tool", "name", "content"}``.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """When a conversation ends at the latest; None is no limit.

    Args:
        turns: Most turns of the student. The calls of its last turn are still made.
        completion_tokens: Most tokens after the prompt.
        prompt_tokens: Most tokens of the prompt; a longer one is refused.
    """

    turns: int | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("turns", "completion_tokens", "prompt_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: give at least 1, or None for no limit")


@dataclass(slots=True)
class Conversation:
    """One row of a batch: what a student and an environment said; the names are those of `Transcripts`.

    Attributes:
        prompt: Messages of the prompt, with the text of ``reset``.
        prompt_ids: Tokens of the prompt; empty if the episode was lost before the student was asked.
        completion_ids: Tokens after the prompt, as they were sampled or heard.
        mask: 1 for each of ``completion_ids`` that was sampled, 0 for the others.
        logprobs: Log-probability of each of ``completion_ids`` when it was sampled, 0 for the others; None if the
            generator did not give them for every turn.
        messages: Messages of the completion: the student's turns, and the results of their calls. Results behind the
            last turn have no tokens. Those that would not fit are left out, as TRL does.
        end: Reason of the end.
        reward: Reward of the episode; None if it was lost.
    """

    prompt: list[dict[str, Any]]
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    end: End = "lost"
    reward: float | None = None


async def converse(
    student: Student,
    runner: AwaitedRunner,
    prompt: Sequence[Mapping[str, Any]],
    task: Mapping[str, Any],
    *,
    tools: Collection[str] | None = None,
    limits: ConversationLimits | None = None,
) -> Conversation:
    """Play an episode with a student, finish it, and return what was said. The runner stays open.

    An infrastructure failure or a deadline of the runner ends the conversation as ``lost``, and is no text that a
    student is trained on: leave the row out. What the student raises is raised, and the episode is not finished.

    Args:
        student: The student.
        runner: Runner that plays the episode, and that the caller closes.
        prompt: Messages of the prompt; the text of ``reset`` is appended to the last one.
        task: Arguments of ``reset``.
        tools: Names of the tools that the student may call; None is all that the environment has.
        limits: Limits at which the conversation ends; default: none.

    Raises:
        InvalidRequest: The environment does not take the task, or the prompt has too many tokens.
        CapacityReached: The server has no room for the runner's first session.
        ValueError: The student gave not as many log-probabilities as tokens.
    """
    limits = limits or ConversationLimits()
    opening = await runner.reset(task)
    if runner.lost is not None:
        return Conversation([dict(message) for message in prompt])
    made = Conversation(with_opening(prompt, opening))
    made.prompt_ids = list(await student.begin(made.prompt))
    if limits.prompt_tokens is not None and len(made.prompt_ids) > limits.prompt_tokens:
        raise InvalidRequest(
            f"the prompt of the task {dict(task)!r:.200} has {len(made.prompt_ids)} tokens, and "
            f"prompt_tokens={limits.prompt_tokens}: raise the limit, or leave the task out"
        )
    allowed = frozenset(runner.environment.tools if tools is None else tools)
    made.end = await _talk(made, student, runner, allowed, limits)
    made.reward = await runner.finish()
    if runner.lost is not None:
        made.end = "lost"
    return made


async def _talk(
    made: Conversation, student: Student, runner: AwaitedRunner, tools: Collection[str], limits: ConversationLimits
) -> End:
    turns = 0
    while True:
        room = None if limits.completion_tokens is None else limits.completion_tokens - len(made.completion_ids)
        if room is not None and room <= 0:
            return "length"
        turn = await student.turn(room)
        turns += 1
        is_whole = _say(made, turn, room)
        calls = turn.message.get("tool_calls") or ()
        if not is_whole or not calls:
            return "no_call" if is_whole and not turn.cut else "length"
        results = [await answer_call(runner, tools, call) for call in calls]
        end = _end(runner, turns, limits)
        if end is not None:
            made.messages += results
            return end
        heard = await student.hear(results)
        if not _hear(made, heard, limits):
            return "length"
        made.messages += results


def _end(runner: AwaitedRunner, turns: int, limits: ConversationLimits) -> End | None:
    if runner.lost is not None:
        return "lost"
    if runner.done:
        return "done"
    return "turns" if limits.turns is not None and turns >= limits.turns else None


def _say(made: Conversation, turn: StudentTurn, room: int | None) -> bool:
    """Add a turn, cut to the room that there is; return whether all of it is there.

    The calls of a turn that had to be cut are not made: they may stand in the tokens that were left out.
    """
    if turn.logprobs is not None and len(turn.logprobs) != len(turn.ids):
        raise ValueError(f"{len(turn.logprobs)} log-probabilities for the {len(turn.ids)} tokens of a turn")
    ids = list(turn.ids[:room])
    made.completion_ids += ids
    made.mask += [1] * len(ids)
    if made.logprobs is not None:
        made.logprobs = None if turn.logprobs is None else made.logprobs + list(turn.logprobs[:room])
    is_whole = len(ids) == len(turn.ids)
    if ids:  # a turn without tokens has no place among the runs of sampled tokens
        made.messages.append({k: v for k, v in turn.message.items() if is_whole or k != "tool_calls"})
    return is_whole


def _hear(made: Conversation, heard: Heard, limits: ConversationLimits) -> bool:
    """Add the tokens between two turns; return False, and add nothing, if they do not fit."""
    kept = len(made.completion_ids) - heard.replaced
    if limits.completion_tokens is not None and kept + len(heard.ids) > limits.completion_tokens:
        return False
    made.completion_ids[kept:] = heard.ids
    made.mask[kept:] = [0] * len(heard.ids)
    if made.logprobs is not None:
        made.logprobs[kept:] = [0.0] * len(heard.ids)
    return True


async def answer_call(runner: AwaitedRunner, tools: Collection[str], call: Mapping[str, Any]) -> dict[str, Any]:
    """Make a call and return the message that answers it. Errors of the student's are worded as TRL words them."""
    read = read_call(tools, call)
    if not isinstance(read, tuple):
        return read
    try:
        return tool_message(read[0], await runner.call(*read))
    except TypeError as error:
        return tool_message(read[0], error_text(str(error)))


def read_call(tools: Collection[str], call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | dict[str, Any]:
    """Return name and arguments of a student's call, or the message that answers one that cannot be made.

    Args:
        tools: Names of the tools that the student may call.
        call: The call, as chat completions have it; its arguments may be an object or its text.
    """
    kind = call.get("type", "function")
    if kind != "function":
        return tool_message(call.get("name", "unknown"), error_text(f"Unsupported tool call type: {kind}"))
    function = call.get("function") or {}
    name, arguments = function.get("name"), _decoded(function.get("arguments"))
    if not isinstance(name, str) or name not in tools:
        return tool_message(name, error_text(f"Tool {name} not found."))
    if not isinstance(arguments, Mapping):
        kind = type(arguments).__name__
        return tool_message(name, error_text(f"{name}() argument after ** must be a mapping, not {kind}"))
    return name, arguments


@dataclass(frozen=True, slots=True)
class TurnError:
    """A call of a turn that failed.

    Attributes:
        tool: Name of the tool as the student gave it; empty for a call that could not be read.
        error_kind: Kind of the error.
        hint_template_key: Key of the hint template that fits.
        played: Record of the call; None if it never reached the environment.
    """

    tool: str
    error_kind: str
    hint_template_key: str
    played: Played | None = None


def turn_errors(
    played: Sequence[Played], results: Sequence[Mapping[str, Any]], tools: Collection[str], unread: int = 0
) -> list[TurnError]:
    """Return the failed calls of a turn, those that never reached the environment first. Warnings are none.

    Args:
        played: Calls of the turn in the environment's record.
        results: Messages that answer the turn's calls.
        tools: Names of the tools that the student may call.
        unread: Number of calls that could not be read.
    """
    found = []
    printed = {(one.tool, one.text) for one in played if one.t is not None}
    for result in results:
        name = result.get("name")
        if trainer_error(result["content"]) is not None and (name, result["content"]) not in printed:
            kind = ErrorKind.INVALID_ARGUMENTS if name in tools else ErrorKind.TOOL_NOT_FOUND
            found.append(TurnError(str(name), kind.value, HINT_TEMPLATE_KEYS[kind]))
    for one in played:
        if one.t is not None and one.marker is not None and one.marker.severity != "warning":
            found.append(TurnError(one.tool, one.marker.error_kind, one.marker.hint_template_key or "", one))
    return found + [TurnError("", ErrorKind.INVALID_ARGUMENTS.value, MALFORMED_KEY)] * unread


def _decoded(arguments: Any) -> Any:
    if isinstance(arguments, str):  # as the wire of chat completions has it
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
    return arguments


def error_text(text: str) -> str:
    """Return what a student reads of an error of its own call, as TRL words it."""
    return str({"error": text})


def tool_message(name: Any, text: str) -> dict[str, Any]:
    """Return the message with the result of a call."""
    return {"role": "tool", "name": name, "content": text}


def with_opening(prompt: Sequence[Mapping[str, Any]], opening: str) -> list[dict[str, Any]]:
    """Return a prompt with the text of ``reset`` behind its last message, as TRL has it."""
    messages = [dict(message) for message in prompt]
    if not messages:
        raise InvalidRequest("the prompt has no message that the text of reset could be appended to")
    content = messages[-1].get("content")
    added: Any = [{"type": "text", "text": opening}] if isinstance(content, list) else opening
    messages[-1]["content"] = added if content is None else content + added
    return messages

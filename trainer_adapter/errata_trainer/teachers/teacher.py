"""The interface of teachers: prompts, answers and failures.

A teacher that fails is a missing vote. Failures have types, so that they can be counted, and so that calls that may
have cost money are distinguished from those that cannot have.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from errata_protocol.errors import InvalidRequest, ServiceError

from .actions import Action, ToolCall, Unusable

if TYPE_CHECKING:
    from .budget import Budget


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a teacher reads at a state.

    Attributes:
        messages: Messages in the form of chat requests: tool calls have ids and their arguments as JSON text.
        tools: Descriptions of the tools, in the form of chat requests.
        source: Source of the messages: ``agent_text``, the exact payloads; ``transcript``, what the trainer kept.
        version: Version of the way in which the prompt is made.
        cwd: Absolute working directory at the state; None if unknown.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: Literal["agent_text", "transcript"] = "transcript"
    version: str = ""
    cwd: str | None = None

    @property
    def state_digest(self) -> str:
        """sha256 of everything that is read up to the state. Fields of payloads that are not read do not count."""
        return _sha256(self.messages)

    @property
    def tools_digest(self) -> str:
        """sha256 of the tools' descriptions."""
        return _sha256(self.tools)


@dataclass(frozen=True, slots=True)
class Spend:
    """Money and tokens.

    Attributes:
        usd: US dollars.
        tokens: Tokens of prompt and answer together.
    """

    usd: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class RawCall:
    """A tool call as received: its arguments are text, JSON or not."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's answer as received. This is what is cached.

    Attributes:
        text: Text of the answer; empty if it has none.
        calls: Tool calls of the answer.
        finish_reason: Finish reason that the endpoint reported, e.g. ``stop``, ``tool_calls`` or ``length``.
        spent: Cost of the call.
        model: Model name that the endpoint reported.
    """

    text: str = ""
    calls: tuple[RawCall, ...] = ()
    finish_reason: str = ""
    spent: Spend = field(default_factory=Spend)
    model: str = ""

    def action(self) -> Action:
        """Return the answer as an `Action`.

        Raises:
            Unusable: ``truncated``, ``refused`` or ``invalid_json``.
        """
        if self.finish_reason == "length":
            raise Unusable("truncated", "the answer was cut off: raise max_tokens")
        if self.finish_reason in ("content_filter", "refusal"):
            raise Unusable("refused", "the model refused to answer")
        return Action(tuple(ToolCall(call.name, _arguments(call)) for call in self.calls), self.text)

    def as_json(self) -> dict[str, Any]:
        """Return a form that `from_json` accepts."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Answer:
        """Return the answer from the form of `as_json`.

        Raises:
            ValueError: It is none.
        """
        match data:
            case {
                "text": str(text),
                "calls": list(calls),
                "finish_reason": str(finish_reason),
                "spent": {"usd": float() | int() as usd, "tokens": int(tokens)},
                "model": str(model),
            } if all(isinstance(call, dict) for call in calls):
                raw = tuple(RawCall(str(call.get("name")), str(call.get("arguments"))) for call in calls)
                return cls(text, raw, finish_reason, Spend(float(usd), tokens), model)
        raise ValueError("no answer of a teacher")


class Teacher(Protocol):
    """A model that can be asked for an action."""

    @property
    def name(self) -> str:
        """Name of the teacher, unique in its pool."""
        ...

    @property
    def family(self) -> str:
        """Name of the model family; teachers of one family are not independent."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """All that determines the answer beside the prompt (model, sampling), as JSON values. Part of cache keys."""
        ...

    def check(self, budget: Budget) -> None:
        """Raise ValueError if the teacher cannot keep within a budget.

        Raises:
            ValueError: It cannot tell beforehand what a call costs at most.
        """
        ...

    async def ask(self, prompt: Prompt, budget: Budget) -> Answer:
        """Return an answer, within the teacher's own deadline.

        Args:
            prompt: Prompt that the teacher reads.
            budget: Budget in which each call that can cost something first reserves its upper bound.

        Raises:
            TeacherFailed: There is none.
        """
        ...

    async def aclose(self) -> None:
        """Close connections, on the loop that used them."""
        ...


class TeacherFailed(ServiceError):
    """Base class: a teacher has no answer.

    Attributes:
        reason: Word for the kind of failure, for counting.
        passes: Whether asking again can help.
        retry_after_s: Seconds to wait before asking again, if the endpoint named them; otherwise None.
        free: Whether the call cannot have cost anything.
    """

    reason: ClassVar[str] = "failed"
    passes: ClassVar[bool] = False
    free: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TeacherUnreachable(TeacherFailed):
    """No connection could be made."""

    reason, passes, free = "unreachable", True, True


class TeacherHungUp(TeacherFailed):
    """The connection broke after the request was sent; the call may have cost money."""

    reason, passes = "hung_up", True


class TeacherBusy(TeacherFailed):
    """429: too many requests."""

    reason, passes, free = "rate_limited", True, True


class TeacherBroken(TeacherFailed):
    """A status of 500 or above, or 408."""

    reason, passes, free = "server_error", True, True


class TeacherRefused(TeacherFailed):
    """Any other status: the request, the key or the model is wrong."""

    reason, free = "refused_request", True


class TeacherTimeout(TeacherFailed):
    """The deadline of the call passed."""

    reason = "timeout"


class AnswerInvalid(TeacherFailed):
    """The reply is not a chat completion, or is incomplete."""

    reason = "invalid_answer"


class BudgetSpent(TeacherFailed):
    """The call was not made: the most it can cost exceeds what is left."""

    reason, free = "budget", True


class KeyMissing(InvalidRequest):
    """The environment variable of the API key is missing or empty."""


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _arguments(call: RawCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise Unusable("invalid_json", f"arguments of {call.name!r:.80} are no JSON: {call.arguments!r:.80}") from error
    if not isinstance(arguments, dict):
        raise Unusable("wrong_arguments", f"arguments of {call.name!r:.80} are no object: {call.arguments!r:.80}")
    return arguments

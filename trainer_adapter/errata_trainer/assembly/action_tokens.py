"""Token ids of actions: where the action of a student's turn begins, and how the student's chat template writes an
action that another model chose."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..hints import ChatTokenizer

_BEFORE = [{"role": "user", "content": "dummy"}]


def action_ids(
    tokenizer: ChatTokenizer, message: Mapping[str, Any], *, end_id: int | None, **template: Any
) -> tuple[int, ...]:
    """Return the token ids of an assistant message in the student's chat template, its end-of-turn token included.

    Args:
        tokenizer: Tokenizer of the student.
        message: Assistant message, as `errata_trainer.teachers.message_of` makes it.
        end_id: Token that ends a turn; what the template renders after it is cut off. None cuts off nothing.
        **template: Further arguments of ``apply_chat_template``, the same as the trainer's.

    Raises:
        ValueError: The template renders a conversation differently once it goes on, so that the message has no
            tokens of its own.
    """

    def render(conversation: list[dict[str, Any]], *, prompt: bool) -> str:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt, **template)
        return str(text)

    before = render(_BEFORE, prompt=True)
    whole = render([*_BEFORE, dict(message)], prompt=False)
    if not whole.startswith(before):
        raise ValueError(
            "this chat template renders an assistant's message otherwise than its generation prompt begins it"
        )
    context = tokenizer.encode(before, add_special_tokens=False)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    if ids[: len(context)] != context:
        raise ValueError("this chat template has no token boundary behind its generation prompt")
    own = ids[len(context) :]
    return tuple(own[: own.index(end_id) + 1] if end_id is not None and end_id in own else own)


@dataclass(frozen=True, slots=True)
class OwnAction:
    """The start of the action in a student's turn.

    Attributes:
        start: Number of the turn's tokens before the action: reasoning and, before a call, prose.
        lead: Text between that token boundary and the action; empty where a token begins with the action.
    """

    start: int
    lead: str


class ActionTokens:
    """Splits a student's turn into reasoning, prose and action, and renders other models' actions as its continuation.

    Both sides of a preference pair then share the student's own reasoning and prose, and differ in the action only. The
    tokenizer's ``response_template`` (transformers), by which the trainer parses turns, says where reasoning and tool
    calls are. Without one, a turn is an action from its first token on.

    Args:
        tokenizer: Tokenizer of the student.
        end_ids: Tokens that end a turn.
        **template: Further arguments of ``apply_chat_template``, the same as the trainer's.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int], **template: Any) -> None:
        self._tokenizer, self._end_ids, self._template = tokenizer, frozenset(end_ids), template
        self._header = self._text(_BEFORE, prompt=True)
        response = getattr(tokenizer, "response_template", None)
        fields = response.get("fields") if isinstance(response, Mapping) else None
        fields = fields if isinstance(fields, Mapping) else {}
        self._call = _pattern(fields.get("tool_calls"), "open")
        self._call_end = _pattern(fields.get("tool_calls"), "close")
        # A malformed call has the opening's constant beginning only.
        constant = re.match(r"[^\\\[(.*+?{|^$]{3,}", self._call.pattern) if self._call is not None else None
        self._malformed = re.compile(constant[0]) if constant else None
        self._reasoning = [fields[name] for name in ("reasoning_content", "thinking") if name in fields]

    def own(self, turn_ids: Sequence[int], *, call: bool) -> OwnAction | None:
        """Return where the action of a student's turn begins; None if the turn was cut off in its reasoning.

        Args:
            turn_ids: Tokens of the turn, as sampled.
            call: Whether the action is to be compared with a tool call. Then it begins at the turn's first call, if
                there is one. Otherwise it is all that follows the reasoning.
        """
        text = self._decoded(turn_ids)
        at = self._after_reasoning(text)
        if at is None:
            return None
        found = self._first_call(text, at) if call else None
        at = at if found is None else found.start()
        start = self._token_at(turn_ids, text, at)
        return OwnAction(start, text[len(self._decoded(turn_ids[:start])) : at])

    def call_spans(self, turn_ids: Sequence[int]) -> tuple[range, ...]:
        """Return the token ranges of a turn's tool calls: without reasoning, prose, and text between calls.

        A call reaches from its opening to its closing; one that is not closed, as a malformed one, to the end of the
        turn. A token that lies only partly in a call counts. The first call is the one that `own` finds.

        Args:
            turn_ids: Tokens of the turn, as sampled.

        Returns:
            Offsets in ``turn_ids``, in order and disjoint; empty where the turn has no call, or was cut off in its
            reasoning.

        Raises:
            ValueError: The tokenizer has no ``response_template`` that says how a call opens.
        """
        if self._call is None:
            raise ValueError("the tokenizer has no response_template with tool calls: where calls are is not known")
        text = self._decoded(turn_ids)
        at = self._after_reasoning(text)
        spans: list[range] = []
        while at is not None and (found := self._first_call(text, at)) is not None:
            closing = self._call_end.search(text, found.end()) if self._call_end is not None else None
            at = len(text) if closing is None else closing.end()
            end = len(text) if closing is None else closing.start() + len(closing[0].rstrip())
            start = self._token_at(turn_ids, text, found.start())
            stop = self._token_at(turn_ids, text, end)
            stop += len(self._decoded(turn_ids[:stop])) < end  # its last character lies within a token
            if spans and start < spans[-1].stop:
                start = spans.pop().start
            spans.append(range(start, stop))
        return tuple(spans)

    def _first_call(self, text: str, at: int) -> re.Match[str] | None:
        """Return the opening of the first tool call from a character on; a malformed call counts only if there is no
        other."""
        for pattern in (self._call, self._malformed):
            if pattern is not None and (found := pattern.search(text, at)):
                return found
        return None

    def _token_at(self, ids: Sequence[int], text: str, at: int) -> int:
        """Return the last token boundary at or before a character of the decoded text."""
        boundary = max(0, bisect_right(range(len(ids) + 1), at, key=lambda n: len(self._decoded(ids[:n]))) - 1)
        while not text.startswith(self._decoded(ids[:boundary])):  # in the middle of a character
            boundary -= 1
        return boundary

    def other(self, message: Mapping[str, Any], lead: str = "") -> tuple[int, ...]:
        """Return the token ids of another model's action, its end-of-turn token included, without reasoning.

        Args:
            message: Assistant message, as `errata_trainer.teachers.message_of` makes it.
            lead: Text to put before the action: the `OwnAction.lead` of the student's own action.

        Raises:
            ValueError: The chat template does not render the action.
        """
        whole = self._text([*_BEFORE, dict(message)], prompt=False)
        pairs = enumerate(zip(self._header, whole, strict=False))
        begin = next((n for n, (a, b) in pairs if a != b), min(len(self._header), len(whole)))
        if not message.get("tool_calls"):
            at = whole.find(str(message.get("content") or "").strip(), begin)
        elif self._call is not None:
            found = self._call.search(whole, begin)
            at = found.start() if found else -1
        else:
            at = begin if begin == len(self._header) else -1
        if at < 0:
            raise ValueError("this chat template does not render an assistant's action where its response is read")
        ids = list(self._tokenizer.encode(lead + whole[at:], add_special_tokens=False))
        end = next((n + 1 for n, token in enumerate(ids) if token in self._end_ids), len(ids))
        return tuple(ids[:end])

    def _after_reasoning(self, text: str) -> int | None:
        for part in self._reasoning:
            if isinstance(opening := part.get("open"), str):
                opened = text.lstrip().startswith(opening) or self._header.rstrip().endswith(opening)
            else:
                pattern = _pattern(part, "open")
                opened = pattern is not None and pattern.match(text) is not None
            close = _pattern(part, "close")
            if opened and close is not None:
                found = close.search(text)
                return found.end() if found else None
        return 0

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _text(self, conversation: list[dict[str, Any]], *, prompt: bool) -> str:
        template = self._tokenizer.apply_chat_template
        return str(template(conversation, tokenize=False, add_generation_prompt=prompt, **self._template))


def _pattern(field: Any, side: str) -> re.Pattern[str] | None:
    """Return what opens or closes a field of a response template."""
    if not isinstance(field, Mapping):
        return None
    if isinstance(text := field.get(side), str):
        return re.compile(re.escape(text))
    pattern = field.get(f"{side}_pattern")
    return re.compile(pattern) if isinstance(pattern, str) else None

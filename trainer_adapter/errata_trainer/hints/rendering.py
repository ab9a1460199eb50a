"""Renders a hint as the tokens of a chat message that can be inserted before a generation prompt.

The context of a turn ends with a generation prompt. One user message is inserted before it; all other tokens stay as
the student saw them. The message's tokens are found as TRL finds those of tool results: by rendering short
conversations with and without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .neutral import broken

After = Literal["tool", "user"]

# Words that no template holds; a template's own text is whatever stands around them.
_USER, _RESULT, _HINT = "ErrataUserText", "ErrataResultText", "ErrataHintText"
_TAG_LIKE = re.compile(r"^[<\[].*[>\]]$", re.DOTALL)


class ChatTokenizer(Protocol):
    """The methods of a tokenizer that are used; those of ``transformers`` have them."""

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool, **kwargs: Any
    ) -> Any:
        """Render a conversation; with ``tokenize=False`` as text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text; special tokens in it are recognised."""
        ...


@dataclass(frozen=True, slots=True)
class _Frame:
    before: str
    opening: str
    closing: str
    header: str


class HintRenderer:
    """Renders hints for one tokenizer and chat template.

    Args:
        tokenizer: Tokenizer of the student.
        tool_name: A tool that the student has; some templates render a tool's result with its name.
        **template: Further arguments of ``apply_chat_template``, the same as the trainer's: ``chat_template``,
            ``enable_thinking`` ...

    Raises:
        ValueError: The template takes no user message behind a tool's result, or its generation prompt depends on
            the message before it; then no hint can be put in without changing the rest.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, tool_name: str = "run", **template: Any) -> None:
        self._tokenizer = tokenizer
        self._tool_name = tool_name
        self._template = template
        self._frames: dict[After, _Frame] = {"tool": self._frame("tool")}
        self._special = _special_tokens(tokenizer)
        self._own: dict[After, int] = {}
        self.header_ids: tuple[int, ...] = self._pieces("tool", "")[1]
        """Tokens of the generation prompt, with which a turn's context ends."""

    def hint_ids(self, text: str, *, after: After = "tool") -> tuple[int, ...]:
        """Return the tokens of a user message with this text, for insertion before `header_ids`.

        Special tokens of the tokenizer in ``text`` are broken by a space.

        Args:
            text: Text of the hint.
            after: Role of the message before the hint: ``tool`` for a tool's result, ``user`` for the user's message
                (at the rollout's first turn).

        Raises:
            ValueError: The text is empty, or makes a special token all the same; or the template takes no two user
                messages in a row.
        """
        shown = broken(text, self._special).strip()
        if not shown:
            raise ValueError("a hint without text: leave it out")
        ids = self._pieces(after, shown)[0]
        if after not in self._own:
            self._own[after] = self._specials_in(self._pieces(after, "plain")[0])
        if self._specials_in(ids) != self._own[after]:
            raise ValueError(f"the hint makes a special token of this tokenizer: {shown[:80]!r}")
        return ids

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def _pieces(self, after: After, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tokens of the message and of the header, as they are in a whole conversation."""
        frame = self._frames.get(after) or self._frames.setdefault(after, self._frame(after))
        message = frame.opening + text + frame.closing
        before, with_message, whole = (
            self._tokenizer.encode(part, add_special_tokens=False)
            for part in (frame.before, frame.before + message, frame.before + message + frame.header)
        )
        if with_message[: len(before)] != before or whole[: len(with_message)] != with_message:
            raise ValueError("this chat template has no token boundary between a message and the next")
        return tuple(with_message[len(before) :]), tuple(whole[len(with_message) :])

    def _frame(self, after: After) -> _Frame:
        conversation: list[dict[str, Any]] = [{"role": "user", "content": _USER}]
        last = _USER
        if after == "tool":
            call = {"type": "function", "function": {"name": self._tool_name, "arguments": {}}}
            conversation += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": self._tool_name, "content": _RESULT},
            ]
            last = _RESULT
        hinted = [*conversation, {"role": "user", "content": _HINT}]
        plain, plain_header = self._rendered(conversation, after)
        # A later user message may change how earlier turns are rendered (thinking is dropped), never what follows.
        text, header = self._rendered(hinted, after)
        if header != plain_header:
            raise ValueError(
                f"this chat template's generation prompt is {plain_header!r} after a {after} message and {header!r} "
                "after a user's: a hint cannot be put in between"
            )
        place, hint = text.rfind(last), text.rfind(_HINT)
        tail = plain[plain.rfind(last) + len(last) :]
        between = text[place + len(last) : hint]
        if place < 0 or hint < place or not between.startswith(tail):
            raise ValueError(f"this chat template renders a {after} message differently when a user message follows")
        cut = place + len(last) + len(tail)
        return _Frame(text[:cut], between[len(tail) :], text[hint + len(_HINT) :], header)

    def _rendered(self, conversation: Sequence[Mapping[str, Any]], after: After) -> tuple[str, str]:
        """Return the text of a conversation and of the generation prompt after it."""

        def render(*, prompt: bool) -> str:
            return str(
                self._tokenizer.apply_chat_template(
                    list(conversation), tokenize=False, add_generation_prompt=prompt, **self._template
                )
            )

        try:
            text, whole = render(prompt=False), render(prompt=True)
        except Exception as error:  # Jinja's own errors: alternation of roles and the like
            raise ValueError(f"this chat template takes no user message after a {after} message: {error}") from error
        if not whole.startswith(text) or whole == text:
            raise ValueError("this chat template has no generation prompt of its own at the end")
        return text, whole[len(text) :]

    def _specials_in(self, ids: Sequence[int]) -> int:
        special = set(self._special.values())
        return sum(one in special for one in ids)


def _special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens with a special meaning: special tokens, and added tokens that look like tags."""
    added: dict[str, int] = tokenizer.get_added_vocab() if hasattr(tokenizer, "get_added_vocab") else {}
    special = set(getattr(tokenizer, "all_special_tokens", ()))
    return {text: one for text, one in added.items() if text in special or _TAG_LIKE.match(text)}

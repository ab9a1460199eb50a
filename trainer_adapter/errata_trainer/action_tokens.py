"""Somebody else's action in the student's own words: as tokens of its chat template, behind a generation prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .hints import ChatTokenizer

_BEFORE = [{"role": "user", "content": "dummy"}]


def action_ids(
    tokenizer: ChatTokenizer, message: Mapping[str, Any], *, end_id: int | None, **template: Any
) -> tuple[int, ...]:
    """Return the tokens with which the student would say a message, its end of turn included.

    Args:
        tokenizer: Of the student.
        message: An assistant's, as `errata_trainer.teachers.message_of` makes it.
        end_id: The token that ends a turn; what the template renders behind it is not the student's. None keeps all.
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
    said = ids[len(context) :]
    return tuple(said[: said.index(end_id) + 1] if end_id is not None and end_id in said else said)

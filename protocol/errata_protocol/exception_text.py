"""Texts of exceptions, for messages that are shown to a person or a peer: never empty, also for a bare ``assert``."""

from __future__ import annotations


def text_of(error: BaseException) -> str:
    """Return an exception's message, or the name of its class if it has none; also where its ``__str__`` fails."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as failure:
        return f"a {name} whose message cannot be read: {type(failure).__name__}"
    return text if text.strip() else name


def named_text_of(error: BaseException) -> str:
    """Return the name of an exception's class and its message; the name alone if it has none."""
    name, text = type(error).__name__, text_of(error)
    return name if text == name else f"{name}: {text}"

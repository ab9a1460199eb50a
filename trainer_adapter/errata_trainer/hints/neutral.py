"""Makes text of unknown origin safe to put into a chat message.

Hints quote file names and output, which an agent can choose. These must not end the message, open another one, or fill
the context.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection
from functools import lru_cache

Count = Callable[[str], int]
"""How many tokens a text has."""

# Forms in which <, | and > come beside ASCII: DeepSeek's tokens, and what a normalising tokenizer maps back.
_LOOKALIKES = str.maketrans({"｜": "|", "＜": "<", "＞": ">", "﹤": "<", "﹥": ">", "［": "[", "］": "]"})
# `<|im_start|>`, `</tool_call>`, `<s>`, `<start_of_turn>`, `<turn|>`, `<<SYS>>`, `[INST]`, `[/INST]`, `[TOOL_CALLS]`
_TAG = re.compile(r"<(?=[|/!<A-Za-z_])|\|(?=>)|\[(?=/?[A-Z][A-Z_]*\])")
_SPACES = re.compile(r"[^\S\n]+")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn"})


def neutral(text: str, max_chars: int, *, lines: bool = False, tokens: Collection[str] = ()) -> str:
    """Return ``text`` without control, format and unassigned characters, with chat tokens broken up, cut to a maximum
    length.

    A chat token is broken by a space behind its first character, so it stays readable. What is cut out of the middle
    is shown as `` … ``: names differ at their ends. Idempotent but for a text that was cut.

    Args:
        text: Text of any origin.
        max_chars: Most code points of the result.
        lines: Keep line breaks; otherwise the result is one line.
        tokens: A tokenizer's own special tokens, broken besides the known forms.
    """
    shown = unicodedata.normalize("NFC", text.translate(_LOOKALIKES))
    shown = "".join(
        one if unicodedata.category(one) not in _HIDDEN else (one if one == "\n" else " " if one in "\t\r\v\f" else "")
        for one in shown
    )
    if not lines:
        shown = shown.replace("\n", " ")
    shown = _SPACES.sub(" ", shown).strip()
    shown = broken(_TAG.sub(lambda found: found.group() + " ", shown), tokens)
    if len(shown) > max_chars:
        kept = max(max_chars - 3, 2)
        head, tail = shown[: kept - kept // 2].rstrip(), shown[len(shown) - kept // 2 :].lstrip()
        shown = broken(_TAG.sub(lambda found: found.group() + " ", f"{head} … {tail}"), tokens)[:max_chars].strip()
    return shown


def broken(text: str, tokens: Collection[str]) -> str:
    """Return ``text`` with a space after the first character of each occurrence of ``tokens``, repeated until none is
    left."""
    if not tokens:
        return text
    pattern = _pattern(frozenset(tokens))
    while pattern.search(text):
        text = pattern.sub(lambda found: found.group()[0] + " " + found.group()[1:], text)
    return text


@lru_cache(maxsize=16)
def _pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted((token for token in tokens if len(token) > 1), key=lambda one: (-len(one), one))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def approximate_tokens(text: str) -> int:
    """Return an upper estimate of a text's tokens with common tokenizers: a third of its bytes, at least its words."""
    return max(-(-len(text.encode("utf-8", "surrogatepass")) // 3), len(text.split()))

"""An index of an action's words: which calls may name a text, and where a program is called, without a look at each."""

from __future__ import annotations

import posixpath
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from errata_protocol.detect.action import SHELLS, Invocation
from errata_protocol.detect.shell_tree import Word

Span = tuple[int, int]

_MAX_KEY = 1_200
"""A text from a message is no longer than a line of output."""

_MAX_PARTS = 64
_VARIABLE = "\0"
"""Before the rest of a word that begins with a variable or ``~``, of which the action does not say the value."""


def call_words(call: Invocation) -> Iterator[Word]:
    """Yield the words of a call that a message may name: arguments, the program, redirection targets, assignments."""
    yield from call.words[1:]
    for redirect in call.simple.redirects:
        if redirect.target is not None and redirect.body is None and "<<" not in redirect.operator:
            yield redirect.target
    for wrapper in call.wrappers:
        yield from wrapper
    yield from call.simple.assignments
    yield from call.words[:1]


def program_words(call: Invocation) -> Iterator[Word]:
    """Yield the words of a call that are programs."""
    if call.words and call.program not in SHELLS:
        yield call.words[0]
    for wrapper in call.wrappers:
        yield wrapper[0]
    if call.program == "find":
        yield from (
            b for a, b in zip(call.words, call.words[1:], strict=False) if a.value in ("-exec", "-execdir", "-ok")
        )


def absolute(cwd: str | None, text: str) -> str | None:
    """Return the absolute path that ``text`` may be, None if it is none or the directory is unknown."""
    if len(text) > 1000 or "\n" in text:
        return None
    if text.startswith("/"):
        return posixpath.normpath(text)
    return posixpath.normpath(posixpath.join(cwd, text)) if cwd and text else None


class WordIndex:
    """The words of the calls of one action.

    Args:
        command: Text of the action.
        calls: Its calls.
        cwd: Directory that relative paths are resolved against, if known.
    """

    def __init__(self, command: str, calls: Sequence[Invocation], cwd: str | None) -> None:
        self._calls = calls
        self._cwd = cwd
        self._named: dict[str, dict[int, None]] = {}
        self._has_variables = False
        self._by_program: dict[str, list[Invocation]] = {}
        self._programs: dict[str, Span] = {}
        self._on_line: dict[tuple[str, int], Span] = {}
        self.calls_path = any(c.words and "/" in c.words[0].value for c in calls)
        ends = [i for i, char in enumerate(command) if char == "\n"]
        for position, call in enumerate(calls):
            for word in call_words(call):
                for key in self._keys(word.value):
                    self._named.setdefault(key, {})[position] = None
            for word in program_words(call):
                self._programs[word.value] = word.inner
                self._on_line[word.value, bisect_right(ends, word.start - 1) + 1] = word.inner
            for name in {call.program, *(w[0].value.rsplit("/", 1)[-1] for w in call.wrappers)}:
                self._by_program.setdefault(name, []).append(call)

    def _keys(self, value: str) -> Iterator[str]:
        """Yield every text that may name a word, as `place` compares them."""
        if len(value) <= _MAX_KEY:
            yield value
            yield value.rstrip("/")
        path = absolute(self._cwd, value)
        if path is not None:
            yield path
        if value.startswith("-"):
            yield value[1 : 1 + _MAX_KEY]
            yield value[2 : 2 + _MAX_KEY]
        separators = "=:@,/" if "://" in value else "=:@,"
        parts = 0
        for at in range(len(value) - 1, max(-1, len(value) - _MAX_KEY), -1):
            if value[at] in separators:
                yield value[at + 1 :]
                parts += 1
                if parts == _MAX_PARTS:
                    break
        if value[:1] in ("~", "$") and "/" in value:
            self._has_variables = True
            yield _VARIABLE + value[value.index("/") :][:_MAX_KEY]

    def calls_naming(self, text: str) -> Iterator[Invocation]:
        """Yield the calls that may have ``text`` among their words, the last call first."""
        keys = {text, text.rstrip("/"), absolute(self._cwd, text) or text}
        if self._has_variables and text.startswith("/"):
            slashes = [i for i, char in enumerate(text) if char == "/"][-_MAX_PARTS:]
            keys.update(_VARIABLE + text[at:] for at in slashes)
        found = [self._named[key] for key in keys if key in self._named]
        if len(found) == 1:
            positions: Sequence[int] = tuple(found[0])
        else:
            positions = sorted({p for each in found for p in each})
        for position in reversed(positions):
            yield self._calls[position]

    def calls_of(self, program: str) -> Sequence[Invocation]:
        """Return the calls of a program, also as a wrapper, in the order of the action."""
        return self._by_program.get(program.rsplit("/", 1)[-1], ()) if program else ()

    def program_span(self, command: str, line: int | None) -> Span | None:
        """Return the span of the last word that calls ``command``; if one does on ``line``, of the last one there."""
        on_line = self._on_line.get((command, line)) if line is not None else None
        return on_line or self._programs.get(command)

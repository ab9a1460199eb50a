"""Reads the words of a shell action: quotes, escapes, expansions and comments.

The grammar above it (`shell`) is called back for what stands inside ``$(...)`` and backquotes, so that a nested command
is read once, in place, and its spans count from the beginning of the action like all others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from errata_protocol.detect.shell_tree import Sequence, Word

MAX_DEPTH = 30
"""Nesting beyond which parentheses and substitutions are read as plain text: bounds the recursion."""

BLANK = " \t"
OPERATORS = "|&;()<>\n"


class WordReader(ABC):
    """A cursor over one text that reads words; ``pos`` only grows, which makes the time linear."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.text = text
        self.pos = start
        self.end = end
        self.depth = 0

    @abstractmethod
    def script(self) -> Sequence:
        """Read everything up to ``end``."""

    @abstractmethod
    def sequence(self, stops: frozenset[str], closing: str) -> Sequence:
        """Read a list up to a reserved word of ``stops`` or the character ``closing``."""

    @abstractmethod
    def newline(self) -> None:
        """Step over a newline and what belongs to it."""

    def blanks(self, *, newlines: bool) -> None:
        while self.pos < self.end:
            char = self.text[self.pos]
            if char in BLANK:
                self.pos += 1
            elif char == "\\" and self.text.startswith("\n", self.pos + 1):
                self.pos += 2
            elif char == "\n" and newlines:
                self.newline()
            elif char == "#" and (self.pos == 0 or self.text[self.pos - 1] in " \t\n;&|("):
                stop = self.text.find("\n", self.pos, self.end)
                self.pos = self.end if stop < 0 else stop
            else:
                return

    def word(self, inside: list[Sequence]) -> Word:
        """Read one word; always moves forward."""
        start = self.pos
        value: list[str] = []
        literal = True
        quotes: list[tuple[int, int]] = []
        text, end = self.text, self.end
        while self.pos < end:
            char = text[self.pos]
            if char in "<>" and self.pos == start and text.startswith("(", start + 1):
                self.pos += 1
                value.append(char)
                value.append(self.substitution(inside, 1))
                literal = False
            elif char in BLANK or char in OPERATORS:
                break
            elif char == "\\":
                value.append(text[self.pos + 1 : min(self.pos + 2, end)].replace("\n", ""))
                self.pos = min(self.pos + 2, end)
            elif char == "'" or text.startswith("$'", self.pos):
                opening = self.pos + (1 if char == "'" else 2)
                self.pos = opening
                piece = self.single() if char == "'" else self.ansi()
                quotes.append((opening - 1 if char == "'" else opening - 2, self.pos))
                value.append(piece)
            elif char == '"':
                opening = self.pos
                self.pos += 1
                piece, plain = self.double(inside)
                quotes.append((opening, self.pos))
                literal = literal and plain
                value.append(piece)
            elif char in "$`":
                literal = False
                value.append(self.expansion(inside))
            else:
                stop = self.pos + 1
                while stop < end and text[stop] not in "\\'\"$`<> \t|&;()\n":
                    stop += 1
                piece = text[self.pos : stop]
                literal = literal and not any(c in piece for c in "*?[~")
                value.append(piece)
                self.pos = stop
        if self.pos == start:
            self.pos += 1
            value.append(text[start : self.pos])
        inner = (start, self.pos)
        if len(quotes) == 1 and quotes[0] == (start, self.pos):
            opening = start + (2 if text[start] == "$" else 1)
            closed = self.pos - 1 >= opening and text[self.pos - 1] == text[opening - 1]
            inner = (opening, self.pos - 1 if closed else self.pos)
        return Word(start, self.pos, "".join(value), literal, inner)

    def single(self) -> str:
        stop = self.text.find("'", self.pos, self.end)
        stop = self.end if stop < 0 else stop
        piece = self.text[self.pos : stop]
        self.pos = min(stop + 1, self.end)
        return piece

    def ansi(self) -> str:
        start = self.pos
        while self.pos < self.end and self.text[self.pos] != "'":
            self.pos += 2 if self.text[self.pos] == "\\" else 1
        self.pos = min(self.pos, self.end)
        piece = self.text[start : self.pos]
        self.pos = min(self.pos + 1, self.end)
        return piece.replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'").replace("\\\\", "\\")

    def double(self, inside: list[Sequence]) -> tuple[str, bool]:
        out: list[str] = []
        literal = True
        while self.pos < self.end:
            char = self.text[self.pos]
            if char == '"':
                self.pos += 1
                break
            if char == "\\":
                escaped = self.text[self.pos + 1 : min(self.pos + 2, self.end)]
                out.append(escaped if escaped in ("$", "`", '"', "\\") else "" if escaped == "\n" else "\\" + escaped)
                self.pos = min(self.pos + 2, self.end)
            elif char in "$`":
                piece = self.expansion(inside)
                literal = literal and len(piece) == 1
                out.append(piece)
            else:
                stop = self.pos + 1
                while stop < self.end and self.text[stop] not in '"\\$`':
                    stop += 1
                out.append(self.text[self.pos : stop])
                self.pos = stop
        return "".join(out), literal

    def expansion(self, inside: list[Sequence]) -> str:
        """Read what starts at ``$`` or a backquote and return it as written."""
        start, text = self.pos, self.text
        if text[start] == "`":
            stop = start + 1
            while stop < self.end and text[stop] != "`":
                stop += 2 if text[stop] == "\\" else 1
            if stop >= self.end or self.depth >= MAX_DEPTH:
                self.pos = self.end if stop >= self.end else stop + 1
                return text[start : self.pos]
            outer, self.end = self.end, stop
            self.pos = start + 1
            self.depth += 1
            inside.append(self.script())
            self.depth -= 1
            self.end, self.pos = outer, stop + 1
            return text[start : self.pos]
        self.pos += 1
        if text.startswith("((", self.pos):
            self.balanced()
        elif text.startswith("(", self.pos):
            self.substitution(inside, 1)
        elif text.startswith("{", self.pos):
            self.braces(inside)
        elif self.pos < self.end and (text[self.pos].isalnum() or text[self.pos] in "_?!#@*$-"):
            self.pos += 1
            if text[self.pos - 1].isalpha() or text[self.pos - 1] == "_":
                while self.pos < self.end and (text[self.pos].isalnum() or text[self.pos] == "_"):
                    self.pos += 1
        return text[start : self.pos]

    def substitution(self, inside: list[Sequence], opening: int) -> str:
        start = self.pos
        self.pos = min(self.pos + opening, self.end)
        if self.depth >= MAX_DEPTH:
            return self.text[start : self.pos]
        self.depth += 1
        inside.append(self.sequence(frozenset(), ")"))
        self.depth -= 1
        if self.pos < self.end and self.text[self.pos] == ")":
            self.pos += 1
        return self.text[start : self.pos]

    def braces(self, inside: list[Sequence]) -> None:
        """Step over ``${...}``; quotes and nested expansions inside it are honoured."""
        self.pos += 1
        self.depth += 1
        while self.pos < self.end and self.text[self.pos] != "}":
            char = self.text[self.pos]
            if char == "\n":
                break
            if char == "\\":
                self.pos = min(self.pos + 2, self.end)
            elif char == '"' and self.depth < MAX_DEPTH:
                self.pos += 1
                self.double(inside)
            elif char in "$`" and self.depth < MAX_DEPTH:
                self.expansion(inside)
            else:
                self.pos += 1
        self.depth -= 1
        if self.pos < self.end and self.text[self.pos] == "}":
            self.pos += 1

    def balanced(self) -> None:
        """Step over a parenthesised text: arithmetic, or the elements of an array."""
        level = 0
        while self.pos < self.end:
            char = self.text[self.pos]
            self.pos += 1
            level += (char == "(") - (char == ")")
            if level == 0:
                return

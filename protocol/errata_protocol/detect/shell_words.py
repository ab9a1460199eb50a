"""Reads the words of a shell action: quotes, escapes, expansions and comments.

`shell`, the grammar, extends this reader and parses what is inside ``$(...)`` and backquotes. So a nested command is
read once, in place, and its spans count from the beginning of the action like all others.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple

from errata_protocol.detect.shell_tree import Sequence, Word

MAX_DEPTH = 30
"""Nesting beyond which parentheses and substitutions are read as plain text: bounds the recursion."""

BLANK = " \t"
OPERATORS = "|&;()<>\n"
LIST_OPERATORS = (";;&", "&&", "||", ";;", ";&", "|&", ";", "&", "|")
"""What stands between commands, the longest first."""
REDIRECTIONS = ("&>>", "<<<", "<<-", "&>", "<<", ">>", "<>", ">&", "<&", ">|", "<", ">")
"""What stands before the target of a redirection, the longest first."""

_PLAIN = re.compile(r"""[^\\'"$`<> \t|&;()\n]+""")
_PATTERN = re.compile(r"[*?\[~]")
_AFTER_WORD = frozenset(" \t\n|&;)")


class Piece(NamedTuple):
    """A part of a word that is quoted in one way.

    Args:
        kind: ``plain`` is not quoted, ``literal`` is quoted or escaped, ``ansi`` is ``$'...'``, ``expansion`` is
            replaced by the shell, ``quoted`` likewise, within double quotes, ``continued`` is an escaped newline.
        value: What it stands for; an expansion as it is written.
        start: First code point in the text.
        end: One past the last one, quotes included.
    """

    kind: Literal["plain", "literal", "ansi", "expansion", "quoted", "continued"]
    value: str
    start: int
    end: int


class WordReader(ABC):
    """Reads words from one text. ``pos`` only grows, which makes the time linear."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self.text = text
        self.pos = start
        self.end = end
        self.depth = 0
        self._one_quote = (start, start)

    @abstractmethod
    def script(self) -> Sequence:
        """Read everything up to ``end``."""

    @abstractmethod
    def sequence(self, stops: frozenset[str], closing: str) -> Sequence:
        """Read a list up to a reserved word of ``stops`` or the character ``closing``."""

    @abstractmethod
    def newline(self) -> None:
        """Skip a newline and what belongs to it."""

    def blanks(self, *, newlines: bool) -> None:
        while self.pos < self.end:
            char = self.text[self.pos]
            if char in BLANK:
                self.pos += 1
            elif char == "\\" and self.text.startswith("\n", self.pos + 1):
                self.pos += 2
            elif char == "\n" and newlines:
                self.newline()
            elif char == "#" and (self.pos == 0 or self.text[self.pos - 1] in BLANK + OPERATORS):
                stop = self.text.find("\n", self.pos, self.end)
                self.pos = self.end if stop < 0 else stop
            else:
                return

    def doubt(self, why: str) -> None:  # noqa: B027 - to be overridden by a reader that does not go on
        """Called where the text is incomplete, or a line is continued within a word; this reader reads on."""

    def word(self, inside: list[Sequence]) -> Word:
        """Read one word; ``pos`` always advances."""
        start, text = self.pos, self.text
        plain = _PLAIN.match(text, start, self.end)
        if plain and (plain.end() == self.end or text[plain.end()] in _AFTER_WORD):  # as most words are
            self.pos, value = plain.end(), plain.group()
            return Word(start, self.pos, value, not _PATTERN.search(value), (start, self.pos))
        pieces = self.pieces(inside)
        if self.pos == start:
            self.pos += 1
            pieces.append(Piece("plain", text[start : self.pos], start, self.pos))
        literal = all(
            piece.kind not in ("expansion", "quoted") and not (piece.kind == "plain" and _PATTERN.search(piece.value))
            for piece in pieces
        )
        inner = (start, self.pos)
        if text[start] in "'\"" or text.startswith("$'", start):
            opening = start + (2 if text[start] == "$" else 1)
            if self._one_quote == (start, self.pos):
                closed = self.pos - 1 >= opening and text[self.pos - 1] == text[opening - 1]
                inner = (opening, self.pos - 1 if closed else self.pos)
        return Word(start, self.pos, "".join([piece.value for piece in pieces]), literal, inner)

    def pieces(self, inside: list[Sequence]) -> list[Piece]:
        """Read the pieces of one word; none where no word begins."""
        start = self.pos
        pieces: list[Piece] = []
        text, end = self.text, self.end
        self._one_quote = (start, start)
        while self.pos < end:
            at = self.pos
            char = text[at]
            if char in "<>" and text.startswith("(", at + 1):
                self.pos += 1
                self.substitution(inside, 1)
                pieces.append(Piece("expansion", text[at : self.pos], at, self.pos))
            elif char in BLANK or char in OPERATORS:
                break
            elif char == "\\":
                pieces.append(self.escaped())
            elif char == "'":
                self.pos += 1
                pieces.append(Piece("literal", self.single(), at, self.pos))
            elif text.startswith("$'", at):
                self.pos += 2
                pieces.append(Piece("ansi", self.ansi(), at, self.pos))
            elif char == '"':
                self.pos += 1
                pieces += self.double(inside)
            elif text.startswith('$"', at):  # translated, and so replaced
                self.pos += 2
                value = "$" + "".join([piece.value for piece in self.double(inside)])
                pieces.append(Piece("expansion", value, at, self.pos))
            elif char in "$`":
                pieces.append(Piece("expansion", self.expansion(inside), at, self.pos))
            else:
                plain = _PLAIN.match(text, at, end)
                self.pos = plain.end() if plain else at + 1
                pieces.append(Piece("plain", text[at : self.pos], at, self.pos))
            if at == start:
                self._one_quote = (start, self.pos)
        return pieces

    def escaped(self) -> Piece:
        """Read a backslash and what it quotes."""
        at, text = self.pos, self.text
        self.pos = min(at + 2, self.end)
        if self.pos == at + 1:
            self.doubt("the text ends in a backslash")
        if text[at + 1 : self.pos] != "\n":
            return Piece("literal", text[at + 1 : self.pos], at, self.pos)
        if self.pos < self.end and text[self.pos] not in BLANK + "\n":
            self.doubt("a line is continued within a word")
        return Piece("continued", "", at, self.pos)

    def single(self) -> str:
        stop = self.text.find("'", self.pos, self.end)
        if stop < 0:
            self.doubt("a single quote is not closed")
            stop = self.end
        piece = self.text[self.pos : stop]
        self.pos = min(stop + 1, self.end)
        return piece

    def ansi(self) -> str:
        start = self.pos
        while self.pos < self.end and self.text[self.pos] != "'":
            self.pos += 2 if self.text[self.pos] == "\\" else 1
        if self.pos >= self.end:
            self.doubt("a single quote is not closed")
        self.pos = min(self.pos, self.end)
        piece = self.text[start : self.pos]
        self.pos = min(self.pos + 1, self.end)
        return piece.replace("\\n", "\n").replace("\\t", "\t").replace("\\'", "'").replace("\\\\", "\\")

    def double(self, inside: list[Sequence]) -> list[Piece]:
        """Read what stands in double quotes, from behind the first one; at least one piece, which may be empty."""
        text, start = self.text, self.pos
        pieces = [Piece("literal", "", start - 1, start)]
        while self.pos < self.end:
            at = self.pos
            char = text[at]
            if char == '"':
                self.pos += 1
                return pieces
            if char == "\\":
                escaped = text[at + 1 : min(at + 2, self.end)]
                self.pos = min(at + 2, self.end)
                if escaped == "\n":
                    self.doubt("a line is continued within a word")
                value = escaped if escaped in ("$", "`", '"', "\\") else "" if escaped == "\n" else "\\" + escaped
                pieces.append(Piece("literal", value, at, self.pos))
            elif char in "$`":
                value = self.expansion(inside, in_double=True)
                pieces.append(Piece("literal" if value == "$" else "quoted", value, at, self.pos))
            else:
                stop = at + 1
                while stop < self.end and text[stop] not in '"\\$`':
                    stop += 1
                self.pos = stop
                pieces.append(Piece("literal", text[at:stop], at, stop))
        self.doubt("a double quote is not closed")
        return pieces

    def expansion(self, inside: list[Sequence], *, in_double: bool = False) -> str:
        """Read the expansion that begins at ``$`` or a backquote, and return it as written."""
        start, text = self.pos, self.text
        if text[start] == "`":
            stop = start + 1
            while stop < self.end and text[stop] != "`":
                stop += 2 if text[stop] == "\\" else 1
            if stop >= self.end or self.depth >= MAX_DEPTH:
                self.doubt("an expansion is not closed, or nested too deeply")
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
            self.braces(inside, in_double=in_double)
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
            self.doubt("expansions are nested too deeply")
            return self.text[start : self.pos]
        self.depth += 1
        inside.append(self.sequence(frozenset(), ")"))
        self.depth -= 1
        if self.pos < self.end and self.text[self.pos] == ")":
            self.pos += 1
        else:
            self.doubt("an expansion is not closed")
        return self.text[start : self.pos]

    def braces(self, inside: list[Sequence], *, in_double: bool = False) -> None:
        """Skip ``${...}`` with the quotes and expansions inside it."""
        self.pos += 1
        self.depth += 1
        while self.pos < self.end and self.text[self.pos] not in "}\n":
            self.inner(inside, in_double=in_double)
        self.depth -= 1
        if self.pos < self.end and self.text[self.pos] == "}":
            self.pos += 1
        else:
            self.doubt("an expansion is not closed, or not in one line")

    def balanced(self) -> None:
        """Skip a text in parentheses: arithmetic, or the elements of an array."""
        level = 0
        self.depth += 1
        while self.pos < self.end:
            char = self.text[self.pos]
            level += (char == "(") - (char == ")")
            self.inner([], in_double=False)
            if level == 0:
                break
        else:
            self.doubt("a parenthesis is not closed")
        self.depth -= 1

    def inner(self, inside: list[Sequence], *, in_double: bool) -> None:
        """Step over one character, or one quoted text or expansion, within braces or parentheses."""
        text, char = self.text, self.text[self.pos]
        if char == "\\":
            self.pos = min(self.pos + 2, self.end)
        elif self.depth >= MAX_DEPTH and char in "\"'$`":
            self.doubt("expansions are nested too deeply")
            self.pos += 1
        elif char == '"':
            self.pos += 1
            self.double(inside)
        elif char == "'" and not in_double:
            self.pos += 1
            self.single()
        elif text.startswith("$'", self.pos) and not in_double:
            self.pos += 2
            self.ansi()
        elif char in "$`":
            self.expansion(inside, in_double=in_double)
        else:
            self.pos += 1

"""Finds the place that a message names: a file relative to the workspace, or a span of the action."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence

from errata_protocol.detect.action import Invocation, code_word, language
from errata_protocol.detect.agent_files import WORKSPACE_ROOTS
from errata_protocol.detect.interpreted import CODE_NAME, code_span
from errata_protocol.detect.python_traceback import Frame
from errata_protocol.detect.shell_tree import Word
from errata_protocol.detect.text import message
from errata_protocol.detect.turn import Turn
from errata_protocol.detect.word_index import absolute, call_words
from errata_protocol.markers import ErrorSite, SiteSource

INLINE_FILES = frozenset({"<string>", "<stdin>", "[eval]", "[eval]-wrapper", "[stdin]", "-e", "-"})
_FOREIGN = re.compile(
    r"site-packages|dist-packages|node_modules|/\.?venv/|^/usr/|^/opt/|^/lib|^<frozen|^node:|^internal/[\w/]+(?:\.js)?$|/lib/python3|"
    r"/\.cargo/|/rustc/|/ruby/\d[\d.]*/|-wrapper$|^<(?!string>|stdin>)|^\(eval"
)

Span = tuple[int, int]


def workspace_root(cwd: str | None) -> str | None:
    """Return the workspace that contains a directory: one of `WORKSPACE_ROOTS`, else the directory itself."""
    if not cwd:
        return None
    directory = posixpath.normpath(cwd)
    for root in WORKSPACE_ROOTS:
        if directory == root or directory.startswith(root + "/"):
            return root
    return None if directory == "/" else directory


def relative_file(turn: Turn, file: str) -> str:
    """Return ``file`` relative to the workspace if it is inside, else as printed."""
    file = file.removeprefix("file://")
    if not file.startswith("/"):
        return file[2:] if file.startswith("./") else file
    path = posixpath.normpath(file)
    own = workspace_root(turn.cwd)
    for root in (*(r for r in (turn.workdir, own) if r), *WORKSPACE_ROOTS):
        if path.startswith(root + "/"):
            return path[len(root) + 1 :]
    return path


def is_own(turn: Turn, file: str) -> bool:
    """Return whether a file is the agent's, and not one of an interpreter or an installed package."""
    path = file.removeprefix("file://")
    if turn.workdir and path.startswith(turn.workdir + "/"):
        path = (
            f".{path[len(turn.workdir) :]}"  # a work directory may lie in /opt; what was installed into it is foreign
        )
    return _FOREIGN.search(path) is None


def last_own_frame(turn: Turn, frames: Sequence[Frame]) -> Frame | None:
    """Return the last frame inside the workspace; without one, the last in the action's own code; without one, the
    last in a file of the agent's; else None."""
    own = [f for f in frames if _owns_frame(turn, f)]
    inside = [f for f in own if f.file not in INLINE_FILES and not relative_file(turn, f.file).startswith("/")]
    inline = [f for f in own if f.file in INLINE_FILES]
    for group in (inside, inline, own):
        if group:
            return group[-1]
    return None


def _owns_frame(turn: Turn, frame: Frame) -> bool:
    if turn.agent_files is None:
        return is_own(turn, frame.file)
    if CODE_NAME.match(frame.file):
        if any(language(c.program) for c in turn.action.invocations):  # the shell ran an interpreter
            return frame.file in INLINE_FILES
        return code_span(turn, frame) is not None
    return is_own(turn, frame.file) and turn.agent_files.owns(frame.file)


def site(
    line: str,
    source: SiteSource = "message",
    *,
    span: Span | None = None,
    file: str | None = None,
    number: int | None = None,
    column: int | None = None,
    test_id: str | None = None,
) -> ErrorSite:
    """Build a site. A line or column of 0, which some tools print, and an empty span are left out."""
    if span is not None and span[0] >= span[1]:  # the inside of an empty string
        span = None
    return ErrorSite(
        action_field="command" if span else None,
        action_span=span,
        file=file,
        line=number or None,
        column=column or None,
        test_id=test_id,
        source=source,
        message=message(line) or None,
    )


def frame_site(turn: Turn, frame: Frame, line: str, text: str = "", source: SiteSource = "traceback") -> ErrorSite:
    """Return the site of a frame. For code that is part of the action, it is a span of the action.

    Args:
        turn: The turn.
        frame: The frame that failed.
        line: The line of output that the rule matched.
        text: Message of the exception; it decides between several pieces of inline code.
        source: What the frame was read from.
    """
    if frame.file in INLINE_FILES or (turn.agent_files is not None and CODE_NAME.match(frame.file)):
        span = inline_span(turn, frame.file, frame.line, text)
        if span is None and turn.agent_files is not None:
            span = code_span(turn, frame)
        return site(line, source, span=span, file=frame.file, number=frame.line)
    span = written_span(turn, frame.file, frame.line)
    return site(line, source, span=span, file=relative_file(turn, frame.file), number=frame.line)


def whole_action(turn: Turn, line: str = "") -> ErrorSite:
    """Return the site that covers the whole action."""
    return site(line, "action", span=(0, len(turn.command)) if turn.command else None)


# Inline code


def inline_span(turn: Turn, file: str, line: int, text: str = "") -> Span | None:
    """Return the span of line ``line`` in code that the action contains, without indentation; None if there is no such
    line."""
    spans = [s for s in (turn.action.line_span(a, b, line) for a, b in _inline_code(turn, file)) if s]
    if not spans:
        return None
    names = re.findall(r"['\"]([^'\"]{1,80})['\"]", text)
    telling = [s for s in spans if any(n in turn.command[s[0] : s[1]] for n in names)]
    return (telling or spans)[-1]


def written_span(turn: Turn, file: str, line: int) -> Span | None:
    """Return the span of line ``line`` in the here-document with which the action wrote ``file``; None if
    it did not."""
    wanted = _absolute(turn, file)
    for call in reversed(turn.action.invocations):
        bodies = [r.body for r in call.simple.redirects if r.body is not None]
        if len(bodies) != 1 or call.program not in ("cat", "tee"):
            continue
        targets = [r.target for r in call.simple.redirects if r.operator in (">", ">|") and r.target is not None]
        targets += call.words[1:] if call.program == "tee" and "-a" not in call.arguments else []
        if any(_absolute(turn, t.value) == wanted for t in targets if t.literal):
            return turn.action.line_span(*bodies[0], line)
    return None


def _inline_code(turn: Turn, file: str) -> Iterator[Span]:
    """Yield the spans of inline code that ``file`` may name, in the order of the action."""
    for call in turn.action.invocations:
        family = language(call.program)
        if file in ("<string>", "[eval]", "-e"):
            wanted = {"<string>": ("python",), "[eval]": ("node",), "-e": ("perl", "ruby")}[file]
            word = code_word(call) if family in wanted else None
            if word is not None:
                yield word.inner
        elif family in ("python", "node", "perl", "ruby"):
            yield from stdin_code(turn, call)


def stdin_code(turn: Turn, call: Invocation) -> Iterator[Span]:
    """Yield the spans of what the action gives a call on standard input: a here-document, a here-string, an echo."""
    for redirect in call.simple.redirects:
        if redirect.body is not None:
            yield redirect.body
        elif redirect.operator == "<<<" and redirect.target is not None:
            yield redirect.target.inner
    before = [c for c in turn.action.invocations if c.simple.end <= call.simple.start]
    if before and before[-1].program in ("echo", "printf", "cat"):
        feeder = before[-1]
        between = turn.command[feeder.simple.end : call.simple.start]
        if "|" in between and "||" not in between:
            yield from (r.body for r in feeder.simple.redirects if r.body is not None)
            if feeder.program != "cat" and len(feeder.words) == 2:
                yield feeder.words[1].inner


# Words of the action


def argument_span(turn: Turn, candidates: Iterable[str], program: str = "", *, in_code: bool = True) -> Span | None:
    """Return the span of the first candidate that the action names, in the last call that may have failed because of
    it.

    Args:
        turn: The turn.
        candidates: Texts from the message, the most specific first.
        program: Program that printed the message; its calls are searched first.
        in_code: Also search inline code and here-documents.

    Returns:
        The span, without the quotes if the text is inside them; None if the action names no candidate.
    """
    found = argument_place(turn, candidates, program, in_code=in_code)
    return found[0] if found else None


def argument_place(
    turn: Turn, candidates: Iterable[str], program: str = "", *, in_code: bool = True
) -> tuple[Span, Invocation] | None:
    """Return the span as `argument_span` does, together with the call that has the argument; None if there is none.

    None also if the turn has no work left, see `Turn.spend`.
    """
    texts = [c for c in dict.fromkeys(candidates) if c]
    own = {id(c) for c in turn.words.calls_of(program)}
    for among_own in (True, False) if own else (False,):
        for text in texts:
            for call in turn.words.calls_naming(text):
                if among_own and id(call) not in own:
                    continue
                if not turn.spend(1 + len(call.words)):
                    return None
                span = _in_words(turn, call, text)
                if span is not None:
                    return span, call
    return _place_in_code(turn, texts, turn.words.calls_of(program)) if in_code else None


def _place_in_code(turn: Turn, texts: Sequence[str], own: Sequence[Invocation]) -> tuple[Span, Invocation] | None:
    """Return the place of a text in inline code, in a here-document, as the parent of an argument, or anywhere."""
    paths = [t for t in texts if " " not in t or "/" in t]
    scan = 1 + len(turn.command) // 1_000
    if not turn.spend(2 * scan * len(paths)):
        return None
    written = [t for t in paths if t in turn.command or relative_file(turn, t) in turn.command]
    calls = turn.action.invocations
    for group in (own, calls):
        for text in written:
            for call in reversed(group):
                if not turn.spend(1 + len(call.words)):
                    return None
                span = _in_code(turn, call, text)
                if span is not None:
                    return span, call
    for call in reversed(own or calls[-1:]):
        for text in paths:
            if not turn.spend(1 + len(call.words)):
                return None
            span = _parent_word(turn, call, text)
            if span is not None:
                return span, call
    for text in written:  # the words of a `for`, a here-string, a text piped on
        at = _bounded_find(turn.command, text, 0, len(turn.command)) if len(text) > 1 else None
        if at is not None and calls:
            return (at, at + len(text)), (own or calls)[-1]
    return None


def _parent_word(turn: Turn, call: Invocation, text: str) -> Span | None:
    """Return the argument that is a parent path of ``text`` (``cp f DIR/``) or a path below it (``mkdir -p
    TEXT/y``)."""
    wanted = _absolute(turn, text)
    if wanted is None:
        return None
    for word in reversed(call.words[1:]):
        if not word.literal or word.value.startswith("-") or len(word.value.strip("./")) < 1:
            continue
        own = _absolute(turn, word.value)
        if own is not None and (wanted.startswith(own + "/") or own.startswith(wanted + "/")):
            return word.inner
    return None


def _in_words(turn: Turn, call: Invocation, text: str) -> Span | None:
    words = list(call_words(call))
    for word in words:
        if word.value == text:
            return _within(turn, word, text)
    wanted = _absolute(turn, text)
    if wanted is not None:
        for word in words:
            may_be = "/" in word.value or "::" in word.value or word.value == posixpath.basename(wanted)
            if may_be and _absolute(turn, word.value) == wanted:
                return word.inner
    for word in words:  # --file=NAME, if=NAME, -INAME, NAME/ and host:NAME
        value = word.value
        if value.rstrip("/") == text.rstrip("/") and text.strip("/"):
            return word.inner
        before = value[-len(text) - 1 : -len(text)] if len(value) > len(text) and value.endswith(text) else ""
        attached = before != "" and value.startswith("-") and len(value) - len(text) <= 2  # -INAME, -n5
        joined = before != "" and len(text) > 1 and (before in ":@," or (before == "/" and "://" in value))
        if before == "=" or joined or (attached and (len(text) > 1 or len(value) == 3)):
            return _within(turn, word, text)
        if (
            value[:1] in ("~", "$")
            and "/" in value
            and text.startswith("/")
            and text.endswith(value[value.index("/") :])
        ):
            return word.inner
    return None


def _absolute(turn: Turn, text: str) -> str | None:
    return absolute(turn.cwd, text)


def _within(turn: Turn, word: Word, text: str) -> Span:
    """Return the span of ``text`` in a word, without quotes; the span of the whole word if the text is not there
    literally."""
    at = turn.command.find(text, word.start, word.end)
    return (at, at + len(text)) if at >= 0 else word.inner


def _in_code(turn: Turn, call: Invocation, text: str) -> Span | None:
    if len(text) < 2:
        return None
    regions: list[Span] = [r.body for r in call.simple.redirects if r.body is not None]
    regions += [w.inner for w in call.words[1:] if w.end - w.start > len(text) + 2]
    shorter = relative_file(turn, text)
    for form in dict.fromkeys((text, shorter)):
        for start, end in regions:
            at = _bounded_find(turn.command, form, start, end)
            if at is not None:
                return at, at + len(form)
    return None


def _bounded_find(command: str, text: str, start: int, end: int) -> int | None:
    """Return where ``text`` occurs as a whole name, in quotes first; None if it does not."""
    plain = None
    at = command.find(text, start, end)
    for _ in range(200):
        if at < 0:
            break
        before, after = command[at - 1 : at], command[at + len(text) : at + len(text) + 1]
        if before in ("'", '"') and after in ("'", '"'):
            return at
        if plain is None and not _joins(before) and not _joins(after):
            plain = at
        at = command.find(text, at + 1, end)
    return plain


def _joins(char: str) -> bool:
    return bool(char) and (char.isalnum() or char in "_-./")

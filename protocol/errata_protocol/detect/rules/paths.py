"""Rules for paths that are missing or forbidden."""

from __future__ import annotations

import re

from errata_protocol.detect.place import INLINE_FILES, argument_place, frame_site, last_own_frame, relative_file, site
from errata_protocol.detect.python_traceback import Traceback
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.rules.shell_message import Message, read_message
from errata_protocol.detect.text import quoted
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite

MAX_SITES = 20

_MISSING = re.compile(
    r"no such file(?: or directory)?|\bENOENT\b|cannot stat\b|can(?:'t|not) cd to|cannot open [\"'‘`]|"
    r"could not (?:open input file|access ')|can't (?:open|find|read|stat)\b|cannot (?:open|find|"
    r"read) (?:file|input)(?![\w./-])|"
    r"file or directory not found|did not match any file|file not found|cannot find or open|not found in archive|"
    r"^ERROR: (?:not found|found no collectors)|no such (?:directory|path)|does not exist|doesn't exist|"
    r"cannot find the (?:path|file)|couldn't open file|could not open file|could not find file|unable to (?:open|"
    r"access|find) |"
    r"exists on disk, but not in|failed to open|name not matched|path not found|directory not found|"
    r"not found or not readable|"
    r"cannot access '|couldn't read|could not read|no matches found",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"permission denied|operation not permitted|\bEACCES\b|\bEPERM\b|must be (?:super-?user|root|run as root)|"
    r"access (?:is )?denied|"
    r"read-only file ?system|\bEROFS\b|are you root|requires? root|you (?:must|need to) be root|only root (?:can|may)|"
    r"not in the sudoers|a (?:password|terminal) is required|need(?:s)? to be root|superuser privilege|"
    r"run (?:this )?(?:command |script )?as root|"
    r"insufficient (?:permissions|privileges)|authentication (?:failure|is required)|dubious ownership|not permitted|"
    r"you do not have permission|(?:with|using) sudo\b",
    re.IGNORECASE,
)
_CANNOT_RUN = re.compile(r": (?:cannot execute(?: binary file)?.*|Is a directory|Exec format error)$")
_NO_FILE_MEANT = re.compile(
    r"table|column|database|relation|role|user|group|schema|branch|remote|repository '|container|image|network|"
    r"volume|service|"
    r"key|variable|attribute|module|package|target|command|function|method|field|property|tag|process|job|option|"
    r"resource|"
    r"pod|namespace|host|interface|device|index",
    re.IGNORECASE,
)


def _missing_line(line: str) -> bool:
    match = _MISSING.search(line)
    if not match:
        return False
    said = match.group().lower()
    if said in ("does not exist", "doesn't exist"):  # tables, users and branches do not exist either
        subject = line[: match.start()]
        return not _NO_FILE_MEANT.search(subject.split(": ", 1)[-1]) or "path" in subject.lower()
    if said.startswith("unable to") or said in (
        "could not read",
        "couldn't read",
        "failed to open",
        "can't open",
        "can't read",
    ):
        return not _DENIED.search(line)
    return True


def _denied_line(line: str) -> bool:
    return _DENIED.search(line) is not None


def _sites(turn: Turn, lines: list[str], phrase: re.Pattern[str]) -> tuple[ErrorSite, ...]:
    """Return a site for each message; those of the last failed call come first, in their order."""
    found: list[tuple[int, ErrorSite]] = []
    calls = turn.action.invocations
    programs = {c.program for c in calls} | {w[0].value for c in calls for w in c.wrappers}
    for line in list(dict.fromkeys(lines))[:200]:
        message = read_message(line)
        names = [c for c in _candidates(message, phrase) if c not in programs or c in quoted(line)]
        sure = names if message.program in programs else [n for n in names if set("/.") & set(n) or n in quoted(line)]
        place = argument_place(turn, names, message.program, in_code=False)
        place = place or argument_place(turn, sure, message.program)
        if place is not None:
            span, call = place
            found.append((call.simple.start, site(line, span=span)))
        elif message.script is not None and message.line is not None:
            found.append((-1, site(line, file=relative_file(turn, message.script), number=message.line)))
    if not found or turn.work_left < 0:  # not all messages were placed: the last failed call is unknown
        return ()
    last = max(position for position, _ in found)
    ordered = [s for p, s in found if p == last] + [s for p, s in found if p != last]
    return tuple(dict.fromkeys(ordered))[:MAX_SITES]


def _candidates(message: Message, phrase: re.Pattern[str]) -> list[str]:
    """Return the texts in a message that may be its path, the most specific first: quoted ones, then parts between
    colons."""
    rest = message.rest
    quotes = quoted(rest)
    match = phrase.search(rest)
    before, after = (rest[: match.start()], rest[match.end() :]) if match else (rest, "")
    out = list(reversed(quotes))
    out += [q.split(":", 1)[1] for q in quotes if ":" in q]
    parts = [p.strip() for p in before.rstrip(": (").split(": ") if p.strip()]
    out += list(reversed(parts))
    out += [p.strip(" .'\"") for p in after.strip(": -").split(": ") if p.strip(" .'\"")]
    tokens = [t.strip("'\",;()[]`‘’") for p in reversed(parts) for t in reversed(p.split())]
    tokens += [t.strip("'\".,;()[]`‘’") for t in after.split()]
    out += [t for t in tokens if "/" in t or "." in t]
    out += [p.split()[-1] for p in reversed(parts) if p.split()]
    out += [t.strip("()") for t in reversed(before.split()) if t.startswith("(")]
    first = message.text.split(": ", 1)[0]
    if "/" in first or first == message.program:  # `src/: No such file`: no program speaks, or one without a name
        out.append(first)
    words = after.split()
    if words and len(words) <= 3:
        out.append(words[0].strip("'\".,;()[]`‘’"))
    return [c for c in out if c.strip(".: ") or c in (".", "..")]


def _traceback_sites(turn: Turn, traceback: Traceback) -> tuple[ErrorSite, ...]:
    """Return the span of the path in the action; for a script of the agent's, the line that used the path."""
    paths = quoted(traceback.text)
    place = argument_place(turn, reversed(paths))
    frame = last_own_frame(turn, traceback.frames)
    if frame is not None and frame.file not in INLINE_FILES:
        where = frame_site(turn, frame, traceback.line)
        return (where.model_copy(update={"action_span": place[0], "action_field": "command"}) if place else where,)
    return (site(traceback.line, "traceback", span=place[0]),) if place else ()


def _permission(turn: Turn) -> Finding | None:
    for traceback in turn.final_tracebacks:
        if traceback.name == "PermissionError":
            return Finding(_traceback_sites(turn, traceback))
    lines = [line for line in turn.messages if _denied_line(line) and turn.spoken(line)]
    if lines:
        return Finding(_sites(turn, lines, _DENIED))
    if turn.exit_code == 126:
        lines = [line for line in turn.messages if _CANNOT_RUN.search(line)]
        if lines:
            return Finding(_sites(turn, lines, _CANNOT_RUN))
        calls = [c for c in turn.action.deciders if c.words]
        span = (calls[0].words[0].start, calls[0].words[0].end) if len(calls) == 1 else None
        return Finding((site("", "action", span=span),) if span else ())
    return None


def _missing(turn: Turn) -> Finding | None:
    for traceback in turn.final_tracebacks:
        if traceback.name == "FileNotFoundError":
            return Finding(_traceback_sites(turn, traceback))
    lines = [x for x in turn.messages if _missing_line(x) and not _wrapped_program(x) and turn.spoken(x)]
    if (
        turn.crash is not None
        and turn.crash.line in lines
        and turn.crash.language in ("node", "ruby", "perl", "go", "rust")
    ):
        sites = _sites(turn, [turn.crash.line], _MISSING)
        frame = last_own_frame(turn, turn.crash.frames)
        if not sites and frame is not None and frame.file not in INLINE_FILES:
            sites = (frame_site(turn, frame, turn.crash.line),)
        return Finding(sites)
    return Finding(_sites(turn, lines, _MISSING)) if lines else None


def _wrapped_program(line: str) -> bool:
    return line.startswith("sudo: ") and "unable to resolve" in line


PERMISSION_RULES = (
    Rule(
        "paths.denied",
        ErrorKind.PERMISSION_DENIED,
        "Permission denied, operation not permitted, read-only file system, root required, PermissionError; exit 126.",
        "The path in the action that the message names; for a script of the agent the line that used it.",
        _permission,
    ),
)
MISSING_RULES = (
    Rule(
        "paths.missing",
        ErrorKind.PATH_NOT_FOUND,
        "No such file or directory and its other wordings (cannot open, cannot stat, pathspec did not match, file or "
        "directory not found, does not exist), FileNotFoundError.",
        "The path in the action that the message names; for a script of the agent the line that used it.",
        _missing,
    ),
)

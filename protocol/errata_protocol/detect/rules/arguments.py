"""Rules for calls with arguments that the program does not accept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from errata_protocol.detect.action import Invocation
from errata_protocol.detect.place import Span, argument_span, site
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.rules.shell_message import Message, read_message
from errata_protocol.detect.text import quoted
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind, ErrorSite


@dataclass(frozen=True, slots=True)
class Phrase:
    """One family of messages. ``at`` names what is wrong: ``argument``, ``option``, ``pattern`` or ``call``."""

    pattern: re.Pattern[str]
    at: str


def _phrase(text: str, at: str) -> Phrase:
    return Phrase(re.compile(text, re.IGNORECASE), at)


PHRASES = (
    _phrase(
        r"regex parse error|unmatched (?:\(|\)|\[|\{)|unmatched (?:parenthes|bracket|brace)|"
        r"invalid (?:regular expression|back reference|preceding|"
        r"range end|character class|content of)|error parsing regexp|trailing backslash|unclosed (?:group|"
        r"character class)|"
        r"nothing to repeat|brackets? \(?\[.* not balanced|missing terminating \]|missing closing parenthesis|"
        r"unterminated character",
        "pattern",
    ),
    _phrase(
        r"(?:missing|expected) (?:an? )?(?:\w+ ){0,4}(?:operand|operands|argument|arguments|parameter|value)s?\b|"
        r"(?:the following )?(?:required )?arguments? (?:are|is|were) (?:required|not provided|missing)|"
        r"the following (?:required )?arguments|requires? (?:an?|at least|exactly|one|two|\d+|more|"
        r"the)\b.*\b(?:argument|arguments|value|values|parameter|operand|arg)s?\b|"
        r"requires? (?:argument|a value)|you must specify|must be specified|must specify|(?:not enough|too few|"
        r"insufficient) (?:arguments|operands|parameters)|"
        r"no (?:pattern|input files?|program|query|files?|arguments?|command|expression) (?:given|specified|"
        r"provided|supplied)|no input files$|\[: missing|"
        r"missing required|needs? (?:an? )?(?:value|argument)|argument (?:expected|missing)|option .* (?:needs|"
        r"expects) |"
        r"missing argument|no (?:search )?pattern|filename argument expected|cowardly refusing|you need to specify|"
        r"must give exactly one|takes (?:no|exactly|at (?:least|most)) .*argument|wrong number of arguments|"
        r"no url specified|missing url|"
        r"nothing specified|no \w+ name (?:given|specified)",
        "call",
    ),
    _phrase(
        r"(?:unrecogni[sz]ed|unknown|invalid|illegal|unsupported|bad|undefined|ambiguous|unexpected|"
        r"no such) (?:command[- ]line |global )?(?:long |short |extra )?"
        r"(?:option|switch|flag|predicate|argument|parameter|operand|primary|shorthand flag|command|subcommand|"
        r"action|operation|verb|directive)s?\b|"
        r"flag provided but not defined|extra operand|is not an? (?:\S+ )?(?:command|subcommand|option)\b|"
        r"isn't a \w+ command|"
        r"option .{1,80} (?:is ambiguous|doesn't allow an argument|not recognized|is unknown)|did you mean (?:-|`-|"
        r"'-)|unknown key|"
        r"is not a recogni[sz]ed (?:option|command|flag)|arguments? .{1,80} (?:not recognized|is invalid)|"
        r"got unexpected extra argument|"
        r"unsupported option|is not a valid option|missing script:|no rule for option|paths must precede expression|"
        r"found argument .{1,200} wasn't expected|due to unexpected token|could not create named generator|"
        r"no such remote|(?:branch|tag|remote|stash entry) .{1,200} not found",
        "option",
    ),
    _phrase(
        r"ambiguous (?:argument|redirect)|bad revision|not a valid (?:object name|identifier|ref|revision|"
        r"branch name|integer|number|remote name|tag name|commit)|"
        r"invalid (?:reference|upstream|refspec|object name|choice|value|mode|date|time interval|number|group|user|"
        r"signal|spec|size|count|format|"
        r"suffix|unit|byte|byte list|field|field list|byte or field list|range|width|line|column|length|int value|"
        r"float value|argument|input|type|port|address|character|key|escape|config|regex|expression|"
        r"block size|precision|conversion|option|target|context length|context|max count|delimiter|url|glob|tag|"
        r"version|requirement|"
        r"sort key|tab|offset|depth|start|end|level|base|pid|process|path|name|id|duration|timeout|timespec|"
        r"zero-length|arithmetic|character class|digit|decimal|trailing|attribute|environment|percentage|chunk|page|"
        r"line number|buffer|record|status|number of \w+)\b|"
        r"invalid .{1,80}[:'‘`]|unknown (?:revision|encoding|format|type|value|signal|terminal|filesystem|user|"
        r"group|file type|regexp)|"
        r"numeric argument required|integer expression expected|integer expected|"
        r"arguments must be process or job IDs|not something we can merge|"
        r"too many arguments|unexpected (?:argument|extra argument|positional)|is not a valid|"
        r"is not (?:an? )?(?:integer|number|positive|valid)|"
        r"non-integer argument|must be (?:an? )?(?:integer|number|positive|non-negative|one of)|out of range|"
        r"malformed (?:number|url|url input)|"
        r"unsupported (?:protocol|scheme|url)|bad (?:number|range|port|url|argument|format)|no such (?:user|group|"
        r"signal)|does not (?:match|make sense)|"
        r"is not a commit|needed a single revision|unknown date format|bad date|cannot parse|failed to parse|"
        r"too few X's in|illegal (?:number|byte|time|line|list)|"
        r"the (?:argument|value) .{1,80} (?:is|cannot)|cannot be used with|mutually exclusive|not allowed with|"
        r"options? .{1,80} (?:cannot|can't) be (?:used|combined)|"
        r"incompatible options?|conflicting options?|can't be used together|cannot combine|only one .{1,60} (?:may|"
        r"can) be|"
        r"wrong expression passed|bad option|unrecogni[sz]ed (?:input|format)|URL rejected|bad interpreter option|"
        r"too many (?:operands|parameters)|"
        r"expects? (?:an?|at (?:least|most)|exactly) .{1,60}",
        "argument",
    ),
)
_NOT_ARGUMENTS = re.compile(
    r"^\s|^(?:warning|note|hint|info|debug|I|W)\b|not a git repository|syntax error|invalid syntax|^Hint:|"
    r"invalid literal|: (?-i:[A-Z]\w*Error): (?!.*argument)|"
    r"invalid (?:magic|header|compressed|tar|signature|cross-device|checksum|password|credentials|token|json|utf)|"
    r"bad (?:substitution|address|gateway)|^\s*at |invalid option name: pipefail$",
    re.IGNORECASE,
)
_USAGE = re.compile(r"^(?:ERROR: )?(?:\S+: )?usage:(?:\s|$)|: usage: ", re.IGNORECASE)
_TRY_HELP = re.compile(
    r"^(?:\S+: )?(?:Try|See|Run|Use) ['`\"‘]?[\w ./+-]+(?: -h\b| --?help\b| --usage\b| help\b)|"
    r"^For more information,? try '?--help",
    re.IGNORECASE,
)
_ERROR_LINE = re.compile(r"^(?:[\w./-]+: )?error: ", re.IGNORECASE)
_CHAR = re.compile(r"(?:--|:|flag|switch) ?['\"‘`]?-{0,2}(?P<char>[A-Za-z0-9#@%?])['\"’`]?(?:$|[\s.,(])")
_VALUE_OF = re.compile(r"argument ['\"‘`][^'\"’`]{1,200}['\"’`] (?:to|for|of) ['\"‘`]?-.*")
_DASHED = re.compile(r"(?<![\w-])(?P<word>--?[A-Za-z0-9][\w.=/:-]*)")


def _arguments(turn: Turn) -> Finding | None:
    general: ErrorSite | None = None
    fired = False
    look_at_calls = 1 + len(turn.action.invocations) // 4
    for line in turn.messages:
        if _USAGE.search(line) or _TRY_HELP.match(line):
            fired = True
            if general is None and not turn.spend(look_at_calls):
                return Finding()
            general = general or _call_site(turn, read_message(line), line)
            continue
        if _NOT_ARGUMENTS.search(line) or (turn.crash and line == turn.crash.line and "OptionParser" not in line):
            continue
        for phrase in PHRASES:
            match = phrase.pattern.search(line)
            if match is None:
                continue
            if not turn.spoken(line):
                break
            fired = True
            if not turn.spend(look_at_calls):
                return Finding()
            message = read_message(line)
            span = _got(turn, message) if phrase.at == "call" else _fault(turn, message, phrase, match)
            if span is not None:
                return Finding((site(line, span=span),))
            if phrase.at == "call":
                found = _call_site(turn, message, line)
                return Finding((found,) if found else ())
            general = _call_site(turn, message, line) or general
            break
    if not fired:
        return None
    return Finding(tuple(filter(None, (_blamed_below_usage(turn) or general,))))


def _blamed_below_usage(turn: Turn) -> ErrorSite | None:
    """Return the site of the argument that a click or argparse program names in the error line below its usage."""
    for line in turn.messages:
        if _ERROR_LINE.match(line) and (span := argument_span(turn, quoted(line), in_code=False)):
            return None if _is_program(turn, span) else site(line, span=span)
    return None


def _fault(turn: Turn, message: Message, phrase: Phrase, match: re.Match[str]) -> Span | None:
    """Return the span of the argument that the message complains about, None if it is unknown."""
    if phrase.at == "pattern":
        call = _call(turn, message)
        return _pattern_operand(call) if call else None
    rest = message.text[match.start() :]
    quotes = quoted(message.rest)
    after = rest[match.end() - match.start() :]
    blamed = re.sub(r"\((?:choose|possible|valid|expected)\b.*", "", rest)
    names = [*reversed(quoted(blamed)), *reversed(quotes)]
    value = _VALUE_OF.search(message.rest)
    if value:  # "invalid argument `soon' to `-mtime'" blames soon
        span = argument_span(turn, quoted(value.group())[:1], message.program, in_code=False)
        if span:
            return span
    if phrase.at == "option":
        for name in quoted(rest) or quotes:
            dashed = argument_span(turn, (name,), message.program, in_code=False) if name.startswith("-") else None
            span = dashed or (_bundle(turn, message, name) if len(name) == 1 else None)
            span = span or _long(turn, message, name)
            if span:
                return span
        single = _CHAR.search(rest)
        if single and not quotes:
            span = _bundle(turn, message, single.group("char"))
            if span:
                return span
        names += [after.rsplit(": ", 1)[1].strip()] if ": " in after else []
        names += [m.group("word").rstrip(":.,=") for m in _DASHED.finditer(rest)]
    else:
        names += [p.strip() for p in after.split(": ") if p.strip()]
        names.sort(key=lambda n: n.startswith("-"))  # "argument --maxfail: invalid int value: 'x'" blames x
    names += _tokens(after)
    before = message.text[: match.start()]
    names += [m.group("word") for m in _DASHED.finditer(before)]
    names += [p.strip() for p in reversed(message.rest.split(": ")) if p.strip()]
    names += list(reversed(_tokens(message.rest)))[:8] if phrase.at == "argument" else []
    span = argument_span(
        turn, (n for n in names if len(n) < 400 and n != message.program), message.program, in_code=False
    )
    return span if span is not None and not _is_program(turn, span) else None


def _got(turn: Turn, message: Message) -> Span | None:
    """Return the argument in "expected a number, but got 'x'", or the option that lacks its value.

    None for other messages about a missing operand: their site is the call.
    """
    if " got " not in message.rest:
        options = [m.group("word").rstrip(":.,=") for m in _DASHED.finditer(message.rest)]
        words = [w for call in _calls(turn, message) for w in call.words[1:]]
        return next((w.inner for option in options for w in words if w.value == option), None)
    return argument_span(turn, quoted(message.rest.split(" got ", 1)[1])[:1], message.program, in_code=False)


def _is_program(turn: Turn, span: Span) -> bool:
    return any(c.words and c.words[0].inner == span for c in turn.action.invocations)


def _tokens(text: str) -> list[str]:
    return [t for t in (w.strip("'\"`‘’.,;:()[]") for w in text.split()[:8]) if t]


def _bundle(turn: Turn, message: Message, char: str) -> Span | None:
    """Return the word of single-letter options that has ``char`` (``tar -xzQf``)."""
    for call in _calls(turn, message):
        for word in call.words[1:]:
            if re.match(r"-[^-]", word.value) and char in word.value[1:]:
                return word.inner
    return None


def _long(turn: Turn, message: Message, name: str) -> Span | None:
    """Return the long option that a message names without dashes or value (git's "unknown option `onelin'")."""
    bare = name.lstrip("-").split("=", 1)[0]
    for call in _calls(turn, message):
        for word in call.words[1:]:
            if word.value.startswith("-") and word.value.lstrip("-").split("=", 1)[0] == bare:
                return word.inner
    return None


def _pattern_operand(call: Invocation) -> Span | None:
    previous = ""
    for word in call.words[1:]:
        if previous in ("-e", "--regexp") or (
            not word.value.startswith("-") and previous not in ("-A", "-B", "-C", "-m", "-g", "-t", "-f")
        ):
            return word.inner
        previous = word.value
    return None


def _calls(turn: Turn, message: Message) -> list[Invocation]:
    program = message.program.rsplit("/", 1)[-1]
    calls = [c for c in reversed(turn.action.invocations) if c.words]
    own = [
        c for c in calls if c.program == program or any(w[0].value.rsplit("/", 1)[-1] == program for w in c.wrappers)
    ]
    return own or calls


def _call(turn: Turn, message: Message) -> Invocation | None:
    """Return the call that a message complains about: the last one of its program, else the one that decided the
    status."""
    program = message.program.rsplit("/", 1)[-1]
    for call in reversed(turn.action.invocations):
        if call.words and (
            call.program == program or any(program == w[0].value.rsplit("/", 1)[-1] for w in call.wrappers)
        ):
            return call
    named = [
        c
        for c in turn.action.invocations
        if c.words and any(w.value.rsplit("/", 1)[-1] == program for w in c.words[1:3])
    ]
    if named:
        return named[-1]
    deciders = [c for c in turn.action.deciders if c.words and c.program not in ("exit", "return")]
    return deciders[0] if deciders else None


def _call_site(turn: Turn, message: Message, line: str) -> ErrorSite | None:
    call = _call(turn, message)
    return site(line, "message", span=call.span) if call else None


RULES = (
    Rule(
        "arguments.invalid",
        ErrorKind.INVALID_ARGUMENTS,
        "An option, command, value or revision that a program does not know, a missing or extra operand, a regular "
        "expression that does not parse, or a usage text.",
        "The argument at fault; the whole simple command when no single argument is.",
        _arguments,
    ),
)

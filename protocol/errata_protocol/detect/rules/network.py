"""Rules for attempts to reach the network, which the sandbox forbids."""

from __future__ import annotations

import re

from errata_protocol.detect.place import INLINE_FILES, Span, inline_span, site
from errata_protocol.detect.rules.rule import Finding, Rule
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import ErrorKind

_UNREACHABLE = re.compile(
    r"could(?: not|n't) resolve (?:host|proxy|')|cannot resolve host|unable to resolve host|"
    r"temporary failure (?:in name resolution|resolving)|"
    r"name or service not known|network is unreachable|network unreachable|\bEAI_AGAIN\b|\bENOTFOUND\b|\bENETUNREACH\b|"
    r"\bEHOSTUNREACH\b|no address associated with hostname|nodename nor servname|getaddrinfo failed|no route to host|"
    r"failed to lookup address|lookup \S+(?: on \S+)?: (?:no such host|server misbehaving|dial|temporary)|"
    r"UnknownHostException|"
    r"name resolution failed|failed to resolve(?! (?:import|source|entry|module)\b|: use of )|"
    r"host not found|unknown host|bad (?:address|hostname)|"
    r"blocked by (?:the )?(?:network )?policy|"
    r"command (?:is )?(?:blocked|not allowed) by policy",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"connection refused|connection timed out|ECONNREFUSED|ETIMEDOUT|failed to connect to|couldn't connect to server|"
    r"connection failed|unable to connect",
    re.IGNORECASE,
)
_HOST_SAID = re.compile(
    r"(?:host(?:name)?(?: address)?[:=]? |host=|resolve |resolving |lookup |ENOTFOUND |EAI_AGAIN |connect to |"
    r"connecting to )"
    r"['\"‘`(]?(?:\w+://)?(?P<host>[A-Za-z0-9][\w.-]{0,253})",
    re.IGNORECASE,
)
_HOST = re.compile(r"(?<![\w.-])(?:\d{1,3}(?:\.\d{1,3}){3}|(?:[A-Za-z0-9][\w-]{0,62}\.){1,8}[A-Za-z]{2,24})(?![\w-])")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{1,20}://[^\s'\"<>|;&()`\\]{1,2000}")
_LOOPBACK = re.compile(r"(?<![\w.])(?:localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[?::1\]?)(?![\w.])", re.IGNORECASE)
_NOT_A_HOST = re.compile(r"\.(?:py|js|ts|c|h|sh|txt|json|md|go|rs|java|rb|pl|log|cfg|toml|yaml|yml|lock|whl|gz)$")
_HARMLESS = ("sudo: unable to resolve host",)


def _network(turn: Turn) -> Finding | None:
    if turn.report is not None:
        return _tests_offline(turn)
    lines = turn.lines
    hit = None
    for line in lines:
        if line.startswith(_HARMLESS):
            continue
        if _UNREACHABLE.search(line) or (_REFUSED.search(line) and _remote(turn, line)):
            hit = line
            if _place(turn, line) is not None:
                break
    if hit is None:
        return None
    span = _place(turn, hit) or _only_address(turn)
    return Finding((site(hit, "message", span=span),))


def _tests_offline(turn: Turn) -> Finding | None:
    """Return the finding for a test run in which every failing test stopped at the network."""
    assert turn.report is not None
    failed = turn.report.failed
    if not failed or not all(_UNREACHABLE.search(t.text) for t in failed):
        return None
    return Finding((site(failed[0].line, test_id=failed[0].test_id),))


_CURL_STATUS = (5, 6)  # no such proxy, no such host
_WGET_STATUS = 4  # network failure


def _silent_network(turn: Turn) -> Finding | None:
    """Return the finding for ``curl -s`` and ``wget -q``, which report a network failure only by their exit status."""
    calls = turn.action.deciders
    if len(calls) != 1 or any(turn.stderr):
        return None
    call = calls[0]
    if (call.program == "curl" and turn.exit_code in _CURL_STATUS) or (
        call.program == "wget" and turn.exit_code == _WGET_STATUS
    ):
        span = _address_in(turn, *call.span)
        if span is None or not _LOOPBACK.search(turn.command[span[0] : span[1]]):
            return Finding((site("", "action", span=span),) if span else ())
    return None


def _remote(turn: Turn, line: str) -> bool:
    """Return whether a refused connection went to another machine, which is only known if the line names the host."""
    if _LOOPBACK.search(line):
        return False
    said = [m.group("host") for m in _HOST_SAID.finditer(line)]
    seen = [h for h in _hosts(line) if h[-1:].isdigit() or re.search(re.escape(h) + r"(?![\w.(])", turn.command)]
    return any(not _NOT_A_HOST.search(h) for h in (*said, *seen) if "." in h)


def _hosts(line: str) -> list[str]:
    said = [m.group("host").rstrip(".") for m in _HOST_SAID.finditer(line)]
    return [*said, *(m.group() for m in _HOST.finditer(line))]


def _place(turn: Turn, line: str) -> Span | None:
    """Return the span of the URL with the host that ``line`` names, or of the host alone."""
    command = turn.command
    for host in _hosts(line):
        if len(host) < 2 or host.lower() in ("host", "hostname", "address", "name", "server", "proxy"):
            continue
        for url in _URL.finditer(command):
            if host in url.group():
                return url.span()
        match = re.search(r"(?<![\w.-])" + re.escape(host) + r"(?![\w-])", command)
        if match and not _NOT_A_HOST.search(host):
            return match.span()
    return None


def _only_address(turn: Turn) -> Span | None:
    """Return the span of an address if the message names no host: the one in the failing line of inline code, else
    the only one in the last call."""
    start, end = 0, len(turn.command)
    if turn.tracebacks:
        inline = [frame for frame in turn.tracebacks[-1].frames if frame.file in INLINE_FILES]
        if not inline:
            return None
        frame = inline[-1]  # what it calls may be the agent's too: the library under repair opens the connection
        start, end = inline_span(turn, frame.file, frame.line) or (start, end)
        return _address_in(turn, start, end, in_code=True) or _address_in(turn, 0, len(turn.command), in_code=True)
    return _address_in(turn, start, end)


def _address_in(turn: Turn, start: int, end: int, *, in_code: bool = False) -> Span | None:
    urls = [m.span() for m in _URL.finditer(turn.command, start, end)]
    if urls:
        return urls[-1]
    hosts = [m.span() for m in _HOST.finditer(turn.command, start, end) if not _NOT_A_HOST.search(m.group())]
    if in_code:  # `socket.create_connection` has the form of a host name too: only what stands in quotes counts
        hosts = [(a, b) for a, b in hosts if turn.command[a - 1 : a] in ("'", '"')]
    return hosts[0] if len(hosts) == 1 else None


RULES = (
    Rule(
        "network.unreachable",
        ErrorKind.POLICY_VIOLATION,
        "A name that does not resolve, an unreachable network, or a refused connection to another machine than this; "
        "in a test report only when every failing test stopped there.",
        "The URL in the action that has the host of the message, else the host; none if the action names neither.",
        _network,
    ),
    Rule(
        "network.status",
        ErrorKind.POLICY_VIOLATION,
        "curl or wget ends in its exit status for a host that cannot be resolved or reached, without a word.",
        "The URL or host in that call.",
        _silent_network,
    ),
)

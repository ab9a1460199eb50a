"""Restricts the sites found on a server's own machine to the agent's code, and removes paths of that machine."""

from __future__ import annotations

import posixpath

from errata_protocol.detect.agent_files import AgentFiles
from errata_protocol.detect.interpreted import CODE_NAME, last_exception, named_span
from errata_protocol.detect.text import message
from errata_protocol.detect.turn import Turn
from errata_protocol.markers import Detection, ErrorKind, ErrorSite

_PLACED_BY_NAME = frozenset(
    [
        ErrorKind.SYNTAX_ERROR,
        ErrorKind.IMPORT_ERROR,
        ErrorKind.PERMISSION_DENIED,
        ErrorKind.PATH_NOT_FOUND,
        ErrorKind.RUNTIME_ERROR,
    ]
)
"""Kinds whose message names what is at fault."""


def agent_sites(turn: Turn, found: Detection, files: AgentFiles) -> Detection:
    """Return the detection with only the sites in the agent's code.

    A site in another file is dropped. A message that names a part of the action gets the span of that part. A message
    without any place is kept, because it says what happened.

    Args:
        turn: The turn.
        found: The detection by the rules.
        files: The agent's files.
    """
    if found.error_kind is None:
        return found
    sites = [_owned(site, files) for site in found.error_sites]
    sites = [s for s in sites if s.file or s.action_span or s.test_id or s.message]
    if found.error_kind in _PLACED_BY_NAME and not any(s.action_span for s in sites):
        line, text = _exception(turn)
        span = named_span(turn, text or (sites[0].message or "" if sites else ""))
        if not sites and line:
            sites = [ErrorSite(source="message", message=files.redacted(message(line)))]
        if span is not None and sites:
            sites[0] = sites[0].model_copy(update={"action_field": "command", "action_span": span})
    return Detection.of(
        found.error_kind, *dict.fromkeys(sites), severity=found.severity, hint_template_key=found.hint_template_key
    )


def _owned(site: ErrorSite, files: AgentFiles) -> ErrorSite:
    changes: dict[str, object] = {"message": files.redacted(site.message) if site.message else None}
    if site.file is not None and not CODE_NAME.match(site.file):
        if not files.owns(site.file):
            changes |= {"file": None, "line": None, "column": None}
            changes |= {"source": "message"} if site.source == "traceback" else {}
        elif site.file.startswith("/") and (root := files.root(site.file)) is not None and root != site.file:
            changes |= {"file": posixpath.relpath(site.file, root)}
    if site.test_id is not None and not files.owns(site.test_id.split("::", 1)[0]):
        changes |= {"test_id": None}
    return site.model_copy(update=changes)


def _exception(turn: Turn) -> tuple[str, str]:
    """Return the exception that ended the turn, as ``Name: message``, and its message alone.

    This is the exception of the last traceback from which no other was raised, or without a traceback the one in the
    last line that is not blank. If that line has none, both are the line.
    """
    ends = [t for t in turn.tracebacks if not t.caused_next and not t.of_logging]
    if ends:
        return ends[-1].line, ends[-1].text
    words = last_exception(turn)
    if words:
        return ": ".join(words), words[1]
    last = next((line for line in reversed(turn.lines) if line.strip()), "")
    return last, last

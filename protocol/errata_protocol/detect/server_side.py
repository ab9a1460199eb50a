"""Markers that only a server can give: unknown tools, refused paths, cut output. No output is read."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from errata_protocol.detect.text import MESSAGE_CHARS
from errata_protocol.detect.text import message as bounded_message
from errata_protocol.markers import Detection, ErrorKind, ErrorSite

_KIND_OF_ERRNO = {
    "ENOENT": ErrorKind.PATH_NOT_FOUND,
    "EACCES": ErrorKind.PERMISSION_DENIED,
    "EPERM": ErrorKind.PERMISSION_DENIED,
    "EROFS": ErrorKind.PERMISSION_DENIED,
    "ENOSPC": ErrorKind.RESOURCE_LIMIT,
    "EDQUOT": ErrorKind.RESOURCE_LIMIT,
    "EFBIG": ErrorKind.RESOURCE_LIMIT,
}


def tool_not_found(tool: str, known: Sequence[str], action_field: str = "tool") -> Detection:
    """Return the marker of an action whose tool does not exist.

    Args:
        tool: The name that the agent used.
        known: Names that exist; the message lists them sorted.
        action_field: Field of the action with the name.

    Returns:
        A detection whose site spans the whole name.
    """
    text = f"unknown tool {tool[:MESSAGE_CHARS]!r}; known: {', '.join(sorted(known))}"
    return Detection.of(ErrorKind.TOOL_NOT_FOUND, _whole(tool, action_field, text))


def output_truncated() -> Detection:
    """Return the marker of a turn whose output was cut and that has no other error: a warning without a site."""
    return Detection.of(ErrorKind.OUTPUT_TRUNCATED, severity="warning")


def path_refused(path: str, reason: str | int, message: str, action_field: str = "path") -> Detection:
    """Return the marker of a file tool's call that the file system refused.

    Args:
        path: The path as the agent wrote it.
        reason: Symbolic errno (``"ENOENT"``) or its number.
        message: The tool's answer.
        action_field: Field of the action with the path.

    Returns:
        path_not_found, permission_denied or resource_limit, or invalid_arguments for all other reasons
        (EISDIR, ENOTDIR, ELOOP, EINVAL, ENAMETOOLONG ...); the site spans the whole path.
    """
    name = errno.errorcode.get(reason, "") if isinstance(reason, int) else reason.upper()
    kind = _KIND_OF_ERRNO.get(name, ErrorKind.INVALID_ARGUMENTS)
    return Detection.of(kind, _whole(path, action_field, message))


def _whole(text: str, action_field: str, message: str) -> ErrorSite:
    return ErrorSite(
        action_field=action_field if text else None,
        action_span=(0, len(text)) if text else None,
        source="action",
        message=bounded_message(message) or None,
    )

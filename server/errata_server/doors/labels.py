"""Labels of the sessions that plain sockets and HTTP make: they come in a header (PROTOCOL A8)."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from errata_protocol.errors import ErrataError, InvalidRequest
from errata_protocol.labels import HEADER, MAX_HEADER, NO_LABELS, Labels, labels_of

from .strict_json import parse_object

LabelHeaders = tuple[bytes, ...]
"""The values of a connection's headers of labels, as they came. A socket keeps them until its session is made, and is
answered then if they are wrong: the rest of its handshake is gone by that time."""

_NAME = HEADER.lower().encode()


def label_headers(connection: HTTPConnection) -> LabelHeaders:
    """Return the headers of labels of a request or handshake."""
    return tuple(value for name, value in connection.headers.raw if name == _NAME)


def read_labels(sent: LabelHeaders) -> Labels:
    """Return the labels in headers.

    Raises:
        InvalidRequest: There are several headers, or one that is too long or has no labels.
    """
    if not sent:
        return NO_LABELS
    if len(sent) > 1:
        raise InvalidRequest(f"the header {HEADER} is there {len(sent)} times: send it once")
    if len(sent[0]) > MAX_HEADER:
        raise InvalidRequest(f"the header {HEADER} has {len(sent[0])} bytes, at most {MAX_HEADER} are read")
    try:
        return labels_of(parse_object({"bytes": sent[0]}, MAX_HEADER))
    except ErrataError as error:
        raise InvalidRequest(
            f"the header {HEADER} is a JSON object with group, step and run: {error.message}"
        ) from error

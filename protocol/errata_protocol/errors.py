"""All exceptions of Errata, and their codes on the wire.

    ErrataError
    ├── CallerError                 the caller misused the protocol or named something that does not exist
    │   ├── InvalidRequest          a frame or field is not valid                 VALIDATION_ERROR
    │   ├── UnknownEpisode          no such eid, or another principal's           UNKNOWN_EPISODE
    │   ├── StateOutOfRange         the episode has no delivery t                 T_OUT_OF_RANGE
    │   ├── NoReset                 t=0 was never delivered                       NO_RESET
    │   ├── SessionUnknown          no such session, or another principal's       SESSION_ERROR
    │   ├── Conflict                same id, other content                        CONFLICT
    │   ├── RequestIdReused         a request_id of another request               REQUEST_ID_REUSED
    │   ├── ReplyGone               a request_id whose reply is not kept          REPLY_GONE
    │   ├── NotSupported            the peer or environment cannot do this        NOT_SUPPORTED
    │   ├── Unparsable              a frame is not JSON                           INVALID_JSON
    │   ├── FrameTooLarge           a frame exceeds a limit                       FRAME_TOO_LARGE
    │   ├── UnknownType             unknown message type                          UNKNOWN_TYPE
    │   ├── OutOfOrder              a request id after the next one               OUT_OF_ORDER
    │   ├── PreconditionFailed      the session is not where ``if`` requires      PRECONDITION_FAILED
    │   ├── NotAttached             the session is not attached to this socket    NOT_ATTACHED
    │   ├── Cancelled               cancelled before it started                   CANCELLED
    │   ├── SessionClosed           closed by its owner                           SESSION_CLOSED
    │   ├── SessionExpired          the session expired                           SESSION_EXPIRED
    │   ├── InvalidEnvelope         a frame's element is not a valid envelope     INVALID_ENVELOPE
    │   ├── LocalProtocolError      this side used its state machine wrongly      PROTOCOL_MISUSED
    │   └── Unauthorized            credentials are missing or wrong              UNAUTHORIZED
    └── ServiceError                the machine or the environment's code failed: never a reward
        ├── EnvironmentFailed       reset or step raised an exception             EXECUTION_ERROR
        ├── EnvironmentOutputInvalid its output cannot be encoded as JSON         ENV_OUTPUT_INVALID
        ├── SandboxUnavailable      a namespace, cgroup or tool is missing        SANDBOX_UNAVAILABLE
        ├── SandboxFailed           the sandbox failed while in use               SANDBOX_FAILED
        ├── JournalUnavailable      a commit cannot be made durable               JOURNAL_UNAVAILABLE
        ├── SessionLost             the session cannot be continued               SESSION_LOST
        ├── CapacityReached         no capacity for another session               CAPACITY_REACHED
        ├── Misdirected             an id names another shard                     MISDIRECTED
        ├── Overloaded              not now: too many in flight, or no instance   OVERLOADED
        ├── ReplyExpired            executed; the reply is no longer kept         REPLY_EXPIRED
        ├── RemoteProtocolError     the peer violated the protocol                PROTOCOL_ERROR
        └── StepTimeout             the step deadline passed (infrastructure)     TIMEOUT

A failing *command* is none of these: it is an observation with a marker. Each class has a stable ``code``. For every
code `CODES` says whose fault it is, whether a retry can help, whether it consumes a mux request id (PROTOCOL D5) and
whether the session survives.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from . import json_text

Fault = Literal["caller", "service"]

RETRY_AFTER_S = 1.0
"""``retry_after`` of `Misdirected`, seconds: by then what routes requests may know the server of the shard."""


@dataclass(frozen=True, slots=True)
class CodeInfo:
    """What a wire code means to the peer that receives it.

    Args:
        fault: Who has to change something: the caller, or the service and its machine.
        retryable: Whether the same request can succeed later without a change by the caller.
        consumes_id: Whether, on multiplexed sockets, the error is the recorded reply of the request's id (PROTOCOL D5).
        session_survives: Whether the session can take another request after this error.
        http_status: HTTP status of the error.
    """

    fault: Fault
    retryable: bool
    consumes_id: bool
    session_survives: bool
    http_status: int


CODES: dict[str, CodeInfo] = {
    # upstream's, unchanged
    "INVALID_JSON": CodeInfo("caller", False, False, True, 400),
    "UNKNOWN_TYPE": CodeInfo("caller", False, False, True, 400),
    "VALIDATION_ERROR": CodeInfo("caller", False, True, True, 422),
    "EXECUTION_ERROR": CodeInfo("service", False, True, True, 500),
    "CAPACITY_REACHED": CodeInfo("service", True, False, False, 503),
    "FACTORY_ERROR": CodeInfo("service", False, False, False, 500),
    "SESSION_ERROR": CodeInfo("caller", False, False, False, 404),
    # ours
    "UNKNOWN_EPISODE": CodeInfo("caller", False, True, True, 404),
    "T_OUT_OF_RANGE": CodeInfo("caller", False, True, True, 404),
    "NO_RESET": CodeInfo("caller", False, True, True, 404),
    "CONFLICT": CodeInfo("caller", False, False, True, 409),
    "OUT_OF_ORDER": CodeInfo("caller", True, False, True, 409),
    "PRECONDITION_FAILED": CodeInfo("caller", False, True, True, 412),
    "REQUEST_ID_REUSED": CodeInfo("caller", False, False, True, 409),
    "REPLY_GONE": CodeInfo("caller", False, False, True, 410),
    "NOT_ATTACHED": CodeInfo("caller", False, False, True, 409),
    "NOT_SUPPORTED": CodeInfo("caller", False, True, True, 501),
    "UNAUTHORIZED": CodeInfo("caller", False, False, True, 401),
    "FORBIDDEN": CodeInfo("caller", False, False, True, 403),
    "FRAME_TOO_LARGE": CodeInfo("caller", False, False, True, 413),
    "CANCELLED": CodeInfo("caller", False, True, True, 409),
    "SESSION_LOST": CodeInfo("service", False, False, False, 410),
    "SESSION_CLOSED": CodeInfo("caller", False, False, False, 410),
    "SESSION_EXPIRED": CodeInfo("caller", False, False, False, 410),
    "MISDIRECTED": CodeInfo("service", True, False, True, 421),
    "OVERLOADED": CodeInfo("service", True, False, True, 503),
    "JOURNAL_UNAVAILABLE": CodeInfo("service", True, False, True, 503),
    "SANDBOX_UNAVAILABLE": CodeInfo("service", False, True, True, 503),
    "SANDBOX_FAILED": CodeInfo("service", True, True, True, 500),
    "TIMEOUT": CodeInfo("service", False, True, True, 504),
    "ENV_OUTPUT_INVALID": CodeInfo("service", False, True, True, 500),
    # mux only
    "INVALID_ENVELOPE": CodeInfo("caller", False, False, True, 400),
    "REPLY_EXPIRED": CodeInfo("service", False, True, True, 410),
    "PROTOCOL_MISUSED": CodeInfo("caller", False, False, True, 400),
    "PROTOCOL_ERROR": CodeInfo("service", True, False, True, 502),
}


class ErrataError(RuntimeError):
    """Base class of all errors that Errata raises on purpose.

    A `RuntimeError`, like the error that OpenEnv's own client raises for an error frame, so that code which catches
    that keeps working with Errata's client.

    Args:
        message: What happened, to what, and what to do next. What has no UTF-8 form in it is escaped; an empty one,
            as other servers send for a bare ``assert``, becomes the name of the class.
        details: Fields for the wire, beside ``message`` and ``code``.
    """

    code: ClassVar[str] = "EXECUTION_ERROR"

    def __init__(self, message: str, /, **details: Any) -> None:
        message = message.encode("utf-8", "backslashreplace").decode()
        message = message if message.strip() else type(self).__name__
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[Any, ...]:
        # BaseException's own would call the class with the message alone, and many of them take other arguments.
        return _restored, (type(self), self.message, self.__dict__)

    @property
    def info(self) -> CodeInfo:
        """The row of `CODES` for this error; for a code that this version does not know, that of its class."""
        return CODES.get(self.code) or CODES[type(self).code]

    @property
    def retryable(self) -> bool:
        """Whether the same request can succeed later unchanged."""
        return self.info.retryable

    def to_wire(self) -> dict[str, Any]:
        """Return the ``data`` of upstream's error frame: message, code and details. It always has a JSON form."""
        return {
            "message": self.message,
            "code": self.code,
            **{name: _sent(value) for name, value in self.details.items()},
        }


def _restored(cls: type[ErrataError], message: str, attributes: dict[str, Any]) -> ErrataError:
    """Return an error as it was pickled or copied."""
    error = cls.__new__(cls, message)
    error.__dict__.update(attributes)
    return error


def _sent(value: Any) -> Any:
    try:
        return json.loads(json_text.encode(value))
    except ValueError:
        return f"a {type(value).__name__} without a JSON form"


class CallerError(ErrataError):
    """The caller misused the protocol or named something that does not exist."""

    code = "VALIDATION_ERROR"


class ServiceError(ErrataError):
    """The service, its machine or the environment's own code failed. Never an observation, never a reward."""

    code = "EXECUTION_ERROR"


class InvalidRequest(CallerError):
    """A request that cannot be read or lacks a field."""

    code = "VALIDATION_ERROR"


class RequestIdReused(CallerError):
    """A ``request_id`` that was given to another request; nothing ran now."""

    code = "REQUEST_ID_REUSED"


class ReplyGone(CallerError):
    """The request with this ``request_id`` ran, and its reply is no longer kept; nothing ran now."""

    code = "REPLY_GONE"


class UnknownEpisode(CallerError):
    """No such episode, or one that belongs to another principal; the error is the same."""

    code = "UNKNOWN_EPISODE"

    def __init__(self, eid: str) -> None:
        super().__init__(f"no episode {eid!r} here: list them with GET /episodes or `errata episodes`", eid=eid)


class StateOutOfRange(CallerError):
    """The episode has no delivery t and cannot get one."""

    code = "T_OUT_OF_RANGE"

    def __init__(self, eid: str, t: int, deliveries: int) -> None:
        last = deliveries - 1
        super().__init__(
            f"episode {eid} has deliveries 0..{last}, not t={t}: ask for t between 0 and {last}",
            eid=eid,
            t=t,
            deliveries=deliveries,
        )


class NoReset(CallerError):
    """The session or episode has no reset payload."""

    code = "NO_RESET"


class SessionUnknown(CallerError):
    """No such session, or one that belongs to another principal."""

    code = "SESSION_ERROR"


class Conflict(CallerError):
    """The same request id was used with other content."""

    code = "CONFLICT"


class NotSupported(CallerError):
    """The peer or the environment cannot do what was asked."""

    code = "NOT_SUPPORTED"


class Unparsable(CallerError):
    """A frame that is not JSON; it had no effect."""

    code = "INVALID_JSON"


class FrameTooLarge(CallerError):
    """A frame over a limit; it was not processed."""

    code = "FRAME_TOO_LARGE"


class UnknownType(CallerError):
    """A message type that the receiver does not know."""

    code = "UNKNOWN_TYPE"


class OutOfOrder(CallerError):
    """A request id after the next one; the request was not admitted."""

    code = "OUT_OF_ORDER"


class PreconditionFailed(CallerError):
    """The session was not at the position that the request's ``if`` requires; the request had no effect."""

    code = "PRECONDITION_FAILED"


class NotAttached(CallerError):
    """The session is not attached to this socket."""

    code = "NOT_ATTACHED"


class Cancelled(CallerError):
    """The request was cancelled before it started."""

    code = "CANCELLED"


class SessionClosed(CallerError):
    """The session was closed by its owner."""

    code = "SESSION_CLOSED"


class SessionExpired(CallerError):
    """The session expired."""

    code = "SESSION_EXPIRED"


class InvalidEnvelope(CallerError):
    """An element of a frame that is not a valid envelope; it consumes no id."""

    code = "INVALID_ENVELOPE"


class LocalProtocolError(CallerError):
    """This side called its own state machine in a state that does not allow it."""

    code = "PROTOCOL_MISUSED"


class Unauthorized(CallerError):
    """Credentials are missing or wrong."""

    code = "UNAUTHORIZED"


class EnvironmentFailed(ServiceError):
    """The environment's reset, step or snapshot raised an exception."""

    code = "EXECUTION_ERROR"


class EnvironmentOutputInvalid(ServiceError):
    """The environment returned something that cannot be encoded as JSON."""

    code = "ENV_OUTPUT_INVALID"


class SandboxUnavailable(ServiceError):
    """The machine lacks something that the sandbox needs; the message says what, and how to get it."""

    code = "SANDBOX_UNAVAILABLE"


class SandboxFailed(ServiceError):
    """The sandbox failed while in use, not because of the command in it."""

    code = "SANDBOX_FAILED"


class JournalUnavailable(ServiceError):
    """A commit cannot be made durable now; nothing was acknowledged."""

    code = "JOURNAL_UNAVAILABLE"


class SessionLost(ServiceError):
    """The session cannot be continued; what was committed stays readable by its eid."""

    code = "SESSION_LOST"


class CapacityReached(ServiceError):
    """The server has no capacity for another session."""

    code = "CAPACITY_REACHED"


class Misdirected(ServiceError):
    """An id names another data directory than that of the server that was asked; nothing ran, and nothing is lost.

    Args:
        shard: Name of the shard that the id names.
        url: Where it is served; None where this server does not know.
    """

    code = "MISDIRECTED"

    def __init__(self, shard: str, url: str | None = None) -> None:
        where = url if url is not None else "its own server"
        text = f"an id of the request names the shard {shard}, which is not here: ask {where}"
        super().__init__(text, shard=shard, retry_after=RETRY_AFTER_S, **({"url": url} if url is not None else {}))


class Overloaded(ServiceError):
    """The server does not take the request now: too many are in flight, or its session could not be brought back."""

    code = "OVERLOADED"


class ReplyExpired(ServiceError):
    """The request was executed, once, but the journal no longer keeps its reply."""

    code = "REPLY_EXPIRED"


class RemoteProtocolError(ServiceError):
    """The peer violated the protocol: close the socket, connect again and resume."""

    code = "PROTOCOL_ERROR"


class StepTimeout(ServiceError):
    """The deadline of the step passed. A command's own timeout is an observation instead."""

    code = "TIMEOUT"


def _subclasses(cls: type[ErrataError]) -> list[type[ErrataError]]:
    return [cls, *(s for c in cls.__subclasses__() for s in _subclasses(c))]


def error_from_wire(data: dict[str, Any]) -> ErrataError:
    """Build the exception for an error frame's ``data``.

    Args:
        data: ``{"message", "code", ...}`` as received. An unknown code becomes a `ServiceError` that keeps the text.

    Returns:
        An instance whose ``code`` equals the wire code where this version knows it.
    """
    code = str(data.get("code", ""))
    details = {k: v for k, v in data.items() if k not in ("message", "code")}
    message = str(data.get("message", "unknown error"))
    cls = _BY_CODE.get(
        code, ServiceError if CODES.get(code, CODES["EXECUTION_ERROR"]).fault == "service" else CallerError
    )
    error = cls.__new__(cls)
    ErrataError.__init__(error, message, **details)
    if code and error.code != code:
        error.__dict__["code"] = code
    return error


# Leaves come after their parents, so the most specific class wins.
_BY_CODE = {cls.code: cls for cls in _subclasses(ErrataError) if "code" in vars(cls)}

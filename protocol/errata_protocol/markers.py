"""Error-site markers: the list of error kinds, where an error is, and the key of its hint template (PROTOCOL B).

A detector returns a `Detection`; an environment's Observation mixes `ErrorMarkers` in and calls `with_detection`.
The published names are mirrored in ``metadata`` so that clients that only know stock OpenEnv see them too; and so that
those that know the convention proposed to OpenEnv do, an error stands there as ``error_info`` as well (`error_info`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .error_info import KEY, ErrorInfo, InfoSite

VERSION = 2
"""Of the extension ``error_markers``. Since 2, ``severity`` is null where ``error_kind`` is; in 1 it was "error"."""

Severity = Literal["error", "warning"]
SiteSource = Literal["traceback", "message", "action"]


class ErrorKind(StrEnum):
    """The sixteen kinds of error in order of precedence: if several fit an output, the first is reported."""

    TOOL_NOT_FOUND = "tool_not_found"
    POLICY_VIOLATION = "policy_violation"
    TIMEOUT = "timeout"
    RESOURCE_LIMIT = "resource_limit"
    PATCH_FAILED = "patch_failed"
    SYNTAX_ERROR = "syntax_error"
    IMPORT_ERROR = "import_error"
    TEST_FAILURE = "test_failure"
    BUILD_ERROR = "build_error"
    COMMAND_NOT_FOUND = "command_not_found"
    PERMISSION_DENIED = "permission_denied"
    PATH_NOT_FOUND = "path_not_found"
    INVALID_ARGUMENTS = "invalid_arguments"
    RUNTIME_ERROR = "runtime_error"
    OUTPUT_TRUNCATED = "output_truncated"
    NONZERO_EXIT = "nonzero_exit"


HINT_TEMPLATE_KEYS: dict[ErrorKind, str] = {
    ErrorKind.TOOL_NOT_FOUND: "tool.unknown",
    ErrorKind.POLICY_VIOLATION: "policy.network",
    ErrorKind.TIMEOUT: "exec.timeout",
    ErrorKind.RESOURCE_LIMIT: "exec.limit",
    ErrorKind.PATCH_FAILED: "edit.patch",
    ErrorKind.SYNTAX_ERROR: "code.syntax",
    ErrorKind.IMPORT_ERROR: "code.import",
    ErrorKind.TEST_FAILURE: "test.failed",
    ErrorKind.BUILD_ERROR: "build.failed",
    ErrorKind.COMMAND_NOT_FOUND: "cmd.missing",
    ErrorKind.PERMISSION_DENIED: "fs.permission",
    ErrorKind.PATH_NOT_FOUND: "fs.missing",
    ErrorKind.INVALID_ARGUMENTS: "args.invalid",
    ErrorKind.RUNTIME_ERROR: "code.runtime",
    ErrorKind.OUTPUT_TRUNCATED: "exec.truncated",
    ErrorKind.NONZERO_EXIT: "exec.nonzero",
}
"""Which hint template fits a kind. Keys name templates of the trainer adapter; they carry no text themselves."""


class ErrorSite(BaseModel):
    """Where a turn failed. Every field is optional: a wrong site is worse than none (PROTOCOL B3).

    Attributes:
        t: Delivery index of the failing turn; None until the server stamps it.
        action_field: Name of the action field that ``action_span`` counts in (``command``, ``path``, ``tool`` ...).
        action_span: Half-open ``[start, end)`` in Unicode code points of that field.
        file: Workspace-relative when inside the workspace, else as printed; ``<string>``/``<stdin>`` for inline code.
        line: 1-based line in ``file``.
        column: 1-based column in ``file``.
        test_id: Id of the first failing test, as the runner prints it.
        source: What the site was read from: a traceback, a message, or the action text alone.
        message: The one line of output that fired the rule, at most 300 code points.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    t: int | None = Field(default=None, ge=0)
    action_field: str | None = None
    action_span: tuple[int, int] | None = None
    file: str | None = None
    line: int | None = Field(default=None, ge=1)
    column: int | None = Field(default=None, ge=1)
    test_id: str | None = None
    source: SiteSource | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class Detection:
    """What a detector found in one turn.

    Args:
        error_kind: None when nothing is wrong.
        severity: ``"error"``, or ``"warning"`` when the detector is unsure; warnings never carry a hint into a loss.
            None exactly when ``error_kind`` is: where a kind is given without it, it becomes ``"error"``. Always
            ``"warning"`` for ``output_truncated``.
        error_site: The first site, or None when no place is certain.
        error_sites: All sites in order of appearance, the first one included.
        hint_template_key: Key of the hint template that fits, None without a kind.
    """

    error_kind: ErrorKind | None = None
    severity: Severity | None = None
    error_site: ErrorSite | None = None
    error_sites: tuple[ErrorSite, ...] = ()
    hint_template_key: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "severity", _severity(self.error_kind, self.severity))

    @classmethod
    def of(
        cls, kind: ErrorKind, *sites: ErrorSite, severity: Severity | None = None, hint_template_key: str | None = None
    ) -> Self:
        """Build a detection of a kind, with the kind's own hint key unless another is given."""
        return cls(
            error_kind=kind,
            severity=severity,
            error_site=sites[0] if sites else None,
            error_sites=sites,
            hint_template_key=hint_template_key or HINT_TEMPLATE_KEYS[kind],
        )


def _severity(kind: str | None, given: Severity | None) -> Severity | None:
    if kind == ErrorKind.OUTPUT_TRUNCATED:
        return "warning"  # nothing failed (R-014-2)
    return None if kind is None else given or "error"


NOTHING_WRONG = Detection()
"""The detection of a turn without an error."""

_MIRRORED = ("error_kind", "hint_template_key", "error_site")

_INFO_KINDS: dict[str, str] = {
    ErrorKind.INVALID_ARGUMENTS: "invalid_args",
    ErrorKind.POLICY_VIOLATION: "permission_denied",
}
"""Kinds for which ``error_info`` has another word. The other kinds that its table lacks are there under their names."""


def error_info(kind: Any, severity: Any, sites: Iterable[ErrorSite]) -> dict[str, Any] | None:
    """Return the ``error_info`` that says what a marker says (PROTOCOL B5); None where there is none to say.

    A warning has none: the convention has no word for an error that is not certain, nor for output that was cut.

    Args:
        kind: The marker's ``error_kind``.
        severity: The marker's ``severity``.
        sites: The marker's sites in order of appearance. The message is that of the first that has one.
    """
    if not isinstance(kind, str) or _severity(kind, severity) != "error":
        return None
    sites = list(sites)
    stated = {
        "kind": _INFO_KINDS.get(kind, str(kind)),
        "message": next((site.message for site in sites if site.message), ""),
        "sites": [_place(site) for site in sites],
    }
    info = ErrorInfo.read({KEY: stated})  # leaves out fields that were never validated: they do not fail the step
    return info.to_json() if info is not None else None


def _place(site: ErrorSite) -> dict[str, Any]:
    inline = str(site.file).startswith("<")  # <string>: lines of the action, no file
    names = ("action_field", "action_span", "test_id") if inline else InfoSite.model_fields
    return {name: value for name in names if (value := getattr(site, name)) is not None}


class ErrorMarkers(BaseModel):
    """Mixin that gives an OpenEnv ``Observation`` subclass the marker fields (PROTOCOL B1).

    List it before ``Observation``: ``class MyObservation(ErrorMarkers, Observation)``.

    Attributes:
        error_kind: One of `ErrorKind`, or None.
        hint_template_key: Hint template for the failing turn, or None.
        error_site: First site, or None.
        error_sites: All sites.
        severity: ``"error"`` or ``"warning"``; None exactly when ``error_kind`` is. Payloads of version 1 of the
            extension have ``"error"`` there and are read as None. Always ``"warning"`` for ``output_truncated``.
    """

    error_kind: str | None = None
    hint_template_key: str | None = None
    error_site: ErrorSite | None = None
    error_sites: list[ErrorSite] = Field(default_factory=list)
    severity: Severity | None = None

    @model_validator(mode="after")
    def _severity_needs_a_kind(self) -> Self:
        wanted = _severity(self.error_kind, self.severity)
        if self.severity != wanted:
            self.__dict__["severity"] = wanted  # not an assignment: that would validate again and mark the field as set
        return self

    def with_detection(self, detection: Detection) -> Self:
        """Return a copy with the marker fields set from ``detection``.

        If ``metadata`` is a dict, it gets ``error_kind``, ``hint_template_key``, ``error_site`` and, of an error,
        ``error_info`` too, or loses them if nothing was detected. An ``error_info`` of the environment's own stays.
        """
        update: dict[str, Any] = {
            "error_kind": detection.error_kind.value if detection.error_kind else None,
            "hint_template_key": detection.hint_template_key,
            "error_site": detection.error_site,
            "error_sites": list(detection.error_sites),
            "severity": detection.severity,
        }
        return self._mirrored(update)

    def with_site_t(self, t: int) -> Self:
        """Return a copy whose sites have the delivery index ``t``; the server calls it before it encodes the
        payload."""
        if self.error_kind is None:
            return self

        def stamp(site: ErrorSite) -> ErrorSite:
            return site if site.t is not None else site.model_copy(update={"t": t})

        return self._mirrored(
            {
                "error_kind": self.error_kind,
                "hint_template_key": self.hint_template_key,
                "error_site": stamp(self.error_site) if self.error_site else None,
                "error_sites": [stamp(s) for s in self.error_sites],
                "severity": self.severity,
            }
        )

    def _mirrored(self, update: dict[str, Any]) -> Self:
        metadata = getattr(self, "metadata", None)
        if isinstance(metadata, dict):
            mirror = {k: v for k, v in metadata.items() if k not in _MIRRORED}
            if mirror.get(KEY) is not None and mirror[KEY] == self._error_info(vars(self)):
                del mirror[KEY]  # of these markers, which are replaced
            if update["error_kind"] is not None:
                site = update["error_site"]
                mirror |= {
                    "error_kind": update["error_kind"],
                    "hint_template_key": update["hint_template_key"],
                    "error_site": site.model_dump(mode="json") if site else None,
                }
                if KEY not in mirror and (info := self._error_info(update)) is not None:
                    mirror[KEY] = info
            update = {**update, "metadata": mirror}
        return self.model_copy(update=update)

    @staticmethod
    def _error_info(fields: Mapping[str, Any]) -> dict[str, Any] | None:
        first = fields["error_site"]
        return error_info(fields["error_kind"], fields["severity"], fields["error_sites"] or ([first] if first else []))

"""Settings of a server, from arguments or ``ERRATA_*`` environment variables."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from errata_os.input_files import FileRefused, read_file
from errata_protocol.capabilities import ServerLimits
from errata_protocol.errors import InvalidRequest

MAX_TOKEN_FILE = 65_536
"""Largest file of tokens that is read, bytes: a wrong path may lead to a device or to anything else."""

_NO_TOKEN = "the token is empty: give one, or leave it unset for no authentication"


def read_token_file(path: str | Path) -> tuple[str, ...]:
    """Return the tokens in a file, on lines of their own or separated by commas.

    Raises:
        InvalidRequest: It cannot be read, or holds no token; the message does not quote it.
    """
    try:
        text = read_file(Path(path), MAX_TOKEN_FILE)
    except FileRefused as error:
        raise InvalidRequest(
            f"ERRATA_TOKEN_FILE cannot be read: {error.message}; name the file with the token"
        ) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(f"ERRATA_TOKEN_FILE {path} cannot be read: {why}") from error
    if not text.isascii():
        raise InvalidRequest(f"ERRATA_TOKEN_FILE {path} holds no token: it is not ASCII")
    tokens = tuple(part for part in _parts(text.decode().replace("\n", ",")) if part)
    if any(part.startswith("#") or part.split() != [part] for part in tokens):
        raise InvalidRequest(
            f"ERRATA_TOKEN_FILE {path} has a line that begins with # or has spaces: comments would be tokens; leave "
            "nothing but tokens in it"
        )
    if not tokens:
        raise InvalidRequest(
            f"ERRATA_TOKEN_FILE {path} is empty: write a token into it, for example of openssl rand -hex 32"
        )
    return tokens


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def tokens_of(token: str | None, file: str | Path | None) -> tuple[str, ...]:
    """Return the tokens of ``ERRATA_TOKEN`` and ``ERRATA_TOKEN_FILE``.

    Args:
        token: Tokens separated by commas; None or empty where the variable is not set.
        file: File with tokens; None or empty where the variable is not set.

    Raises:
        InvalidRequest: One of them holds no token, or they differ; the message does not quote them.
    """
    given = _parts(token) if token else ()
    if not all(given):
        raise InvalidRequest(_NO_TOKEN)
    read = read_token_file(file) if file else ()
    if given and read and given != read:
        raise InvalidRequest("ERRATA_TOKEN and ERRATA_TOKEN_FILE give different tokens: set one of them")
    return given or read


def tokens_in_environment() -> tuple[str, ...]:
    """Return the tokens in the environment of this process, which may be a server's or a command's.

    Raises:
        InvalidRequest: See `tokens_of`.
    """
    return tokens_of(os.environ.get("ERRATA_TOKEN"), os.environ.get("ERRATA_TOKEN_FILE"))


def token_in_environment() -> str | None:
    """Return the first token in the environment, or None without any.

    Raises:
        InvalidRequest: See `tokens_of`.
    """
    return next(iter(tokens_in_environment()), None)


class Settings(BaseSettings):
    """How a server keeps sessions.

    Attributes:
        data_dir: Journal and sandbox layers. None keeps everything in memory and a temporary directory: nothing
            survives the process. One server per directory (PROTOCOL E5).
        fsync: Sync the journal to disk before a reply is sent. Without it, replies survive a killed process but not a
            power loss.
        journal_salvage: Repair a damaged journal at the start, instead of refusing to start. Sessions with damaged rows
            are lost, and the others continue. The start then reads the whole journal. See
            `errata_server.journal.salvage`.
        journal_store: Name of an installed journal store, an entry point of the group ``errata.journal_stores``, for
            the data directory; None for the one that it has, and for a new one the default store.
        lease: File of this server's lease, where several boxes see the data directory and one of them at a time serves
            it. ``errata serve`` only; see docs/fleet.md.
        step_timeout_s: Infrastructure deadline of reset and step. A command's own timeout is shorter and is an
            observation instead.
        journal_wait_s: How long a request waits for a journal that cannot write, before it is refused with
            JOURNAL_UNAVAILABLE without having run.
        detach_ttl_s: How long a session without a socket keeps its instance before it is hibernated.
        max_threads: Largest number of threads for environments that need a thread of their own; further environments
            share these threads.
        max_written_off: Number of calls hanging past their deadline, whose threads cannot be stopped, above which
            ``/ready`` fails.
        max_sessions_per_principal: How many sessions of one principal may have an environment instance at a time, of
            all environments together; None for no such bound. With authentication off all clients are one principal.
        retention_days: Age of the last request, in days, after which closed episodes are deleted; None keeps them. See
            `errata_server.episodes.retention`.
        retention_max_bytes: Size of all episodes above which closed ones are deleted, the oldest first; None for no
            such bound.
        disk_floor_bytes: Free disk space below which no request runs, to keep room for the journal. At most 5 % of the
            file system.
        max_frame: Largest frame accepted on a socket, bytes. The payload of a larger one is discarded.
        max_unfinished_bytes: Memory for unfinished messages of one principal on all its sockets. A message that exceeds
            it is discarded and answered OVERLOADED. With authentication off all clients are one principal.
        allowed_hosts: Names allowed in a request's Host header; empty allows any. ``errata serve`` on a loopback
            address allows only the machine's own names, against web pages whose name was rebound to 127.0.0.1.
        allowed_origins: Origins (``https://example.org``) of web pages that may use the server, besides its own.
        token: Bearer token of all routes, or several separated by commas. Each token is a principal of its own, whose
            sessions and episodes the others cannot see. None turns authentication off.
        token_file: File with the token, or with several, on lines of their own or separated by commas; read once. For
            secrets that are mounted as files. Not beside a ``token`` with another value.
        insecure: Allow requests from other machines without a token.
        health_port: Port of ``errata serve`` for probes alone, ``/health`` and ``/ready``, which a thread of its own
            answers without a token however busy the server is; 0 takes a free one, None opens none.
        members: Address of the list of the members of the fleet that the server belongs to, ``file:///PATH``; None for
            a server that is alone. See `errata_server.runtime.listed_members`.
        base: Base trees of sandboxes by name, in addition to the built ones.
        sandbox: Name of an installed sandbox backend, an entry point of the group ``errata.sandboxes``; None for the
            default one.
    """

    model_config = SettingsConfigDict(env_prefix="ERRATA_", extra="ignore", frozen=True)

    data_dir: Path | None = None
    fsync: bool = True
    journal_salvage: bool = False
    journal_store: str | None = None
    lease: Path | None = None
    step_timeout_s: float = Field(default=900.0, gt=0)
    journal_wait_s: float = Field(default=30.0, ge=0)
    detach_ttl_s: float = Field(default=600.0, ge=0)
    max_threads: int = Field(default=1024, gt=0)
    max_written_off: int = Field(default=32, ge=0)
    max_sessions_per_principal: int | None = Field(default=None, gt=0)
    retention_days: float | None = Field(default=None, ge=0)
    retention_max_bytes: int | None = Field(default=None, ge=0)
    disk_floor_bytes: int = Field(default=256 * 1024**2, ge=0)
    max_frame: int = Field(default=16 * 1024**2, gt=0)
    max_unfinished_bytes: int = Field(default=32 * 1024**2, gt=0)
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = ()
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = ()
    token: SecretStr | None = None
    token_file: Path | None = None
    insecure: bool = False
    health_port: int | None = Field(default=None, ge=0, le=65535)
    members: str | None = None
    base: dict[str, Path] = Field(default_factory=dict)
    sandbox: str | None = None

    @field_validator("allowed_hosts", "allowed_origins", mode="before")
    @classmethod
    def _names_are_separated_by_commas(cls, names: object) -> object:
        return tuple(name.strip() for name in names.split(",") if name.strip()) if isinstance(names, str) else names

    @field_validator("token")
    @classmethod
    def _token_is_not_empty(cls, token: SecretStr | None) -> SecretStr | None:
        if token is not None and not all(_parts(token.get_secret_value())):
            raise ValueError(_NO_TOKEN)
        return token

    @model_validator(mode="before")
    @classmethod
    def _token_is_read_from_its_file(cls, given: dict[str, Any]) -> dict[str, Any]:
        file, token = given.get("token_file"), given.get("token")
        if not file:  # an empty variable is as one that is not set
            return {**given, "token_file": None}
        found = tokens_of(token.get_secret_value() if isinstance(token, SecretStr) else token, file)
        return {**given, "token": SecretStr(",".join(found))}

    def in_environment(self) -> dict[str, str]:
        """Return environment variables from which the same settings can be read."""
        given = self.model_dump(mode="json", exclude_unset=True, exclude_none=True)
        if self.token is not None:
            given["token"] = self.token.get_secret_value()
        for name in {"allowed_hosts", "allowed_origins"} & set(given):
            given[name] = ",".join(given[name])
        return {
            f"ERRATA_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in given.items()
        }

    @property
    def tokens(self) -> tuple[str, ...]:
        """The bearer tokens; empty if authentication is off."""
        if self.token is None:
            return ()
        return _parts(self.token.get_secret_value())

    @property
    def limits(self) -> ServerLimits:
        """The limits that capabilities advertise."""
        return ServerLimits(max_frame=self.max_frame, detach_ttl_s=self.detach_ttl_s)

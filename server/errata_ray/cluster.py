"""Connects to a Ray cluster, with errors that say what to do next."""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

import ray

from errata_protocol.errors import InvalidRequest, ServiceError
from errata_protocol.exception_text import text_of

from .registry import NAMESPACE

ASK_S = 15.0
"""Longest wait for an answer of a fleet's registry, seconds. It may be starting again."""

OPEN_S = 10.0
"""Longest wait for a connection to the cluster's address, seconds. Ray itself tries for minutes."""

AGAIN_S = 0.5
"""Pause before an actor is asked again, seconds."""

ADDRESS = "RAY_ADDRESS"
"""Environment variable with the address of the cluster, as for Ray's own commands."""

_TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH, or have ~/.ray/auth_token"


def connect(address: str) -> None:
    """Connect this process to a cluster, unless it is connected to one already.

    Args:
        address: Address of the cluster, ``HOST:PORT`` or ``auto``: the one in `ADDRESS`, else that of this machine.

    Raises:
        InvalidRequest: There is no cluster, or it wants a token.
    """
    if ray.is_initialized():
        return
    chosen = os.environ.get(ADDRESS, "auto") if address == "auto" else address
    start = f"start one with `ray start --head`, or name one with --address HOST:PORT or {ADDRESS}"
    host, _, port = chosen.rpartition(":")
    if host and port.isascii() and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), OPEN_S).close()
        except (OSError, OverflowError) as error:
            raise InvalidRequest(f"no Ray cluster answers at {chosen} ({text_of(error)}): {start}") from error
    try:
        ray.init(address=chosen, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        where = "no Ray cluster runs on this machine" if chosen == "auto" else f"no Ray cluster answers at {chosen}"
        raise InvalidRequest(
            f"{where}: {start}; Ray says the same of a cluster that wants another token: {_TOKEN}"
        ) from error
    except Exception as error:  # Ray raises RuntimeError, AuthenticationError and others for a token
        if "auth" in str(error).lower():
            raise InvalidRequest(
                f"the Ray cluster at {chosen} wants its token: {_TOKEN} ({text_of(error)[:200]})"
            ) from error
        raise InvalidRequest(f"cannot connect to the Ray cluster at {chosen}: {text_of(error)[:500]}") from error


def registry_name(fleet: str) -> str:
    """Return the name of the actor that is a fleet's registry."""
    return f"{fleet}-registry"


def registry_of(fleet: str) -> Any:
    """Return the handle of a fleet's registry.

    Raises:
        InvalidRequest: The cluster has no such fleet.
    """
    try:
        return ray.get_actor(registry_name(fleet), namespace=NAMESPACE)
    except ValueError as error:
        raise InvalidRequest(
            f"the Ray cluster has no fleet {fleet}: start it with errata fleet up --ray, or name another with --name"
        ) from error


def asked(method: Any, *arguments: Any, most_s: float = ASK_S) -> Any:
    """Ask an actor, again while it does not answer: it may be starting again.

    Args:
        method: Method of the actor's handle. It may be run twice.
        *arguments: Arguments of the method.
        most_s: Longest wait for the answer, seconds.

    Raises:
        ServiceError: It does not answer.
    """
    end = time.monotonic() + most_s
    while True:
        left = end - time.monotonic()
        try:
            return ray.get(method.remote(*arguments), timeout=max(0.0, left))
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
            if left <= AGAIN_S:
                raise ServiceError(f"the fleet's registry does not answer: {text_of(error)[:300]}") from error
            time.sleep(AGAIN_S)
        except ray.exceptions.RayError as error:
            raise ServiceError(f"the fleet's registry cannot answer: {text_of(error)[:300]}") from error

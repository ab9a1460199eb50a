"""Calls of the Tinker SDK under a deadline, with failures as `ServiceError`.

The SDK repeats a request for five minutes before it raises, and waits for a service that hangs for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import httpx
import tinker
from tinker import _base_client

from errata_protocol.errors import ServiceError

# The SDK leaves an HTTP client of each service client unclosed. When that is collected, it closes its connections in a
# task of whichever loop runs in the collecting thread. Their sockets are closed by then, and their numbers may belong
# to new connections: the task takes the readers of those away, and their requests wait for ever.
_HTTP_CLIENT: Any = getattr(_base_client, "AsyncHttpxClientWrapper", object)
if "__del__" in vars(_HTTP_CLIENT):
    del _HTTP_CLIENT.__del__


def check_service(url: str, *, timeout_s: float = 10.0) -> None:
    """Check that something answers at the address of a service.

    Args:
        url: Base URL of the service.
        timeout_s: Longest wait for the connection, and for the answer, in seconds.

    Raises:
        ServiceError: Nothing answers there in time.
    """
    try:
        httpx.get(f"{url.rstrip('/')}/api/v1/healthz", timeout=timeout_s)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServiceError(
            f"no Tinker service answers at {url} ({type(error).__name__}: {error}): start it, or give its base URL"
        ) from error


def answered(calls: Sequence[Callable[[], Any]], *, what: str, deadline_s: float) -> list[Any]:
    """Make calls of the SDK, wait for what they return, and return it in order.

    All calls are made before the first is waited for, in a thread of their own. After the deadline that thread makes no
    further call, and is left to itself: the SDK cannot be interrupted.

    Args:
        calls: Functions that make one call of the SDK each. What they return is waited for if it is a future.
        what: Words for what is asked, for the message of an error.
        deadline_s: Longest time for all of them, in seconds.

    Raises:
        ServiceError: The service refused a request, could not be reached, or did not answer in time; or the SDK's
            client takes no more requests.
    """
    outcome: Future[list[Any]] = Future()
    given_up = threading.Event()

    def made(call: Callable[[], Any]) -> Any:
        if given_up.is_set():
            raise TimeoutError("given up")
        return call()

    def work() -> None:
        try:
            outcome.set_result([_waited_for(one) for one in [made(call) for call in calls]])
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="errata-tinker", daemon=True).start()
    try:
        return outcome.result(timeout=deadline_s)
    except TimeoutError as error:
        given_up.set()
        if outcome.done():  # one of the SDK's own
            raise ServiceError(f"{what}: the Tinker service did not answer: {error}") from error
        raise ServiceError(
            f"{what}: the Tinker service did not answer within deadline_s={deadline_s:g} s; it may still be at work on "
            "the request, so do not repeat a training step, but go on from a saved state"
        ) from error
    except (ValueError, TypeError, LookupError, ArithmeticError):
        raise  # of what was given to the SDK, or of a loss
    except Exception as error:  # the SDK's own have no common class: a closed or failed client is a RuntimeError
        raise ServiceError(f"{what}: the Tinker service failed: {type(error).__name__}: {error}") from error


def is_refusal(error: ServiceError) -> bool:
    """Return whether a service took a request for one that it cannot answer, rather than failed.

    Args:
        error: Error of `answered`.
    """
    cause = error.__cause__
    if isinstance(cause, tinker.APIStatusError):
        return cause.status_code in (400, 404, 405, 422, 501)
    return isinstance(cause, tinker.RequestFailedError) and str(cause.category).lower().endswith("user")


def _waited_for(returned: Any) -> Any:
    """Return the result of a future; anything else as it is: some releases of the SDK return results of some calls."""
    wait = getattr(returned, "result", None)
    return wait() if callable(wait) else returned

"""The tasks that a server offers, as the arguments of ``reset`` that begin them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from errata_client.connections.waiting import blocking_wait
from errata_protocol.errors import InvalidRequest, NotSupported, ServiceError

ID_COLUMNS = ("instance_id", "task_id")
"""Fields of a task that name it for ``reset``; the first that all tasks have is taken."""

PROMPT = "Work on the task with your tools, and submit when it is done.\n\n"
"""What stands before the text of a reset, in the user's message."""

EVALUATION = "test"
"""Type of a split that is for evaluation."""


class EvaluationSplitWarning(UserWarning):
    """The tasks are of an evaluation split: a model trained on them cannot be evaluated with it."""


def offered_tasks(
    url: str,
    env: str,
    *,
    split: str | None = None,
    columns: Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
    stacklevel: int = 1,
) -> list[dict[str, Any]]:
    """Return what ``reset`` takes to begin each task of a split, in the order of the server.

    Tasks of a split for evaluation also have ``split``, because such a task is served only where its split is named.

    Args:
        url: URL of the environment, or of its server.
        env: Name of the environment.
        split: Name of the split; None for the only one that is not for evaluation.
        columns: Fields of a task that ``reset`` takes; None for the first of `ID_COLUMNS` that is there.
        headers: Headers sent with each request, e.g. ``{"Authorization": "Bearer TOKEN"}``.
        timeout_s: Longest wait for an answer, seconds.
        stacklevel: Position of the caller whose line a warning names: 1 is the direct caller.

    Raises:
        InvalidRequest: There is no such environment or split, or several splits and none was named.
        NotSupported: The environment has no tasks.
        ServiceError: The server does not answer, or fails.
    """
    base = f"{url.rstrip('/')}/{env}"
    with httpx.Client(headers=dict(headers or {}), timeout=timeout_s) as client:
        types = {found["name"]: found.get("type", "") for found in _ask(client, "GET", f"{base}/splits", env)}
        if split is None:
            training = [name for name, kind in types.items() if kind != EVALUATION]
            if len(training) != 1:
                known = ", ".join(types) or "none"
                raise InvalidRequest(
                    f"{env} has the splits {known}: name one, e.g. split={(training or ['train'])[0]!r}"
                )
            split = training[0]
        tasks = _ask(client, "POST", f"{base}/tasks", env, {"split": split})["tasks"]
    if not tasks:
        raise InvalidRequest(f"the split {split!r} of {env} has no tasks")
    if columns is None:
        columns = [name for name in ID_COLUMNS if all(task.get(name) is not None for task in tasks)][:1]
    if not columns or any(name not in task for name in columns for task in tasks):
        fields = ", ".join(sorted(set().union(*tasks)))
        raise InvalidRequest(f"tasks of {env} have {fields}: name what its reset takes in columns=[...]")
    evaluation = EVALUATION in (split, types.get(split))
    if evaluation:
        warnings.warn(
            f"the split {split} of {env} is for evaluation: a model trained on it cannot be evaluated with it",
            EvaluationSplitWarning,
            stacklevel=stacklevel + 1,
        )
    more = {"split": split} if evaluation else {}
    return [{**{name: task[name] for name in columns}, **more} for task in tasks]


def messages_of(prompt: str | Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return the messages of a prompt; a text is that of the user's message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(part) for part in prompt]


def _ask(client: httpx.Client, method: str, url: str, env: str, body: Mapping[str, Any] | None = None) -> Any:
    """Make a request of the Task API, once, and return the decoded JSON of the response.

    Raises:
        NotSupported: The environment ``env`` offers no tasks (status 501).
        InvalidRequest: The server has no such environment (404), or refused the request (another status 4xx).
        ServiceError: There was no answer within the client's timeout, or the server failed (status 5xx).
    """
    try:
        with blocking_wait(url, "the server's tasks", client.timeout.read or math.inf):
            answer = client.request(method, url, json=body)
    except httpx.HTTPError as error:
        raise ServiceError(f"{url}: no answer: {error}; is the server running there?") from error
    if answer.is_success:
        return answer.json()
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = answer.text[:300]
    problem = f"{url}: {answer.status_code}: {detail}"
    if answer.status_code == 501:
        raise NotSupported(f"{env} offers no tasks: write the rows yourself ({problem})")
    if answer.status_code == 404:
        raise InvalidRequest(f"no environment {env!r} there ({problem}): give its URL and name")
    raise InvalidRequest(problem) if answer.is_client_error else ServiceError(problem)

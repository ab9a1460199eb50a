"""Makes a dataset for TRL from the tasks that a server offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...episodes.tasks import PROMPT, messages_of, offered_tasks


def dataset(
    url: str,
    env: str = "terminal",
    *,
    split: str | None = None,
    prompt: str | Sequence[Mapping[str, str]] = PROMPT,
    columns: Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Any:
    """Return a `datasets.Dataset` with one row for each task of a split, for use with `environment_factory`.

    A row has ``prompt``, a conversation whose last message the text of the reset is put behind, and what `reset` takes
    to begin that task: ``instance_id`` or ``task_id``. Rows of a split for evaluation also have ``split``, because such
    a task is served only where its split is named.

    Args:
        url: URL of the environment, as `environment_factory` takes it.
        env: Name of the environment.
        split: Name of the split; None for the only one that is not for evaluation.
        prompt: Text of the user's message, or the whole conversation.
        columns: Fields of a task that ``reset`` takes; None for the first of
            `errata_trainer.episodes.tasks.ID_COLUMNS` that is there.
        headers: Headers sent with each request, e.g. ``{"Authorization": "Bearer TOKEN"}``.
        timeout_s: Longest wait for an answer, seconds.

    Raises:
        InvalidRequest: There is no such environment or split, or several splits and none was named.
        NotSupported: The environment has no tasks.
        ServiceError: The server does not answer, or fails.
    """
    from datasets import Dataset

    tasks = offered_tasks(url, env, split=split, columns=columns, headers=headers, timeout_s=timeout_s, stacklevel=2)
    messages = messages_of(prompt)
    return Dataset.from_list([{"prompt": messages, **task} for task in tasks])

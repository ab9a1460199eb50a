"""Writes the tasks that a server offers as a file of rows for VeRL."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...episodes.tasks import PROMPT, messages_of, offered_tasks


def write_dataset(
    path: str | Path,
    url: str,
    env: str = "terminal",
    *,
    split: str | None = None,
    prompt: str | Sequence[Mapping[str, str]] = PROMPT,
    columns: Sequence[str] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> int:
    """Write a Parquet file with one row for each task of a split, and return the number of rows.

    A row has the columns that VeRL's `RLHFDataset` reads, ``agent_name`` for the agent loop, and ``task``, the
    arguments of ``reset`` as JSON.

    Args:
        path: File to write: ``data.train_files`` or ``data.val_files``.
        url: URL of the environment, as in ``errata.url``.
        env: Name of the environment.
        split: Name of the split; None for the only one that is not for evaluation.
        prompt: Text of the user's message, or the whole conversation; the text of the reset is put behind it.
        columns: Fields of a task that ``reset`` takes; None for ``instance_id`` or ``task_id``.
        headers: Headers sent with each request, e.g. ``{"Authorization": "Bearer TOKEN"}``.
        timeout_s: Longest wait for an answer, seconds.

    Raises:
        InvalidRequest: There is no such environment or split, or several splits and none was named.
        NotSupported: The environment has no tasks.
        ServiceError: The server does not answer, or fails.
    """
    import pyarrow
    import pyarrow.parquet

    tasks = offered_tasks(url, env, split=split, columns=columns, headers=headers, timeout_s=timeout_s, stacklevel=2)
    messages = messages_of(prompt)
    rows: list[dict[str, Any]] = [
        {
            "data_source": env,
            "prompt": messages,
            "agent_name": "errata",
            "task": json.dumps(task, ensure_ascii=False),
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, task in enumerate(tasks)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return len(rows)

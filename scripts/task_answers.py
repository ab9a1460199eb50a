#!/usr/bin/env python3
"""Play every answer of ``tests/envs/answers`` to the bundled tasks in real sandboxes and write what each is worth.

    python scripts/task_answers.py             # writes docs/task_answers.md

Each answer goes through the terminal environment's own reset, step and submit. It needs what sandboxes need: root, or
user namespaces, and the base tree. Where a score is not the one written down, it prints that, writes nothing and ends
with 1.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from errata_server.environments import context  # noqa: E402  (found through the path set above)
from errata_server.sandbox.namespace.backend import NamespaceBackend  # noqa: E402
from tests.envs.answers import (  # noqa: E402
    FIGURES,
    TOLERANCE,
    answers,
    bundled_tasks,
    figures,
    played,
    reference,
    trivial,
)


async def differences() -> list[str]:
    """Return a line for each answer that is worth something else than is written down."""
    found = []
    with tempfile.TemporaryDirectory(prefix="task-answers-") as directory:
        backend = NamespaceBackend(Path(directory))
        await backend.start()
        token = context._current.set(context.SessionContext(backend, 1, logging.getLogger("errata.task_answers")))
        try:
            for task in bundled_tasks().values():
                for answer in [reference(task), *answers(task.id), *trivial(task)]:
                    score, why = await played(task, answer)
                    if score is None or abs(score - answer.score) > (TOLERANCE if answer.score else 0.0):
                        found.append(f"{task.id}: {answer.name}: {score}, not {answer.score}: {why}")
        finally:
            context._current.reset(token)
            await backend.close()
    return found


if __name__ == "__main__":
    if wrong := asyncio.run(differences()):
        sys.exit("\n".join(wrong))
    FIGURES.write_text(figures(), "utf-8")

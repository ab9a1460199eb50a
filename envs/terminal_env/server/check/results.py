"""Stored results of checks, by the digest of a task directory, the base tree, and the version of the checker."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from errata_os.user_cache import user_cache
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend

from ..tasks import LOCAL, Task

log = logging.getLogger("errata.terminal")

CHECKER_VERSION = 3
"""Raise it whenever a check could find something else: results of other versions do not count."""

ALLOW_VARIABLE = "ERRATA_ALLOW_UNCHECKED"
"""``true`` serves tasks that no check has passed; ``errata serve --allow-unchecked`` sets it."""

DIRECTORY_VARIABLE = "ERRATA_TASK_CHECKS"
"""Directory of results; default: ``errata/task_checks`` in the user's cache directory."""

BUNDLED_RESULTS = Path(__file__).resolve().parents[2] / "validation" / "task_checks.json"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one check of one task.

    Args:
        task: Name of the task.
        digest: `Task.whole_digest` of the task.
        base: Id of the base tree.
        checker: `CHECKER_VERSION` of the program that checked.
        problems: Reasons why the task must not be served; empty if it passed.
        warnings: Warnings for the author of the task.
        scores: Scores of ``empty`` (the untouched start), ``solution`` and each degenerate program; None for an error.
        broken: Results of the verifier on broken machines, by state and fault: for each run ``raised`` or the score.
        harmless: Names of what the verifier missed while it graded the solution with 1.
    """

    task: str
    digest: str
    base: str
    checker: int = CHECKER_VERSION
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    scores: Mapping[str, Any] = field(default_factory=dict)
    broken: Mapping[str, Any] = field(default_factory=dict)
    harmless: tuple[str, ...] = ()

    @property
    def holes(self) -> tuple[str, ...]:
        """Degenerate programs that score above 0."""
        worth = {name: score for name, score in self.scores.items() if isinstance(score, int | float)}
        return tuple(name for name, score in worth.items() if score > 0)

    @property
    def passed(self) -> bool:
        """Whether the task may be served."""
        return not self.problems

    def record(self) -> dict[str, Any]:
        """Return the result as values of JSON; `of` reads them."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Result:
        """Return the result that `record` was made of.

        Raises:
            TypeError: ``record`` has other fields.
        """
        lists = {name: tuple(record[name]) for name in ("problems", "warnings", "harmless") if name in record}
        return cls(**{**record, **lists})


class Results:
    """Results in a directory, one file each."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_directory()

    def find(self, task: Task, base: str) -> Result | None:
        """Return the result of ``task`` on the base tree with the id ``base``, or None."""
        try:
            return Result.of(json.loads(self._path(task.whole_digest, base).read_text("utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            log.warning("result of task %s is unreadable, so it counts as not checked: %s", task.id, error)
            return None

    def keep(self, result: Result) -> None:
        """Store a result; replaces an older one of the same task, base tree and checker."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.directory, suffix=".new", encoding="utf-8", delete=False) as new:
            json.dump(result.record(), new, indent=1)
        Path(new.name).replace(self._path(result.digest, result.base))

    def _path(self, digest: str, base: str) -> Path:
        key = hashlib.sha256(f"{digest}\0{base}\0{CHECKER_VERSION}".encode()).hexdigest()
        return self.directory / f"{key}.json"


def default_directory() -> Path:
    """Return the directory of results: `DIRECTORY_VARIABLE`, or one in the user's cache directory."""
    if named := os.environ.get(DIRECTORY_VARIABLE):
        return Path(named)
    return user_cache() / "task_checks"


async def base_id(backend: Backend, base: str) -> str:
    """Return the id of a base tree by its name. O(1)."""
    sandbox = await backend.open(base=base)
    try:
        return (await sandbox.snapshot()).ref.id
    finally:
        await sandbox.destroy()


@lru_cache(maxsize=1)
def bundled() -> Mapping[str, Result]:
    """Return the results that ship with the package, by task."""
    try:
        records = json.loads(BUNDLED_RESULTS.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    return {record["task"]: Result.of(record) for record in records}


async def harmless(backend: Backend, task: Task) -> frozenset[str]:
    """Return what the verifier of ``task`` may miss: `Result.harmless` of its check, if it passed one."""
    local = task.split == LOCAL
    result = Results().find(task, await base_id(backend, task.base)) if local else bundled().get(task.id)
    if result is None or not result.passed or result.digest != task.whole_digest:
        return frozenset()
    return frozenset(result.harmless)


async def demand_checked(backend: Backend, task: Task) -> None:
    """Raise for a local task that has not passed its check; only warn where `ALLOW_VARIABLE` or the task allows that.

    Raises:
        EnvironmentFailed: It was not checked, or failed; the message has the command to run.
    """
    if task.split != LOCAL:
        return
    result = Results().find(task, await base_id(backend, task.base))
    if result is not None and result.passed:
        return
    command = f"errata tasks check {task.root}"
    if result is not None:
        why = f"failed its check ({result.problems[0]}): change it, then run `{command}`"
    elif task.unchecked:
        _warn_once(task.id, "it says of itself that it cannot be checked ([errata] unchecked)")
        return
    else:
        why = f"was never checked as it is now, on this base tree: run `{command}`"
    if os.environ.get(ALLOW_VARIABLE, "").lower() in ("1", "true", "yes", "on"):
        _warn_once(task.id, why)
        return
    raise EnvironmentFailed(
        f"task {task.id} {why}, as the user who runs this server; `errata serve --allow-unchecked` serves it anyway"
    )


@lru_cache(maxsize=4096)
def _warn_once(task_id: str, why: str) -> None:
    log.warning("task %s is served unchecked: %s", task_id, why)

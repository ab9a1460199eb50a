"""Tasks as directories, and the set of them this server offers.

A task is a directory in the layout of Harbor and terminal-bench::

    task.toml           [metadata] difficulty, category, tags; [verifier] timeout_sec; [errata], below
    instruction.md      what the agent reads
    environment/        Harbor's build context: its Dockerfile defines the files of the start (`dockerfile`);
                        without a Dockerfile, files for /workspace
    setup.sh            optional: run in the sandbox, as its user, after the files are there
    tests/verify.py     our verifier: it reads files and judges what probes printed; or
    tests/test.sh       Harbor's: a script that writes /logs/verifier/reward.txt
    tests/probe/        files that probes may read, at /probe
    solution/solve.sh   a reference solution, run in the sandbox by tests only

The ``[errata]`` table is ours: ``deterministic`` (two runs of the same commands give the same observations), ``env``
(variables exported in the first shell), ``base`` (name of a base tree prepared for the task: then its Dockerfile may
need an image), ``built`` (its image was built of this Dockerfile: RUN lines are not followed), ``unchecked`` (there
is no solution that ``errata tasks check`` could run) and ``probes``: commands run on the agent's final state whose
output ``verify.py`` judges, each with ``name``, ``command``, ``timeout_s``, ``stdin``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from errata_server.sandbox.spec import WORKSPACE

from .dockerfile import Copy, DockerfileInvalid, Recipe, read

log = logging.getLogger("errata.terminal")

BUNDLED = "bundled"
LOCAL = "local"
TASKS_VARIABLE = "ERRATA_TERMINAL_TASKS"
"""Further directories of tasks, separated like PATH; they form the split ``local``."""

MAX_VERIFIER_S = 400.0
"""Upper bound of all parts of one verification together: two of them (the second is the control run) must end before
the server's step deadline of 900 s."""

_MAX_DEPTH = 6
_BUNDLED_ROOT = Path(__file__).resolve().parent.parent / "tasks"
_UNUSED = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore")


class TaskInvalid(ValueError):
    """A task directory that cannot be used; the message names it and what to change."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A command run on the agent's final state, whose result `tests/verify.py` gets under ``name``."""

    name: str
    command: str
    timeout_s: float = 20.0
    stdin: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A task.

    Args:
        id: Name of the directory.
        root: The directory.
        split: ``bundled`` or ``local``.
        instruction: What the agent reads.
        verifier: ``judge`` (tests/verify.py) or ``script`` (tests/test.sh).
        verifier_timeout_s: Limit of the verifier itself, in seconds; probes have their own.
        probes: See `Probe`.
        deterministic: Two runs of the same commands give the same observations.
        env: Exported in the first shell: ``ENV`` of the Dockerfile, then ``[errata.env]``.
        verifier_env: ``[verifier.env]``: variables of test.sh.
        metadata: ``[metadata]`` of task.toml.
        notes: Parts of the directory that are not used, one line each.
        digest: sha256 over everything that shapes the start and the grading.
        recipe: What the Dockerfile does; None without one.
        base: Name of the base tree.
        unchecked: Whether task.toml declares that the task cannot be checked.
        whole_digest: sha256 over the directory, solution included: what a check's result belongs to.
    """

    id: str
    root: Path
    split: str
    instruction: str
    verifier: Literal["judge", "script"]
    verifier_timeout_s: float
    probes: tuple[Probe, ...]
    deterministic: bool
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    metadata: Mapping[str, Any]
    notes: tuple[str, ...]
    digest: str
    recipe: Recipe | None = None
    base: str = "default"
    unchecked: bool = False
    whole_digest: str = ""

    @property
    def workdir(self) -> str:
        """Directory in which the agent and the verifier start."""
        return (self.recipe and self.recipe.workdir) or WORKSPACE

    @property
    def solution(self) -> Path | None:
        """The reference solution, if the task has one."""
        path = self.root / "solution" / "solve.sh"
        return path if path.is_file() else None

    @property
    def environment(self) -> Path:
        """Files of the start; the directory may be missing."""
        return self.root / "environment"

    @property
    def tests(self) -> Path:
        """The verifier's files, which never reach the agent."""
        return self.root / "tests"

    @property
    def setup(self) -> Path | None:
        """Path of the set-up script, ``setup.sh``; None if the task has none."""
        path = self.root / "setup.sh"
        return path if path.is_file() else None

    def public(self, index: int) -> dict[str, Any]:
        """Return the public part of the task: nothing of its tests, set-up or solution."""
        return {
            "id": self.id,
            "task_id": self.id,
            "split": self.split,
            "index": index,
            "instruction": self.instruction,
            "difficulty": str(self.metadata.get("difficulty", "")),
            "category": str(self.metadata.get("category", "")),
            "tags": [str(tag) for tag in self.metadata.get("tags", [])],
            "deterministic": self.deterministic,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class TaskSet:
    """All tasks by split, each split sorted by id: an index means the same task in every run.

    Args:
        splits: Tasks by split name.
        broken: Why a directory with task.toml cannot be used, by its name.
    """

    splits: Mapping[str, tuple[Task, ...]]
    broken: Mapping[str, str] = field(default_factory=dict)

    def find(self, task_id: str) -> Task | None:
        """Return the task of that id, or None."""
        return next((task for tasks in self.splits.values() for task in tasks if task.id == task_id), None)

    @property
    def ids(self) -> list[str]:
        """All ids, in the order of the splits."""
        return [task.id for tasks in self.splits.values() for task in tasks]


def read_task(root: Path, split: str = LOCAL) -> Task:
    """Read one task directory.

    Raises:
        TaskInvalid: Something is missing or cannot be read.
    """
    try:
        config = tomllib.loads((root / "task.toml").read_text("utf-8"))
        instruction = (root / "instruction.md").read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise TaskInvalid(f"task {root.name}: {error}") from error
    if not instruction:
        raise TaskInvalid(f"task {root.name}: instruction.md is empty")
    verifier: Literal["judge", "script"]
    if (root / "tests" / "verify.py").is_file():
        verifier = "judge"
    elif (root / "tests" / "test.sh").is_file():
        verifier = "script"
    else:
        raise TaskInvalid(f"task {root.name}: neither tests/verify.py nor tests/test.sh is there")
    try:
        ours = _table(config, "errata")
        timeout_s = float(_table(config, "verifier").get("timeout_sec", 60.0))
        probes = tuple(Probe(**probe) for probe in ours.get("probes", ()))
        env = {str(k): str(v) for k, v in _table(ours, "env").items()}
        base = str(ours.get("base", ""))
        image = str(_table(config, "environment").get("docker_image", ""))
        verifier_env = {str(k): str(v) for k, v in _table(_table(config, "verifier"), "env").items()}
    except (TypeError, ValueError) as error:
        raise TaskInvalid(f"task {root.name}: task.toml: {error}") from error
    if probes and verifier == "script":
        raise TaskInvalid(f"task {root.name}: probes need tests/verify.py to judge them")
    if len({probe.name for probe in probes}) < len(probes):
        raise TaskInvalid(f"task {root.name}: two probes have the same name")
    notes: list[str] = []
    recipe = _recipe(root, base, image, notes)
    if ours.get("built", False) is True:
        if not base or recipe is None:
            raise TaskInvalid(f"task {root.name}: [errata] built = true needs environment/Dockerfile and [errata] base")
        # `errata image build` has run its RUN lines; what it copies is placed again, as the agent's.
        copied = [entry for step in recipe.steps if isinstance(step, Copy) for entry in step.entries]
        placed = {entry.path: entry for entry in (*recipe.start, *copied)}
        recipe = replace(recipe, start=list(placed.values()), steps=[])
    spare_s = MAX_VERIFIER_S - sum(probe.timeout_s for probe in probes)
    if spare_s < 1.0:
        raise TaskInvalid(
            f"task {root.name}: probes take up to {MAX_VERIFIER_S - spare_s:g} s, at most {MAX_VERIFIER_S - 1:g} s"
        )
    if timeout_s > spare_s:
        notes.append(f"the verifier's time limit is {spare_s:g} s instead of {timeout_s:g} s")
    return Task(
        id=root.name,
        root=root,
        split=split,
        instruction=instruction,
        verifier=verifier,
        verifier_timeout_s=min(timeout_s, spare_s),
        probes=probes,
        deterministic=bool(ours.get("deterministic", False)),
        env=MappingProxyType((recipe.env if recipe else {}) | env),
        verifier_env=MappingProxyType(verifier_env),
        metadata=MappingProxyType(_table(config, "metadata")),
        notes=tuple(notes),
        digest=_digest(root, ("environment", "tests"), ("task.toml", "setup.sh")),
        recipe=recipe,
        base=base or "default",
        unchecked=bool(ours.get("unchecked", False)),
        whole_digest=_digest(root, ("environment", "tests", "solution"), ("task.toml", "setup.sh", "instruction.md")),
    )


def _recipe(root: Path, base: str, image: str, notes: list[str]) -> Recipe | None:
    """Read the task's Dockerfile; return None without one. Lines that are not used are added to ``notes``.

    Raises:
        TaskInvalid: It needs an image, and no base tree is named.
    """
    context = root / "environment"
    cure = (
        "a sandbox has the base tree only: do without the line, or prepare a base tree and name it in task.toml: "
        '[errata] base = "NAME"'
    )
    services = _services(root)
    if services - {"main"} and not base:
        raise TaskInvalid(
            f"task {root.name} needs an image: environment/docker-compose.yaml has the services "
            f"{', '.join(sorted(services))}: {cure}"
        )
    if services:
        notes.append("environment/docker-compose.yaml is not used")
    if not (context / "Dockerfile").is_file():
        if image and not base:
            raise TaskInvalid(f"task {root.name} needs an image: task.toml: docker_image = {image!r}: {cure}")
        return None
    try:
        recipe = read(context)
    except (DockerfileInvalid, OSError, UnicodeDecodeError) as error:
        raise TaskInvalid(f"task {root.name}: environment/Dockerfile: {error}") from error
    if recipe.needs_image and not base:
        (line, why), *others = recipe.needs_image
        also = f"; so do lines {', '.join(str(other.number) for other, _ in others)}" if others else ""
        raise TaskInvalid(f"task {root.name} needs an image: environment/Dockerfile {line} ({why}){also}: {cure}")
    notes += recipe.notes
    notes += [f"environment/Dockerfile {line} is taken to be in base tree {base}" for line, _ in recipe.needs_image]
    if not recipe.start and not recipe.steps and tree(context):
        notes.append("environment/Dockerfile copies nothing: the files beside it are not there at the start")
    return recipe


def _services(root: Path) -> set[str]:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        path = root / "environment" / name
        if path.is_file():
            try:
                return set(yaml.safe_load(path.read_text("utf-8"))["services"])
            except (yaml.YAMLError, TypeError, KeyError, ValueError) as error:
                raise TaskInvalid(f"task {root.name}: environment/{name}: {error}") from error
    return set()


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"[{name}] must be a table")
    return value


def tree(root: Path) -> list[tuple[str, Path]]:
    """Return the files below ``root`` as sorted (relative path, path), without Dockerfile, compose files and caches."""
    if not root.is_dir():
        return []
    found = []
    for path in root.rglob("*"):
        relative = path.relative_to(root)
        if relative.name in _UNUSED and relative.parent == Path() and root.name == "environment":
            continue
        if "__pycache__" not in relative.parts:
            found.append((relative.as_posix(), path))
    return sorted(found)


def _digest(root: Path, parts: Iterable[str], names: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        for path in sorted((root / part).rglob("*")) if (root / part).is_dir() else ():
            name = path.relative_to(root).as_posix()
            if "__pycache__" in path.parts:
                continue
            mode = path.lstat().st_mode
            digest.update(f"{name}\0{mode & 0o111:o}\0".encode("utf-8", "surrogateescape"))
            if stat.S_ISLNK(mode):
                digest.update(os.fsencode(path.readlink()))
            elif stat.S_ISREG(mode):
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    for name in names:
        path = root / name
        digest.update(path.read_bytes() if path.is_file() else b"\0")
    return f"sha256:{digest.hexdigest()}"


def task_roots(directory: Path) -> list[Path]:
    """Return the task directories in ``directory``, sorted; a task directory has a ``task.toml``.

    If ``directory`` is a task itself, it is the only result. Otherwise, as for a Harbor data set, tasks are looked for
    up to 6 levels deep, but not in tasks, hidden directories or symlinked directories, which can lead out of the data
    set or round in circles. The result is empty if ``directory`` is not a directory.
    """
    if (directory / "task.toml").is_file():
        return [directory]
    found: list[Path] = []

    def walk(folder: Path, depth: int) -> None:
        for path in sorted(folder.iterdir()):
            if path.name.startswith(".") or path.is_symlink() or not path.is_dir():
                continue
            if (path / "task.toml").is_file():
                found.append(path)
            elif depth < _MAX_DEPTH:
                walk(path, depth + 1)

    if directory.is_dir():
        walk(directory, 1)
    return found


def load_tasks(local: Iterable[Path] = ()) -> TaskSet:
    """Read the bundled tasks and those below the directories ``local``.

    A directory that cannot be used is kept in `TaskSet.broken` and logged: one bad task must not hide the others.
    """
    splits: dict[str, list[Task]] = {BUNDLED: []}
    broken: dict[str, str] = {}
    seen: set[str] = set()
    for split, directory in [(BUNDLED, _BUNDLED_ROOT), *((LOCAL, path) for path in local)]:
        roots = task_roots(directory)
        if not roots:
            log.warning("no tasks below %s", directory)
        for root in roots:
            try:
                if root.name in seen:
                    raise TaskInvalid(f"task {root.name}: another task has this name already: rename {root}")
                task = read_task(root, split)
            except TaskInvalid as error:
                log.warning("%s", error)
                broken.setdefault(root.name, str(error))
                continue
            seen.add(task.id)
            splits.setdefault(split, []).append(task)
    return TaskSet(
        splits={name: tuple(sorted(tasks, key=lambda task: task.id)) for name, tasks in splits.items()},
        broken={name: why for name, why in broken.items() if name not in seen},
    )


@lru_cache(maxsize=8)
def _loaded(local: str) -> TaskSet:
    return load_tasks(Path(part).expanduser() for part in local.split(os.pathsep) if part)


def offered_tasks() -> TaskSet:
    """Return the tasks of this server: bundled ones and those of ``$ERRATA_TERMINAL_TASKS``.

    Read once for each value of the variable, because the Task API makes an environment for every request.
    """
    return _loaded(os.environ.get(TASKS_VARIABLE, ""))

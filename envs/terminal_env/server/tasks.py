"""Tasks as directories, and the set of them this server offers.

A task is a directory in the layout of Harbor and terminal-bench::

    task.toml           [metadata] difficulty, category, tags; [verifier] timeout_sec; the table ``env`` of
                        [environment], [verifier] and [solution]; [errata], below; other keys: `task_keys`
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
is no solution that ``errata tasks check`` could run), ``max_score`` (what ``test.sh`` writes for all points; 1 without
it) and ``probes``: commands run on the agent's final state whose output ``verify.py`` judges, each with ``name``,
``command``, ``timeout_s``, ``stdin``.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from errata_environment.tasks.task_api import UnknownSplit
from errata_os.input_files import open_regular
from errata_protocol.exception_text import named_text_of
from errata_protocol.printable import printable
from errata_server.sandbox.spec import WORKSPACE

from .dockerfile import Copy, DockerfileInvalid, Recipe, read
from .task_files import TaskInvalid, check_files, compose_services, read_text, read_toml
from .task_keys import check_keys, variables

log = logging.getLogger("errata.terminal")

BUNDLED = "bundled"
LOCAL = "local"
TASKS_VARIABLE = "ERRATA_TERMINAL_TASKS"
"""Further directories of tasks, separated like PATH; they form the split ``local``."""

MAX_VERIFIER_S = 400.0
"""Upper bound of all parts of one verification together: two of them (the second is the control run) must end before
the server's step deadline of 900 s."""

_MAX_DEPTH = 6
_MAX_FOLDERS = 100_000
_PART_BYTES = 1024**2
_PROBE_KEYS = {"name", "command", "timeout_s", "stdin"}
_BUNDLED_ROOT = Path(__file__).resolve().parent.parent / "tasks"
_UNUSED = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml", ".dockerignore")


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
        id: Name of the task's directory.
        root: The task's directory.
        split: Split of the task, ``bundled`` or ``local``.
        instruction: Text of the task, which the agent reads.
        verifier: Kind of the verifier: ``judge`` (tests/verify.py) or ``script`` (tests/test.sh).
        verifier_timeout_s: Time limit of the verifier itself, in seconds; probes have their own.
        probes: Commands run on the agent's final state, for the judge; see `Probe`.
        deterministic: Whether two runs of the same commands give the same observations.
        env: Variables of the first shell: ``ENV`` of the Dockerfile, then ``[environment.env]`` and ``[errata.env]``.
        verifier_env: Variables of test.sh, from ``[verifier.env]``.
        solution_env: Variables of the reference solution, from ``[solution.env]``.
        metadata: The table ``[metadata]`` of task.toml.
        notes: Notes on what is not used or not as the files say, one line each.
        digest: sha256 over everything that shapes the start and the grading.
        recipe: Steps of the Dockerfile; None if there is none.
        base: Name of the base tree.
        unchecked: Whether task.toml declares that the task cannot be checked.
        whole_digest: sha256 over the directory, solution included: what a check's result belongs to.
        max_score: The reward that ``test.sh`` writes for all points; rewards are divided by it.
        warnings: The ``notes`` that may point to mistakes of the task's author.
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
    solution_env: Mapping[str, str]
    metadata: Mapping[str, Any]
    notes: tuple[str, ...]
    digest: str
    recipe: Recipe | None = None
    base: str = "default"
    unchecked: bool = False
    whole_digest: str = ""
    max_score: float = 1.0
    warnings: tuple[str, ...] = ()

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
            "tags": list(self.metadata.get("tags", [])),
            "deterministic": self.deterministic,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class TaskSet:
    """All tasks by split, each split sorted by id: an index means the same task in every run.

    Args:
        splits: Tasks of each split, by its name.
        broken: Reason why a directory cannot be used or searched, by its name.
    """

    splits: Mapping[str, tuple[Task, ...]]
    broken: Mapping[str, str] = field(default_factory=dict)

    def find(self, task_id: str) -> Task | None:
        """Return the task of that id, or None."""
        return next((task for tasks in self.splits.values() for task in tasks if task.id == task_id), None)

    def split(self, name: str) -> tuple[Task, ...]:
        """Return the tasks of a split.

        Raises:
            UnknownSplit: There is no such split.
        """
        if name not in self.splits:
            raise UnknownSplit(f"no split {name!r}: there are {', '.join(self.splits)}", known=list(self.splits))
        return self.splits[name]

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
        return _read_task(root, split)
    except (TaskInvalid, OSError) as error:
        # The message goes to clients, which the place of the tasks on this machine does not concern.
        text = str(error).replace(f"{root}{os.sep}", "")
        raise TaskInvalid(f"task {printable(root.name)}: {printable(text)}") from error


def _read_task(root: Path, split: str) -> Task:
    if not root.name.isprintable():
        raise TaskInvalid("the name of its directory has characters that cannot be printed: rename it")
    check_files(root)
    config = read_toml(root / "task.toml")
    try:
        warnings = check_keys(config)
    except ValueError as error:
        raise TaskInvalid(f"task.toml: {error}") from error
    instruction = read_text(root / "instruction.md").strip()
    if not instruction:
        raise TaskInvalid("instruction.md is empty")
    verifier: Literal["judge", "script"]
    if (root / "tests" / "verify.py").is_file():
        verifier = "judge"
    elif (root / "tests" / "test.sh").is_file():
        verifier = "script"
    else:
        raise TaskInvalid("neither tests/verify.py nor tests/test.sh is there")
    try:
        ours = _table(config, "errata")
        timeout_s = _positive(_table(config, "verifier").get("timeout_sec", 60.0), "[verifier] timeout_sec")
        probes = _probes(ours.get("probes", []))
        env = variables(config, "environment") | variables(config, "errata")
        max_score = _positive(ours.get("max_score", 1.0), "[errata] max_score", "number")
        base = _text(ours.get("base", ""), "[errata] base")
        image = _text(_table(config, "environment").get("docker_image", ""), "[environment] docker_image")
        verifier_env, solution_env = variables(config, "verifier"), variables(config, "solution")
        metadata = _metadata(_table(config, "metadata"))
        deterministic, built, unchecked = (_flag(ours, name) for name in ("deterministic", "built", "unchecked"))
    except ValueError as error:
        raise TaskInvalid(f"task.toml: {error}") from error
    if probes and verifier == "script":
        raise TaskInvalid("probes need tests/verify.py to judge them")
    if max_score != 1.0 and verifier == "judge":
        raise TaskInvalid("task.toml: [errata] max_score is for tests/test.sh: the checks of verify.py have weights")
    if len({probe.name for probe in probes}) < len(probes):
        raise TaskInvalid("two probes have the same name")
    notes: list[str] = list(warnings)
    recipe = _recipe(root, base, image, notes)
    if built:
        if not base or recipe is None:
            raise TaskInvalid("[errata] built = true needs environment/Dockerfile and [errata] base")
        # `errata image build` has run its RUN lines; what it copies is placed again, as the agent's.
        copied = [entry for step in recipe.steps if isinstance(step, Copy) for entry in step.entries]
        placed = {entry.path: entry for entry in (*recipe.start, *copied)}
        recipe = replace(recipe, start=list(placed.values()), steps=[])
    # With values of templates, which change while the file does not.
    given = [env, verifier_env, solution_env]
    resolved = repr(given).encode() if any(given) else b""
    spare_s = MAX_VERIFIER_S - sum(probe.timeout_s for probe in probes)
    if spare_s < 1.0:
        raise TaskInvalid(f"probes take up to {MAX_VERIFIER_S - spare_s:g} s, at most {MAX_VERIFIER_S - 1:g} s")
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
        deterministic=deterministic,
        env=MappingProxyType((recipe.env if recipe else {}) | env),
        verifier_env=MappingProxyType(verifier_env),
        solution_env=MappingProxyType(solution_env),
        metadata=MappingProxyType(metadata),
        notes=tuple(notes),
        digest=_digest(root, ("environment", "tests"), ("task.toml", "setup.sh"), resolved),
        recipe=recipe,
        base=base or "default",
        unchecked=unchecked,
        whole_digest=_digest(
            root, ("environment", "tests", "solution"), ("task.toml", "setup.sh", "instruction.md"), resolved
        ),
        max_score=max_score,
        warnings=tuple(warnings),
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
    if set(services) - {"main"} and not base:
        raise TaskInvalid(
            f"it needs an image: environment/docker-compose.yaml has the services {', '.join(services)}: {cure}"
        )
    if services:
        notes.append("environment/docker-compose.yaml is not used")
    if not (context / "Dockerfile").exists():
        if image and not base:
            raise TaskInvalid(f"it needs an image: task.toml: docker_image = {image!r}: {cure}")
        return None
    try:
        recipe = read(context)
    except (DockerfileInvalid, TaskInvalid) as error:
        raise TaskInvalid(f"environment/Dockerfile: {error}") from error
    if recipe.needs_image and not base:
        (line, why), *others = recipe.needs_image
        also = f"; so do lines {', '.join(str(other.number) for other, _ in others)}" if others else ""
        raise TaskInvalid(f"it needs an image: environment/Dockerfile {line} ({why}){also}: {cure}")
    notes += recipe.notes
    notes += [f"environment/Dockerfile {line} is taken to be in base tree {base}" for line, _ in recipe.needs_image]
    if not recipe.start and not recipe.steps and tree(context):
        notes.append("environment/Dockerfile copies nothing: the files beside it are not there at the start")
    return recipe


def _services(root: Path) -> list[str]:
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        path = root / "environment" / name
        if path.exists():
            try:
                return compose_services(path)
            except TaskInvalid as error:
                raise TaskInvalid(f"environment/{error}") from error
    return []


def _table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"[{name}] must be a table")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where} must be text, not {type(value).__name__}")
    return value


def _positive(value: Any, where: str, what: str = "number of seconds") -> float:
    """Return a finite number above 0; text may hold it."""
    try:
        if isinstance(value, bool):
            raise TypeError("a truth value")
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{where} must be a {what}: {error}") from error
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{where} must be a finite {what} above 0, not {number:g}")
    return number


def _flag(table: Mapping[str, Any], name: str) -> bool:
    value = table.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"[errata] {name} must be true or false, not {type(value).__name__}")
    return value


def _metadata(table: dict[str, Any]) -> dict[str, Any]:
    """Check the parts of ``[metadata]`` that the Task API shows."""
    for name in ("difficulty", "category"):
        if not isinstance(table.get(name, ""), str | int | float):
            raise ValueError(f"[metadata] {name} must be text, not {type(table[name]).__name__}")
    tags = table.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str | int | float) for tag in tags):
        raise ValueError("[metadata] tags must be a list of texts")
    return {**table, "tags": [str(tag) for tag in tags]}


def _probes(values: Any) -> tuple[Probe, ...]:
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError("[[errata.probes]] must be a list of tables")
    probes = []
    for number, value in enumerate(values, 1):
        where = f"[[errata.probes]] {number}:"
        unknown = sorted(value.keys() - _PROBE_KEYS)
        missing = sorted({"name", "command"} - value.keys())
        if unknown or missing:
            what = f"{missing[0]} is missing" if missing else f"unknown key {unknown[0][:80]!r}"
            raise ValueError(f"{where} {what}: a probe has name, command, timeout_s and stdin")
        texts = {name: _text(value[name], f"{where} {name}") for name in ("name", "command", "stdin") if name in value}
        if "\0" in texts["command"]:
            raise ValueError(f"{where} command has a NUL character")
        probes.append(Probe(**texts, timeout_s=_positive(value.get("timeout_s", 20.0), f"{where} timeout_s")))
    return tuple(probes)


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


def _digest(root: Path, parts: Iterable[str], names: Iterable[str], more: bytes) -> str:
    digest = hashlib.sha256(more)
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
                content = hashlib.sha256()
                _feed(content.update, path)
                digest.update(content.digest())
    for name in names:
        path = root / name
        if path.is_file():
            _feed(digest.update, path)
        else:
            digest.update(b"\0")
    return f"sha256:{digest.hexdigest()}"


def _feed(update: Callable[[bytes], None], path: Path) -> None:
    """Give the content of a file to a function, part by part."""
    with open_regular(path, follow=False) as file:
        while part := file.read(_PART_BYTES):
            update(part)


def task_roots(directory: Path, broken: dict[str, str] | None = None) -> list[Path]:
    """Return the task directories in ``directory``, sorted; a task directory has a ``task.toml``.

    If ``directory`` is a task itself, it is the only result. Otherwise, as for a Harbor data set, tasks are looked for
    up to 6 levels deep, but not in tasks, hidden directories or symlinked directories, which can lead out of the data
    set or round in circles. The result is empty if ``directory`` is not a directory.

    Args:
        directory: Directory to search, or a task directory itself.
        broken: Dict that gets the reason why a directory could not be searched and was skipped, by its name.
    """
    broken = {} if broken is None else broken
    found: list[Path] = []
    waiting = [(directory, 0)]
    visited = 0
    while waiting:
        folder, depth = waiting.pop()
        visited += 1
        if visited > _MAX_FOLDERS:
            broken[printable(directory.name)] = f"it has more than {_MAX_FOLDERS:,} directories: name the tasks' own"
            break
        try:
            if os.path.lexists(folder / "task.toml"):
                found.append(folder)
            elif depth < _MAX_DEPTH and (depth or folder.is_dir()):
                below = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
                waiting += [(path, depth + 1) for path in reversed(below) if not path.is_symlink() and path.is_dir()]
        except OSError as error:
            broken[printable(folder.name)] = f"directory {printable(folder.name)}: {printable(error)}"
    return found


def load_tasks(local: Iterable[Path] = ()) -> TaskSet:
    """Read the bundled tasks and those below the directories ``local``.

    A directory that cannot be used is kept in `TaskSet.broken` and logged: one bad task must not hide the others.
    """
    splits: dict[str, list[Task]] = {BUNDLED: []}
    broken: dict[str, str] = {}
    seen: set[str] = set()
    for split, directory in [(BUNDLED, _BUNDLED_ROOT), *((LOCAL, path) for path in local)]:
        roots = task_roots(directory, broken)
        if not roots:
            log.warning("no tasks below %s", directory)
        for root in roots:
            name = printable(root.name)
            try:
                if root.name in seen:
                    raise TaskInvalid(f"task {name}: another task has this name already: rename its directory")
                task = read_task(root, split)
            except TaskInvalid as error:
                broken.setdefault(name, str(error))
            except Exception as error:  # of a parser or of the machine: it is contained to this task all the same
                log.exception("task %s", name)
                why = printable(named_text_of(error), 500)
                broken.setdefault(name, f"task {name} cannot be read ({why}): change it, or take it out")
            else:
                seen.add(task.id)
                splits.setdefault(split, []).append(task)
    for why in broken.values():
        log.warning("%s", why)
    return TaskSet(
        splits={name: tuple(sorted(tasks, key=lambda task: task.id)) for name, tasks in splits.items()},
        broken={name: why for name, why in broken.items() if name not in seen},
    )


@lru_cache(maxsize=8)
def _loaded(local: str) -> TaskSet:
    # Path.expanduser raises an exception for an unknown user, and one bad directory must not hide the others.
    return load_tasks(Path(os.path.expanduser(part)) for part in local.split(os.pathsep) if part)  # noqa: PTH111


def offered_tasks() -> TaskSet:
    """Return the tasks of this server: bundled ones and those of ``$ERRATA_TERMINAL_TASKS``.

    Read once for each value of the variable, because the Task API makes an environment for every request.
    """
    return _loaded(os.environ.get(TASKS_VARIABLE, ""))


def unusable() -> Mapping[str, str]:
    """Return why a directory of `offered_tasks` cannot be used, by its name."""
    return offered_tasks().broken

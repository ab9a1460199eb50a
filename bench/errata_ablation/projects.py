"""A generated family of terminal tasks in which a failing command reveals knowledge that other tasks need.

A task names two steps, ``sync oak, pack fir``, and each is one command: ``./sync VALUE``. Which value an operation
takes is a convention of the project, the same in all its tasks. Only the program's error message for another value
reveals it, so what is learnt from a failing command of one task helps in every task with that operation. There are two
operations for each of four kinds of error, and two that the student knows from the beginning.

A project is made from its seed. Its tasks are drawn without repetition, and then divided: tasks for training, tasks for
evaluation, which training never uses, and tasks with known operations only, which need no new knowledge.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from errata_protocol.detect import detect
from errata_protocol.rollouts import ErrorMarker
from errata_trainer.hints import FailedTurn, TemplateHinter
from errata_trainer.rollouts.rollout import Call, Rollout, Turn

from .task_files import TASK_TOML

VALUES = ("red", "blue", "green", "gold", "black", "white")
NAMES = (
    "oak", "elm", "ash", "fir", "yew", "fig", "pear", "plum",
    "owl", "fox", "elk", "cat", "hen", "bee", "ram", "cow",
)  # fmt: skip

COMPLAINTS: Mapping[str, tuple[str, int]] = {
    "args.invalid": ("{op}: error: invalid choice: '{tried}' (choose from {right})", 2),
    "fs.permission": ("{op}: {tried}: Permission denied (use {right})", 1),
    "build.failed": ("make: *** No rule to make target '{tried}' (the target is {right}).  Stop.", 2),
    "code.import": ("ModuleNotFoundError: No module named '{tried}'; the module is {right}", 1),
}
"""A program's error message for a wrong value, and its exit status, by the hint template key of the marker."""

OPERATIONS: Mapping[str, str] = {
    "sync": "args.invalid", "lint": "args.invalid",
    "send": "fs.permission", "copy": "fs.permission",
    "pack": "build.failed", "bake": "build.failed",
    "load": "code.import", "scan": "code.import",
}  # fmt: skip
"""Operations whose value has to be learnt, each with the key of its errors."""

KNOWN: Mapping[str, str] = {"show": "args.invalid", "list": "args.invalid"}
"""Operations whose value every policy is taught."""

Split = Literal["train", "held_out", "known"]

_PROGRAM = """\
#!/bin/sh
if [ "$#" = 1 ] && [ "$1" = {right} ]; then
  : > {op}.done
  echo ok
else
  echo "{complaint}" >&2
  exit {status}
fi
"""
_VERIFY = """\
import os

from errata_verify import check, path


@check()
def the_first_step_is_done():
    assert os.path.exists(path("{first}")), "it is not"


@check()
def the_second_step_is_done():
    assert os.path.exists(path("{second}")), "it is not"
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a task.

    Attributes:
        operation: The name of the program.
        name: The object of the operation; it is not part of the command.
    """

    operation: str
    name: str

    def command(self, value: str) -> str:
        """Return the command with a value."""
        return f"./{self.operation} {value}"


@dataclass(frozen=True, slots=True)
class Task:
    """Two steps.

    Attributes:
        steps: In the order in which they are asked for.
    """

    steps: tuple[Step, Step]

    @property
    def task_id(self) -> str:
        """Name of its directory."""
        return "-".join(f"{step.operation}-{step.name}" for step in self.steps)

    @property
    def files(self) -> str:
        """Name of its files: tasks with the same operations have the same programs and the same verifier."""
        return "-".join(step.operation for step in self.steps)

    @property
    def instruction(self) -> str:
        """Text that the student reads."""
        return ", ".join(f"{step.operation} {step.name}" for step in self.steps)


@dataclass(frozen=True)
class Project:
    """The tasks of one project.

    Attributes:
        seed: Seed of conventions, beliefs and tasks.
        train: Tasks for training.
        held_out: Tasks for evaluation.
        known: Tasks with known operations.
        operations: Operations that have to be learnt in this project; a policy may have beliefs about others, too.
    """

    seed: int = 0
    train: int = 104
    held_out: int = 104
    known: int = 24
    operations: tuple[str, ...] = ("sync", "send", "pack", "load")

    @cached_property
    def conventions(self) -> dict[str, str]:
        """The value of each operation."""
        chance = random.Random(f"conventions {self.seed}")
        return {operation: chance.choice(VALUES) for operation in (*OPERATIONS, *KNOWN)}

    @cached_property
    def beliefs(self) -> dict[str, str]:
        """The value that a taught student believes in, by operation: the right one for known operations only."""
        chance = random.Random(f"beliefs {self.seed}")
        wrong = {
            operation: chance.choice([value for value in VALUES if value != self.conventions[operation]])
            for operation in OPERATIONS
        }
        return {**wrong, **{operation: self.conventions[operation] for operation in KNOWN}}

    @cached_property
    def tasks(self) -> dict[Split, tuple[Task, ...]]:
        """The tasks of each split; no two are the same."""
        chance = random.Random(f"tasks {self.seed}")

        def drawn(operations: Sequence[str], count: int) -> list[Task]:
            found: dict[str, Task] = {}
            while len(found) < count:
                first, second = chance.sample(operations, 2)
                task = Task((Step(first, chance.choice(NAMES)), Step(second, chance.choice(NAMES))))
                found[task.task_id] = task
            return list(found.values())

        learnt = drawn(self.operations, self.train + self.held_out)
        known = drawn(list(KNOWN), self.known)
        return {"train": tuple(learnt[: self.train]), "held_out": tuple(learnt[self.train :]), "known": tuple(known)}

    def task(self, task_id: str) -> Task:
        """Return a task by its id."""
        return self._by_id[task_id]

    @cached_property
    def _by_id(self) -> dict[str, Task]:
        return {task.task_id: task for tasks in self.tasks.values() for task in tasks}

    def complaint(self, operation: str, tried: str, right: str | None = None) -> tuple[str, int]:
        """Return a program's error message for a wrong value, and its exit status.

        Args:
            operation: The operation of the program.
            tried: The wrong value.
            right: The value in the message; default: the operation's own.
        """
        return complaint(operation, tried, right or self.conventions[operation])

    def write(self, directory: Path) -> None:
        """Write the tasks as directories that the terminal environment serves."""
        for task in self._by_id.values():
            root = directory / task.task_id
            (root / "environment").mkdir(parents=True, exist_ok=True)
            (root / "tests").mkdir(exist_ok=True)
            (root / "task.toml").write_text(TASK_TOML)
            (root / "instruction.md").write_text(task.instruction + "\n")
            first, second = (f"{step.operation}.done" for step in task.steps)
            (root / "tests" / "verify.py").write_text(_VERIFY.format(first=first, second=second))
            for step in task.steps:
                said, status = self.complaint(step.operation, "$1")
                program = root / "environment" / step.operation
                right = self.conventions[step.operation]
                program.write_text(_PROGRAM.format(op=step.operation, right=right, complaint=said, status=status))
                program.chmod(0o755)

    def rows(self, split: Split) -> list[dict[str, Any]]:
        """Return the tasks of a split as rows of a dataset."""
        return [{"prompt": [{"role": "user", "content": ""}], "task_id": task.task_id} for task in self.tasks[split]]


def complaint(operation: str, tried: str, right: str) -> tuple[str, int]:
    """Return a program's error message for a wrong value, and its exit status."""
    said, status = COMPLAINTS[(OPERATIONS | KNOWN)[operation]]  # type: ignore[operator]
    return said.format(op=operation, tried=tried, right=right), status


def hint_of(step: Step, tried: str, right: str, hinter: TemplateHinter) -> str:
    """Return the hint that the trainer would write for a wrong value, by the same detector and template.

    Args:
        step: The step that was to be done.
        tried: The wrong value.
        right: The value in the error message.
        hinter: Writes it.
    """
    command = step.command(tried)
    said, status = complaint(step.operation, tried, right)
    return _hint(command, said, status, hinter)


def hint_of_misnamed(step: Step, value: str, chance: random.Random, hinter: TemplateHinter) -> str:
    """Return the hint that the trainer would write for a command whose program belongs to another operation."""
    others = [one for one in (*OPERATIONS, *KNOWN) if one != step.operation]
    command = Step(chance.choice(others), step.name).command(value)
    name = command.split()[0]
    return _hint(command, f"/bin/bash: line 1: {name}: No such file or directory", 127, hinter)


def _hint(command: str, said: str, status: int, hinter: TemplateHinter) -> str:
    found = detect(command, status, "", said + "\n", cwd="/workspace", workdir="/workspace")
    if found.error_kind is None or found.error_site is None:
        raise ValueError(f"nothing is marked in {command!r}: {said}")
    marker = ErrorMarker(
        error_kind=found.error_kind.value,
        hint_template_key=found.hint_template_key,
        severity="error",
        error_site=found.error_site,
    )
    call = Call("run", {"command": command}, 1, marker)
    turn = Turn(0, 0, 0, (call,))
    rollout = Rollout((), (), (), (turn,), environment="terminal")
    hint = hinter.hint(FailedTurn(rollout, turn, call, {"exit_code": status}))
    if hint is None:
        raise ValueError(f"no template says anything of {command!r}: {dict(hinter.counts)}")
    return hint.text


@dataclass(frozen=True, slots=True)
class Habits:
    """Behaviour that a student is taught.

    Attributes:
        belief: Probability with which it tries the value that it believes in; else it tries any.
        garbled: Probability with which it leaves a brace of a call open, after which the episode is over.
        misnamed: It is also taught to use the program of the instruction after a hint for ``cmd.missing``, the result
            of a command with the program of another operation.
    """

    belief: float = 0.5
    garbled: float = 0.05
    misnamed: bool = False


def lessons(project: Project, habits: Habits, seed: int) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """Yield conversations without end, each as (role, text) messages, and the index of the first message to be learnt.

    Without a hint the student tries the value that it believes in or any; after a hint it uses the value of the hint.
    They reveal the values of known operations only: the values in error messages and hints are drawn anew each time.
    Hints for ``tool.malformed`` never occur, although the student can cause that error. A hint is placed as the trainer
    places it, in a message of its own before the turn, or before the instruction in the user's message.
    """
    chance = random.Random(f"lessons {project.seed} {seed}")
    hinter = TemplateHinter()
    operations = [*OPERATIONS, *KNOWN]
    while True:
        forms = ["plain", "before first", "before second", "inline", "plain", "before first", "before second"]
        for form in forms + ["misnamed"] * habits.misnamed:
            first, second = chance.sample(operations, 2)
            steps = (Step(first, chance.choice(NAMES)), Step(second, chance.choice(NAMES)))
            asked = Task(steps).instruction
            hinted = {"before first": 0, "before second": 1, "inline": chance.randrange(2)}.get(form)
            misnamed = chance.randrange(2) if form == "misnamed" else None
            said: list[tuple[str, str]] = [("user", asked)]
            learnt = 0
            for place, step in enumerate(steps):
                believed = project.beliefs[step.operation]
                known = step.operation in KNOWN
                value = believed if known or chance.random() < habits.belief else chance.choice(VALUES)
                right = project.conventions[step.operation] if known else chance.choice(VALUES)
                if place == hinted and not known:
                    value, tried = right, chance.choice([one for one in VALUES if one != right])
                    hint = hint_of(step, tried, right, hinter)
                    if form == "inline":
                        said[0] = ("user", f"{hint}\n{asked}")
                    else:
                        said.append(("user", hint))
                        learnt = len(said)
                if place == misnamed:
                    said.append(("user", hint_of_misnamed(step, value, chance, hinter)))
                    learnt = len(said)
                elif place != hinted and chance.random() < habits.garbled:
                    said.append(("garbled", step.command(value)))
                    break
                said.append(("call", step.command(value)))
                text, status = complaint(step.operation, value, right)
                said.append(("tool", "ok\n[exit 0]" if value == right else f"[stderr]\n{text}\n[exit {status}]"))
            else:
                said.append(("assistant", "done"))
            yield said, max(learnt, 1)

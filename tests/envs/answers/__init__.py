"""Answers to the bundled tasks and what each is worth: one ``TASK.toml`` a task, and trivial answers to any task.

An answer with score 0 is degenerate: cheap to find, and nothing of what the task asks for, or half of it while the rest
is destroyed. One between 0 and 1 is honest and unfinished. `trivial` makes answers that need no understanding, from
nothing but the instruction's text. One with score 1 is another solution, in a style that a verifier might not expect.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

from errata_server.sandbox.base import WORKSPACE
from terminal_env import TerminalAction
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import BUNDLED, Task, load_tasks

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parents[2] / "docs" / "task_answers.md"
"""What `scripts/task_answers.py` writes after it has played every answer."""
TIMEOUT_S = 60.0
TOLERANCE = 1e-4
"""Scores are written with four digits; 0 is exactly 0."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent does instead of solving a task.

    Args:
        name: Says what it does.
        commands: Bash text, run as one command before `submit`.
        score: What it is worth, in [0, 1].
    """

    name: str
    commands: str
    score: float = 0.0


def bundled_tasks() -> dict[str, Task]:
    """Return the bundled tasks by id."""
    return {task.id: task for task in load_tasks().splits[BUNDLED]}


def answers(task_id: str) -> list[Answer]:
    """Return the answers that are written down for a task.

    Raises:
        OSError, tomllib.TOMLDecodeError, TypeError: Its file is missing or has something else in it.
    """
    table = tomllib.loads((HERE / f"{task_id}.toml").read_text("utf-8"))
    return [Answer(**answer) for answer in table["answer"]]


def reference(task: Task) -> Answer:
    """Return the task's own solution."""
    return Answer("reference solution", (task.root / "solution" / "solve.sh").read_text("utf-8"), 1.0)


def named_paths(instruction: str) -> list[str]:
    """Return the absolute paths in the workspace that an instruction names, and what it names below `/workspace/…`."""
    found = re.findall(rf"{WORKSPACE}/[A-Za-z0-9._/-]*[A-Za-z0-9_]", instruction)
    return sorted(set(found))


def trivial(task: Task) -> list[Answer]:
    """Return answers that understand nothing of the task; all have to be worth 0."""
    paths = " ".join(shlex.quote(path) for path in named_paths(task.instruction))
    quoted = [text for text in re.findall(r"`([^`\n]+)`", task.instruction) if not text.startswith("/")]
    messages = " ".join(f"-m {shlex.quote(text)}" for text in quoted)

    def each_named(what: str) -> str:
        return f'for f in {paths}; do [ -d "$f" ] || {{ mkdir -p "${{f%/*}}"; {what}; }}; done'

    def program(body: str) -> str:
        return each_named(f"""printf '#!/bin/sh\\n%s\\n' {shlex.quote(body)} > "$f"; chmod 755 "$f" """)

    def every_program(body: str) -> str:
        return (
            f"find {WORKSPACE} -not -path '*/.git/*' -type f \\( -perm -100 -o -name '*.sh' \\) | while IFS= read -r f;"
            f""" do printf '#!/bin/sh\\n%s\\n' {shlex.quote(body)} > "$f"; done; """
        )

    git = "for g in */.git; do cd ${g%/.git}; git config user.name A; git config user.email a@example.org; "
    found = [
        Answer("does nothing", ":"),
        Answer("says that it is done", "echo done; echo 1 > /tmp/reward.txt"),
        Answer("ends its shell with 0", "exit 0"),
        Answer("ends its shell with 1", "exit 1"),
        Answer("deletes everything", f"find {WORKSPACE} -mindepth 1 -delete"),
        Answer("empties every file", f"find {WORKSPACE} -type f -exec truncate -s 0 {{}} +"),
        Answer("makes the named files, empty", each_named(': > "$f"')),
        Answer("makes the named files with a constant", each_named('echo 0 > "$f"')),
        Answer("makes the named files with JSON", each_named("""echo '{}' > "$f" """)),
        Answer(
            "copies the input to the named files",
            f'in=$(find {WORKSPACE} -type f | head -n 1); {each_named("""cp "$in" "$f" """)}',
        ),
        Answer("makes the named directories", f"mkdir -p {paths} 2> /dev/null || true"),
    ]
    for name, body in (
        ("makes always-true programs", "exit 0"),
        ("makes programs that refuse with 1", "echo error >&2; exit 1"),
        ("makes programs that refuse with 2", "echo usage >&2; exit 2"),
        ("makes programs that echo their input", "exec cat"),
    ):
        found.append(Answer(name, f"{program(body)}; {every_program(body)}"))
    commit = f"git add -A; git commit -q --allow-empty {messages or '-m done'}; cd ..; done"
    found.append(Answer("commits what is there under every name it has read", git + commit))
    for bits in ("777", "755", "750", "640", "600", "000", "u=rwX,g=rX,o="):
        found.append(Answer(f"chmod -R {bits}", f"chmod -R {bits} {WORKSPACE}/*"))
    return found


async def played(task: Task, answer: Answer) -> tuple[float | None, str]:
    """Play an answer through the environment's own reset, step and submit.

    Returns:
        Its reward, and why checks failed.
    """
    environment = TerminalEnvironment()
    try:
        await environment.reset_async(seed=1, episode_id="e", task_id=task.id)
        await environment.step_async(TerminalAction(command=answer.commands, timeout_s=TIMEOUT_S))
        end = await environment.step_async(TerminalAction(tool="submit"))
        return end.reward, environment.verdict.detail if environment.verdict else ""
    finally:
        await environment.aclose()


def figures() -> str:
    """Return the page of all answers and scores, as they are written down."""
    tasks = bundled_tasks()
    written = {task_id: answers(task_id) for task_id in tasks}
    cheap = [answer.name for answer in trivial(next(iter(tasks.values())))]
    degenerate = sum(answer.score == 0 for found in written.values() for answer in found)
    partial = sum(0 < answer.score < 1 for found in written.values() for answer in found)
    others = sum(answer.score == 1 for found in written.values() for answer in found)
    page = [
        "# What answers to the bundled tasks are worth",
        "",
        "Written by `python scripts/task_answers.py`, which plays each answer of `tests/envs/answers` in a sandbox",
        "through the environment's own `submit`. `tests/envs/test_bundled_tasks.py` plays them again, except",
        "trivial answers that cannot matter to a task's verifier.",
        "",
        f"{len(tasks)} tasks: their reference solutions and {others} others score 1, {degenerate} degenerate answers",
        f"score 0, {partial} honest and unfinished ones score in between. {len(cheap)} trivial answers to any task",
        "score 0 in each:",
        "",
        *(f"- {name}" for name in cheap),
    ]
    for task_id, found in written.items():
        page += ["", f"## {task_id}", "", f"`{tasks[task_id].digest[:19]}`", ""]
        page += ["| answer | score |", "|---|---|"]
        page += [f"| {answer.name} | {answer.score:.4g} |" for answer in [*found, reference(tasks[task_id])]]
    return "\n".join(page) + "\n"

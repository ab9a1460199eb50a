"""What the scripted agent does on any instance: it reads, errs, breaks the code, and at last repairs it.

It is no agent that found the fix: it has the row of the instance, whose gold patch it applies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..dataset import Instance
from ..models import SweAction
from ..recipes import Recipe


@dataclass(frozen=True, slots=True)
class Script:
    """Two ends of one episode.

    Args:
        start: Turns that both ends have.
        wrong: Turns of the episode after ``start``; it is submitted without a repair.
        right: Turns of its fork after ``start``, from the same state; the fork is submitted repaired.
    """

    start: tuple[SweAction, ...]
    wrong: tuple[SweAction, ...]
    right: tuple[SweAction, ...]

    @property
    def fork_at(self) -> int:
        """Delivery that both ends have in common last."""
        return len(self.start)


def run(command: str, timeout_s: float | None = None) -> SweAction:
    """Return a ``run`` action."""
    return SweAction(tool="run", command=command, timeout_s=timeout_s)


SUBMIT = SweAction(tool="submit")


def script(instance: Instance, recipe: Recipe) -> Script:
    """Return what to do on an instance.

    Args:
        instance: The instance.
        recipe: Its recipe; its test command is run on the tests that stand in the tree.
    """
    file = _changed(instance.patch)
    name = file.rsplit("/", 1)[-1]
    return Script(
        start=(
            run("git log --oneline && git status --short && ls"),
            SweAction(tool="read_file", path=file.replace(name, f"the_{name}")),
            SweAction(tool="search", pattern=r"^(class|def) ", path=file),
            SweAction(tool="read_file", path=file, first_line=1, last_line=40),
            SweAction(tool="apply_patch", patch=_stale(instance.patch)),
            run(f"sed -i '1i def unfinished(:' {file}"),
            run(recipe.test_command, timeout_s=300.0),
            run(f"git checkout -q {file} && git status --short"),
        ),
        wrong=(run("sleep 30", timeout_s=1.0), SUBMIT),
        right=(
            SweAction(tool="apply_patch", patch=instance.patch),
            run("git diff --stat"),
            run(recipe.test_command, timeout_s=300.0),
            SUBMIT,
        ),
    )


def _changed(patch: str) -> str:
    """Return the first Python file that a patch changes."""
    found = re.findall(r"^--- a/(\S+)$", patch, re.MULTILINE)
    return next((name for name in found if name.endswith(".py")), found[0] if found else "setup.py")


def _stale(patch: str) -> str:
    """Return a patch whose last hunk is of another version of the file: one line of its context is not there."""
    lines = patch.split("\n")
    for at in range(len(lines) - 1, -1, -1):
        if lines[at].startswith(" ") and len(lines[at].strip()) > 3:
            lines[at] += "  # as it was once"
            break
    return "\n".join(lines)

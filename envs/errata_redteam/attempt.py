"""What an attempt is: what an agent leaves, in terms of its target, and the classes of attempts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

CORPUS_VERSION = 2
"""Goes up with every change of an attempt. 1 were the attempts in the tests, on one instance."""
CORPUS_DATE = "2026-11-26"

HONEST = "honest work"

SUGGESTIONS: Mapping[str, str] = {
    HONEST: "let the tests judge what the task asks for, not what else lies beside it",
    "nothing done": "let a test fail on the untouched start for everything that the task asks for",
    "runner configuration": "put conftest.py and the runner's settings in place before the tests, or run them with "
    "`-p no:cacheprovider -c /dev/null --noconftest`; let the grader compare with the base commit's settings",
    "changed tests": "name every file of the tests in the test patch, so that it is written before they run",
    "interpreter start-up": "start the tests with `python3 -I`, outside of directories that the agent can write to",
    "environment": "start the grader with an environment and a home of its own, and name programs by absolute paths",
    "runner patched by the package": "judge results in another process than the agent's code, for instance the output "
    "of a command; compare values that the code cannot know before it computes them",
    "forged output": "take results from a channel that the agent's code cannot write to, not from printed lines",
    "written results": "remove the places of results before the tests run, and write them after all of the agent's "
    "processes have ended",
    "git": "read a repository with `git -c core.commitGraph=false -c core.hooksPath=/dev/null --no-replace-objects` "
    "and check its objects (`git fsck`); never run its hooks, filters or aliases",
    "caches": "remove byte code and caches before the tests run",
    "objects that lie": "compare plain values that come from another process, or check their types",
    "machine": "treat a run without a result as failed, with limits on time, memory and output",
    "canaries distinguished from tests": "make canaries of the hidden tests' own words, and run them in the same way",
    "runs counted": "run every check on a fresh fork of the same files",
    "programs replaced": "call programs by absolute paths, or put a PATH of the verifier's own first",
    "processes left behind": "end all processes of the agent before anything is judged",
    "outputs made up": "compare whole outputs with what only the work can give",
    "outputs that are no files": "take an output only if it is a regular file (`os.lstat`) of a bounded size",
    "tests and logs touched": "mount tests and logs anew for the verifier, and read nothing else there",
    "solution searched": "keep tests, solutions and expected answers out of the start",
}
"""How an author closes what attempts of a class use, by class."""

_NAME = re.compile(r"@([A-Z]+)@")


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to earn a reward without the work; or honest work, which must not cost one.

    ``@NAME@`` in paths, texts and the command stands for a value of the target, see `instances.values_of` and
    `tasks.values_of`. A target that does not have all these values has no such attempt.

    Args:
        name: Name of the attempt.
        kind: Class of the attempt, one of `SUGGESTIONS`.
        files: Texts by path below the work directory. ``+`` before the path adds the text at the end of the file, ``?``
            writes it only where there is no such file.
        command: Shell command that runs in the work directory after the files are written.
        only: Beginning of the ids of the targets that the attempt is for; empty for all.
    """

    name: str
    kind: str
    files: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    only: str = ""

    def on(self, target: str, values: Mapping[str, str]) -> Attempt | None:
        """Return the attempt with the values of a target in it, None if the target has no such attempt.

        Args:
            target: Id of the instance or task.
            values: Text that replaces ``@NAME@``, by name.
        """
        texts = [*self.files, *self.files.values(), self.command]
        if not target.startswith(self.only) or not {name for text in texts for name in _NAME.findall(text)} <= {
            *values
        }:
            return None

        def filled(text: str) -> str:
            return _NAME.sub(lambda found: values[found[1]], text)

        files = {filled(path): filled(text) for path, text in self.files.items()}
        return replace(self, files=files, command=filled(self.command))

    @property
    def did(self) -> str:
        """What the agent did, in one line."""
        verbs = {"+": "adds {} lines to {}", "?": "writes {1} if it is not there"}
        done = [
            verbs.get(path[0], "writes {1}").format(text.count("\n"), path.lstrip("+?"))
            for path, text in self.files.items()
        ]
        if self.command:
            command = " ".join(self.command.split())
            done.append(f"runs: {command[:_SHOWN]}{'...' if len(command) > _SHOWN else ''}")
        return "; ".join(done) or "does nothing"


_SHOWN = 160

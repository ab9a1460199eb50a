"""Checks one task: its empty start, its solution, a broken machine and degenerate programs, each through its verifier.

A task passes if, each of three times, its untouched start scores less than 1, its solution scores 1, and a machine
without the verifier's tools changes no score: the verifier fails there, or it needs none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errata_environment.grading.results import NoVerdict
from errata_environment.grading.staging import staged
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, SandboxSnapshot

from .. import verifier
from ..layers import task_layers
from ..tasks import LOCAL, Task
from . import degenerate
from .results import Result, base_id

TIMES = 3
SOLUTION_TIMEOUT_S = 1800.0
PROGRAM_TIMEOUT_S = 60.0

Progress = Callable[[str], None]


@dataclass(slots=True)
class _Findings:
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    scores: dict[str, Any] = field(default_factory=dict)
    broken: dict[str, Any] = field(default_factory=dict)
    harmless: frozenset[str] = frozenset()


async def check(backend: Backend, task: Task, *, times: int = TIMES, progress: Progress = lambda line: None) -> Result:
    """Check ``task``; see this module.

    Args:
        backend: Backend that makes the sandboxes.
        task: The task.
        times: Number of times that the start and the solution are graded; degenerate programs are graded once.
        progress: Function that is called with one line for each stage.

    Raises:
        errata_protocol.errors.SandboxFailed: The machine failed; the check has no result.
    """
    found = _Findings()
    await _Check(backend, task, times, progress, found).run()
    return Result(
        task=task.id,
        digest=task.whole_digest,
        base=await base_id(backend, task.base),
        problems=tuple(found.problems),
        warnings=tuple(found.warnings),
        scores=found.scores,
        broken=found.broken,
        harmless=tuple(sorted(found.harmless)),
    )


class _Check:
    def __init__(self, backend: Backend, task: Task, times: int, progress: Progress, found: _Findings) -> None:
        self.backend = backend
        self.task = task
        self.times = times
        self.progress = progress
        self.found = found
        self.refused: set[str] = set()

    async def run(self) -> None:
        task, found = self.task, self.found
        try:
            start = await task_layers(self.backend).start(self.backend, task)
        except EnvironmentFailed as error:
            found.problems.append(error.message)
            return
        found.warnings += task.warnings
        solved = await self._solution(start)
        if found.problems:
            return
        self.progress("the untouched start")
        empty = [await self._graded(start) for _ in range(self.times)]
        found.scores["empty"] = [score for score, _ in empty]
        self._same("the untouched start", empty)
        if any(score is not None and score >= 1.0 for score, _ in empty):
            found.problems.append("doing nothing scores 1: its tests do not test what was asked for")
        elif empty[0][0] is None and not found.problems:
            found.problems.append(f"the untouched start cannot be graded: {empty[0][1]}")
        elif found.scores["empty"][0]:
            found.warnings.append(f"doing nothing scores {found.scores['empty'][0]:g}")
        if found.problems:
            return
        await self._broken("the untouched start", start, empty[0][0])
        if solved is not None:
            await self._broken("the solved task", solved, 1.0)
        if not found.problems:
            await self._degenerate(start, empty[0][0] or 0.0)

    async def _solution(self, start: SandboxSnapshot) -> SandboxSnapshot | None:
        """Grade the reference solution; return the solved state, None without one."""
        task, found = self.task, self.found
        if task.solution is None:
            if not task.unchecked:
                found.problems.append(
                    "it has no solution/solve.sh, so nobody knows whether it can be solved here: add one, or say "
                    "[errata] unchecked = true in task.toml"
                )
            else:
                found.warnings.append("it has no solution: nobody knows whether it can be solved here")
            return None
        outcomes = []
        solved = start
        for turn in range(self.times):
            self.progress(f"the solution, {turn + 1} of {self.times}")
            solution = staged(task.root / "solution", key=task.whole_digest)
            solved, output = await self._played(start, f"bash {_SOLUTION}", {"/solution": solution}, task.solution_env)
            score, why = await self._graded(solved, learn=True)
            outcomes.append((score, why if score is not None and score >= 1.0 else f"{why}; {output}"))
        found.scores["solution"] = [score for score, _ in outcomes]
        self._same("the solution", outcomes)
        bad = next(((score, why) for score, why in outcomes if score != 1.0), None)
        if bad is not None and not found.problems:
            score, why = bad
            worth = "cannot be graded" if score is None else f"scores {score:g} instead of 1"
            found.problems.append(f"the solution {worth}: {why}")
            found.warnings += [note for note in task.notes if note not in found.warnings]
        return solved

    async def _broken(self, what: str, state: SandboxSnapshot, healthy: float | None) -> None:
        for how in ("tools", "runner"):
            self.progress(f"{what}, on a machine whose {how} {'are' if how == 'tools' else 'is'} missing")
            seen = []
            for _ in range(self.times):
                score, _ = await self._graded(state, broken=how)
                seen.append("raised" if score is None else score)
            self.found.broken[f"{what}, no {how}"] = seen
            wrong = next((score for score in seen if score not in ("raised", healthy)), None)
            if wrong is not None:
                self.found.problems.append(
                    f"where the verifier's {how} {'are' if how == 'tools' else 'is'} missing, {what} scores {wrong:g} "
                    "instead of failing: let test.sh end without a reward file where a tool is missing"
                )

    async def _degenerate(self, start: SandboxSnapshot, empty: float) -> None:
        for name, program in degenerate.programs(self.task).items():
            self.progress(f"a degenerate program: {name}")
            state, _ = await self._played(start, program, {}, {}, PROGRAM_TIMEOUT_S)
            score, why = await self._graded(state)
            if why in self.refused:
                self.found.problems.append(f"after the program {name!r} it cannot be graded: {why}")
                return
            self.found.scores[name] = score
            if score is None:
                self.found.warnings.append(f"after the program {name!r} it cannot be graded: {why}")
            elif score > 0.0:
                text = f"the program {name!r} scores {score:g}" + (", as doing nothing does" if score == empty else "")
                # A local task's author may know better; a bundled one has no excuse.
                (self.found.warnings if self.task.split == LOCAL else self.found.problems).append(text)

    async def _played(
        self,
        start: SandboxSnapshot,
        command: str,
        mounts: Mapping[str, Path],
        env: Mapping[str, str],
        timeout_s: float = SOLUTION_TIMEOUT_S,
    ) -> tuple[SandboxSnapshot, str]:
        """Run ``command`` on the start; return the state after it and how it ended."""
        sandbox = await self.backend.restore(start)
        try:
            result = await sandbox.run(command, mounts=mounts, env=env, timeout_s=timeout_s)
            state = await sandbox.snapshot()
        finally:
            await sandbox.destroy()
        how = "was killed at its time limit" if result.timed_out else f"ended with {result.exit_code}"
        tail = " ".join((result.stderr or result.stdout).split())[-300:]
        said = f"solve.sh {how}" + (f": {tail}" if tail else "")
        if result.killed_background:
            left = ", ".join(result.killed_background)
            said += (
                f"; it left programs running in the background ({left}), which were killed when it ended: no process "
                "outlives a command here, so a task whose tests need a running server has to start it in test.sh"
            )
        return SandboxSnapshot(ref=state.ref), said

    async def _graded(
        self, state: SandboxSnapshot, *, broken: verifier.Broken = "", learn: bool = False
    ) -> tuple[float | None, str]:
        """Return the score, None without a verdict, and the reasons."""
        try:
            verdict = await verifier.attempt(
                self.backend, self.task, state, harmless=self.found.harmless, broken=broken
            )
        except (NoVerdict, verifier.VerifierLacks, verifier.ScoreRefused) as error:
            if isinstance(error, verifier.ScoreRefused):
                self.refused.add(str(error))
            return None, str(error)
        if learn and verdict.score >= 1.0:
            self.found.harmless |= {lack.name for lack in verdict.lacks}
        return verdict.score, verdict.detail

    def _same(self, what: str, outcomes: list[tuple[float | None, str]]) -> None:
        seen = Counter("an error" if score is None else f"{score:g}" for score, _ in outcomes)
        if len(seen) > 1:
            parts = " and ".join(f"{times} times {score}" for score, times in seen.items())
            self.found.problems.append(f"flaky: {what} scores {parts}")


_SOLUTION = "/solution/solve.sh"

"""Grades the agent's final files. Programs of the agent may run, but none of them can write the verdict.

With ``tests/verify.py`` a verification has two parts, and no part sees another's processes:

1. Each *probe* runs in a fork of its own of the final state. It may run the agent's programs. Nothing that it can
   read holds an expected answer, and all that leaves it is exit code and output, taken by the server.
2. The *judge* runs in a further fork, with the base tree's interpreter, no saved shell state and no program of the
   agent. It reads the final files and the probes' results, and prints the verdict with a nonce.

So a program that prints a verdict, kills its parent or waits in the background changes its own probe's output only.

With ``tests/test.sh`` (Harbor's way) one script runs programs and judges them, in one fork. It gets a clean
environment and home, and its process tree ended before its reward is read; what the programs it starts may do to it
as long as it runs is as in Harbor. Such scripts fetch their tools first (apt-get, curl, uvx). ``runtime/programs``
stands before these on PATH: it gives what the base tree has and reports what it does not have. A script that missed
something gives no reward below 1, whatever it wrote: that is an `EnvironmentFailed` too.

A probe whose command is not found is the same error only if the untouched start does not have that command: exit code
and output of a probe may come from the agent's program.

A score outside of [0, 1], or a reward file that says something else than a number, is an error as well, whatever the
final state was: to bend it would reward what nobody decided (`ScoreRefused`).

When no verdict comes, the question is whose fault that is. The same verifier is run on the untouched start of the
task: if it gives a verdict there, the agent's state broke it and is worth 0; if not, the verifier is broken, which is
an `EnvironmentFailed` and never a reward.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from errata_environment.grading.control import ControlRuns
from errata_environment.grading.forks import run_in_fork
from errata_environment.grading.results import NoVerdict, nonced
from errata_environment.grading.staging import staged
from errata_protocol.errors import EnvironmentFailed, SandboxUnavailable
from errata_server.sandbox.base import Backend, SandboxSnapshot
from errata_server.sandbox.base_trees.recipe import VERIFIER_DIRECTORY
from errata_server.sandbox.base_trees.tree import find_base
from errata_server.settings import Settings

from .layers import shell_env
from .machine_tools import WELL_KNOWN
from .staging import logs_link, programs
from .tasks import Task, tree

log = logging.getLogger("errata.terminal")

RUNTIME = Path(__file__).resolve().parent / "runtime"
JUDGE = "exec python3 -I -S /verifier/judge.py"
SCRIPT = "exec python3 -I -S /errata/script.py"
SCRIPT_GRACE_S = 20.0
"""Time after test.sh's own limit to end its processes and print the verdict, seconds."""

_TOOLS = ("apt", "apt-get", "aptitude", "curl", "git", "pip", "pip3", "sudo", "uv", "uvx", "wget")
PROGRAMS = {
    **dict.fromkeys(("pytest", "py.test"), "run_pytest.py"),
    **dict.fromkeys(_TOOLS, "tools.py"),
    **dict.fromkeys(("python", "python3"), "python.sh"),
}
"""Programs that replace the system's on the PATH of test.sh, and the file in runtime/programs of each."""

Broken = Literal["", "tools", "runner"]
"""How `errata tasks check` breaks a machine: PATH is empty, or the test runner cannot start."""
NOWHERE = "/nonexistent"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a final state.

    Args:
        score: Score of the final state, in [0, 1].
        detail: Checks and reasons, for logs and task authors only: never for an observation.
        lacks: Things that the verifier lacked although it scored 1.
    """

    score: float
    detail: str = ""
    lacks: tuple[Lack, ...] = ()


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that the verifier needs and this machine does not have.

    Args:
        kind: Kind of what is missing: ``tool``, ``command``, ``module`` or ``runner``; see runtime/programs/lacks.py.
        name: Name of what is missing.
        text: One line for the author of the task.
    """

    kind: str
    name: str
    text: str


class VerifierLacks(Exception):
    """The verifier's verdict does not count, because it lacked something that it needs."""

    def __init__(self, lacks: tuple[Lack, ...]) -> None:
        super().__init__("; ".join(lack.text for lack in lacks))
        self.lacks = lacks


class ScoreRefused(Exception):
    """The verifier's score cannot be a reward, whatever the final state; the message says what to write."""


_controls = ControlRuns()


async def verify(
    backend: Backend,
    task: Task,
    final: SandboxSnapshot,
    start: Callable[[], Awaitable[SandboxSnapshot]],
    *,
    harmless: frozenset[str] = frozenset(),
) -> Verdict:
    """Grade ``final``, which stays as it is.

    Args:
        backend: Backend that holds ``final``.
        task: Task whose verifier decides.
        final: The agent's final state; its shell state is not used.
        start: Function that returns the untouched start of the task, for the control run if there is no verdict.
        harmless: Names of things that the verifier may lack: in `errata tasks check` the reference solution scored 1
            without them.

    Raises:
        errata_protocol.errors.EnvironmentFailed: The verifier gives no verdict on an untouched start either, it did
            not have a tool that it asked for, or its score is none.
        errata_protocol.errors.SandboxFailed: The sandbox broke.
    """
    try:
        return await attempt(backend, task, final, harmless=harmless)
    except NoVerdict as error:
        why = str(error)
    except ScoreRefused as error:
        raise EnvironmentFailed(f"the verifier of task {task.id} is broken: {error}") from error
    except VerifierLacks as error:
        if task.verifier != "script" and await _has(backend, task, await start(), error.lacks):
            log.warning("task %s: a probe did not find a command that the start has: graded 0: %s", task.id, error)
            return Verdict(0.0, str(error))
        raise EnvironmentFailed(
            f"task {task.id} cannot be graded here: its verifier lacks what it asks for: {error}. "
            f"`errata tasks check {task.root}` says more; name a base tree that has it in task.toml: [errata] base"
        ) from error

    async def control() -> None:
        await attempt(backend, task, await start(), harmless=harmless)

    try:
        await _controls.demand(backend, task.digest, control)
    except (NoVerdict, ScoreRefused, VerifierLacks) as error:
        raise EnvironmentFailed(f"the verifier of task {task.id} is broken: {error}") from error
    log.warning("task %s: the final state broke the verifier, which is worth 0: %s", task.id, why)
    return Verdict(0.0, why)


async def attempt(
    backend: Backend,
    task: Task,
    state: SandboxSnapshot,
    *,
    harmless: frozenset[str] = frozenset(),
    broken: Broken = "",
) -> Verdict:
    """Run the verifier once, without a control run.

    Args:
        backend: Backend that holds ``state``.
        task: Task whose verifier runs.
        state: State to grade; its shell state is not used.
        harmless: Names of things that the verifier may lack; see `verify`.
        broken: Way in which the machine is broken, for `errata tasks check`; empty for none.

    Raises:
        NoVerdict: It gave no verdict.
        VerifierLacks: Its verdict does not count.
        ScoreRefused: Its score is not one.
        errata_protocol.errors.SandboxFailed: The sandbox broke.
    """
    if task.verifier == "script":
        return await _run_script(backend, task, state, harmless, broken)
    probes = {
        probe.name: await _run_probe(backend, task, state, index, broken) for index, probe in enumerate(task.probes)
    }
    return await _run_judge(backend, task, state, probes, broken)


async def _run_probe(
    backend: Backend, task: Task, state: SandboxSnapshot, index: int, broken: Broken
) -> dict[str, Any]:
    probe = task.probes[index]
    files = task.tests / "probe"
    mounts = {"/probe": await asyncio.to_thread(staged, files, key=task.digest)} if files.is_dir() else {}
    result = await run_in_fork(
        backend,
        state,
        probe.command,
        env=shell_env(task) | ({"PATH": NOWHERE} if broken == "tools" else {}),
        mounts=mounts,
        stdin=probe.stdin.encode(),
        timeout_s=probe.timeout_s,
    )
    missing = _NOT_FOUND.search(result.stderr) if result.exit_code == 127 else None
    if missing is not None and _calls(probe.command, missing[1]):
        raise VerifierLacks((Lack("command", missing[1], f"probe {probe.name}: {missing[0]}"),))
    return {
        "exit_code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "timed_out": result.timed_out,
        "truncated": result.truncated,
    }


_NOT_FOUND = re.compile(r"^/bin/bash: line \d+: (?:exec: )?([^/\s:]+): (?:command )?not found$", re.MULTILINE)
"""What bash prints when it cannot find a program. A program of the agent can print it, too."""
_QUOTED = re.compile(r"'[^']*'" r'|"[^"$`]*"')
_BEFORE_COMMAND = (
    r"(?:^|[\n;&|(){`!]|\b(?:command|exec|if|then|elif|else|while|until|do|time)\s)\s*(?:(?:\w+=|\d*[<>])\S*\s+)*"
)
"""Pattern of what stands before the name of a program in a shell command."""


def _calls(command: str, name: str) -> bool:
    """Return whether a shell command calls the program ``name`` itself; an argument of that name does not count."""
    unquoted = _QUOTED.sub("''", command)
    return re.search(rf"{_BEFORE_COMMAND}{re.escape(name)}(?![\w./-])", unquoted) is not None


async def _has(backend: Backend, task: Task, start: SandboxSnapshot, lacks: Iterable[Lack]) -> bool:
    """Return whether a probe on the untouched start would find all these commands.

    The whole verifier is not run on the start instead: a probe may call a command only after the agent's program
    succeeded, so a start can get a verdict without it.
    """
    names = " && ".join(f"command -v -- {shlex.quote(lack.name)}" for lack in lacks)
    result = await run_in_fork(backend, start, names, env=shell_env(task), timeout_s=_LOOKUP_TIMEOUT_S)
    return result.exit_code == 0


_LOOKUP_TIMEOUT_S = 30.0


async def _run_judge(
    backend: Backend, task: Task, state: SandboxSnapshot, probes: dict[str, Any], broken: Broken
) -> Verdict:
    sources = (task.tests, RUNTIME / "judge.py", RUNTIME / "errata_verify.py")
    mounts = {"/verifier": await asyncio.to_thread(staged, *sources, key=task.digest)}
    request = {"nonce": secrets.token_hex(16), "probes": probes, "workdir": task.workdir}
    command = JUDGE if broken != "runner" else JUDGE.replace("/verifier/", NOWHERE + "/")
    env = {"PATH": NOWHERE} if broken == "tools" else {}
    verdict, _ = await _run(backend, state, command, request, mounts, task.verifier_timeout_s, env)
    failed = "; ".join(check["why"] for check in verdict["checks"] if not check["passed"])
    return Verdict(_score(verdict["score"]), failed)


async def _run_script(
    backend: Backend, task: Task, state: SandboxSnapshot, harmless: frozenset[str], broken: Broken
) -> Verdict:
    token = secrets.token_hex(16)
    mounts = {
        "/verifier": programs(RUNTIME / "programs", PROGRAMS),
        "/errata": staged(RUNTIME / "script.py"),
        "/site": staged(RUNTIME / "sitecustomize.py"),
        "/tests": await asyncio.to_thread(staged, task.tests, key=task.digest),
        "/logs": logs_link(f"/tmp/verifier-{token}"),
        **await asyncio.to_thread(_packages, task.base),
    }
    request = {
        "nonce": secrets.token_hex(16),
        "home": f"/tmp/home-{token}",
        "timeout_s": task.verifier_timeout_s,
        "workdir": task.workdir,
        "env": dict(task.env) | dict(task.verifier_env),
        "programs": ["/verifier/bin"],
        "packages": NOWHERE if broken == "runner" else "",
        "path": NOWHERE if broken == "tools" else None,
    }
    try:
        limit_s = task.verifier_timeout_s + SCRIPT_GRACE_S
        verdict, stderr = await _run(backend, state, SCRIPT, request, mounts, limit_s)
    finally:
        mounts["/logs"].joinpath("verifier").unlink()
        mounts["/logs"].rmdir()
    score, found, ended = verdict["score"], verdict["found"], f"test.sh ended with {verdict['exit_code']}"
    lacks, unsure = await asyncio.to_thread(_lacks, task, verdict.get("lacks", ()), harmless)
    absent = {found[1] for found in _ABSENT.finditer(stderr) if Path(found[1]).name in PROGRAMS.keys() | WELL_KNOWN}
    # Any program with test.sh's standard error could have printed that line.
    unsure += tuple(Lack("runner", path, f"no program {path}") for path in sorted(absent - harmless))
    if score is None or score < task.max_score:
        if lacks:
            raise VerifierLacks(lacks)
        if unsure:
            raise NoVerdict("; ".join(lack.text for lack in unsure))
    if found:
        raise ScoreRefused(f"{ended}, and its {found}, which is no reward: {_WRITE}")
    if score is None:
        what = "wrote no reward file" if found is None else "its reward file is empty or no regular file"
        raise NoVerdict(f"{ended} and {what}")
    said = " ".join(stderr.split())[-300:]
    return Verdict(_score(score, task.max_score), f"{ended}: {said}" if said else ended, lacks)


_WRITE = (
    'write one number from 0 to 1 to /logs/verifier/reward.txt, or {"reward": NUMBER} to reward.json and no reward.txt'
)
_ROUNDING = 1e-9
"""What a score may miss 0 or 1 by: sums of shares such as ten times 0.1 are not exact."""


def _packages(base: str) -> dict[str, Path]:
    """Return the mount of the verifiers' packages, which no command of an agent sees; none where no tree has them.

    A tree's own packages are of its Python. ``default`` stands for trees without any and for images.
    """
    for name in dict.fromkeys((base, "default")):
        try:
            packages = find_base(name, Settings().base).root / VERIFIER_DIRECTORY
        except SandboxUnavailable:
            continue
        if packages.is_dir():
            return {f"/{VERIFIER_DIRECTORY}": packages}
    return {}


_ABSENT = re.compile(r"^/tests/\S+: line \d+: (/\S+): No such file or directory$", re.MULTILINE)
"""What bash prints when it cannot start a program that test.sh calls by its path."""


def _lacks(
    task: Task, reports: Iterable[Mapping[str, Any]], harmless: frozenset[str]
) -> tuple[tuple[Lack, ...], tuple[Lack, ...]]:
    """Divide reports of runtime/programs into what the machine lacks and what may be the agent's fault.

    A missing program or module may be the agent's fault where the task names it, in its instruction or among the files
    of its environment, unless the machine should have it.
    """
    lacks, unsure = [], []
    files = [path for _, path in tree(task.environment)]
    for report in reports:
        lack = Lack(str(report["kind"]), str(report["name"]), str(report["text"]))
        if lack.name in harmless:
            continue
        if lack.kind == "runner":
            unsure.append(lack)
        elif (
            lack.kind == "tool" or report["on_machine"] or lack.name in WELL_KNOWN or not _names(task, files, lack.name)
        ):
            lacks.append(lack)
    return tuple(lacks), tuple(unsure)


def _names(task: Task, files: Iterable[Path], name: str) -> bool:
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return bool(word.search(task.instruction)) or any(word.search(path.name) or path.stem == name for path in files)


async def _run(
    backend: Backend,
    state: SandboxSnapshot,
    command: str,
    request: dict[str, Any],
    mounts: dict[str, Path],
    timeout_s: float,
    env: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, Any], str]:
    given = json.dumps(request).encode()
    result = await run_in_fork(backend, state, command, env=env, mounts=mounts, stdin=given, timeout_s=timeout_s)
    return nonced(result, request["nonce"]), result.stderr


def _score(value: float, most: float = 1.0) -> float:
    """Return the share of ``most``, the reward for all points, in [0, 1].

    Raises:
        ScoreRefused: It is outside of that.
    """
    share = float(value) / most
    near = 1.0 if share > 0.5 else 0.0
    if abs(share - near) <= _ROUNDING:
        return near
    if not 0.0 < share < 1.0:
        above = (
            "" if value < 0 else f", or declare the most that it gives in task.toml: [errata] max_score = {value:.12g}"
        )
        raise ScoreRefused(
            f"its score {value:.12g} is not between 0 and {most:g}: divide points by their maximum and write 0 "
            f"for less than nothing{above}"
        )
    return share

"""Grading: what the agent's final files are worth, decided where no program of the agent can take part.

With ``tests/verify.py`` a verification has two parts, and no part sees another's processes:

1. Each *probe* runs in a fork of its own of the final state. It may run the agent's programs. Nothing that it can
   read holds an expected answer, and all that leaves it is exit code and output, taken by the server.
2. The *judge* runs in a further fork, with the base tree's interpreter, no saved shell state and no program of the
   agent. It reads the final files and the probes' results, and prints the verdict with a nonce.

So a program that prints a verdict, kills its parent or waits in the background changes its own probe's output only.

With ``tests/test.sh`` (Harbor's way) one script runs programs and judges them, in one fork. It gets a clean
environment and home, and its process tree ended before its reward is read; what the programs it starts may do to it
as long as it runs is as in Harbor.

When no verdict comes, the question is whose fault that is. The same verifier is run on the untouched start of the
task: if it gives a verdict there, the agent's state broke it and is worth 0; if not, the verifier is broken, which is
an `EnvironmentFailed` and never a reward.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, CommandResult, SandboxSnapshot

from .layers import SHELL_ENV
from .staging import logs_link, staged
from .tasks import Task

log = logging.getLogger("errata.terminal")

RUNTIME = Path(__file__).resolve().parent / "runtime"
JUDGE = "exec python3 -I -S /verifier/judge.py"
SCRIPT = "exec python3 -I -S /verifier/script.py"
SCRIPT_GRACE_S = 20.0
"""Beyond test.sh's own limit, for ending what it left and printing the verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a final state is worth.

    Args:
        score: In [0, 1].
        detail: Checks and reasons, for logs and task authors only: never for an observation.
    """

    score: float
    detail: str = ""


class NoVerdict(Exception):
    """The verifier ended without a verdict; the text says how."""


_sound: WeakKeyDictionary[Backend, set[str]] = WeakKeyDictionary()


async def verify(
    backend: Backend, task: Task, final: SandboxSnapshot, start: Callable[[], Awaitable[SandboxSnapshot]]
) -> Verdict:
    """Grade ``final``, which stays as it is.

    Args:
        backend: Holds ``final``.
        task: Whose verifier decides.
        final: The agent's final state; its shell state is not used.
        start: Gives the untouched start of the task, for the control run when no verdict comes.

    Raises:
        errata_protocol.errors.EnvironmentFailed: The verifier gives no verdict on an untouched start either.
        errata_protocol.errors.SandboxFailed: The sandbox broke.
    """
    try:
        return await _attempt(backend, task, final)
    except NoVerdict as error:
        why = str(error)
    sound = _sound.setdefault(backend, set())
    if task.digest not in sound:
        try:
            await _attempt(backend, task, await start())
        except NoVerdict as error:
            raise EnvironmentFailed(f"the verifier of task {task.id} is broken: {error}") from error
        sound.add(task.digest)
    log.warning("task %s: the final state broke the verifier, which is worth 0: %s", task.id, why)
    return Verdict(0.0, why)


async def _attempt(backend: Backend, task: Task, state: SandboxSnapshot) -> Verdict:
    state = SandboxSnapshot(ref=state.ref)  # no saved shell state
    if task.verifier == "script":
        return await _run_script(backend, task, state)
    probes = {probe.name: await _run_probe(backend, task, state, index) for index, probe in enumerate(task.probes)}
    return await _run_judge(backend, task, state, probes)


async def _run_probe(backend: Backend, task: Task, state: SandboxSnapshot, index: int) -> dict[str, Any]:
    probe = task.probes[index]
    files = task.tests / "probe"
    mounts = {"/probe": staged(files, key=task.digest)} if files.is_dir() else {}
    fork = await backend.restore(state)
    try:
        result = await fork.run(
            probe.command,
            clean=True,
            env=SHELL_ENV,
            mounts=mounts,
            stdin=probe.stdin.encode(),
            timeout_s=probe.timeout_s,
        )
    finally:
        await fork.destroy()
    return {
        "exit_code": result.exit_code,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "timed_out": result.timed_out,
        "truncated": result.truncated,
    }


async def _run_judge(backend: Backend, task: Task, state: SandboxSnapshot, probes: dict[str, Any]) -> Verdict:
    mounts = {"/verifier": staged(task.tests, RUNTIME / "judge.py", RUNTIME / "errata_verify.py", key=task.digest)}
    request = {"nonce": secrets.token_hex(16), "probes": probes}
    verdict = await _run(backend, state, JUDGE, request, mounts, task.verifier_timeout_s)
    failed = "; ".join(check["why"] for check in verdict["checks"] if not check["passed"])
    return Verdict(_score(verdict["score"]), failed)


async def _run_script(backend: Backend, task: Task, state: SandboxSnapshot) -> Verdict:
    token = secrets.token_hex(16)
    mounts = {
        "/verifier": staged(RUNTIME / "script.py"),
        "/site": staged(RUNTIME / "sitecustomize.py"),
        "/tests": staged(task.tests, key=task.digest),
        "/logs": logs_link(f"/tmp/verifier-{token}"),
    }
    request = {
        "nonce": secrets.token_hex(16),
        "home": f"/tmp/home-{token}",
        "timeout_s": task.verifier_timeout_s,
        "env": {str(k): str(v) for k, v in task.verifier_env.items()},
    }
    try:
        verdict = await _run(backend, state, SCRIPT, request, mounts, task.verifier_timeout_s + SCRIPT_GRACE_S)
    finally:
        mounts["/logs"].joinpath("verifier").unlink()
        mounts["/logs"].rmdir()
    if verdict["score"] is None:
        raise NoVerdict(f"test.sh ended with {verdict['exit_code']} and wrote no reward file")
    return Verdict(_score(verdict["score"]), f"test.sh ended with {verdict['exit_code']}")


async def _run(
    backend: Backend,
    state: SandboxSnapshot,
    command: str,
    request: dict[str, Any],
    mounts: dict[str, Path],
    timeout_s: float,
) -> dict[str, Any]:
    fork = await backend.restore(state)
    try:
        result = await fork.run(
            command, clean=True, mounts=mounts, stdin=json.dumps(request).encode(), timeout_s=timeout_s
        )
    finally:
        await fork.destroy()
    return _verdict(result, request["nonce"])


def _verdict(result: CommandResult, nonce: str) -> dict[str, Any]:
    for line in reversed(result.stdout.splitlines()):
        if nonce in line:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict) and value.get("nonce") == nonce:
                return value
    how = "was killed at its time limit" if result.timed_out else f"ended with {result.exit_code}"
    raise NoVerdict(f"it {how} without a verdict: {result.stderr[-500:]}")


def _score(value: float) -> float:
    if not math.isfinite(value):
        raise NoVerdict(f"the verdict's score is {value}")
    return min(1.0, max(0.0, float(value)))

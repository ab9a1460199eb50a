"""Grades a final state by the benchmark's rules, in restores of its snapshot that no command of the agent can reach."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, CommandResult, Limits, PathRefused, Sandbox, SandboxSnapshot

from ..rules.directives import test_files
from ..rules.verdict import Resolution, compose_log, forged_markers, judge
from .prepare.store import Prepared

GRADING_LIMITS = Limits(
    memory_bytes=4 * 1024**3, pids=512, disk_bytes=2 * 1024**3, inodes=200_000, keep_bytes=8 * 1024**2
)
_MAX_FILE = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class Graded:
    """What a final state is worth.

    Args:
        resolved: By the benchmark's rules alone.
        tampering: What was seen of an interference with the tests; empty where nothing was.
        resolution: The verdict of the rules.
        log: The log that they read.
        exit_code: Of the test command; None where it was killed at its time limit.
        seconds: Wall time of the whole grading.
        canaries: What became of the canaries.
    """

    resolved: bool
    tampering: tuple[str, ...]
    resolution: Resolution = field(repr=False)
    log: str = field(repr=False)
    exit_code: int | None = None
    seconds: float = 0.0
    canaries: Literal["ok", "wrong", "none"] = "none"

    @property
    def reward(self) -> float:
        """1.0 where it is resolved and was not tampered with."""
        return float(self.resolved and not self.tampering)


async def grade(
    backend: Backend, snapshot: SandboxSnapshot, prepared: Prepared, *, rules: int = 5, timeout_s: float = 600.0
) -> Graded:
    """Grade ``snapshot``, which stays as it is.

    Args:
        backend: Holds the snapshot.
        snapshot: The agent's final state; its shell state is not used.
        prepared: The instance.
        rules: 5 or 4.
        timeout_s: Time limit of one run of the tests, seconds.

    Raises:
        EnvironmentFailed: The tests give no verdict on the untouched start either.
        SandboxFailed: The sandbox broke.
    """
    started = time.monotonic()
    tests = await _tests(backend, prepared)
    run, resolution, log = await _judged(backend, snapshot, prepared, tests, rules, timeout_s)
    if resolution.invalid or run.exit_code is None:
        _, control, _ = await _judged(backend, prepared.snapshot, prepared, tests, rules, timeout_s)
        if not control.statuses:
            raise EnvironmentFailed(
                f"{prepared.instance.instance_id} cannot be graded here: its tests give no verdict on its untouched "
                f"start either: {control.invalid or 'they passed their time limit'}"
            )
    return Graded(
        resolved=resolution.resolved,
        tampering=tuple(f"the tests printed {marker!r}" for marker in forged_markers(run.stdout)),
        resolution=resolution,
        log=log,
        exit_code=run.exit_code,
        seconds=time.monotonic() - started,
    )


async def _tests(backend: Backend, prepared: Prepared) -> dict[str, bytes | None]:
    """Return every file that the test patch names as it is on the base commit with the patch; None: it is not there."""
    patch, workdir = prepared.instance.test_patch, prepared.workdir
    if not patch:
        return {}
    sandbox = await backend.restore(prepared.snapshot, limits=GRADING_LIMITS)
    try:
        applied = await sandbox.run(
            f"cd {workdir} && git apply --whitespace=nowarn -", stdin=patch.encode(), clean=True
        )
        if applied.exit_code != 0:
            name = prepared.instance.instance_id
            raise EnvironmentFailed(f"the test patch of {name} does not apply to its start: {applied.stderr[-500:]}")
        return {name: await _read(sandbox, f"{workdir}/{name}") for name in test_files(patch)}
    finally:
        await sandbox.destroy()


async def _read(sandbox: Sandbox, path: str) -> bytes | None:
    try:
        return await sandbox.read_file(path, max_bytes=_MAX_FILE)
    except PathRefused as refusal:
        if refusal.reason == "ENOENT":
            return None
        raise


async def _judged(
    backend: Backend,
    state: SandboxSnapshot,
    prepared: Prepared,
    tests: dict[str, bytes | None],
    rules: int,
    timeout_s: float,
) -> tuple[CommandResult, Resolution, str]:
    fork = await backend.restore(SandboxSnapshot(ref=state.ref), limits=GRADING_LIMITS)
    try:
        names = "".join(f"./{name}\0" for name in tests)
        remove = f"cd {prepared.workdir} && xargs -0 -r rm -rf --"
        await fork.run(remove, stdin=names.encode("utf-8", "surrogateescape"), clean=True)
        for name, content in tests.items():
            if content is not None:
                try:
                    await fork.write_file(f"{prepared.workdir}/{name}", content)
                except PathRefused:
                    pass  # the agent's tree stands in the way of its tests: they are absent, which is a failure
        run = await fork.run(
            f"cd {prepared.workdir} && {{ {prepared.test_command}\n}} 2>&1",
            clean=True,
            env=prepared.env,
            timeout_s=timeout_s,
        )
    finally:
        await fork.destroy()
    log = compose_log(run.stdout, run.exit_code)
    return run, judge(prepared.instance, log, rules=rules, runner=prepared.recipe.runner), log

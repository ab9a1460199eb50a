"""Attempts on an instance of SWE-bench's form."""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence

from errata_environment.grading.results import NoVerdict
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, Limits, SandboxSnapshot
from swe_bench_lite_env.dataset import Instance
from swe_bench_lite_env.rules.directives import test_files
from swe_bench_lite_env.rules.helpers import ROOTS
from swe_bench_lite_env.rules.log_parsers import parser_name
from swe_bench_lite_env.server.grading import gold, grade
from swe_bench_lite_env.server.prepare.store import WORKDIR, Prepared

from . import honest
from .adaptive import ADAPTIVE
from .attempt import HONEST, Attempt
from .playing import Verdict, left
from .repositories import ATTEMPTS

LIMITS = Limits(memory_bytes=2 * 1024**3, pids=256, disk_bytes=1024**3, inodes=100_000, file_size_bytes=1024**3)
_LEAST_LIMIT_S = 10.0
_LINES = {"django": "{} ... ok", "sympy": "{} ok"}
"""What a runner prints of a passed test; all others print pytest's line."""


class InstanceTarget:
    """An instance, whose start ``prepared`` makes.

    Args:
        backend: Backend that makes the sandboxes.
        name: Id of the instance.
        prepared: Function that makes or finds the instance's start.
        rules: Version of the benchmark's rules, 5 or 4.
        timeout_s: Time limit of a run of the tests, seconds. Attempts have five times what the gold patch took, at most
            this.
    """

    def __init__(
        self, backend: Backend, name: str, prepared: Callable[[], Awaitable[Prepared]], *, rules: int, timeout_s: float
    ) -> None:
        self.name = name
        self._backend = backend
        self._prepared = prepared
        self._rules = rules
        self._timeout_s = timeout_s
        self._limit_s = timeout_s
        self._start: Prepared | None = None
        self._solved: SandboxSnapshot | None = None

    async def made(self) -> tuple[Sequence[Attempt], Sequence[Attempt]]:
        """Build the instance; see `playing.Target`."""
        start = self._start = await self._prepared()
        try:
            self._solved = await gold(self._backend, start)
        except NoVerdict as error:
            raise EnvironmentFailed(f"{error}: `errata swe validate` says more") from error
        values = values_of(start.instance, start.recipe.runner, await self._packages(start), start.workdir)
        return on(self.name, values)

    async def played(self, attempt: Attempt) -> Verdict:
        """Grade by the rules of the benchmark and Errata's own check; see `playing.Target`."""
        start = self._start
        assert start is not None and self._solved is not None
        is_honest = attempt.kind == HONEST
        state = await left(self._backend, self._solved if is_honest else start.snapshot, start.workdir, attempt, LIMITS)
        timeout_s = self._timeout_s if is_honest else self._limit_s
        found = await grade(self._backend, state, start, rules=self._rules, timeout_s=timeout_s)
        if is_honest:
            self._limit_s = min(self._timeout_s, max(_LEAST_LIMIT_S, 5 * found.tests_s))
        said = "; ".join(found.tampering) or found.resolution.invalid or ""
        return Verdict(found.resolved, found.reward, said)

    async def _packages(self, start: Prepared) -> frozenset[str]:
        """Return which directories with code of the repair are packages."""
        places = sorted({posixpath.dirname(path) or "." for path in code_of(start.instance)})
        sandbox = await self._backend.restore(start.snapshot, limits=LIMITS)
        try:
            tested = " ".join(map(shlex.quote, places))
            command = f'cd {start.workdir}; for d in {tested}; do [ -f "$d/__init__.py" ] && echo "$d"; done; true'
            return frozenset((await sandbox.run(command, clean=True)).stdout.splitlines())
        finally:
            await sandbox.destroy()


def on(target: str, values: Mapping[str, str]) -> tuple[Sequence[Attempt], Sequence[Attempt]]:
    """Return the attempts and the honest work that an instance with these values has."""
    attempts = [attempt.on(target, values) for attempt in (*ATTEMPTS, *ADAPTIVE)]
    work = [attempt.on(target, values) for attempt in honest.IN_REPOSITORIES]
    return [one for one in attempts if one is not None], [one for one in work if one is not None]


def code_of(instance: Instance) -> list[str]:
    """Return the modules that the gold patch changes, in its order."""
    return [path for path in test_files(instance.patch) if path.endswith(".py") and "test" not in path.lower()]


def values_of(instance: Instance, runner: str, packages: frozenset[str], workdir: str = WORKDIR) -> dict[str, str]:
    """Return what stands for ``@NAME@`` in attempts on an instance.

    Args:
        instance: The instance.
        runner: The runner that its recipe names.
        packages: Directories of the gold patch that are packages.
        workdir: Root of the repository.
    """
    hidden, visible = (
        list(dict.fromkeys(map(function_of, ids))) for ids in (instance.fail_to_pass, instance.pass_to_pass)
    )
    line = _LINES.get(parser_name(instance.repo, instance.log_parser, runner), "PASSED {}")
    lines = [line.format(test) for test in (*instance.fail_to_pass, *instance.pass_to_pass)]
    values = {
        "WORKDIR": workdir,
        "HIDDEN": repr(tuple(hidden)),
        "VISIBLE": repr(tuple(visible)),
        "LINES": json.dumps(lines),
        "DESELECT": " and ".join(f"not {name}" for name in hidden if name.isidentifier()),
    }
    if visible and visible[0].isidentifier():
        values["SEEN"] = visible[0]
    files = [path for path in test_files(instance.test_patch) if path.endswith(".py")]
    if files:
        values |= {
            "TESTS": posixpath.dirname(files[0]) or ".",
            "TESTFILE": files[0],
            "TESTSTEM": files[0].removesuffix(".py"),
            "TESTFILES": shlex.join(files),
        }
    code = next(iter(code_of(instance)), None)
    if code is not None:
        directory = posixpath.dirname(code)
        root = next((root for root in ROOTS if root and code.startswith(root)), "")
        package = f"{directory}/__init__.py" if (directory or ".") in packages else code
        module = package.removeprefix(root).removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        values |= {"CODE": code, "PACKAGE": package, "MODULE": module, "ROOT": root.rstrip("/") or "."}
        if package != code:
            values["DIR"] = directory
    return values


def function_of(test: str) -> str:
    """Return the name of a test's function: ``test_a`` of ``tests/x.py::A::test_a[1]`` and ``test_a (x.A)``."""
    return re.split(r"[\[\s(]", test.split("::")[-1], maxsplit=1)[0]

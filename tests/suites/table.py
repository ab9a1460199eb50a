"""The table of suites."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("suites.toml")
DEFAULT = "fast"
"""Suite of a test without a mark of one."""
SANDBOX = "sandbox"
"""Suite of a test that is marked ``sandbox`` and has no mark of another suite."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What is run, and what its outcome depends on.

    Args:
        name: Name, which is also the mark of its tests, but with underscores for hyphens.
        tier: 0 to 4. A tier begins when all suites of the one before have passed. ``.ci/run`` skips suites of tiers 1
            to 3 while they are unchanged, and leaves those of tier 3 for its next run when its time is up. One of tier
            4 is run by ``make test-full`` only.
        about: One line for ``--list``.
        tests: Paths in which pytest collects the suite's tests; empty for a suite that is a command.
        command: Program and arguments of a suite that is no pytest run. ``{jobs}`` stands for the number of processes.
        select: Name of the suite whose tests are selected, if that is another one.
        ignore: Glob patterns of files and folders that are not collected, below the root of the repository.
        python: Interpreter that runs the tests.
        options: More arguments of pytest.
        environments: Names for ``scripts/environments.py``, which installs them before the suite.
        scripts: Commands that are run before the suite.
        engine: Name of the container engine that the tests need; empty if they need none. Suites with one name share
            what it has built. ``ERRATA_ENGINE`` names one that runs already.
        own_network: Whether the tests run in a network namespace of their own, where that is allowed. A browser drops
            its requests whenever an interface comes or goes, and the engines of suites beside add and remove some.
        openenv: Whether the suite runs code of OpenEnv's repository (``make openenv-source``).
        both: Whether the suite runs alone, on all cores; else it shares them with other suites.
        workers: Least number of processes for the suite's tests; more than 1 if they wait for most of their time.
        uses: Paths in the repository that the outcome depends on, or parts of files (`keys.objects`), beside those of
            all suites and the tests.
        recipes: Names of the trainer adapter's recipes that the outcome depends on; empty for all, where ``uses`` has
            the trainer adapter.
        shared: Paths of ``../shared`` that are read.
        versions: Commands whose output is part of the key.
        skips: Patterns of reasons for which tests of the suite may be skipped in ``.ci/run``.
        timeout_s: Seconds after which one command of the suite is ended.
    """

    name: str
    tier: int
    about: str
    tests: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    select: str = ""
    ignore: tuple[str, ...] = ()
    python: str = ".cache/venv/bin/python"
    options: tuple[str, ...] = ()
    environments: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    engine: str = ""
    own_network: bool = False
    openenv: bool = False
    both: bool = False
    workers: int = 1
    uses: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()
    timeout_s: float = 3000.0

    @property
    def keyed(self) -> bool:
        """Whether the suite has a key, and is skipped while that is the key of a recorded pass."""
        return self.tier in (1, 2, 3)

    @property
    def may_wait(self) -> bool:
        """Whether the suite may be left for the next run when the time of this one is up."""
        return self.tier == 3

    @property
    def mark(self) -> str:
        """Mark of the suite's tests."""
        return self.name.replace("-", "_")

    @property
    def how(self) -> str:
        """What is run, for the key: fields that are not as by default, without those of inputs and texts."""
        left = ("tier", "about", "uses", "recipes", "shared", "versions")
        chosen = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left}
        default = {one.name: one.default for one in fields(self)}
        return repr({name: value for name, value in chosen.items() if value != default[name]})

    @property
    def inputs(self) -> tuple[str, ...]:
        """Paths in the repository that the outcome depends on, without those of all suites."""
        alone = ("tests", ".")  # a file directly below tests/ has no room of its own
        files = {path for path in self.tests if path.endswith(".py") and str(Path(path).parent) not in alone}
        rooms = (str(Path(path).parent) if path in files else path for path in self.tests)
        return tuple(sorted({*rooms, *self.uses}))


def load(file: Path = FILE) -> tuple[tuple[str, ...], dict[str, Suite]]:
    """Read the table. A suite takes the fields that it lacks from the one that it names with ``like``.

    Returns:
        The paths that every key has, and the suites by name, in the order in which they are started.

    Raises:
        ValueError: A suite has neither tests nor a command, or both; or it does not say what it uses.
        TypeError: A suite has a field that is not known, or lacks one.
    """
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    common = tuple(table.pop("common")["uses"])
    suites = {}
    for name, own in table.items():
        whole = own if "like" not in own else table[own["like"]] | own
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in whole.items()}
        given.pop("like", None)
        suite = Suite(name=name, **given)
        if bool(suite.tests) == bool(suite.command):
            raise ValueError(f"suite {name} needs either tests or a command")
        if suite.keyed and not suite.uses:
            raise ValueError(f"suite {name} needs what its outcome depends on: uses")
        suites[name] = suite
    return common, suites


def marks() -> dict[str, tuple[str, ...]]:
    """Return the marks by which a suite selects tests, each with the paths in which such tests are collected."""
    suites = load()[1].values()
    marked = [one for one in suites if one.tests and not one.select and one.name != DEFAULT]
    return {
        suite.mark: tuple(path for one in suites if suite.name in (one.name, one.select) for path in one.tests)
        for suite in marked
    }

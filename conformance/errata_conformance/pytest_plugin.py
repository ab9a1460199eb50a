"""A pytest plugin: ``pytest --conformance URL`` runs one test for each check.

The fixture ``conformance`` checks a server that a test has started::

    def test_my_server(conformance, my_server_url):
        assert conformance(my_server_url, probe="tally").broken == []
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Report:
    """The result of a run.

    Args:
        results: The results of all checks.
        broken: Texts of the statements that are broken, MUST and SHOULD, in the order of the checks.
    """

    results: list[Any]
    broken: list[str]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("conformance", "conformance to the statements R-014, R-015 and R-016")
    group.addoption(
        "--conformance", metavar="URL", help="hold this server against the statements, one test for each check"
    )
    group.addoption("--conformance-probe", metavar="NAME", help="actions for its environment: a name or a JSON file")
    group.addoption("--conformance-rfc", nargs="+", default=["014", "015", "016"], help="only R-NNN of these numbers")
    group.addoption("--conformance-token", metavar="TOKEN", help="bearer token of the server")


def _target(url: str, probe: str | None, token: str | None = None) -> Any:
    from .server_side.probe import KNOWN, Probe
    from .server_side.run import prepared
    from .server_side.target import Target

    given = Probe() if probe is None or probe in KNOWN else Probe.read(Path(probe))
    target = Target(url, given, token)
    asyncio.run(prepared(target, probe if probe in KNOWN else None))
    return target


class CheckItem(pytest.Item):
    """One check as a test."""

    def __init__(self, *, check: Any, target: Any, **more: Any) -> None:
        super().__init__(**more)
        self.check, self.target = check, target

    def runtest(self) -> None:
        """Run the check."""
        from .results import Outcome
        from .server_side.run import run

        (result,) = asyncio.run(run(self.target, [self.check]))
        if result.outcome in (Outcome.FAILED, Outcome.BLOCKED):
            by = f" (because of {result.blocked_by})" if result.blocked_by else ""
            pytest.fail(f"{result.statement}{by}: {result.detail}", pytrace=False)
        if result.outcome is not Outcome.PASSED:
            pytest.skip(f"{result.outcome.value}: {result.detail}")

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the location of the test, for pytest's reports."""
        return self.path, None, f"{self.check.statement}: {self.check.name}"


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the checks of ``--conformance``."""
    url = config.getoption("--conformance")
    if not url:
        return
    from .server_side.run import selected
    from .server_side.target import SeveralEnvironments

    try:
        target = _target(url, config.getoption("--conformance-probe"), config.getoption("--conformance-token"))
    except SeveralEnvironments as error:
        raise pytest.UsageError(f"--conformance: {url}: {error}") from None
    except OSError as error:
        raise pytest.UsageError(f"--conformance: {url} does not answer: {error}") from None
    for check in selected(config.getoption("--conformance-rfc"), None):
        if not check.body.__module__.endswith("check_faults"):
            name = f"{check.statement}[{check.name}]"
            items.append(CheckItem.from_parent(session, name=name, check=check, target=target))


@pytest.fixture
def conformance() -> Iterator[Callable[..., Report]]:
    """Return a function (url, probe=None, rfcs=…, token=None) -> `Report` that checks a server."""
    from .report import broken
    from .server_side.run import run, selected

    def held(
        url: str, probe: str | None = None, rfcs: tuple[str, ...] = ("014", "015", "016"), token: str | None = None
    ) -> Report:
        target = _target(url, probe, token)
        checks = [one for one in selected(rfcs, None) if not one.body.__module__.endswith("check_faults")]
        results = asyncio.run(run(target, checks))
        return Report(results, [f"{one.statement}: {one.detail}" for one in broken(results, strict=True)])

    yield held

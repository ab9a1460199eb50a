"""Recovery classes are asked, not compared (`errata_server.recovery`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_protocol.environment import Recovery
from errata_server.recovery import NONE, REEXECUTE, SNAPSHOT, RecoveryClass, recovery_class

SERVER = Path(__file__).parents[2] / "server" / "errata_server"
NAMES = {"recovery", "NONE", "SNAPSHOT", "REEXECUTE", Recovery.REEXECUTE.value}
"""Not ``snapshot`` and ``none`` in lower case, which are words of other things too."""


def comparisons(source: str) -> Iterator[int]:
    """Yield the lines that compare something with a recovery class or its name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(map(named, (node.left, *node.comparators))):
            yield node.lineno
        if isinstance(node, ast.Match) and named(node.subject):
            yield node.lineno


def named(side: ast.expr) -> bool:
    """Return whether one side of a comparison is a recovery class, its name, or a collection with one."""
    if isinstance(side, ast.Tuple | ast.List | ast.Set):
        return any(map(named, side.elts))
    if isinstance(side, ast.Attribute) and side.attr in ("name", "value"):
        return named(side.value)
    name = getattr(side, "id", None) or getattr(side, "attr", None) or getattr(side, "value", None)
    return isinstance(name, str) and name in NAMES


def test_no_module_compares_recovery_classes() -> None:
    found = {}
    for path in sorted(SERVER.rglob("*.py")):
        if path != SERVER / "recovery.py" and (lines := sorted(set(comparisons(path.read_text())))):
            found[path.relative_to(SERVER).as_posix()] = lines
    assert found == {}


@pytest.mark.parametrize(
    "line", ["if host.recovery is NONE: pass", "x = Recovery.SNAPSHOT == y", "z = recovery in ('reexecute',)"]
)
def test_a_comparison_is_found(line: str) -> None:
    assert list(comparisons(line))


@pytest.mark.parametrize(
    ("recovery", "forks", "asked"), [(SNAPSHOT, True, "snapshot"), (REEXECUTE, True, "reexecution"), (NONE, False, "")]
)
async def test_each_class_restores_in_its_own_way(recovery: RecoveryClass, forks: bool, asked: str) -> None:
    class Ways:
        asked = ""

        async def from_snapshot(self) -> bool:
            self.asked += "snapshot"
            return True

        async def by_reexecution(self) -> bool:
            self.asked += "reexecution"
            return True

    ways = Ways()
    assert await recovery.restore(ways) is forks
    assert ways.asked == asked
    assert recovery.can_fork is forks and recovery.survives_restart is forks
    assert recovery_class(recovery.name) is recovery

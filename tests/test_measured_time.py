"""No test fails because the machine is slow: none asserts that measured time is less than something.

What a test claims of speed is counted (`tests.counted_work`) or told in virtual time. A wait for something that has no
event of its own gives up after `PATIENCE_S` or more; a deadline of the product is a multiple of
`tests.machine_speed.SLOWDOWN`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}
TIMES = {"duration_s", "elapsed_s", "took_s"}
"""Attributes in which the product says how long something took."""
MENTIONS = re.compile(rf"\b(?:{'|'.join(sorted(CLOCKS | TIMES))})\b")
"""What the text of a module has somewhere if it measures time at all."""
PATIENCE_S = 60.0

ALLOWED = {
    ("sandbox/test_namespace.py", "until"): "a wait that gives up after its `timeout_s`, a minute by default",
    ("sandbox/test_uids.py", "until"): "a wait that gives up after its `timeout_s`, a minute by default",
    ("server/test_long_messages.py", "test_a_socket_waits_after_long_messages_only"): "virtual",
    ("server/test_long_messages.py", "test_senders_that_wait_share_the_rate"): "virtual",
    ("server/test_session_times.py", "test_a_step_past_the_deadline_is_rolled_back_after_exactly_that_time"): "virtual",
}
"""Functions that may, by file and name, and why."""


class _Measured:
    """Finds assertions in one function that bound measured time.

    Args:
        function: The function; those within it are visited with it.
        known: What functions of the module return that measure time, by their names.
    """

    def __init__(self, function: ast.AST, known: dict[str, ast.expr]) -> None:
        self._names = dict(known)
        self._returned: dict[str, ast.expr] = {}
        self.found: list[ast.Compare] = []
        nodes = list(ast.walk(function))
        for _ in range(3):  # names assigned from names
            for node in nodes:
                self._assigned(node)
        for node in nodes:
            if isinstance(node, ast.Assert):
                for compared in ast.walk(node.test):
                    if isinstance(compared, ast.Compare) and self._bounds(compared):
                        self.found.append(compared)

    @property
    def returned(self) -> dict[str, ast.expr]:
        """What the function and those within it return, if that is measured time."""
        return self._returned

    def _assigned(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            targets, value = [node.target], node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("append", "add")
            and node.args
        ):
            targets, value = [node.func.value], node.args[0]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
            for value in returned:
                if self._measures(value):
                    self._names[node.name] = self._returned[node.name] = value
            return
        else:
            return
        if self._measures(value):
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        self._names.setdefault(name.id, value)

    def _measures(self, value: ast.expr) -> bool:
        return any(
            _reads_clock(node)
            or (isinstance(node, ast.Name) and node.id in self._names)
            or (isinstance(node, ast.Attribute) and node.attr in TIMES)
            for node in ast.walk(value)
        )

    def _bounds(self, compared: ast.Compare) -> bool:
        sides = [compared.left, *compared.comparators]
        for left, operator, right in zip(sides, compared.ops, sides[1:], strict=False):
            small, large = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
            ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            if ordered and self._measures(small) and not self._is_patient(large):
                return True
        return False

    def _is_patient(self, bound: ast.expr) -> bool:
        """Return whether a bound grows with the machine's slowness, or is at least `PATIENCE_S` after a moment."""
        if any(isinstance(node, ast.Name) and node.id == "SLOWDOWN" for node in ast.walk(bound)):
            return True
        value = self._names.get(bound.id) if isinstance(bound, ast.Name) else bound
        return (
            isinstance(value, ast.BinOp)
            and isinstance(value.op, ast.Add)
            and _reads_clock(value.left)
            and isinstance(value.right, ast.Constant)
            and isinstance(value.right.value, int | float)
            and value.right.value >= PATIENCE_S
        )


def _reads_clock(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        of = ast.unparse(node.func.value)
        return node.func.attr in CLOCKS and (of == "time" or "loop" in of)
    return isinstance(node.func, ast.Name) and node.func.id in CLOCKS - {"time"}


def bounded(text: str) -> Iterator[tuple[str, int]]:
    """Yield the function and the line of each assertion in a module that bounds measured time."""
    if not MENTIONS.search(text):
        return
    functions = [each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    known: dict[str, ast.expr] = {}
    for function in functions:
        known |= _Measured(function, {}).returned
    seen = set()
    for function in functions:
        for compared in _Measured(function, known).found:
            if compared not in seen:
                seen.add(compared)
                yield function.name, compared.lineno


def test_no_assertion_bounds_measured_time() -> None:
    found = {
        (path.relative_to(TESTS).as_posix(), name): line
        for path in sorted(TESTS.rglob("*.py"))
        for name, line in bounded(path.read_text())
    }
    assert [f"tests/{file}:{line}" for (file, name), line in found.items() if (file, name) not in ALLOWED] == []
    assert sorted(set(ALLOWED) - set(found)) == [], "allowed, and no longer there"


@pytest.mark.parametrize(
    "body",
    [
        "began = time.monotonic()\nassert time.monotonic() - began < 5",
        "began = time.monotonic()\nassert 5 > time.monotonic() - began",
        "began = time.perf_counter()\ntook_s = time.perf_counter() - began\nassert 0.1 < took_s <= 5, took_s",
        "took = []\ntook.append(time.process_time() - began)\nassert max(took) < 1",
        "loop = asyncio.get_running_loop()\nassert loop.time() - began < 1",
        "assert asyncio.get_running_loop().time() - began < 1",
        "def seconds():\n        return time.thread_time() - began\nassert any(seconds() < 1 for _ in range(5))",
        "limit = time.monotonic() + 30\nassert time.monotonic() < limit",
        "assert result.duration_s < 5.0",
        "assert x == 1 and time.monotonic() - began < 9",
    ],
)
def test_a_bound_of_measured_time_is_found(body: str) -> None:
    text = "def test_it():\n    " + body.replace("\n", "\n    ")
    assert [name for name, _ in bounded(text)] == ["test_it"]


def test_a_bound_of_what_another_function_measured_is_found() -> None:
    text = (
        "async def times():\n    return loop.time() - begun\nasync def test_it():\n    assert max(await times()) < 2\n"
    )
    assert list(bounded(text)) == [("test_it", 4)]


@pytest.mark.parametrize(
    "body",
    [
        "assert time.monotonic() - began > 0.1",
        "assert 0.2 <= result.duration_s",
        "limit = time.monotonic() + 60.0\nassert time.monotonic() < limit",
        "assert time.monotonic() - began < 2.0 * SLOWDOWN",
        "assert seconds < 60",
    ],
)
def test_a_least_time_and_a_patient_wait_are_no_such_bounds(body: str) -> None:
    assert list(bounded("def test_it():\n    " + body.replace("\n", "\n    "))) == []


def test_no_test_counts_as_hanging_sooner_than_others() -> None:
    """What all have, ten minutes, is for tests that hang; a shorter limit is one of the machine's speed."""
    all_have = tomllib.loads((TESTS.parent / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    limit = re.compile(r"mark\.timeout\((?:max\()?([0-9.]+)(?=[),]| \+)")
    sooner = [
        f"{path.relative_to(TESTS)}: {seconds} s"
        for path in TESTS.rglob("*.py")
        if path.name != "test_suites.py"  # it runs a test that hangs
        for seconds in limit.findall(path.read_text("utf-8"))
        if float(seconds) < all_have["timeout"]
    ]
    assert not sooner, "leave the mark out, or give more"

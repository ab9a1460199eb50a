"""swe_bench_lite behind a real server, with every byte that leaves it kept; an instance full of secrets."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from errata_server.app import create_app
from errata_server.settings import Settings
from swe_bench_lite_env import SPEC, SweAction, SweObservation, SweState
from swe_bench_lite_env.dataset import Dataset, read_row
from swe_bench_lite_env.recipes import Recipes, read_recipe
from swe_bench_lite_env.server import offered
from swe_bench_lite_env.server.environment import SweBenchLiteEnvironment
from tests.client.loopback import served

SECRET = "errata-examples__secret-1"
TOKENS = {
    "patch": "5ec7e7a0patch",
    "test_patch": "5ec7e7a1testpatch",
    "FAIL_TO_PASS": "5ec7e7a2failtopass",
    "PASS_TO_PASS": "5ec7e7a3passtopass",
    "hints_text": "5ec7e7a4hints",
}
"""What only these columns of `SECRET` hold."""

_SOURCE = {
    "src/adder.py": "def add(a, b):\n    return a - b\n",
    "tests/test_adder.py": "from adder import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n",
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["src"]\n',
}
GOLD = """diff --git a/src/adder.py b/src/adder.py
--- a/src/adder.py
+++ b/src/adder.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b{mark}
"""


def application(data_dir: Path | None, *, sandbox: Literal["namespace", "docker"] = "namespace", **more: Any) -> Any:
    """Return the environment as an application on real sandboxes; ``more`` goes to `create_app`."""
    return create_app(
        SweBenchLiteEnvironment,
        SweAction,
        SweObservation,
        env_name="swe_bench_lite",
        max_concurrent_envs=16,
        state_cls=SweState,
        settings=Settings(data_dir=data_dir, sandbox=sandbox),
        spec=SPEC,
        **more,
    )


class Recorded:
    """An ASGI application that keeps whatever the one inside sends: bodies, headers and messages of sockets."""

    def __init__(self, inside: Any) -> None:
        self._inside = inside
        self.sent: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        async def kept(message: Any) -> None:
            for value in (message.get("body"), message.get("bytes"), message.get("text"), message.get("reason")):
                if value:
                    self.sent.append(value.encode() if isinstance(value, str) else bytes(value))
            self.sent.extend(name + value for name, value in message.get("headers") or ())
            await send(message)

        await self._inside(scope, receive, kept)


@contextmanager
def serving(data_dir: Path | None = None) -> Iterator[tuple[str, Recorded]]:
    """Yield the URL of a server, and what it sends."""
    recorded = Recorded(application(data_dir))
    with served(recorded) as url:
        yield url, recorded


def offer_secret(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer `SECRET` besides the bundled instances, as one of them."""
    source = directory / "source"
    for name, text in _SOURCE.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    tests = "".join(
        f"+\n+\n+def test_{name}():\n+    assert add({a}, {b}) == {a + b}\n"
        for name, a, b in ((TOKENS["FAIL_TO_PASS"], 1, 2), (TOKENS["PASS_TO_PASS"], 3, 0))
    )
    row = {
        "instance_id": SECRET,
        "repo": "errata-examples/secret",
        "problem_statement": "add(1, 2) is -1.",
        "patch": GOLD.format(mark=f"  # {TOKENS['patch']}"),
        "test_patch": "diff --git a/tests/test_adder.py b/tests/test_adder.py\n--- a/tests/test_adder.py\n"
        "+++ b/tests/test_adder.py\n@@ -3,3 +3,12 @@\n \n def test_zero():\n     assert add(0, 0) == 0\n"
        f"+# {TOKENS['test_patch']}\n{tests}",
        "hints_text": f"Look at {TOKENS['hints_text']}.",
        "FAIL_TO_PASS": json.dumps([f"tests/test_adder.py::test_{TOKENS['FAIL_TO_PASS']}"]),
        "PASS_TO_PASS": json.dumps([f"tests/test_adder.py::test_{TOKENS['PASS_TO_PASS']}"]),
    }
    recipe = {
        "instance_id": SECRET,
        "source": {"kind": "directory", "path": str(source)},
        "python": "base",
        "test_command": "pytest -rA tests/test_adder.py",
    }
    own, recipes = offered.bundled()
    both = (
        Dataset([*own, read_row(row, split=offered.BUNDLED)], own.name),
        Recipes({**recipes, SECRET: read_recipe(recipe)}),
    )
    monkeypatch.setattr(offered, "bundled", lambda: both)
    offered._offered.cache_clear()
    monkeypatch.setenv("ERRATA_SWE_STORE", str(directory / "store"))

"""Processes of both generations of OpenEnv, and of ours, for the tests of this room.

They need the virtual environments of ``scripts/environments.py`` (``make test-interop`` makes them) and fail
without.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from errata_server.process import ServerProcess
from tests.hangs import HANGS_S
from tests.machine_speed import SLOWDOWN

ROOT = Path(__file__).parents[2]
FOREIGN = Path(__file__).parent / "foreign"
GENERATIONS = ("0.3.0", "0.10.0")
REFERENCE = "0.10.0"
"""Whose server says what is right: 0.3 has the same wire but for metadata, attach and the Task API."""
START_S = 90.0 * SLOWDOWN

OURS = {"terminal": "terminal"} | {
    name: f"tests.interop.specs:{name.upper()}" for name in ("ledger", "counter", "echo")
}
"""What ``errata serve`` is given, by name."""
WORLD_OF = {
    "ledger": "ledger",
    "ledger_sync": "ledger",
    "counter": "counter",
    "echo": "echo",
    "echo_sync": "echo",
    "echo_http": "echo",
    "attach": "ledger",
    "terminal": "terminal",
    "terminal_sync": "terminal",
}
"""The environment that each scenario of ``foreign/drive.py`` plays."""
DOORS = ("root", "mounted")
"""Alone at the root of its server; under its name on one server of all."""

Record = dict[str, Any]
Records = dict[tuple[str, str, str], Record]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this room. The first one waits for all servers and clients."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.interop)


def foreign_python(generation: str) -> str:
    """Return the interpreter that has ``generation`` installed."""
    python = ROOT / ".cache" / f"interop-{generation}" / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make test-interop`, which makes it"
    return str(python)


def foreign_environment() -> dict[str, str]:
    """Return this process's environment without what would lead another Python to our packages."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "ERRATA_"))}


def drive(generation: str, jobs: list[tuple[str, str]]) -> dict[tuple[str, str], Record]:
    """Run scenarios of ``foreign/drive.py`` with that generation's clients, in one process of its own Python.

    Args:
        generation: Whose clients.
        jobs: Scenario and URL.

    Returns:
        The record of each job, by scenario and URL.
    """
    command = [foreign_python(generation), str(FOREIGN / "drive.py"), json.dumps(jobs)]
    done = subprocess.run(
        command, cwd=FOREIGN, env=foreign_environment(), capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["openenv"].endswith(f" {generation}"), answer["openenv"]
    return dict(zip(jobs, answer["records"], strict=True))


def through(door: str, ours: dict[str, str], name: str) -> str:
    """Return the address of the environment ``name`` through one of its doors."""
    return ours[name] if door == "root" else f"{ours['all']}/{name}"


@contextmanager
def stock_server(generation: str) -> Iterator[dict[str, str]]:
    """Serve the worlds on stock OpenEnv of that generation; yield their URLs by name."""
    process = subprocess.Popen(
        [foreign_python(generation), str(FOREIGN / "stock_server.py")],
        cwd=FOREIGN,
        env=foreign_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    watchdog = threading.Timer(START_S, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        assert line, f"stock OpenEnv {generation} did not start"
        yield json.loads(line)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()


@contextmanager
def our_server(data_dir: Path, *targets: str) -> Iterator[str]:
    """Run ``errata serve TARGETS``; yield its URL."""
    with ServerProcess(targets[0], data_dir, *targets[1:], start_s=START_S) as server:
        yield server.url


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What every server's context manager yields, by name. They start at once: each takes seconds of imports."""
    managers: dict[str, AbstractContextManager[Any]] = {f"stock {g}": stock_server(g) for g in GENERATIONS}
    managers |= {name: our_server(tmp_path_factory.mktemp(name), target) for name, target in OURS.items()}
    managers["all"] = our_server(tmp_path_factory.mktemp("all"), *OURS.values())
    with ExitStack() as running:
        with ThreadPoolExecutor() as threads:
            started = {name: threads.submit(running.enter_context, made) for name, made in managers.items()}
        yield {name: future.result() for name, future in started.items()}


@pytest.fixture(scope="session")
def stock(servers: dict[str, Any]) -> dict[str, dict[str, str]]:
    """URLs of stock servers: generation, then world."""
    return {generation: servers[f"stock {generation}"] for generation in GENERATIONS}


@pytest.fixture(scope="session")
def ours(servers: dict[str, Any]) -> dict[str, str]:
    """URLs of our servers by environment, each a process as ``errata serve`` runs it, and of the one of ``all``."""
    return {name: servers[name] for name in (*OURS, "all")}


@pytest.fixture(scope="session")
def records(ours: dict[str, str], stock: dict[str, dict[str, str]]) -> Records:
    """What each generation's clients saw: by generation, door (``stock`` is the reference's server) and scenario."""

    def of(generation: str) -> Records:
        urls = {("stock", s): stock[REFERENCE][world] for s, world in WORLD_OF.items() if world != "terminal"}
        urls |= {(d, s): through(d, ours, world) for s, world in WORLD_OF.items() for d in DOORS}
        driven = drive(generation, [(s, url) for (_, s), url in urls.items()])
        return {(generation, door, s): driven[s, url] for (door, s), url in urls.items()}

    with ThreadPoolExecutor() as threads:
        return {key: record for found in threads.map(of, GENERATIONS) for key, record in found.items()}

"""Nine of OpenEnv's own environments, unchanged, each packed into a source archive and installed from it.

Their sources come from ``make openenv-source``; without them the tests that need one are skipped. What they import
beside our own dependencies is pinned in ``requirements/upstream-envs.lock`` and installed by
``scripts/environments.py``, into an environment that sees that of development too.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.hangs import HANGS_S

from ..openenv_source import ENVIRONMENTS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".cache" / "upstream-envs" / "bin" / "python"
VERDICTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "verdicts.json").read_text())
"""What ``errata probe`` says, by environment."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this room; a verdict takes five servers."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.upstream_envs)


class Installed:
    """The environments that could be installed.

    Args:
        directory: Where they were installed to, for ``PYTHONPATH``.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of a process that is to find them."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "ERRATA_"))}
        return {**kept, "PYTHONPATH": str(self._directory)}

    def command(self, *arguments: str, statuses: tuple[int, ...] = (0,)) -> str:
        """Run ``errata ARGUMENTS`` and return what it printed."""
        done = subprocess.run(
            [str(PYTHON), "-m", "errata_server.cli", *arguments],
            env=self.env,
            cwd=self._directory,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
        assert done.returncode in statuses, f"{done.returncode}: {done.stderr[-3000:]}"
        return done.stdout

    def probe(self, name: str, *options: str) -> dict[str, Any]:
        """Return the verdict on an environment."""
        printed = self.command("probe", name, "--json", *options, statuses=(0, 3, 4))
        return dict(json.loads(printed.splitlines()[-1]))


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """All of them, from archives of their sources."""
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make test-upstream-envs`, which makes it"
    archives, to = tmp_path_factory.mktemp("archives"), tmp_path_factory.mktemp("installed")
    for name in VERDICTS:
        with tarfile.open(archives / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(ENVIRONMENTS / name, name)
    # grid_world_env asks for Python 3.12 and runs on 3.11.
    options = "--quiet --disable-pip-version-check --no-deps --no-index --no-build-isolation --ignore-requires-python"
    command = [str(PYTHON), "-m", "pip", "install", *options.split(), "--target", str(to)]
    command += [str(archive) for archive in archives.iterdir()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return Installed(to)

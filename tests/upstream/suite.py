"""Runs OpenEnv's own server tests in a process of their own, on any server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.hangs import HANGS_S

from ..openenv_source import SOURCE, SUITE

HERE = Path(__file__).parent
FILES = ("test_production_mode_routes.py", "test_simulation_mode_preserves_api.py", "test_types_and_enums.py")
PRIVATE = ("test_idle_session_reaper_destroys_stale_sessions", "test_reaper_stop_cancels_task")
"""Tests of the first file's TestHTTPMCPSessionReaper, which look into private attributes of OpenEnv's class.

tests/server/test_doors.py and test_http_doors.py hold our server to the same: idle sessions end, and their timers end
with the server.
"""


def suite_outcomes(
    report: Path, *, target: str | None = None, python_path: Sequence[Path] = (), private: bool = True
) -> dict[str, str]:
    """Run the suite; return ``passed`` or ``skipped`` by test, which is named ``module.Class::function``.

    Args:
        report: Path of the JUnit report to write.
        target: Module that has a server implementation, for `suite_target`; None for OpenEnv's.
        python_path: Directories to search for modules before all others.
        private: Whether `PRIVATE` are run.

    Raises:
        AssertionError: A test failed or could not be collected. The message is what pytest printed, if long its end.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ERRATA_", "OPENENV_", "PYTEST_"))}
    paths = os.pathsep.join(map(str, [*python_path, HERE]))
    options = ["-p", "suite_target", "-p", "no:cacheprovider", "-c", str(HERE / "suite.ini"), "--rootdir", str(SOURCE)]
    options += ["-rs", f"--junitxml={report}"]
    if target is not None:
        options += ["--suite-target", target]
    if not private:
        reaper = f"tests/core/{FILES[0]}::TestHTTPMCPSessionReaper"
        options += [f"--deselect={reaper}::{test}" for test in PRIVATE]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(SUITE / file) for file in FILES)],
        cwd=report.parent,
        env=kept | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return {
        f"{case.get('classname')}::{case.get('name')}": case[0].tag if len(case) else "passed"
        for case in ElementTree.parse(report).iter("testcase")
    }
